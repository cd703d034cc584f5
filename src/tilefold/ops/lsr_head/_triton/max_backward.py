"""Backward of max pooling: only winners have a gradient.

A tile of rows of hidden, and a block of rows of the weight, each list the entries that they won,
and add them up in a fixed order. README.md describes the algorithm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import slope_from_score
from tilefold.ops._shared._triton.offsets import narrowed
from tilefold.ops.lsr_head._triton.sequences import first_sequence, sequence_offset

# An entry of a list packs the vocabulary index above the row inside its tile.
ROW_BITS = tl.constexpr(5)
ROW_MASK = tl.constexpr(31)
MAX_VOCAB = 1 << (31 - 5)
MIN_POWER = tl.constexpr(2.0**-100)
MAX_POWER = tl.constexpr(2.0**100)
SUM_BLOCK = tl.constexpr(512)
# The largest g of a row becomes less than twice this, below fp16's 65504.
HEADROOM = tl.constexpr(2.0**14)


@triton.jit
def _won_rows(
    scores_ptr,
    winner_ptr,
    offs,
    mask,
    ALWAYS_ACTIVE: tl.constexpr,
    NO_WINNER: tl.constexpr,
):
    """Load the winners of scores, and return which scores have a gradient.

    A score of 0 has none, except under an activation without a flat part. NaN has one, so that it
    is noticed.

    Args:
        scores_ptr: scores ``[B, V]``.
        winner_ptr: winners ``[B, V]``, as positions in their sequences.
        offs: offsets of the scores.
        mask: scores that exist.
        ALWAYS_ACTIVE: whether the activation has no flat part.
        NO_WINNER: winner of a sequence without valid tokens.
    """
    winner = tl.load(winner_ptr + offs, mask=mask, other=NO_WINNER).to(tl.int32)
    active = mask & (winner != NO_WINNER)
    if not ALWAYS_ACTIVE:
        score = tl.load(scores_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        active = active & ~(score <= 0.0)
    return winner, active


@triton.jit
def _power_of_two(largest, previous_power):
    """Return the power of two in ``largest``, or ``previous_power`` if that is larger.

    Args:
        largest: largest magnitude of some numbers.
        previous_power: a power of two.
    """
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.maximum(previous_power, tl.minimum(exponent.to(tl.float32, bitcast=True), MAX_POWER))


@triton.jit
def _inverse(power):
    """Return ``1 / power``, exactly, for a power of two."""
    return (0x7F000000 - power.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["B", "N", "uniform_length"])
def count_kernel(
    scores_ptr,
    winner_ptr,
    cu_ptr,
    count_ptr,
    B,
    V,
    N,
    uniform_length,
    SPLITS,
    split_v,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    ALWAYS_ACTIVE: tl.constexpr,
    NO_WINNER: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """Count the scores of a vocabulary split that each tile of rows won.

    Instance ``(tile, split)`` counts for one tile and one split.

    Args:
        scores_ptr: scores ``[B, V]``.
        winner_ptr: winners ``[B, V]``, as positions in their sequences.
        cu_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        count_ptr: counts ``[tiles, SPLITS]``, int32; written.
        B: number of sequences.
        V: number of columns.
        N: number of rows of hidden.
        uniform_length: length of all sequences, if UNIFORM.
        SPLITS: number of splits of the vocabulary.
        split_v: columns of a split.
        BLOCK_R: rows of a tile.
        BLOCK: columns that are read at a time.
        ALWAYS_ACTIVE: whether the activation has no flat part.
        NO_WINNER: winner of a sequence without valid tokens.
        UNIFORM: whether all sequences have the same length.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    first_row = tile * BLOCK_R
    end_row = tl.minimum(first_row + BLOCK_R, N)
    b = first_sequence(cu_ptr, first_row, B, uniform_length, UNIFORM)
    start = sequence_offset(cu_ptr, b, B, uniform_length, UNIFORM)
    end_v = tl.minimum((split + 1) * split_v, V)
    count = tl.zeros((BLOCK,), tl.int32)
    while (start < end_row) & (b < B):
        for v0 in range(split * split_v, end_v, BLOCK):
            v = v0 + tl.arange(0, BLOCK)
            winner, active = _won_rows(
                scores_ptr,
                winner_ptr,
                b.to(tl.int64) * V + v,
                v < end_v,
                ALWAYS_ACTIVE,
                NO_WINNER,
            )
            row = winner + start  # [BLOCK]
            count += (active & (row >= first_row) & (row < end_row)).to(tl.int32)
        b += 1
        start = sequence_offset(cu_ptr, b, B, uniform_length, UNIFORM)
    tl.store(count_ptr + tile.to(tl.int64) * SPLITS + split, tl.sum(count))


