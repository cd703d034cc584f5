"""The forwards of accelerated modules other than SpladePooling: those of :mod:`tilefold.modules`, static weights."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding
from torch import Tensor, nn

from tilefold.integrations.sentence_transformers._heads import head_operands
from tilefold.integrations.sentence_transformers._pooling import FusedSpladePooling, sparse_options_now
from tilefold.modules.fused_pooling import FusedPooling, Head, autocasts
from tilefold.modules.static_query import counted_tokens
from tilefold.ops import quantize_weight


class FusedOwnPooling:
    """Replaces the forward of one module that has ``fused_scores``; not a module, so the state dict does not change.

    Args:
        pooling: the module, whose options are read at every call.
        head: the LM head before it, whose weights are read at every call; None if it reads no logits.
        impl: implementation of the operators.
        quantize: as in :class:`FusedSpladePooling`.
        last: whether no module follows: then it may give CSR rows.
    """

    def __init__(
        self, pooling: FusedPooling, head: nn.Module | None, impl: str, quantize: str | None, last: bool
    ) -> None:
        self.pooling = pooling
        self.head = head
        self.impl = impl
        self.quantize = quantize
        self.last = last

    def __call__(self, features: dict[str, Any]) -> dict[str, Any]:
        """Put ``sentence_embedding`` ``[B, V]`` into ``features``, and take the hidden states of a head out of them."""
        head, out_dtype = None, None
        if self.head is not None:
            hidden: Tensor = features.pop("token_embeddings")  # [B, S, D], or [1, T, D] when inputs are flattened
            out_dtype = hidden.dtype
            head = self._operands(hidden.squeeze(0) if "cu_seq_lens_q" in features else hidden)
        features["sentence_embedding"] = self.pooling.fused_scores(
            features, head, out_dtype=out_dtype, impl=self.impl, sparse=sparse_options_now() if self.last else None
        )
        return features

    def _operands(self, hidden: Tensor) -> Head:
        hidden, weight, bias = head_operands(self.head, hidden)  # type: ignore[arg-type]
        if not autocasts(hidden):
            hidden = hidden.to(weight.dtype)  # some models return fp32 from a half-precision head
        if self.quantize is not None and not torch.is_grad_enabled():
            return Head(hidden, quantize_weight(weight), bias)
        return Head(hidden, weight, bias)


class StaticTokens:
    """Replaces the forward of one stock ``SparseStaticEmbedding``: ``[PAD]`` in a text counts in no batch.

    Args:
        module: the stock module.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, features: dict[str, Any]) -> dict[str, Any]:
        """What the stock forward makes of tokens without padding."""
        features["attention_mask"] = counted_tokens(features, self.module.tokenizer)
        found: dict[str, Any] = type(self.module).forward(self.module, features)
        return found


def count_no_padding(model: nn.Module) -> None:
    """Put :class:`StaticTokens` on the stock static modules of a model."""
    for module in model.modules():
        if type(module) is SparseStaticEmbedding and "forward" not in vars(module):
            module.forward = StaticTokens(module)


def fused_forward(
    pooling: Any, head: nn.Module | None, impl: str, quantize: str | None = None, last: bool = True
) -> FusedSpladePooling | FusedOwnPooling:
    """The forward that replaces that of a pooling."""
    if isinstance(pooling, FusedPooling):
        return FusedOwnPooling(pooling, head, impl, quantize, last)
    if head is None:
        raise ValueError("a SpladePooling must follow an LM head, got no head.")
    return FusedSpladePooling(pooling, head, impl, quantize, last)
