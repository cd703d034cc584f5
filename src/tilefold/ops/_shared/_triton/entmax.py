"""Alpha-entmax inside kernels: weights, row sums and steps of the root; the maths heads ``_shared/entmax_root.py``.

``KIND`` is ``"softmax"``, ``"entmax15"`` (alpha = 1.5), ``"sparsemax"`` (alpha = 2) or ``"generic"``. The unknown ``y``
of a row is ``c`` for the two in the middle, whose distances are multiplied by ``e = alpha - 1``, and ``log p_max`` for
the others. The middle ones need no transcendental function for an entry.
"""

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import nan_max
from tilefold.ops._shared.impl import triton_interpreted

# the interpreter calls a reducing function of ours once an entry, but knows sums and maxima
INTERPRETED = tl.constexpr(triton_interpreted())
MAX_EVALUATIONS = tl.constexpr(100)
TOLERANCE = tl.constexpr(1e-6)  # of a row's mass; what is left is divided out


@triton.jit
def log_weight(d, y, inverse_c, e):
    """``log p`` of distances ``d`` with ``log p_max = y`` and ``inverse_c = exp(-e y)``; ``-inf`` off the support."""
    t = d * inverse_c
    u = e * t
    # relative accuracy where u is small, which log(1 - u) has not: alpha may be as close to 1 as it likes
    series = 1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6 + u * (1 / 7 + u / 8))))))
    small = u < 0.125
    logarithm = tl.log(tl.maximum(1 - u, 1e-30)) / tl.where(e > 0, e, 1.0)
    log_p = y + tl.where(small, -t * tl.where(small, series, 0.0), logarithm)
    return tl.where(u < 1, log_p, float("-inf"))


@triton.jit
def weight(d, y, inverse_c, e, KIND: tl.constexpr):
    """``p`` of distances ``d`` (times e for the closed forms)."""
    if KIND == "entmax15":
        x = tl.maximum(y - d, 0.0)
        p = x * x
    elif KIND == "sparsemax":
        p = tl.maximum(y - d, 0.0)
    elif KIND == "softmax":
        p = tl.exp(y - d)
    else:
        p = tl.exp(log_weight(d, y, inverse_c, e))
    return p


@triton.jit
def weight_and_slope(d, y, inverse_c, e, KIND: tl.constexpr):
    """``p`` and ``u = p^(1-e)`` on the support."""
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
        log_p = log_weight(d, y, inverse_c, e)
        p = tl.exp(log_p)
        u = tl.where(log_p > float("-inf"), tl.exp((1 - e) * tl.maximum(log_p, -1e30)), 0.0)
    return p, u


@triton.jit
def row_terms(d, y, inverse_c, e, KIND: tl.constexpr):
    """The terms of F, U and Q for every distance."""
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
        log_p = log_weight(d, y, inverse_c, e)
        inside = log_p > float("-inf")
        log_p = tl.maximum(log_p, -1e30)
        f = tl.where(inside, tl.exp(log_p), 0.0)
        u = tl.where(inside, tl.exp((1 - e) * log_p), 0.0)
        q = tl.where(inside, tl.exp(tl.maximum(1 - 2 * e, 0.0) * log_p), 0.0)
    return f, u, q


@triton.jit
def _add3(f, u, q, other_f, other_u, other_q):
    return f + other_f, u + other_u, q + other_q


@triton.jit
def _add2(f, u, other_f, other_u):
    return f + other_f, u + other_u


@triton.jit
def sum_terms(f, u, q, KIND: tl.constexpr):
    """F, U and Q of rows from their terms: in one reduction, so that terms need not exist at the same time."""
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
def row_sums(d, y, inverse_c, e, KIND: tl.constexpr):
    """F, U and Q of the last axis of a tile of distances."""
    f, u, q = row_terms(d, y, inverse_c, e, KIND)
    return sum_terms(f, u, q, KIND)


