"""Which query each row of packed queries belongs to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilefold.ops._shared._triton.launch import Grid, Launcher, launcher
from tilefold.ops.maxsim._triton.rows import cdiv

BLOCK = 256


@triton.jit(do_not_specialize=["Tq", "Nq", "steps"])
def row_query_kernel(cu_q_ptr, row_query_ptr, Tq, Nq, steps, BLOCK: tl.constexpr):
    """``row_query[row]``: the first sequence that ends behind ``row``, or the last one, by ``steps`` bisections."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + Nq
    for _ in range(steps):
        searching = low < high
        middle = (low + high) // 2
        end = tl.load(cu_q_ptr + 1 + middle, mask=searching, other=0)
        ended = end <= row
        low = tl.where(searching & ended, middle + 1, low)
        high = tl.where(searching & (end > row), middle, high)
    tl.store(row_query_ptr + row, tl.minimum(low, Nq - 1), mask=row < Tq)


def row_queries_launch(rows: int, count: int) -> tuple[Launcher, Grid, tuple[int, int, int]]:
    """The launcher for ``rows`` of ``count`` queries, its programs and its numbers."""
    run = launcher(row_query_kernel, {"BLOCK": BLOCK, "num_warps": 4, "num_stages": 1})
    return run, (cdiv(rows, BLOCK), 1, 1), (rows, count, count.bit_length())


def row_queries(offsets: Tensor, rows: int) -> Tensor:
    """``[rows]`` int32 numbers of the queries that ``offsets`` ``[Nq + 1]`` give the rows to."""
    out = torch.empty(rows, dtype=torch.int32, device=offsets.device)
    run, grid, numbers = row_queries_launch(rows, offsets.numel() - 1)
    run(grid, (offsets, out, *numbers))
    return out
