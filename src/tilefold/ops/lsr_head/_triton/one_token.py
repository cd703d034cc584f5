"""Poolings of one token per sequence (cls and last): products of B gathered rows, without atomics.

README.md describes the algorithm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import activate, gradient_from_score
from tilefold.ops._shared._triton.offsets import mask_if, narrowed
from tilefold.ops.lsr_head._triton.max_backward import HEADROOM, MIN_POWER, _inverse, _power_of_two

CHECK_BLOCK = tl.constexpr(256)  # sequences whose offsets are checked at a time


@triton.jit
def _token_positions(
    mask_ptr,
    b,
    inside,
    S,
    LAST: tl.constexpr,
    NO_WINNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the position of the first or last valid token of each sequence, int32.

    Args:
        mask_ptr: mask ``[B, S]``.
        b: the sequences.
        inside: sequences that exist.
        S: length of the padded sequences.
        LAST: whether the last token is searched; otherwise the first.
        NO_WINNER: position of a sequence without valid tokens.
        BLOCK: mask entries that are read at a time.
    """
    position = tl.zeros(b.shape, tl.int32) + (-1 if LAST else S)
    for s0 in range(0, S, BLOCK):
        s = s0 + tl.arange(0, BLOCK)
        rows = b.to(tl.int64)[:, None] * S + s[None, :]
        mask = tl.load(mask_ptr + rows, mask=inside[:, None] & (s < S)[None, :], other=0)
        valid = mask != 0  # [B, BLOCK]
        if LAST:
            position = tl.maximum(position, tl.max(tl.where(valid, s[None, :], -1), axis=1))
        else:
            position = tl.minimum(position, tl.min(tl.where(valid, s[None, :], S), axis=1))
    return tl.where((position >= 0) & (position < S), position, NO_WINNER)


