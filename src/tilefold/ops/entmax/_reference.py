"""Alpha-entmax in plain PyTorch: the specification that the other implementations are held to.

``log p_max`` is found by bisection in fp64 (``README.md`` has the mathematics). Two Newton steps
follow, which autograd differentiates: the first makes the first derivative of the root exact, the
second the second derivative. It runs on any device that has fp64.
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

    The unknown of a row is ``log p_max``, the logarithm of its largest probability. Bisection finds
    it without gradients. Newton's steps on ``log(mass) = 0`` then add its derivatives.

    Returns:
        ``[R, n]`` probabilities in the dtype of ``x``.
    """
    x, alpha = tensors
    if x.numel() == 0:
        return x.clone()
    if alpha is None:
        alpha = x.new_full((1,), options.alpha_value, dtype=torch.float64)
    scores = x.double()
    e = alpha.double()[:, None] - 1
    peak = scores.detach().amax(dim=-1, keepdim=True)
    is_proper = peak.isfinite() & (e >= 0) & (e <= 1)
    is_empty = peak == -math.inf
    d = torch.where(is_proper, peak - scores, 0.0)
    # The peak is detached. Subtracting the smallest distance, which is 0, restores the gradient of
    # the row's maximum.
    d = d - d.amin(dim=-1, keepdim=True)
    e = torch.where(is_proper, e, 1.0)
    root = _root(d.detach(), e.detach())
    for _ in range(NEWTON_STEPS):
        log_p = log_weights(d, root, e)
        in_support = log_p > -math.inf
        log_p = torch.where(in_support, log_p, 0.0)
        p = torch.where(in_support, torch.exp(log_p), 0.0)
        mass = p.sum(dim=-1, keepdim=True)
        # The derivative of the mass by the root is p_max^e times the sum of p^(1-e).
        slopes = torch.where(in_support, torch.exp((1 - e) * log_p), 0.0)
        dmass = torch.exp(e * root) * slopes.sum(dim=-1, keepdim=True)
        root = root - torch.log(mass) * mass / dmass
    p = torch.exp(log_weights(d, root, e))
    improper_p = torch.where(is_empty, 0.0, math.nan)
    return torch.where(is_proper, p, improper_p).to(x.dtype)


def _root(d: Tensor, e: Tensor) -> Tensor:
    """Find the logarithm of every row's largest probability by bisection in fp64.

    It is between ``-log n``, for equal scores, and 0, for one positive probability.

    Args:
        d: ``[R, n]`` distances from the row's maximum.
        e: ``[R, 1]`` or ``[1, 1]``, alpha minus 1.

    Returns:
        ``[R, 1]`` ``log p_max``.
    """
    low = torch.full_like(d[:, :1], -math.log(d.size(-1)))
    high = torch.zeros_like(low)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        mass = torch.exp(log_weights(d, middle, e)).sum(dim=-1, keepdim=True)
        is_too_large = mass > 1
        low = torch.where(is_too_large, low, middle)
        high = torch.where(is_too_large, middle, high)
    return (low + high) / 2