@triton.jit
def row_peak(s):
    """Maximum of the last axis; NaN where there is one."""
    if INTERPRETED:
        broken = s != s
        return tl.where(
            tl.sum(broken.to(tl.int32), axis=1) > 0, float("nan"), tl.max(tl.where(broken, float("-inf"), s), axis=1)
        )
    else:
        return tl.reduce(s, 1, nan_max)


@triton.jit
def bracket(n, e, KIND: tl.constexpr):
    """Where the root of a row of ``n`` entries (at least 1) lies."""
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        low = tl.exp(-e * tl.log(n)) * (1 - 1e-6)
        high = tl.zeros_like(low) + 1.0
    else:
        low = -tl.log(n) - 1e-6
        high = tl.zeros_like(low)
    return low, high


@triton.jit
def inverse_peak(y, e, KIND: tl.constexpr):
    """``1 / c``, which only the general form needs."""
    if KIND == "generic":
        return tl.exp(-e * y)
    else:
        return y


@triton.jit
def next_root(y, f, u, q, low, high, before, found, e, KIND: tl.constexpr):
    """One safeguarded step: the new ``(y, low, high, residual, found)`` of every row after an evaluation at ``y``."""
    residual = tl.abs(f - 1)
    low = tl.where(f <= 1, y, low)
    high = tl.where(f >= 1, y, high)
    ratio = f / tl.maximum(u, 1e-30)
    if KIND == "entmax15":
        s = 1 - tl.rsqrt(tl.maximum(f, 1e-30))
        damping = 0.5 * s * (q * ratio / tl.maximum(u, 1e-30) - 1)
        step = y - s * ratio / (1 - tl.where(damping < 0.75, damping, 0.0))
    elif KIND == "sparsemax":
        step = y - (f - 1) / tl.maximum(u, 1e-30)
    elif KIND == "softmax":
        step = y - tl.log(f)
    else:
        log_f = tl.log(tl.maximum(f, 1e-30))
        w = e * log_f
        # (1 - exp(-w)) / e and log(1 - v) / e keep their digits as e falls to 0
        s = tl.where(tl.abs(w) < 0.05, log_f * (1 - w * (0.5 - w / 6)), (1 - tl.exp(-w)) / tl.where(e > 0, e, 1.0))
        damping = 0.5 * s * (1 - e) * (q * ratio / tl.maximum(u, 1e-30) - 1)
        r = s * ratio * tl.exp(-e * y) / (1 - tl.where(e <= 0.5, tl.where(damping < 0.75, damping, 0.0), 0.0))
        v = e * r
        step = y + tl.where(
            tl.abs(v) < 0.05,
            -r * (1 + v * (0.5 + v * (1 / 3 + v * 0.25))),
            tl.log(tl.maximum(1 - v, 1e-30)) / tl.where(e > 0, e, 1.0),
        )
    good = (step >= low - 1e-5) & (step <= high + 1e-5) & (residual <= 0.5 * before)
    new = tl.where(good, tl.minimum(tl.maximum(step, low), high), 0.5 * (low + high))
    if (KIND == "entmax15") | (KIND == "sparsemax"):
        still = tl.abs(new - y) <= 1.2e-7 * y
    else:
        still = tl.abs(new - y) <= 1.2e-7 * tl.maximum(tl.abs(y), 1.0)
    found = found | (residual <= TOLERANCE) | still
    return tl.where(found, y, new), low, high, residual, found


@triton.jit
def alpha_terms(p, u, e):
    """The A and B of the derivative by alpha for an entry: ``dp/dalpha = (B sum A - A sum B) / sum u``."""
    y = tl.log(tl.where(p > 0, p, 1.0))
    w = -e * y
    series = 1 / 2 + w * (1 / 6 + w * (1 / 24 + w * (1 / 120 + w * (1 / 720 + w / 5040))))
    direct = (u - p - p * w) / tl.where(e > 0, e * e, 1.0)
    return tl.where(w < 0.3, p * y * y * series, direct), p * (1 + w)
