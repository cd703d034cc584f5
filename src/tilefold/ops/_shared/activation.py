"""Activations of logits, and their gradients.

All are elementwise and monotone, so they commute with a maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

ACTIVATIONS = ("log1p_relu", "log1p_log1p_relu", "relu", "softplus", "none")
# Beyond this softplus(x) and x differ by e^-40 / 40 of x, which is less than the precision of fp64.
# Torch's default is 20.
LINEAR_FROM = 40.0
# Number of log1p that follow the ReLU of an activation.
N_LOG1P = {"relu": 0, "log1p_relu": 1, "log1p_log1p_relu": 2}


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply a monotone activation, one of :data:`ACTIVATIONS`, elementwise. NaN stays NaN."""
    if activation == "log1p_relu":
        return x.relu().log1p()
    if activation == "log1p_log1p_relu":
        return x.relu().log1p().log1p()
    if activation == "relu":
        return x.relu()
    if activation == "softplus":
        return softplus(x, threshold=LINEAR_FROM)
    return x


def activate_in_place(x: Tensor, activation: str) -> Tensor:
    """Apply an activation in place, except softplus, which torch can only compute anew.

    This avoids a second buffer of the size of a tile.
    """
    if activation == "softplus":
        return activate(x, activation)
    if activation == "none":
        return x
    x.relu_()
    for _ in range(N_LOG1P[activation]):
        x.log1p_()
    return x


def differentiable_activate(x: Tensor, activation: str) -> Tensor:
    """Apply an activation whose derivative by autograd is NaN at NaN.

    Torch's derivative of ``relu`` and of the identity is 1 there.
    """
    y = activate(x, activation)
    if activation in ("relu", "none"):
        return y * _one_or_nan(x).detach()
    return y


def gradient_from_score(grad: Tensor, score: Tensor, activation: str) -> Tensor:
    """Return ``grad * act'(x)``, computed from ``score = act(x)``. Backward then needs no logits.

    A NaN score gives NaN. Where the activation is flat the result is 0, even for an infinite or NaN
    ``grad``, as in torch's own gradient of ``relu``.

    Args:
        grad: gradient of the score.
        score: activated logit, in the shape of ``grad``.
        activation: name of the activation.
    """
    if activation == "none":
        return grad * _one_or_nan(score)
    if activation == "softplus":  # y = log(1 + e^x), y' = 1 - e^-y
        return grad * -torch.expm1(-score)
    if activation == "log1p_relu":  # y = log1p(x), y' = 1 / (1 + x)
        gradient = grad * torch.exp(-score)
    elif activation == "log1p_log1p_relu":  # y = log1p(u), u = log1p(x): y' = 1 / ((1 + u) (1 + x))
        gradient = grad * torch.exp(-score - torch.expm1(score))
    else:  # relu
        gradient = grad
    # Without the inner where(), a NaN score would silently get a gradient of zero.
    zero_or_nan = torch.where(score.isnan(), score, torch.zeros_like(score))
    return torch.where(score > 0, gradient, zero_or_nan)


def gradient_from_logit(grad: Tensor, logit: Tensor, activation: str) -> Tensor:
    """Return ``grad * act'(logit)``, the gradient of a logit from that of its activated value."""
    return gradient_from_logit_in_place(grad, logit.clone(), activation)


def gradient_from_logit_in_place(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """Overwrite the logits ``x`` with ``grad * act'(x)``.

    A NaN logit gives NaN. Where the activation is flat the result is 0, even for an infinite or NaN
    ``grad``, as in torch's own gradient of ``relu``.

    Args:
        grad: gradient of the activated logits, which broadcasts to the shape of ``x``.
        x: logits, which are overwritten.
        activation: name of the activation.
    """
    if activation == "none":
        return x.masked_fill_(~x.isnan(), 1).mul_(grad)
    if activation == "softplus":  # y = log(1 + e^x), y' = sigmoid(x)
        return x.sigmoid_().mul_(grad)
    is_flat = x <= 0
    if activation == "relu":
        x.masked_fill_(x > 0, 1)
    elif activation == "log1p_relu":  # y = log1p(x), y' = 1 / (1 + x)
        x.add_(1).reciprocal_()
    else:  # y = log1p(u), u = log1p(x): y' = 1 / ((1 + u) (1 + x))
        one_plus_u = x.log1p().add_(1)
        x.add_(1).mul_(one_plus_u).reciprocal_()
    return x.mul_(grad).masked_fill_(is_flat, 0)


def _one_or_nan(x: Tensor) -> Tensor:
    """Return 1 for each entry of ``x``, and NaN for an entry that is NaN."""
    return torch.where(x.isnan(), x, 1)
