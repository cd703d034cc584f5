"""Device functions of max pooling: bounds of sequences and splits, and storage of maxima."""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import activate, nan_max
from tilefold.ops._shared._triton.offsets import narrowed

LAST = tl.constexpr(2147483647)


@triton.jit
def merge(best, winner, new_best, new_winner, WITH_WINNERS: tl.constexpr):
    """Return the larger of two maxima, and its winner: the first one if they are equal.

    NaN stays NaN.

    Args:
        best: maxima so far, ``[BLOCK_V]``.
        winner: rows that have them.
        new_best: maxima of later rows.
        new_winner: rows that have those.
        WITH_WINNERS: whether winners are needed.
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

    Args:
        weight_scale_ptr: scales ``[V]`` of a quantised weight, the factors; otherwise factors are
            1.
        bias_ptr: bias ``[V]``, the addends; without one, addends are 0.
        offs_v: columns ``[BLOCK_V]``, whose layout the results have.
        mask_v: columns that exist.
        HAS_BIAS: whether there is a bias.
        QUANTIZED: whether the weight is quantised.
    """
    bias = (offs_v * 0).to(tl.float32)  # keeps the layout of `offs_v`, unlike tl.zeros
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
        best: maxima of the products, ``[BLOCK_V]``.
        winner: rows of the winners, ``[BLOCK_V]``.
        seq: the sequence.
        start: its first row.
        offs_v: columns ``[BLOCK_V]``.
        mask_v: columns that exist.
        scale: factors of :func:`column_terms`.
        bias: addends of :func:`column_terms`.
        position_ptr: position of each packed row in its sequence, if HAS_POSITIONS.
        out_ptr: scores ``[B, V]``; written.
        winner_ptr: winners ``[B, V]``; written if WITH_WINNERS.
        V: number of columns.
        ACTIVATION: activation of the scores.
        HAS_BIAS: whether there is a bias.
        HAS_POSITIONS: whether padded sequences had masked tokens, so that packed rows have other
            positions.
        WITH_WINNERS: whether winners are needed for a backward pass.
        QUANTIZED: whether the weight is quantised.
    """
    if WITH_WINNERS:
        # The first token gets the gradient of a NaN, however a sequence is divided.
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
    """Store the maxima and winners of a part of a sequence that is divided among splits.

    Args:
        best: maxima of the products, ``[BLOCK_V]``.
        winner: rows of the winners, ``[BLOCK_V]``.
        slot: row of the buffers. A split has two: the first for a sequence that began before it,
            and the second for one that ends after it.
        offs_v: columns ``[BLOCK_V]``.
        mask_v: columns that exist.
        part_ptr: partial maxima ``[2 * splits, V]``; written.
        part_winner_ptr: their rows; written if WITH_WINNERS.
        V: number of columns.
        WITH_WINNERS: whether winners are needed.
    """
    offs = slot.to(tl.int64) * V + offs_v
    tl.store(part_ptr + offs, best, mask=mask_v)
    if WITH_WINNERS:
        tl.store(part_winner_ptr + offs, winner, mask=mask_v)


@triton.jit
def split_tiles_of(n_rows, splits, multiple, BLOCK_T: tl.constexpr):
    """Return the number of token tiles of the batch, and that of a split.

    Args:
        n_rows: number of rows.
        splits: number of splits.
        multiple: number that the tiles of a split are a multiple of.
        BLOCK_T: rows of a tile.
    """
    n_tiles = tl.maximum(tl.cdiv(n_rows, BLOCK_T), 1)
    return n_tiles, tl.cdiv(tl.cdiv(n_tiles, splits), multiple) * multiple


@triton.jit
def sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM: tl.constexpr):
    """Return the first row of a sequence; after the last one, a number larger than every row.

    Args:
        offset_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        seq: the sequence.
        B: number of sequences.
        uniform_length: length of all sequences, if UNIFORM.
        UNIFORM: whether all sequences have the same length.
    """
    if UNIFORM:
        return seq * uniform_length
    else:
        return narrowed(tl.load(offset_ptr + seq, mask=seq <= B, other=LAST))


@triton.jit
def first_sequence(offset_ptr, row, B, uniform_length, UNIFORM: tl.constexpr):
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
        seq = row // uniform_length
    else:
        seq = row * 0
        if row > 0:
            for b0 in range(0, B, 256):
                b = b0 + tl.arange(0, 256)
                end = narrowed(tl.load(offset_ptr + 1 + b, mask=b < B, other=LAST))
                seq += tl.sum((end <= row).to(tl.int32))
    return seq
