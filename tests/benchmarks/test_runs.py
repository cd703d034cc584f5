"""Scripts that train and measure models run, in a few steps; failures and killed processes end no
other run.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import recipes, recipes_table
from benchmarks.runs import run_all, take_named
from tests.recipes.small import small_collection, tiny_masked_lm
from tilefold.bench.results import read_csv


def double(job: int) -> dict[str, Any]:
    if job == 0:
        raise ValueError("nothing to double")
    if job < 0:
        os._exit(3)
    return {"value": 2 * job, "process": os.getpid()}


@pytest.mark.parametrize("processes", [1, 2])
def test_failed_and_killed_processes_leave_the_others(
    processes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # so that what is set is taken back
    found = {job: (row, error) for job, row, error in run_all([3, 0, 4], double, processes)}
    assert found.keys() == {3, 0, 4} and found[0] == (None, "ValueError: nothing to double")
    assert all(
        row is not None and row["value"] == 2 * job for job, (row, _) in found.items() if job
    )
    assert all(
        (row["process"] == os.getpid()) == (processes == 1)
        for row, _ in found.values()
        if row is not None
    )
    if processes > 1:
        ((job, row, error),) = run_all([-1], double, processes)
        assert (job, row) == (-1, None) and error.startswith("BrokenProcessPool")


def test_named_values_are_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    options = argparse.Namespace(data=["a=b=c", "d=e"], base=[])
    take_named(parser, options, ("data", "base"))
    assert (options.data, options.base) == ({"a": "b=c", "d": "e"}, {})
    with pytest.raises(SystemExit):
        take_named(parser, argparse.Namespace(data=["a="]), ["data"])
    assert "--data must be NAME=VALUE" in capsys.readouterr().err


def test_recipes_are_measured_twice_and_a_failure_is_told(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    collection = small_collection()
    collection.save_beir(tmp_path / "small")
    model = tiny_masked_lm(tmp_path / "tiny", collection)
    names = [
        "splade-v2",
        "splade-v2;learning_rate=1e-3",
        "splade-pp;batch_size=4",
        "splade-doc;document.layers=9",
    ]
    arguments = ["--data", f"small={tmp_path / 'small'}", "--base", f"small={model}"]
    arguments += ["--teacher", "none", "--steps", "1"]
    places = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "results")]
    assert recipes.main([*arguments, *places, "--max-length", "24", "--recipe", *names]) == 1
    told = capsys.readouterr().out.splitlines()
    assert sum(", start: nDCG@10" in line for line in told) == 1  # three recipes share it
    assert sum("layers: must not exceed" in line for line in told) == 2
    (file,) = (tmp_path / "results").rglob("recipes.csv")
    rows = {row["recipe"]: row for row in read_csv(file)}
    assert list(rows) == ["splade-pp;batch_size=4", "splade-v2", "splade-v2;learning_rate=1e-3"]
    assert rows["splade-pp;batch_size=4"]["command"] == (
        "tilefold train --recipe splade-pp --data small --output MODEL --steps 1 --max-length 24 "
        "--seed 0 --model tiny "
        "--negatives small-scores.parquet --set batch_size=4"
    )
    measured = ("start_nDCG@10", "document_terms", "search_ms")
    assert all(float(row[name]) for row in rows.values() for name in measured)
    assert recipes_table.main([str(file), "--data", "small"]) == 0
    assert "| `splade-v2` | 1, 1 | " in capsys.readouterr().out


def test_all_leaves_out_what_has_no_packaged_model() -> None:
    options = argparse.Namespace(recipe=["all"], base={})
    assert "causal-splade" not in recipes.chosen(options) and "splade-v3" in recipes.chosen(options)
    assert "causal-splade" in recipes.chosen(
        argparse.Namespace(recipe=["all"], base={"causal-lm": "folder"}),
    )
