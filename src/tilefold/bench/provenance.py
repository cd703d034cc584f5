"""Where a number comes from: device, driver, versions, commit, date; and the CSV files that carry it."""

from __future__ import annotations

import csv
import functools
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from tilefold._version import __version__

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


def package_version(name: str) -> str:
    """The installed version of a distribution, or ``""``; nothing is imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def cpu_name() -> str:
    """The model name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        return platform.processor() or platform.machine()
    return platform.processor() or platform.machine()


@functools.cache
def driver_version() -> str:
    """The NVIDIA driver's version, or ``""`` if ``nvidia-smi`` cannot say."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ""
    out = _output([smi, "--query-gpu=driver_version", "--format=csv,noheader"])
    return out.splitlines()[0].strip() if out else ""


def _output(command: list[str], cwd: Path | None = None) -> str:
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


@functools.cache
def commit() -> tuple[str, str]:
    """``(commit, "yes" | "no" | "unknown")``: what the sources are at, and whether they differ from it."""
    if given := os.environ.get(COMMIT_VARIABLE, ""):
        return given, "unknown"
    here = Path(__file__).resolve().parent
    git = shutil.which("git")
    # an installed copy may lie inside somebody else's repository: only a file that git tracks speaks for us
    if git is None or not _output([git, "ls-files", Path(__file__).name], here):
        return "unknown", "unknown"
    head = _output([git, "rev-parse", "--short=12", "HEAD"], here)
    if not head:
        return "unknown", "unknown"
    root = _output([git, "rev-parse", "--show-toplevel"], here)
    changed = _output([git, "status", "--porcelain", "--untracked-files=no"], Path(root) if root else here)
    return head, "yes" if changed else "no"


def collect(device: torch.device) -> Provenance:
    """Read the provenance of a run on ``device``."""
    on_gpu = device.type == "cuda"
    head, dirty = commit()
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
        commit=head,
        dirty=dirty,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def device_slug(provenance: Provenance) -> str:
    """A folder name for the device: ``"NVIDIA H200"`` -> ``"nvidia-h200"``; processors carry their thread count."""
    slug = re.sub(r"\((r|tm)\)", "", provenance.device.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", slug).strip("-") or "unknown"
    return slug if provenance.cuda else f"cpu-{slug}-{provenance.threads}-threads"


def write_csv(path: Path, rows: Sequence[Mapping[str, object]], provenance: Provenance, key: Sequence[str]) -> None:
    """Merge ``rows`` into the CSV at ``path``, atomically.

    A row already there with the same values under ``key`` is replaced, others stay, each with its own provenance.

    Raises:
        ValueError: if the file exists and lacks one of the ``key`` columns.
    """
    stamped = [{**row, **asdict(provenance)} for row in rows]
    fresh = [{name: _cell(value) for name, value in row.items()} for row in stamped]
    kept = _read_csv(path, key) if path.exists() else []
    replaced = {tuple(row[name] for name in key) for row in fresh}
    merged = [row for row in kept if tuple(row[name] for name in key) not in replaced] + fresh
    columns = list(dict.fromkeys(name for row in [*fresh, *kept] for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(merged)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _read_csv(path: Path, key: Sequence[str]) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in key if name not in (reader.fieldnames or [])]
        if missing:
            raise ValueError(
                f"{path} must have the columns {', '.join(key)} to be updated, {', '.join(missing)} missing; "
                "choose another --output or move the file away."
            )
        return [dict(row) for row in reader]