@triton.jit
def _sum_counts(count_ptr, first, last):
    """Return the sum of a range of counts, below 2**31.

    Args:
        count_ptr: counts, int32.
        first: index of the first count, int64.
        last: index after the last count, int64.

    Returns:
        The sum in int64.
    """
    counts = tl.zeros((SUM_BLOCK,), tl.int32)
    for i0 in range(first, last, SUM_BLOCK):
        i = i0 + tl.arange(0, SUM_BLOCK)
        counts += tl.load(count_ptr + i, mask=i < last, other=0)
    return tl.sum(counts).to(tl.int64)


@triton.jit(do_not_specialize=["B", "N", "uniform_length"])
def list_kernel(
    dscores_ptr,
    scores_ptr,
    winner_ptr,
    cu_ptr,
    prefix_sum_ptr,
    count_ptr,
    code_ptr,
    grad_ptr,
    B,
    V,
    N,
    uniform_length,
    SPLITS,
    split_v,
    stride_db,
    stride_dv,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALWAYS_ACTIVE: tl.constexpr,
    NO_WINNER: tl.constexpr,
    UNIFORM: tl.constexpr,
    HAS_PREFIX_SUMS: tl.constexpr,
):
    """List the scores of a vocabulary split that a tile of rows won, with their gradients.

    An entry of the list has a code, which packs the column and the row in the tile, and a gradient.
    Entries of all tiles are in one list, at the offsets that follow from the counts. Instance
    ``(tile, split)`` lists one split of one tile.

    Args:
        dscores_ptr: gradient of the scores ``[B, V]``, with strides ``stride_db`` and
            ``stride_dv``.
        scores_ptr: scores ``[B, V]``.
        winner_ptr: winners ``[B, V]``, as positions in their sequences.
        cu_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        prefix_sum_ptr: inclusive prefix sums of the counts, if HAS_PREFIX_SUMS. Otherwise every
            instance adds up the counts that it needs.
        count_ptr: counts ``[tiles, SPLITS]`` of :func:`count_kernel`.
        code_ptr: codes of the entries, int32; written.
        grad_ptr: gradients of the entries; written.
        B: number of sequences.
        V: number of columns.
        N: number of rows of hidden.
        uniform_length: length of all sequences, if UNIFORM.
        SPLITS: number of splits of the vocabulary.
        split_v: columns of a split.
        BLOCK_R: rows of a tile.
        BLOCK: columns that are read at a time.
        ACTIVATION: activation of the scores.
        ALWAYS_ACTIVE: whether the activation has no flat part.
        NO_WINNER: winner of a sequence without valid tokens.
        UNIFORM: whether all sequences have the same length.
        HAS_PREFIX_SUMS: whether the counts were added up before.
    """
    tile = tl.program_id(0)
    split = tl.program_id(1)
    slot = tile.to(tl.int64) * SPLITS + split
    count = tl.load(count_ptr + slot)
    if count > 0:
        first_row = tile * BLOCK_R
        end_row = tl.minimum(first_row + BLOCK_R, N)
        b = first_sequence(cu_ptr, first_row, B, uniform_length, UNIFORM)
        start = sequence_offset(cu_ptr, b, B, uniform_length, UNIFORM)
        end_v = tl.minimum((split + 1) * split_v, V)
        if HAS_PREFIX_SUMS:
            next_index = tl.load(prefix_sum_ptr + slot) - count  # the prefix sum is inclusive
        else:
            next_index = _sum_counts(count_ptr, slot * 0, slot)
        while (start < end_row) & (b < B):
            for v0 in range(split * split_v, end_v, BLOCK):
                v = v0 + tl.arange(0, BLOCK)
                offs = b.to(tl.int64) * V + v
                winner, active = _won_rows(
                    scores_ptr,
                    winner_ptr,
                    offs,
                    v < end_v,
                    ALWAYS_ACTIVE,
                    NO_WINNER,
                )
                row = winner + start  # [BLOCK]
                in_tile = active & (row >= first_row) & (row < end_row)
                score = tl.load(scores_ptr + offs, mask=in_tile, other=0.0).to(tl.float32)
                offs_d = b.to(tl.int64) * stride_db + v.to(tl.int64) * stride_dv
                grad = tl.load(dscores_ptr + offs_d, mask=in_tile, other=0.0).to(tl.float32)
                grad *= slope_from_score(score, ACTIVATION)
                n_listed = tl.cumsum(in_tile.to(tl.int32))
                entry = next_index + n_listed - 1
                tl.store(code_ptr + entry, (v << ROW_BITS) | (row - first_row), mask=in_tile)
                tl.store(grad_ptr + entry, grad.to(grad_ptr.dtype.element_ty), mask=in_tile)
                next_index += tl.max(n_listed)
            b += 1
            start = sequence_offset(cu_ptr, b, B, uniform_length, UNIFORM)


