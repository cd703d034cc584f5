"""Base classes and shared functions of the poolings that ``accelerate`` can fuse."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from sentence_transformers.base.modules.module import Module
from torch import Tensor
from torch.nn.functional import softplus
from transformers import AutoTokenizer

from tilefold._internal.sentence_transformers import check_sentence_transformers
from tilefold.ops import lsr_head, lsr_head_sparse

check_sentence_transformers()

__all__ = [
    "ACTIVATIONS",
    "STOCK_ACTIVATIONS",
    "STOCK_NAMES",
    "Features",
    "FusedPooling",
    "Head",
    "Options",
    "PoolingModule",
    "ScoreOptions",
    "SparseOptions",
    "TokenSelection",
    "activate",
    "autocast_applies",
    "select_tokens",
]

Features: TypeAlias = dict[str, Any]
# keyword arguments of a call
Options: TypeAlias = dict[str, Any]
Dtype: TypeAlias = torch.dtype

# arguments of ``load`` that locate a file
_LOCATION_ARGUMENTS = ("token", "cache_folder", "revision", "local_files_only")

# activation -> the activation that the operators apply, and whether log1p follows it
FUSED_ACTIVATIONS = {
    "log1p_relu": ("log1p_relu", False),
    "log1p_log1p_relu": ("log1p_log1p_relu", False),
    "relu": ("relu", False),
    "softplus": ("softplus", False),
    "log1p_softplus": ("softplus", True),
    "none": ("none", False),
}
ACTIVATIONS = tuple(FUSED_ACTIVATIONS)

# activation of SpladePooling of sentence-transformers -> the operator's name for it
STOCK_ACTIVATIONS = {"relu": "log1p_relu", "log1p_relu": "log1p_log1p_relu"}
# the other direction
STOCK_NAMES = {activation: stock for stock, activation in STOCK_ACTIVATIONS.items()}

# above this value softplus(x) equals x in fp64
_SOFTPLUS_THRESHOLD = 40.0


def activate(x: Tensor, name: str) -> Tensor:
    """Apply an activation elementwise.

    Args:
        x: logits of any shape.
        name: one of :data:`ACTIVATIONS`. It lists the steps from the outermost to the innermost:
            ``"log1p_log1p_relu"`` is ``log1p(log1p(relu(x)))``.
    """
    return _ACTIVATION_FUNCTIONS[name](x)


def _softplus(x: Tensor) -> Tensor:
    return softplus(x, threshold=_SOFTPLUS_THRESHOLD)


_ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "log1p_relu": lambda x: x.relu().log1p(),
    "log1p_log1p_relu": lambda x: x.relu().log1p().log1p(),
    "relu": Tensor.relu,
    "softplus": _softplus,
    "log1p_softplus": lambda x: _softplus(x).log1p(),
    "none": lambda x: x,
}


class Head(NamedTuple):
    """Operands of an LM head.

    Attributes:
        hidden: states, ``[B, S, D]`` or packed ``[T, D]``.
        weight: ``[V, D]``, a Tensor or a QuantizedWeight.
        bias: ``[V]`` or None.
    """

    hidden: Tensor
    weight: Any
    bias: Tensor | None


class SparseOptions(NamedTuple):
    """Which entries of a row are stored when a pooling returns CSR scores.

    Attributes:
        top_k: most entries per row, or None for all.
        min_weight: entries must be larger than this.
    """

    top_k: int | None
    min_weight: float


class ScoreOptions(NamedTuple):
    """Data type, implementation and layout of the scores that a pooling returns.

    Attributes:
        out_dtype: dtype of the scores; ``None`` for that of the operator's input, or autocast's.
        impl: implementation of the operator: ``"auto"``, ``"reference"``, ``"tiled"`` or
            ``"triton"``.
        sparse: which entries of CSR rows are stored; ``None`` for dense rows. A pooling that cannot
            compute CSR rows returns dense ones, which the caller prunes.
    """

    out_dtype: Dtype | None = None
    impl: str = "auto"
    sparse: SparseOptions | None = None


class FusedPooling(ABC):
    """A module that writes ``sentence_embedding``, and can do so without logits ``[B, S, V]``.

    ``accelerate`` finds such a module by this class and calls :meth:`fused_scores` in place of its
    ``forward``.

    Attributes:
        reads_logits: whether the module pools the logits of an LM head. ``accelerate`` then fuses
            the head with the pooling. For other modules it only changes the layout of the scores.
        embedding_dimension: V of a module that reads logits, or None until it is known.
    """

    reads_logits: bool = True
    embedding_dimension: int | None = None

    def forward(self, features: Features) -> Features:
        """Put ``sentence_embedding`` ``[B, V]`` into a copy of the features.

        Poolings of logits override this method.
        """
        features = dict(features)
        features["sentence_embedding"] = self.fused_scores(features, None, ScoreOptions())
        return features

    @classmethod
    def load_config(cls, model_name_or_path: str, subfolder: str = "", **location: Any) -> Options:
        """Read the options of a saved module from its JSON file.

        Args:
            model_name_or_path: the checkpoint.
            subfolder: folder of the module in the checkpoint.
            location: arguments of the download, such as ``revision``.

        Returns:
            The arguments of the constructor, by name.

        Raises:
            ValueError: if the file is missing, is not JSON, or has unknown options. A module
                without its saved options would silently have the defaults of its class.
        """
        module_class: Any = cls
        config_path = Path(subfolder, module_class.config_file_name)
        file_name = f"{model_name_or_path}: {config_path}"
        remedy = "Download the complete checkpoint."
        try:
            config = super().load_config(  # type: ignore[misc]
                model_name_or_path,
                subfolder=subfolder,
                **location,
            )
        except ValueError as error:
            message = f"{file_name} must be JSON, got an error: {error}. {remedy}"
            raise ValueError(message) from error
        if not config or not isinstance(config, dict):
            raise ValueError(
                f"{file_name} must have options of {cls.__name__}, got {config or 'none'}. "
                f"{remedy}",
            )
        unknown = sorted(set(config) - set(module_class.config_keys))
        if unknown:
            raise ValueError(
                f"{file_name} must have options of {cls.__name__}, got {', '.join(unknown)} of a "
                "newer release: pip install -U tilefold.",
            )
        return config

    @abstractmethod
    def fused_scores(
        self,
        features: Features,
        head: Head | None,
        score_options: ScoreOptions,
    ) -> Tensor:
        """Compute the scores of ``forward`` without storing the logits ``[B, S, V]``.

        Args:
            features: the input of the module. With a head, ``token_embeddings`` is not computed.
            head: states, weight and bias of the LM head whose logits are pooled; None for a module
                that reads no logits.
            score_options: data type, implementation and layout of the result.

        Returns:
            Scores ``[B, V]``, dense or CSR.
        """

    @property
    def quantizable(self) -> bool:
        """Whether the weight of the head may be in fp8."""
        return False

    def check_fusable(self) -> None:  # noqa: B027 - most poolings have nothing to refuse
        """Raise a ``ValueError`` if the fused operator cannot compute the scores of ``forward``."""


class PoolingModule(FusedPooling, Module):
    """A pooling that is saved as options in JSON, with weights if it has any."""

    def get_embedding_dimension(self) -> int | None:
        """Return V, or None before the first forward."""
        return self.embedding_dimension

    def save(
        self,
        output_path: str,
        *args: Any,
        safe_serialization: bool = True,
        **kwargs: Any,
    ) -> None:
        """Write the options and, if there are any, the weights.

        Args:
            output_path: folder of the module.
            args: ignored.
            safe_serialization: whether weights are written as safetensors.
            kwargs: ignored.
        """
        self.save_config(output_path)
        if self.state_dict():
            self.save_torch_weights(output_path, safe_serialization=safe_serialization)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> Any:
        """Load a saved module: its options, then its weights if it has any.

        Args:
            model_name_or_path: the checkpoint.
            subfolder: folder of the module in the checkpoint.
            kwargs: arguments of sentence-transformers, some of which locate files.
        """
        # The inherited method reads the options only.
        module = super().load(model_name_or_path, subfolder=subfolder, **kwargs)
        if module.state_dict():
            cls.load_torch_weights(
                model_name_or_path,
                subfolder=subfolder,
                **location_arguments(kwargs),
                model=module,
            )
        return module


def location_arguments(arguments: Options) -> Options:
    """Select the arguments of ``load`` that locate files."""
    return {name: arguments[name] for name in _LOCATION_ARGUMENTS if name in arguments}


def load_tokenizer(model_name_or_path: str, subfolder: str, location: Options) -> Any:
    """Load the tokenizer that a module has saved.

    Args:
        model_name_or_path: the checkpoint.
        subfolder: folder of the module in the checkpoint.
        location: arguments of the download, in the names of sentence-transformers: ``token``,
            ``cache_folder``, ``revision`` and ``local_files_only``.
    """
    arguments = dict(location)
    if "cache_folder" in arguments:
        # transformers has another name for it
        arguments["cache_dir"] = arguments.pop("cache_folder")
    return AutoTokenizer.from_pretrained(model_name_or_path, subfolder=subfolder, **arguments)


class TokenSelection(NamedTuple):
    """The tokens of a batch that are pooled.

    Attributes:
        keep: bool mask of these tokens, ``[B, S]`` or packed ``[T]``. None if the features are
            packed and every token is pooled.
        cu_seqlens: offsets ``[B + 1]`` of packed features, or None for padded ones.
    """

    keep: Tensor | None
    cu_seqlens: Tensor | None

    def select_packed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the packed values of the selected tokens.

        Args:
            tokens: a value for each token, ``[T, ...]``, packed text after text.

        Returns:
            The values ``[n_selected, ...]``, and the offsets ``[B + 1]`` of the texts in them.

        Raises:
            ValueError: if the features are padded.
        """
        if self.cu_seqlens is None:
            raise ValueError("features are padded; only packed ones have cu_seqlens.")
        if self.keep is None:
            return tokens, self.cu_seqlens
        # number of selected tokens before each position, [T + 1]
        n_selected_before = torch.cat(
            [
                self.cu_seqlens.new_zeros(1),
                self.keep.cumsum(0).to(self.cu_seqlens.dtype),
            ],
        )
        # An offset becomes the number of selected tokens before it.
        return tokens[self.keep], n_selected_before[self.cu_seqlens.long()]


