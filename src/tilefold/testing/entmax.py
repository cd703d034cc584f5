"""Random scores for alpha-entmax, for tests and benchmarks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

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