@triton.jit(do_not_specialize=["S"])
def find_kernel(
    mask_ptr,
    winner_ptr,
    S,
    LAST: tl.constexpr,
    NO_WINNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find the pooled token of each sequence in a large mask, before the forward kernel.

    Instance b handles sequence b.

    Args:
        mask_ptr: mask ``[B, S]``.
        winner_ptr: positions ``[B]`` of the tokens; written.
        S: length of the padded sequences.
        LAST: whether the last valid token is searched; otherwise the first.
        NO_WINNER: position of a sequence without valid tokens.
        BLOCK: mask entries that are read at a time.
    """
    b = tl.program_id(0) + tl.arange(0, 1)
    position = _token_positions(mask_ptr, b, b >= 0, S, LAST, NO_WINNER, BLOCK)
    tl.store(winner_ptr + b, position.to(winner_ptr.dtype.element_ty))


@triton.jit
def _token_rows(
    winner_ptr,
    cu_ptr,
    b,
    B,
    N,
    length,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    LAST: tl.constexpr,
    NO_WINNER: tl.constexpr,
):
    """Return the row of hidden of each sequence's pooled token, and whether there is one.

    Args:
        winner_ptr: positions ``[B]`` of the tokens in their sequences, if MASKED.
        cu_ptr: offsets ``[B + 1]``, if PACKED.
        b: the sequences.
        B: number of sequences.
        N: number of rows of hidden.
        length: length of the padded sequences.
        PACKED: whether the batch is packed.
        MASKED: whether a padded batch has a mask.
        LAST: whether the pooling takes the last valid token; otherwise it takes the first.
        NO_WINNER: position of a sequence without valid tokens.

    Returns:
        Rows in int64, and booleans: False for sequences without a valid token or with invalid
        offsets.
    """
    if PACKED:
        start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0))
        end = narrowed(tl.load(cu_ptr + b + 1, mask=b < B, other=0))
        row = end - 1 if LAST else start
        valid = (start >= 0) & (end > start) & (end <= N)
        return row.to(tl.int64), valid
    elif MASKED:
        position = tl.load(winner_ptr + b, mask=b < B, other=NO_WINNER).to(tl.int32)
        return b.to(tl.int64) * length + position, position != NO_WINNER
    else:
        return b.to(tl.int64) * length + (length - 1 if LAST else 0), b < B


@triton.jit
def offsets_are_valid(cu_ptr, B, N):
    """Return whether offsets start with 0, never fall and end with N.

    Args:
        cu_ptr: offsets ``[B + 1]``.
        B: number of sequences.
        N: number of rows.
    """
    valid = (narrowed(tl.load(cu_ptr)) == 0) & (narrowed(tl.load(cu_ptr + B)) == N)
    for b0 in range(0, B, CHECK_BLOCK):
        b = b0 + tl.arange(0, CHECK_BLOCK)
        start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0))
        end = narrowed(tl.load(cu_ptr + 1 + b, mask=b < B, other=0))
        valid = valid & (tl.min((end >= start).to(tl.int32)) > 0)
    return valid


@triton.jit
def logits_tile(
    weight_ptr,
    rows_ptr,
    offs_v,
    row,
    valid,
    V,
    D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the products of some rows of hidden and a block of the weight.

    The result is ``[BLOCK_T, BLOCK_V]`` in fp32.

    Args:
        weight_ptr: weight ``[V, D]``.
        rows_ptr: hidden ``[N, D]``.
        offs_v: columns ``[BLOCK_V]``, the rows of the weight.
        row: rows of hidden, ``[BLOCK_T]``.
        valid: rows that are read; the others count as 0.
        V: number of columns.
        D: hidden dimension.
        BLOCK_V, BLOCK_T, BLOCK_K: columns, rows and entries of a tile.
        PRECISION: precision of products of fp32.
    """
    acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for k0 in tl.range(0, D, BLOCK_K):
        offs_k = k0 + tl.arange(0, BLOCK_K)
        w = tl.load(
            weight_ptr + offs_v.to(tl.int64)[:, None] * D + offs_k[None, :],
            mask=(offs_v < V)[:, None] & (offs_k < D)[None, :],
            other=0.0,
        )  # [BLOCK_V, BLOCK_K]
        h = tl.load(
            rows_ptr + row[:, None] * D + offs_k[None, :],
            mask=valid[:, None] & (offs_k < D)[None, :],
            other=0.0,
        )  # [BLOCK_T, BLOCK_K]
        acc = tl.dot(h, w.T, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["B", "N", "length", "logit_scale"])
def forward_kernel(
    weight_ptr,
    rows_ptr,
    bias_ptr,
    mask_ptr,
    winner_ptr,
    cu_ptr,
    out_ptr,
    B,
    V,
    N,
    length,
    logit_scale,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    LAST: tl.constexpr,
    NO_WINNER: tl.constexpr,
    FIND: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the scores of cls or last pooling, from one token per sequence.

    A score is ``act(logit_scale * hidden[row of b] . weight[v] + bias[v])``. Instance ``(i, j)``
    computes block i of the columns for block j of the sequences.

    Args:
        weight_ptr: weight ``[V, D]``.
        rows_ptr: token states ``[N, D]``.
        bias_ptr: ``[V]``, if HAS_BIAS.
        mask_ptr: mask ``[B, length]``, if MASKED.
        winner_ptr: positions of the tokens ``[B]``, if MASKED. Written if WITH_WINNERS.
        cu_ptr: offsets ``[B + 1]``, if PACKED. Invalid ones make scores NaN.
        out_ptr: scores ``[B, V]``; written.
        B: number of sequences.
        V: number of columns.
        N: number of rows of hidden.
        length: length of the padded sequences.
        logit_scale: factor of the products.
        D: hidden dimension.
        BLOCK_B, BLOCK_V, BLOCK_K: sequences, columns and entries of a tile.
        ACTIVATION: activation of the scores.
        HAS_BIAS: whether there is a bias.
        PACKED: whether the batch is packed.
        MASKED: whether a padded batch has a mask.
        LAST: whether the pooling takes the last valid token; otherwise it takes the first.
        NO_WINNER: position of a sequence without valid tokens.
        FIND: mask entries that are read at a time; 0 if :func:`find_kernel` has found the tokens.
        WITH_WINNERS: whether positions are needed for a backward pass.
        PRECISION: precision of products of fp32.
    """
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    b = tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)
    if FIND:
        position = _token_positions(mask_ptr, b, b < B, length, LAST, NO_WINNER, FIND)
        row = b.to(tl.int64) * length + position
        valid = position != NO_WINNER
        if WITH_WINNERS:
            may_write = mask_if(b < B, tl.program_id(0) == 0)
            tl.store(winner_ptr + b, position.to(winner_ptr.dtype.element_ty), mask=may_write)
    else:
        row, valid = _token_rows(
            winner_ptr,
            cu_ptr,
            b,
            B,
            N,
            length,
            PACKED,
            MASKED,
            LAST,
            NO_WINNER,
        )
    acc = logits_tile(
        weight_ptr,
        rows_ptr,
        v,
        row,
        valid,
        V,
        D,
        BLOCK_V,
        BLOCK_B,
        BLOCK_K,
        PRECISION,
    )
    acc *= logit_scale
    if HAS_BIAS:
        acc += tl.load(bias_ptr + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
    scores = tl.where(valid[:, None], activate(acc, ACTIVATION), 0.0)
    if PACKED:  # invalid offsets must not yield plausible scores
        scores = tl.where(offsets_are_valid(cu_ptr, B, N), scores, float("nan"))
    offs = b.to(tl.int64)[:, None] * V + v[None, :]
    tl.store(
        out_ptr + offs,
        scores.to(out_ptr.dtype.element_ty),
        mask=(b < B)[:, None] & (v < V)[None, :],
    )


@triton.jit
def _logit_gradient(
    dscores_ptr,
    scores_ptr,
    b,
    v,
    V,
    stride_db,
    stride_dv,
    inside,
    ACTIVATION: tl.constexpr,
):
    """Return the gradients of logits from those of their scores, fp32.

    Args:
        dscores_ptr: gradient of the scores ``[B, V]``, with strides ``stride_db`` and
            ``stride_dv``.
        scores_ptr: scores ``[B, V]``.
        b: the sequences.
        v: the columns.
        V: number of columns.
        inside: scores that have a gradient; the others get 0.
        ACTIVATION: activation of the scores.
    """
    offs = b.to(tl.int64)[:, None] * V + v[None, :]
    score = tl.load(scores_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    offs = b.to(tl.int64)[:, None] * stride_db + v.to(tl.int64)[None, :] * stride_dv
    grad = tl.load(dscores_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, gradient_from_score(grad, score, ACTIVATION), 0.0)


@triton.jit(do_not_specialize=["B", "N", "length", "logit_scale"])
def weight_gradient_kernel(
    dscores_ptr,
    scores_ptr,
    winner_ptr,
    rows_ptr,
    cu_ptr,
    dweight_ptr,
    dbias_ptr,
    B,
    V,
    N,
    length,
    logit_scale,
    stride_db,
    stride_dv,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    LAST: tl.constexpr,
    NO_WINNER: tl.constexpr,
    NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients of the weight and the bias, for cls or last pooling.

    With the gradient ``g`` of the logits,
    ``dweight[v] = logit_scale * sum_b g[b, v] * hidden[row of b]`` and
    ``dbias[v] = sum_b g[b, v]``, summed in rising b. An instance computes one block of the weight.

    Args:
        dscores_ptr: gradient of the scores ``[B, V]``, with strides ``stride_db`` and
            ``stride_dv``.
        scores_ptr: scores ``[B, V]``.
        winner_ptr: positions of the tokens ``[B]``, if MASKED.
        rows_ptr: hidden ``[N, D]``.
        cu_ptr: offsets ``[B + 1]``, if PACKED.
        dweight_ptr: gradient ``[V, D]``; written if NEED_WEIGHT.
        dbias_ptr: gradient ``[V]``; written if NEED_BIAS.
        B: number of sequences.
        V: number of columns.
        N: number of rows of hidden.
        length: length of the padded sequences.
        logit_scale: factor of the products.
        D: hidden dimension.
        BLOCK_B, BLOCK_V, BLOCK_D: sequences, columns and entries of a tile.
        ACTIVATION: activation of the scores.
        PACKED: whether the batch is packed.
        MASKED: whether a padded batch has a mask.
        LAST: whether the pooling takes the last valid token; otherwise it takes the first.
        NO_WINNER: position of a sequence without valid tokens.
        NEED_WEIGHT, NEED_BIAS: which gradients are needed.
        SCALED: whether gradients are scaled by powers of two into the range of fp16.
        PRECISION: precision of products of fp32.
    """
    D_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D if NEED_WEIGHT else 1
    item = tl.program_id(0)
    v = (item // D_BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = (item % D_BLOCKS) * BLOCK_D + tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_V,), tl.float32)
    power = tl.full((BLOCK_V,), MIN_POWER, tl.float32)
    for b0 in tl.range(0, B, BLOCK_B):
        b = b0 + tl.arange(0, BLOCK_B)
        row, valid = _token_rows(
            winner_ptr,
            cu_ptr,
            b,
            B,
            N,
            length,
            PACKED,
            MASKED,
            LAST,
            NO_WINNER,
        )
        inside = valid[:, None] & (v < V)[None, :]
        grad = _logit_gradient(
            dscores_ptr,
            scores_ptr,
            b,
            v,
            V,
            stride_db,
            stride_dv,
            inside,
            ACTIVATION,
        )
        if NEED_BIAS:
            dbias += tl.sum(grad, axis=0)
        if NEED_WEIGHT:
            h = tl.load(
                rows_ptr + row[:, None] * D + d[None, :],
                mask=valid[:, None] & (d < D)[None, :],
                other=0.0,
            )  # [BLOCK_B, BLOCK_D]
            if SCALED:
                previous_power = power
                power = _power_of_two(tl.max(tl.abs(grad), axis=0), previous_power)
                grad *= (_inverse(power) * HEADROOM)[None, :]
                acc *= (previous_power * _inverse(power))[:, None]
            acc = tl.dot(tl.trans(grad.to(h.dtype)), h, acc, input_precision=PRECISION)
    if NEED_WEIGHT:
        if SCALED:
            acc *= (power / HEADROOM)[:, None]
        acc *= logit_scale
        offs = v.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(
            dweight_ptr + offs,
            acc.to(dweight_ptr.dtype.element_ty),
            mask=(v < V)[:, None] & (d < D)[None, :],
        )
    if NEED_BIAS and item % D_BLOCKS == 0:
        tl.store(dbias_ptr + v, dbias.to(dbias_ptr.dtype.element_ty), mask=v < V)


@triton.jit(do_not_specialize=["B", "N", "length"])
def split_gradient_kernel(
    dscores_ptr,
    scores_ptr,
    winner_ptr,
    weight_ptr,
    cu_ptr,
    part_ptr,
    dhidden_ptr,
    B,
    V,
    N,
    length,
    split_v,
    stride_db,
    stride_dv,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    LAST: tl.constexpr,
    NO_WINNER: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
    CLEAR: tl.constexpr,
):
    """Compute the sums of a vocabulary split for the gradient of hidden, for cls or last pooling.

    With the gradient ``g`` of the logits, ``part[split, b]`` sums ``g[b, v] * weight[v]`` over the
    split's columns, in fp32 and in rising v. :func:`store_rows_kernel` adds up the splits. Instance
    ``(i, split, j)`` handles block i of D and block j of the sequences. Instances also clear
    ``dhidden``.

    Args:
        dscores_ptr: gradient of the scores ``[B, V]``, with strides ``stride_db`` and
            ``stride_dv``.
        scores_ptr: scores ``[B, V]``.
        winner_ptr: positions of the tokens ``[B]``, if MASKED.
        weight_ptr: weight ``[V, D]``.
        cu_ptr: offsets ``[B + 1]``, if PACKED.
        part_ptr: sums ``[splits, B, D]``, fp32; written.
        dhidden_ptr: gradient ``[N, D]``; cleared.
        B: number of sequences.
        V: number of columns.
        N: number of rows of hidden.
        length: length of the padded sequences.
        split_v: columns of a split.
        D: hidden dimension.
        BLOCK_B, BLOCK_V, BLOCK_D: sequences, columns and entries of a tile.
        ACTIVATION: activation of the scores.
        PACKED: whether the batch is packed.
        MASKED: whether a padded batch has a mask.
        LAST: whether the pooling takes the last valid token; otherwise it takes the first.
        NO_WINNER: position of a sequence without valid tokens.
        SCALED: whether gradients are scaled by powers of two into the range of fp16.
        PRECISION: precision of products of fp32.
        CLEAR: entries that are cleared at a time.
    """
    # All instances share the clearing of dhidden.
    programs = tl.num_programs(0) * tl.num_programs(1)
    program = tl.program_id(0) + tl.num_programs(0) * tl.program_id(1) + programs * tl.program_id(2)
    n_entries = tl.cast(N, tl.int64) * D
    for first in range(
        program.to(tl.int64) * CLEAR,
        n_entries,
        programs * tl.num_programs(2) * CLEAR,
    ):
        entry = first + tl.arange(0, CLEAR)
        tl.store(
            dhidden_ptr + entry,
            tl.zeros((CLEAR,), dhidden_ptr.dtype.element_ty),
            mask=entry < n_entries,
        )
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    split = tl.program_id(1)
    b = tl.program_id(2) * BLOCK_B + tl.arange(0, BLOCK_B)
    _, valid = _token_rows(winner_ptr, cu_ptr, b, B, N, length, PACKED, MASKED, LAST, NO_WINNER)
    v_end = tl.minimum((split + 1) * split_v, V)
    acc = tl.zeros((BLOCK_B, BLOCK_D), tl.float32)
    power = tl.full((BLOCK_B,), MIN_POWER, tl.float32)
    for v0 in tl.range(split * split_v, v_end, BLOCK_V):
        v = v0 + tl.arange(0, BLOCK_V)
        inside = valid[:, None] & (v < v_end)[None, :]
        grad = _logit_gradient(
            dscores_ptr,
            scores_ptr,
            b,
            v,
            V,
            stride_db,
            stride_dv,
            inside,
            ACTIVATION,
        )
        w = tl.load(
            weight_ptr + v.to(tl.int64)[:, None] * D + d[None, :],
            mask=(v < v_end)[:, None] & (d < D)[None, :],
            other=0.0,
        )  # [BLOCK_V, BLOCK_D]
        if SCALED:
            previous_power = power
            power = _power_of_two(tl.max(tl.abs(grad), axis=1), previous_power)
            grad *= (_inverse(power) * HEADROOM)[:, None]
            acc *= (previous_power * _inverse(power))[:, None]
        acc = tl.dot(grad.to(w.dtype), w, acc, input_precision=PRECISION)
    if SCALED:
        acc *= (power / HEADROOM)[:, None]
    offs = (split.to(tl.int64) * B + b)[:, None] * D + d[None, :]
    tl.store(part_ptr + offs, acc, mask=(b < B)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["B", "N", "length", "splits", "logit_scale"])
def store_rows_kernel(
    winner_ptr,
    cu_ptr,
    part_ptr,
    dhidden_ptr,
    B,
    N,
    length,
    splits,
    logit_scale,
    D: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr,
    MASKED: tl.constexpr,
    LAST: tl.constexpr,
    NO_WINNER: tl.constexpr,
):
    """Add up the splits of :func:`split_gradient_kernel`, and store the gradients of pooled tokens.

    The other rows of ``dhidden`` are zeros already. Instance ``(i, j)`` handles block i of the
    sequences and block j of D.

    Args:
        winner_ptr: positions of the tokens ``[B]``, if MASKED.
        cu_ptr: offsets ``[B + 1]``, if PACKED.
        part_ptr: sums ``[splits, B, D]``, fp32.
        dhidden_ptr: gradient ``[N, D]``; written.
        B: number of sequences.
        N: number of rows of hidden.
        length: length of the padded sequences.
        splits: number of splits of the vocabulary.
        logit_scale: factor of the products.
        D: hidden dimension.
        BLOCK_B, BLOCK_D: sequences and entries of an instance.
        PACKED: whether the batch is packed.
        MASKED: whether a padded batch has a mask.
        LAST: whether the pooling takes the last valid token; otherwise it takes the first.
        NO_WINNER: position of a sequence without valid tokens.
    """
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row, valid = _token_rows(winner_ptr, cu_ptr, b, B, N, length, PACKED, MASKED, LAST, NO_WINNER)
    mask = valid[:, None] & (d < D)[None, :]
    total = tl.zeros((BLOCK_B, BLOCK_D), tl.float32)
    for split in range(splits):
        offs = (b.to(tl.int64) + split * B)[:, None] * D + d[None, :]
        total += tl.load(part_ptr + offs, mask=mask, other=0.0)
    total *= logit_scale
    tl.store(
        dhidden_ptr + row[:, None] * D + d[None, :],
        total.to(dhidden_ptr.dtype.element_ty),
        mask=mask,
    )
