"""What training runs leave in their folders, and functions that interrupt or record them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tilefold.recipes import train
from tilefold.retrieval.data.collection import Collection


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in all files below a folder by name."""
    weights: dict[str, torch.Tensor] = {}
    for file in folder.rglob("model.safetensors"):
        weights.update(load_file(file))
    return weights


def assert_equal_weights(folder: Path, expected_folder: Path) -> None:
    """Check that two folders have the same weights bit by bit."""
    weights = read_weights(folder)
    expected = read_weights(expected_folder)
    assert weights.keys() == expected.keys()
    unequal = [name for name in weights if not torch.equal(weights[name], expected[name])]
    assert unequal == []


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a model."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def read_log(folder: Path) -> list[dict[str, float]]:
    """Return the rows of the log of a run."""
    lines = (folder / "training_log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def logged_steps(folder: Path) -> list[float]:
    """Return the steps that a run logged."""
    return [row["step"] for row in read_log(folder)]


class StepRecorder:
    """Progress function that records the steps of a run."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, step: int, steps: int, loss: float | None) -> None:
        self.steps.append(step)


def stop_at(last_step: int) -> Any:
    """Return a progress function that interrupts a run after a step."""

    def progress(step: int, steps: int, loss: float | None) -> None:
        if step == last_step:
            raise KeyboardInterrupt

    return progress


def train_until(last_step: int, recipe: Any, collection: Collection, folder: Path) -> None:
    """Train, and interrupt the run after a step."""
    with pytest.raises(KeyboardInterrupt):
        train(recipe, collection, folder, progress=stop_at(last_step))
