"""Performance claims of the README and of published systems, and whether they hold.

A claim names two rows of a results file, a column, and the factor by which tilefold's row must be
better. The rows of an operator's benchmark are measured again in one run
(:func:`implementations_by_case`). All other rows are read from the committed results, and the claim
has the command that repeats them.
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
BATCH = "largest_batch"
RATE = "pairs_per_second"
HIGHER_IS_BETTER = (BATCH, RATE)
# quantity and unit of each column
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
    """A claim that tilefold is better than another implementation by some factor.

    Attributes:
        system: the system or paper that the claim is about.
        statement: what is claimed, in words.
        device: folder of the results; ``"cpu"`` for claims that are measured on any CPU.
        file: name of the results file, without .csv. For an operator's benchmark, the operator.
        where: cells that the rows of both sides share.
        baseline: the implementation that tilefold is compared with.
        column: the column that is compared.
        ratio: the smallest ratio at which the claim holds.
        ours: tilefold's implementation.
        impl_column: the column with the name of the implementation. It is ``"impl"`` in the results
            of operators' benchmarks, and only there.
        shown: the values in the README, the baseline's and tilefold's.
    """

    system: str
    statement: str
    device: str
    file: str
    where: Mapping[str, str]
    baseline: str
    column: str
    ratio: float
    ours: str = "tilefold"
    impl_column: str = "impl"
    shown: Sequence[str] = ("", "")

    @property
    def is_about_operator(self) -> bool:
        """Whether ``tilefold bench`` measures both rows."""
        return self.impl_column == "impl"

    @property
    def command(self) -> str:
        """The command that measures both rows in one run."""
        if self.is_about_operator:
            return (
                f"tilefold bench {self.file} --shape {self.where['case']} "
                f"--impl {self.ours} --impl {self.baseline}"
            )
        return f"python -m benchmarks.{self.file}"

    def runs_on(self, device_type: str) -> bool:
        """Return whether the claim is about a device of type ``"cpu"`` or ``"cuda"``."""
        claimed_type = "cpu" if self.device == "cpu" else "cuda"
        return claimed_type == device_type


# Claims in the order of benchmarks/notes/claims.md. Those of "cpu" have no committed rows.
CLAIMS = tuple(
    Claim(**fields)
    for fields in json.loads((Path(__file__).parent / "claims.json").read_text(encoding="utf-8"))
)


@dataclass(frozen=True)
class Verdict:
    """A claim with the measured values of both sides.

    Attributes:
        claim: the claim.
        ours: tilefold's value, or NaN if it was not measured.
        baseline: the baseline's value, or NaN if it was not measured.
        environment: device, versions and date of tilefold's row, and whether it is a committed row.
    """

    claim: Claim
    ours: float
    baseline: float
    environment: str

    @property
    def ratio(self) -> float:
        """The factor by which tilefold's value is better, or NaN if a divisor is 0."""
        if self.claim.column in HIGHER_IS_BETTER:
            dividend, divisor = self.ours, self.baseline
        else:
            dividend, divisor = self.baseline, self.ours
        # memory may be too small to be measured
        return dividend / divisor if divisor else math.nan

    @property
    def outcome(self) -> str:
        """``"pass"``, ``"miss"`` or ``"not measured"``."""
        if math.isnan(self.ratio):
            return "not measured"
        return "pass" if self.ratio >= self.claim.ratio else "miss"


def implementations_by_case(device_type: str) -> dict[str, dict[str, set[str]]]:
    """Return the cases and implementations that must be measured to judge a device's claims.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``.

    Returns:
        Operator -> case -> names of implementations.
    """
    cases_by_operator: dict[str, dict[str, set[str]]] = {}
    for claim in CLAIMS:
        if claim.is_about_operator and claim.runs_on(device_type):
            cases = cases_by_operator.setdefault(claim.file, {})
            implementations = cases.setdefault(claim.where["case"], set())
            implementations.update((claim.ours, claim.baseline))
    return cases_by_operator


def judge(claim: Claim, rows: Sequence[Row], origin: str = "") -> Verdict:
    """Look up the measured values of tilefold and of the baseline of a claim.

    Only rows with the cells of ``claim.where`` count. If an implementation has several, its best
    value is used; without any, the value is NaN. The hardware and versions of the verdict are those
    of tilefold's last row.

    Args:
        claim: the claim.
        rows: rows of the claim's results file.
        origin: where the rows are from, such as ``" (committed)"``; appended to the hardware and
            versions.
    """
    choose_better = max if claim.column in HIGHER_IS_BETTER else min
    values: dict[str, float] = {}
    environment = ""
    for row in rows:
        if any(row.get(name) != value for name, value in claim.where.items()):
            continue
        implementation = row.get(claim.impl_column, "")
        text = row.get(claim.column)
        if text:
            value = float(text)
            values[implementation] = choose_better(values.get(implementation, value), value)
        if implementation == claim.ours:
            environment = _describe_environment(row) + origin
    return Verdict(
        claim=claim,
        ours=values.get(claim.ours, math.nan),
        baseline=values.get(claim.baseline, math.nan),
        environment=environment,
    )


def _describe_environment(row: Row) -> str:
    """Return device, versions and date of a measurement, separated by commas."""
    facts = [row["device"]]
    if not row.get("cuda"):
        facts.append(f"{row['threads']} threads")
    facts.append(f"torch {row['torch']}")
    if row.get("triton"):
        facts.append(f"Triton {row['triton']}")
    facts.append(row["date"][:10])
    return ", ".join(facts)


def read_rows(path: Path) -> list[Row]:
    """Read the rows of a results file, or none if there is no such file."""
    return list(read_csv(path)) if path.exists() else []


def judged(op: str, rows: Sequence[Row]) -> list[Verdict]:
    """Return verdicts on the claims about an operator for which both implementations have rows.

    Args:
        op: the name of the operator.
        rows: the rows of one run.
    """
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
    lines += [_format_verdict(verdict) for verdict in verdicts]
    return lines


def _format_verdict(verdict: Verdict) -> str:
    """Return the Markdown row of one claim, with the columns of :func:`table`."""
    claim = verdict.claim
    quantity, unit = COLUMNS[claim.column]
    measured_ratio = "-" if math.isnan(verdict.ratio) else f"{verdict.ratio:.3g}"
    cells = [
        claim.system,
        f"{claim.statement} ({quantity})",
        claim.baseline,
        f"{_format_measurement(verdict.baseline)}, {_format_measurement(verdict.ours)} {unit}",
        f"{measured_ratio} ({claim.ratio:g})",
        verdict.outcome,
        verdict.environment,
        f"`{claim.command}`",
    ]
    return f"| {' | '.join(cells)} |"


def _format_measurement(value: float) -> str:
    """Format a value with four significant digits, or as a whole number from 1,000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
