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
    """Load scores ``[BLOCK_R, BLOCK_N]`` in fp32, -inf past the end of a row."""
    return tl.load(
        x_ptr + offs[:, None] + cols[None, :],
        mask=mask_r[:, None] & (cols < n)[None, :],
        other=float("-inf"),
    ).to(tl.float32)


@triton.jit
def _distances(s, peak, e, KIND: tl.constexpr):
    """Return distances from the maximum, times e for closed forms, and inf past a row's end."""
    d = peak[:, None] - s
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        d *= e[:, None]
    return d


@triton.jit
def _exponents(alpha_ptr, alpha_value, rows, mask_r, HAS_ALPHA: tl.constexpr):
    """Load ``e = alpha - 1`` of each row."""
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

    Grid: ``[ceil(R / BLOCK_R)]``. ``x``, ``out``: ``[R, n]``. ``alpha``: ``[R]``, or ``None``
    without ``HAS_ALPHA``. ``support``: ``[R]`` int32.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = rows < R
    offs = rows.to(tl.int64) * n
    e = _exponents(alpha_ptr, alpha_value, rows, mask_r, HAS_ALPHA)
    columns = tl.arange(0, BLOCK_N)
    # Entries are gathered into a tile and reduced after the loop: once per row instead of once per
    # tile, and Triton 3.6 fails on a maximum or sum of a loop's loads that is used twice
    # (OptimizeThreadLocality).
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
    """Load the gradient of the output and the probability of a tile, and compute its slope."""
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

    Grid: ``[ceil(R / BLOCK_R)]``. ``dp``, ``p``, ``dx``: ``[R, n]``. ``alpha``: ``[R]``, or
    ``None`` without ``HAS_ALPHA``. ``dalpha``: ``[R]`` fp32, written if ``NEED_ALPHA``.
    """
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = rows < R
    offs = rows.to(tl.int64) * n
    e = _exponents(alpha_ptr, alpha_value, rows, mask_r, HAS_ALPHA)
    columns = tl.arange(0, BLOCK_N)
    zeros = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)  # sums are gathered in tiles, as in forward
    if RESIDENT:
        grad, p, u = _gradient_tile(dp_ptr, p_ptr, offs, columns, n, mask_r, e, KIND)
        total, product = u, u * grad
        if NEED_ALPHA:
            a, b = entmax.alpha_terms(p, u, e[:, None])
            sum_a, sum_b, dot_a, dot_b = a, b, a * grad, b * grad
    else:
        total, product, sum_a, sum_b, dot_a, dot_b = zeros, zeros, zeros, zeros, zeros, zeros
        for n0 in range(0, n, BLOCK_N):
            grad, p, u = _gradient_tile(dp_ptr, p_ptr, offs, n0 + columns, n, mask_r, e, KIND)
            total += u
            product += u * grad
            if NEED_ALPHA:
                a, b = entmax.alpha_terms(p, u, e[:, None])
                sum_a += a
                sum_b += b
                dot_a += a * grad
                dot_b += b * grad
    mass = tl.sum(total, axis=1)
    mass = tl.where(mass == 0, 1.0, mass)
    if NEED_ALPHA:
        slope = tl.sum(sum_a, axis=1) * tl.sum(dot_b, axis=1)
        slope -= tl.sum(sum_b, axis=1) * tl.sum(dot_a, axis=1)
        tl.store(dalpha_ptr + rows, slope / mass, mask=mask_r)
    if NEED_X:
        mean = (tl.sum(product, axis=1) / mass)[:, None]
        for n0 in range(0, n, BLOCK_N):
            cols = n0 + columns
            if not RESIDENT:
                grad, p, u = _gradient_tile(dp_ptr, p_ptr, offs, cols, n, mask_r, e, KIND)
            tl.store(
                dx_ptr + offs[:, None] + cols[None, :],
                (u * (grad - mean)).to(dx_ptr.dtype.element_ty),
                mask=mask_r[:, None] & (cols < n)[None, :],
            )
