"""Kernels of an accelerated SparseEncoder that threads compile while its checks run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tilefold.integrations.sentence_transformers._heads import FusablePooling, base_linear
from tilefold.integrations.sentence_transformers._pooling import (
    StockPooling,
    fused_forwards,
    fused_pooling,
    stock_output_dtype,
)
from tilefold.integrations.sentence_transformers.graphs.encoding import CAPACITY
from tilefold.integrations.sentence_transformers.streaming.stream import GPU_TOKENS
from tilefold.modules import fused_pooling as poolings
from tilefold.ops.lsr_head import ExpectedCall, compile_ahead, compile_training_ahead

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

# Tokens of a text in a training batch. Only their magnitude matters.
_TRAINING_TOKENS = 64


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
    linear = base_linear(fusable.head)
    if not _is_known(pooling, linear):
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


def compile_training_head_ahead(trainer: Any) -> None:
    """Start to compile the kernels with which a trainer's fused heads train; return at once.

    Args:
        trainer: a trainer of sentence-transformers, with an accelerated model.
    """
    arguments = trainer.args
    autocast_dtype = None
    if arguments.bf16:
        autocast_dtype = torch.bfloat16
    elif arguments.fp16:
        autocast_dtype = torch.float16
    texts = arguments.per_device_train_batch_size
    for forward in fused_forwards(trainer.model):
        if forward.head is None:
            continue
        pooling = forward.pooling
        linear = base_linear(forward.head)
        if not _is_known(pooling, linear):
            continue
        weight = linear.weight
        out_dtype = weight.dtype
        if autocast_dtype is not None and weight.is_cuda:
            out_dtype = stock_output_dtype(
                "cuda",
                autocast_dtype,
                pooling.pooling,
                pooling.stock.activation_function,
                training=True,
                packed=True,
            )
        compile_training_ahead(
            ExpectedCall(texts=texts, tokens=texts * _TRAINING_TOKENS),
            weight,
            linear.bias,
            pooling=pooling.pooling,
            activation=poolings.STOCK_ACTIVATIONS[pooling.stock.activation_function],
            screen=pooling.screens_int8,
            compute_dtype=autocast_dtype or weight.dtype,
            out_dtype=out_dtype,
            impl=forward.impl,
        )


def _is_known(pooling: object, linear: nn.Linear) -> bool:
    """Return whether the calls of a head can be foreseen.

    Those of poolings that are not stock cannot, nor those of weights that are sharded or quantised.
    """
    return isinstance(pooling, StockPooling) and type(linear.weight) is nn.Parameter
