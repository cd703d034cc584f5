"""Device functions of alpha-entmax: weights, row sums and steps of the root.

The derivation is in ``_shared/entmax_root.py``. ``KIND`` is one of:

- ``"softmax"``, ``"entmax15"`` (alpha = 1.5) and ``"sparsemax"`` (alpha = 2), the closed forms;
- ``"gentle"`` and ``"steep"``, for a number up to 1.5 or above that is not too close to 1;
- ``"generic"`` for fp32 and ``"generic16"`` for 16 bits, which branch on alpha at run time.

The unknown ``y`` of a row is ``c`` for entmax15 and sparsemax, whose distances are multiplied by
``e = alpha - 1``, and ``log p_max`` for the others. Entmax15 and sparsemax need no transcendental
function for an entry. The general kinds need one logarithm and one exponential of the hardware, for
a power of ``x = [c - e d]_+ = p^e``: ``p^a = 2^(a / e log2 x)``. Products with ``x`` give the next
powers.
"""

import torch
import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops._shared.entmax_root import NEAR_SOFTMAX, NEAR_SOFTMAX16
from tilefold.ops._shared.impl import triton_interpreted

# The interpreter calls a reducing function of ours once per entry. Sums and maxima are built in.
INTERPRETED = tl.constexpr(triton_interpreted())
PLAIN = tl.constexpr(triton_interpreted() or torch.version.hip is not None)  # no PTX
MAX_EVALUATIONS = tl.constexpr(100)
TOLERANCE = tl.constexpr(1e-6)  # of a row's mass; what is left is divided out
CAREFUL = tl.constexpr(NEAR_SOFTMAX)
CAREFUL16 = tl.constexpr(NEAR_SOFTMAX16)
SMALLEST = tl.constexpr(2.0**-126)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def saturated(a, b, c):
    """Return ``a b + c``, clamped to [0, 1], in one multiply-add instruction.

    NaN becomes 0.
    """
    if PLAIN:
        x = a * b + c
        return tl.where(x > 0, tl.minimum(x, 1.0), 0.0)  # 0 for NaN, as the instruction has it
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            [a, b, c],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def log2_of(x):
    """Return ``log2(x)`` in one instruction, and ``-inf`` for ``x`` below :data:`SMALLEST`."""
    if PLAIN:
        return tl.where(x >= SMALLEST, tl.log2(tl.maximum(x, SMALLEST)), float("-inf"))
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def power_of_2(x):
    """Return ``2^x`` in one instruction, and 0 for ``x = -inf``."""
    if PLAIN:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def needs_care(e, KIND: tl.constexpr):
    """Return whether alpha is so close to 1 that ``log p`` needs a series.

    There ``log p = log(x) / (alpha - 1)`` would multiply the rounding error of ``log(x)`` too much.

    Args:
        e: scalar ``alpha - 1``.
        KIND: kind of alpha.

    Returns:
        A scalar.
    """
    if (KIND == "gentle") | (KIND == "steep"):
        return False
    elif KIND == "generic16":
        return e < CAREFUL16
    else:
        return e < CAREFUL


@triton.jit
def is_steep(e, KIND: tl.constexpr):
    """Return whether alpha is above 1.5, where ``p^(1 - 2 e)`` would be a negative power.

    Args:
        e: scalar ``alpha - 1``.
        KIND: kind of alpha.
    """
    if KIND == "gentle":
        return False
    elif KIND == "steep":
        return True
    else:
        return e > 0.5


@triton.jit
def root_power(d, c, e):
    """Return ``x = p^e = [c - e d]_+``, which is positive on the support only.

    Args:
        d: distances of scores below the peak of their row.
        c: ``p_max^e``, the power ``x`` of the largest weight.
        e: ``alpha - 1``.
    """
    zero = tl.zeros_like(d)
    return saturated(d, zero - e, zero + c)


@triton.jit
def log2_weight(d, x, y, e, careful):
    """Return ``log2 p`` of distances on the support.

    Off the support the result is any number up to its value on the border.

    Args:
        d: distances of scores below the peak of their row.
        x: :func:`root_power` of the distances.
        y: ``log p_max``, the unknown of each row.
        e: ``alpha - 1``.
        careful: :func:`needs_care` of alpha. Then the series of ``-log(1 - u) / u`` replaces the
            logarithm for small ``u = e d / c``.
    """
    rate = 1 / tl.maximum(e, 1e-30)
    if careful:
        t = d * tl.exp(-e * y)
        u = e * t
        series = 1 + u * (
            1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7 + u / 8)))))
        )
        near = u < 0.125
        logarithm = tl.where(near, (y - tl.where(near, t * series, 0.0)) * LOG2E, log2_of(x) * rate)
    else:
        logarithm = log2_of(x) * rate
    return logarithm


