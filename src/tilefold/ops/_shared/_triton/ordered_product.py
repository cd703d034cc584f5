"""Products of fp32 matrices in which every sum adds its terms one after another.

A thread owns one column and a few rows of the result, and adds by fused multiply-adds in the order
of K. The bits of a row then depend on nothing but its numbers. Libraries add in the same order if
there are many rows, but not if there are few.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilefold.ops._shared._triton.program import Program
from tilefold.ops._shared.plan import Buffer, Launch, Plan, cdiv

BLOCK_ROWS = 4  # rows of a thread
BLOCK_COLUMNS = 32  # columns of a program instance: one of each thread


@triton.jit
def add_products(sums, row_pointers, weights, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the products of four inputs, one after another.

    Args:
        sums: ``[ROWS, COLUMNS]``.
        row_pointers: addresses of the inputs of the rows ``[ROWS, 4]``.
        weights: ``[COLUMNS, 4]``.
    """
    # A tile is split into the even and the odd inputs, and these once more.
    even_inputs, odd_inputs = tl.split(tl.reshape(tl.load(row_pointers), (ROWS, 2, 2)))
    even_weights, odd_weights = tl.split(tl.reshape(weights, (COLUMNS, 2, 2)))
    x0, x2 = tl.split(even_inputs)
    x1, x3 = tl.split(odd_inputs)
    v0, v2 = tl.split(even_weights)
    v1, v3 = tl.split(odd_weights)
    sums = tl.fma(x0[:, None], v0[None, :], sums)
    sums = tl.fma(x1[:, None], v1[None, :], sums)
    sums = tl.fma(x2[:, None], v2[None, :], sums)
    return tl.fma(x3[:, None], v3[None, :], sums)