@triton.jit(do_not_specialize=["N", "logit_scale"])
def dhidden_kernel(
    weight_ptr,
    prefix_sum_ptr,
    count_ptr,
    code_ptr,
    grad_ptr,
    dhidden_ptr,
    N,
    SPLITS,
    logit_scale,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_PREFIX_SUMS: tl.constexpr,
):
    """Compute the gradient of a tile of rows of hidden, from the list of the scores that they won.

    A step reads BLOCK_E entries, gathers their rows of the weight, and multiplies these by a
    one-hot matrix ``[BLOCK_R, BLOCK_E]`` of the gradients. Entries are added in the order of the
    list. Instance ``(tile, j)`` computes block j of D.

    Args:
        weight_ptr: weight ``[V, D]``.
        prefix_sum_ptr: inclusive prefix sums of the counts, if HAS_PREFIX_SUMS.
        count_ptr: counts ``[tiles, SPLITS]`` of entries.
        code_ptr: codes of the entries, see :func:`list_kernel`.
        grad_ptr: gradients of the entries.
        dhidden_ptr: gradient ``[N, D]``; written.
        N: number of rows of hidden.
        SPLITS: number of splits of the vocabulary.
        logit_scale: factor of the products.
        D: hidden dimension.
        BLOCK_R: rows of a tile.
        BLOCK_D: entries of an instance.
        BLOCK_E: entries of the list that are read at a time.
        SCALED: whether gradients are scaled by powers of two into the range of fp16.
        PRECISION: precision of products of fp32.
        HAS_PREFIX_SUMS: whether the counts were added up before.
    """
    tile = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = d < D
    slot = tile.to(tl.int64) * SPLITS
    if HAS_PREFIX_SUMS:
        first = tl.load(prefix_sum_ptr + slot - 1, mask=tile > 0, other=0)
        count = (tl.load(prefix_sum_ptr + slot + SPLITS - 1) - first).to(tl.int32)
    else:
        first = _sum_counts(count_ptr, slot * 0, slot)
        count = _sum_counts(count_ptr, slot, slot + SPLITS).to(tl.int32)
    code_ptr += first
    grad_ptr += first
    rows = tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    power = tl.full((), MIN_POWER, tl.float32)
    # `count` has 32 bits. With 64, Triton 3.9 takes 254 registers, and no asynchronous copies.
    for e0 in range(0, count, BLOCK_E):
        entry = e0 + tl.arange(0, BLOCK_E)
        code = tl.load(code_ptr + entry, mask=entry < count, other=0)  # [BLOCK_E]
        grad = tl.load(grad_ptr + entry, mask=entry < count, other=0.0)  # [BLOCK_E]
        w = tl.load(
            weight_ptr + ((code >> ROW_BITS)[:, None].to(tl.int64) * D + d[None, :].to(tl.int64)),
            mask=(entry < count)[:, None] & mask_d[None, :],
            other=0.0,
        )  # [BLOCK_E, BLOCK_D]
        row = code & ROW_MASK
        if SCALED:
            previous_power = power
            power = _power_of_two(tl.max(tl.abs(grad), axis=0), previous_power)
            grad *= _inverse(power) * HEADROOM
            if power > previous_power:
                acc *= previous_power * _inverse(power)
        # [BLOCK_R, BLOCK_E]
        onehot = tl.where(rows[:, None] == row[None, :], grad[None, :], 0.0).to(w.dtype)
        acc = tl.dot(onehot, w, acc, input_precision=PRECISION)
    if SCALED:
        acc *= power / HEADROOM
    r = tile * BLOCK_R + rows
    tl.store(
        dhidden_ptr + r.to(tl.int64)[:, None] * D + d[None, :],
        (acc * logit_scale).to(dhidden_ptr.dtype.element_ty),
        mask=(r < N)[:, None] & mask_d[None, :],
    )