def select_tokens(features: Features, ignore_ids: tuple[int, ...] = ()) -> TokenSelection:
    """Select the tokens of a batch that are pooled.

    A token is selected if it is attended to, is not in `ignore_ids`, and is nonzero in the pooling
    mask if there is one. An earlier module sets this mask to pool only a part of each text.

    Args:
        features: padded texts have an ``attention_mask`` ``[B, S]``, and packed ones the offsets
            ``cu_seq_lens_q`` ``[B + 1]``. Both may have a ``pooling_mask``. ``input_ids`` are read
            if there are `ignore_ids`.
        ignore_ids: token ids that are not pooled.

    Returns:
        The selection, whose ``keep`` is ``None`` if all tokens of packed texts are pooled.
    """
    cu_seqlens = features.get("cu_seq_lens_q")
    conditions = []
    if cu_seqlens is None:
        conditions.append(features["attention_mask"] != 0)
    if features.get("pooling_mask") is not None:
        conditions.append(features["pooling_mask"] != 0)
    if ignore_ids:
        ids = features["input_ids"]
        conditions.append(~torch.isin(ids, torch.tensor(ignore_ids, device=ids.device)))
    if cu_seqlens is not None:  # from [1, T] to [T]
        conditions = [condition.reshape(-1) for condition in conditions]
    keep = functools.reduce(torch.logical_and, conditions) if conditions else None
    return TokenSelection(keep, cu_seqlens)


