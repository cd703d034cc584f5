"""The CSV files of results: rows are replaced by key, carry their provenance, and lie in a folder of their device."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tilefold.bench import results
from tilefold.bench.runner import CSV_KEY, BenchRow

CPU = torch.device("cpu")


def test_rows_of_a_csv_are_replaced_by_key_and_others_stay(tmp_path: Path) -> None:
    stamp = results.collect(CPU)
    path = tmp_path / "device" / "lsr_head.csv"
    first = [BenchRow("lsr_head", "a", "float32", impl, forward_p50_ms=1.0).record() for impl in ("x", "y")]
    results.write_csv(path, first, stamp, CSV_KEY)
    results.write_csv(path, [BenchRow("lsr_head", "a", "float32", "y", forward_p50_ms=2.0).record()], stamp, CSV_KEY)
    with path.open(newline="") as file:
        rows = {row["impl"]: row for row in csv.DictReader(file)}
    assert {impl: row["forward_p50_ms"] for impl, row in rows.items()} == {"x": "1", "y": "2"}
    assert rows["y"]["torch"] == torch.__version__
    assert rows["y"]["commit"]
    assert [entry.name for entry in path.parent.iterdir()] == ["lsr_head.csv"], "a temporary file was left behind"


def test_a_csv_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.csv"
    path.write_text("a,b\n1,2\n")
    row = BenchRow("lsr_head", "a", "float32", "x").record()
    with pytest.raises(ValueError, match=r"notes\.csv must have the columns op, case, dtype, impl"):
        results.write_csv(path, [row], results.collect(CPU), CSV_KEY)
    assert path.read_text() == "a,b\n1,2\n"


def test_device_folders_have_plain_names() -> None:
    stamp = results.collect(CPU)
    gpu = replace(stamp, device="NVIDIA H200", cuda="13.0")
    cpu = replace(stamp, device="Intel(R) Xeon(R) CPU @ 2.20GHz", threads=2)
    assert results.device_slug(gpu) == "nvidia-h200"
    assert results.device_slug(cpu) == "cpu-intel-xeon-cpu-2-20ghz-2-threads"


def test_results_go_to_the_repository_unless_told_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert results.results_folder(None, quick=False) is None, "not inside a repository"
    (tmp_path / "benchmarks").mkdir()
    assert results.results_folder(None, quick=False) == Path("benchmarks/results")
    assert results.results_folder(None, quick=True) is None
    assert results.results_folder(tmp_path, quick=True) == tmp_path