@triton.jit
def weight_power(d, x, y, a, e, careful):
    """Return ``p^a`` on the support, and 0 elsewhere.

    Args:
        d: distances of scores below the peak of their row.
        x: :func:`root_power` of the distances.
        y: ``log p_max``, the unknown of each row.
        a: the exponent, from 0 to 1.
        e: ``alpha - 1``.
        careful: :func:`needs_care` of alpha.
    """
    if careful:
        power = tl.where(
            x > 0,
            tl.maximum(log2_weight(d, x, y, e, careful), -1e30) * a,
            float("-inf"),
        )
    else:
        # 0 times -inf would be NaN
        power = log2_of(x) * tl.maximum(a / tl.maximum(e, 1e-30), 1e-20)
    return power_of_2(power)


@triton.jit
def weight(d, y, c, e, careful, KIND: tl.constexpr):
    """Return the weights ``p`` of distances.

    The arguments are those of :func:`weight_and_slope`.
    """
    p, _u = weight_and_slope(d, y, c, e, careful, KIND)
    return p


@triton.jit
def weight_and_slope(d, y, c, e, careful, KIND: tl.constexpr):
    """Return the weights ``p`` of distances, and their slopes ``u = p^(1-e)``.

    Both are 0 off the support.

    Args:
        d: distances of scores below the peak of their row, multiplied by ``e`` for entmax15 and
            sparsemax.
        y: the unknown of each row: ``p_max^e`` for entmax15 and sparsemax, ``log p_max`` otherwise.
        c: :func:`peak_power` of ``y``.
        e: ``alpha - 1``.
        careful: :func:`needs_care` of alpha.
        KIND: kind of alpha.
    """
    if KIND == "entmax15":
        u = tl.maximum(y - d, 0.0)
        p = u * u
    elif KIND == "sparsemax":
        p = tl.maximum(y - d, 0.0)
        u = tl.where(p > 0, 1.0, 0.0)
    elif KIND == "softmax":
        p = tl.exp(y - d)
        u = p
    else:
        x = root_power(d, c, e)
        u = weight_power(d, x, y, 1 - e, e, careful)
        p = u * x
    return p, u


@triton.jit
def row_terms(d, y, c, e, careful, KIND: tl.constexpr):
    """Return the terms of the row sums F, U and Q for every distance.

    F sums the weights ``p``, U sums ``p^(1-e)`` and Q sums ``p^(1-2e)``. From alpha = 1.5 on, the
    terms of Q are 1 on the support, where the power would be 0 or negative.

    Args:
        d: distances of scores below the peak of their row, multiplied by ``e`` for entmax15 and
            sparsemax.
        y: the unknown of each row: ``p_max^e`` for entmax15 and sparsemax, ``log p_max`` otherwise.
        c: :func:`peak_power` of ``y``.
        e: ``alpha - 1``.
        careful: :func:`needs_care` of alpha.
        KIND: kind of alpha.
    """
    if KIND == "entmax15":
        u = tl.maximum(y - d, 0.0)
        f = u * u
        q = tl.where(u > 0, 1.0, 0.0)
    elif KIND == "sparsemax":
        f = tl.maximum(y - d, 0.0)
        u = tl.where(f > 0, 1.0, 0.0)
        q = u
    elif KIND == "softmax":
        f = tl.exp(y - d)
        u = f
        q = f
    else:
        x = root_power(d, c, e)
        if KIND == "gentle":
            q = weight_power(d, x, y, 1 - 2 * e, e, careful)
            u = q * x
        elif KIND == "steep":
            u = weight_power(d, x, y, 1 - e, e, careful)
            q = tl.where(x > 0, 1.0, 0.0)
        else:
            steep = e > 0.5
            base = weight_power(
                d,
                x,
                y,
                tl.where(steep, 1 - e, tl.maximum(1 - 2 * e, 0.0)),
                e,
                careful,
            )
            u = tl.where(steep, base, base * x)
            q = tl.where(steep, tl.where(x > 0, 1.0, 0.0), base)
        f = u * x
    return f, u, q