def head_scores(
    head: Head,
    selection: TokenSelection,
    score_options: ScoreOptions,
    *,
    logit_scale: float = 1.0,
    **options: Any,
) -> Tensor:
    """Compute the pooled scores ``[B, V]`` of an LM head over the selected tokens.

    Args:
        head: operands of the head.
        selection: the tokens that are pooled.
        score_options: data type, implementation and layout of the result.
        logit_scale: factor on the logits, bias included.
        options: other arguments of :func:`tilefold.ops.lsr_head`, such as ``pooling``.
    """
    hidden, weight, bias = head
    mask, cu_seqlens = selection
    if cu_seqlens is not None:
        hidden, cu_seqlens = selection.select_packed(hidden)
        mask = None
    out_dtype = torch.float32 if autocast_applies(hidden) else score_options.out_dtype
    if bias is not None and logit_scale != 1:
        # the operator scales the product only
        bias = bias * logit_scale
    if score_options.sparse is not None:
        return lsr_head_sparse(
            hidden,
            weight,
            bias,
            attention_mask=mask,
            cu_seqlens=cu_seqlens,
            logit_scale=logit_scale,
            impl=score_options.impl,
            out_dtype=out_dtype,
            top_k=score_options.sparse.top_k,
            min_weight=score_options.sparse.min_weight,
            **options,
        )
    return lsr_head(
        hidden,
        weight,
        bias,
        attention_mask=mask,
        cu_seqlens=cu_seqlens,
        logit_scale=logit_scale,
        impl=score_options.impl,
        out_dtype=out_dtype,
        **options,
    )


def pass_hidden_states(hidden: Tensor) -> Tensor:
    """Return the input of an LM head unchanged.

    It replaces the forward of a head whose weight is applied later.
    """
    return hidden


def autocast_applies(tensor: Tensor) -> bool:
    """Return whether torch's autocast is enabled for ``tensor``; scores are then fp32."""
    device_type = tensor.device.type
    return (
        tensor.dtype != torch.float64
        and torch.amp.is_autocast_available(device_type)
        and torch.is_autocast_enabled(device_type)
    )
