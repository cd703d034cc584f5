"""An 8-bit screen of max pooling: a bound excludes scores that cannot be positive.

Only the scores that remain are computed exactly. The token states of a sequence have a common scale
``s``, and each row of the weight has a scale ``t``. So ``h = s (q + e)`` with integers ``q`` in
[-127, 127] and a measured error ``|e_i| <= 1/2``, and ``w = t (p + f)`` likewise. For every token,
``h·w <= s t (q·p + |e| |w/t| + |q| |f|)``, and ``q·p`` is exact in int32. README.md has the proof,
with all rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops.lsr_head._triton.sequences import (
    column_terms,
    first_sequence,
    merge,
    sequence_offset,
    store_scores,
)

LEVELS = tl.constexpr(127.0)
# 1.5 * 2^23: a small number that is added to it is rounded to the nearest integer.
NEAREST = tl.constexpr(12582912.0)
ROUNDING = tl.constexpr(2.0**-14)  # of one quotient h / s, which is at most 127
SLACK = tl.constexpr(2.0**-20)  # of a rounded sum of a few terms
# Relative error of a sum of squares, by its terms. They can be added in any order: each rounding
# changes a sum of numbers that are not negative by at most 2^-24 of it.
SUM_SLACK = tl.constexpr(2.0**-23)
PRODUCT_SLACK = tl.constexpr(2.0**-21)  # of a product in fp32, by its terms
SMALLEST, LARGEST = tl.constexpr(2.0**-100), tl.constexpr(2.0**100)
# The state begins with two counters of scores that may be positive: in the sample, and of all.
N_SAMPLED = tl.constexpr(0)
N_MARKED = tl.constexpr(1)
BLOCK_CLEAR = tl.constexpr(32)  # sequences whose marks are cleared at a time
# From this offset on, the state has four numbers for each of the B sequences. Those with number i
# begin at ``STATE + i * B``.
STATE = tl.constexpr(4)
PER_SEQUENCE = tl.constexpr(4)
LARGEST_ENTRY = tl.constexpr(0)  # of the token states
ROW_NORM = tl.constexpr(1)  # the largest norm of the rounded token states
ROW_ERROR = tl.constexpr(2)  # the largest norm of their errors
N_LISTED = tl.constexpr(3)  # columns that are listed
BLOCK_LIST = 1024  # columns of a sequence that an instance lists


@triton.jit
def runs_screened(state_ptr, sample_limit, limit):
    """Return whether the screen is worth it: few scores may be positive, in the sample and in all.

    Args:
        state_ptr: state of the screen.
        sample_limit: largest count in the sample.
        limit: largest count of all scores.
    """
    few_in_sample = tl.load(state_ptr + N_SAMPLED) <= sample_limit
    few_in_all = tl.load(state_ptr + N_MARKED) <= limit
    return few_in_sample & few_in_all


@triton.jit(do_not_specialize=["B", "V", "uniform_length", "logit_scale"])
def sample_kernel(
    weight_ptr,
    rows_ptr,
    bias_ptr,
    offset_ptr,
    state_ptr,
    counts_ptr,
    B,
    V,
    uniform_length,
    logit_scale,
    D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MOST_T: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """Count the scores of a sample that the screen would not exclude.

    The sample has some sequences and columns, and the bound of the screen is estimated. Instance
    ``(i, j)`` samples sequence i and block j of columns, and stops once most of its scores remain.
    Instances also clear the state.

    Args:
        weight_ptr: weight ``[V, D]``.
        rows_ptr: packed token states ``[T, D]``.
        bias_ptr: bias ``[V]``, if HAS_BIAS.
        offset_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        state_ptr: state of the screen; cleared.
        counts_ptr: number of remaining scores of each instance; written.
        B: number of sequences.
        V: number of columns.
        uniform_length: length of all sequences, if UNIFORM.
        logit_scale: factor of the products.
        D: hidden dimension.
        BLOCK_V, BLOCK_T, BLOCK_K: columns, tokens and entries of a tile.
        MOST_T: tokens of a sequence that are sampled at most.
        HAS_BIAS: whether there is a bias.
        UNIFORM: whether all sequences have the same length.
    """
    program = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    n_state = B * PER_SEQUENCE + STATE
    for i0 in range(program * BLOCK_T, n_state, tl.num_programs(0) * tl.num_programs(1) * BLOCK_T):
        i = i0 + tl.arange(0, BLOCK_T)
        tl.store(state_ptr + i, tl.zeros((BLOCK_T,), tl.int32), mask=i < n_state)
    seq = (tl.program_id(0).to(tl.int64) * B // tl.num_programs(0)).to(tl.int32)
    sample = (tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    v = sample * V // (tl.num_programs(1) * BLOCK_V)
    start = sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM)
    end = tl.minimum(
        sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM),
        start + MOST_T,
    )
    weights = weight_ptr + v[:, None] * D
    bias = tl.zeros((BLOCK_V,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + v).to(tl.float32)
    best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
    h_sizes = tl.zeros((BLOCK_K, BLOCK_T), tl.float32)
    h_square = 0.0
    count = 0
    r0 = start
    while (r0 < end) & (2 * count < BLOCK_V):
        row = r0 + tl.arange(0, BLOCK_T)
        rows = rows_ptr + row.to(tl.int64)[None, :] * D
        acc = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
        w_squares = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
        w_sizes = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
        h_squares = tl.zeros((BLOCK_K, BLOCK_T), tl.float32)
        for k in range(0, D, BLOCK_K):
            d = k + tl.arange(0, BLOCK_K)
            w = tl.load(weights + d[None, :], mask=(d < D)[None, :], other=0.0)
            h = tl.load(rows + d[:, None], mask=(d < D)[:, None] & (row < end)[None, :], other=0.0)
            acc = tl.dot(w, h, acc)
            w = w.to(tl.float32)
            h = h.to(tl.float32)
            w_squares += w * w
            w_sizes = tl.maximum(w_sizes, tl.abs(w))
            h_squares += h * h
            h_sizes = tl.maximum(h_sizes, tl.abs(h))
        h_square = tl.maximum(h_square, tl.max(tl.sum(h_squares, axis=0)))
        best = tl.maximum(best, tl.max(tl.where((row < end)[None, :], acc, float("-inf")), axis=1))
        h_size = tl.max(h_sizes)
        w_norms = tl.sqrt(tl.sum(w_squares, axis=1))
        error = h_size * w_norms + tl.max(w_sizes, axis=1) * tl.sqrt(h_square)
        # Errors of rounding are spread evenly over one level. Their squares are 1/12 on average.
        bound = (best + error * (tl.sqrt(D / 12.0) / LEVELS)) * logit_scale + bias
        count = tl.sum((~(bound <= 0.0)).to(tl.int32))
        r0 += BLOCK_T
    tl.store(counts_ptr + program, count)


@triton.jit
def _largest(state_ptr, index, x):
    """Update a maximum of the state by numbers that are not negative, with an atomic operation.

    The bits of such numbers, read as int32, have the order of the numbers. NaN counts as larger
    than all numbers.

    Args:
        state_ptr: state of the screen.
        index: where the maximum is stored.
        x: the numbers.
    """
    tl.atomic_max(
        state_ptr + index,
        tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF),
        sem="relaxed",
    )


@triton.jit(do_not_specialize=["B", "T", "uniform_length", "samples", "sample_limit"])
def largest_kernel(
    rows_ptr,
    offset_ptr,
    state_ptr,
    counts_ptr,
    B,
    T,
    uniform_length,
    samples,
    sample_limit,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    UNIFORM: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
):
    """Add up the counts of the sample, and find each sequence's largest magnitude.

    Instance j handles group j of the rows.

    Args:
        rows_ptr: packed token states ``[T, D]``.
        offset_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        state_ptr: state of the screen; the count of the sample and the largest magnitudes are
            written.
        counts_ptr: number of remaining scores of each instance of :func:`sample_kernel`.
        B: number of sequences.
        T: number of rows, if UNIFORM.
        uniform_length: length of all sequences, if UNIFORM.
        samples: number of counts.
        sample_limit: no magnitudes are needed if more scores of the sample remain.
        D: hidden dimension.
        BLOCK_D: power of two of at least D.
        GROUP: sequences begin at multiples of it.
        UNIFORM: whether all sequences have the same length.
        BLOCK_SAMPLES: power of two of at least ``samples``.
    """
    sample = tl.arange(0, BLOCK_SAMPLES)
    count = tl.sum(tl.load(counts_ptr + sample, mask=sample < samples, other=0))
    if tl.program_id(0) == 0:
        tl.store(state_ptr + N_SAMPLED, count)
    n_rows = T if UNIFORM else tl.load(offset_ptr + B)
    row = tl.program_id(0) * GROUP
    if (row < n_rows) & (count <= sample_limit):
        # The last row decides, since empty sequences may begin at the first one.
        seq = first_sequence(offset_ptr, row + GROUP - 1, B, uniform_length, UNIFORM)
        r = (row + tl.arange(0, GROUP)).to(tl.int64)
        d = tl.arange(0, BLOCK_D)
        x = tl.load(rows_ptr + r[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
        _largest(state_ptr, STATE + LARGEST_ENTRY * B + seq, x.to(tl.float32))


@triton.jit
def _rounded(x, scale, D: tl.constexpr):
    """Round rows to 8-bit integers.

    Args:
        x: rows ``[n, BLOCK_D]``.
        scale: scale of each row.
        D: hidden dimension.

    Returns:
        The integers, and upper bounds of the norm of each row and of the norm of its errors, in
        units of the scale.
    """
    quotient = x * (1.0 / scale)[:, None]
    shifted = quotient + NEAREST
    error = quotient - (shifted - NEAREST)
    rounded = (shifted.to(tl.int32, bitcast=True) & 255).to(tl.int8)
    sum_slack: tl.constexpr = SLACK + D * SUM_SLACK
    norm = tl.sqrt(tl.sum(quotient * quotient, axis=1))
    error = tl.sqrt(tl.sum(error * error, axis=1)) * (1.0 + sum_slack)
    error_bound = error + ROUNDING * tl.sqrt(D * 1.0)
    return rounded, norm * (1.0 + sum_slack) + error_bound, error_bound


@triton.jit
def _round_weight(
    weight_ptr,
    weight_values_ptr,
    terms_ptr,
    marks_ptr,
    v,
    B,
    V,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Round rows of the weight to 8-bit integers, and clear the marks of their scores.

    Args:
        weight_ptr: weight ``[V, D]``.
        weight_values_ptr: int8 weight ``[V, D]``; written.
        terms_ptr: scale, norm and error of each row of the weight, ``[3, V]``; written.
        marks_ptr: marks ``[B, V]``; cleared.
        v: rows of the weight.
        B: number of sequences.
        V: number of rows of the weight.
        D: hidden dimension.
        BLOCK_D: power of two of at least D.
    """
    d = tl.arange(0, BLOCK_D)
    offs = v.to(tl.int64)[:, None] * D + d[None, :]
    inside = (v < V)[:, None] & (d < D)[None, :]
    x = tl.load(weight_ptr + offs, mask=inside, other=0.0).to(tl.float32)
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    scale = bits.to(tl.float32, bitcast=True) / LEVELS
    rounded, norm, error = _rounded(x, scale, D)
    tl.store(weight_values_ptr + offs, rounded, mask=inside)
    tl.store(terms_ptr + v, scale, mask=v < V)
    tl.store(terms_ptr + V + v, norm, mask=v < V)
    tl.store(terms_ptr + 2 * V + v, error, mask=v < V)
    for b0 in range(0, B, BLOCK_CLEAR):
        b = (b0 + tl.arange(0, BLOCK_CLEAR)).to(tl.int64)[:, None]
        tl.store(
            marks_ptr + b * V + v[None, :],
            (b * 0 + v[None, :] * 0).to(tl.int8),
            mask=(b < B) & (v < V)[None, :],
        )


