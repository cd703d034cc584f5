"""Kernels of alpha-entmax and its gradient over rows.

A program holds a few short rows in registers, or reads one long row again in each step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton import entmax
from tilefold.ops._shared._triton.activation import nan_max


@triton.jit
def _scores(x_ptr, offs, cols, n, mask_r):
    """Load scores ``[BLOCK_R, BLOCK_N]`` in fp32, -inf after the end of a row.

    Args:
        x_ptr: scores ``[R, n]``.
        offs: offset of each row's first score, ``[BLOCK_R]``.
        cols: columns to load, ``[BLOCK_N]``.
        n: number of columns.
        mask_r: which rows exist, ``[BLOCK_R]``.
    """
    return tl.load(
        x_ptr + offs[:, None] + cols[None, :],
        mask=mask_r[:, None] & (cols < n)[None, :],
        other=float("-inf"),
    ).to(tl.float32)


@triton.jit
def _distances(s, peak, e, KIND: tl.constexpr):
    """Return the distances of scores below the peak of their row, inf after the row's end.

    Args:
        s: scores ``[BLOCK_R, BLOCK_N]``.
        peak: the largest score of each row.
        e: ``alpha - 1`` of each row.
        KIND: kind of alpha. The distances of entmax15 and sparsemax are multiplied by ``e``.
    """
    d = peak[:, None] - s
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        d *= e[:, None]
    return d


@triton.jit
def _exponents(alpha_ptr, alpha_value, rows, mask_r, HAS_ALPHA: tl.constexpr):
    """Return ``alpha - 1`` of each row.

    Args:
        alpha_ptr: alpha ``[R]``, read with ``HAS_ALPHA``.
        alpha_value: alpha of all rows without ``HAS_ALPHA``.
        rows: rows ``[BLOCK_R]``.
        mask_r: which rows exist.
        HAS_ALPHA: whether each row has its own alpha.
    """
    if HAS_ALPHA:
        return tl.load(alpha_ptr + rows, mask=mask_r, other=1.5).to(tl.float32) - 1
    else:
        return tl.zeros_like(rows).to(tl.float32) + (alpha_value - 1)


@triton.jit(do_not_specialize=["R", "n", "alpha_value"])
def _forward_kernel(
    x_ptr,
    alpha_ptr,
    out_ptr,
    support_ptr,
    R,
    n,
    alpha_value,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    RESIDENT: tl.constexpr,
    TOLERANCE: tl.constexpr,
):
    """Compute probabilities and support sizes of ``BLOCK_R`` rows.

    An iteration finds the root ``y`` of each row, at which the weights ``p = [c - (alpha - 1)
    d]_+^(1 / (alpha - 1))`` of its distances ``d`` below the peak sum to 1.
    ``_shared/entmax_root.py`` derives it.

    Grid: ``[ceil(R / BLOCK_R)]``.

    Args:
        x_ptr: scores ``[R, n]``.
        alpha_ptr: alpha ``[R]``, or ``None`` without ``HAS_ALPHA``.
        out_ptr: probabilities ``[R, n]``; written. NaN for rows with a NaN, an infinite score or an
            invalid alpha, and 0 for rows of which all scores are -inf.
        support_ptr: number of positive probabilities of each row, ``[R]`` int32; written.
        R: number of rows.
        n: number of columns.
        alpha_value: alpha of all rows without ``HAS_ALPHA``.
        BLOCK_R: rows of a program.
        BLOCK_N: columns of a tile.
        KIND: kind of alpha, see ``_shared/_triton/entmax.py``.
        HAS_ALPHA: whether each row has its own alpha.
        RESIDENT: whether a row fits in one tile, which stays in registers. Otherwise each
            evaluation reads the row again.
        TOLERANCE: error of a row's sum at which its root counts as reached.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = rows < R
    offs = rows.to(tl.int64) * n
    e = _exponents(alpha_ptr, alpha_value, rows, mask_r, HAS_ALPHA)
    columns = tl.arange(0, BLOCK_N)
    # Step 1: the largest score of each row.
    # The loop takes the maximum of tiles entry by entry, and the tile is reduced once, after it.
    # A reduction in the loop would cost more, and Triton 3.6 (OptimizeThreadLocality) fails on one
    # whose result is used twice.
    if RESIDENT:
        s = _scores(x_ptr, offs, columns, n, mask_r)
        peak = entmax.row_peak(s)
    else:
        best = tl.full((BLOCK_R, BLOCK_N), float("-inf"), tl.float32)
        for n0 in range(0, n, BLOCK_N):
            best = nan_max(best, _scores(x_ptr, offs, n0 + columns, n, mask_r))
        peak = entmax.row_peak(best)
    broken = (e < 0) | (e > 1) | (e != e) | (peak != peak)
    broken = broken | (peak == float("inf"))
    empty = (peak == float("-inf")) & ~broken
    is_idle = broken | empty | ~mask_r
    peak = tl.where(is_idle, 0.0, peak)
    e = tl.where(broken, 1.0, e)

    # Step 2: the root of each row.
    low, high = entmax.bracket(tl.zeros_like(peak) + n, e, KIND)
    y = entmax.middle(low, high, e, KIND)
    mass = tl.zeros_like(peak) + 1.0
    previous_residual = tl.zeros_like(peak) + float("inf")
    converged = is_idle
    careful = entmax.needs_care(tl.min(e, axis=0), KIND)  # one formula for all rows of the tile
    if RESIDENT:
        d = _distances(s, peak, e, KIND)
        p = tl.zeros_like(d)
    evaluation = 0
    while evaluation < entmax.MAX_EVALUATIONS:
        c = entmax.peak_power(y, e, KIND)
        if RESIDENT:
            p, u_terms, q_terms = entmax.row_terms(
                d,
                y[:, None],
                c[:, None],
                e[:, None],
                careful,
                KIND,
            )
            f, u, q = entmax.sum_terms(p, u_terms, q_terms, KIND)
        else:
            f_terms = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
            u_terms = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
            q_terms = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
            for n0 in range(0, n, BLOCK_N):
                d = _distances(_scores(x_ptr, offs, n0 + columns, n, mask_r), peak, e, KIND)
                tile_f, tile_u, tile_q = entmax.row_terms(
                    d,
                    y[:, None],
                    c[:, None],
                    e[:, None],
                    careful,
                    KIND,
                )
                f_terms += tile_f
                u_terms += tile_u
                q_terms += tile_q
            f, u, q = entmax.sum_terms(f_terms, u_terms, q_terms, KIND)
        mass = tl.where(converged, mass, f)
        y, low, high, previous_residual, converged = entmax.next_root(
            y,
            f,
            u,
            q,
            low,
            high,
            previous_residual,
            converged,
            e,
            KIND,
            TOLERANCE,
        )
        evaluation = tl.where(
            tl.min(converged.to(tl.int32), axis=0) > 0,
            entmax.MAX_EVALUATIONS,
            evaluation + 1,
        )

    # Step 3: the probabilities, divided by their sum.
    scale = tl.where(empty, 0.0, 1.0 / mass)
    c = entmax.peak_power(y, e, KIND)
    support = tl.zeros((BLOCK_R, BLOCK_N), tl.int32)
    for n0 in range(0, n, BLOCK_N):
        cols = n0 + columns
        if not RESIDENT:
            d = _distances(_scores(x_ptr, offs, cols, n, mask_r), peak, e, KIND)
            p = entmax.weight(d, y[:, None], c[:, None], e[:, None], careful, KIND)
        # A row in registers still has the weights of its last evaluation, which was at the root.
        p *= scale[:, None]
        p = tl.where(empty[:, None], 0.0, p)
        p = tl.where(broken[:, None], float("nan"), p)
        inside = mask_r[:, None] & (cols < n)[None, :]
        support += (inside & (p > 0)).to(tl.int32)
        tl.store(
            out_ptr + offs[:, None] + cols[None, :],
            p.to(out_ptr.dtype.element_ty),
            mask=inside,
        )
    tl.store(support_ptr + rows, tl.sum(support, axis=1), mask=mask_r)


