"""Kernels of the head that background threads compile before the first call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.background import usable_cores
from tilefold.ops.lsr_head._arguments import check_arguments
from tilefold.ops.lsr_head._problem import HeadOptions, HeadTensors
from tilefold.ops.lsr_head.api import HEAD, rows_block_size

# With fewer cores, threads that compile would take them from the thread that needs the kernels.
FEWEST_CORES = 4


class ExpectedCall(NamedTuple):
    """A call of the head for inference that will probably follow.

    Kernels are chosen by the magnitude of these numbers, and by whether 16 divides them.

    Attributes:
        texts: number of texts B.
        tokens: number of tokens of all texts.
        packed: whether the texts are packed. Otherwise they are padded, with a mask of int64.
        capacity: entries that a sparse row of ``lsr_head_rows`` can hold; ``None`` for a call of
            ``lsr_head``, whose scores are dense.
    """

    texts: int
    tokens: int
    packed: bool = True
    capacity: int | None = None


def compile_ahead(
    calls: Iterable[ExpectedCall],
    weight: Tensor,
    bias: Tensor | None,
    *,
    pooling: str,
    activation: str,
    screen: bool,
    impl: str = "auto",
) -> None:
    """Start to compile the kernels of expected calls, and return at once.

    Nothing is started on CPUs, where kernels do not run, or with fewer than four usable cores.

    Args:
        calls: the calls, the first one first. Their hidden states have the dtype of the weight.
        weight: ``[V, D]``.
        bias: ``[V]``, or ``None``.
        pooling: reduction over the tokens of a text, such as ``"max"``.
        activation: function applied to logits, such as ``"log1p_relu"``.
        screen: whether an 8-bit product first excludes scores that cannot be positive.
        impl: name of the implementation. Only that of Triton has kernels.
    """
    if not _can_compile(weight, impl):
        return
    for call in calls:
        for n_columns in _block_widths(call, weight.size(0)):
            tensors = _tensors_without_memory(call, n_columns, weight, bias)
            # Scores that become sparse rows (of a fixed capacity) are selected in fp32.
            out_dtype = weight.dtype if call.capacity is None else torch.float32
            options = check_arguments(
                tensors,
                pooling,
                activation,
                1.0,  # logit_scale
                out_dtype,
                screen,
            ).options
            HEAD.compile_ahead(tensors, options, weight.device)
        if call.capacity is not None:
            # the kernel that appends the positive scores of a block to sparse rows
            from tilefold.ops.lsr_head._triton.compact import start_append_build

            start_append_build(weight.size(0), call.capacity, weight.device)


def compile_training_ahead(
    call: ExpectedCall,
    weight: Tensor,
    bias: Tensor | None,
    *,
    pooling: str,
    activation: str,
    screen: bool,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
    impl: str = "auto",
) -> None:
    """Start to compile the kernels of an expected call and of its gradients, and return at once.

    Args:
        call: the sizes of the batch that will be passed. Its hidden states will have the dtype of
            the weight.
        weight: ``[V, D]``.
        bias: ``[V]``, or ``None``.
        pooling: reduction over the tokens of a text, such as ``"max"``.
        activation: function applied to logits, such as ``"log1p_relu"``.
        screen: whether a product in 8 bits first finds the scores that can be positive, so that
            the exact product leaves out the others.
        compute_dtype: dtype of the products: that of autocast, or of the weight.
        out_dtype: dtype of the scores.
        impl: name of the implementation. Only that of Triton has kernels.
    """
    if not _can_compile(weight, impl):
        return
    tensors = _tensors_without_memory(call, weight.size(0), weight, bias)
    options = HeadOptions(
        pooling=pooling,
        activation=activation,
        logit_scale=1.0,
        out_dtype=out_dtype,
        compute_dtype=compute_dtype,
        bias_dtype=None if bias is None else bias.dtype,
        screen=screen,
    )
    # Which of the hidden states, the weight and the bias need a gradient.
    needs_gradient = (True, weight.requires_grad, bias is not None and bias.requires_grad)
    HEAD.compile_ahead(tensors, options, weight.device, needs_gradient)


def _can_compile(weight: Tensor, impl: str) -> bool:
    """Return whether threads should compile kernels for this weight."""
    return (
        weight.device.type == "cuda"
        and usable_cores() >= FEWEST_CORES
        and HEAD.chosen_impl(weight, impl) == "triton"
    )


def _block_widths(call: ExpectedCall, vocab: int) -> list[int]:
    """Return the different widths of the blocks of the vocabulary that a call is divided into.

    Only calls for sparse rows are divided. The last block may be narrower than the others.
    """
    if call.capacity is None:
        return [vocab]
    block_size = rows_block_size(call.texts)
    if vocab <= block_size:
        return [vocab]
    last_width = vocab % block_size
    return [block_size, last_width] if last_width else [block_size]


def _tensors_without_memory(
    call: ExpectedCall,
    n_columns: int,
    weight: Tensor,
    bias: Tensor | None,
) -> HeadTensors:
    """Return tensors on the meta device with the shapes, strides and dtypes of a call.

    Args:
        call: the call.
        n_columns: columns of a block of the vocabulary.
        weight: ``[V, D]`` weight of all blocks.
        bias: ``[V]`` bias of all blocks, or ``None``.
    """
    dim = weight.size(1)
    hidden_shape: tuple[int, ...] = (call.tokens, dim)
    mask = cu_seqlens = None
    with torch.device("meta"):
        if call.packed:
            cu_seqlens = torch.empty(call.texts + 1, dtype=torch.int32)
        else:
            length = call.tokens // call.texts
            hidden_shape = (call.texts, length, dim)
            mask = torch.empty(call.texts, length, dtype=torch.int64)
        return HeadTensors(
            hidden=torch.empty(hidden_shape, dtype=weight.dtype),
            attention_mask=mask,
            cu_seqlens=cu_seqlens,
            weight=torch.empty(n_columns, dim, dtype=weight.dtype),
            weight_scale=None,
            bias=None if bias is None else torch.empty(n_columns, dtype=bias.dtype),
        )
