"""Results: where a number comes from, CSV files in which a row is replaced when it is measured
again, and tables.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tilefold._internal.files import atomic_file
from tilefold._internal.lazy import package_version
from tilefold._version import __version__
from tilefold.bench.spec import PHASES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilefold.bench.runner import BenchRow
    from tilefold.bench.spec import BenchCase, BenchSpec

RESULTS = Path("benchmarks/results")
_COLUMNS = (
    "impl",
    "fwd ms",
    "x eager",
    "TFLOP/s",
    "of floor",
    "peak MiB",
    "f+b ms",
    "x eager",
    "of floor",
    "peak MiB",
)
_BUSY = 0.7  # load average before the first timing above which the machine is not ours
COMMIT_VARIABLE = "TILEFOLD_COMMIT"  # what a copy of the sources is at, if git does not know


@dataclass(frozen=True)
class Provenance:
    """Everything needed to repeat a measurement, apart from the shapes, which are in the row."""

    device: str
    device_count: int
    driver: str
    cuda: str
    cpu: str
    threads: int
    torch: str
    triton: str
    python: str
    tilefold: str
    commit: str
    dirty: str
    date: str


@functools.cache
def cpu_name() -> str:
    """The model name of the processor."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def driver_version() -> str:
    """The NVIDIA driver's version, or ``""`` if ``nvidia-smi`` cannot say."""
    out = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return out.splitlines()[0].strip() if out else ""


def _output(command: list[str], cwd: Path | None = None) -> str:
    """Output of a program, or ``""`` where it is not there or fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(  # noqa: S603
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return done.stdout.strip()
    return ""


@functools.cache
def commit() -> tuple[str, str]:
    """``(commit, "yes" | "no" | "unknown")``: what the sources are at, and whether they differ from
    it.
    """
    if given := os.environ.get(COMMIT_VARIABLE, ""):
        return given, "unknown"
    here = Path(__file__).resolve().parent
    # an installed copy may lie inside somebody else's repository: only a file that git tracks
    # speaks for us
    head = _output(["git", "rev-parse", "--short=12", "HEAD"], here)
    if not head or not _output(["git", "ls-files", Path(__file__).name], here):
        return "unknown", "unknown"
    root = Path(_output(["git", "rev-parse", "--show-toplevel"], here) or here)
    return head, "yes" if _output(
        ["git", "status", "--porcelain", "--untracked-files=no"],
        root,
    ) else "no"


def collect(device: torch.device) -> Provenance:
    """Read the provenance of a run on ``device``."""
    on_gpu = device.type == "cuda"
    name, count = (
        (torch.cuda.get_device_name(device), torch.cuda.device_count())
        if on_gpu
        else (cpu_name(), 1)
    )
    driver, cuda = (driver_version(), torch.version.cuda or "") if on_gpu else ("", "")
    versions = (
        torch.__version__,
        package_version("triton"),
        platform.python_version(),
        __version__,
    )
    date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Provenance(
        name,
        count,
        driver,
        cuda,
        cpu_name(),
        torch.get_num_threads(),
        *versions,
        *commit(),
        date,
    )


def choose_device(name: str | None) -> torch.device:
    """The device called ``name``, by default the GPU if there is one; ``ValueError`` if there is
    none such.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no CUDA device here; use --device cpu.")
    return torch.device(name)


