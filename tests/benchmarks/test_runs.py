"""Tests of the scripts that train and measure recipes, with few steps."""

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
    """Double a positive number, raise for 0, and kill the process for a negative one."""
    if job == 0:
        raise ValueError("nothing to double")
    if job < 0:
        os._exit(3)
    return {"value": 2 * job, "process": os.getpid()}


@pytest.fixture
def restored_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment variables that ``run_all`` sets."""
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))


@pytest.mark.usefixtures("restored_variables")
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_job_that_fails_ends_no_other_job(processes: int) -> None:
    results = {job: (row, error) for job, row, error in run_all([3, 0, 4], double, processes)}
    assert results.keys() == {3, 0, 4}
    assert results[0] == (None, "ValueError: nothing to double")
    for job in (3, 4):
        row, _ = results[job]
        assert row is not None
        assert row["value"] == 2 * job
        in_this_process = row["process"] == os.getpid()
        assert in_this_process == (processes == 1)


@pytest.mark.slow  # starts two interpreters
@pytest.mark.usefixtures("restored_variables")
def test_a_job_whose_process_is_killed_has_an_error() -> None:
    ((job, row, error),) = run_all([-1], double, 2)
    assert job == -1
    assert row is None
    assert error.startswith("BrokenProcessPool")


def test_named_values_are_split_at_the_first_equals_sign() -> None:
    options = argparse.Namespace(data=["a=b=c", "d=e"], base=[])
    take_named(argparse.ArgumentParser(), options, ("data", "base"))
    assert options.data == {"a": "b=c", "d": "e"}
    assert options.base == {}


def test_a_name_without_a_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    with pytest.raises(SystemExit):
        take_named(parser, argparse.Namespace(data=["a="]), ["data"])
    assert "--data must be NAME=VALUE" in capsys.readouterr().err


def test_recipes_are_measured_before_and_after_training_and_failures_are_reported(
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
    arguments += ["--teacher", "none", "--steps", "1", "--max-length", "24"]
    arguments += ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "results")]
    assert recipes.main([*arguments, "--recipe", *names]) == 1
    printed = capsys.readouterr().out
    # three recipes share the model that they start from
    assert printed.count(", start: nDCG@10") == 1
    assert printed.count("layers: must not exceed") == 2
    (file,) = (tmp_path / "results").rglob("recipes.csv")
    rows = {row["recipe"]: row for row in read_csv(file)}
    assert list(rows) == ["splade-pp;batch_size=4", "splade-v2", "splade-v2;learning_rate=1e-3"]
    assert rows["splade-pp;batch_size=4"]["command"] == (
        "tilefold train --recipe splade-pp --data small --output MODEL --steps 1 --max-length 24 "
        "--seed 0 --model tiny --negatives small-scores.parquet --set batch_size=4"
    )
    for row in rows.values():
        for column in ("start_nDCG@10", "document_terms", "search_ms"):
            assert float(row[column]) > 0
    assert recipes_table.main([str(file), "--data", "small"]) == 0
    assert "| `splade-v2` | 1, 1 | " in capsys.readouterr().out


def test_all_means_recipes_with_a_packaged_model() -> None:
    names = recipes.chosen(argparse.Namespace(recipe=["all"], base={}))
    assert "splade-v3" in names
    assert "causal-splade" not in names


def test_all_includes_recipes_whose_model_is_given() -> None:
    options = argparse.Namespace(recipe=["all"], base={"causal-lm": "folder"})
    assert "causal-splade" in recipes.chosen(options)
