"""Alpha-entmax in plain PyTorch: the specification that the other implementations are held to.

The largest probability of a row determines all others (``README.md`` has the mathematics).
Bisection in fp64 finds its logarithm. Two Newton steps follow, which autograd differentiates: the
first makes the first derivative exact, and the second makes the second derivative exact. This runs
on any device that has fp64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import log_weights
from tilefold.ops.entmax._problem import EntmaxOptions, EntmaxTensors

BISECTIONS = 64  # halve the bracket to the resolution of fp64
NEWTON_STEPS = 2


def entmax(tensors: EntmaxTensors, options: EntmaxOptions) -> Tensor:
    """Compute the alpha-entmax of every row of ``x`` in fp64, differentiably.

    With the distance ``d_i >= 0`` of each score from the largest one, entmax is::

        p_i = [p_max^(alpha - 1) - (alpha - 1) d_i]_+^(1 / (alpha - 1)),    sum_i p_i = 1

    The unknown is ``log p_max``. Bisection finds it without gradients. Newton steps add its
    derivatives.

    Args:
        tensors: tensors of the call.
        options: checked options.

    Returns:
        ``[R, n]`` probabilities in the dtype of ``x``.
    """
    x, alpha = tensors
    if x.numel() == 0:
        return x.clone()
    if alpha is None:
        alpha = x.new_full((1,), options.alpha_value, dtype=torch.float64)
    scores = x.double()
    alpha_minus_1 = alpha.double()[:, None] - 1
    peak = scores.detach().amax(dim=-1, keepdim=True)
    is_proper = peak.isfinite() & (alpha_minus_1 >= 0) & (alpha_minus_1 <= 1)
    is_empty = peak == -math.inf
    distances = torch.where(is_proper, peak - scores, 0.0)
    # The smallest distance is 0, so that this changes no value. It restores the gradient of the
    # largest score, since the peak is detached.
    distances = distances - distances.amin(dim=-1, keepdim=True)
    alpha_minus_1 = torch.where(is_proper, alpha_minus_1, 1.0)
    log_p_max = _find_log_p_max(distances.detach(), alpha_minus_1.detach())
    for _ in range(NEWTON_STEPS):
        log_p_max = _newton_step(distances, log_p_max, alpha_minus_1)
    p = torch.exp(log_weights(distances, log_p_max, alpha_minus_1))
    improper_p = torch.where(is_empty, 0.0, math.nan)
    return torch.where(is_proper, p, improper_p).to(x.dtype)


def _newton_step(distances: Tensor, log_p_max: Tensor, alpha_minus_1: Tensor) -> Tensor:
    """Improve ``log p_max`` by a Newton step for ``log(sum_i p_i) = 0``.

    Args:
        distances: ``[R, n]`` distances of the scores from the row's maximum.
        log_p_max: ``[R, 1]`` logarithms of the largest probabilities.
        alpha_minus_1: ``[R, 1]`` or ``[1, 1]``.
    """
    log_p = log_weights(distances, log_p_max, alpha_minus_1)
    in_support = log_p > -math.inf
    log_p = torch.where(in_support, log_p, 0.0)
    p = torch.where(in_support, torch.exp(log_p), 0.0)
    mass = p.sum(dim=-1, keepdim=True)
    # The derivative of p_i by log p_max is p_max^(alpha - 1) p_i^(2 - alpha).
    slopes = torch.where(in_support, torch.exp((1 - alpha_minus_1) * log_p), 0.0)
    dmass = torch.exp(alpha_minus_1 * log_p_max) * slopes.sum(dim=-1, keepdim=True)
    return log_p_max - torch.log(mass) * mass / dmass


def _find_log_p_max(distances: Tensor, alpha_minus_1: Tensor) -> Tensor:
    """Find the logarithm of every row's largest probability by bisection in fp64.

    It solves ``sum_i exp(log_weights(distances, log_p_max, alpha_minus_1)_i) = 1``. The solution is
    between ``-log n``, if all scores are equal, and 0, if one probability is 1.

    Args:
        distances: ``[R, n]`` distances of the scores from the row's maximum.
        alpha_minus_1: ``[R, 1]`` or ``[1, 1]``.

    Returns:
        ``[R, 1]``.
    """
    low = torch.full_like(distances[:, :1], -math.log(distances.size(-1)))
    high = torch.zeros_like(low)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        mass = torch.exp(log_weights(distances, middle, alpha_minus_1)).sum(dim=-1, keepdim=True)
        is_too_large = mass > 1
        low = torch.where(is_too_large, low, middle)
        high = torch.where(is_too_large, middle, high)
    return (low + high) / 2
