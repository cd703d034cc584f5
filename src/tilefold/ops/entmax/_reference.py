"""Alpha-entmax in plain PyTorch: the specification the other implementations are held to.

Bisection in fp64 for ``log p_max`` (see ``README.md`` for the maths), then two steps of Newton that
autograd sees: the first makes the first derivative of the root right, the second the second one.
Any device that has fp64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import log_weights
from tilefold.ops.entmax._problem import EntmaxOptions, EntmaxTensors


def entmax(tensors: EntmaxTensors, options: EntmaxOptions) -> Tensor:
    """``[R, n]`` probabilities of the rows of ``x`` in its dtype."""
    x, alpha = tensors
    if x.numel() == 0:
        return x.clone()
    given = x.new_full((1,), options.alpha_value, dtype=torch.float64) if alpha is None else alpha
    s, e = x.double(), given.double()[:, None] - 1
    peak = s.detach().amax(dim=-1, keepdim=True)
    proper = peak.isfinite() & (e >= 0) & (e <= 1)
    empty = peak == -math.inf
    d = torch.where(proper, peak - s, 0.0)
    # a row's own maximum moves with it: without this its gradient would be lost
    d = d - d.amin(dim=-1, keepdim=True)
    e = torch.where(proper, e, 1.0)
    root = _root(d.detach(), e.detach())
    for _ in range(2):
        log_p = log_weights(d, root, e)
        support = log_p > -math.inf
        log_p = torch.where(support, log_p, 0.0)
        p = torch.where(support, torch.exp(log_p), 0.0)
        slope = torch.where(support, torch.exp((1 - e) * log_p), 0.0).sum(dim=-1, keepdim=True)
        mass = p.sum(dim=-1, keepdim=True)
        root = root - torch.log(mass) * mass / (torch.exp(e * root) * slope)
    p = torch.exp(log_weights(d, root, e))
    p = torch.where(proper, p, torch.where(empty, 0.0, math.nan))
    return p.to(x.dtype)


def _root(d: Tensor, e: Tensor) -> Tensor:
    """``log p_max`` by bisection in fp64."""
    low = torch.full_like(d[:, :1], -math.log(d.size(-1)))
    high = torch.zeros_like(low)
    for _ in range(64):
        middle = (low + high) / 2
        above = torch.exp(log_weights(d, middle, e)).sum(dim=-1, keepdim=True) > 1
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (low + high) / 2
