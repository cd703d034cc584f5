"""The forwards of an accelerated pair: the head returns its input, and the pooling applies the fused head."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor, nn
from torch.nn.functional import linear

from tilefold.integrations.sentence_transformers._heads import head_operands
from tilefold.modules.fused_pooling import SparseOptions, autocasts
from tilefold.ops import QuantizedWeight, lsr_head, lsr_head_sparse, quantize_weight
from tilefold.ops.lsr_head.rows import CapacityRows, lsr_head_rows

ACTIVATIONS = {"relu": "log1p_relu", "log1p_relu": "log1p_log1p_relu"}  # SpladePooling's name -> the operator's


_sparse_options: ContextVar[SparseOptions | None] = ContextVar("tilefold_sparse_options", default=None)
_capacity: ContextVar[int | None] = ContextVar("tilefold_capacity", default=None)


@contextmanager
def sparse_scores(options: SparseOptions, capacity: int | None = None) -> Iterator[None]:
    """Within it, in this thread, fused poolings put ``torch.sparse_csr`` scores into ``sentence_embedding``.

    With a ``capacity``, those that can put :class:`tilefold.ops.lsr_head.rows.CapacityRows` there instead.
    """
    token, room = _sparse_options.set(options), _capacity.set(capacity)
    try:
        yield
    finally:
        _sparse_options.reset(token)
        _capacity.reset(room)


def sparse_options_now() -> SparseOptions | None:
    """The options of :func:`sparse_scores`, outside of it None."""
    return None if torch.compiler.is_compiling() else _sparse_options.get()


def pass_hidden_states(hidden: Tensor) -> Tensor:
    """Replaces the forward of an LM head: returns its input, because the pooling applies the weight."""
    return hidden


class FusedSpladePooling:
    """Replaces the forward of one ``SpladePooling`` instance; not a module, so the state dict does not change.

    Args:
        pooling: the stock module, whose options are read at every call.
        head: the LM head before it, whose weights are read at every call.
        impl: implementation of :func:`tilefold.ops.lsr_head`.
        quantize: ``"fp8"`` to multiply in fp8 where no gradient is needed, or ``None``. The weight is rounded at
            every call, so a changed one is never missed.
        last: whether no module follows: then it may give CSR rows.
    """

    def __init__(
        self, pooling: Any, head: nn.Module, impl: str, quantize: str | None = None, last: bool = True
    ) -> None:
        self.pooling = pooling
        self.head = head
        self.impl = impl
        self.quantize = quantize
        self.last = last

    def __call__(self, features: dict[str, Any]) -> dict[str, Any]:
        """Put ``sentence_embedding`` ``[B, V]`` into ``features``, and take the hidden states out of them."""
        hidden: Tensor = features.pop("token_embeddings")  # [B, S, D], or [1, T, D] when inputs are flattened
        cu_seqlens: Tensor | None = features.get("cu_seq_lens_q")
        mask = features["attention_mask"] if cu_seqlens is None else None
        if cu_seqlens is not None:
            hidden = hidden.squeeze(0)
        scores = self._score(hidden, mask, cu_seqlens)
        if self.pooling.embedding_dimension is None:
            self.pooling.embedding_dimension = (
                scores.vocab_size if isinstance(scores, CapacityRows) else scores.shape[1]
            )
        features["sentence_embedding"] = scores
        return features

    # Python puts this name into errors of wrong calls, which then read like those of the stock forward
    __call__.__qualname__ = "SpladePooling.forward"

    def _score(self, hidden: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor | CapacityRows:
        out_dtype = self._output_dtype(hidden, flattened=cu_seqlens is not None)
        hidden, weight, bias = head_operands(self.head, hidden)
        if not autocasts(hidden):
            hidden = hidden.to(weight.dtype)  # some models return fp32 from a half-precision head
        arguments: dict[str, Any] = {
            "attention_mask": mask,
            "cu_seqlens": cu_seqlens,
            "pooling": self.pooling.pooling_strategy,
            "activation": ACTIVATIONS[self.pooling.activation_function],
            "out_dtype": out_dtype,
            "impl": self.impl,
        }
        matrix: Tensor | QuantizedWeight = weight
        if self.quantize is not None and not torch.is_grad_enabled():
            # at every call, since some changes of a weight cannot be detected (``weight.data``, numpy, a move)
            matrix = quantize_weight(weight)
        options = None if torch.compiler.is_compiling() or not self.last else _sparse_options.get()
        if options is None:
            return lsr_head(hidden, matrix, bias, **arguments)
        arguments |= {"top_k": options.top_k, "min_weight": options.min_weight}
        capacity = _capacity.get()
        if capacity is not None:
            rows = lsr_head_rows(hidden, matrix, bias, **arguments, capacity=capacity)
            if rows is not None:
                return rows
        return lsr_head_sparse(hidden, matrix, bias, **arguments)

    def _output_dtype(self, hidden: Tensor, *, flattened: bool) -> torch.dtype:
        """That of the stock module: the dtype of the logits, or what autocast makes of it."""
        if not autocasts(hidden):
            return hidden.dtype
        pooling, device_type = self.pooling, hidden.device.type
        return stock_output_dtype(
            device_type,
            torch.get_autocast_dtype(device_type),
            pooling.pooling_strategy,
            pooling.activation_function,
            pooling.training,
            flattened,
        )


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
