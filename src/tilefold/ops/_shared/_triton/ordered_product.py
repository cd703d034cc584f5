"""Products of fp32 matrices in which every sum adds its terms one after another, in Gluon.

A thread owns one column and a few rows of the result, and adds by fused multiply-adds in the order
of K. The bits of a row then depend on nothing but its numbers. Libraries add in the same order if
there are many rows, but not if there are few.

A sum cannot be divided, so the time of a product is that of K dependent additions. Everything else
must happen meanwhile: weights and rows are copied to shared memory several steps before they are
multiplied.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tilefold.ops._shared._triton.program import Program
from tilefold.ops._shared._triton.releases import gluon_async_load
from tilefold.ops._shared.plan import Buffer, Launch, Plan, cdiv

# A warp computes a tile: each of its threads one column of four rows.
THREAD_ROWS = gl.constexpr(4)
BLOCK_ROWS = gl.constexpr(16)
BLOCK_COLUMNS = gl.constexpr(8)
# Inputs of a step, for which tiles are copied, and of a part of it, which is held in registers.
BLOCK_K = gl.constexpr(64)
PART_K = gl.constexpr(32)
# Steps in shared memory: one is multiplied, and the others are on their way.
STAGES = gl.constexpr(8)
# Numbers of fp32 in 16 bytes, which a thread copies or loads at once.
VECTOR = gl.constexpr(4)
_async_load = gluon_async_load()
_commit_group = async_copy.commit_group
_wait_group = async_copy.wait_group


@gluon.jit
def _first_and_last_half(tile):
    """Divide a tile along its columns.

    Args:
        tile: ``[n, width]``, with all columns of a row in the same thread.

    Returns:
        The first and the last ``width / 2`` columns, ``[n, width / 2]``.
    """
    halves = gl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2))
    return gl.split(gl.permute(halves, (0, 2, 1)))


@gluon.jit
def _add_products(sums, rows, weights):
    """Add the products of inputs one after another, in the order of the inputs.

    The function calls itself for the first half of the inputs, and then for the last half.

    Args:
        sums: ``[BLOCK_ROWS, BLOCK_COLUMNS]``.
        rows: ``[BLOCK_ROWS, width]``.
        weights: ``[BLOCK_COLUMNS, width]``.

    Returns:
        The new sums.
    """
    width: gl.constexpr = rows.shape[1]
    if width == 1:
        row_layout: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
        column_layout: gl.constexpr = gl.SliceLayout(0, sums.type.layout)
        # The numbers are in the right threads already, only under another name of the layout.
        x = gl.convert_layout(gl.reshape(rows, (BLOCK_ROWS,)), row_layout, assert_trivial=True)
        w = gl.convert_layout(
            gl.reshape(weights, (BLOCK_COLUMNS,)),
            column_layout,
            assert_trivial=True,
        )
        return gl.fma(x[:, None], w[None, :], sums)
    else:
        first_rows, last_rows = _first_and_last_half(rows)
        first_weights, last_weights = _first_and_last_half(weights)
        sums = _add_products(sums, first_rows, first_weights)
        return _add_products(sums, last_rows, last_weights)


@gluon.jit(do_not_specialize=["M"])
def ordered_product_kernel(
    rows_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    HAS_BIAS: gl.constexpr,
):
    """Compute a tile of ``rows @ weight.T + bias``, adding products in the order of the inputs.

    One warp computes the tile, in steps of ``BLOCK_K`` inputs. While it multiplies the inputs of a
    step, those of the next ``STAGES - 1`` steps are copied to shared memory, which is a ring of
    ``STAGES`` slots.

    No copy has a mask. Rows and columns after the last one copy the last one instead, and are not
    stored.

    Grid: ``[ceil(N / BLOCK_COLUMNS), ceil(M / BLOCK_ROWS)]``, with one warp.

    Args:
        rows_ptr: fp32 rows ``[M, K]``.
        weight_ptr: fp32 weight ``[N, K]``.
        bias_ptr: fp32 bias ``[N]``; not read without ``HAS_BIAS``.
        out_ptr: fp32 result ``[M, N]``; written.
        M: number of rows.
        N: number of columns.
        K: number of inputs, a multiple of ``BLOCK_K``.
        HAS_BIAS: whether there is a bias.
    """
    ROW_THREADS: gl.constexpr = BLOCK_ROWS // THREAD_ROWS
    K_THREADS: gl.constexpr = BLOCK_K // VECTOR
    # Threads of the warp along rows and columns of the tile, and the inputs that each has of them.
    product_layout: gl.constexpr = gl.BlockedLayout(
        [THREAD_ROWS, 1, PART_K],
        [ROW_THREADS, BLOCK_COLUMNS, 1],
        [1, 1, 1],
        [2, 1, 0],
    )
    row_layout: gl.constexpr = gl.SliceLayout(1, product_layout)
    weight_layout: gl.constexpr = gl.SliceLayout(0, product_layout)
    sum_layout: gl.constexpr = gl.BlockedLayout(
        [THREAD_ROWS, 1],
        [ROW_THREADS, BLOCK_COLUMNS],
        [1, 1],
        [1, 0],
    )
    # Neighbouring threads copy neighbouring vectors of a row.
    copy_layout: gl.constexpr = gl.BlockedLayout(
        [1, VECTOR],
        [32 // K_THREADS, K_THREADS],
        [1, 1],
        [1, 0],
    )
    # The vectors of a row are permuted, so that equal inputs of eight rows are in different banks.
    shared_layout: gl.constexpr = gl.SwizzledSharedLayout(
        vec=VECTOR,
        per_phase=1,
        max_phase=8,
        order=[1, 0],
    )
    row_ring = gl.allocate_shared_memory(
        gl.float32,
        [STAGES, BLOCK_ROWS, BLOCK_K],
        shared_layout,
    )
    weight_ring = gl.allocate_shared_memory(
        gl.float32,
        [STAGES, BLOCK_COLUMNS, BLOCK_K],
        shared_layout,
    )

    first_m = gl.program_id(1) * BLOCK_ROWS
    first_n = gl.program_id(0) * BLOCK_COLUMNS
    k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, copy_layout))
    copied_rows: gl.constexpr = gl.SliceLayout(1, copy_layout)
    row = gl.minimum(first_m + gl.arange(0, BLOCK_ROWS, layout=copied_rows), M - 1)
    column = gl.minimum(first_n + gl.arange(0, BLOCK_COLUMNS, layout=copied_rows), N - 1)
    row_pointers = rows_ptr + row[:, None] * K + k[None, :]
    weight_pointers = weight_ptr + column[:, None].to(gl.int64) * K + k[None, :]

    n_steps = K // BLOCK_K
    for step in gl.static_range(STAGES - 1):
        if step < n_steps:
            _async_load(weight_ring.index(step), weight_pointers + step * BLOCK_K)
            _async_load(row_ring.index(step), row_pointers + step * BLOCK_K)
        # Also without a copy, so that the number of groups says which steps have arrived.
        _commit_group()

    sums = gl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], gl.float32, layout=sum_layout)
    slot = 0
    free_slot = STAGES - 1
    for step in range(n_steps):
        _wait_group(STAGES - 2)
        row_tile = row_ring.index(slot)
        weight_tile = weight_ring.index(slot)
        for k0 in gl.static_range(0, BLOCK_K, PART_K):
            rows = row_tile.slice(k0, PART_K, dim=1).load(row_layout)
            weights = weight_tile.slice(k0, PART_K, dim=1).load(weight_layout)
            if k0 == 0:  # after the first loads, for which the products wait
                copied_step = step + STAGES - 1
                if copied_step < n_steps:
                    k_offset = copied_step * BLOCK_K
                    _async_load(weight_ring.index(free_slot), weight_pointers + k_offset)
                    _async_load(row_ring.index(free_slot), row_pointers + k_offset)
                _commit_group()
            sums = _add_products(sums, rows, weights)
        free_slot = slot  # its inputs are multiplied, so the next step may copy into it
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)

    m = first_m + gl.arange(0, BLOCK_ROWS, layout=gl.SliceLayout(1, sum_layout))
    n = first_n + gl.arange(0, BLOCK_COLUMNS, layout=gl.SliceLayout(0, sum_layout))
    if HAS_BIAS:
        sums += gl.load(bias_ptr + gl.minimum(n, N - 1))[None, :]
    out_pointers = out_ptr + m[:, None].to(gl.int64) * N + n[None, :]
    gl.store(out_pointers, sums, mask=(m < M)[:, None] & (n < N)[None, :])


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
        grid=(cdiv(n_outputs, BLOCK_COLUMNS.value), cdiv(n_rows, BLOCK_ROWS.value), 1),
        tensors=("rows", "weight", "bias", "out"),
        numbers=(n_rows, n_outputs, n_inputs),
        constants={"HAS_BIAS": has_bias, "num_warps": 1},
    )
    return Program(
        plan=Plan((launch,)),
        input_names=("rows", "weight", "bias"),
        results={"out": Buffer((n_rows, n_outputs), torch.float32)},
        device=device,
        aligned=is_aligned,
    )
