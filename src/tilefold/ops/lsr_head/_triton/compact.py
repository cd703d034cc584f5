"""Kernel that appends selected scores of a block of columns to rows of a fixed capacity."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilefold.ops._shared._triton.launch import (
    STAND_IN_ADDRESS,
    Build,
    Memory,
    launch,
    start_builds,
)

BLOCK = 2048  # columns that are read at a time
CONSTANTS = {"BLOCK": BLOCK, "num_warps": 8}


@triton.jit(do_not_specialize=["C", "first", "minimum"])
def append_kernel(
    scores_ptr,
    count_ptr,
    columns_ptr,
    values_ptr,
    C,
    capacity,
    first,
    minimum,
    BLOCK: tl.constexpr,
):
    """Append the scores above ``minimum`` of one row of a block to the row's entries.

    Program instance b handles row b. Entries are in the order of the columns.

    Args:
        scores_ptr: ``[B, C]`` fp32 scores of the block.
        count_ptr: ``[B]`` int32 entries of each row so far, also those beyond ``capacity``.
        columns_ptr: ``[B, capacity]`` int32 columns of the entries.
        values_ptr: ``[B, capacity]`` fp32 scores of the entries.
        C: columns of the block.
        capacity: entries that a row can hold.
        first: first column of the block.
        minimum: entries have to be greater. NaN is always selected.
        BLOCK: columns that are read at a time.
    """
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(count_ptr + b)
    for c0 in range(0, C, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + b * C + c, mask=c < C, other=0.0)
        # NaN is selected, so that it is noticed
        selected = ((score > minimum) | (score != score)) & (c < C)
        ones = selected.to(tl.int32)
        index = count + tl.cumsum(ones) - 1
        fits = selected & (index < capacity)
        tl.store(columns_ptr + b * capacity + index, first + c, mask=fits)
        tl.store(values_ptr + b * capacity + index, score, mask=fits)
        count += tl.sum(ones)
    tl.store(count_ptr + b, count)


def start_append_build(width: int, capacity: int, device: torch.device) -> None:
    """Let a background thread compile the kernel of :func:`append_rows`.

    Args:
        width: columns of a block of scores.
        capacity: entries that a row can hold.
        device: the GPU.
    """
    tensors = [
        Memory(dtype, STAND_IN_ADDRESS)
        for dtype in (torch.float32, torch.int32, torch.int32, torch.float32)
    ]
    first_column = 0
    minimum = 0.0
    arguments = (*tensors, width, capacity, first_column, minimum)
    start_builds([Build(append_kernel, (1, 1, 1), arguments, CONSTANTS)], device)


def append_rows(
    scores: Tensor,
    first_column: int,
    minimum: float,
    counts: Tensor,
    columns: Tensor,
    values: Tensor,
) -> None:
    """Append the entries above ``minimum`` of a block of scores to sparse rows, in place.

    Args:
        scores: ``[B, C]`` fp32 scores of the block.
        first_column: first column of the block.
        minimum: entries have to be greater. NaN is always selected.
        counts: ``[B]`` int32 entries of each row, also those beyond the capacity.
        columns: ``[B, capacity]`` int32 columns of the entries.
        values: ``[B, capacity]`` fp32 scores of the entries.
    """
    batch, width = scores.shape
    if batch:
        arguments = (
            scores,
            counts,
            columns,
            values,
            width,
            columns.size(1),
            first_column,
            float(minimum),
        )
        launch(append_kernel, (batch, 1, 1), arguments, CONSTANTS)