@triton.jit(do_not_specialize=["B", "V", "T", "uniform_length", "sample_limit"])
def round_kernel(
    weight_ptr,
    rows_ptr,
    offset_ptr,
    state_ptr,
    weight_values_ptr,
    values_ptr,
    terms_ptr,
    marks_ptr,
    B,
    V,
    T,
    uniform_length,
    sample_limit,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """Round the weight and the token states to 8-bit integers.

    Instances take groups of rows in turn: first those of the weight, then token states. Nothing is
    done if too many scores of the sample remain.

    Args:
        weight_ptr: weight ``[V, D]``.
        rows_ptr: packed token states ``[T, D]``.
        offset_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        state_ptr: state of the screen. The largest norm and error of each sequence are written.
        weight_values_ptr: int8 weight ``[V, D]``; written.
        values_ptr: int8 token states ``[T, D]``; written.
        terms_ptr: scale, norm and error of each row of the weight, ``[3, V]``; written.
        marks_ptr: marks ``[B, V]`` of scores that may be positive; cleared.
        B: number of sequences.
        V: number of columns.
        T: number of rows, if UNIFORM.
        uniform_length: length of all sequences, if UNIFORM.
        sample_limit: largest count of the sample with which the screen runs.
        D: hidden dimension.
        BLOCK_D: power of two of at least D.
        GROUP: rows of a group. Sequences begin at multiples of it.
        UNIFORM: whether all sequences have the same length.
    """
    n_rows = T if UNIFORM else tl.load(offset_ptr + B)
    n_weight_groups = (V + GROUP - 1) // GROUP
    n_groups = tl.where(
        tl.load(state_ptr + N_SAMPLED) <= sample_limit,
        n_weight_groups + (n_rows + GROUP - 1) // GROUP,
        0,
    )
    for group in range(tl.program_id(0), n_groups, tl.num_programs(0)):
        if group < n_weight_groups:
            v = group * GROUP + tl.arange(0, GROUP)
            _round_weight(weight_ptr, weight_values_ptr, terms_ptr, marks_ptr, v, B, V, D, BLOCK_D)
        else:
            row = (group - n_weight_groups) * GROUP
            # The last row decides, since empty sequences may begin at the first one.
            seq = first_sequence(offset_ptr, row + GROUP - 1, B, uniform_length, UNIFORM)
            scale = (
                tl.load(state_ptr + STATE + LARGEST_ENTRY * B + seq).to(tl.float32, bitcast=True)
                / LEVELS
            )
            r = (row + tl.arange(0, GROUP)).to(tl.int64)
            d = tl.arange(0, BLOCK_D)
            offs = r[:, None] * D + d[None, :]
            inside = (d < D)[None, :]
            x = tl.load(rows_ptr + offs, mask=inside, other=0.0).to(tl.float32)
            rounded, norm, error = _rounded(x, scale + tl.zeros((GROUP,), tl.float32), D)
            tl.store(values_ptr + offs, rounded, mask=inside)
            _largest(state_ptr, STATE + ROW_NORM * B + seq, norm)
            _largest(state_ptr, STATE + ROW_ERROR * B + seq, error)


@triton.jit
def may_be_positive(
    best,
    offs_v,
    mask_v,
    seq,
    state_ptr,
    terms_ptr,
    bias,
    B,
    V,
    logit_scale,
    D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Return whether scores of a sequence may be positive, by an upper bound.

    The bound adds the largest possible error of rounding to the largest integer product. NaN and
    infinity may always be positive.

    Args:
        best: largest integer product of each column over the sequence's tokens.
        offs_v: the columns.
        mask_v: columns that exist.
        seq: the sequence.
        state_ptr: state of the screen, with the scale, norm and error of the sequence.
        terms_ptr: scale, norm and error of each row of the weight, ``[3, V]``.
        bias: bias of the columns.
        B: number of sequences.
        V: number of columns.
        logit_scale: factor of the products.
        D: hidden dimension.
        HAS_BIAS: whether there is a bias.
    """
    s = tl.load(state_ptr + STATE + LARGEST_ENTRY * B + seq).to(tl.float32, bitcast=True) / LEVELS
    norm = tl.load(state_ptr + STATE + ROW_NORM * B + seq).to(tl.float32, bitcast=True)
    error = tl.load(state_ptr + STATE + ROW_ERROR * B + seq).to(tl.float32, bitcast=True)
    scale = s * tl.load(terms_ptr + offs_v, mask=mask_v, other=0.0) * logit_scale
    weight_norm = tl.load(terms_ptr + V + offs_v, mask=mask_v, other=0.0)
    weight_error = tl.load(terms_ptr + 2 * V + offs_v, mask=mask_v, other=0.0)
    product = best.to(tl.float32)
    bound = error * (weight_norm + weight_error) + norm * weight_error
    bound += (norm + error) * (weight_norm + weight_error) * (D * PRODUCT_SLACK)
    bound = product + bound * (1.0 + SLACK) + tl.abs(product) * SLACK
    is_normal = (scale > SMALLEST) & (scale < LARGEST)
    if HAS_BIAS:
        bound = bound * scale
        bound += tl.abs(bound) * SLACK + bias
    return mask_v & ~((bound <= 0.0) & is_normal)


@triton.jit(do_not_specialize=["B", "V", "uniform_length", "sample_limit", "limit"])
def list_kernel(
    marks_ptr,
    state_ptr,
    list_ptr,
    offset_ptr,
    out_ptr,
    winner_ptr,
    B,
    V,
    uniform_length,
    sample_limit,
    limit,
    BLOCK: tl.constexpr,
    UNIFORM: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    NO_WINNER: tl.constexpr,
):
    """List the marked columns of each sequence, whose scores may be positive.

    The other scores are 0, and are written here. The columns of a sequence are listed in any order.
    Instance ``(b, j)`` handles block j of the columns of sequence b.

    Args:
        marks_ptr: marks ``[B, V]``.
        state_ptr: state of the screen, with the number of listed columns of each sequence; added
            to.
        list_ptr: listed columns ``[B, V]``; written.
        offset_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        out_ptr: scores ``[B, V]``; written for columns without a mark.
        winner_ptr: winners ``[B, V]``; written for the same columns, if WITH_WINNERS.
        B: number of sequences.
        V: number of columns.
        uniform_length: length of all sequences, if UNIFORM.
        sample_limit, limit: limits of :func:`runs_screened`.
        BLOCK: columns of an instance.
        UNIFORM: whether all sequences have the same length.
        WITH_WINNERS: whether winners are needed for a backward pass.
        NO_WINNER: winner of a score of 0.
    """
    b = tl.program_id(0).to(tl.int64)
    start = sequence_offset(offset_ptr, b, B, uniform_length, UNIFORM)
    # The packing kernel has written the scores of sequences without tokens.
    has_tokens = start < sequence_offset(offset_ptr, b + 1, B, uniform_length, UNIFORM)
    if has_tokens & runs_screened(state_ptr, sample_limit, limit):
        v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        offs = b * V + v
        marked = tl.load(marks_ptr + offs, mask=v < V, other=0).to(tl.int32)
        unmarked = (v < V) & (marked == 0)
        tl.store(out_ptr + offs, tl.zeros((BLOCK,), out_ptr.dtype.element_ty), mask=unmarked)
        if WITH_WINNERS:
            tl.store(
                winner_ptr + offs,
                tl.full((BLOCK,), NO_WINNER, winner_ptr.dtype.element_ty),
                mask=unmarked,
            )
        total = tl.sum(marked)
        if total > 0:
            # Reserve space in the list of the sequence.
            base = tl.atomic_add(state_ptr + STATE + N_LISTED * B + b, total, sem="relaxed")
            tl.store(list_ptr + b * V + base + tl.cumsum(marked) - 1, v, mask=marked != 0)


@triton.jit(
    do_not_specialize=["B", "V", "T", "uniform_length", "sample_limit", "limit", "logit_scale"],
)
def refine_kernel(
    weight_ptr,
    rows_ptr,
    bias_ptr,
    offset_ptr,
    position_ptr,
    state_ptr,
    list_ptr,
    out_ptr,
    winner_ptr,
    B,
    V,
    T,
    uniform_length,
    sample_limit,
    limit,
    logit_scale,
    D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WITH_WINNERS: tl.constexpr,
    UNIFORM: tl.constexpr,
):
    """Compute the listed scores, which may be positive, from the token states and the weight.

    A tile is BLOCK_V listed columns of one sequence. Instances take the tiles of all sequences in
    turn. For each tile an instance gathers the rows of the weight, multiplies them by all tokens of
    the sequence, and keeps the running maxima.

    Args:
        weight_ptr: weight ``[V, D]``.
        rows_ptr: packed token states ``[T, D]``.
        bias_ptr: bias ``[V]``, if HAS_BIAS.
        offset_ptr: first row of each sequence, ``[B + 1]``, unless UNIFORM.
        position_ptr: position of each row in its sequence, ``[T]``, if HAS_POSITIONS.
        state_ptr: state of the screen, with the number of listed columns of each sequence.
        list_ptr: listed columns ``[B, V]``.
        out_ptr: scores ``[B, V]``; written for listed columns.
        winner_ptr: winners ``[B, V]``; written for listed columns, if WITH_WINNERS.
        B: number of sequences.
        V: number of columns.
        T: number of rows.
        uniform_length: length of all sequences, if UNIFORM.
        sample_limit, limit: limits of :func:`runs_screened`.
        logit_scale: factor of the products.
        D: hidden dimension.
        BLOCK_V, BLOCK_T, BLOCK_K: columns, tokens and entries of a tile.
        BLOCK_B: sequences whose numbers of columns are read at a time.
        ACTIVATION: activation of the scores.
        HAS_BIAS: whether there is a bias.
        HAS_POSITIONS: whether padded sequences had masked tokens, so that packed rows have other
            positions.
        WITH_WINNERS: whether winners are needed for a backward pass.
        HAS_SCALE: whether ``logit_scale`` is not 1.
        UNIFORM: whether all sequences have the same length.
    """
    if runs_screened(state_ptr, sample_limit, limit):
        first_tile = 0
        for first_b in range(0, B, BLOCK_B):
            b = first_b + tl.arange(0, BLOCK_B)
            counts = tl.load(state_ptr + STATE + N_LISTED * B + b, mask=b < B, other=0)
            # Number of the tile after the last one of each sequence, ``[BLOCK_B]``.
            ends = tl.cumsum((counts + BLOCK_V - 1) // BLOCK_V)
            n_tiles = tl.max(ends)
            # This instance's first tile of these sequences: tiles are dealt out over all of them.
            tile = (
                tl.program_id(0) - first_tile % tl.num_programs(0) + tl.num_programs(0)
            ) % tl.num_programs(0)
            while tile < n_tiles:
                seq = first_b + tl.sum((ends <= tile).to(tl.int32))
                tile_in_sequence = tile - tl.max(tl.where(ends <= tile, ends, 0))
                count = tl.load(state_ptr + STATE + N_LISTED * B + seq)
                list_index = tile_in_sequence * BLOCK_V + tl.arange(0, BLOCK_V)
                mask_v = list_index < count
                offs_v = tl.load(list_ptr + seq.to(tl.int64) * V + list_index, mask=mask_v, other=0)
                start = sequence_offset(offset_ptr, seq, B, uniform_length, UNIFORM)
                end = sequence_offset(offset_ptr, seq + 1, B, uniform_length, UNIFORM)
                best = tl.full((BLOCK_V,), float("-inf"), tl.float32)
                winner = tl.zeros((BLOCK_V,), tl.int32) + start
                column = tl.arange(0, BLOCK_T)
                weights = weight_ptr + offs_v.to(tl.int64)[:, None] * D
                for tile_row in range(start, end, BLOCK_T):
                    row = tile_row + column
                    rows = rows_ptr + row.to(tl.int64)[None, :] * D
                    acc = tl.zeros((BLOCK_V, BLOCK_T), tl.float32)
                    for k in range(0, D, BLOCK_K):
                        d = k + tl.arange(0, BLOCK_K)
                        weight_tile = tl.load(
                            weights + d[None, :], mask=(d < D)[None, :], other=0.0
                        )
                        row_tile = tl.load(
                            rows + d[:, None],
                            mask=(d < D)[:, None] & (row < end)[None, :],
                            other=0.0,
                        )
                        acc = tl.dot(weight_tile, row_tile, acc)
                    if HAS_SCALE:
                        acc = acc * logit_scale
                    acc = tl.where((row < end)[None, :], acc, float("-inf"))
                    tile_best = tl.reduce(acc, 1, nan_max)
                    tile_winner = tl.min(
                        tl.where(acc == tile_best[:, None], column[None, :], BLOCK_T),
                        axis=1,
                    )
                    best, winner = merge(
                        best, winner, tile_best, tile_row + tile_winner, WITH_WINNERS
                    )
                scale, bias = column_terms(None, bias_ptr, offs_v, mask_v, HAS_BIAS, False)
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
                    False,
                )
                tile += tl.num_programs(0)
            first_tile += n_tiles
