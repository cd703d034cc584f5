"""Claims of published systems and of the README, each with both sides, their ratio, and whether it
holds.

A claim names two rows of a file of results, a column, and how many times better ours must be. Its
rows are measured anew in one run where an operator's benchmark makes them (:func:`measured_by`),
else they are the committed ones, with the command that repeats them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilefold.bench.results import read_csv

H200 = "nvidia-h200"
TIME, TRAIN, MEMORY = "forward_p50_ms", "forward_backward_p50_ms", "forward_backward_peak_mib"
FORWARD_MEMORY = "forward_peak_mib"
BATCH, RATE = "largest_batch", "pairs_per_second"  # of which more is better
COLUMNS = {
    TIME: ("forward", "ms"),
    TRAIN: ("forward + backward", "ms"),
    MEMORY: ("memory, forward + backward", "MiB"),
    FORWARD_MEMORY: ("memory, forward", "MiB"),
    BATCH: ("largest batch", "pairs"),
    RATE: ("training", "pairs/s"),
    "p50_ms": ("query", "ms"),
}
Row = Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Claim:
    """One claim: in `column`, our row is at least `times` better than the other's, lower being
    better or higher.
    """

    system: str
    claim: str
    device: str  # folder of its results
    file: str  # without .csv
    where: Mapping[str, str]  # cells that both rows share
    other: str
    column: str
    times: float
    ours: str = "tilefold"
    side: str = "impl"  # column that names the side
    shown: Sequence[str] = ("", "")  # as the README has them: the other's, ours

    @property
    def command(self) -> str:
        """The command that measures both rows in one run."""
        if self.side == "impl":
            return f"tilefold bench {self.file} --shape {self.where['case']} --impl {self.ours} --impl {self.other}"
        return f"python -m benchmarks.{self.file}"


# : Claims in the order of docs/claims.md; those of ``"cpu"`` are measured on any CPU, and have no
# committed rows.
CLAIMS = tuple(
    Claim(**row)
    for row in json.loads((Path(__file__).parent / "claims.json").read_text(encoding="utf-8"))
)


@dataclass(frozen=True)
class Verdict:
    """A claim with both sides; NaN for what was not measured."""

    claim: Claim
    ours: float
    other: float
    conditions: str  # device, versions and date of our row, and whether it is a committed one

    @property
    def times(self) -> float:
        """How many times better ours is."""
        better, worse = (
            (self.ours, self.other)
            if self.claim.column in (BATCH, RATE)
            else (self.other, self.ours)
        )
        return better / worse if worse else math.nan  # 0: too little memory to be seen

    @property
    def outcome(self) -> str:
        """``"pass"``, ``"miss"`` or ``"not measured"``."""
        if math.isnan(self.times):
            return "not measured"
        return "pass" if self.times >= self.claim.times else "miss"


def measured_by(device: str) -> dict[str, dict[str, set[str]]]:
    """Cases that a run on ``"cuda"`` or ``"cpu"`` measures of each operator, and the
    implementations of each.
    """
    found: dict[str, dict[str, set[str]]] = {}
    for claim in CLAIMS:
        if claim.side == "impl" and (claim.device == "cpu") == (device == "cpu"):
            found.setdefault(claim.file, {}).setdefault(claim.where["case"], set()).update(
                (claim.ours, claim.other),
            )
    return found


def judge(claim: Claim, rows: Sequence[Row], note: str = "") -> Verdict:
    """A claim by the rows of its file: of several of a side, the best."""
    more = claim.column in (BATCH, RATE)
    values: dict[str, float] = {}
    conditions = ""
    for row in rows:
        if any(row.get(name) != value for name, value in claim.where.items()):
            continue
        side = row.get(claim.side, "")
        if text := row.get(claim.column):
            values[side] = (max if more else min)(values.get(side, float(text)), float(text))
        if side == claim.ours:
            versions = f"torch {row['torch']}" + (
                f", Triton {row['triton']}" if row.get("triton") else ""
            )
            threads = "" if row.get("cuda") else f", {row['threads']} threads"
            conditions = f"{row['device']}{threads}, {versions}, {row['date'][:10]}{note}"
    return Verdict(
        claim,
        values.get(claim.ours, math.nan),
        values.get(claim.other, math.nan),
        conditions,
    )


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of results; none if there is no such file."""
    return [*read_csv(path)] if path.exists() else []


def judged(op: str, rows: Sequence[Row]) -> list[Verdict]:
    """The claims about an operator of which one run measured both sides."""
    found = [judge(claim, rows) for claim in CLAIMS if claim.file == op]
    return [verdict for verdict in found if verdict.outcome != "not measured"]


def table(verdicts: Iterable[Verdict]) -> list[str]:
    """The lines of a table in Markdown, a row for each claim."""
    columns = "system", "claim", "baseline", "measured: baseline, ours", "times better (claimed)"
    head = f"| {' | '.join([*columns, 'outcome', 'conditions', 'command'])} |"
    return [head, "|---|---|---|---|---:|---|---|---|", *map(_line, verdicts)]


def _line(verdict: Verdict) -> str:
    claim, (what, unit) = verdict.claim, COLUMNS[verdict.claim.column]
    digits = [",.0f" if value >= 1000 else ".4g" for value in (verdict.other, verdict.ours)]
    sides = ", ".join(
        format(value, spec)
        for value, spec in zip((verdict.other, verdict.ours), digits, strict=True)
    )
    times = "-" if math.isnan(verdict.times) else f"{verdict.times:.3g}"
    cells = [
        claim.system,
        f"{claim.claim} ({what})",
        claim.other,
        f"{sides} {unit}",
        f"{times} ({claim.times:g})",
    ]
    return f"| {' | '.join([*cells, verdict.outcome, verdict.conditions, f'`{claim.command}`'])} |"