@triton.jit
def _gradient_tile(dp_ptr, p_ptr, offs, cols, n, mask_r, e, KIND: tl.constexpr):
    """Load the gradients and probabilities of a tile, and compute the slopes ``u = p^(2 - alpha)``.

    Args:
        dp_ptr: gradients of the probabilities, ``[R, n]``.
        p_ptr: probabilities ``[R, n]``.
        offs: offset of each row's first entry, ``[BLOCK_R]``.
        cols: columns of the tile, ``[BLOCK_N]``.
        n: number of columns.
        mask_r: which rows exist, ``[BLOCK_R]``.
        e: ``alpha - 1`` of each row.
        KIND: kind of alpha.

    Returns:
        Gradients, probabilities and slopes ``[BLOCK_R, BLOCK_N]`` in fp32. Slopes are 0 off the
        support, and NaN for a probability that is NaN.
    """
    inside = mask_r[:, None] & (cols < n)[None, :]
    grad = tl.load(dp_ptr + offs[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    p = tl.load(p_ptr + offs[:, None] + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    if KIND == "entmax15":
        u = tl.sqrt(p)
    elif KIND == "sparsemax":
        u = tl.where(p == 0, 0.0, 1.0) + (p - p)  # NaN stays NaN
    elif KIND == "softmax":
        u = p
    else:
        u = tl.where(
            p == 0,
            0.0,
            entmax.power_of_2((1 - e[:, None]) * entmax.log2_of(tl.maximum(p, entmax.SMALLEST)))
            + (p - p),
        )
    return grad, p, u


@triton.jit(do_not_specialize=["R", "n", "alpha_value"])
def _backward_kernel(
    dp_ptr,
    p_ptr,
    alpha_ptr,
    dx_ptr,
    dalpha_ptr,
    R,
    n,
    alpha_value,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KIND: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    RESIDENT: tl.constexpr,
    NEED_X: tl.constexpr,
    NEED_ALPHA: tl.constexpr,
):
    """Compute the gradients of the scores and of alpha, for ``BLOCK_R`` rows.

    With the slopes ``u = p^(2 - alpha)`` and ``mean = sum(u dp) / sum(u)`` of a row, ``dx = u (dp -
    mean)``. The gradient of alpha is ``(sum(A) sum(B dp) - sum(B) sum(A dp)) / sum(u)``, with the
    terms A and B of :func:`entmax.alpha_terms`.

    Grid: ``[ceil(R / BLOCK_R)]``.

    Args:
        dp_ptr: gradients of the probabilities, ``[R, n]``.
        p_ptr: probabilities ``[R, n]`` of the forward pass.
        alpha_ptr: alpha ``[R]``, or ``None`` without ``HAS_ALPHA``.
        dx_ptr: gradients of the scores, ``[R, n]``; written with ``NEED_X``.
        dalpha_ptr: gradients of alpha, ``[R]`` fp32; written with ``NEED_ALPHA``.
        R: number of rows.
        n: number of columns.
        alpha_value: alpha of all rows without ``HAS_ALPHA``.
        BLOCK_R: rows of a program.
        BLOCK_N: columns of a tile.
        KIND: kind of alpha, see ``_shared/_triton/entmax.py``.
        HAS_ALPHA: whether each row has its own alpha.
        RESIDENT: whether a row fits in one tile, which stays in registers. Otherwise it is read
            twice.
        NEED_X: whether the gradients of the scores are needed.
        NEED_ALPHA: whether the gradients of alpha are needed.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = rows < R
    offs = rows.to(tl.int64) * n
    e = _exponents(alpha_ptr, alpha_value, rows, mask_r, HAS_ALPHA)
    columns = tl.arange(0, BLOCK_N)
    zeros = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)  # sums of tiles, reduced after the loop
    if RESIDENT:
        grad, p, u = _gradient_tile(dp_ptr, p_ptr, offs, columns, n, mask_r, e, KIND)
        slopes, slope_products = u, u * grad
        if NEED_ALPHA:
            a, b = entmax.alpha_terms(p, u, e[:, None])
            sum_a, sum_b, dot_a, dot_b = a, b, a * grad, b * grad
    else:
        slopes, slope_products, sum_a, sum_b, dot_a, dot_b = (
            zeros,
            zeros,
            zeros,
            zeros,
            zeros,
            zeros,
        )
        for n0 in range(0, n, BLOCK_N):
            grad, p, u = _gradient_tile(dp_ptr, p_ptr, offs, n0 + columns, n, mask_r, e, KIND)
            slopes += u
            slope_products += u * grad
            if NEED_ALPHA:
                a, b = entmax.alpha_terms(p, u, e[:, None])
                sum_a += a
                sum_b += b
                dot_a += a * grad
                dot_b += b * grad
    slope_sum = tl.sum(slopes, axis=1)
    slope_sum = tl.where(slope_sum == 0, 1.0, slope_sum)
    if NEED_ALPHA:
        dalpha = tl.sum(sum_a, axis=1) * tl.sum(dot_b, axis=1)
        dalpha -= tl.sum(sum_b, axis=1) * tl.sum(dot_a, axis=1)
        tl.store(dalpha_ptr + rows, dalpha / slope_sum, mask=mask_r)
    if NEED_X:
        mean = (tl.sum(slope_products, axis=1) / slope_sum)[:, None]
        for n0 in range(0, n, BLOCK_N):
            cols = n0 + columns
            if not RESIDENT:
                grad, p, u = _gradient_tile(dp_ptr, p_ptr, offs, cols, n, mask_r, e, KIND)
            tl.store(
                dx_ptr + offs[:, None] + cols[None, :],
                (u * (grad - mean)).to(dx_ptr.dtype.element_ty),
                mask=mask_r[:, None] & (cols < n)[None, :],
            )
