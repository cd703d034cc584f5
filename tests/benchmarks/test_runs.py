"""Scripts that train and measure models run, in a few steps; failures and killed processes end no
other run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    causal_lm,
    feedback,
    masked_lm,
    multilingual,
    quality_table,
    recipes,
    recipes_table,
)
from benchmarks.runs import run_all, take_named
from tests.recipes.small import causal_splade, small_collection, tiny_masked_lm, wordpiece
from tilefold.bench.results import read_csv
from tilefold.cli import main
from tilefold.recipes import get_recipe


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
    assert sum("layers must not exceed" in line for line in told) == 2
    (file,) = (tmp_path / "results").rglob("recipes.csv")
    rows = {row["recipe"]: row for row in read_csv(file)}
    assert list(rows) == ["splade-pp;batch_size=4", "splade-v2", "splade-v2;learning_rate=1e-3"]
    assert rows["splade-pp;batch_size=4"]["command"] == (
        "tilefold train --recipe splade-pp --data small --output MODEL --steps 1 --max-length 24 --seed 0 --model tiny "
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


def test_every_row_is_measured_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "WEIGHTS", (0.5,))
    rows = feedback.measure(small_collection(), "test", "train", 64)
    assert len({(row["retriever"], row["method"], row["place"]) for row in rows}) == len(rows) == 28
    for row in rows:
        assert (row["queries"], row["tuned_on"], row["ndcg10"], row["over_plain"]) == (
            4,
            12,
            1.0,
            0.0,
        )
        assert math.isnan(row["weight_of_other"]) == (row["place"] == "none")


def test_the_commands_of_the_quality_table_run(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def here(line: str, folder: Path) -> Any:
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as left:
            main(shlex.split(line))
        out, err = capsys.readouterr()
        assert left.value.code == 0, err
        return json.loads(out) if "--json" in line else None

    monkeypatch.setattr(quality_table, "tilefold", here)
    whole = small_collection()
    taken = quality_table.sample(whole, "test", 4, 12)
    assert taken.documents.keys() < whole.documents.keys() and len(taken.documents) == 12
    assert all(
        whole.qrels["test"][query] == grades for query, grades in taken.qrels["test"].items()
    )
    rows = quality_table.measure(taken, "test", "minilm", 16, tmp_path / "w")
    assert len({row["row"] for row in rows}) == len(rows) == 13
    assert [row["row"] for row in rows if row["ndcg10_p_holm"] == ""] == ["bm25"]
    assert all(0 <= row["ndcg10_low"] <= row["ndcg10"] <= row["ndcg10_high"] <= 1 for row in rows)


def test_a_difference_is_paired() -> None:
    table = {"a": {"nDCG@10": 1.0}, "b": {"nDCG@10": 0.5}}
    beside = {"a": {"nDCG@10": 0.5}, "b": {"nDCG@10": 0.4}}
    assert feedback.difference("x", table, beside) == pytest.approx({"x": 0.3, "x_se": 0.2})


def test_a_causal_model_is_made_adapted_and_read_in_every_way(beir: Path, tmp_path: Path) -> None:
    sizes = [
        "--steps",
        "2",
        "--adaptation-steps",
        "2",
        "--batch-size",
        "2",
        "--length",
        "16",
        "--layers",
        "1",
    ]
    assert (
        causal_lm.main(["--data", str(beir), "--output", str(tmp_path), "--device", "cpu", *sizes])
        == 0
    )
    model = causal_splade(tmp_path / "adapted", "echo", max_length=32, device="cpu")
    assert (model.encode(["read zip archives"], convert_to_sparse_tensor=False) > 0).any()


def test_a_modernbert_is_made_and_read_scaled(
    beir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = [
        "--steps",
        "2",
        "--batch-size",
        "2",
        "--length",
        "16",
        "--layers",
        "1",
        "--device",
        "cpu",
    ]
    assert masked_lm.main(["--data", str(beir), "--output", str(tmp_path / "m"), *sizes]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["loss"] > 0 and 0 < said["share_above_0"] < 1 and said["terms_above_0"] > 16
    model = get_recipe("splade-v2", base_model=str(tmp_path / "m"), max_length=32).start([])
    assert model[1].logit_scale == 1 / 16
    assert (model.encode(["read zip archives"], convert_to_sparse_tensor=False) > 0).any()


@pytest.fixture(scope="module")
def multilingual_arguments(beir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    collection = small_collection()
    tokenizer = wordpiece([*collection.contents().values(), *collection.queries.values()])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(str(folder))
    sizes = [
        "--width",
        "64",
        "--layers",
        "1",
        "--heads",
        "2",
        "--max-length",
        "32",
        "--batch-size",
        "4",
    ]
    return [
        "--tokenizer",
        str(folder),
        "--data",
        str(beir),
        "--split",
        "test",
        "--device",
        "cpu",
        *sizes,
    ]


def test_a_model_from_nothing_is_measured_before_and_after(
    multilingual_arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = ["--steps", "2", "--warm-up-steps", "1", "--output", str(tmp_path / "results")]
    assert multilingual.main([*multilingual_arguments, *steps]) in (0, 1)  # two steps need not help
    printed = capsys.readouterr().out
    assert all(f"{phase} nDCG@10" in printed for phase in ("start", "warm-up", "trained"))
    (file,) = (tmp_path / "results").rglob("multilingual.csv")
    assert all(row["command"].endswith("--steps 2 --warm-up-steps 1") for row in read_csv(file))
    phases = [(row["phase"], row["steps"]) for row in read_csv(file)]
    assert phases == [("start", "0"), ("warm-up", "0"), ("trained", "2")]


def test_training_keeps_the_time_that_it_is_given(
    multilingual_arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(multilingual, "TIMED_STEPS", 5)
    monkeypatch.setattr(multilingual, "UNTIMED_STEPS", 2)
    assert multilingual.main([*multilingual_arguments, "--epochs", "3", "--seconds", "600"]) in (
        0,
        1,
    )
    printed = capsys.readouterr().out
    assert "ms a step: 9 of 9 steps fit into" in printed and ", 9 steps, " in printed
    with pytest.raises(ValueError, match="--seconds: expected time for a step of"):
        multilingual.main([*multilingual_arguments, "--seconds", "0.1"])
    with pytest.raises(SystemExit):
        multilingual.main([*multilingual_arguments, "--seconds", "9", "--steps", "1"])
