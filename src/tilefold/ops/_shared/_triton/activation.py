"""Device functions: maxima that keep NaN, activations of logits, their slopes, and gradients."""

import triton
import triton.language as tl


@triton.jit
def nan_max(a, b):
    """Return the larger of two numbers, NaN if one of them is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def log1p(x):
    """Return ``log(1 + x)``, exact for small ``x``."""
    # log(1 + x) loses small x; the quotient restores it (Kahan)
    u = 1.0 + x
    y = tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.where(u == 1.0, x, tl.where(u == float("inf"), u, y))


@triton.jit
def expm1(x):
    """Return ``exp(x) - 1``, with a relative error below 2e-6."""
    # exp(x) - 1 loses the digits of small x, for which a series is exact
    series = x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * (1.0 / 120.0)))))
    return tl.where(tl.abs(x) < 0.125, series, tl.exp(x) - 1.0)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply an activation; NaN stays NaN.

    Args:
        x: logits.
        ACTIVATION: a name of :data:`tilefold.ops._shared.activation.ACTIVATIONS`.
    """
    if ACTIVATION == "softplus":
        return nan_max(x, 0.0) + log1p(tl.exp(-tl.abs(x)))
    elif ACTIVATION == "none":
        return x
    else:
        y = nan_max(x, 0.0)
        if ACTIVATION == "log1p_relu":
            y = log1p(y)
        elif ACTIVATION == "log1p_log1p_relu":
            y = log1p(log1p(y))
        return y


@triton.jit
def slope_from_score(y, ACTIVATION: tl.constexpr):
    """Return the derivative of an activation at the logit that has a given score; NaN stays NaN.

    Args:
        y: scores, the activated logits.
        ACTIVATION: a name of :data:`tilefold.ops._shared.activation.ACTIVATIONS`.
    """
    if ACTIVATION == "softplus":
        return -expm1(-y)
    elif ACTIVATION == "none":
        return tl.where(y == y, 1.0, y)
    else:
        if ACTIVATION == "log1p_relu":
            slope = tl.exp(-y)
        elif ACTIVATION == "log1p_log1p_relu":
            slope = tl.exp(-y - expm1(y))
        else:
            slope = tl.where(y == y, 1.0, y)
        return tl.where(y <= 0.0, 0.0, slope)


@triton.jit
def slope_from_logit(x, ACTIVATION: tl.constexpr):
    """Return the derivative of an activation at a logit; NaN stays NaN.

    Args:
        x: logits.
        ACTIVATION: a name of :data:`tilefold.ops._shared.activation.ACTIVATIONS`.
    """
    if ACTIVATION == "softplus":
        return 1.0 / (1.0 + tl.exp(-x))
    elif ACTIVATION == "none":
        return tl.where(x == x, 1.0, x)
    elif ACTIVATION == "relu":
        return tl.where(x <= 0.0, 0.0, tl.where(x == x, 1.0, x))
    elif ACTIVATION == "log1p_relu":
        return tl.where(x <= 0.0, 0.0, 1.0 / (1.0 + x))
    else:
        u = log1p(nan_max(x, 0.0))
        return tl.where(x <= 0.0, 0.0, 1.0 / ((1.0 + u) * (1.0 + x)))


@triton.jit
def gradient_from_score(grad, y, ACTIVATION: tl.constexpr):
    """Return the gradient of logits from that of their scores.

    It is 0 where the activation is flat, even for an infinite or NaN gradient, as in torch's
    ``relu``.

    Args:
        grad: gradient of the scores.
        y: scores, the activated logits.
        ACTIVATION: a name of :data:`tilefold.ops._shared.activation.ACTIVATIONS`.
    """
    gradient = grad * slope_from_score(y, ACTIVATION)
    if ACTIVATION == "softplus" or ACTIVATION == "none":
        return gradient
    else:
        return tl.where(y <= 0.0, 0.0, gradient)


@triton.jit
def gradient_from_logit(grad, x, ACTIVATION: tl.constexpr):
    """Return the gradient of logits from that of their scores.

    It is 0 where the activation is flat, even for an infinite or NaN gradient, as in torch's
    ``relu``.

    Args:
        grad: gradient of the scores.
        x: logits.
        ACTIVATION: a name of :data:`tilefold.ops._shared.activation.ACTIVATIONS`.
    """
    gradient = grad * slope_from_logit(x, ACTIVATION)
    if ACTIVATION == "softplus" or ACTIVATION == "none":
        return gradient
    else:
        return tl.where(x <= 0.0, 0.0, gradient)
