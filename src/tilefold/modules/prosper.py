"""PROSPER's encoder (arXiv 2510.18527): a pooled LM head with a literal residual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn

from tilefold._internal.arguments import sorted_token_ids
from tilefold._internal.typing import Network
from tilefold.modules.fused_pooling import (
    Features,
    autocast_applies,
    location_arguments,
    pass_hidden_states,
)
from tilefold.modules.head_pooling import pool_logits
from tilefold.ops import lsr_head, token_scatter
from tilefold.ops.checks import check_tensor

__all__ = ["ProsperTransformer", "literal_residual"]

POOLINGS = ("last", "cls", "max")
LITERAL_WEIGHTS = "literal_residual.safetensors"


class ProsperTransformer(Transformer):
    """A ``Transformer`` with LM head, pooling and literal residual network in one module.

    It writes ``sentence_embedding``.

    With hidden states ``h`` ``[S, D]`` before the LM head, and its logits ``H = logit_scale * (h @
    E.T + b)``::

        w  = pool_s log1p(relu(H_s))        base weights      [V]
        w' = F pool_s log1p(relu(h_s))      importance        [V], F a matrix [V, D] of its own
        W  = w + I * (max_v w'_v - w')      final weights     [V], I marks the terms of the text

    The vocabulary-wide logits of all tokens never exist, accelerated or not: the head is applied by
    :func:`tilefold.ops.lsr_head` to the pooled token. Of ``w'`` only its maximum and its values at
    the tokens of the text are formed. Special tokens are not literal terms. ``base_embedding``
    holds ``w``, on which the paper puts its penalty (:class:`tilefold.losses.BaseSpladeLoss`).
    To prune or normalise the vectors of queries or documents, put a
    :class:`tilefold.modules.window.LexicalWindow` after this module.

    Args:
        model_name_or_path, options: arguments of ``Transformer``, with the task
            ``"text-generation"`` or ``"fill-mask"``.
        pooling: ``"last"`` token (the paper), ``"cls"`` (the first), or ``"max"``.
        literal_residual: whether the residual is added; ``W = w`` without it.
        logit_scale: factor on the logits, bias included.

    Attributes:
        literal: ``nn.Linear(D, V, bias=False)``, the matrix F, or ``None``.
        impl: implementation of the operators.

    Raises:
        ValueError: if the pooling is unknown, or the model has no linear LM head.
    """

    config_keys: list[str] = [  # noqa: RUF012
        *Transformer.config_keys,
        "pooling",
        "literal_residual",
        "logit_scale",
    ]

    def __init__(
        self,
        model_name_or_path: str,
        *,
        pooling: str = "last",
        literal_residual: bool = True,
        logit_scale: float = 1.0,
        **options: Any,
    ) -> None:
        """Load the model, and create the weight of its literal residual, with random values.

        The literal residual adds weight to the terms that occur in a text. It multiplies the pooled
        hidden state with a matrix ``[V, D]``, and reads the results at the tokens of the text.

        Args:
            model_name_or_path: a folder or a Hugging Face name.
            pooling: ``"last"``, ``"cls"`` or ``"max"``.
            literal_residual: whether vectors get the literal residual.
            logit_scale: factor on the logits, bias included.
            options: arguments of ``Transformer``.
        """
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}.")
        super().__init__(model_name_or_path, **options)
        self.pooling = pooling
        self.literal_residual = literal_residual
        self.logit_scale = logit_scale
        self.impl = "auto"
        decoder = linear_head(self.model)
        self.vocab_size = decoder.out_features
        self.literal = None
        if literal_residual:
            self.literal = nn.Linear(
                decoder.in_features,
                self.vocab_size,
                bias=False,
                dtype=decoder.weight.dtype,
            )
            nn.init.normal_(self.literal.weight, std=0.02)  # as transformers initializes layers
            self.literal.to(decoder.weight.device)

    def forward(self, features: Features, **kwargs: Any) -> Features:
        """Compute PROSPER's vectors of a batch, with and without the literal residual.

        The LM head is applied to one pooled hidden state per text, not to every token. The literal
        residual adds weight to the terms that occur in the text itself.

        Args:
            features: ``input_ids`` and ``attention_mask``, each ``[B, S]``; not changed.
            kwargs: other arguments of ``Transformer.forward``.

        Returns:
            The output of the ``Transformer``, with the final vectors ``[B, V]`` in
            ``sentence_embedding``, and those before the residual in ``base_embedding``.
        """
        head = linear_head(self.model)
        # The network must return hidden states instead of logits, because lsr_head applies the LM
        # head below. An attribute of the instance hides the forward of the head's class.
        vars(head)["forward"] = pass_hidden_states
        out: Features = super().forward(dict(features), **kwargs)
        hidden = out.pop("token_embeddings")  # [B, S, D]
        mask = out["attention_mask"]  # [B, S]
        if not autocast_applies(hidden):
            # some models cast the output of an LM head, here hidden states, to fp32
            hidden = hidden.to(head.weight.dtype)
        bias: Tensor | None = head.bias
        if bias is not None and self.logit_scale != 1:
            # lsr_head scales the product of hidden state and weight, but not the bias
            bias = bias * self.logit_scale
        base = lsr_head(
            hidden,
            head.weight,
            bias,
            attention_mask=mask,
            pooling=self.pooling,
            logit_scale=self.logit_scale,
            impl=self.impl,
        )
        final = base
        if self.literal is not None:
            # [B, D]: hidden states are pooled and activated in the same way as logits
            pooled = pool_logits(hidden, mask != 0, self.pooling, "log1p_relu")
            residual = literal_residual(
                pooled,
                self.literal.weight,
                out["input_ids"],
                mask,
                ignore_ids=self.tokenizer.all_special_ids,
                impl=self.impl,
            )
            final = base + residual.to(base.dtype)
        return {**out, "sentence_embedding": final, "base_embedding": base}

    def get_embedding_dimension(self) -> int:
        return self.vocab_size

    def save(
        self,
        output_path: str,
        *args: Any,
        safe_serialization: bool = True,
        **kwargs: Any,
    ) -> None:
        """Write the model and, in a separate file, the weight of the literal residual.

        Args:
            output_path: folder of the module.
            args: other arguments of ``Transformer.save``.
            safe_serialization: whether the model's weights are written as safetensors.
            kwargs: other arguments of ``Transformer.save``.
        """
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        if self.literal is not None:
            weight = self.literal.weight.detach().cpu().contiguous()
            save_file({"weight": weight}, str(Path(output_path) / LITERAL_WEIGHTS))

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        **kwargs: Any,
    ) -> ProsperTransformer:
        """Load a saved model and, if it has one, its literal residual network.

        Args:
            model_name_or_path: the checkpoint.
            subfolder: folder of the module in the checkpoint.
            kwargs: arguments of ``Transformer.load``, some of which locate files.

        Raises:
            FileNotFoundError: if the weights of the literal residual are missing.
            ValueError: if they have another shape.
        """
        transformer: ProsperTransformer = super().load(
            model_name_or_path, subfolder=subfolder, **kwargs
        )
        if transformer.literal is None:
            return transformer
        path = cls.load_file_path(
            model_name_or_path,
            LITERAL_WEIGHTS,
            subfolder=subfolder,
            **location_arguments(kwargs),
        )
        if path is None:
            raise FileNotFoundError(
                f"{model_name_or_path}: {LITERAL_WEIGHTS} is missing, without which the literal "
                "residual would be random; fetch the checkpoint whole.",
            )
        weight = load_file(path)["weight"]
        if weight.shape != transformer.literal.weight.shape:
            raise ValueError(
                f"{path}: the weight must be {list(transformer.literal.weight.shape)}, "
                f"got {list(weight.shape)}; it belongs to another model.",
            )
        with torch.no_grad():
            transformer.literal.weight.copy_(weight)
        return transformer

    def _can_flatten_inputs(self) -> bool:
        return False


def linear_head(network: Network) -> nn.Linear:
    """Return the LM head of a transformers model, which must be a plain linear layer.

    Args:
        network: a model for masked or causal language modelling.

    Raises:
        ValueError: if the model has no LM head, or one that is not a plain ``nn.Linear``.
    """
    get_head = getattr(network, "get_output_embeddings", None)
    head = None if get_head is None else get_head()
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return head
    raise ValueError(
        "model must have an LM head that is a torch.nn.Linear, "
        f"got {type(head).__name__} in {type(network).__name__}; load one for masked or causal "
        "language modelling, and leave its head out of adapters and quantisation.",
    )


def literal_residual(
    pooled: Tensor,
    weight: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    ignore_ids: list[int] | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compute the literal residual ``I * (max_v w'_v - w')`` with ``w' = pooled @ weight.T``.

    Only the entries of ``w'`` that are needed are computed.

    Args:
        pooled: ``[B, D]``.
        weight: ``[V, D]``.
        input_ids: ``[B, S]``; the terms for which ``I`` is 1.
        attention_mask: ``[B, S]``, nonzero for tokens that count, or None for all.
        ignore_ids: terms for which ``I`` is 0.
        impl: implementation of the operators.

    Returns:
        ``[B, V]``, not negative, fp32 (fp64 for an fp64 weight).
    """
    check_tensor("pooled", pooled)
    check_tensor("weight", weight)
    check_tensor("input_ids", input_ids)
    if attention_mask is not None:
        check_tensor("attention_mask", attention_mask)
    ignored_ids = sorted_token_ids("ignore_ids", () if ignore_ids is None else ignore_ids)
    with torch.autocast(pooled.device.type, enabled=False):
        pooled = pooled.to(weight.dtype)
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        # The head pools over tokens. With the rows of the matrix as the tokens of one sequence and
        # the texts as the vocabulary, it pools over the rows.
        row_maxima = lsr_head(
            weight[None],
            pooled,
            activation="none",
            out_dtype=wide,
            impl=impl,
        )
        largest = row_maxima[0]  # [B]
        importance = (weight[input_ids].to(wide) * pooled[:, None].to(wide)).sum(-1)  # [B, S]
        # only rounding makes a gap negative
        gap = (largest[:, None] - importance).clamp_min(0)
        if attention_mask is None:
            keep = torch.ones_like(input_ids, dtype=torch.bool)
        else:
            keep = attention_mask != 0
        if ignored_ids:
            ignored = torch.tensor(ignored_ids, device=input_ids.device)
            keep = keep & ~torch.isin(input_ids, ignored)
        return token_scatter(
            gap,
            input_ids,
            weight.size(0),
            attention_mask=keep,
            reduce="max",
            activation="none",
            impl=impl,
        )