@triton.jit(do_not_specialize=["B", "N", "uniform_length", "logit_scale"])
def dweight_kernel(
    dscores_ptr,
    scores_ptr,
    winner_ptr,
    rows_ptr,
    cu_ptr,
    code64_ptr,
    grad_ptr,
    dweight_ptr,
    dbias_ptr,
    B,
    V,
    N,
    uniform_length,
    logit_scale,
    stride_db,
    stride_dv,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALWAYS_ACTIVE: tl.constexpr,
    NO_WINNER: tl.constexpr,
    UNIFORM: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients of the weight and the bias.

    With the gradient ``g`` of the logits,
    ``dweight[v] = logit_scale * sum_b g[b, v] * hidden[winner[b, v]]`` and
    ``dbias[v] = sum_b g[b, v]``.

    An item of work is a block of columns and a block of D. Instances take items in turn. For
    BLOCK_B sequences at a time, an instance writes the entries with a gradient to a list in its own
    scratch, in rising b. It reads the list back in steps of BLOCK_E entries, gathers their rows of
    hidden, and multiplies these by a one-hot matrix of g. Scores without a gradient thus cost no
    gather.

    Args:
        dscores_ptr: gradient of the scores ``[B, V]``, with strides ``stride_db`` and
            ``stride_dv``.
        scores_ptr: scores ``[B, V]``.
        winner_ptr: winners ``[B, V]``, as positions in their sequences.
        rows_ptr: hidden ``[N, D]``.
        cu_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        code64_ptr: scratch for the codes of listed entries, ``[programs, BLOCK_B * BLOCK_V]``,
            int64. A code packs the row of hidden and the column in the block.
        grad_ptr: scratch for their gradients, of the same shape.
        dweight_ptr: gradient ``[V, D]``; written, or added to with ACCUMULATE.
        dbias_ptr: gradient ``[V]``; written with NEED_BIAS.
        B: number of sequences.
        V: number of columns.
        N: number of rows of hidden.
        uniform_length: length of all sequences, if UNIFORM.
        logit_scale: factor of the products.
        D: hidden dimension.
        BLOCK_B, BLOCK_V: sequences and columns that are listed at a time.
        BLOCK_D: entries of a block of D.
        BLOCK_E: listed entries that are multiplied at a time.
        ACTIVATION: activation of the scores.
        ALWAYS_ACTIVE: whether the activation has no flat part.
        NO_WINNER: winner of a sequence without valid tokens.
        UNIFORM: whether all sequences have the same length.
        NEED_WEIGHT, NEED_BIAS: which gradients are needed.
        ACCUMULATE: whether the gradient of the weight is added to ``dweight``.
        SCALED: whether gradients are scaled by powers of two into the range of fp16.
        PRECISION: precision of products of fp32.
    """
    D_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D if NEED_WEIGHT else 1
    list_offset = tl.program_id(0).to(tl.int64) * BLOCK_B * BLOCK_V
    v_in_tile = tl.arange(0, BLOCK_V)
    for item in range(tl.program_id(0), tl.cdiv(V, BLOCK_V) * D_BLOCKS, tl.num_programs(0)):
        v = (item // D_BLOCKS) * BLOCK_V + v_in_tile
        d = (item % D_BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
        mask_d = d < D
        acc = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
        dbias = tl.zeros((BLOCK_V,), tl.float32)
        power = tl.full((BLOCK_V,), MIN_POWER, tl.float32)
        n_entries = 0
        for first_b in range(0, B, BLOCK_B):
            b = first_b + tl.arange(0, BLOCK_B)
            offs = b.to(tl.int64)[:, None] * V + v[None, :]
            inside = (b < B)[:, None] & (v < V)[None, :]
            # Step 1: the gradients of the logits.
            # [BLOCK_B, BLOCK_V]
            winner, active = _won_rows(
                scores_ptr,
                winner_ptr,
                offs,
                inside,
                ALWAYS_ACTIVE,
                NO_WINNER,
            )
            score = tl.load(scores_ptr + offs, mask=active, other=0.0).to(tl.float32)
            offs_d = b.to(tl.int64)[:, None] * stride_db + v.to(tl.int64)[None, :] * stride_dv
            grad = tl.load(dscores_ptr + offs_d, mask=active, other=0.0).to(tl.float32)
            grad = tl.where(active, grad * slope_from_score(score, ACTIVATION), 0.0)
            if NEED_BIAS:
                dbias += tl.sum(grad, axis=0)
            if NEED_WEIGHT:
                if UNIFORM:
                    start = b * uniform_length
                else:
                    start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0))  # [BLOCK_B]
                row = winner + start[:, None]
                # Invalid cu_seqlens must not read outside hidden.
                active = active & (row >= 0) & (row < N)
                # Step 2: list the entries with a gradient.
                flag = tl.reshape(active.to(tl.int32), (BLOCK_B * BLOCK_V,))
                count = tl.sum(flag)
                if count > 0:
                    if SCALED:
                        previous_power = power
                        power = _power_of_two(tl.max(tl.abs(grad), axis=0), previous_power)
                        grad *= (_inverse(power) * HEADROOM)[None, :]
                        if tl.max((power > previous_power).to(tl.int32), axis=0) > 0:
                            acc *= (previous_power * _inverse(power))[:, None]
                    entry_offs = list_offset + tl.reshape(tl.cumsum(flag), (BLOCK_B, BLOCK_V)) - 1
                    code = (row.to(tl.int64) * BLOCK_V) + v_in_tile[None, :]
                    tl.debug_barrier()  # all threads have read the previous list
                    tl.store(code64_ptr + entry_offs, code, mask=active)
                    tl.store(grad_ptr + entry_offs, grad.to(grad_ptr.dtype.element_ty), mask=active)
                    tl.debug_barrier()  # the list is written
                    # Step 3: multiply the listed entries by their rows of hidden.
                    for first_entry in range(0, count, BLOCK_E):
                        entry = first_entry + tl.arange(0, BLOCK_E)
                        entry_mask = entry < count
                        listed_code = tl.load(
                            code64_ptr + list_offset + entry,
                            mask=entry_mask,
                            other=0,
                        )
                        listed_grad = tl.load(
                            grad_ptr + list_offset + entry,
                            mask=entry_mask,
                            other=0.0,
                        )
                        listed_rows = tl.load(
                            rows_ptr + (listed_code // BLOCK_V)[:, None] * D + d[None, :],
                            mask=entry_mask[:, None] & mask_d[None, :],
                            other=0.0,
                        )  # [BLOCK_E, BLOCK_D]
                        column = (listed_code % BLOCK_V).to(tl.int32)
                        is_column = v_in_tile[:, None] == column[None, :]
                        # [BLOCK_V, BLOCK_E]
                        onehot = tl.where(is_column, listed_grad[None, :], 0.0).to(
                            listed_rows.dtype
                        )
                        acc = tl.dot(onehot, listed_rows, acc, input_precision=PRECISION)
                    n_entries += count
        if NEED_WEIGHT:
            mask = (v < V)[:, None] & mask_d[None, :]
            offs_w = v.to(tl.int64)[:, None] * D + d[None, :]
            if SCALED:
                acc *= (power / HEADROOM)[:, None]
            acc *= logit_scale
            if not ACCUMULATE:
                tl.store(dweight_ptr + offs_w, acc.to(dweight_ptr.dtype.element_ty), mask=mask)
            elif n_entries > 0:
                tl.store(
                    dweight_ptr + offs_w,
                    tl.load(dweight_ptr + offs_w, mask=mask, other=0.0) + acc,
                    mask=mask,
                )
        if NEED_BIAS and item % D_BLOCKS == 0:
            tl.store(dbias_ptr + v, dbias.to(dbias_ptr.dtype.element_ty), mask=v < V)
