"""Kernels that pack the valid tokens of a batch, without waiting for the CPU.

Each sequence begins at a multiple of GROUP rows. Its first valid token is repeated at its end to
fill the last group, which does not change a maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton.offsets import mask_if, narrowed

BLOCK_ROWS = 32  # rows that an instance copies
BLOCK_D = 128
BLOCK_EMPTY = 1024  # scores of an empty sequence that are written at a time
SCAN = 1024  # mask entries or sequences that are scanned at a time
# Entries of a mask up to which every instance counts itself, which costs less than a launch.
MAX_MASK = 4096


@triton.jit
def _rounded(length, GROUP: tl.constexpr):
    """Round a length up to a multiple of GROUP."""
    return (length + GROUP - 1) // GROUP * GROUP


@triton.jit
def _valid(mask_ptr, b, s, S, end, HAS_MASK: tl.constexpr):
    """Return whether positions of a sequence hold valid tokens before an end.

    Args:
        mask_ptr: mask ``[B, S]``, if HAS_MASK.
        b: the sequence.
        s: the positions.
        S: length of the padded sequences.
        end: positions from here on are not valid.
        HAS_MASK: whether there is a mask.
    """
    if HAS_MASK:
        return tl.load(mask_ptr + b * S + s, mask=s < end, other=0) != 0
    else:
        return s < end


@triton.jit
def _store_empty(
    out_ptr,
    winner_ptr,
    seq,
    program,
    n_programs,
    V,
    value,
    BLOCK: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    NO_WINNER: tl.constexpr,
):
    """Write the scores and winners of a sequence without a valid token.

    Args:
        out_ptr: scores ``[B, V]``; row ``seq`` is written.
        winner_ptr: winners ``[B, V]``; row ``seq`` is written if WITH_WINNERS.
        seq: the sequence.
        program: number of this instance among those that share the columns.
        n_programs: number of instances that share the columns.
        V: number of columns.
        value: the score, 0 or NaN.
        BLOCK: columns that are written at a time.
        WITH_WINNERS: whether winners are needed.
        NO_WINNER: what is written as winner.
    """
    for v0 in range(program * BLOCK, V, n_programs * BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        offs = seq.to(tl.int64) * V + v
        tl.store(
            out_ptr + offs,
            (tl.zeros((BLOCK,), tl.float32) + value).to(out_ptr.dtype.element_ty),
            mask=v < V,
        )
        if WITH_WINNERS:
            tl.store(
                winner_ptr + offs,
                tl.full((BLOCK,), NO_WINNER, winner_ptr.dtype.element_ty),
                mask=v < V,
            )


@triton.jit(do_not_specialize=["S"])
def count_kernel(mask_ptr, count_ptr, first_ptr, S, SCAN: tl.constexpr):
    """Count the valid tokens of each sequence, and find the position of the first one.

    Instance b handles sequence b.

    Args:
        mask_ptr: mask ``[B, S]``.
        count_ptr: number of valid tokens, ``[B]`` int32; written.
        first_ptr: position of the first one, ``[B]`` int32, S if there is none; written.
        S: length of the padded sequences.
        SCAN: mask entries that are read at a time.
    """
    b = tl.program_id(0).to(tl.int64)
    count = 0
    first = S
    for s0 in range(0, S, SCAN):
        s = s0 + tl.arange(0, SCAN)
        valid = _valid(mask_ptr, b, s, S, S, True)  # [SCAN]
        count += tl.sum(valid.to(tl.int32))
        first = tl.minimum(first, tl.min(tl.where(valid, s, S)))
    tl.store(count_ptr + b, count)
    tl.store(first_ptr + b, first)


@triton.jit
def _counts(
    mask_ptr,
    count_ptr,
    first_ptr,
    b,
    B,
    S,
    SCAN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Return where a sequence begins among the packed rows, and how many valid tokens it has.

    Args:
        mask_ptr: mask ``[B, S]``, read if BLOCK_B is not 0.
        count_ptr: number of valid tokens, ``[B]``, if BLOCK_B is 0: then :func:`count_kernel` has
            counted.
        first_ptr: position of the first valid token, ``[B]``, if BLOCK_B is 0.
        b: the sequence.
        B: number of sequences.
        S: length of the padded sequences.
        SCAN: counts that are read at a time.
        GROUP: packed sequences begin at multiples of it.
        BLOCK_B: power of two of at least B, or 0.
        BLOCK_S: power of two of at least S, or 0.

    Returns:
        The first packed row, the number of valid tokens, and the position of the first one (S if
        there is none).
    """
    offset = 0
    if BLOCK_B == 0:
        for start in range(0, b, SCAN):
            earlier = start + tl.arange(0, SCAN)
            earlier_counts = tl.load(count_ptr + earlier, mask=earlier < b, other=0)
            offset += tl.sum(_rounded(earlier_counts, GROUP))
        return offset, tl.load(count_ptr + b), tl.load(first_ptr + b)
    else:
        seq = tl.arange(0, BLOCK_B)
        s = tl.arange(0, BLOCK_S)
        inside = (seq < B)[:, None] & (s < S)[None, :]
        mask = tl.load(mask_ptr + seq[:, None] * S + s[None, :], mask=inside, other=0)
        valid = mask != 0  # [BLOCK_B, BLOCK_S]
        counts = tl.sum(valid.to(tl.int32), axis=1)
        offset += tl.sum(tl.where(seq < b, _rounded(counts, GROUP), 0))
        first = tl.min(tl.where(_valid(mask_ptr, b, s, S, S, True), s, S))
        return offset, tl.sum(tl.where(seq == b, counts, 0)), first


