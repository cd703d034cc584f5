"""Shared helpers of max pooling: where sequences and splits begin, how a finished maximum is
stored.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import activate, nan_max
from tilefold.ops._shared._triton.offsets import narrowed

LAST = tl.constexpr(2147483647)


@triton.jit
def merge(best, winner, new_best, new_winner, WITH_WINNERS: tl.constexpr):
    """Keep the larger; among equals the one that was there first."""
    if WITH_WINNERS:
        winner = tl.where(new_best > best, new_winner, winner)
    return nan_max(best, new_best), winner


@triton.jit
def column_terms(
    weight_scale_ptr,
    bias_ptr,
    offs_v,
    mask_v,
    HAS_BIAS: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Factor and addend of a maximum, fp32, in the layout of ``offs_v``."""
    bias = (offs_v * 0).to(tl.float32)  # tl.zeros would lose the layout
    scale = bias + 1.0
    if QUANTIZED:
        scale = tl.load(weight_scale_ptr + offs_v, mask=mask_v, other=0.0)  # [BLOCK_V]
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)  # [BLOCK_V]
    return scale, bias


@triton.jit
def store_scores(
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
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    if (
        WITH_WINNERS
    ):  # where a logit is NaN, how the tokens were cut shall not choose its gradient's
        winner = tl.where(best == best, winner, start)
    if QUANTIZED:
        best *= scale
    if HAS_BIAS:
        best += bias
    offs = seq.to(tl.int64) * V + offs_v
    tl.store(out_ptr + offs, activate(best, ACTIVATION).to(out_ptr.dtype.element_ty), mask=mask_v)
    if WITH_WINNERS:
        if HAS_POSITIONS:
            position = tl.load(position_ptr + winner, mask=mask_v, other=0)  # [BLOCK_V]
        else:
            position = winner - start
        tl.store(winner_ptr + offs, position.to(winner_ptr.dtype.element_ty), mask=mask_v)


@triton.jit
def store_partial(
    best,
    winner,
    slot,
    offs_v,
    mask_v,
    part_ptr,
    part_winner_ptr,
    V,
    WITH_WINNERS: tl.constexpr,
):
    offs = slot.to(tl.int64) * V + offs_v
    tl.store(part_ptr + offs, best, mask=mask_v)
    if WITH_WINNERS:
        tl.store(part_winner_ptr + offs, winner, mask=mask_v)


@triton.jit
def split_tiles_of(n_rows, splits, multiple, BLOCK_T: tl.constexpr):
    """Token tiles of all rows, and of one split (a multiple of multiple)."""
    n_tiles = tl.maximum(tl.cdiv(n_rows, BLOCK_T), 1)
    return n_tiles, tl.cdiv(tl.cdiv(n_tiles, splits), multiple) * multiple


@triton.jit
def sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM: tl.constexpr):
    """First row of sequence ``seq``; past the last sequence, beyond every row."""
    if UNIFORM:
        return seq * uniform_length
    else:
        return narrowed(tl.load(offset_ptr + seq, mask=seq <= B, other=LAST))


@triton.jit
def first_sequence(offset_ptr, row, B, uniform_length, UNIFORM: tl.constexpr):
    """The first sequence that reaches past ``row``; of row 0 the first one of all, though it may be
    empty.
    """
    if UNIFORM:
        seq = row // uniform_length
    else:
        seq = row * 0
        if row > 0:
            for b0 in range(0, B, 256):
                b = b0 + tl.arange(0, 256)
                end = narrowed(tl.load(offset_ptr + 1 + b, mask=b < B, other=LAST))
                seq += tl.sum((end <= row).to(tl.int32))
    return seq
