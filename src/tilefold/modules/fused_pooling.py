"""Base classes of poolings that ``accelerate`` runs on hidden states, or to sparse rows, and what
they share.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from sentence_transformers.base.modules.module import Module
from torch import Tensor
from torch.nn.functional import softplus

from tilefold._internal.sentence_transformers import check_sentence_transformers
from tilefold.ops import lsr_head, lsr_head_sparse

check_sentence_transformers()

__all__ = [
    "ACTIVATIONS",
    "STOCK_ACTIVATIONS",
    "Features",
    "FusedPooling",
    "Head",
    "Options",
    "Places",
    "PoolingModule",
]
__all__ += ["SparseOptions", "Wanted", "activate", "autocasts", "places_of"]

Features: TypeAlias = dict[str, Any]
Options: TypeAlias = dict[str, Any]  # keywords of a call
Dtype: TypeAlias = torch.dtype
WHERE = (
    "token",
    "cache_folder",
    "revision",
    "local_files_only",
)  # arguments of ``load`` that say where a file lies
# by name what the operators apply, and how many log1p follow it
FUSED_ACTIVATIONS = {
    name: (name, 0) for name in ("log1p_relu", "log1p_log1p_relu", "relu", "softplus")
}
FUSED_ACTIVATIONS |= {"log1p_softplus": ("softplus", 1), "none": ("none", 0)}
ACTIVATIONS = tuple(FUSED_ACTIVATIONS)
STOCK_ACTIVATIONS = {
    "relu": "log1p_relu",
    "log1p_relu": "log1p_log1p_relu",
}  # SpladePooling's name -> the operator's
_LINEAR_FROM = 40.0  # beyond it softplus(x) and x differ by less than fp64 can tell


def activate(x: Tensor, name: str) -> Tensor:
    """Apply an activation elementwise; all are monotone."""
    if "softplus" in name:
        x = softplus(x, threshold=_LINEAR_FROM)
    elif name != "none":
        x = x.relu()
    for _ in range(name.count("log1p")):
        x = x.log1p()
    return x


class Head(NamedTuple):
    """The operands of an LM head: ``hidden`` ``[.., D]``, ``weight`` ``[V, D]``, ``bias`` ``[V]``
    or ``None``.
    """

    hidden: Tensor
    weight: Any  # Tensor or QuantizedWeight
    bias: Tensor | None


class SparseOptions(NamedTuple):
    """The entries kept of a row where poolings return CSR scores in place of dense ones."""

    top_k: int | None
    min_weight: float


class Wanted(NamedTuple):
    """How scores are returned: ``out_dtype`` and ``impl`` as of :func:`tilefold.ops.lsr_head`, and
    the form of rows.

    With ``sparse``, poolings return CSR rows under these options if they can; dense ones are pruned
    by who asked.
    """

    out_dtype: Dtype | None = None
    impl: str = "auto"
    sparse: SparseOptions | None = None


class FusedPooling(ABC):
    """A module that fills ``sentence_embedding`` and knows how to do so without ``[B, S, V]``.

    ``accelerate`` finds such a module by this class and calls :meth:`fused_scores` in place of its
    ``forward``.

    Attributes:
        reads_logits: whether it pools the logits of an LM head, which is then fused with it; False
            for modules that pool something else, and only return CSR rows where those are wanted.
        embedding_dimension: V, of modules that read logits; None until it is known.
    """

    reads_logits: bool = True
    embedding_dimension: int | None = None

    def forward(self, features: Features) -> Features:
        """Put ``sentence_embedding`` ``[B, V]`` into a copy of the features; poolings of logits
        have their own.
        """
        features = dict(features)
        features["sentence_embedding"] = self.fused_scores(features, None, Wanted())
        return features

    @classmethod
    def load_config(cls, model_name_or_path: str, subfolder: str = "", **where: Any) -> Options:
        """The options that ``save`` wrote: without them a module would have those of its class."""
        made: Any = cls
        expected = f"{model_name_or_path}: {Path(subfolder, made.config_file_name)} must have options of {cls.__name__}"
        try:
            found = super().load_config(model_name_or_path, subfolder=subfolder, **where)  # type: ignore[misc]
        except ValueError as error:
            raise ValueError(
                f"{expected}, got no JSON: {error}. Fetch the checkpoint whole.",
            ) from error
        if not found or not isinstance(found, dict):
            raise ValueError(f"{expected}, got {found or 'none'}. Fetch the checkpoint whole.")
        if unknown := sorted(set(found) - set(made.config_keys)):
            raise ValueError(
                f"{expected}, got {', '.join(unknown)} of a newer release: pip install -U tilefold.",
            )
        return found

    @abstractmethod
    def fused_scores(self, features: Features, head: Head | None, wanted: Wanted) -> Tensor:
        """``[B, V]`` scores: what ``forward`` puts into ``sentence_embedding``.

        Args:
            features: those that reach the module; ``token_embeddings`` was taken out if there is a
                head.
            head: its operands, ``hidden`` being ``[B, S, D]`` or packed ``[T, D]``; None if
                `reads_logits` is False.
            wanted: how they are returned.
        """

    @property
    def quantizable(self) -> bool:
        """Whether the weight of the head may be given in fp8."""
        return False

    def check_fusable(self) -> None:  # noqa: B027 - most have nothing to refuse
        """Raise a ``ValueError`` if the fused operator cannot compute what ``forward`` computes."""


class PoolingModule(FusedPooling, Module):
    """A pooling that is saved as its options in JSON and, if it has any, its weights."""

    def get_embedding_dimension(self) -> int | None:
        """V, or None before the first forward."""
        return self.embedding_dimension

    def save(
        self,
        output_path: str,
        *args: Any,
        safe_serialization: bool = True,
        **kwargs: Any,
    ) -> None:
        self.save_config(output_path)
        if self.state_dict():
            self.save_torch_weights(output_path, safe_serialization=safe_serialization)

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> Any:
        made = super().load(model_name_or_path, subfolder=subfolder, **kwargs)
        if made.state_dict():
            cls.load_torch_weights(
                model_name_or_path,
                subfolder=subfolder,
                **place_of_files(kwargs),
                model=made,
            )
        return made


def place_of_files(arguments: Options) -> Options:
    """The arguments of ``load`` that say where files lie."""
    return {name: arguments[name] for name in WHERE if name in arguments}


class Places(NamedTuple):
    """The tokens of a batch that count, for padded or packed features."""

    keep: Tensor | None  # [B, S] or packed [T]; None of packed features in which every token counts
    cu_seqlens: Tensor | None  # [B + 1] of packed features

    def packed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Packed ``tokens`` ``[T, ..]`` without those that do not count, and their ``cu_seqlens``."""
        if (offsets := self.cu_seqlens) is None:
            raise ValueError("features are padded; only packed ones have cu_seqlens.")
        if self.keep is None:
            return tokens, offsets
        counts = torch.cat([offsets.new_zeros(1), self.keep.cumsum(0).to(offsets.dtype)])
        return tokens[self.keep], counts[offsets.long()]


