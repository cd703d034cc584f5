"""A recipe trains in one process on one GPU, and says so to who has more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tilefold.recipes import _training
from tilefold.recipes.splade import SpladeRecipe, train
from tilefold.retrieval.collection import Collection


@pytest.fixture
def recipe(masked_lm: str) -> SpladeRecipe:
    return SpladeRecipe(base_model=masked_lm, max_steps=2, batch_size=4, max_length=16, save_steps=1, bf16=False)


@pytest.mark.parametrize("fused", [True, False])
def test_one_of_two_gpus_is_used_and_the_other_is_named(
    recipe: SpladeRecipe, fused: bool, collection: Collection, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """On the CPU, where the Trainer takes as many devices as torch counts GPUs, unless it is told to use the CPU."""
    settings = _training._settings
    monkeypatch.setattr(_training, "_settings", lambda job: settings(job) | {"use_cpu": False})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    class Wrapped(nn.DataParallel[Any]):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise AssertionError("the Trainer took DataParallel")

    monkeypatch.setattr(nn, "DataParallel", Wrapped)
    result = train(SpladeRecipe(**recipe.to_dict() | {"fused": fused}), collection, tmp_path / "model")
    assert (result.steps, result.reused) == (2, False)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("tilefold")]
    assert len(said) == 1 and "2 GPUs are visible and one is used, cuda:0" in said[0]
    assert said[0].endswith("torchrun --nproc-per-node 2 SCRIPT")


def test_a_process_of_several_is_refused_before_it_touches_a_folder(
    recipe: SpladeRecipe, collection: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"recipes train in one process, got WORLD_SIZE=2; .*docs/scale-out.md"):
        train(recipe, collection, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert train(recipe, collection, tmp_path / "model").steps == 2
