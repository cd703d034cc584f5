"""Forward of max pooling for compute capability 9.0, in Gluon: some warps load, others compute.

README.md describes the algorithm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops._shared._triton.releases import gluon_tma_load
from tilefold.ops.lsr_head._triton.screen import runs_screened
from tilefold.ops.lsr_head._triton.sequences import (
    column_terms,
    merge,
    sequence_offset,
    split_tiles_of,
    store_partial,
    store_scores,
)

HALF_V = gl.constexpr(64)
# Lanes that share a row of an accumulator. Each has two columns of every eight.
LANES = gl.constexpr(4)
_tma_load = gluon_tma_load()
ELEMENTS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
}


@gluon.jit
def _first_sequence(offset_ptr, row, B, uniform_length, UNIFORM: gl.constexpr):
    """Return the first sequence that ends after a row.

    For row 0 it is the first sequence, even if that is empty.

    Args:
        offset_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        row: the row.
        B: number of sequences.
        uniform_length: length of all sequences, if UNIFORM.
        UNIFORM: whether all sequences have the same length.
    """
    if UNIFORM:
        return row // uniform_length
    else:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        seq = row * 0
        if row > 0:
            for b0 in range(0, B, 256):
                b = b0 + gl.arange(0, 256, layout=layout)
                end = gl.load(offset_ptr + 1 + b, mask=b < B, other=2147483647)
                seq += gl.sum((end <= row).to(gl.int32), axis=0)
        return seq


@gluon.jit
def _lowest_tokens_in_lanes(grouped, highest, N_GROUPS: gl.constexpr, GROUP: gl.constexpr):
    """Return the lowest token of the tile where each lane has its highest product.

    The lanes of a row hold the same tokens but for an offset. It is added last, so that all other
    numbers of tokens are constants of the code, and need no registers.

    Args:
        grouped: products ``[HALF_V, N_GROUPS, GROUP // 8, LANES, 2]``.
        highest: the highest product of each group and lane, ``[HALF_V, N_GROUPS, LANES]``.
        N_GROUPS: groups of tokens of the tile.
        GROUP: tokens of a group.

    Returns:
        ``[HALF_V, N_GROUPS, LANES]``.
    """
    one_eight: gl.constexpr = gl.SliceLayout(3, gl.SliceLayout(4, grouped.type.layout))
    one_two: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, grouped.type.layout))
    group = gl.arange(0, N_GROUPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, one_eight)))
    eight = gl.arange(0, GROUP // 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, one_eight)))
    two = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, one_two)))
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(0, gl.SliceLayout(1, highest.type.layout)))
    token = group[None, :, None, None, None] * GROUP + eight[None, None, :, None, None] * 8
    token = token + two[None, None, None, None, :]
    token = gl.where(
        grouped == gl.expand_dims(gl.expand_dims(highest, 2), 4),
        token,
        N_GROUPS * GROUP,
    )
    return gl.min(gl.min(token, axis=4), axis=2) + 2 * lane[None, None, :]


@gluon.jit
def _reduce_tile(acc, N: gl.constexpr, WITH_WINNERS: gl.constexpr, LEAN_WINNERS: gl.constexpr):
    """Return maxima over all tokens of a tile, and the lowest token that has each.

    Args:
        acc: products ``[HALF_V, N]``.
        N: tokens of the tile.
        WITH_WINNERS: whether tokens are needed; 0 if not.
        LEAN_WINNERS: whether tokens are found lane by lane, which needs fewer registers.
    """
    if WITH_WINNERS and LEAN_WINNERS:
        grouped = acc.reshape([HALF_V, 1, N // 8, LANES, 2])
        lane_best = gl.reduce(gl.reduce(grouped, 4, nan_max), 2, nan_max)
        row_best = gl.reduce(gl.reduce(lane_best, 1, nan_max), 1, nan_max)
        highest = gl.expand_dims(gl.expand_dims(row_best, 1), 1) + gl.zeros_like(lane_best)
        lane_token = _lowest_tokens_in_lanes(grouped, highest, 1, N)
        lowest = gl.min(gl.min(lane_token, axis=1), axis=1)
        column: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        return gl.convert_layout(row_best, column), gl.convert_layout(lowest, column)
    best = gl.reduce(acc, 1, nan_max)
    token = gl.zeros_like(best).to(gl.int32)
    if WITH_WINNERS:
        cols = gl.arange(0, N, layout=gl.SliceLayout(0, acc.type.layout))
        token = gl.min(gl.where(acc == gl.expand_dims(best, 1), cols[None, :], N), axis=1)
    return best, token


@gluon.jit
def _reduce_groups(
    acc,
    N_GROUPS: gl.constexpr,
    GROUP: gl.constexpr,
    WITH_WINNERS: gl.constexpr,
    LEAN_WINNERS: gl.constexpr,
):
    """Return maxima over the tokens of each group that a lane holds, and their tokens.

    The lanes are combined once per sequence, not per group.

    Args:
        acc: products ``[HALF_V, N_GROUPS * GROUP]``.
        N_GROUPS: groups of tokens of the tile.
        GROUP: tokens of a group.
        WITH_WINNERS: whether tokens are needed; 0 if not.
        LEAN_WINNERS: whether tokens are found lane by lane, which needs fewer registers.

    Returns:
        Both ``[HALF_V, N_GROUPS, LANES]``.
    """
    grouped = acc.reshape([HALF_V, N_GROUPS, GROUP // 8, LANES, 2])
    best = gl.reduce(gl.reduce(grouped, 4, nan_max), 2, nan_max)
    token = gl.zeros_like(best).to(gl.int32)
    if WITH_WINNERS and LEAN_WINNERS:
        token = _lowest_tokens_in_lanes(grouped, best, N_GROUPS, GROUP)
    elif WITH_WINNERS:
        columns = gl.arange(0, N_GROUPS * GROUP, layout=gl.SliceLayout(0, acc.type.layout))
        columns = (gl.expand_dims(columns, 0) + gl.zeros_like(acc).to(gl.int32)).reshape(
            grouped.shape,
        )
        highest = gl.expand_dims(gl.expand_dims(best, 2), 4)
        token = gl.where(grouped == highest, columns, N_GROUPS * GROUP)
        token = gl.min(gl.min(token, axis=4), axis=2)
    return best, token


@gluon.jit
def _load_tiles(
    weight_desc,
    rows_desc,
    w_ring,
    h_ring,
    full,
    empty,
    n_items,
    n_tiles,
    split_tiles,
    K_STEPS: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run the loading warp: fill a ring of buffers with tiles, in the order in which they are read.

    Args:
        weight_desc: TMA descriptor of the weight ``[V, D]``.
        rows_desc: TMA descriptor of the token states ``[T, D]``.
        w_ring: buffers of tiles of the weight, two halves for each stage.
        h_ring: buffers of tiles of token states, one for each stage.
        full: barriers on which readers wait until a stage is loaded.
        empty: barriers on which this warp waits until a stage was read.
        n_items: number of items of work.
        n_tiles: number of token tiles.
        split_tiles: number of token tiles of a split.
        K_STEPS: steps over D.
        BLOCK_T, BLOCK_K: tokens and entries of a tile.
        STAGES: number of stages of the ring.
    """
    n_splits = gl.cdiv(n_tiles, split_tiles)
    step = 0
    for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
        split = item % n_splits
        v0 = (item // n_splits) * 2 * HALF_V
        t0 = split * split_tiles
        t1 = gl.minimum(t0 + split_tiles, n_tiles)
        for t in range(t0, t1):
            for k in range(K_STEPS):
                slot = step % STAGES
                phase = (step // STAGES) & 1
                mbarrier.wait(empty.index(slot), phase ^ 1)
                bar = full.index(slot)
                mbarrier.expect(
                    bar,
                    weight_desc.block_type.nbytes * 2 + rows_desc.block_type.nbytes,
                )
                _tma_load(weight_desc, [v0, k * BLOCK_K], bar, w_ring.index(2 * slot))
                _tma_load(weight_desc, [v0 + HALF_V, k * BLOCK_K], bar, w_ring.index(2 * slot + 1))
                _tma_load(rows_desc, [t * BLOCK_T, k * BLOCK_K], bar, h_ring.index(slot))
                step += 1


@gluon.jit
def _multiply_tile(
    acc,
    step,
    w_ring,
    h_ring,
    full,
    empty,
    HALF: gl.constexpr,
    K_STEPS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute the products of one half of the columns with a token tile, as the ring is filled.

    Args:
        acc: accumulator ``[HALF_V, BLOCK_T]``.
        step: number of the first step, counted over all tiles.
        w_ring: buffers of tiles of the weight, two halves for each stage.
        h_ring: buffers of tiles of token states, one for each stage.
        full: barriers on which this group waits until a stage is loaded.
        empty: barriers that tell the loading warp that a stage was read.
        HALF: number of the half, 0 or 1.
        K_STEPS: steps over D.
        STAGES: number of stages of the ring.

    Returns:
        The products ``[HALF_V, BLOCK_T]``, and the step after the last one.
    """
    for k in range(K_STEPS):
        slot = step % STAGES
        mbarrier.wait(full.index(slot), (step // STAGES) & 1)
        acc = warpgroup_mma(
            w_ring.index(2 * slot + HALF),
            h_ring.index(slot).permute((1, 0)),
            acc,
            use_acc=k > 0,
            is_async=True,
        )
        # The previous product is done, so its buffers may be filled again.
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if k > 0:
            mbarrier.arrive(empty.index((step - 1) % STAGES))
        step += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step - 1) % STAGES))
    return acc, step


@gluon.jit
def _fold_tiles(
    operands,
    K_STEPS: gl.constexpr,
    BLOCK_T: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_POSITIONS: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    WITH_WINNERS: gl.constexpr,
    UNIFORM: gl.constexpr,
    QUANTIZED: gl.constexpr,
    LEAN_WINNERS: gl.constexpr,
    HALF: gl.constexpr,
):
    """Run one group of four warps: products and running maxima of one half of the columns.

    The loops and the cases are those of ``max_forward_kernel`` in ``max_forward.py``, which
    describes the items and the splits. The current sequence is ``seq``, with the rows from
    ``start`` to ``end`` and the maxima ``best`` so far.

    Args:
        operands: the tensors and numbers of :func:`max_forward_hopper_kernel`, in the order in
            which they are unpacked below.
        K_STEPS: steps over D.
        BLOCK_T: tokens of a tile.
        STAGES: number of stages of the ring.
        GROUP: sequences begin at multiples of it.
        ACTIVATION: activation of the scores.
        HAS_BIAS: whether there is a bias.
        HAS_POSITIONS: whether padded sequences had masked tokens, so that packed rows have other
            positions.
        WITH_WINNERS: whether winners are needed for a backward pass.
        HAS_SCALE: whether ``logit_scale`` is not 1.
        UNIFORM: whether all sequences have the same length.
        QUANTIZED: whether token states and weight are quantised.
        LEAN_WINNERS: whether winners are found lane by lane, which needs fewer registers.
        HALF: number of the half, 0 or 1.
    """
    (
        w_ring,
        h_ring,
        full,
        empty,
        row_scale_ptr,
        weight_scale_ptr,
        bias_ptr,
        offset_ptr,
        position_ptr,
        out_ptr,
        winner_ptr,
        part_ptr,
        part_winner_ptr,
        B,
        V,
        n_rows,
        n_items,
        n_tiles,
        split_tiles,
        uniform_length,
        logit_scale,
    ) = operands
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0],
        [4, 1],
        [16, BLOCK_T, 32 if QUANTIZED else 16],
    )
    column: gl.constexpr = gl.SliceLayout(1, layout)
    N_GROUPS: gl.constexpr = BLOCK_T // GROUP
    n_splits = gl.cdiv(n_tiles, split_tiles)
    step = 0
    for item in range(gl.program_id(0), n_items, gl.num_programs(0)):
        split = item % n_splits
        offs_v = (
            (item // n_splits) * 2 * HALF_V + HALF * HALF_V + gl.arange(0, HALF_V, layout=column)
        )
        mask_v = offs_v < V
        scale, bias = column_terms(weight_scale_ptr, bias_ptr, offs_v, mask_v, HAS_BIAS, QUANTIZED)
        t0 = split * split_tiles
        t1 = gl.minimum(t0 + split_tiles, n_tiles)
        split_row = t0 * BLOCK_T
        seq = _first_sequence(offset_ptr, split_row, B, uniform_length, UNIFORM)
        start = sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM)
        end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
        # Loaded one sequence ahead, so that its latency is hidden.
        next_end = sequence_offset(offset_ptr, seq + 2, B, uniform_length, UNIFORM)
        best = gl.full([HALF_V], float("-inf"), gl.float32, layout=column)
        winner = gl.full([HALF_V], 0, gl.int32, layout=column) + gl.maximum(start, split_row)
        for t in range(t0, t1):
            acc = gl.zeros([HALF_V, BLOCK_T], gl.float32, layout=layout)
            acc, step = _multiply_tile(
                acc,
                step,
                w_ring,
                h_ring,
                full,
                empty,
                HALF,
                K_STEPS,
                STAGES,
            )
            if HAS_SCALE:
                acc = acc * logit_scale
            if QUANTIZED:  # the buffer of the scales holds whole tiles
                column_scale = gl.load(
                    row_scale_ptr
                    + t * BLOCK_T
                    + gl.arange(0, BLOCK_T, layout=gl.SliceLayout(0, layout)),
                )
                acc = acc * gl.expand_dims(column_scale, 0)
            r0 = t * BLOCK_T
            r1 = gl.minimum(r0 + BLOCK_T, n_rows)
            # Case 1: all tokens of the tile belong to one sequence.
            if (start <= r0) & (end >= r0 + BLOCK_T):
                tile_best, tile_winner = _reduce_tile(acc, BLOCK_T, WITH_WINNERS, LEAN_WINNERS)
                best, winner = merge(best, winner, tile_best, r0 + tile_winner, WITH_WINNERS)
                if end == r1:
                    if start < split_row:
                        store_partial(
                            best,
                            winner,
                            2 * split,
                            offs_v,
                            mask_v,
                            part_ptr,
                            part_winner_ptr,
                            V,
                            WITH_WINNERS,
                        )
                    else:
                        store_scores(
                            best,
                            winner,
                            seq,
                            start,
                            offs_v,
                            mask_v,
                            scale,
                            bias,
                            position_ptr,
                            out_ptr,
                            winner_ptr,
                            V,
                            ACTIVATION,
                            HAS_BIAS,
                            HAS_POSITIONS,
                            WITH_WINNERS,
                            QUANTIZED,
                        )
                    seq += 1
                    start = end
                    end = next_end
                    next_end = sequence_offset(offset_ptr, seq + 2, B, uniform_length, UNIFORM)
                    best = gl.full([HALF_V], float("-inf"), gl.float32, layout=column)
                    winner = gl.full([HALF_V], 0, gl.int32, layout=column) + start
            # Case 2: several sequences share the tile. Each begins at a multiple of GROUP, so the
            # maxima of groups are computed once, and those of a sequence are combined.
            else:
                group_best, group_winner = _reduce_groups(
                    acc,
                    N_GROUPS,
                    GROUP,
                    WITH_WINNERS,
                    LEAN_WINNERS,
                )
                row_groups: gl.constexpr = gl.SliceLayout(
                    0,
                    gl.SliceLayout(2, group_best.type.layout),
                )
                groups = gl.arange(0, N_GROUPS, layout=row_groups) * GROUP
                has_next = True
                while has_next:  # the sequences of the tile, one after another
                    inside = gl.expand_dims(
                        gl.expand_dims((groups >= start - r0) & (groups < end - r0), 0),
                        2,
                    )
                    seq_best = gl.reduce(gl.where(inside, group_best, float("-inf")), 1, nan_max)
                    seq_best = gl.reduce(seq_best, 1, nan_max)
                    seq_winner = gl.zeros_like(seq_best).to(gl.int32)
                    if WITH_WINNERS:
                        wins = inside & (
                            group_best == gl.expand_dims(gl.expand_dims(seq_best, 1), 1)
                        )
                        seq_winner = gl.min(
                            gl.min(gl.where(wins, group_winner, BLOCK_T), axis=1),
                            axis=1,
                        )
                    seq_best = gl.convert_layout(seq_best, column)
                    seq_winner = gl.convert_layout(seq_winner, column)
                    best, winner = merge(best, winner, seq_best, r0 + seq_winner, WITH_WINNERS)
                    has_next = end <= r1  # the sequence ends here: store it, and take the next one
                    if has_next:
                        if start < split_row:
                            store_partial(
                                best,
                                winner,
                                2 * split,
                                offs_v,
                                mask_v,
                                part_ptr,
                                part_winner_ptr,
                                V,
                                WITH_WINNERS,
                            )
                        elif end > start:
                            store_scores(
                                best,
                                winner,
                                seq,
                                start,
                                offs_v,
                                mask_v,
                                scale,
                                bias,
                                position_ptr,
                                out_ptr,
                                winner_ptr,
                                V,
                                ACTIVATION,
                                HAS_BIAS,
                                HAS_POSITIONS,
                                WITH_WINNERS,
                                QUANTIZED,
                            )
                        seq += 1
                        start = end
                        end = next_end
                        next_end = sequence_offset(offset_ptr, seq + 2, B, uniform_length, UNIFORM)
                        best = gl.full([HALF_V], float("-inf"), gl.float32, layout=column)
                        winner = gl.full([HALF_V], 0, gl.int32, layout=column) + start
                        has_next = seq < B
        if (start < t1 * BLOCK_T) & (seq < B):  # the sequence continues in the next split
            slot = 2 * split + gl.where(start < split_row, 0, 1)
            store_partial(
                best,
                winner,
                slot,
                offs_v,
                mask_v,
                part_ptr,
                part_winner_ptr,
                V,
                WITH_WINNERS,
            )


@gluon.jit(
    do_not_specialize=[
        "B",
        "V",
        "T",
        "uniform_length",
        "splits",
        "multiple",
        "sample_limit",
        "limit",
        "logit_scale",
    ],
)
def max_forward_hopper_kernel(
    weight_desc,
    rows_desc,
    row_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    offset_ptr,
    position_ptr,
    out_ptr,
    winner_ptr,
    part_ptr,
    part_winner_ptr,
    state_ptr,
    B,
    V,
    T,
    uniform_length,
    splits,
    multiple,
    sample_limit,
    limit,
    logit_scale,
    D: gl.constexpr,
    BLOCK_T: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_POSITIONS: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    WITH_WINNERS: gl.constexpr,
    UNIFORM: gl.constexpr,
    QUANTIZED: gl.constexpr,
    LEAN_WINNERS: gl.constexpr,
    SCREENED: gl.constexpr,
):
    """Compute the scores of max pooling, with warps of different roles.

    One warp loads tiles by TMA into a ring of STAGES buffers. Two groups of four warps each compute
    half of the columns of a vocabulary tile. With SCREENED nothing is done if the screen computes
    the scores.

    Args:
        weight_desc: TMA descriptor of the weight ``[V, D]``.
        rows_desc: TMA descriptor of the packed token states ``[T, D]``.
        state_ptr: state of the screen, if SCREENED.
        sample_limit, limit: limits of :func:`tilefold.ops.lsr_head._triton.screen.runs_screened`.
        STAGES: number of stages of the ring.
        LEAN_WINNERS: whether winners are found lane by lane, which needs fewer registers.
        SCREENED: whether the screen may compute the scores.

    Items of work, partial maxima and all other arguments are those of
    :func:`tilefold.ops.lsr_head._triton.max_forward.max_forward_kernel`.
    """
    K_STEPS: gl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    n_rows = T
    if not UNIFORM:
        n_rows = gl.load(offset_ptr + B)
    n_tiles, split_tiles = split_tiles_of(n_rows, splits, multiple, BLOCK_T)
    n_items = gl.cdiv(V, 2 * HALF_V) * gl.cdiv(n_tiles, split_tiles)
    if SCREENED:
        n_items = gl.where(runs_screened(state_ptr, sample_limit, limit), 0, n_items)
    w_ring = gl.allocate_shared_memory(
        weight_desc.dtype,
        [2 * STAGES, HALF_V, BLOCK_K],
        weight_desc.layout,
    )
    h_ring = gl.allocate_shared_memory(
        rows_desc.dtype,
        [STAGES, BLOCK_T, BLOCK_K],
        rows_desc.layout,
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    operands = (
        w_ring,
        h_ring,
        full,
        empty,
        row_scale_ptr,
        weight_scale_ptr,
        bias_ptr,
        offset_ptr,
        position_ptr,
        out_ptr,
        winner_ptr,
        part_ptr,
        part_winner_ptr,
        B,
        V,
        n_rows,
        n_items,
        n_tiles,
        split_tiles,
        uniform_length,
        logit_scale,
    )
    gl.warp_specialize(
        [
            (
                _fold_tiles,
                (
                    operands,
                    K_STEPS,
                    BLOCK_T,
                    STAGES,
                    GROUP,
                    ACTIVATION,
                    HAS_BIAS,
                    HAS_POSITIONS,
                    HAS_SCALE,
                    WITH_WINNERS,
                    UNIFORM,
                    QUANTIZED,
                    LEAN_WINNERS,
                    0,
                ),
            ),
            (
                _fold_tiles,
                (
                    operands,
                    K_STEPS,
                    BLOCK_T,
                    STAGES,
                    GROUP,
                    ACTIVATION,
                    HAS_BIAS,
                    HAS_POSITIONS,
                    HAS_SCALE,
                    WITH_WINNERS,
                    UNIFORM,
                    QUANTIZED,
                    LEAN_WINNERS,
                    1,
                ),
            ),
            (
                _load_tiles,
                (
                    weight_desc,
                    rows_desc,
                    w_ring,
                    h_ring,
                    full,
                    empty,
                    n_items,
                    n_tiles,
                    split_tiles,
                    K_STEPS,
                    BLOCK_T,
                    BLOCK_K,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [232, 24],
    )


@functools.cache
def hopper_descriptor(
    rows: int,
    columns: int,
    dtype: torch.dtype,
) -> Callable[..., TensorDescriptor]:
    """Return a function that makes TMA descriptors with tiles ``[rows, columns]``."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], ELEMENTS[dtype])
    return functools.partial(TensorDescriptor, block_shape=[rows, columns], layout=layout)