@triton.jit(do_not_specialize=["B", "S", "V"])
def copy_padded_kernel(
    hidden_ptr,
    mask_ptr,
    count_ptr,
    first_ptr,
    offset_ptr,
    rows_ptr,
    position_ptr,
    out_ptr,
    winner_ptr,
    B,
    S,
    V,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SCAN: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_EMPTY: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    NO_WINNER: tl.constexpr,
):
    """Pack the valid tokens of padded sequences.

    Each packed sequence begins at a multiple of GROUP rows. Its first valid token is repeated at
    its end to fill the last group, which does not change a maximum. Instance ``(b, j)`` copies
    block j of the tokens of sequence b.

    Args:
        hidden_ptr: token states ``[B, S, D]``.
        mask_ptr: mask ``[B, S]``, if HAS_MASK.
        count_ptr: number of valid tokens, ``[B]``, with a mask and BLOCK_B = 0.
        first_ptr: position of the first valid token, ``[B]``, with a mask and BLOCK_B = 0.
        offset_ptr: first packed row of each sequence, ``[B + 1]``; written.
        rows_ptr: packed rows ``[T, D]``; written.
        position_ptr: position of each packed row in its sequence, ``[T]``; written if WITH_WINNERS.
        out_ptr: scores ``[B, V]``; written for sequences without a valid token.
        winner_ptr: winners ``[B, V]``; written for the same sequences.
        B: number of sequences.
        S: length of the padded sequences.
        V: number of columns of the scores.
        D: hidden dimension.
        BLOCK_ROWS, BLOCK_D: rows and entries that are copied at a time.
        SCAN: mask entries or counts that are read at a time.
        GROUP: packed sequences begin at multiples of it.
        HAS_MASK: whether there is a mask.
        BLOCK_B, BLOCK_S: powers of two of at least B and S for a small mask, which every instance
            reads. 0 if :func:`count_kernel` has counted, or there is no mask.
        BLOCK_EMPTY: scores of an empty sequence that are written at a time.
        WITH_WINNERS: whether winners are needed.
        NO_WINNER: winner of a sequence without a valid token.
    """
    b = tl.program_id(0).to(tl.int64)
    s0 = tl.program_id(1) * BLOCK_ROWS
    offset = tl.program_id(0) * _rounded(S, GROUP)
    count = S
    first = 0
    if HAS_MASK:
        offset, count, first = _counts(
            mask_ptr,
            count_ptr,
            first_ptr,
            b,
            B,
            S,
            SCAN,
            GROUP,
            BLOCK_B,
            BLOCK_S,
        )
    # Valid tokens before this block tell the packed row of its first one.
    before = 0
    for start in range(0, s0, SCAN):
        s = start + tl.arange(0, SCAN)
        before += tl.sum(_valid(mask_ptr, b, s, S, s0, HAS_MASK).to(tl.int32))
    s = s0 + tl.arange(0, BLOCK_ROWS)
    valid = _valid(mask_ptr, b, s, S, S, HAS_MASK)  # [BLOCK_ROWS]
    row = (offset + before + tl.cumsum(valid.to(tl.int32)) - 1).to(tl.int64)
    if WITH_WINNERS:
        tl.store(position_ptr + row, s, mask=valid)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (d < D)[None, :]
        x = tl.load(
            hidden_ptr + (b * S + s)[:, None] * D + d[None, :],
            mask=inside,
        )  # [BLOCK_ROWS, BLOCK_D]
        tl.store(rows_ptr + row[:, None] * D + d[None, :], x, mask=inside)
    # The first block also writes the offsets, and fills the last group.
    if s0 == 0:
        end = offset + _rounded(count, GROUP)
        tl.store(offset_ptr + b, offset)
        if b == B - 1:
            tl.store(offset_ptr + B, end)
        fill = offset + count + tl.arange(0, GROUP)
        if WITH_WINNERS:
            tl.store(position_ptr + fill, first + tl.zeros((GROUP,), tl.int32), mask=fill < end)
        for d0 in range(0, D, BLOCK_D):
            d = d0 + tl.arange(0, BLOCK_D)
            x = tl.load(
                hidden_ptr + (b * S + first) * D + d,
                mask=mask_if(d < D, count > 0),
                other=0.0,
            )
            inside = (fill < end)[:, None] & (d < D)[None, :]
            tl.store(
                rows_ptr + fill.to(tl.int64)[:, None] * D + d[None, :],
                x[None, :],
                mask=inside,
            )
    if count == 0:
        _store_empty(
            out_ptr,
            winner_ptr,
            b,
            tl.program_id(1),
            tl.num_programs(1),
            V,
            0.0,
            BLOCK_EMPTY,
            WITH_WINNERS,
            NO_WINNER,
        )