@triton.jit(do_not_specialize=["M"])
def ordered_product_kernel(
    rows_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Compute a tile of ``rows @ weight.T + bias``, adding products in the order of the inputs.

    A thread computes one column of ``ROWS`` rows. A step of the loop multiplies 64 inputs, in 16
    groups of four. The weights of a group are loaded one step before they are used, so that their
    load overlaps with products.

    No load has a mask, which would take more instructions than the products. Rows and columns after
    the last one read the last one instead, and are not stored. The last step loads its own weights
    again.

    Grid: ``[ceil(N / COLUMNS), ceil(M / ROWS)]``.

    Args:
        rows_ptr: fp32 rows ``[M, K]``.
        weight_ptr: fp32 weight ``[N, K]``.
        bias_ptr: fp32 bias ``[N]``; not read without ``HAS_BIAS``.
        out_ptr: fp32 result ``[M, N]``; written.
        M: number of rows.
        N: number of columns.
        K: number of inputs, a multiple of 64.
        ROWS: rows of a program.
        COLUMNS: columns of a program.
        HAS_BIAS: whether there is a bias.
    """
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.minimum(m, M - 1)
    column = tl.minimum(n, N - 1)
    k = tl.arange(0, 4)
    row_pointers = rows_ptr + row[:, None] * K + k[None, :]
    weight_pointers = weight_ptr + column[:, None].to(tl.int64) * K + k[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    # One variable for each group, since Triton has no arrays of tiles in registers.
    w0 = tl.load(weight_pointers)
    w1 = tl.load(weight_pointers + 4)
    w2 = tl.load(weight_pointers + 8)
    w3 = tl.load(weight_pointers + 12)
    w4 = tl.load(weight_pointers + 16)
    w5 = tl.load(weight_pointers + 20)
    w6 = tl.load(weight_pointers + 24)
    w7 = tl.load(weight_pointers + 28)
    w8 = tl.load(weight_pointers + 32)
    w9 = tl.load(weight_pointers + 36)
    w10 = tl.load(weight_pointers + 40)
    w11 = tl.load(weight_pointers + 44)
    w12 = tl.load(weight_pointers + 48)
    w13 = tl.load(weight_pointers + 52)
    w14 = tl.load(weight_pointers + 56)
    w15 = tl.load(weight_pointers + 60)
    for k0 in range(0, K, 64):
        step_pointers = row_pointers + k0
        next_pointers = weight_pointers + tl.minimum(k0 + 64, K - 64)
        sums = add_products(sums, step_pointers, w0, ROWS, COLUMNS)
        w0 = tl.load(next_pointers)
        sums = add_products(sums, step_pointers + 4, w1, ROWS, COLUMNS)
        w1 = tl.load(next_pointers + 4)
        sums = add_products(sums, step_pointers + 8, w2, ROWS, COLUMNS)
        w2 = tl.load(next_pointers + 8)
        sums = add_products(sums, step_pointers + 12, w3, ROWS, COLUMNS)
        w3 = tl.load(next_pointers + 12)
        sums = add_products(sums, step_pointers + 16, w4, ROWS, COLUMNS)
        w4 = tl.load(next_pointers + 16)
        sums = add_products(sums, step_pointers + 20, w5, ROWS, COLUMNS)
        w5 = tl.load(next_pointers + 20)
        sums = add_products(sums, step_pointers + 24, w6, ROWS, COLUMNS)
        w6 = tl.load(next_pointers + 24)
        sums = add_products(sums, step_pointers + 28, w7, ROWS, COLUMNS)
        w7 = tl.load(next_pointers + 28)
        sums = add_products(sums, step_pointers + 32, w8, ROWS, COLUMNS)
        w8 = tl.load(next_pointers + 32)
        sums = add_products(sums, step_pointers + 36, w9, ROWS, COLUMNS)
        w9 = tl.load(next_pointers + 36)
        sums = add_products(sums, step_pointers + 40, w10, ROWS, COLUMNS)
        w10 = tl.load(next_pointers + 40)
        sums = add_products(sums, step_pointers + 44, w11, ROWS, COLUMNS)
        w11 = tl.load(next_pointers + 44)
        sums = add_products(sums, step_pointers + 48, w12, ROWS, COLUMNS)
        w12 = tl.load(next_pointers + 48)
        sums = add_products(sums, step_pointers + 52, w13, ROWS, COLUMNS)
        w13 = tl.load(next_pointers + 52)
        sums = add_products(sums, step_pointers + 56, w14, ROWS, COLUMNS)
        w14 = tl.load(next_pointers + 56)
        sums = add_products(sums, step_pointers + 60, w15, ROWS, COLUMNS)
        w15 = tl.load(next_pointers + 60)
    if HAS_BIAS:
        sums += tl.load(bias_ptr + column)[None, :]
    out_pointers = out_ptr + m[:, None] * N + n[None, :]
    tl.store(out_pointers, sums, mask=(m < M)[:, None] & (n < N)[None, :])


def make_program(
    n_rows: int,
    n_outputs: int,
    n_inputs: int,
    has_bias: bool,
    is_aligned: bool,
    device: torch.device,
) -> Program:
    """Return a program that multiplies operands: ``(out,) = program(rows, weight, bias)``.

    Args:
        n_rows: rows M of ``rows``, at least 1.
        n_outputs: rows N of ``weight``, at least 1.
        n_inputs: columns K of both.
        has_bias: whether a bias is added. Otherwise the third operand is None.
        is_aligned: whether all operands begin at multiples of 16 bytes.
        device: the device of the operands.
    """
    launch = Launch(
        ordered_product_kernel,
        grid=(cdiv(n_outputs, BLOCK_COLUMNS), cdiv(n_rows, BLOCK_ROWS), 1),
        tensors=("rows", "weight", "bias", "out"),
        numbers=(n_rows, n_outputs, n_inputs),
        constants={
            "ROWS": BLOCK_ROWS,
            "COLUMNS": BLOCK_COLUMNS,
            "HAS_BIAS": has_bias,
            "num_warps": 1,
        },
    )
    return Program(
        plan=Plan((launch,)),
        input_names=("rows", "weight", "bias"),
        results={"out": Buffer((n_rows, n_outputs), torch.float32)},
        device=device,
        aligned=is_aligned,
    )
