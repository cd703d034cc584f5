"""Query of each row of packed queries."""

from __future__ import annotations

import triton
import triton.language as tl


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
