"""Kernels of an accelerated SparseEncoder that threads compile while its checks run."""

from __future__ import annotations

from torch import nn

from tilefold.integrations.sentence_transformers._heads import FusablePooling, base_linear
from tilefold.integrations.sentence_transformers._pooling import StockPooling, fused_pooling
from tilefold.integrations.sentence_transformers.graphs.encoding import CAPACITY
from tilefold.integrations.sentence_transformers.streaming.stream import GPU_TOKENS
from tilefold.modules import fused_pooling as poolings
from tilefold.ops.lsr_head import ExpectedCall, compile_ahead

# The two short texts of the self-checks, padded and packed.
_CHECKS = (
    ExpectedCall(texts=2, tokens=30, packed=False),
    ExpectedCall(texts=2, tokens=18),
)
# Full batches of documents and of queries, and the few texts of a single call.
_ENCODING = (
    ExpectedCall(texts=GPU_TOKENS // 256, tokens=GPU_TOKENS, capacity=CAPACITY),
    ExpectedCall(texts=16, tokens=256, capacity=CAPACITY),
    ExpectedCall(texts=GPU_TOKENS // 16, tokens=GPU_TOKENS, capacity=CAPACITY),
)


def compile_head_ahead(
    fusable: FusablePooling,
    *,
    impl: str,
    screen: bool,
    check: bool,
) -> None:
    """Start to compile the kernels with which a fused head encodes texts, and return at once.

    Only the scores of a stock SpladePooling are known well enough. Kernels that other poolings and
    training need are compiled at their first call.

    Args:
        fusable: the pooling with its head.
        impl: the implementation of the operator.
        screen: as in :func:`accelerate`.
        check: whether self-checks run first.
    """
    pooling = fused_pooling(fusable.pooling)
    if not isinstance(pooling, StockPooling):
        return
    linear = base_linear(fusable.head)
    if type(linear.weight) is not nn.Parameter:  # sharded, or quantised by another library
        return
    compile_ahead(
        (*_CHECKS, *_ENCODING) if check else _ENCODING,
        linear.weight,
        linear.bias,
        pooling=pooling.pooling,
        activation=poolings.STOCK_ACTIVATIONS[pooling.stock.activation_function],
        screen=screen,
        impl=impl,
    )
