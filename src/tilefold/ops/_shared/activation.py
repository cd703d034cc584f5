"""Activations of weights and scores, elementwise, and their slopes: all monotone, so they commute with a maximum."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

ACTIVATIONS = ("log1p_relu", "log1p_log1p_relu", "relu", "softplus", "none")


def activate(x: Tensor, activation: str) -> Tensor:
    """Apply the monotone ``activation`` elementwise; NaN stays NaN."""
    if activation == "log1p_relu":
        return x.relu().log1p()
    if activation == "log1p_log1p_relu":
        return x.relu().log1p().log1p()
    if activation == "relu":
        return x.relu()
    if activation == "softplus":
        return softplus(x)
    return x


def slope_from_score(score: Tensor, activation: str) -> Tensor:
    """``act'(x)`` written in terms of ``score = act(x)``, so that backward needs no logits.

    Args:
        score: any shape, fp32 or fp64.
        activation: one of :data:`ACTIVATIONS`.
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
        return torch.ones_like(score)
    # NaN is kept: where() alone would turn a NaN score into a silent zero gradient
    return torch.where(positive, slope, torch.where(score.isnan(), score, torch.zeros_like(slope)))


def slope_from_logit(logit: Tensor, activation: str) -> Tensor:
    """``act'(logit)``, elementwise."""
    if activation == "softplus":
        return torch.sigmoid(logit)
    if activation == "none":
        return torch.ones_like(logit)
    score = activate(logit, activation)
    return slope_from_score(score, activation)
