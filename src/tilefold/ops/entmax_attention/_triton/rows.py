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
    of ``t`` down. The step solves this equation. Entries that leave or enter the support lie within
    ``t`` of the new root, so each changes the mass by at most ``t^2``. The sizes of the support at
    both ends of the bracket bound the number of these entries. If the error of the mass by this
    bound is below the tolerance, no evaluation is left to make.

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
        support_low: size of the support at ``low``. For the general forms, see
            :func:`improve_generic`.
        support_high: size of the support at ``high``.
        previous_residual: ``|F - 1|`` of the evaluation before.
        converged: rows that are finished.
        max_rise: how far above ``y`` the last step may end.
        e: alpha - 1.
        NEAR: error of the weights that the last step may leave; 0 to require none.

    Returns:
        The arguments of the same names after the step, with the residual of this evaluation:
        ``y``, ``low``, ``high``, ``support_low``, ``support_high``, ``previous_residual``,
        ``converged`` and ``max_rise``.
    """
    if KIND == "entmax15":
        residual = tl.abs(f - 1)
        low = tl.where(f <= 1, y, low)
        support_low = tl.where(f <= 1, n, support_low)
        high = tl.where(f >= 1, y, high)
        support_high = tl.where(f >= 1, n, support_high)
        discriminant = u * u - n * (f - 1)
        newton = (1 - tl.rsqrt(tl.maximum(f, 1e-30))) * f / tl.maximum(u, 1e-30)
        exact = (f - 1) / tl.maximum(u + tl.sqrt(tl.maximum(discriminant, 0.0)), 1e-30)
        step = y - tl.where(discriminant > 0, exact, newton)
        is_in_bracket = (step >= low - 1e-5) & (step <= high + 1e-5)
        step_is_safe = is_in_bracket & (residual <= 0.5 * previous_residual)
        # An unsafe step is replaced by a bisection.
        new_y = tl.where(step_is_safe, tl.minimum(tl.maximum(step, low), high), 0.5 * (low + high))
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
    """Bound the mass above 1 after a Newton step of ``e step`` in c.

    The derivation is in :func:`improve_generic`.
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

    The mass F is convex in c, with ``F' = U / e`` and ``F'' = (1 - e) Q / e^2``. A step of
    ``t = e tau`` down from c leaves ``F - U tau``, and at most ``(1 - e) Q tau^2 / 2`` more, since
    Q falls with c up to alpha = 1.5. For larger alphas an entry bends by at most ``t^(1/e)``, and
    the support at the upper end, ``support_high``, bounds the number of entries. (Up to 1.5 it is Q
    there.) So a Newton step from ``F = 1 + r`` ends above 1 by at most ``excess_after(r / U)``.

    If the mass of the weights is off by r, then the weights are off by at most 2 r after the mass
    is divided out, in the sum of their differences. It is enough that 2 r is below ``NEAR``, and
    that :func:`last_step` ends within the tolerance. Both are checked for the root so far and for
    the root after the step.

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
    c = tl.exp(e * y)
    step_to_root = residual / tl.maximum(u, 1e-30)
    excess_from_y = excess_after(step_to_root, support_high, e)
    rise_from_y = tl.minimum(1.01 * step_to_root / c, high - y)
    rise_from_y = tl.where(excess_from_y <= residual, rise_from_y, 0.0)
    keeps_y = converged | ((residual <= 0.5 * NEAR) & (excess_from_y <= TOLERANCE))
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
    """Make the last step of the root, from sums at ``y``.

    Args:
        y: the root so far.
        f: the mass F at ``y``.
        u: the sum U at ``y``.
        n: size of the support at ``y``, for alpha = 1.5.
        max_root: the largest root that may be returned.
        mass_excess: proven excess of the mass over 1 after the step, for the general forms.
        e: alpha - 1.

    Returns:
        The root, and its mass. For the general forms the mass is an upper bound.
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
