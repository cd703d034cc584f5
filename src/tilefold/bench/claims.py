"""Performance claims of the README and of published systems, and whether they hold.

A claim names two rows of a results file, a column, and how many times better tilefold's row must
be. If an operator's benchmark measures the rows (:func:`measured_by`), they are measured anew in
one run. Otherwise they are the committed rows, with the command that repeats them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilefold.bench.results import read_csv

H200 = "nvidia-h200"
TIME = "forward_p50_ms"
TRAIN = "forward_backward_p50_ms"
MEMORY = "forward_backward_peak_mib"
FORWARD_MEMORY = "forward_peak_mib"
# columns in which a larger value is better
BATCH = "largest_batch"
RATE = "pairs_per_second"
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
    """A claim that tilefold is several times better than another implementation.

    Attributes:
        system: the system or paper that the claim is about.
        claim: description of the measurement.
        device: folder of its results.
        file: name of the results file, without .csv.
        where: cells that the rows of both sides share.
        other: the implementation that tilefold is compared with.
        column: the column that is compared.
        times: the smallest ratio at which the claim holds.
        ours: tilefold's implementation.
        side: the column that names the implementation.
        shown: the values in the README, the other's and tilefold's.
    """

    system: str
    claim: str
    device: str
    file: str
    where: Mapping[str, str]
    other: str
    column: str
    times: float
    ours: str = "tilefold"
    side: str = "impl"
    shown: Sequence[str] = ("", "")

    @property
    def command(self) -> str:
        """The command that measures both rows in one run."""
        if self.side == "impl":
            return (
                f"tilefold bench {self.file} --shape {self.where['case']} "
                f"--impl {self.ours} --impl {self.other}"
            )
        return f"python -m benchmarks.{self.file}"


# Claims in the order of docs/claims.md. Those of "cpu" are measured on any CPU, and have no
# committed rows.
CLAIMS = tuple(
    Claim(**row)
    for row in json.loads((Path(__file__).parent / "claims.json").read_text(encoding="utf-8"))
)


@dataclass(frozen=True)
class Verdict:
    """A claim with the measured values of both sides.

    Attributes:
        claim: the claim.
        ours: tilefold's value, or NaN if it was not measured.
        other: the other implementation's value, or NaN if it was not measured.
        conditions: device, versions and date of tilefold's row, and whether it is a committed row.
    """

    claim: Claim
    ours: float
    other: float
    conditions: str

    @property
    def times(self) -> float:
        """How many times better tilefold's value is, or NaN if a divisor is 0."""
        if self.claim.column in (BATCH, RATE):
            dividend, divisor = self.ours, self.other
        else:
            dividend, divisor = self.other, self.ours
        # memory may be too small to be measured
        return dividend / divisor if divisor else math.nan

    @property
    def outcome(self) -> str:
        """``"pass"``, ``"miss"`` or ``"not measured"``."""
        if math.isnan(self.times):
            return "not measured"
        return "pass" if self.times >= self.claim.times else "miss"


def measured_by(device: str) -> dict[str, dict[str, set[str]]]:
    """Return the cases and implementations whose measurements the claims of a device need.

    Args:
        device: ``"cuda"`` or ``"cpu"``.

    Returns:
        Names of implementations, by operator and case.
    """
    measured: dict[str, dict[str, set[str]]] = {}
    for claim in CLAIMS:
        if claim.side == "impl" and (claim.device == "cpu") == (device == "cpu"):
            cases = measured.setdefault(claim.file, {})
            implementations = cases.setdefault(claim.where["case"], set())
            implementations.update((claim.ours, claim.other))
    return measured


def judge(claim: Claim, rows: Sequence[Row], note: str = "") -> Verdict:
    """Look up the measurements of both sides of a claim, and return them as a verdict.

    Rows with other conditions than the claim's are left out. A side without a measurement is NaN.

    Args:
        claim: the claim.
        rows: rows of its file. The best of several rows of a side counts.
        note: text after the conditions.
    """
    choose_best = max if claim.column in (BATCH, RATE) else min
    values: dict[str, float] = {}
    conditions = ""
    for row in rows:
        if any(row.get(name) != value for name, value in claim.where.items()):
            continue
        side = row.get(claim.side, "")
        text = row.get(claim.column)
        if text:
            value = float(text)
            values[side] = choose_best(values.get(side, value), value)
        if side == claim.ours:
            versions = f"torch {row['torch']}"
            if row.get("triton"):
                versions += f", Triton {row['triton']}"
            threads = "" if row.get("cuda") else f", {row['threads']} threads"
            conditions = f"{row['device']}{threads}, {versions}, {row['date'][:10]}{note}"
    return Verdict(
        claim=claim,
        ours=values.get(claim.ours, math.nan),
        other=values.get(claim.other, math.nan),
        conditions=conditions,
    )


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a results file, or none if there is no such file."""
    return list(read_csv(path)) if path.exists() else []


def judged(op: str, rows: Sequence[Row]) -> list[Verdict]:
    """Return verdicts on the claims about an operator whose sides one run measured."""
    verdicts = [judge(claim, rows) for claim in CLAIMS if claim.file == op]
    return [verdict for verdict in verdicts if verdict.outcome != "not measured"]


def table(verdicts: Iterable[Verdict]) -> list[str]:
    """Return the lines of a Markdown table with a row for each claim."""
    columns = [
        "system",
        "claim",
        "baseline",
        "measured: baseline, ours",
        "times better (claimed)",
        "outcome",
        "conditions",
        "command",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---|---|---|---|---:|---|---|---|"]
    lines += [_line(verdict) for verdict in verdicts]
    return lines


def _line(verdict: Verdict) -> str:
    """Return the table row of one claim."""
    claim = verdict.claim
    quantity, unit = COLUMNS[claim.column]
    times = "-" if math.isnan(verdict.times) else f"{verdict.times:.3g}"
    cells = [
        claim.system,
        f"{claim.claim} ({quantity})",
        claim.other,
        f"{_measured(verdict.other)}, {_measured(verdict.ours)} {unit}",
        f"{times} ({claim.times:g})",
        verdict.outcome,
        verdict.conditions,
        f"`{claim.command}`",
    ]
    return f"| {' | '.join(cells)} |"


def _measured(value: float) -> str:
    """Format a value with four significant digits, or as a whole number from 1,000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
