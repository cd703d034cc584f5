from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file

from tests import programs
from tests.processes import ROOT
from tilefold.recipes import SpladeRecipe, train
from tilefold.recipes.training_data import length_grouped_batches
from tilefold.retrieval.collection import Collection

RUN_AND_HANG = """
import sys, time
from tests.recipes.small import small_collection
from tilefold.recipes import SpladeRecipe, train
def hang(step, steps, loss):
    if step == 5:
        print("at step 5", flush=True)
        time.sleep(600)
recipe = SpladeRecipe(base_model=sys.argv[1], max_steps=6, batch_size=4, max_length=24, save_steps=2, bf16=False)
train(recipe, small_collection(), sys.argv[2], progress=hang)
"""


@pytest.fixture
def recipe(masked_lm: str) -> SpladeRecipe:
    return SpladeRecipe(base_model=masked_lm, max_steps=6, batch_size=4, max_length=24, save_steps=2, bf16=False)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def assert_equal(one: Path, other: Path) -> None:
    left, right = weights(one), weights(other)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_training_leaves_a_stock_model_that_changed_and_no_other_files(recipe, collection, tmp_path: Path) -> None:
    from sentence_transformers import SparseEncoder

    seen: list[tuple[int, int]] = []
    result = train(recipe, collection, tmp_path / "m", progress=lambda step, steps, loss: seen.append((step, steps)))
    assert (result.steps, result.reused, result.resumed_from, result.fused) == (6, False, 0, True)
    assert seen == [(step, 6) for step in range(1, 7)]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    before, after = weights(Path(recipe.base_model)), weights(tmp_path / "m")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    model = SparseEncoder(str(tmp_path / "m"), device="cpu")
    assert model.max_seq_length == 24
    assert type(model[0].model).__name__ == "BertForMaskedLM"


def test_a_killed_run_goes_on_and_ends_with_the_weights_of_an_uninterrupted_one(
    recipe, collection, tmp_path: Path
) -> None:
    command = ("-c", RUN_AND_HANG, recipe.base_model, tmp_path / "killed")
    with programs.start(*command, stdout=programs.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == "at step 5\n"
        process.kill()
    assert not (tmp_path / "killed").exists()
    half = tmp_path / "killed.training" / "checkpoint-5"  # as if it had died while writing
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    steps: list[int] = []
    result = train(recipe, collection, tmp_path / "killed", progress=lambda step, *_: steps.append(step))
    assert result.resumed_from == 4
    assert steps == [5, 6]
    train(recipe, collection, tmp_path / "whole")
    assert_equal(tmp_path / "killed", tmp_path / "whole")


def test_frozen_layers_and_embeddings_keep_their_weights_and_the_rest_learns(
    recipe, collection, tmp_path: Path
) -> None:
    train(replace(recipe, frozen_layers=1), collection, tmp_path / "m")
    before, after = weights(Path(recipe.base_model)), weights(tmp_path / "m")
    kept = {name for name in before if torch.equal(before[name], after[name])}
    frozen = {name for name in before if "embeddings" in name or ".layer.0." in name}
    assert frozen <= kept
    assert {name for name in before if ".layer.1." in name and name.endswith("dense.weight")} & kept == set()
    with pytest.raises(ValueError, match="frozen_layers must not exceed the model's 2 layers, got 3"):
        train(replace(recipe, frozen_layers=3), collection, tmp_path / "other")


def test_batches_grouped_by_length_hold_every_pair_once_and_no_text_twice() -> None:
    texts = [f"{'word ' * (7 * i % 23)}{i}" for i in range(50)]
    texts[41] = texts[3]
    dataset = Dataset.from_dict({"query": [f"q{i}" for i in range(50)], "document": texts})
    sampler = length_grouped_batches(dataset, 4, drop_last=False, generator=torch.Generator(), seed=5)
    batches = list(sampler)
    assert sorted(row for batch in batches for row in batch) == list(range(50))
    assert batches == list(sampler), "an epoch has one order, so that a killed run can go on"
    assert not any({3, 41} <= set(batch) for batch in batches)
    sampler.set_epoch(1)
    assert batches != list(sampler)
    padded = sum(len(batch) * max(len(texts[row]) for row in batch) for batch in batches)
    random = sum(4 * max(map(len, texts[start : start + 4])) for start in range(0, 50, 4))
    assert padded < 0.8 * random


def test_training_with_grouped_batches_gives_the_same_weights_again(recipe, collection, tmp_path: Path) -> None:
    grouped = replace(recipe, group_by_length=True)
    for name in ("a", "b"):
        train(grouped, collection, tmp_path / name)
    assert_equal(tmp_path / "a", tmp_path / "b")


def test_a_processor_held_to_avx2_trains_in_fp32() -> None:
    program = "from tilefold.recipes.splade import supports_bf16; print(supports_bf16())"
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


def test_a_finished_run_is_reused_and_other_settings_are_refused(recipe, collection, tmp_path: Path) -> None:
    recipe = replace(recipe, max_steps=1)
    train(recipe, collection, tmp_path / "m")
    left = tmp_path / "m.training"  # as if it had died before it cleared away its checkpoints
    left.mkdir()
    (left / "tilefold_training.json").write_text((tmp_path / "m/tilefold_training.json").read_text())
    assert train(recipe, collection, tmp_path / "m").reused
    assert not left.exists()
    with pytest.raises(FileExistsError, match="differs in seed"):
        train(replace(recipe, seed=1), collection, tmp_path / "m")
    assert not train(replace(recipe, seed=1), collection, tmp_path / "m", overwrite=True).reused


def test_a_folder_of_something_else_is_never_overwritten(recipe, collection, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="no model that tilefold trained"):
        train(recipe, collection, tmp_path, overwrite=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_checkpoints_of_other_settings_are_refused_until_a_fresh_start(recipe, collection, tmp_path: Path) -> None:
    def stop(step: int, steps: int, loss: float | None) -> None:
        if step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, collection, tmp_path / "m", progress=stop)
    other = replace(recipe, max_steps=4)
    with pytest.raises(ValueError, match=r"interrupted run with other settings.*max_steps"):
        train(other, collection, tmp_path / "m")
    assert train(other, collection, tmp_path / "m", resume=False).resumed_from == 0


def test_fused_and_plain_training_end_with_nearly_the_same_weights(recipe, collection, tmp_path: Path) -> None:
    recipe = replace(recipe, max_steps=2)
    train(recipe, collection, tmp_path / "fused")
    train(replace(recipe, fused=False), collection, tmp_path / "plain")
    fused, plain = weights(tmp_path / "fused"), weights(tmp_path / "plain")
    # Adam divides a gradient by its size: where that is rounding noise, two steps may differ by 2 * 2 * lr
    assert max((fused[name] - plain[name]).abs().max().item() for name in fused) <= 4 * recipe.learning_rate * 1.01


def test_a_collection_without_training_pairs_is_a_clear_error(recipe, collection, tmp_path: Path) -> None:
    empty = Collection("bare", collection.documents, collection.queries, {"test": collection.qrels["test"]})
    with pytest.raises(ValueError, match="'bare' has no pairs in its 'train' split"):
        train(recipe, empty, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
