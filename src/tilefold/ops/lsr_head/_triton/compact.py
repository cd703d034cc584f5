"""Appends the kept scores of a block of columns to rows of fixed capacity, in the order of the
columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilefold.ops._shared._triton.launch import launch

BLOCK = 2048  # columns that a program looks at together
WARPS = 8


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
    """Row b of ``scores [B, C]``; ``count_ptr [B]`` says where its entries go on, also past
    ``capacity``.
    """
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(count_ptr + b)
    for c0 in range(0, C, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + b * C + c, mask=c < C, other=0.0)
        kept = ((score > minimum) | (score != score)) & (c < C)  # NaN is kept, so that it is seen
        ones = kept.to(tl.int32)
        place = count + tl.cumsum(ones) - 1
        fits = kept & (place < capacity)
        tl.store(columns_ptr + b * capacity + place, first + c, mask=fits)
        tl.store(values_ptr + b * capacity + place, score, mask=fits)
        count += tl.sum(ones)
    tl.store(count_ptr + b, count)


def append_rows(
    scores: Tensor,
    first_column: int,
    minimum: float,
    counts: Tensor,
    columns: Tensor,
    values: Tensor,
) -> None:
    """Append entries above ``minimum`` of fp32 ``scores`` ``[B, C]`` to ``columns`` and ``values``
    ``[B, capacity]``.

    ``counts`` ``[B]`` int32 is what each row has so far; it counts entries that found no room too.
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
        launch(append_kernel, (batch, 1, 1), arguments, {"BLOCK": BLOCK, "num_warps": WARPS})
