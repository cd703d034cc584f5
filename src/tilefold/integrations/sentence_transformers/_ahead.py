"""Kernels of an accelerated SparseEncoder that background threads compile ahead of its calls."""

from __future__ import annotations

from collections.abc import Sequence
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
from tilefold.modules import fused_pooling as poolings
from tilefold.ops.implementations import start_compiler
from tilefold.ops.lsr_head import ExpectedCall, compile_ahead, compile_training_ahead

# The two short texts of the self-checks, padded and packed.
_CHECKS = (
    ExpectedCall(texts=2, tokens=30, packed=False),
    ExpectedCall(texts=2, tokens=18),
)
# A few documents. Queries, and many documents, need one or two other kernels, which are compiled at
# their first call. Threads that compile hold the GIL for a quarter of the time, so kernels
# that the next call does not need would delay it.
_DOCUMENTS = (ExpectedCall(texts=64, tokens=64 * 256, capacity=CAPACITY),)
# Tokens of a text in a training batch. Only their magnitude matters.
_TRAINING_TOKENS = 64


def compile_head_ahead(
    fusable: FusablePooling,
    *,
    impl: str,
    screen: bool,
    check: bool,
) -> None:
    """Start to compile the kernels of self-checks and of a few documents, and return at once.

    Only calls for a ``SpladePooling`` can be foreseen. Kernels that other poolings need are
    compiled at their first call.

    Args:
        fusable: the pooling with its head.
        impl: the implementation of the operator.
        screen: whether the operator first finds the scores that can be positive, by a product in
            int8.
        check: whether self-checks run next.
    """
    calls = (*_CHECKS, *_DOCUMENTS) if check else _DOCUMENTS
    _compile_known_calls(calls, fused_pooling(fusable.pooling), fusable.head, screen, impl)


def _compile_known_calls(
    calls: Sequence[ExpectedCall],
    pooling: Any,
    head: nn.Module,
    screen: bool,
    impl: str,
) -> None:
    """Start to compile the kernels of a head for some calls, if these can be foreseen.

    Args:
        calls: the calls, the first one first.
        pooling: the fused pooling.
        head: the LM head before it.
        screen: whether the operator first finds the scores that can be positive, by a product in
            int8.
        impl: the implementation of the operator.
    """
    linear = base_linear(head)
    if _can_foresee_calls(pooling, linear):
        compile_ahead(
            calls,
            linear.weight,
            linear.bias,
            pooling=pooling.pooling,
            activation=poolings.STOCK_ACTIVATIONS[pooling.splade_pooling.activation_function],
            screen=screen,
            impl=impl,
        )


def prepare_training(trainer: Any, compiled: bool) -> None:
    """Start to compile what the first steps of a training on a GPU need.

    Args:
        trainer: a trainer of sentence-transformers, with an accelerated model.
        compiled: whether torch.compile will compile layers.
    """
    if trainer.model.device.type != "cuda":
        return
    compile_training_head_ahead(trainer)
    if compiled:
        start_compiler()


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
        pooling: Any = forward.pooling
        linear = base_linear(forward.head)
        if not _can_foresee_calls(pooling, linear):
            continue
        weight = linear.weight
        out_dtype = weight.dtype
        if autocast_dtype is not None and weight.is_cuda:
            out_dtype = stock_output_dtype(
                "cuda",
                autocast_dtype,
                pooling.pooling,
                pooling.splade_pooling.activation_function,
                training=True,
                packed=True,
            )
        compile_training_ahead(
            ExpectedCall(texts=texts, tokens=texts * _TRAINING_TOKENS),
            weight,
            linear.bias,
            pooling=pooling.pooling,
            activation=poolings.STOCK_ACTIVATIONS[pooling.splade_pooling.activation_function],
            screen=pooling.screens_int8,
            compute_dtype=autocast_dtype or weight.dtype,
            out_dtype=out_dtype,
            impl=forward.impl,
        )


def _can_foresee_calls(pooling: object, linear: nn.Linear) -> bool:
    """Return whether the calls of the operator for a pooling and its head can be foreseen.

    They can for the ``SpladePooling`` of sentence-transformers, with a weight that is neither
    sharded nor quantised.
    """
    return isinstance(pooling, StockPooling) and type(linear.weight) is nn.Parameter
