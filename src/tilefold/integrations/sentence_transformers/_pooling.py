"""Forwards that ``accelerate`` puts on poolings, and the form of the scores that they return."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling
from torch import Tensor, nn
from torch.nn.functional import linear

from tilefold.integrations._patches import Replacement
from tilefold.integrations.sentence_transformers._heads import head_operands
from tilefold.modules import fused_pooling as poolings
from tilefold.modules.fused_pooling import (
    Features,
    FusedPooling,
    Head,
    ScoreOptions,
    SparseOptions,
)
from tilefold.modules.static_query import mask_without_padding
from tilefold.ops import lsr_head, lsr_head_sparse, quantize_weight
from tilefold.ops.lsr_head import lsr_head_rows


class _SparseOutput(NamedTuple):
    """Form in which fused poolings return scores: CSR with some options, or rows of a capacity."""

    options: SparseOptions | None = None
    capacity: int | None = None


_DENSE_OUTPUT = _SparseOutput()
_sparse_output: ContextVar[_SparseOutput] = ContextVar("tilefold_sparse", default=_DENSE_OUTPUT)


@contextmanager
def sparse_scores(options: SparseOptions, capacity: int | None = None) -> Iterator[None]:
    """Let fused poolings return sparse scores in this thread, within a context.

    Args:
        options: which entries of a row are kept.
        capacity: number of entries that is reserved for each row. A pooling that supports it then
            returns rows of this capacity, which need no synchronisation with the GPU. ``None``
            lets all of them return CSR.
    """
    token = _sparse_output.set(_SparseOutput(options, capacity))
    try:
        yield
    finally:
        _sparse_output.reset(token)


class StockPooling(FusedPooling):
    """Computes the scores of a stock ``SpladePooling`` without logits.

    Args:
        pooling: the stock module, whose options are read at every call.
        screen: see ``accelerate``.
    """

    def __init__(self, pooling: SpladePooling, screen: bool) -> None:
        self.stock = pooling
        self.screen = screen

    @property
    def quantizable(self) -> bool:
        return bool(self.stock.pooling_strategy == "max")

    @property
    def pooling(self) -> str:
        """Its name, for messages."""
        return str(self.stock.pooling_strategy)

    def fused_scores(
        self,
        features: Features,
        head: Head | None,
        score_options: ScoreOptions,
    ) -> Tensor:
        """Compute the scores of the stock module, with its current options.

        Args:
            features: output of the Transformer, padded or packed.
            head: hidden states and the weights of the LM head.
            score_options: dtype, implementation, and which entries sparse scores keep.

        Returns:
            Dense scores ``[B, V]``; sparse ones in CSR, or as rows of a capacity within
            ``sparse_scores(options, capacity)``.
        """
        if head is None:
            raise ValueError("a SpladePooling must follow an LM head, got no head.")
        stock = self.stock
        cu_seqlens = features.get("cu_seq_lens_q")
        attention_mask = features["attention_mask"] if cu_seqlens is None else None
        out_dtype = score_options.out_dtype
        if poolings.autocast_applies(head.hidden):
            device_type = head.hidden.device.type
            out_dtype = stock_output_dtype(
                device_type,
                torch.get_autocast_dtype(device_type),
                stock.pooling_strategy,
                stock.activation_function,
                training=stock.training,
                flattened=cu_seqlens is not None,
            )
        if score_options.sparse is not None:
            rows: Tensor = self._sparse_scores(
                head,
                attention_mask,
                cu_seqlens,
                out_dtype,
                score_options.sparse,
                score_options.impl,
            )
            return rows
        scores: Tensor = lsr_head(
            head.hidden,
            head.weight,
            head.bias,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            pooling=stock.pooling_strategy,
            activation=poolings.STOCK_ACTIVATIONS[stock.activation_function],
            out_dtype=out_dtype,
            screen=self.screen,
            impl=score_options.impl,
        )
        self._store_dimension(scores.shape[1])
        return scores

    def _sparse_scores(
        self,
        head: Head,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        out_dtype: torch.dtype | None,
        sparse: SparseOptions,
        impl: str,
    ) -> Any:
        """Compute sparse scores, as rows of a capacity if possible, else in CSR.

        Args:
            head: hidden states and the weights of the LM head.
            attention_mask: ``[B, S]`` of padded texts.
            cu_seqlens: offsets ``[B + 1]`` of packed texts.
            out_dtype: dtype of the scores.
            sparse: which entries are kept.
            impl: implementation of the operator.
        """
        stock = self.stock
        activation = poolings.STOCK_ACTIVATIONS[stock.activation_function]
        capacity = _sparse_output.get().capacity
        if capacity is not None:
            rows = lsr_head_rows(
                head.hidden,
                head.weight,
                head.bias,
                capacity=capacity,
                attention_mask=attention_mask,
                cu_seqlens=cu_seqlens,
                pooling=stock.pooling_strategy,
                activation=activation,
                out_dtype=out_dtype,
                top_k=sparse.top_k,
                min_weight=sparse.min_weight,
                screen=self.screen,
                impl=impl,
            )
            if rows is not None:  # some calls cannot return rows of a capacity
                self._store_dimension(rows.vocab_size)
                return rows
        scores = lsr_head_sparse(
            head.hidden,
            head.weight,
            head.bias,
            attention_mask=attention_mask,
            cu_seqlens=cu_seqlens,
            pooling=stock.pooling_strategy,
            activation=activation,
            out_dtype=out_dtype,
            top_k=sparse.top_k,
            min_weight=sparse.min_weight,
            impl=impl,
        )
        self._store_dimension(scores.shape[1])
        return scores

    def _store_dimension(self, vocab_size: int) -> None:
        """Store the dimension of the scores in the stock module, as its own forward does."""
        if self.stock.embedding_dimension is None:
            self.stock.embedding_dimension = vocab_size


def fused_pooling(pooling: FusedPooling | SpladePooling, screen: bool = False) -> FusedPooling:
    """Return a module of :mod:`tilefold.modules`, or an adapter of a stock ``SpladePooling``."""
    return pooling if isinstance(pooling, FusedPooling) else StockPooling(pooling, screen)


class FusedForward(Replacement):
    """Replaces the forward of one pooling.

    Options of the pooling and weights of the head, if there is one, are read (and rounded to
    ``"fp8"``) at every call, since some changes of a weight cannot be detected (``weight.data``,
    numpy, a move).

    Args:
        pooling: the pooling.
        head: the LM head before it, if the pooling reads logits.
        impl: implementation of the operator.
        quantize: ``"fp8"`` or ``None``.
        last: whether the pooling is the model's last module. Only that one may return CSR rows.
        screen: see ``accelerate``.
    """

    def __init__(
        self,
        pooling: FusedPooling | SpladePooling,
        head: nn.Module | None,
        impl: str,
        quantize: str | None = None,
        last: bool = True,
        screen: bool = False,
    ) -> None:
        """Create the forward.

        Args:
            pooling: the pooling.
            head: the LM head before it, if the pooling reads logits.
            impl: implementation of the operator.
            quantize: ``"fp8"`` or ``None``.
            last: whether the pooling is the model's last module. Only that one may return CSR rows.
            screen: whether a product in 8 bits first finds the scores that can be positive.
        """
        super().__init__(pooling)
        self.pooling = fused_pooling(pooling, screen)
        self.head = head
        self.impl = impl
        self.quantize = quantize
        self.last = last

    def __call__(self, features: Features) -> Features:
        """Compute ``sentence_embedding`` ``[B, V]`` and remove the head's hidden states.

        Args:
            features: output of the Transformer. Its ``token_embeddings`` are hidden states
                ``[B, S, D]``, or ``[1, T, D]`` of packed texts.
        """
        operands = None
        out_dtype = None
        if self.head is not None:
            hidden: Tensor = features.pop("token_embeddings")
            out_dtype = hidden.dtype
            is_packed = "cu_seq_lens_q" in features
            operands = head_operands(self.head, hidden.squeeze(0) if is_packed else hidden)
            if not poolings.autocast_applies(hidden):
                # Some models return fp32 from a half-precision head.
                cast_hidden = operands.hidden.to(operands.weight.dtype)
                operands = operands._replace(hidden=cast_hidden)
            if self.quantize is not None and not torch.is_grad_enabled():
                operands = operands._replace(weight=quantize_weight(operands.weight))
        sparse = None
        if self.last and not torch.compiler.is_compiling():
            sparse = _sparse_output.get().options
        features["sentence_embedding"] = self.pooling.fused_scores(
            features,
            operands,
            ScoreOptions(out_dtype, self.impl, sparse),
        )
        return features

    # Python puts this name into the errors of wrong calls, which then read like those of the stock
    # forward.
    __call__.__qualname__ = "SpladePooling.forward"


def fused_forwards(model: nn.Module) -> list[FusedForward]:
    """Return the fused forwards of an accelerated model's poolings."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return [forward for forward in forwards if isinstance(forward, FusedForward)]


