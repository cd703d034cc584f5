"""Kernel that rounds rows to fp8 with a scale for each: token states or a decoder weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops._shared._triton.program import Program
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops._shared.plan import Buffer, Launch, Plan, cdiv, power_of_two

FP8_MAX = tl.constexpr(448.0)
TINY = tl.constexpr(2.0**-126)
# Longest part of a row that a program holds in registers. Longer rows are read twice.
MAX_BLOCK_D = 16384
# Entries of a warp, 32 of each thread. They hide the latency of memory, and are not spilled.
WARP_ENTRIES = 1024
# Short rows are rounded several at a time, since a GPU starts few programs per microsecond.
PROGRAM_ENTRIES = 4096
# Longest row that is read in two parts. Longer parts would go through shared memory to be stored.
MAX_DIVIDED_D = 1024
_INTERPRETED = tl.constexpr(triton_interpreted())


@triton.jit
def load_part(rows_ptr, r, n_rows, first, D: tl.constexpr, BLOCK: tl.constexpr):
    """Load a range of entries of rows as fp32, zeros outside the rows.

    Args:
        rows_ptr: rows ``[T, D]``.
        r: the rows, ``[BLOCK_ROWS]``.
        n_rows: number of rows that may be read.
        first: the first entry.
        D: entries of a row.
        BLOCK: number of entries.

    Returns:
        ``[BLOCK_ROWS, BLOCK]``.
    """
    d = first + tl.arange(0, BLOCK)
    mask = (r < n_rows)[:, None] & (d < D)[None, :]
    offs = r.to(tl.int64)[:, None] * D + d[None, :]
    return tl.load(rows_ptr + offs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_part(values_ptr, x, scale, r, n_rows, first, D: tl.constexpr, BLOCK: tl.constexpr):
    """Divide a range of entries of rows by the rows' scales, and store the quotients in fp8.

    Args:
        values_ptr: fp8 values ``[T, D]``; written.
        x: the entries ``[BLOCK_ROWS, BLOCK]``.
        scale: scale of each row, ``[BLOCK_ROWS]``.
        r: the rows, ``[BLOCK_ROWS]``.
        n_rows: number of rows that may be written.
        first: the first entry.
        D: entries of a row.
        BLOCK: number of entries.
    """
    d = first + tl.arange(0, BLOCK)
    mask = (r < n_rows)[:, None] & (d < D)[None, :]
    offs = r.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(values_ptr + offs, quotients(x, scale).to(values_ptr.dtype.element_ty), mask=mask)


@triton.jit
def largest_entry(x):
    """Return the largest magnitude of each row, NaN for a row with NaN."""
    return tl.reduce(tl.abs(x), 1, nan_max)


@triton.jit
def quotients(x, scale):
    """Return ``x / scale`` rounded to the nearest fp32 as torch rounds it, without a division.

    Quotients of 16-bit numbers are often halfway between two numbers of fp8, so that their last bit
    decides how they are rounded. The product with the inverse may be wrong in that bit. A fused
    multiply-add computes the remainder exactly, and another one corrects the product (Markstein).
    Remainders below 2^-149 are lost. They belong to entries that fp8 rounds to zero, unless the
    largest entry of their row is below 2^-104. Negative zeros become positive.

    Args:
        x: rows ``[BLOCK_ROWS, BLOCK]``.
        scale: scale of each row, ``[BLOCK_ROWS]``.
    """
    zeros = tl.zeros(x.shape, tl.float32)
    if _INTERPRETED:  # the interpreter's multiply-add rounds twice
        return tl.div_rn(x, scale[:, None] + zeros)
    inverse = tl.div_rn(1.0, scale)[:, None] + zeros
    minus_scale = zeros - scale[:, None]
    quotient = x * inverse
    remainder = tl.fma(quotient, minus_scale, x)
    return tl.fma(remainder, inverse, quotient)


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
    REST_D: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """Round rows to fp8, with a scale for each, to the numbers that torch computes.

    A program reads a short row once, in two parts of BLOCK_D and REST_D entries, which waste fewer
    registers than a single power of two. Rows that are longer than both parts are read twice.

    Grid: ``[ceil(N / BLOCK_ROWS)]``.

    Args:
        rows_ptr: rows ``[T, D]``. Rows after the packed ones become zeros with scale 1.
        offset_ptr: first row of each packed sequence, ``[B + 1]``, unless UNIFORM.
        values_ptr: fp8 values ``[T, D]``; written.
        row_scale_ptr: fp32 scales ``[N]``; written.
        B: number of packed sequences.
        T: number of rows.
        N: number of scales, at least T.
        D: entries of a row.
        BLOCK_ROWS: rows of a program.
        BLOCK_D: entries of the first part.
        REST_D: entries of the second part, or 0.
        UNIFORM: whether all rows are read.
    """
    n_rows = T if UNIFORM else tl.load(offset_ptr + B)
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    IS_READ_ONCE: tl.constexpr = D <= BLOCK_D + REST_D
    x = load_part(rows_ptr, r, n_rows, 0, D, BLOCK_D)
    largest = largest_entry(x)
    if REST_D > 0:
        rest = load_part(rows_ptr, r, n_rows, BLOCK_D, D, REST_D)
        largest = nan_max(largest, largest_entry(rest))
    if not IS_READ_ONCE:
        for first in range(BLOCK_D, D, BLOCK_D):
            part = load_part(rows_ptr, r, n_rows, first, D, BLOCK_D)
            largest = nan_max(largest, largest_entry(part))

    scale = tl.where(largest == 0.0, 1.0, nan_max(tl.div_rn(largest, FP8_MAX), TINY))
    tl.store(row_scale_ptr + r, scale, mask=r < N)
    store_part(values_ptr, x, scale, r, T, 0, D, BLOCK_D)
    if REST_D > 0:
        store_part(values_ptr, rest, scale, r, T, BLOCK_D, D, REST_D)
    if not IS_READ_ONCE:
        for first in range(BLOCK_D, D, BLOCK_D):
            part = load_part(rows_ptr, r, n_rows, first, D, BLOCK_D)
            store_part(values_ptr, part, scale, r, T, first, D, BLOCK_D)


def row_constants(dim: int) -> dict[str, int]:
    """Return the kernel's constants for rows of ``dim`` entries."""
    block_d = min(MAX_BLOCK_D, power_of_two(dim, 1))
    rest_d = 0
    if dim < block_d <= MAX_DIVIDED_D:
        block_d //= 2
        rest_d = power_of_two(dim - block_d, 1)
    n_entries = block_d + rest_d
    block_rows = max(1, PROGRAM_ENTRIES // power_of_two(n_entries, 1))
    n_warps = power_of_two(cdiv(block_rows * n_entries, WARP_ENTRIES), 1)
    return {
        "D": dim,
        "BLOCK_ROWS": block_rows,
        "BLOCK_D": block_d,
        "REST_D": rest_d,
        "num_warps": n_warps,
    }


def make_program(rows: Tensor, aligned: bool) -> Program:
    """Return a program that rounds rows of this shape and dtype: ``values, scale = program(rows)``.

    Args:
        rows: contiguous rows ``[N, D]`` on the current device, with N > 0.
        aligned: whether they begin at a multiple of 16 bytes.
    """
    count, dim = rows.shape
    constants = row_constants(dim) | {"UNIFORM": True}
    rounding = Launch(
        quantize_rows_kernel,
        grid=(cdiv(count, constants["BLOCK_ROWS"]), 1, 1),
        tensors=("rows", "offset", "values", "scale"),
        numbers=(0, count, count),
        constants=constants,
    )
    results = {
        "values": Buffer((count, dim), torch.float8_e4m3fn),
        "scale": Buffer((count,), torch.float32),
    }
    return Program(Plan((rounding,)), ("rows",), results, rows.device, aligned)