@triton.jit
def _add3(f, u, q, other_f, other_u, other_q):
    """Add three sums to three others, as a reduction needs it."""
    return f + other_f, u + other_u, q + other_q


@triton.jit
def _add2(f, u, other_f, other_u):
    """Add two sums to two others, as a reduction needs it."""
    return f + other_f, u + other_u


@triton.jit
def sum_terms(f, u, q, KIND: tl.constexpr):
    """Return the row sums F, U and Q of the terms of :func:`row_terms`.

    They are summed in one reduction, so that not all terms need registers at the same time.

    Args:
        f: terms of F, ``[rows, columns]``.
        u: terms of U, of the same shape.
        q: terms of Q, of the same shape.
        KIND: kind of alpha. Softmax has three equal sums, and sparsemax two.
    """
    if KIND == "softmax":
        f = tl.sum(f, axis=1)
        u = f
        q = f
    elif INTERPRETED:
        f = tl.sum(f, axis=1)
        u = tl.sum(u, axis=1)
        q = tl.sum(q, axis=1)
    elif KIND == "sparsemax":
        f, u = tl.reduce((f, u), 1, _add2)
        q = u
    else:
        f, u, q = tl.reduce((f, u, q), 1, _add3)
    return f, u, q


@triton.jit
def row_sums(d, y, c, e, careful, KIND: tl.constexpr):
    """Return the row sums F, U and Q of a tile of distances, ``[rows, columns]``.

    The arguments are those of :func:`row_terms`.
    """
    f, u, q = row_terms(d, y, c, e, careful, KIND)
    return sum_terms(f, u, q, KIND)


@triton.jit
def row_peak(s):
    """Return the maximum of each row, NaN if the row contains one.

    Args:
        s: scores ``[rows, columns]``.
    """
    if INTERPRETED:
        broken = s != s
        return tl.where(
            tl.sum(broken.to(tl.int32), axis=1) > 0,
            float("nan"),
            tl.max(tl.where(broken, float("-inf"), s), axis=1),
        )
    else:
        return tl.reduce(s, 1, nan_max)


@triton.jit
def bracket(n, e, KIND: tl.constexpr):
    """Return a lower and an upper bound of the root of each row.

    The largest of ``n`` weights that sum to 1 is between ``1 / n`` and 1. The lower bound is 1e-6
    smaller, so that rounding does not put it above the root.

    Args:
        n: number of entries of each row, at least 1.
        e: ``alpha - 1``.
        KIND: kind of alpha. The root is ``p_max^e`` for entmax15 and sparsemax, ``log p_max``
            otherwise.
    """
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        low = tl.exp(-e * tl.log(n)) * (1 - 1e-6)
        high = tl.zeros_like(low) + 1.0
    else:
        low = -tl.log(n) - 1e-6
        high = tl.zeros_like(low)
    return low, high


@triton.jit
def middle(low, high, e, KIND: tl.constexpr):
    """Return a starting point between the bounds of the root, halfway in ``c = p_max^e``.

    More steps would follow from halfway in the logarithm of ``c``.

    Args:
        low: lower bound of the root.
        high: upper bound of the root.
        e: ``alpha - 1``.
        KIND: kind of alpha.
    """
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        return 0.5 * (low + high)
    elif KIND == "softmax":
        return high
    else:
        halfway = tl.log(0.5 * (tl.exp(e * low) + tl.exp(e * high))) / tl.maximum(e, 1e-3)
        return tl.where(e > 1e-3, tl.minimum(tl.maximum(halfway, low), high), 0.5 * (low + high))


@triton.jit
def peak_power(y, e, KIND: tl.constexpr):
    """Return ``c = p_max^e`` for the general kinds, and ``y`` itself for the closed forms.

    Args:
        y: the unknown of each row.
        e: ``alpha - 1``.
        KIND: kind of alpha.
    """
    if (KIND == "softmax") | (KIND == "entmax15") | (KIND == "sparsemax"):
        return y
    else:
        return tl.exp(e * y)


