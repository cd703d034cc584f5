"""Means with standard errors, and the paired differences that ``tilefold demo`` reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Comparison", "compare", "mean_and_error", "per_query"]

ERRORS = 2.0  # a difference of fewer standard errors may be chance


@dataclass(frozen=True)
class Comparison:
    """The mean per-query difference of two systems, and the standard error of that mean."""

    system: str
    over: str
    difference: float
    standard_error: float
    queries: int

    @property
    def text(self) -> str:
        """The line that the user reads."""
        line = f"{self.system} over {self.over}: {self.difference:+.3f} ± {self.standard_error:.3f}"
        if abs(self.difference) <= ERRORS * self.standard_error:
            return f"{line} (no more than {ERRORS:.0f} standard errors: it may be chance)"
        if self.standard_error == 0:
            return line
        return f"{line} ({abs(self.difference) / self.standard_error:.1f} standard errors)"

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def per_query(run: Mapping[str, Mapping[str, float]], qrels: dict[str, dict[str, int]], measure: str) -> list[float]:
    """The measure of every judged query, sorted by query id."""
    from tilefold.retrieval.evaluation import evaluate_per_query  # noqa: PLC0415 - heavy

    table = evaluate_per_query(run, qrels, (measure,))
    return [table[query][measure] for query in sorted(table)]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error, from the sample standard deviation; 0 for equal values."""
    count = len(values)
    mean = math.fsum(values) / count
    if min(values) == max(values):  # from which their mean may differ, by a rounding
        return mean, 0.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)


def compare(system: str, over: str, scores: Mapping[str, Sequence[float]]) -> Comparison:
    """Compare two of the `scores`, which hold the same queries in the same order."""
    pairs = zip(scores[system], scores[over], strict=True)
    difference, error = mean_and_error([mine - theirs for mine, theirs in pairs])
    return Comparison(system, over, difference, error, len(scores[system]))
