"""The scripts that make models without pretrained weights run, in two steps, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import causal_lm, multilingual
from tests.recipes.small import small_collection
from tests.recipes.tiny import wordpiece
from tilefold.recipes.decoders import causal_splade


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


def test_a_model_from_nothing_is_measured_before_and_after(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collection = small_collection()
    tokenizer = wordpiece([*collection.contents().values(), *collection.queries.values()])
    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    sizes = ["--width", "64", "--layers", "1", "--heads", "2", "--max-length", "32", "--batch-size", "4"]
    steps = ["--steps", "2", "--warm-up-steps", "1", "--split", "test", "--device", "cpu"]
    where = ["--tokenizer", str(tmp_path / "tokenizer"), "--data", str(data), "--output", str(tmp_path / "results")]
    assert multilingual.main([*where, *sizes, *steps]) in (0, 1)  # two steps need not help
    printed = capsys.readouterr().out
    assert all(f"{phase} nDCG@10" in printed for phase in ("start", "warm-up", "trained"))
    assert "multilingual.csv" in printed