@triton.jit
def next_root(
    y,
    f,
    u,
    q,
    low,
    high,
    previous_residual,
    converged,
    e,
    KIND: tl.constexpr,
    TOLERANCE: tl.constexpr,
):
    """Make a safeguarded step towards the root of each row, after an evaluation at ``y``.

    The step is Halley's on ``F^e = 1``: Newton's step divided by ``1 - damping``. The derivation is
    in ``_shared/entmax_root.py``. A bisection replaces a step that leaves the bracket, and a step
    after one that did not halve the residual.

    Args:
        y: the unknown of each row: ``p_max^e`` for entmax15 and sparsemax, ``log p_max`` otherwise.
        f: row sum F of the weights at ``y``; 1 at the root.
        u: row sum U of ``p^(1-e)`` at ``y``.
        q: row sum Q of ``p^(1-2e)`` at ``y``.
        low: lower bound of the root.
        high: upper bound of the root.
        previous_residual: residual ``|F - 1|`` of the previous evaluation.
        converged: whether the root of each row was reached. ``y`` then does not change.
        e: ``alpha - 1``.
        KIND: kind of alpha.
        TOLERANCE: residual at which the root counts as reached.

    Returns:
        The new ``y``, ``low``, ``high``, the residual, and ``converged``.
    """
    residual = tl.abs(f - 1)
    low = tl.where(f <= 1, y, low)
    high = tl.where(f >= 1, y, high)
    ratio = f / tl.maximum(u, 1e-30)
    if KIND == "entmax15":
        scaled_residual = 1 - tl.rsqrt(tl.maximum(f, 1e-30))
        damping = 0.5 * scaled_residual * (q * ratio / tl.maximum(u, 1e-30) - 1)
        step = y - scaled_residual * ratio / (1 - tl.where(damping < 0.75, damping, 0.0))
    elif KIND == "sparsemax":
        step = y - (f - 1) / tl.maximum(u, 1e-30)
    elif KIND == "softmax":
        step = y - tl.log(f)
    else:
        log_f = tl.log(tl.maximum(f, 1e-30))
        e_log_f = e * log_f
        # (1 - exp(-e_log_f)) / e and log(1 - e_step) / e are computed by series for small numbers,
        # which keep their digits as e falls to 0.
        scaled_residual = tl.where(
            tl.abs(e_log_f) < 0.05,
            log_f * (1 - e_log_f * (0.5 - e_log_f / 6)),
            (1 - tl.exp(-e_log_f)) / tl.where(e > 0, e, 1.0),
        )
        damping = 0.5 * scaled_residual * (1 - e) * (q * ratio / tl.maximum(u, 1e-30) - 1)
        relative_step = (
            scaled_residual
            * ratio
            * tl.exp(-e * y)
            / (1 - tl.where(e <= 0.5, tl.where(damping < 0.75, damping, 0.0), 0.0))
        )
        e_step = e * relative_step
        step = y + tl.where(
            tl.abs(e_step) < 0.05,
            -relative_step * (1 + e_step * (0.5 + e_step * (1 / 3 + e_step * 0.25))),
            tl.log(tl.maximum(1 - e_step, 1e-30)) / tl.where(e > 0, e, 1.0),
        )
    is_in_bracket = (step >= low - 1e-5) & (step <= high + 1e-5)
    step_is_safe = is_in_bracket & (residual <= 0.5 * previous_residual)
    new_y = tl.where(step_is_safe, tl.minimum(tl.maximum(step, low), high), 0.5 * (low + high))
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        has_stopped = tl.abs(new_y - y) <= 1.2e-7 * y
    else:
        has_stopped = tl.abs(new_y - y) <= 1.2e-7 * tl.maximum(tl.abs(y), 1.0)
    converged = converged | (residual <= TOLERANCE) | has_stopped
    return tl.where(converged, y, new_y), low, high, residual, converged


@triton.jit
def alpha_terms(p, u, e):
    """Return the terms A and B of each entry for the gradient with respect to alpha.

    The gradient of a row's weights is ``dp/dalpha = (B sum A - A sum B) / sum u``.

    Args:
        p: weights.
        u: slopes ``p^(1-e)`` of the weights.
        e: ``alpha - 1``.
    """
    log_p = log2_of(tl.maximum(p, SMALLEST)) * LN2  # finite where a weight is 0
    w = -e * log_p
    # (u - b) / e^2 loses its digits for small w, where a series replaces it.
    series = 1 / 2 + w * (1 / 6 + w * (1 / 24 + w * (1 / 120 + w * (1 / 720 + w / 5040))))
    b = p * (1 + w)
    inverse = 1 / tl.maximum(e, 1e-15)
    return tl.where(w < 0.3, p * log_p * log_p * series, (u - b) * (inverse * inverse)), b
