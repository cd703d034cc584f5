"""Combine the runs of several retrievers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Run = dict[str, dict[str, float]]


def interpolate(
    runs: Sequence[Run],
    weights: Sequence[float] | None = None,
    normalization: Literal["min_max", "z_score", "none"] = "min_max",
    k: int = 1000,
) -> Run:
    raise NotImplementedError


def reciprocal_rank_fusion(runs: Sequence[Run], k: int = 60) -> Run:
    raise NotImplementedError