def device_slug(provenance: Provenance) -> str:
    """A folder name for the device: ``"NVIDIA H200"`` -> ``"nvidia-h200"``; processors carry their
    thread count.
    """
    slug = re.sub(r"\((r|tm)\)", "", provenance.device.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", slug).strip("-") or "unknown"
    return slug if provenance.cuda else f"cpu-{slug}-{provenance.threads}-threads"


def results_folder(output: Path | None, quick: bool) -> Path | None:
    """The folder of results: ``output``, else that of the repository around; ``quick`` ones go
    nowhere.
    """
    return output or (RESULTS if RESULTS.parent.is_dir() and not quick else None)


def results_file(folder: Path, name: str, provenance: Provenance) -> Path:
    """``<folder>/<device>/<name>.csv``."""
    return folder / device_slug(provenance) / f"{name}.csv"


def write_csv(
    path: Path,
    rows: Sequence[Mapping[str, object]],
    provenance: Provenance,
    key: Sequence[str],
) -> None:
    """Merge ``rows`` into the CSV at ``path``, atomically: rows of equal ``key`` are replaced,
    others stay as they are.

    ``ValueError`` if the file exists and lacks one of the ``key`` columns.
    """
    fresh = [cells(row, provenance) for row in rows]
    kept = read_csv(path, key) if path.exists() else []
    replaced = {tuple(row[name] for name in key) for row in fresh}
    merged = [row for row in kept if tuple(row[name] for name in key) not in replaced] + fresh
    columns = list(dict.fromkeys(name for row in [*fresh, *kept] for name in row))
    with atomic_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged)


def cells(row: Mapping[str, object], provenance: Provenance) -> dict[str, str]:
    """A row and where it comes from, as text."""
    found = {**row, **asdict(provenance)}.items()
    return {
        name: "" if it is None else f"{it:.6g}" if isinstance(it, float) else str(it)
        for name, it in found
    }


def read_csv(path: str | Path, key: Sequence[str] = ()) -> list[dict[str, str]]:
    """The rows of a CSV file, as text; ``ValueError`` if it lacks one of the ``key`` columns."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in key if name not in (reader.fieldnames or [])]:
            raise ValueError(
                f"{path} must have the columns {', '.join(key)} to be updated, {', '.join(missing)} missing; "
                "choose another --output or move the file away.",
            )
        rows = list(reader)
    if any(None in row for row in rows):
        raise ValueError(
            f"{path} must have rows no longer than its header; mend it, or move the file away.",
        )
    return rows


def short_number(value: float | None) -> str:
    """Three significant digits, no exponent for large values: ``1234``, ``12.3``, ``0.123``; ``-``
    for ``None``.
    """
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


def case_table(spec: BenchSpec, case: BenchCase, rows: Sequence[BenchRow]) -> Table:
    """One case: a line for each implementation; without a time where its gate failed."""
    from rich.table import Table

    dims, row = ", ".join(f"{name}={size}" for name, size in case.dims.items()), rows[0]
    active = "" if row.active is None else f", {100 * row.active:.3g}% of scores positive"
    title = f"{row.op} {case.name} ({dims}; {case.dtype}; {row.valid_tokens} valid tokens{active})"
    table = Table(title=title, title_justify="left", header_style="bold")
    names = [name if name != "x eager" else f"x {spec.baseline}" for name in _COLUMNS]
    for position, name in enumerate([*names, "error fwd / grad"]):
        table.add_column(name, justify="left" if position == 0 else "right", no_wrap=True)
    base = next((row for row in rows if row.impl == spec.baseline and row.status == "ok"), None)
    for row in rows:
        name = f"{row.impl} ({row.label})" if row.impl == "tilefold" and row.label else row.impl
        error = f"{exponent(row.forward_error)} / {exponent(row.gradient_error)}"
        if row.status == "ok":
            table.add_row(
                name,
                *(cell for phase in PHASES for cell in _phase_cells(row, base, phase)),
                error,
            )
        else:
            blanks = ["-"] * (len(_COLUMNS) - 2)
            table.add_row(
                name,
                row.status,
                *blanks,
                error,
                style="red" if row.failed_gate else "dim",
            )
    return table


def print_case(
    console: Console,
    spec: BenchSpec,
    case: BenchCase,
    rows: Sequence[BenchRow],
) -> None:
    """Print the table of one case, and why rows have no time."""
    if not rows:
        return
    console.print(case_table(spec, case, rows))
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
    versions = (
        f"torch {provenance.torch}, Python {provenance.python}, tilefold {provenance.tilefold}"
    )
    text = f"{where}; {versions} at {provenance.commit}{dirty}; {provenance.date}"
    console.print(text, markup=False, highlight=False)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if not provenance.cuda and busy > _BUSY:
        console.print(
            f"load average {busy:.1f}: other programs run here, CPU times will be noisy",
            style="yellow",
        )
