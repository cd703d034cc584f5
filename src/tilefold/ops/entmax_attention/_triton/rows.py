"""Sums and maxima of rows within one thread, and the step of a row's root with its proof."""

import triton
import triton.language as tl

from tilefold.ops._shared._triton import entmax
from tilefold.ops.entmax_attention._triton.tiles import distances, excess, one_if_positive

# In the layout of a product a thread holds pairs of columns, 8 apart: along them nothing is
# exchanged between threads.
LANES = tl.constexpr(8)


@triton.jit
def by_lanes(x, COUNT: tl.constexpr):
    """Reshape ``[rows, columns]`` to ``[rows, columns / COUNT, COUNT]``."""
    return tl.reshape(x, (x.shape[0], x.shape[1] // COUNT, COUNT))


@triton.jit
def lane_sums(x):
    """Add up every ``LANES``-th column, ``[rows, columns]`` to ``[rows, LANES]``."""
    return tl.sum(by_lanes(x, LANES), axis=1)


@triton.jit
def lane_peaks(s, COUNT: tl.constexpr):
    """Return the maxima of every ``COUNT``-th column, ``[rows, columns]`` to ``[rows, COUNT]``.

    A maximum is NaN if one of its numbers is.
    """
    if s.shape[1] == COUNT:
        return s
    return entmax.row_peak(by_lanes(s, COUNT))


@triton.jit
def add_terms(s, peak, y, c, scale, e, f, u, n, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Add the terms of F, U and Q of a tile of scores to ``[rows, LANES]`` sums.

    The terms of Q count the support for alpha = 1.5 and beyond, where powers of x would be
    negative.
    """
    peak, y, c = peak[:, None], y[:, None], c[:, None]
    if KIND == "entmax15":
        x = excess(s, peak, y, scale, e, EXACT)
        return f + lane_sums(x * x), u + lane_sums(x), n + lane_sums(one_if_positive(x))
    elif KIND == "sparsemax":
        x = excess(s, peak, y, scale, e, EXACT)
        n += lane_sums(one_if_positive(x))
        return f + lane_sums(x), n, n
    elif KIND == "softmax":
        f += lane_sums(tl.exp(y - distances(s, peak, scale, e, KIND, EXACT)))
        return f, f, f
    else:
        d = distances(s, peak, scale, e, KIND, EXACT)
        x = entmax.root_power(d, c, e)
        careful = entmax.needs_care(e, KIND)
        if entmax.is_steep(e, KIND):
            slope = entmax.weight_power(d, x, y, 1 - e, e, careful)
            n += lane_sums(one_if_positive(x))
        else:
            curvature = entmax.weight_power(d, x, y, 1 - 2 * e, e, careful)
            n += lane_sums(curvature)
            slope = curvature * x
        return f + lane_sums(slope * x), u + lane_sums(slope), n


@triton.jit
def start_row(best, e, passed_e, keys, KIND: tl.constexpr):
    """Return the initial state of rows.

    ``best``: maxima of the rows. ``passed_e``: alpha - 1 as the caller passed it. ``keys``: number
    of keys.

    Returns:
        The peak, whether the row is broken (NaN, infinity or an invalid alpha), whether it is
        empty, and the lower and upper bound of its root.
    """
    alphas = tl.zeros_like(best) + passed_e
    broken = (
        (best != best) | (best == float("inf")) | (alphas < 0) | (alphas > 1) | (alphas != alphas)
    )
    empty = (best == float("-inf")) & ~broken
    peak = tl.where(broken | empty, 0.0, best)
    low, high = entmax.bracket(tl.zeros_like(peak) + tl.maximum(keys, 1), e, KIND)
    return peak, broken, empty, low, high


@triton.jit
def subset_step(y, f, u, e, KIND: tl.constexpr, TOLERANCE: tl.constexpr):
    """Make a step of Newton from above, with the sums F and U of a part of the row.

    The result is not smaller than the root of the whole row, because a part has less mass.
    """
    f = tl.maximum(f, 1.0)  # below only by rounding
    none = tl.zeros_like(y)
    new, _low, _high, _residual, _found = entmax.next_root(
        y,
        f,
        u,
        u * u / f,
        none - float("inf"),
        y,
        none + float("inf"),
        none > 0,
        e,
        KIND,
        TOLERANCE,
    )
    return tl.minimum(y, new)


@triton.jit
def part_sums(s, peak, y, c, scale, e, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Return F and U of rows of scores ``[rows, columns]`` at the roots ``y``."""
    if KIND == "entmax15":
        x = excess(s, peak[:, None], y[:, None], scale, e, EXACT)
        return tl.sum(x * x, axis=1), tl.sum(x, axis=1)
    else:
        d = distances(s, peak[:, None], scale, e, KIND, EXACT)
        f, u, _n = entmax.row_sums(d, y[:, None], c[:, None], e, entmax.needs_care(e, KIND), KIND)
        return f, u


@triton.jit
def bound_steps(e, STEPS: tl.constexpr, KIND: tl.constexpr):
    """Return the number of steps for a bound: fewer are enough where alpha is small."""
    if (KIND == "softmax") | (KIND == "entmax15") | (KIND == "sparsemax"):
        return STEPS
    else:
        return tl.where(e < 0.42, STEPS - 1, tl.where(e > 0.6, STEPS + 1, STEPS))


@triton.jit
def parts_bound(
    first,
    second,
    peak,
    scale,
    high,
    e,
    STEPS: tl.constexpr,
    PAIRS: tl.constexpr,
    KIND: tl.constexpr,
    EXACT: tl.constexpr,
    TOLERANCE: tl.constexpr,
):
    """Return an upper bound of the root of rows, from the largest scores of their parts.

    With ``PAIRS``, the second largest are used too. ``first``, ``second``: ``[rows, parts]``. Parts
    with a constant distance between their keys make a sharper bound than runs of neighbours, which
    are alike.
    """
    y = high
    for _step in range(bound_steps(e, STEPS, KIND) if PAIRS else STEPS):
        c = entmax.peak_power(y, e, KIND)
        f, u = part_sums(first, peak, y, c, scale, e, KIND, EXACT)
        if PAIRS:
            second_f, second_u = part_sums(second, peak, y, c, scale, e, KIND, EXACT)
            f += second_f
            u += second_u
        y = subset_step(y, f, u, e, KIND, TOLERANCE)
    return y


@triton.jit
def widen(y, high, e, KIND: tl.constexpr):
    """Raise a bound by more than its rounding error, so that it stays safe.

    The error of the general forms grows as alpha nears 1.
    """
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        return tl.minimum(y * (1 + 1e-5), high)
    else:
        return tl.minimum(y + 1e-5 + 1e-6 / tl.maximum(e, 1 / 64), high)


@triton.jit
def improve(
    y,
    f,
    u,
    n,
    low,
    high,
    few,
    many,
    before,
    converged,
    rest,
    e,
    KIND: tl.constexpr,
    TOLERANCE: tl.constexpr,
    NEAR: tl.constexpr,
):
    """A safeguarded step of every row's root after an evaluation at ``y``, and whether anything is
    left to do.

    For alpha = 1.5 the mass on a known support is a quadratic, ``f - 2 u t + n t^2`` a step of
    ``t`` down: the step solves it. Entries that the step drops, or takes in, lie within ``t`` of
    the new root, so each changes the mass by ``t^2`` at most, and the supports at both ends of the
    bracket, ``few`` and ``many``, bound their number. Where what is ``left`` by that bound is less
    than the tolerance, nothing is left to evaluate.

    With ``NEAR``, of 16-bit input, it is also enough that :func:`last_step`, which the pass over
    the values makes from sums that it takes anyway, will end within the tolerance. The mass has a
    slope of ``2 u`` at least, and ``u`` is no less than the mass, so that step is ``left / 2 u`` at
    most. ``NEAR`` bounds what it changes in the weights of the values, which stay those of ``y``,
    relative to their sum; ``rest`` is as far up as the last step may go.

    Other alphas: :func:`improve_generic`.
    """
    if KIND == "entmax15":
        residual = tl.abs(f - 1)
        low = tl.where(f <= 1, y, low)
        few = tl.where(f <= 1, n, few)
        high = tl.where(f >= 1, y, high)
        many = tl.where(f >= 1, n, many)
        inside = u * u - n * (f - 1)
        newton = (1 - tl.rsqrt(tl.maximum(f, 1e-30))) * f / tl.maximum(u, 1e-30)
        exact = (f - 1) / tl.maximum(u + tl.sqrt(tl.maximum(inside, 0.0)), 1e-30)
        step = y - tl.where(inside > 0, exact, newton)
        good = (step >= low - 1e-5) & (step <= high + 1e-5) & (residual <= 0.5 * before)
        new = tl.where(good, tl.minimum(tl.maximum(step, low), high), 0.5 * (low + high))
        t = y - new
        left = tl.abs(f - 1 - t * (2 * u - n * t)) + tl.where(t > 0, n - few, many - n) * (t * t)
        stay = converged | (residual <= TOLERANCE)
        ends = (left <= TOLERANCE) | (tl.abs(t) <= 1.2e-7 * y)
        if NEAR > 0:
            slope = tl.maximum(1 - left, u - n * tl.abs(t) - 0.5 * many * left)
            longest = 0.51 * left / tl.maximum(slope, 0.5)
            near = (
                (left < 0.5)
                & (many * longest * longest <= TOLERANCE)
                & (n * longest <= NEAR * slope)
            )
            rest = tl.where(stay, rest, tl.where(near, longest, 0.0))
            ends = ends | near
        return tl.where(stay, y, new), low, high, few, many, residual, stay | ends, rest
    elif (KIND == "softmax") | (KIND == "sparsemax"):
        y, low, high, residual, converged = entmax.next_root(
            y,
            f,
            u,
            n,
            low,
            high,
            before,
            converged,
            e,
            KIND,
            TOLERANCE,
        )
        return y, low, high, few, many, residual, converged, rest
    else:
        return improve_generic(
            y,
            f,
            u,
            n,
            low,
            high,
            few,
            many,
            before,
            converged,
            rest,
            e,
            KIND,
            TOLERANCE,
            NEAR,
        )


@triton.jit
def left_after(step, many, e):
    """Bound the mass above 1 after a Newton step of ``e step`` in c.

    The derivation is in :func:`improve_generic`.
    """
    steep = tl.maximum(many, 1.0) * entmax.power_of_2(
        tl.log2(tl.maximum(e * step, 1e-30)) / tl.maximum(e, 0.5),
    )
    return tl.where(e > 0.5, steep, 0.5 * (1 - e) * many * step * step)


@triton.jit
def improve_generic(
    y,
    f,
    u,
    n,
    low,
    high,
    few,
    many,
    before,
    converged,
    rest,
    e,
    KIND: tl.constexpr,
    TOLERANCE: tl.constexpr,
    NEAR: tl.constexpr,
):
    """The step of :func:`next_root`, and what proves that no evaluation is left to make.

    The mass F is convex in c, with ``F' = U / e`` and ``F'' = (1 - e) Q / e^2``; a step of ``t = e
    tau`` down from c leaves ``F - U tau`` and at most ``(1 - e) Q tau^2 / 2`` more, as Q falls with
    c (to alpha = 1.5). Beyond, an entry bends by ``t^(1/e)`` at most, and there are no more of them
    than the support has at the upper end, ``many``, which up to 1.5 is Q there. So a Newton step
    from where ``F = 1 + r`` ends above 1 by no more than ``left_after(r / U)``.

    Weights whose mass is off by r are off by 2 r at most when it is divided out, in the sum of
    their differences. It is enough that this is below ``NEAR`` and that :func:`last_step` ends
    within the tolerance, for the root at hand or for the one that the step leads to. ``few`` is
    that end, ``rest`` how far up the last step may go.
    """
    many = tl.where(f >= 1, n, many)
    done = converged
    new, low, high, residual, converged = entmax.next_root(
        y,
        f,
        u,
        n,
        low,
        high,
        before,
        converged,
        e,
        KIND,
        TOLERANCE,
    )
    c = tl.exp(e * y)
    step_to_root = residual / tl.maximum(u, 1e-30)
    end = left_after(step_to_root, many, e)
    upwards = tl.where(end <= residual, tl.minimum(1.01 * step_to_root / c, high - y), 0.0)
    stay = converged | ((residual <= 0.5 * NEAR) & (end <= TOLERANCE))
    v = e * (y - new)
    tau = (
        c
        * (y - new)
        * tl.where(
            tl.abs(v) < 0.05,
            1 - v * (0.5 - v / 6),
            (1 - tl.exp(-v)) / tl.where(v == 0, 1.0, v),
        )
    )
    missed = f - 1 - u * tau
    left = tl.maximum(tl.abs(missed), tl.abs(missed + 0.5 * (1 - e) * n * tau * tau))
    slope = tl.maximum(tl.maximum(1 - left, u - (1 - e) * n * tau), 0.5)
    step_from_new = left / slope
    after = left_after(step_from_new, many, e)
    gentle = tl.zeros_like(tau) + e <= 0.5
    proved = (
        gentle & (tau >= 0) & ((left <= TOLERANCE) | (left <= 0.5 * NEAR)) & (after <= TOLERANCE)
    )
    few = tl.where(done, few, tl.where(stay, tl.minimum(residual, end), after))
    rest = tl.where(
        done,
        rest,
        tl.where(stay, upwards, tl.minimum(1.01 * step_from_new * tl.exp(v) / c, high - new)),
    )
    return tl.where(stay, y, new), low, high, few, many, residual, stay | proved, rest


@triton.jit
def last_step(y, f, u, n, reach, end, e, KIND: tl.constexpr):
    """Return the root by F and U at ``y``, and its mass; see `improve`.

    ``reach``: the largest root that it may return. For alpha = 1.5 the mass is that of the support
    ``n``, for other alphas at most the proved ``end`` above 1.
    """
    if KIND == "entmax15":
        newton = 0.5 * (f - 1) / tl.maximum(u, 1e-30)
        new = tl.minimum(y - tl.where(tl.abs(f - 1) < 0.5, newton, 0.0), reach)
        t = y - new
        return new, f - t * (2 * u - n * t)
    elif (KIND == "softmax") | (KIND == "sparsemax"):
        return y, f
    else:
        near = tl.abs(f - 1) < 0.5
        step = (f - 1) / tl.maximum(u, 1e-30) * tl.exp(-e * y)
        new = tl.minimum(y - tl.where(near, step * (1 + 0.5 * e * step), 0.0), reach)
        return new, tl.where(near, 1 + end, f)
