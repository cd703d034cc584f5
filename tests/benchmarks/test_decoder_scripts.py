"""The scripts that make models without pretrained weights run, in two steps, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import causal_lm, masked_lm, multilingual
from tests.recipes.small import small_collection
from tests.recipes.tiny import wordpiece
from tilefold.bench.results import read_csv
from tilefold.recipes import get_recipe
from tilefold.recipes.decoders import causal_splade
from tilefold.recipes.lsr import load_base_model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "small"
    small_collection().save_beir(folder)
    return folder


def test_a_causal_model_is_made_adapted_and_read_in_every_way(data: Path, tmp_path: Path) -> None:
    sizes = ["--steps", "2", "--adaptation-steps", "2", "--batch-size", "2", "--length", "16", "--layers", "1"]
    assert causal_lm.main(["--data", str(data), "--output", str(tmp_path), "--device", "cpu", *sizes]) == 0
    model = causal_splade(tmp_path / "adapted", "echo", max_length=32, device="cpu")
    assert (model.encode(["read zip archives"], convert_to_sparse_tensor=False) > 0).any()


def test_a_modernbert_is_made_and_read_with_a_small_scale(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--steps", "2", "--batch-size", "2", "--length", "16", "--layers", "1", "--device", "cpu"]
    assert masked_lm.main(["--data", str(data), "--output", str(tmp_path / "m"), *sizes]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["loss"] > 0 and 0 < said["share_above_0"] < 1 and said["terms_above_0"] > 16
    recipe = get_recipe("splade-v2", base_model=str(tmp_path / "m"), max_length=32)
    model = load_base_model(recipe, [])
    assert model[1].logit_scale == 1 / 16
    assert (model.encode(["read zip archives"], convert_to_sparse_tensor=False) > 0).any()


@pytest.fixture(scope="module")
def multilingual_arguments(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    collection = small_collection()
    tokenizer = wordpiece([*collection.contents().values(), *collection.queries.values()])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(str(folder))
    sizes = ["--width", "64", "--layers", "1", "--heads", "2", "--max-length", "32", "--batch-size", "4"]
    return ["--tokenizer", str(folder), "--data", str(data), "--split", "test", "--device", "cpu", *sizes]


def test_a_model_from_nothing_is_measured_before_and_after(
    multilingual_arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ["--steps", "2", "--warm-up-steps", "1", "--output", str(tmp_path / "results")]
    assert multilingual.main([*multilingual_arguments, *steps]) in (0, 1)  # two steps need not help
    printed = capsys.readouterr().out
    assert all(f"{phase} nDCG@10" in printed for phase in ("start", "warm-up", "trained"))
    (file,) = (tmp_path / "results").rglob("multilingual.csv")
    assert all(row["command"].endswith("--steps 2 --warm-up-steps 1") for row in read_csv(file))
    assert [(row["phase"], row["steps"]) for row in read_csv(file)] == [
        ("start", "0"),
        ("warm-up", "0"),
        ("trained", "2"),
    ]


def test_training_keeps_the_time_that_it_is_given(
    multilingual_arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(multilingual, "TIMED_STEPS", 5)
    monkeypatch.setattr(multilingual, "UNTIMED_STEPS", 2)
    assert multilingual.main([*multilingual_arguments, "--epochs", "3", "--seconds", "600"]) in (0, 1)
    printed = capsys.readouterr().out
    assert "ms a step: 9 of 9 steps fit into" in printed and ", 9 steps, " in printed
    with pytest.raises(ValueError, match="--seconds: expected time for a step of"):
        multilingual.main([*multilingual_arguments, "--seconds", "0.1"])
    with pytest.raises(SystemExit):
        multilingual.main([*multilingual_arguments, "--seconds", "9", "--steps", "1"])
