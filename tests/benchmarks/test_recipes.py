"""The runner of recipes: starts are measured once, failures end no other run, rows carry their command."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks import recipes, recipes_table
from tests.recipes.small import small_collection
from tests.recipes.tiny import tiny_masked_lm
from tilefold.bench.results import read_csv


def test_recipes_are_measured_before_and_after_and_a_failure_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collection = small_collection()
    collection.save_beir(tmp_path / "small")
    model = tiny_masked_lm(tmp_path / "tiny", collection)
    names = ["splade-v2", "splade-v2;learning_rate=1e-3", "splade-pp;batch_size=4", "splade-doc;document.layers=9"]
    arguments = [
        "--data",
        f"small={tmp_path / 'small'}",
        "--base",
        f"small={model}",
        "--teacher",
        "none",
        "--steps",
        "1",
    ]
    places = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "results")]
    assert recipes.main([*arguments, *places, "--max-length", "24", "--recipe", *names]) == 1
    told = capsys.readouterr().out.splitlines()
    assert sum(", start: nDCG@10" in line for line in told) == 1  # three recipes share it
    assert sum("layers must not exceed" in line for line in told) == 2
    (file,) = (tmp_path / "results").rglob("recipes.csv")
    rows = {row["recipe"]: row for row in read_csv(file)}
    assert list(rows) == ["splade-pp;batch_size=4", "splade-v2", "splade-v2;learning_rate=1e-3"]
    first = rows["splade-pp;batch_size=4"]
    assert first["command"] == (
        "tilefold train --recipe splade-pp --data small --output MODEL --steps 1 --max-length 24 --seed 0 --model tiny "
        "--negatives small-scores.parquet --set batch_size=4"
    )
    assert all(
        float(row["start_nDCG@10"]) and float(row["document_terms"]) and row["search_ms"] for row in rows.values()
    )
    assert recipes_table.main([str(file), "--data", "small"]) == 0
    assert "| `splade-v2` | 1, 1 | " in capsys.readouterr().out


def test_all_leaves_out_what_has_no_packaged_model() -> None:
    options = argparse.Namespace(recipe=["all"], base={})
    assert "causal-splade" not in recipes.chosen(options) and "splade-v3" in recipes.chosen(options)
    assert "causal-splade" in recipes.chosen(argparse.Namespace(recipe=["all"], base={"causal-lm": "folder"}))
