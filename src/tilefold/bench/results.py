"""The CSV files of results: one row per measurement, with its provenance, replaced when it is measured again."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tilefold._files import atomic_file
from tilefold.bench.provenance import Provenance

RESULTS = Path("benchmarks/results")


def device_slug(provenance: Provenance) -> str:
    """A folder name for the device: ``"NVIDIA H200"`` -> ``"nvidia-h200"``; processors carry their thread count."""
    slug = re.sub(r"\((r|tm)\)", "", provenance.device.lower())
    slug = re.sub(r"[^a-z0-9]+", "-", slug).strip("-") or "unknown"
    return slug if provenance.cuda else f"cpu-{slug}-{provenance.threads}-threads"


def results_folder(output: Path | None, quick: bool) -> Path | None:
    """The folder of results: ``output``, else that of the repository around; ``quick`` ones go nowhere."""
    return output or (RESULTS if RESULTS.parent.is_dir() and not quick else None)


def results_file(folder: Path, name: str, provenance: Provenance) -> Path:
    """``<folder>/<device>/<name>.csv``."""
    return folder / device_slug(provenance) / f"{name}.csv"


def write_csv(path: Path, rows: Sequence[Mapping[str, object]], provenance: Provenance, key: Sequence[str]) -> None:
    """Merge ``rows`` into the CSV at ``path``, atomically.

    A row already there with the same values under ``key`` is replaced, others stay, each with its own provenance.

    Raises:
        ValueError: if the file exists and lacks one of the ``key`` columns.
    """
    stamped = [{**row, **asdict(provenance)} for row in rows]
    fresh = [{name: _cell(value) for name, value in row.items()} for row in stamped]
    kept = _read_with(path, key) if path.exists() else []
    replaced = {tuple(row[name] for name in key) for row in fresh}
    merged = [row for row in kept if tuple(row[name] for name in key) not in replaced] + fresh
    columns = list(dict.fromkeys(name for row in [*fresh, *kept] for name in row))
    with atomic_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(merged)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read_csv(path: str | Path) -> list[dict[str, str]]:
    """The rows of a CSV file, as text."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _read_with(path: Path, key: Sequence[str]) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [name for name in key if name not in (reader.fieldnames or [])]
        if missing:
            raise ValueError(
                f"{path} must have the columns {', '.join(key)} to be updated, {', '.join(missing)} missing; "
                "choose another --output or move the file away."
            )
        return list(reader)
