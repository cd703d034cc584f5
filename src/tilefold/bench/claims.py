"""The claims of a benchmark against what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilefold.bench.runner import BenchRow
from tilefold.bench.spec import BenchSpec, Requirement


@dataclass(frozen=True)
class Verdict:
    """A requirement against what was measured; ``held`` is ``None`` where a side is missing."""

    requirement: Requirement
    left: float | None
    right: float | None

    @property
    def held(self) -> bool | None:
        """Whether ``left <= limit * right``."""
        if self.left is None or self.right is None:
            return None
        return self.left <= self.requirement.limit * self.right

    @property
    def ratio(self) -> float:
        """``left / right``, or NaN."""
        return self.left / self.right if self.left is not None and self.right else math.nan


def verdicts(spec: BenchSpec, rows: Sequence[BenchRow]) -> list[Verdict]:
    """Every requirement of ``spec`` whose case was run."""
    found: list[Verdict] = []
    for requirement in spec.requirements:
        by_impl = {row.impl: row for row in rows if row.case == requirement.case}
        if by_impl:
            sides = [
                getattr(by_impl.get(impl), attribute, None) for impl, attribute in (requirement.left, requirement.right)
            ]
            found.append(Verdict(requirement, *sides))
    return found
