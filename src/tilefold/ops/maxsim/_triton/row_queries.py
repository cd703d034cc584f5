"""Which query each row of packed queries belongs to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.tensors import cdiv
from tilefold.ops.maxsim._triton import plan as at
from tilefold.ops.maxsim._triton.plan import Make, Run, Stage

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


def row_queries(queries: Tensor, count: int) -> list[Stage]:
    """``[Tq]`` int32 numbers of the queries, ``count`` of them, that the offsets give rows of ``queries`` to."""
    rows = queries.size(0)
    constants = {"BLOCK": BLOCK, "num_warps": 4, "num_stages": 1}
    step = Step(row_query_kernel, (cdiv(rows, BLOCK), 1, 1), (rows, count, count.bit_length()), constants)
    return [Make(at.ROW_QUERY, queries, (rows,), torch.int32), Run(step, (at.CU_QUERIES, at.ROW_QUERY))]
