"""Random scores, an independent exact solution, and results of alpha-entmax, for tests and benchmarks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops.entmax import entmax

SCORES = ("normal", "peaked", "flat", "correlated", "ties", "shifted", "geometric", "masked", "huge")


def entmax_scores(rows: int, n: int, kind: str = "normal", *, seed: int = 0) -> Tensor:
    """``[rows, n]`` fp32 scores that are easy or hard for a root search.

    Args:
        rows, n: the shape.
        kind: ``"normal"``; ``"peaked"`` and ``"flat"``, 8 and 0.05 times that; ``"correlated"`` along the row, as keys
            of a sequence are; ``"ties"`` in whole numbers; ``"shifted"`` by -3e4; ``"geometric"``, entries whose
            distances to the maximum double, the worst case of active-set methods; ``"masked"``, half of them ``-inf``;
            ``"huge"``, up to 1e30.
        seed: of the random numbers.

    Raises:
        ValueError: for an unknown kind.
    """
    if kind not in SCORES:
        raise ValueError(f"kind must be one of {SCORES}, got {kind!r}.")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, n, generator=generator)
    if kind == "geometric":
        return -torch.logspace(-20, 4, n, base=2.0).expand(rows, n).clone()
    if kind == "correlated":
        phase = 6.28 * torch.rand(rows, 8, 1, generator=generator)
        speed = torch.rand(rows, 8, 1, generator=generator) * 0.05
        return 2 * torch.cos(phase + speed * torch.arange(n)).sum(dim=1)
    if kind == "masked":
        hidden = torch.rand(rows, n, generator=generator) < 0.5
        hidden[:, 0] = False
        return x.masked_fill(hidden, -math.inf)
    factor = {"peaked": 8.0, "flat": 0.05, "huge": 1e30}.get(kind, 1.0)
    x = factor * x
    return x.round() if kind == "ties" else x - 3e4 if kind == "shifted" else x


def entmax_by_sorting(x: Tensor, alpha: float) -> Tensor:
    """Entmax of the last dimension in fp64, by the sorted closed forms of alpha = 1.5 and 2.

    Raises:
        ValueError: for another alpha.
    """
    if alpha not in (1.5, 2.0):
        raise ValueError(f"alpha must be 1.5 or 2, got {alpha}.")
    z = (x.double() - x.double().amax(dim=-1, keepdim=True)) * (alpha - 1)
    ordered = z.sort(dim=-1, descending=True).values.clamp_min(-2)  # nothing below -1 is in the support
    rank = torch.arange(1, x.size(-1) + 1, device=x.device).double()
    mean = ordered.cumsum(dim=-1) / rank
    if alpha == 2:
        tau = mean - 1 / rank
    else:
        spread = (ordered * ordered).cumsum(dim=-1) - rank * mean * mean
        tau = mean - ((1 - spread).clamp_min(0) / rank).sqrt()
    size = (tau < ordered).sum(dim=-1, keepdim=True)
    threshold = tau.gather(-1, size - 1)
    return (z - threshold).clamp_min(0) ** (1 / (alpha - 1))


def entmax_results(x: Tensor, alpha: float | Tensor, dp: Tensor, *, impl: str = "auto") -> dict[str, Tensor]:
    """Probabilities ``p`` and gradients ``dx`` and, for a tensor, ``dalpha``."""
    x = x.detach().requires_grad_()
    leaves = [x]
    if isinstance(alpha, Tensor):
        alpha = alpha.detach().requires_grad_()
        leaves.append(alpha)
    p = entmax(x, alpha, impl=impl)
    if not isinstance(p, Tensor):
        raise TypeError("entmax returned a pair without being asked for one.")
    gradients = torch.autograd.grad(p, leaves, dp.to(p.dtype))
    return {"p": p.detach()} | dict(zip(("dx", "dalpha"), gradients, strict=False))
