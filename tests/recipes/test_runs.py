"""What training says and keeps: checkpoints by time, settings that change nothing, other processes, losses."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.retrieval.test_retrieval_interruptions import HOLD
from tilefold._files import InUseError
from tilefold.recipes import TrainingError
from tilefold.recipes.loading import newest_step
from tilefold.recipes.splade import SpladeRecipe, train
from tilefold.retrieval.collection import Collection


@pytest.fixture
def recipe(masked_lm: str) -> SpladeRecipe:
    return SpladeRecipe(base_model=masked_lm, max_steps=4, batch_size=4, max_length=16, save_steps=100, bf16=False)


def stop_at(wanted: int) -> Any:
    def progress(step: int, steps: int, loss: float | None) -> None:
        if step == wanted:
            raise KeyboardInterrupt

    return progress


def test_checkpoints_are_made_by_time_and_what_changes_no_model_may_change(
    recipe: SpladeRecipe, collection: Collection, tmp_path: Path
) -> None:
    often = dataclasses.replace(recipe, save_minutes=0.0)
    with pytest.raises(KeyboardInterrupt):
        train(often, collection, tmp_path / "m", progress=stop_at(3))
    assert newest_step(tmp_path / "m") == 2
    with pytest.raises(ValueError, match=r"differs in learning_rate\); .* with resume=False"):
        train(dataclasses.replace(recipe, learning_rate=1e-3), collection, tmp_path / "m")
    resumed = train(dataclasses.replace(recipe, save_steps=7), collection, tmp_path / "m")
    assert (resumed.resumed_from, resumed.steps) == (2, 4)
    assert train(recipe, collection, tmp_path / "m").reused
    assert newest_step(tmp_path / "m") is None


def test_settings_may_change_until_there_is_a_checkpoint(
    recipe: SpladeRecipe, collection: Collection, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(recipe, collection, tmp_path / "m", progress=stop_at(1))
    result = train(dataclasses.replace(recipe, max_steps=1), collection, tmp_path / "m")
    assert (result.steps, result.resumed_from) == (1, 0)
    assert not (tmp_path / "m.training").exists()


def test_a_run_that_another_process_trains_is_refused(
    recipe: SpladeRecipe, collection: Collection, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "m.training")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(InUseError, match="another process is writing there"):
            train(recipe, collection, tmp_path / "m")
        process.kill()


def test_a_loss_that_is_not_finite_stops_the_training(
    recipe: SpladeRecipe, collection: Collection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers.sparse_encoder.losses import SpladeLoss

    forward = SpladeLoss.forward

    def diverging(self: Any, *args: Any, **options: Any) -> Any:
        return {name: loss * math.nan for name, loss in forward(self, *args, **options).items()}

    monkeypatch.setattr(SpladeLoss, "forward", diverging)
    with pytest.raises(TrainingError, match="the loss is nan after 1 steps: the training has diverged"):
        train(recipe, collection, tmp_path / "m")


def test_an_exploding_loss_is_seen_and_a_batch_needs_negatives(
    recipe: SpladeRecipe, collection: Collection, tmp_path: Path
) -> None:
    good = train(dataclasses.replace(recipe, learning_rate=1e-6), collection, tmp_path / "good")
    assert good.first_ranking_loss is not None and not good.exploded
    assert train(dataclasses.replace(recipe, learning_rate=10.0, max_steps=12), collection, tmp_path / "bad").exploded
    alone = dataclasses.replace(collection, qrels={"train": {"q0": {"d0": 1}}})
    with pytest.raises(ValueError, match="has a single pair"):
        train(recipe, alone, tmp_path / "alone")
