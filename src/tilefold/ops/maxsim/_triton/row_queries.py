"""Which query each row of packed queries belongs to."""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.tensors import cdiv
from tilefold.ops.maxsim._triton import plan as at
from tilefold.ops.maxsim._triton.plan import Run

BLOCK = 256


@triton.jit
def query_of(cu_q_ptr, row, Nq, steps):
    """The first sequence that ends behind each row, or the last one, by ``steps`` bisections."""
    low = row * 0
    high = low + Nq
    for _ in range(steps):
        searching = low < high
        middle = (low + high) // 2
        end = tl.load(cu_q_ptr + 1 + middle, mask=searching, other=0)
        ended = end <= row
        low = tl.where(searching & ended, middle + 1, low)
        high = tl.where(searching & (end > row), middle, high)
    return tl.minimum(low, Nq - 1)


@triton.jit(do_not_specialize=["Tq", "Nq", "steps"])
def row_query_kernel(cu_q_ptr, row_query_ptr, Tq, Nq, steps, BLOCK: tl.constexpr):
    """``row_query[row]``: :func:`query_of` each."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(row_query_ptr + row, query_of(cu_q_ptr, row, Nq, steps), mask=row < Tq)


def row_queries(rows: int, count: int) -> Run:
    """``[Tq]`` int32 numbers of the queries, ``count`` of them, that the offsets give ``rows`` to."""
    constants = {"BLOCK": BLOCK, "num_warps": 4, "num_stages": 1}
    step = Step(row_query_kernel, (cdiv(rows, BLOCK), 1, 1), (rows, count, count.bit_length()), constants)
    return Run(step, (at.CU_QUERIES, at.ROW_QUERY))
