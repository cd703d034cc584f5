"""Activations of logits, and their slopes.

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


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply the monotone ``activation`` elementwise. NaN stays NaN."""
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
    """Like :func:`activate`, in the memory of ``x`` where torch can.

    A tile then needs no memory for a second one.
    """
    if activation == "softplus":
        return activate(x, activation)
    if activation != "none":
        x.relu_()
    for _ in range(activation.count("log1p")):
        x.log1p_()
    return x


def differentiable_activate(x: Tensor, activation: str) -> Tensor:
    """Like :func:`activate`, with a slope for autograd that is NaN at NaN.

    Torch's own slope of ``relu``, and of no activation, is 1 there.
    """
    y = activate(x, activation)
    if activation in ("relu", "none"):
        return y * _one_or_nan(x).detach()
    return y


def slope_from_score(score: Tensor, activation: str) -> Tensor:
    """``act'(x)`` in terms of ``score = act(x)``, so that backward needs no logits.

    NaN stays NaN.
    """
    positive = score > 0
    if activation == "log1p_relu":  # y = log1p(x), y' = 1 / (1 + x)
        slope = torch.exp(-score)
    elif activation == "log1p_log1p_relu":  # y = log1p(u), u = log1p(x): y' = 1 / ((1 + u) (1 + x))
        slope = torch.exp(-score - torch.expm1(score))
    elif activation == "relu":
        slope = torch.ones_like(score)
    elif activation == "softplus":  # y = log(1 + e^x), y' = 1 - e^-y
        return -torch.expm1(-score)
    else:
        return _one_or_nan(score)
    # where() alone would silently turn a NaN score into a gradient of zero
    return torch.where(positive, slope, torch.where(score.isnan(), score, torch.zeros_like(slope)))


def slope_from_logit(logit: Tensor, activation: str) -> Tensor:
    """``act'(logit)``, elementwise. NaN stays NaN."""
    return slope_in_place(logit.clone(), activation)


def slope_in_place(x: Tensor, activation: str) -> Tensor:
    """``act'(x)`` in the memory of ``x``. NaN stays NaN."""
    if activation == "softplus":
        return x.sigmoid_()
    if activation == "none":
        return x.masked_fill_(~x.isnan(), 1)
    flat = x <= 0
    if activation == "relu":
        x.masked_fill_(x > 0, 1)
    else:
        inner = x.log1p().add_(1) if activation == "log1p_log1p_relu" else None
        x.add_(1)
        if inner is not None:  # y = log1p(u), u = log1p(x): y' = 1 / ((1 + u) (1 + x))
            x.mul_(inner)
        x.reciprocal_()
    return x.masked_fill_(flat, 0)


def _one_or_nan(x: Tensor) -> Tensor:
    """1, but NaN where ``x`` is."""
    return torch.where(x.isnan(), x, 1)
