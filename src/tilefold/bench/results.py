"""Results of benchmarks: their provenance, CSV files and tables."""

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

from tilefold._internal.environment import cpu_name
from tilefold._internal.files import atomic_file
from tilefold._internal.lazy import package_version
from tilefold._version import __version__
from tilefold.bench.spec import PHASES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from tilefold.bench.runner import BenchRow
    from tilefold.bench.spec import BenchCase, BenchSpec, Phase

RESULTS = Path("benchmarks/results")
# Columns of the table on the terminal. The name of the baseline is inserted.
_COLUMNS = (
    "impl",
    "fwd ms",
    "x {baseline}",
    "TFLOP/s",
    "of floor",
    "peak MiB",
    "f+b ms",
    "x {baseline}",
    "of floor",
    "peak MiB",
    "error fwd / grad",
)
# largest load average of a machine whose times are not disturbed by other programs
_MAX_IDLE_LOAD = 0.7
# environment variable that names the commit of a copy of the sources without git
COMMIT_VARIABLE = "TILEFOLD_COMMIT"


@dataclass(frozen=True)
class Provenance:
    """Hardware, software versions and date of a measurement."""

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
def driver_version() -> str:
    """Return the version of the NVIDIA driver, or ``""`` if ``nvidia-smi`` does not run."""
    versions = _run_program(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return versions.splitlines()[0].strip() if versions else ""


def _run_program(command: list[str], cwd: Path | None = None) -> str:
    """Return the output of a program, or ``""`` if it is missing or fails.

    Args:
        command: the program with its arguments.
        cwd: the folder in which it runs.
    """
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        process = subprocess.run(  # noqa: S603
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return process.stdout.strip()
    return ""


@functools.cache
def commit() -> tuple[str, str]:
    """Return the git commit of the sources, and whether there are uncommitted changes.

    Returns:
        The commit or ``"unknown"``, and ``"yes"``, ``"no"`` or ``"unknown"``.
    """
    commit_of_copy = os.environ.get(COMMIT_VARIABLE, "")
    if commit_of_copy:  # these sources are a copy without git
        return commit_of_copy, "unknown"
    folder = Path(__file__).resolve().parent
    head = _run_program(["git", "rev-parse", "--short=12", "HEAD"], folder)
    # an installed copy may be inside another repository, which does not track this file
    is_tracked = _run_program(["git", "ls-files", Path(__file__).name], folder)
    if not head or not is_tracked:
        return "unknown", "unknown"
    root = Path(_run_program(["git", "rev-parse", "--show-toplevel"], folder) or folder)
    changes = _run_program(["git", "status", "--porcelain", "--untracked-files=no"], root)
    return head, "yes" if changes else "no"


def collect(device: torch.device) -> Provenance:
    """Collect the hardware, versions and date of a run on a device (its provenance).

    Args:
        device: the device that is measured. On a CPU, the fields of GPUs are empty.
    """
    on_gpu = device.type == "cuda"
    current_commit, dirty = commit()
    return Provenance(
        device=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        device_count=torch.cuda.device_count() if on_gpu else 1,
        driver=driver_version() if on_gpu else "",
        cuda=(torch.version.cuda or "") if on_gpu else "",
        cpu=cpu_name(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        triton=package_version("triton"),
        python=platform.python_version(),
        tilefold=__version__,
        commit=current_commit,
        dirty=dirty,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def choose_device(name: str | None) -> torch.device:
    """Return the device called ``name``, by default the GPU if there is one.

    Raises:
        ValueError: for an unknown name, or if there is no CUDA device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no CUDA device here; use --device cpu.")
    return torch.device(name)


def device_slug(provenance: Provenance) -> str:
    """Return a folder name for the device, such as ``"nvidia-h200"`` for ``"NVIDIA H200"``.

    The folder name of a CPU has the number of threads, on which its times depend.
    """
    slug = re.sub(r"\((r|tm)\)", "", provenance.device.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", slug).strip("-") or "unknown"
    return slug if provenance.cuda else f"cpu-{slug}-{provenance.threads}-threads"


def results_folder(output: Path | None, quick: bool) -> Path | None:
    """Return the folder to write results to, or None to write none.

    Without `output`, results are written to the repository if it is the current folder, except
    those of a quick run.

    Args:
        output: the folder of ``--output``; None if it was not given.
        quick: whether the run is a quick one.
    """
    if output:
        return output
    return RESULTS if RESULTS.parent.is_dir() and not quick else None


def results_file(folder: Path, name: str, provenance: Provenance) -> Path:
    """Return the path ``<folder>/<device>/<name>.csv``."""
    return folder / device_slug(provenance) / f"{name}.csv"


def write_csv(
    path: Path,
    rows: Sequence[Mapping[str, object]],
    provenance: Provenance,
    key: Sequence[str],
) -> None:
    """Merge rows into a CSV file, atomically.

    Args:
        path: the file.
        rows: new rows. A new row replaces the row with the same key.
        provenance: hardware, versions and date, which are added to each new row.
        key: names of the columns that identify a row.

    Raises:
        ValueError: if the file exists and lacks one of the ``key`` columns.
    """

    def key_of(row: Mapping[str, str]) -> tuple[str, ...]:
        return tuple(row[name] for name in key)

    new_rows = [cells(row, provenance) for row in rows]
    old_rows = read_csv(path, required_columns=key) if path.exists() else []
    new_keys = {key_of(row) for row in new_rows}
    merged = [row for row in old_rows if key_of(row) not in new_keys] + new_rows
    columns = list(dict.fromkeys(name for row in [*new_rows, *old_rows] for name in row))
    with atomic_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged)


def cells(row: Mapping[str, object], provenance: Provenance) -> dict[str, str]:
    """Return the cells of a CSV row as text, by column.

    Args:
        row: the results of a measurement, by column.
        provenance: its hardware, versions and date, which are columns, too.
    """
    values = {**row, **asdict(provenance)}
    return {name: _cell(value) for name, value in values.items()}


def _cell(value: object) -> str:
    """Return a value as text: floats with six significant digits, and ``""`` for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def read_csv(path: str | Path, required_columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """Read the rows of a CSV file as text.

    Args:
        path: the file.
        required_columns: columns that the file must have.

    Raises:
        ValueError: if a required column is missing, or a row is longer than the header.
    """
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        missing = [name for name in required_columns if name not in columns]
        if missing:
            raise ValueError(
                f"{path} must have the columns {', '.join(required_columns)}, "
                f"{', '.join(missing)} missing; choose another --output or move the file away.",
            )
        rows = list(reader)
    if any(None in row for row in rows):
        raise ValueError(
            f"{path} must have rows no longer than its header; fix it, or move the file away.",
        )
    return rows


def short_number(value: float | None) -> str:
    """Format a number with three significant digits, or ``-`` for None.

    Large values have no exponent: ``1234``, ``12.3``, ``0.123``.
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def spread(p50: float | None, p20: float | None, p80: float | None) -> str:
    """Format a median, with the 20th and the 80th percentile in brackets."""
    if p50 is None:
        return "-"
    return f"{short_number(p50)} ({short_number(p20)}..{short_number(p80)})"


def ratio(above: float | None, below: float | None) -> str:
    """Format ``above / below`` with two decimals, or ``-`` if one is missing or ``below`` is 0."""
    return "-" if above is None or not below else f"{above / below:.2f}"


def exponent(value: float | None) -> str:
    """Format an error with two significant digits, or ``-`` for None."""
    return "-" if value is None else f"{value:.1e}"


def _format_phase(row: BenchRow, baseline: BenchRow | None, phase: Phase) -> list[str]:
    """Format the results of a phase (forward, or forward and backward) as cells of the table.

    Args:
        row: the row of an implementation.
        baseline: the row of the baseline, or None if it has no times.
        phase: the phase.

    Returns:
        Time, speedup over the baseline, TFLOP/s (forward only), the time of the minimum work at the
        peak throughput of the device (floor) as a percentage of the time, and peak memory.
    """
    result = row.phase(phase)
    baseline_ms = None if baseline is None else baseline.phase(phase).p50_ms
    floor_share = "-"
    if result.p50_ms and result.floor_ms is not None:
        floor_share = f"{100 * result.floor_ms / result.p50_ms:.0f}%"
    phase_cells = [
        spread(result.p50_ms, result.p20_ms, result.p80_ms),
        ratio(baseline_ms, result.p50_ms),
    ]
    if phase == "forward":
        phase_cells.append(short_number(row.forward_tflops))
    return [*phase_cells, floor_share, short_number(result.peak_mib)]


def _format_row(row: BenchRow, baseline: BenchRow | None) -> list[str]:
    """Format the results of an implementation as cells of the table: name, both phases, errors.

    Args:
        row: the row of an implementation. If it failed, its status replaces its times.
        baseline: the row of the baseline, or None if it has no times.
    """
    name = row.impl
    if row.impl == "tilefold" and row.label:
        name = f"{row.impl} ({row.label})"  # with the implementation that `impl="auto"` chose
    errors = f"{exponent(row.forward_error)} / {exponent(row.gradient_error)}"
    if row.status == "ok":
        results = [cell for phase in PHASES for cell in _format_phase(row, baseline, phase)]
    else:
        n_blank = len(_COLUMNS) - 3  # all columns except name, status and errors
        results = [row.status, *["-"] * n_blank]
    return [name, *results, errors]


def case_table(spec: BenchSpec, case: BenchCase, rows: Sequence[BenchRow]) -> Table:
    """Create the table of one case, with a line for each implementation.

    A failed implementation shows its status instead of its times.

    Args:
        spec: the benchmark.
        case: the case.
        rows: the rows of the case, at least one.
    """
    from rich.table import Table

    op, active_share, valid_tokens = rows[0].op, rows[0].active, rows[0].valid_tokens
    dims = ", ".join(f"{name}={size}" for name, size in case.dims.items())
    active = "" if active_share is None else f", {100 * active_share:.3g}% of scores positive"
    title = f"{op} {case.name} ({dims}; {case.dtype}; {valid_tokens} valid tokens{active})"
    table = Table(title=title, title_justify="left", header_style="bold")
    for position, column in enumerate(_COLUMNS):
        table.add_column(
            column.format(baseline=spec.baseline),
            justify="left" if position == 0 else "right",
            no_wrap=True,
        )
    timed_baselines = (row for row in rows if row.impl == spec.baseline and row.status == "ok")
    baseline = next(timed_baselines, None)
    for row in rows:
        style = None
        if row.status != "ok":
            style = "red" if row.failed_gate else "dim"
        table.add_row(*_format_row(row, baseline), style=style)
    return table


def print_case(
    console: Console,
    spec: BenchSpec,
    case: BenchCase,
    rows: Sequence[BenchRow],
) -> None:
    """Print the table of one case, and the note of each row that has one.

    Args:
        console: where it is printed.
        spec: the benchmark.
        case: the case.
        rows: rows of the case; without any, nothing is printed.
    """
    if not rows:
        return
    console.print(case_table(spec, case, rows))
    for row in rows:
        if row.note:
            console.print(f"  {row.impl}: {row.status}: {row.note}", markup=False)


def print_header(console: Console, provenance: Provenance) -> None:
    """Print the hardware, versions and date of a run in one line, and warn if the CPU is busy."""
    device = provenance.device
    if provenance.cuda:
        driver = provenance.driver or "unknown"
        device += f", driver {driver}, CUDA {provenance.cuda}, triton {provenance.triton}"
    else:
        device += f", {provenance.threads} threads"
    dirty = " with local changes" if provenance.dirty == "yes" else ""
    versions = (
        f"torch {provenance.torch}, Python {provenance.python}, tilefold {provenance.tilefold}"
    )
    text = f"{device}; {versions} at {provenance.commit}{dirty}; {provenance.date}"
    console.print(text, markup=False, highlight=False)
    load_average = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if not provenance.cuda and load_average > _MAX_IDLE_LOAD:
        console.print(
            f"load average {load_average:.1f}: other programs are running, CPU times will be noisy",
            style="yellow",
        )