def places_of(features: Features, ignore_ids: tuple[int, ...] = ()) -> Places:
    """The tokens that count: attended to, not in `ignore_ids`, and in ``features["pooling_mask"]``
    if there is one.

    ``pooling_mask`` (``[B, S]``, nonzero = counts) lets a module before the pooling confine it to a
    part of the text.
    """
    cu_seqlens = features.get("cu_seq_lens_q")
    conditions = [] if cu_seqlens is not None else [features["attention_mask"] != 0]
    if features.get("pooling_mask") is not None:
        conditions.append(features["pooling_mask"] != 0)
    if ignore_ids:
        ids = features["input_ids"]
        conditions.append(~torch.isin(ids, torch.tensor(ignore_ids, device=ids.device)))
    if cu_seqlens is not None:
        conditions = [condition.reshape(-1) for condition in conditions]
    return Places(
        functools.reduce(torch.logical_and, conditions) if conditions else None,
        cu_seqlens,
    )


def head_scores(
    head: Head,
    places: Places,
    wanted: Wanted,
    *,
    logit_scale: float = 1.0,
    **options: Any,
) -> Tensor:
    """Scores of an LM head over the tokens of ``places``; its logits, bias included, are times
    ``logit_scale``.
    """
    hidden, weight, bias = head
    mask, cu_seqlens = places
    if cu_seqlens is not None:
        mask, (hidden, cu_seqlens) = None, places.packed(hidden)
    options |= {
        "attention_mask": mask,
        "cu_seqlens": cu_seqlens,
        "logit_scale": logit_scale,
        "impl": wanted.impl,
    }
    options["out_dtype"] = torch.float32 if autocasts(hidden) else wanted.out_dtype
    bias = bias if bias is None or logit_scale == 1 else bias * logit_scale
    if wanted.sparse is not None:
        return lsr_head_sparse(hidden, weight, bias, **options, **wanted.sparse._asdict())
    return lsr_head(hidden, weight, bias, **options)


def pass_hidden_states(hidden: Tensor) -> Tensor:
    """Replaces the forward of an LM head: returns its input, because the weight is applied later."""
    return hidden


def autocasts(tensor: Tensor) -> bool:
    """Whether autocast applies to ``tensor``; the scores of the modules here are then fp32."""
    device_type = tensor.device.type
    return (
        tensor.dtype != torch.float64
        and torch.amp.is_autocast_available(device_type)
        and torch.is_autocast_enabled(device_type)
    )
