"""Forward of max pooling: a persistent kernel with running maxima and winners in registers.

README.md describes the algorithm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops.lsr_head._triton.screen import runs_screened
from tilefold.ops.lsr_head._triton.sequences import (
    column_terms,
    first_sequence,
    merge,
    sequence_offset,
    split_tiles_of,
    store_partial,
    store_scores,
)


@triton.jit
def _reduce_tokens(x, AXIS: tl.constexpr, N: tl.constexpr, WITH_WINNERS: tl.constexpr):
    """Return maxima over the last axis, and the lowest index that has each.

    Args:
        x: the numbers. NaN makes a maximum NaN.
        AXIS: the last axis, 1 or 2.
        N: its size.
        WITH_WINNERS: whether indices are needed; 0 if not.
    """
    best = tl.reduce(x, AXIS, nan_max)
    if WITH_WINNERS:
        index = tl.arange(0, N)
        index = index[None, None, :] if AXIS == 2 else index[None, :]
        index = tl.min(tl.where(x == tl.expand_dims(best, AXIS), index, N), axis=AXIS)
    else:
        index = tl.zeros(best.shape, tl.int32)
    return best, index


@triton.jit(do_not_specialize=["B", "T", "uniform_length", "splits", "multiple", "logit_scale"])
def max_forward_kernel(
    weight_src,
    rows_src,
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
    T,
    uniform_length,
    splits,
    multiple,
    logit_scale,
    D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    UNIFORM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the scores of max pooling, the activated maxima of logits over tokens.

    An item of work is a block of BLOCK_V vocabulary columns for one split of the token tiles.
    Program instances take items in turn. For each token tile of an item, the products over D are
    accumulated, and folded into the running maxima ``best`` of the current sequence.

    A sequence that begins and ends within the split is finished, and its scores are stored. Maxima
    of a sequence that crosses a border of the split are stored as partial ones for
    :func:`combine_kernel`.

    The loops over items, token tiles and steps of D are one loop, so that Triton pipelines the
    loads across all of them.

    Args:
        weight_src: weight ``[V, D]``, a pointer or a TMA descriptor.
        rows_src: packed token states ``[T, D]``, a pointer or a TMA descriptor. Sequences begin at
            multiples of GROUP rows.
        row_scale_ptr: scales of quantised token states, ``[T]``, in whole tiles.
        weight_scale_ptr: scales of a quantised weight, ``[V]``.
        bias_ptr: bias ``[V]``, if HAS_BIAS.
        offset_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        position_ptr: position of each row in its sequence, ``[T]``, if HAS_POSITIONS.
        out_ptr: scores ``[B, V]``; written.
        winner_ptr: winners ``[B, V]``; written if WITH_WINNERS.
        part_ptr: partial maxima ``[2 * splits, V]``, fp32; written.
        part_winner_ptr: their rows, int32; written if WITH_WINNERS.
        B: number of sequences.
        V: number of columns.
        T: number of rows, if UNIFORM.
        uniform_length: length of all sequences, if UNIFORM.
        splits: number of splits of the token tiles.
        multiple: number that the tiles of a split are a multiple of.
        logit_scale: factor of the products.
        D: hidden dimension.
        BLOCK_V, BLOCK_T, BLOCK_K: columns, tokens and entries of a tile.
        GROUP: sequences begin at multiples of it.
        ACTIVATION: activation of the scores.
        HAS_BIAS: whether there is a bias.
        HAS_POSITIONS: whether padded sequences had masked tokens, so that packed rows have other
            positions.
        WITH_WINNERS: whether winners are needed for a backward pass.
        HAS_SCALE: whether ``logit_scale`` is not 1.
        UNIFORM: whether all sequences have the same length.
        QUANTIZED: whether token states and weight are quantised.
        USE_TMA: whether the sources are TMA descriptors.
        PRECISION: precision of products of fp32.
    """
    K_STEPS: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    n_rows = T if UNIFORM else tl.load(offset_ptr + B)
    n_tiles, split_tiles = split_tiles_of(n_rows, splits, multiple, BLOCK_T)
    n_splits = tl.cdiv(n_tiles, split_tiles)
    n_items = tl.cdiv(V, BLOCK_V) * n_splits
    item = tl.program_id(0)
    stride = tl.num_programs(0)

    # The token tiles of all items of this instance.
    total_tiles = 0
    for i in range(item, n_items, stride):
        split = i % n_splits
        total_tiles += tl.minimum(split_tiles, n_tiles - split * split_tiles)

    split = item % n_splits
    v0 = (item // n_splits) * BLOCK_V
    split_row = split * split_tiles * BLOCK_T
    last_row = tl.minimum(split_row + split_tiles * BLOCK_T, n_tiles * BLOCK_T)
    tile_row = split_row
    seq = first_sequence(offset_ptr, split_row, B, uniform_length, UNIFORM)
    start = sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM)
    end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
    best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    winner = tl.zeros((BLOCK_V,), tl.int32) + tl.maximum(start, split_row)
    acc = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
    k_step = 0
    for _ in tl.range(0, total_tiles * K_STEPS):
        if USE_TMA:
            weight_tile = weight_src.load([v0, k_step * BLOCK_K])  # [BLOCK_V, BLOCK_K]
            row_tile = rows_src.load([tile_row, k_step * BLOCK_K])  # [BLOCK_T, BLOCK_K]
        else:
            offs_k = k_step * BLOCK_K + tl.arange(0, BLOCK_K)
            row_v = v0 + tl.arange(0, BLOCK_V)
            row_t = tile_row + tl.arange(0, BLOCK_T)
            weight_tile = tl.load(
                weight_src + row_v.to(tl.int64)[:, None] * D + offs_k[None, :],
                mask=(row_v < V)[:, None] & (offs_k < D)[None, :],
                other=0.0,
            )  # [BLOCK_V, BLOCK_K]
            row_tile = tl.load(
                rows_src + row_t.to(tl.int64)[:, None] * D + offs_k[None, :],
                mask=(row_t < n_rows)[:, None] & (offs_k < D)[None, :],
                other=0.0,
            )  # [BLOCK_T, BLOCK_K]
        acc = tl.dot(weight_tile, row_tile.T, acc, input_precision=PRECISION)
        k_step += 1
        if k_step == K_STEPS:  # the products of this token tile are complete
            if HAS_SCALE:
                acc *= logit_scale
            if QUANTIZED:
                # the buffer of the scales holds whole tiles
                acc *= tl.load(row_scale_ptr + tile_row + tl.arange(0, BLOCK_T))[None, :]
            offs_v = v0 + tl.arange(0, BLOCK_V)
            mask_v = offs_v < V
            scale, bias = column_terms(
                weight_scale_ptr,
                bias_ptr,
                offs_v,
                mask_v,
                HAS_BIAS,
                QUANTIZED,
            )
            tile_end = tl.minimum(tile_row + BLOCK_T, n_rows)
            # Case 1: all tokens of the tile belong to one sequence.
            if (start <= tile_row) & (end >= tile_row + BLOCK_T):
                tile_best, tile_winner = _reduce_tokens(acc, 1, BLOCK_T, WITH_WINNERS)
                best, winner = merge(best, winner, tile_best, tile_row + tile_winner, WITH_WINNERS)
                if end == tile_end:
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
                    end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
                    best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
                    winner = tl.zeros((BLOCK_V,), tl.int32) + start
            # Case 2: several sequences share the tile. Each begins at a multiple of GROUP, so the
            # maxima of groups are computed once, and those of a sequence are combined.
            else:
                N_GROUPS: tl.constexpr = BLOCK_T // GROUP
                groups = tl.arange(0, N_GROUPS) * GROUP
                # [BLOCK_V, N_GROUPS]
                group_best, group_winner = _reduce_tokens(
                    tl.reshape(acc, (BLOCK_V, N_GROUPS, GROUP)),
                    2,
                    GROUP,
                    WITH_WINNERS,
                )
                group_winner += groups[None, :]
                has_next = True
                while has_next:  # the sequences of the tile, one after another
                    inside = ((groups >= start - tile_row) & (groups < end - tile_row))[None, :]
                    seq_best = tl.reduce(tl.where(inside, group_best, float("-inf")), 1, nan_max)
                    seq_winner = tl.zeros((BLOCK_V,), tl.int32)
                    if WITH_WINNERS:
                        seq_winner = tl.min(
                            tl.where(
                                inside & (group_best == seq_best[:, None]),
                                group_winner,
                                BLOCK_T,
                            ),
                            axis=1,
                        )
                    best, winner = merge(
                        best, winner, seq_best, tile_row + seq_winner, WITH_WINNERS
                    )
                    has_next = end <= tile_end
                    if has_next:  # the sequence ends here: store it, and take the next one
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
                        end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
                        best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
                        winner = tl.zeros((BLOCK_V,), tl.int32) + start
                        has_next = seq < B
            acc = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
            k_step = 0
            tile_row += BLOCK_T
            if tile_row == last_row:  # the item is done: begin the next one
                if (start < last_row) & (seq < B):  # the sequence continues in the next split
                    slot = 2 * split + tl.where(start < split_row, 0, 1)
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
                item += stride
                split = item % n_splits
                v0 = (item // n_splits) * BLOCK_V
                split_row = split * split_tiles * BLOCK_T
                last_row = tl.minimum(split_row + split_tiles * BLOCK_T, n_tiles * BLOCK_T)
                tile_row = split_row
                seq = first_sequence(offset_ptr, split_row, B, uniform_length, UNIFORM)
                start = sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM)
                end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
                best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
                winner = tl.zeros((BLOCK_V,), tl.int32) + tl.maximum(start, split_row)


