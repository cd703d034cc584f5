"""Token states to fp8 with a scale a row, for the quantised head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilefold.ops._shared._triton.launch import launcher
from tilefold.ops.lsr_head._triton.launch import cdiv
from tilefold.ops.lsr_head._triton.steps import Piece, Step

FP8_MAX = tl.constexpr(448.0)
TINY = tl.constexpr(2.0**-126)
BLOCK_ROWS = 8


@triton.jit(do_not_specialize=["N"])
def _quantize_rows_kernel(
    rows_ptr, values_ptr, scale_ptr, N, D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    largest = tl.zeros((BLOCK_ROWS,), tl.float32)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = (r < N)[:, None] & (d < D)[None, :]
        x = tl.load(rows_ptr + r.to(tl.int64)[:, None] * D + d[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))  # [BLOCK_ROWS]
    scale = tl.where(largest == 0.0, 1.0, tl.maximum(largest / FP8_MAX, TINY))
    tl.store(scale_ptr + r, scale, mask=r < N)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = (r < N)[:, None] & (d < D)[None, :]
        offs = r.to(tl.int64)[:, None] * D + d[None, :]
        x = tl.load(rows_ptr + offs, mask=inside, other=0.0).to(tl.float32) / scale[:, None]  # [BLOCK_ROWS, BLOCK_D]
        # minimum and maximum would lose a NaN
        x = tl.where(x > FP8_MAX, FP8_MAX, tl.where(x < -FP8_MAX, -FP8_MAX, x))
        tl.store(values_ptr + offs, x.to(values_ptr.dtype.element_ty), mask=inside)


def quantization(source: str, n: int, dim: int, round_to: int) -> tuple[Step, tuple[Piece, ...]]:
    """How ``[n, dim]`` rows become ``"values"`` in fp8 and ``"row_scale"`` in fp32, a multiple of ``round_to`` long."""
    block_d = min(1024, triton.next_power_of_2(dim))
    run = launcher(_quantize_rows_kernel, {"D": dim, "BLOCK_ROWS": BLOCK_ROWS, "BLOCK_D": block_d, "num_warps": 8})
    pieces = (
        Piece("values", (n, dim), torch.float8_e4m3fn),
        Piece("row_scale", (cdiv(n, round_to) * round_to,), torch.float32),
    )
    return Step(run, (cdiv(n, BLOCK_ROWS), 1, 1), (source, "values", "row_scale", n)), pieces
