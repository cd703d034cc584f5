"""The forwards of an accelerated pair: the head returns its input, and the pooling applies the fused head."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from torch import Tensor, nn
from torch.nn.functional import linear

from tilefold.integrations.sentence_transformers._heads import head_operands
from tilefold.modules.fused_pooling import (
    STOCK_ACTIVATIONS,
    Dtype,
    Features,
    FusedPooling,
    Head,
    SparseOptions,
    autocasts,
)
from tilefold.modules.static_query import counted_tokens
from tilefold.ops import lsr_head, lsr_head_sparse, quantize_weight
from tilefold.ops.lsr_head.rows import CapacityRows, lsr_head_rows

_sparse_options: ContextVar[SparseOptions | None] = ContextVar("tilefold_sparse_options", default=None)
_capacity: ContextVar[int | None] = ContextVar("tilefold_capacity", default=None)


@contextmanager
def sparse_scores(options: SparseOptions, capacity: int | None = None) -> Iterator[None]:
    """Within it, in this thread, fused poolings give CSR scores, or rows of a `capacity` where they can."""
    token, room = _sparse_options.set(options), _capacity.set(capacity)
    try:
        yield
    finally:
        _sparse_options.reset(token)
        _capacity.reset(room)


def pass_hidden_states(hidden: Tensor) -> Tensor:
    """Replaces the forward of an LM head: returns its input, because the pooling applies the weight."""
    return hidden


class StockPooling(FusedPooling):
    """The fused scores of a stock ``SpladePooling``, whose options are read at every call."""

    def __init__(self, pooling: Any) -> None:
        self.stock = pooling

    @property
    def quantizable(self) -> bool:
        return bool(self.stock.pooling_strategy == "max")

    @property
    def pooling(self) -> str:
        """Its name, for messages."""
        return str(self.stock.pooling_strategy)

    def fused_scores(
        self, features: Features, head: Head | None, *, out_dtype: Dtype | None, impl: str, sparse: SparseOptions | None
    ) -> Tensor:
        if head is None:
            raise ValueError("a SpladePooling must follow an LM head, got no head.")
        cu_seqlens: Tensor | None = features.get("cu_seq_lens_q")
        if autocasts(head.hidden):
            out_dtype = self._output_dtype(head.hidden, cu_seqlens is not None)
        arguments: dict[str, Any] = {
            "attention_mask": features["attention_mask"] if cu_seqlens is None else None,
            "cu_seqlens": cu_seqlens,
            "pooling": self.stock.pooling_strategy,
            "activation": STOCK_ACTIVATIONS[self.stock.activation_function],
            "out_dtype": out_dtype,
            "impl": impl,
        }
        scores: Any = None
        if sparse is not None:
            arguments |= sparse._asdict()
            if (capacity := _capacity.get()) is not None:
                scores = lsr_head_rows(*head, **arguments, capacity=capacity)
        if scores is None:
            scores = (lsr_head if sparse is None else lsr_head_sparse)(*head, **arguments)
        if self.stock.embedding_dimension is None:
            width = scores.vocab_size if isinstance(scores, CapacityRows) else scores.shape[1]
            self.stock.embedding_dimension = width
        found: Tensor = scores
        return found

    def _output_dtype(self, hidden: Tensor, flattened: bool) -> torch.dtype:
        """The dtype that autocast gives the scores of the stock module."""
        stock, device_type = self.stock, hidden.device.type
        options = stock.pooling_strategy, stock.activation_function, stock.training
        return stock_output_dtype(device_type, torch.get_autocast_dtype(device_type), *options, flattened)


def fused_pooling(pooling: Any) -> FusedPooling:
    """The fused scores of a module: of one of ours its own, of a stock ``SpladePooling`` an adapter's."""
    return pooling if isinstance(pooling, FusedPooling) else StockPooling(pooling)


class FusedForward:
    """Replaces the forward of one pooling; not a module, so the state dict does not change.

    Options of the pooling and weights of the head, if there is one, are read (and rounded to ``"fp8"``) at every call,
    since some changes of a weight cannot be detected (``weight.data``, numpy, a move). Only the last module of a model
    may give CSR rows.
    """

    def __init__(
        self, pooling: Any, head: nn.Module | None, impl: str, quantize: str | None = None, last: bool = True
    ) -> None:
        self.pooling = fused_pooling(pooling)
        self.head, self.impl, self.quantize, self.last = head, impl, quantize, last

    def __call__(self, features: Features) -> Features:
        """Put ``sentence_embedding`` ``[B, V]`` into ``features``, and take the hidden states of a head out of them."""
        head, out_dtype = None, None
        if self.head is not None:
            hidden: Tensor = features.pop("token_embeddings")  # [B, S, D], or [1, T, D] when inputs are flattened
            out_dtype = hidden.dtype
            head = head_operands(self.head, hidden.squeeze(0) if "cu_seq_lens_q" in features else hidden)
            if not autocasts(hidden):  # some models return fp32 from a half-precision head
                head = head._replace(hidden=head.hidden.to(head.weight.dtype))
            if self.quantize is not None and not torch.is_grad_enabled():
                head = head._replace(weight=quantize_weight(head.weight))
        sparse = None if torch.compiler.is_compiling() or not self.last else _sparse_options.get()
        features["sentence_embedding"] = self.pooling.fused_scores(
            features, head, out_dtype=out_dtype, impl=self.impl, sparse=sparse
        )
        return features

    # Python puts this name into errors of wrong calls, which then read like those of the stock forward
    __call__.__qualname__ = "SpladePooling.forward"


class StaticTokens:
    """Replaces the forward of one stock ``SparseStaticEmbedding``: ``[PAD]`` in a text counts in no batch."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, features: Features) -> Features:
        features["attention_mask"] = counted_tokens(features, self.module.tokenizer)
        found: Features = type(self.module).forward(self.module, features)
        return found


FUSED_FORWARDS = (FusedForward, StaticTokens)


def count_no_padding(model: nn.Module) -> None:
    """Put :class:`StaticTokens` on the stock static modules of a model."""
    for module in model.modules():
        if type(module) is SparseStaticEmbedding and "forward" not in vars(module):
            module.forward = StaticTokens(module)


@functools.lru_cache(maxsize=64)
def stock_output_dtype(
    device_type: str,
    autocast_dtype: torch.dtype,
    pooling_strategy: str,
    activation_function: str,
    training: bool,
    flattened: bool,
) -> torch.dtype:
    """The dtype that stock ``SpladePooling`` returns under autocast, found by running it on one token.

    It depends on autocast's lists of operations, on the mode and on the version, so it cannot be tabulated.
    """
    stock = SpladePooling(pooling_strategy, activation_function).train(training)
    with torch.no_grad(), torch.autocast(device_type, dtype=autocast_dtype):
        token = torch.zeros(1, 1, 1, device=device_type)
        features = {"token_embeddings": linear(token, token[0]), "attention_mask": torch.ones(1, 1, device=device_type)}
        if flattened:
            features["cu_seq_lens_q"] = torch.tensor([0, 1])
        dtype: torch.dtype = stock(features)["sentence_embedding"].dtype
    return dtype