@triton.jit(do_not_specialize=["B", "T", "V"])
def copy_packed_kernel(
    hidden_ptr,
    cu_ptr,
    offset_ptr,
    rows_ptr,
    position_ptr,
    out_ptr,
    winner_ptr,
    B,
    T,
    V,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    SCAN_B: tl.constexpr,
    BLOCK_EMPTY: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    NO_WINNER: tl.constexpr,
):
    """Copy packed sequences so that each begins at a multiple of GROUP rows.

    The first token of a sequence is repeated at its end to fill the last group, which does not
    change a maximum. Instance j copies block j of the rows. Invalid ``cu_seqlens`` make every
    sequence empty, and every score NaN.

    Args:
        hidden_ptr: token states ``[T, D]``.
        cu_ptr: offsets ``[B + 1]`` of the sequences.
        offset_ptr: first row of each copied sequence, ``[B + 1]``; written.
        rows_ptr: copied rows; written.
        position_ptr: position of each copied row in its sequence; written if WITH_WINNERS.
        out_ptr: scores ``[B, V]``; written for empty sequences.
        winner_ptr: winners ``[B, V]``; written for empty sequences.
        B: number of sequences.
        T: number of rows.
        V: number of columns of the scores.
        D: hidden dimension.
        BLOCK_ROWS, BLOCK_D: rows and entries that are copied at a time.
        GROUP: copied sequences begin at multiples of it.
        SCAN_B: sequences that are read at a time.
        BLOCK_EMPTY: scores of an empty sequence that are written at a time.
        WITH_WINNERS: whether winners are needed.
        NO_WINNER: winner of an empty sequence.
    """
    # The number of sequences that end at or before row r is the sequence of r. Their lengths,
    # rounded up, add up to the first copied row of this sequence.
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    seq = tl.zeros((BLOCK_ROWS,), tl.int32)
    offset = tl.zeros((BLOCK_ROWS,), tl.int32)
    offsets_valid = (narrowed(tl.load(cu_ptr)) == 0) & (narrowed(tl.load(cu_ptr + B)) == T)
    for b0 in range(0, B, SCAN_B):
        b = b0 + tl.arange(0, SCAN_B)
        start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0))
        end = narrowed(tl.load(cu_ptr + 1 + b, mask=b < B, other=0))
        offsets_valid = offsets_valid & (tl.min((end >= start).to(tl.int32)) > 0)
        ends_before = (end[None, :] <= r[:, None]) & (b < B)[None, :]  # [BLOCK_ROWS, SCAN_B]
        seq += tl.sum(ends_before.to(tl.int32), axis=1)
        offset += tl.sum(tl.where(ends_before, _rounded(end - start, GROUP)[None, :], 0), axis=1)
    valid = mask_if(r < T, offsets_valid)
    first = narrowed(tl.load(cu_ptr + seq, mask=valid, other=0))
    count = narrowed(tl.load(cu_ptr + seq + 1, mask=valid, other=0)) - first
    position = r - first
    row = (offset + position).to(tl.int64)
    if WITH_WINNERS:
        tl.store(position_ptr + row, position, mask=valid)
    # The instance that copies a sequence's first token also repeats it after the last token.
    n_repeats = tl.where(valid & (position == 0), _rounded(count, GROUP) - count, 0)
    repeat_row = row + count
    if WITH_WINNERS:
        for i in range(GROUP - 1):
            tl.store(position_ptr + repeat_row + i, position, mask=n_repeats > i)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (d < D)[None, :]
        x = tl.load(
            hidden_ptr + r.to(tl.int64)[:, None] * D + d[None, :],
            mask=inside,
        )  # [BLOCK_ROWS, BLOCK_D]
        tl.store(rows_ptr + row[:, None] * D + d[None, :], x, mask=inside)
        if tl.max(n_repeats) > 0:
            for i in range(GROUP - 1):
                mask = (n_repeats > i)[:, None] & (d < D)[None, :]
                tl.store(rows_ptr + (repeat_row + i)[:, None] * D + d[None, :], x, mask=mask)
    if tl.program_id(0) == 0:  # write the first packed rows of all sequences
        tl.store(offset_ptr, 0)
        total = 0
        for b0 in range(0, B, SCAN_B):
            b = b0 + tl.arange(0, SCAN_B)
            start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0))
            end = narrowed(tl.load(cu_ptr + 1 + b, mask=b < B, other=0))
            length = tl.where(offsets_valid, _rounded(end - start, GROUP), 0)
            tl.store(offset_ptr + 1 + b, total + tl.cumsum(length), mask=b < B)
            total += tl.sum(length)
    b = tl.program_id(0)
    while b < B:  # instances share the sequences
        empty = narrowed(tl.load(cu_ptr + b)) == narrowed(tl.load(cu_ptr + b + 1))
        if empty | (offsets_valid == 0):
            value = tl.where(offsets_valid, 0.0, float("nan"))
            _store_empty(
                out_ptr,
                winner_ptr,
                b,
                0,
                1,
                V,
                value,
                BLOCK_EMPTY,
                WITH_WINNERS,
                NO_WINNER,
            )
        b += tl.num_programs(0)
