"""Sums and maxima of rows within one thread, and the step of a row's root with its proof."""

import triton
import triton.language as tl

from tilefold.ops._shared._triton import entmax
from tilefold.ops.entmax_attention._triton.tiles import distances, excess, one_if_positive

# In the layout of a product a thread holds pairs of columns, 8 apart: along them nothing is
# exchanged between threads.
LANES = tl.constexpr(8)
# Values of alpha - 1 at which the bound of a general alpha takes one Newton step less or more.
FEWER_STEPS_BELOW = tl.constexpr(0.42)
MORE_STEPS_ABOVE = tl.constexpr(0.6)


@triton.jit
def by_lanes(x, COUNT: tl.constexpr):
    """Reshape ``[rows, columns]`` to ``[rows, columns / COUNT, COUNT]``.

    Args:
        x: the tile.
        COUNT: number of lanes, into which columns are divided in turn.
    """
    return tl.reshape(x, (x.shape[0], x.shape[1] // COUNT, COUNT))


@triton.jit
def lane_sums(x):
    """Add up every ``LANES``-th column, from ``[rows, columns]`` to ``[rows, LANES]``.

    A thread holds such columns itself, so that threads need not exchange numbers.

    Args:
        x: the tile.
    """
    return tl.sum(by_lanes(x, LANES), axis=1)


@triton.jit
def lane_peaks(s, COUNT: tl.constexpr):
    """Return the maxima of every ``COUNT``-th column.

    A maximum is NaN if one of its numbers is.

    Args:
        s: the tile ``[rows, columns]``.
        COUNT: number of maxima of a row.

    Returns:
        ``[rows, COUNT]``.
    """
    if s.shape[1] == COUNT:
        return s
    return entmax.row_peak(by_lanes(s, COUNT))


@triton.jit
def add_terms(s, peak, y, c, scale, e, f, u, n, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Add a tile of scores to the row sums F, U and Q.

    F sums the weights ``p``, U sums ``p^(1-e)`` and Q sums ``p^(1-2e)``. From alpha = 1.5 on, Q is
    the size of the support instead.

    Args:
        s: products ``[rows, columns]`` that :func:`hide` returns.
        peak: the largest score of each row.
        y: the unknown of each row, at which the sums are computed.
        c: :func:`peak_power` of ``y``.
        scale: factor of the products.
        e: ``alpha - 1``.
        f: F of the tiles before, ``[rows, LANES]``.
        u: U of the tiles before.
        n: Q of the tiles before.
        KIND: kind of alpha.
        EXACT: whether the scale is a positive power of two.

    Returns:
        The new ``f``, ``u`` and ``n``.
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
    """Return what the iteration for the roots of rows begins with.

    Args:
        best: the largest score of each row.
        e: ``alpha - 1``, made valid.
        passed_e: ``alpha - 1`` as the caller passed it.
        keys: number of keys of a row.
        KIND: kind of alpha.

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
    """Make a step of Newton from above, with the sums F and U of some entries of each row.

    The result is not smaller than the root of the whole row, because some entries have less mass
    than all.

    Args:
        y: an upper bound of the root of each row.
        f: sum F of the weights of the entries at ``y``.
        u: sum U of their slopes.
        e: ``alpha - 1``.
        KIND: kind of alpha.
        TOLERANCE: residual at which the root counts as reached.
    """
    f = tl.maximum(f, 1.0)  # smaller only by rounding
    zeros = tl.zeros_like(y)
    new_y, _low, _high, _residual, _converged = entmax.next_root(
        y,
        f,
        u,
        u * u / f,
        zeros - float("inf"),
        y,
        zeros + float("inf"),
        zeros > 0,
        e,
        KIND,
        TOLERANCE,
    )
    return tl.minimum(y, new_y)


@triton.jit
def part_sums(s, peak, y, c, scale, e, KIND: tl.constexpr, EXACT: tl.constexpr):
    """Return the sums F and U of rows of scores.

    Args:
        s: products ``[rows, columns]`` that :func:`hide` returns.
        peak: the largest score of each row.
        y: the unknown of each row, at which the sums are computed.
        c: :func:`peak_power` of ``y``.
        scale: factor of the products.
        e: ``alpha - 1``.
        KIND: kind of alpha.
        EXACT: whether the scale is a positive power of two.
    """
    if KIND == "entmax15":
        x = excess(s, peak[:, None], y[:, None], scale, e, EXACT)
        return tl.sum(x * x, axis=1), tl.sum(x, axis=1)
    else:
        d = distances(s, peak[:, None], scale, e, KIND, EXACT)
        f, u, _n = entmax.row_sums(d, y[:, None], c[:, None], e, entmax.needs_care(e, KIND), KIND)
        return f, u


@triton.jit
def bound_steps(e, STEPS: tl.constexpr, KIND: tl.constexpr):
    """Return the number of Newton steps for an upper bound of the roots.

    The general kinds take one step less for a small alpha, and one more for a large one.

    Args:
        e: ``alpha - 1``.
        STEPS: number of steps of the closed forms, and of a general alpha around 1.5.
        KIND: kind of alpha.
    """
    if (KIND == "softmax") | (KIND == "entmax15") | (KIND == "sparsemax"):
        return STEPS
    else:
        return tl.where(
            e < FEWER_STEPS_BELOW, STEPS - 1, tl.where(e > MORE_STEPS_ABOVE, STEPS + 1, STEPS)
        )


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
    """Return an upper bound of the root of each row, from the largest scores of its parts.

    A part of a row should be keys at a constant distance. Their maxima differ less than those of
    runs of neighbours, which resemble each other, so that the bound is sharper.

    Args:
        first: the largest product of each part, ``[rows, parts]``.
        second: the second largest product of each part, read with ``PAIRS``.
        peak: the largest score of each row.
        scale: factor of the products.
        high: an upper bound to begin with.
        e: ``alpha - 1``.
        STEPS: number of Newton steps.
        PAIRS: whether the second largest products are used too.
        KIND: kind of alpha.
        EXACT: whether the scale is a positive power of two.
        TOLERANCE: residual at which a root counts as reached.
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
    """Raise an upper bound by more than its rounding error, so that it remains a bound.

    The error of the general kinds grows as alpha nears 1.

    Args:
        y: the computed bound of each row.
        high: a bound that is not exceeded.
        e: ``alpha - 1``.
        KIND: kind of alpha.
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
    support_low,
    support_high,
    previous_residual,
    converged,
    max_rise,
    e,
    KIND: tl.constexpr,
    TOLERANCE: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Make a safeguarded step of the root of each row, and decide whether it was the last.

    For alpha = 1.5 the mass on a fixed support is a quadratic: ``f - 2 u t + n t^2`` after a step
    of ``t`` down. The step solves this equation. Entries that leave or enter the support are within
    ``t`` of the new root, so each changes the mass by at most ``t^2``. The sizes of the support at
    both ends of the bracket bound the number of these entries. No further evaluation is needed if
    this bound of the error of the mass is below the tolerance.

    With ``NEAR``, for 16-bit input, it is also enough that :func:`last_step` will end within the
    tolerance. The pass over the values makes that step, from sums that it computes anyway. The mass
    has a slope of at least ``2 u``, and ``u`` is no less than the mass, so the last step is at most
    ``mass_error / 2 u``. The weights of the values stay those of ``y``. ``NEAR`` bounds how much
    they would change, relative to their sum.

    :func:`improve_generic` makes the step for other alphas.

    Args:
        y: the root so far, at which the sums were computed.
        f: the mass F at ``y``; 1 at the root.
        u: the sum U at ``y``.
        n: the sum Q at ``y``, which is the size of the support for alpha = 1.5.
        low: lower bound of the root.
        high: upper bound of the root.
        support_low: size of the support at ``low``. For the general kinds, see
            :func:`improve_generic`.
        support_high: size of the support at ``high``.
        previous_residual: ``|F - 1|`` of the evaluation before.
        converged: rows that are finished.
        max_rise: how far above ``y`` the last step may end.
        e: ``alpha - 1``.
        KIND: kind of alpha.
        TOLERANCE: error of the mass at which the root counts as reached.
        NEAR: error of the weights that the last step may leave; 0 to require none.

    Returns:
        The arguments of the same names after the step, with the residual of this evaluation: ``y``,
        ``low``, ``high``, ``support_low``, ``support_high``, ``previous_residual``, ``converged``
        and ``max_rise``.
    """
    if KIND == "entmax15":
        residual = tl.abs(f - 1)
        low = tl.where(f <= 1, y, low)
        support_low = tl.where(f <= 1, n, support_low)
        high = tl.where(f >= 1, y, high)
        support_high = tl.where(f >= 1, n, support_high)
        # The step down t solves f - 2 u t + n t^2 = 1. Newton's step replaces it if there is no
        # solution.
        discriminant = u * u - n * (f - 1)
        newton = (1 - tl.rsqrt(tl.maximum(f, 1e-30))) * f / tl.maximum(u, 1e-30)
        exact = (f - 1) / tl.maximum(u + tl.sqrt(tl.maximum(discriminant, 0.0)), 1e-30)
        step = y - tl.where(discriminant > 0, exact, newton)
        is_in_bracket = (step >= low - 1e-5) & (step <= high + 1e-5)
        step_is_safe = is_in_bracket & (residual <= 0.5 * previous_residual)
        # An unsafe step is replaced by a bisection.
        new_y = tl.where(step_is_safe, tl.minimum(tl.maximum(step, low), high), 0.5 * (low + high))
        # A bound of the error of the mass at the new root.
        drop = y - new_y
        error_of_support = tl.abs(f - 1 - drop * (2 * u - n * drop))
        n_changed = tl.where(drop > 0, n - support_low, support_high - n)
        mass_error = error_of_support + n_changed * (drop * drop)
        keeps_y = converged | (residual <= TOLERANCE)
        is_done = (mass_error <= TOLERANCE) | (tl.abs(drop) <= 1.2e-7 * y)
        if NEAR > 0:
            slope_by_mass = 1 - mass_error
            slope_by_support = u - n * tl.abs(drop) - 0.5 * support_high * mass_error
            slope = tl.maximum(slope_by_mass, slope_by_support)
            longest_step = 0.51 * mass_error / tl.maximum(slope, 0.5)
            is_near = (
                (mass_error < 0.5)
                & (support_high * longest_step * longest_step <= TOLERANCE)
                & (n * longest_step <= NEAR * slope)
            )
            max_rise = tl.where(keeps_y, max_rise, tl.where(is_near, longest_step, 0.0))
            is_done = is_done | is_near
        y = tl.where(keeps_y, y, new_y)
        converged = keeps_y | is_done
        return y, low, high, support_low, support_high, residual, converged, max_rise
    elif (KIND == "softmax") | (KIND == "sparsemax"):
        y, low, high, residual, converged = entmax.next_root(
            y,
            f,
            u,
            n,
            low,
            high,
            previous_residual,
            converged,
            e,
            KIND,
            TOLERANCE,
        )
        return y, low, high, support_low, support_high, residual, converged, max_rise
    else:
        return improve_generic(
            y,
            f,
            u,
            n,
            low,
            high,
            support_low,
            support_high,
            previous_residual,
            converged,
            max_rise,
            e,
            KIND,
            TOLERANCE,
            NEAR,
        )


@triton.jit
def excess_after(step, support_high, e):
    """Return a bound of how much the mass exceeds 1 after a Newton step.

    The derivation is in :func:`improve_generic`.

    Args:
        step: the step in ``c``, divided by ``e``.
        support_high: the sum Q at the upper bound of the root: from alpha = 1.5 on, the size of the
            support.
        e: ``alpha - 1``.
    """
    steep = tl.maximum(support_high, 1.0) * entmax.power_of_2(
        tl.log2(tl.maximum(e * step, 1e-30)) / tl.maximum(e, 0.5),
    )
    return tl.where(e > 0.5, steep, 0.5 * (1 - e) * support_high * step * step)


@triton.jit
def improve_generic(
    y,
    f,
    u,
    n,
    low,
    high,
    support_low,
    support_high,
    previous_residual,
    converged,
    max_rise,
    e,
    KIND: tl.constexpr,
    TOLERANCE: tl.constexpr,
    NEAR: tl.constexpr,
):
    """Make the step of ``entmax.next_root``, and prove whether it was the last.

    The mass F is convex in ``c = p_max^e``, with ``F' = U / e`` and ``F'' = (1 - e) Q / e^2``. A
    step of ``t = e tau`` down from c leaves ``F - U tau``, and at most ``(1 - e) Q tau^2 / 2``
    more, since Q falls with c up to alpha = 1.5. For larger alphas, the second-order term of an
    entry is at most ``t^(1/e)``, and ``support_high``, the support at the upper bound, bounds the
    number of entries. (Up to 1.5 it is Q there.) So a Newton step from ``F = 1 + r`` ends above 1
    by at most ``excess_after(r / U)``.

    If the mass of the weights is off by r, then the weights are off by at most 2 r after the
    division by their mass, in the sum of their differences. It is enough that 2 r is below
    ``NEAR``, and that :func:`last_step` ends within the tolerance. Both are checked for the root so
    far and for the root after the step.

    Arguments and results are those of :func:`improve`, but ``support_low`` holds the proven excess
    of the mass over 1 after the last step.
    """
    support_high = tl.where(f >= 1, n, support_high)
    was_converged = converged
    new_y, low, high, residual, converged = entmax.next_root(
        y,
        f,
        u,
        n,
        low,
        high,
        previous_residual,
        converged,
        e,
        KIND,
        TOLERANCE,
    )
    # Is the root so far close enough for the last step?
    c = tl.exp(e * y)
    step_to_root = residual / tl.maximum(u, 1e-30)
    excess_from_y = excess_after(step_to_root, support_high, e)
    rise_from_y = tl.minimum(1.01 * step_to_root / c, high - y)
    rise_from_y = tl.where(excess_from_y <= residual, rise_from_y, 0.0)
    keeps_y = converged | ((residual <= 0.5 * NEAR) & (excess_from_y <= TOLERANCE))
    # Is the new root close enough for it?
    scaled_drop = e * (y - new_y)
    # (1 - exp(-x)) / x, by its series for small x
    drop_factor = tl.where(
        tl.abs(scaled_drop) < 0.05,
        1 - scaled_drop * (0.5 - scaled_drop / 6),
        (1 - tl.exp(-scaled_drop)) / tl.where(scaled_drop == 0, 1.0, scaled_drop),
    )
    tau = c * (y - new_y) * drop_factor
    # The mass at the new root exceeds 1 by a number between these two.
    least_excess = f - 1 - u * tau
    largest_excess = least_excess + 0.5 * (1 - e) * n * tau * tau
    mass_error = tl.maximum(tl.abs(least_excess), tl.abs(largest_excess))
    slope = tl.maximum(tl.maximum(1 - mass_error, u - (1 - e) * n * tau), 0.5)
    step_from_new = mass_error / slope
    excess_from_new = excess_after(step_from_new, support_high, e)
    is_gentle = tl.zeros_like(tau) + e <= 0.5
    is_small = (mass_error <= TOLERANCE) | (mass_error <= 0.5 * NEAR)
    is_proven = is_gentle & (tau >= 0) & is_small & (excess_from_new <= TOLERANCE)
    # What the last step needs: the excess of the mass, and how far it may rise.
    mass_excess = tl.where(keeps_y, tl.minimum(residual, excess_from_y), excess_from_new)
    support_low = tl.where(was_converged, support_low, mass_excess)
    rise_from_new = tl.minimum(1.01 * step_from_new * tl.exp(scaled_drop) / c, high - new_y)
    rise = tl.where(keeps_y, rise_from_y, rise_from_new)
    max_rise = tl.where(was_converged, max_rise, rise)
    y = tl.where(keeps_y, y, new_y)
    converged = keeps_y | is_proven
    return y, low, high, support_low, support_high, residual, converged, max_rise


@triton.jit
def last_step(y, f, u, n, max_root, mass_excess, e, KIND: tl.constexpr):
    """Make the last step of the root of each row, from the sums of the pass over the values.

    Args:
        y: the root so far.
        f: the mass F at ``y``.
        u: the sum U at ``y``.
        n: size of the support at ``y``, for alpha = 1.5.
        max_root: the largest root that may be returned.
        mass_excess: proven excess of the mass over 1 after the step, for the general kinds.
        e: ``alpha - 1``.
        KIND: kind of alpha.

    Returns:
        The root, and its mass. For the general kinds the mass is an upper bound.
    """
    if KIND == "entmax15":
        newton = 0.5 * (f - 1) / tl.maximum(u, 1e-30)
        new_y = tl.minimum(y - tl.where(tl.abs(f - 1) < 0.5, newton, 0.0), max_root)
        drop = y - new_y
        return new_y, f - drop * (2 * u - n * drop)
    elif (KIND == "softmax") | (KIND == "sparsemax"):
        return y, f
    else:
        is_near = tl.abs(f - 1) < 0.5
        step = (f - 1) / tl.maximum(u, 1e-30) * tl.exp(-e * y)
        new_y = tl.minimum(y - tl.where(is_near, step * (1 + 0.5 * e * step), 0.0), max_root)
        return new_y, tl.where(is_near, 1 + mass_excess, f)