class StaticTokens(Replacement):
    """Forward of a stock ``SparseStaticEmbedding`` that gives ``[PAD]`` in a text no weight."""

    def __call__(self, features: Features) -> Features:
        """Run the stock forward with a mask that leaves out padding tokens."""
        features["attention_mask"] = mask_without_padding(features, self.owner.tokenizer)
        outputs: Features = type(self.owner).forward(self.owner, features)
        return outputs


def count_no_padding(model: nn.Module) -> None:
    """Put :class:`StaticTokens` on the stock static modules of a model."""
    for module in model.modules():
        if type(module) is SparseStaticEmbedding and "forward" not in vars(module):
            module.forward = StaticTokens(module)


@functools.lru_cache(maxsize=64)
def stock_output_dtype(
    device: str,
    autocast_dtype: torch.dtype,
    pooling: str,
    activation: str,
    training: bool,
    flattened: bool,
) -> torch.dtype:
    """Return the dtype of the scores that a stock ``SpladePooling`` computes under autocast.

    It depends on autocast's lists of operations, on the mode and on torch's version, so that no
    table can hold it. A pooling of one token with one logit runs once to show it.

    Args:
        device: type of the device, such as ``"cuda"``.
        autocast_dtype: dtype of autocast on this device.
        pooling: the module's ``pooling_strategy``.
        activation: its ``activation_function``.
        training: whether the module is in training mode.
        flattened: whether texts are packed.
    """
    stock = SpladePooling(pooling, activation).train(training)
    with torch.no_grad(), torch.autocast(device, dtype=autocast_dtype):
        token = torch.zeros(1, 1, 1, device=device)
        features = {
            # Autocast chooses the dtype of logits, as it does for those of an LM head.
            "token_embeddings": linear(token, token[0]),
            "attention_mask": torch.ones(1, 1, device=device),
        }
        if flattened:
            features["cu_seq_lens_q"] = torch.tensor([0, 1])
        dtype: torch.dtype = stock(features)["sentence_embedding"].dtype
    return dtype
