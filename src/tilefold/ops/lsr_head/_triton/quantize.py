"""Kernel that rounds rows to fp8 with a scale for each: token states or a decoder weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilefold.ops._shared._triton.launch import launch
from tilefold.ops._shared.plan import cdiv, power_of_two

FP8_MAX = tl.constexpr(448.0)
TINY = tl.constexpr(2.0**-126)
BLOCK_ROWS = 8


@triton.jit(do_not_specialize=["B", "T", "N"])
def quantize_rows_kernel(
    rows_ptr,
    offset_ptr,
    values_ptr,
    row_scale_ptr,
    B,
    T,
    N,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """Round rows to fp8, with a scale for each.

    Instance j handles BLOCK_ROWS rows. There are ``T`` rows and ``N >= T`` scales. Rows from
    ``offset[B]`` on, which are not packed ones, become zeros with scale 1.

    Args:
        rows_ptr: rows ``[T, D]``.
        offset_ptr: ``[B + 1]`` first rows of packed sequences, unless UNIFORM.
        values_ptr: fp8 values ``[T, D]``; written.
        row_scale_ptr: fp32 scales ``[N]``; written.
    """
    n_rows = T if UNIFORM else tl.load(offset_ptr + B)
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    largest = tl.zeros((BLOCK_ROWS,), tl.float32)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = (r < n_rows)[:, None] & (d < D)[None, :]
        x = tl.load(rows_ptr + r.to(tl.int64)[:, None] * D + d[None, :], mask=inside, other=0.0).to(
            tl.float32,
        )
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=1))  # [BLOCK_ROWS]
    scale = tl.where(largest == 0.0, 1.0, tl.maximum(largest / FP8_MAX, TINY))
    tl.store(row_scale_ptr + r, scale, mask=r < N)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = (r < n_rows)[:, None] & (d < D)[None, :]
        offs = r.to(tl.int64)[:, None] * D + d[None, :]
        x = (
            tl.load(rows_ptr + offs, mask=inside, other=0.0).to(tl.float32) / scale[:, None]
        )  # [BLOCK_ROWS, BLOCK_D]
        # minimum and maximum would lose a NaN
        x = tl.where(x > FP8_MAX, FP8_MAX, tl.where(x < -FP8_MAX, -FP8_MAX, x))
        tl.store(
            values_ptr + offs,
            x.to(values_ptr.dtype.element_ty),
            mask=(r < T)[:, None] & (d < D)[None, :],
        )


def row_constants(dim: int) -> dict[str, int]:
    """Return the kernel's constants for rows of ``dim`` entries."""
    return {
        "D": dim,
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_D": min(1024, power_of_two(dim, 1)),
        "num_warps": 8,
    }


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows ``[N, D]`` on the current device to fp8, with ``[N]`` fp32 scales."""
    count, dim = rows.shape
    values = torch.empty(count, dim, dtype=torch.float8_e4m3fn, device=rows.device)
    scale = torch.empty(count, dtype=torch.float32, device=rows.device)
    if count:
        arguments = (rows.contiguous(), None, values, scale, 0, count, count)
        launch(
            quantize_rows_kernel,
            (cdiv(count, BLOCK_ROWS), 1, 1),
            arguments,
            row_constants(dim) | {"UNIFORM": True},
        )
    return values, scale