@triton.jit(
    do_not_specialize=[
        "B",
        "V",
        "T",
        "uniform_length",
        "splits",
        "multiple",
        "sample_limit",
        "limit",
    ],
)
def combine_kernel(
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
    BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    UNIFORM: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SCREENED: tl.constexpr,
):
    """Combine the partial maxima of sequences that are divided among splits into scores.

    Instance ``(b, j)`` handles sequence b and block j of the columns.

    Args:
        weight_scale_ptr: scales of a quantised weight, ``[V]``.
        bias_ptr: bias ``[V]``, if HAS_BIAS.
        offset_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        position_ptr: position of each row in its sequence, ``[T]``, if HAS_POSITIONS.
        out_ptr: scores ``[B, V]``; written.
        winner_ptr: winners ``[B, V]``; written if WITH_WINNERS.
        part_ptr: partial maxima ``[2 * splits, V]``, fp32. A split has two rows: the first for a
            sequence that began before it, and the second for one that ends after it.
        part_winner_ptr: their rows, int32.
        state_ptr: state of the screen, if SCREENED.
        B: number of sequences.
        V: number of columns.
        T: number of rows, if UNIFORM.
        uniform_length: length of all sequences, if UNIFORM.
        splits: number of splits of the token tiles.
        multiple: number that the tiles of a split are a multiple of.
        sample_limit, limit: limits of :func:`runs_screened`.
        BLOCK_T: tokens of a tile.
        BLOCK: columns of an instance.
        ACTIVATION: activation of the scores.
        HAS_BIAS: whether there is a bias.
        HAS_POSITIONS: whether padded sequences had masked tokens, so that packed rows have other
            positions.
        WITH_WINNERS: whether winners are needed for a backward pass.
        UNIFORM: whether all sequences have the same length.
        QUANTIZED: whether token states and weight are quantised.
        SCREENED: whether nothing is done if the screen has computed the scores.
    """
    seq = tl.program_id(0)
    offs_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_v = offs_v < V
    start = sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM)
    end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
    n_rows = T if UNIFORM else tl.load(offset_ptr + B)
    _, split_tiles = split_tiles_of(n_rows, splits, multiple, BLOCK_T)
    split_rows = split_tiles * BLOCK_T
    is_divided = (start < end) & (start // split_rows != (end - 1) // split_rows)
    if SCREENED:
        is_divided = is_divided & ~runs_screened(state_ptr, sample_limit, limit)
    if is_divided:
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        winner = tl.zeros((BLOCK,), tl.int32) + start
        for split in range(start // split_rows, (end - 1) // split_rows + 1):
            slot = 2 * split + tl.where(start < split * split_rows, 0, 1)
            offs = slot.to(tl.int64) * V + offs_v
            part = tl.load(part_ptr + offs, mask=mask_v, other=0.0)  # [BLOCK]
            part_winner = winner
            if WITH_WINNERS:
                part_winner = tl.load(part_winner_ptr + offs, mask=mask_v, other=0)  # [BLOCK]
            best, winner = merge(best, winner, part, part_winner, WITH_WINNERS)
        scale, bias = column_terms(weight_scale_ptr, bias_ptr, offs_v, mask_v, HAS_BIAS, QUANTIZED)
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
