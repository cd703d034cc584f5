"""The tables that ``tilefold bench`` prints."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tilefold.bench.spec import PHASES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilefold.bench.results import Provenance
    from tilefold.bench.runner import BenchRow, Verdict
    from tilefold.bench.spec import BenchCase, BenchSpec

_COLUMNS = ("impl", "fwd ms", "x eager", "TFLOP/s", "of floor", "peak MiB", "f+b ms", "x eager", "of floor", "peak MiB")
_BARE = ("gemm", "gemm-full")
_BUSY = 0.7  # load average before the first timing above which the machine is not ours


def short_number(value: float | None) -> str:
    """Three significant digits, no exponent for large values: ``1234``, ``12.3``, ``0.123``; ``-`` for ``None``."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(p50: float | None, p20: float | None, p80: float | None) -> str:
    """The median, and the 20th to the 80th percentile in brackets."""
    return "-" if p50 is None else f"{short_number(p50)} ({short_number(p20)}..{short_number(p80)})"


def ratio(above: float | None, below: float | None) -> str:
    """``above / below`` with two digits; ``-`` where there is none."""
    return "-" if above is None or not below else f"{above / below:.2f}"


def exponent(value: float | None) -> str:
    """An error with two digits."""
    return "-" if value is None else f"{value:.1e}"


def _phase_cells(row: BenchRow, base: BenchRow | None, phase: str) -> list[str]:
    """Time, speedup over the baseline, rate of a forward, share of the floor and peak memory."""
    mine, floor = getattr(row, f"{phase}_p50_ms"), getattr(row, f"{phase}_floor_ms")
    return [
        spread(mine, getattr(row, f"{phase}_p20_ms"), getattr(row, f"{phase}_p80_ms")),
        ratio(getattr(base, f"{phase}_p50_ms", None), mine),
        *([short_number(row.forward_tflops)] if phase == "forward" else []),
        "-" if not mine or floor is None else f"{100 * floor / mine:.0f}%",
        short_number(getattr(row, f"{phase}_peak_mib")),
    ]


def case_title(case: BenchCase, rows: Sequence[BenchRow]) -> str:
    """The shape, its dtype, and how much of it is valid and active."""
    dims = ", ".join(f"{name}={size}" for name, size in case.dims.items())
    row = rows[0]
    active = "" if row.active is None else f", {100 * row.active:.3g}% of scores positive"
    return f"{row.op} {case.name} ({dims}; {case.dtype}; {row.valid_tokens} valid tokens{active})"


def case_table(spec: BenchSpec, case: BenchCase, rows: Sequence[BenchRow]) -> Table:
    """One case: a line for each implementation; without a time where its gate failed."""
    from rich.table import Table

    table = Table(title=case_title(case, rows), title_justify="left", header_style="bold")
    names = [name if name != "x eager" else f"x {spec.baseline}" for name in _COLUMNS]
    for position, name in enumerate([*names, "error fwd / grad"]):
        table.add_column(name, justify="left" if position == 0 else "right", no_wrap=True)
    base = next((row for row in rows if row.impl == spec.baseline and row.status == "ok"), None)
    for row in rows:
        name = f"{row.impl} ({row.label})" if row.impl == "tilefold" and row.label else row.impl
        error = f"{exponent(row.forward_error)} / {exponent(row.gradient_error)}"
        if row.status == "ok":
            table.add_row(name, *(cell for phase in PHASES for cell in _phase_cells(row, base, phase)), error)
        else:
            blanks = ["-"] * (len(_COLUMNS) - 2)
            table.add_row(name, row.status, *blanks, error, style="red" if row.failed_gate else "dim")
    return table


def print_case(console: Console, spec: BenchSpec, case: BenchCase, rows: Sequence[BenchRow]) -> None:
    """Print the table of one case, our time over the bare product's, and why rows have no time."""
    if not rows:
        return
    console.print(case_table(spec, case, rows))
    times = {row.impl: row.forward_p50_ms for row in rows if row.status == "ok" and row.forward_p50_ms}
    for row in rows:
        if row.impl in _BARE and row.impl in times and "tilefold" in times:
            share = times["tilefold"] / times[row.impl]
            console.print(f"  forward takes {share:.2f}x the time of the bare matrix product ({row.label})")
    for row in rows:
        if row.note:
            console.print(f"  {row.impl}: {row.status}: {row.note}", markup=False)


def print_header(console: Console, provenance: Provenance) -> None:
    """One line on where the numbers come from."""
    where = provenance.device
    if provenance.cuda:
        where += f", driver {provenance.driver or 'unknown'}, CUDA {provenance.cuda}, triton {provenance.triton}"
    else:
        where += f", {provenance.threads} threads"
    dirty = {"yes": " with local changes", "no": "", "unknown": ""}[provenance.dirty]
    text = (
        f"{where}; torch {provenance.torch}, Python {provenance.python}, tilefold {provenance.tilefold} "
        f"at {provenance.commit}{dirty}; {provenance.date}"
    )
    console.print(text, markup=False, highlight=False)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if not provenance.cuda and busy > _BUSY:
        console.print(f"load average {busy:.1f}: other programs run here, CPU times will be noisy", style="yellow")


def print_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Every claim with both sides and whether it held."""
    for verdict in verdicts:
        requirement = verdict.requirement
        word = {True: "held", False: "MISSED", None: "not measured"}[verdict.held]
        sides = ((requirement.left, verdict.left), (requirement.right, verdict.right))
        left, right = (f"{impl} {short_number(value)}" for (impl, _), value in sides)
        unit = "MiB" if requirement.left[1].endswith("_mib") else "ms"
        console.print(
            f"{word}: {requirement.claim} at {requirement.case}: {left} {unit}, {right} {unit}, "
            f"ratio {verdict.ratio:.3g} (limit {requirement.limit:.3g})",
            markup=False,
        )
