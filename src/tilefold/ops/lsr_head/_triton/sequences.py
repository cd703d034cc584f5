"""Device functions of max pooling: bounds of sequences and splits, and storage of maxima."""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import activate, nan_max
from tilefold.ops._shared._triton.offsets import narrowed

LAST = tl.constexpr(2147483647)


@triton.jit
def merge(best, winner, new_best, new_winner, WITH_WINNERS: tl.constexpr):
    """Return the larger of two maxima, and its winner, the first one among equals.

    All are ``[BLOCK_V]``. NaN stays NaN.
    """
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
    """Load the factors and addends of a block of columns, fp32 ``[BLOCK_V]``.

    Factors are scales of a quantised weight, else 1. Addends are the bias, else 0. Both have the
    layout of ``offs_v``.
    """
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
    """Store the scores of a sequence, and the positions of its winners.

    Args:
        best: ``[BLOCK_V]`` maxima of the products.
        winner: ``[BLOCK_V]`` rows of the winners.
        seq: the sequence.
        start: its first row.
        offs_v: ``[BLOCK_V]`` columns.
        mask_v: columns that exist.
        scale: factors of :func:`column_terms`.
        bias: addends of :func:`column_terms`.
        position_ptr: position of each packed row in its sequence, if HAS_POSITIONS.
        out_ptr: scores ``[B, V]``.
        winner_ptr: winners ``[B, V]``, if WITH_WINNERS.
        V: columns of the scores.
    """
    if WITH_WINNERS:
        # The token that gets the gradient of a NaN is the first, however tokens are split.
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
    """Store the maxima and winners of a part of a sequence.

    A split has two slots: one for a sequence that began before it, and one for a sequence that ends
    after it. ``part_ptr`` and ``part_winner_ptr`` are ``[2 * splits, V]``.
    """
    offs = slot.to(tl.int64) * V + offs_v
    tl.store(part_ptr + offs, best, mask=mask_v)
    if WITH_WINNERS:
        tl.store(part_winner_ptr + offs, winner, mask=mask_v)


@triton.jit
def split_tiles_of(n_rows, splits, multiple, BLOCK_T: tl.constexpr):
    """Return the number of all token tiles, and of a split's, a multiple of ``multiple``."""
    n_tiles = tl.maximum(tl.cdiv(n_rows, BLOCK_T), 1)
    return n_tiles, tl.cdiv(tl.cdiv(n_tiles, splits), multiple) * multiple


@triton.jit
def sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM: tl.constexpr):
    """Return the first row of sequence ``seq``.

    Past the last sequence it is larger than every row.
    """
    if UNIFORM:
        return seq * uniform_length
    else:
        return narrowed(tl.load(offset_ptr + seq, mask=seq <= B, other=LAST))


@triton.jit
def first_sequence(offset_ptr, row, B, uniform_length, UNIFORM: tl.constexpr):
    """Return the first sequence that reaches past ``row``.

    For row 0 it is the first sequence, even if that is empty.
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
