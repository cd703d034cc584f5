"""Worlds of several processes: gloo on the CPU everywhere, NCCL where there are two GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import TEXTS, VOCABULARY, Ranks
from tests.recipes.plots import trainings_without_plots  # noqa: F401 - an autouse fixture
from tests.recipes.small import tiny_masked_lm

World = Callable[[int, str], Ranks]


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """The worlds of this session by their number of ranks and kind of device."""
    with ExitStack() as stack:

        @cache
        def world(size: int, device: str) -> Ranks:
            if device == "cuda" and torch.cuda.device_count() < size:
                pytest.skip("needs two GPUs")
            ranks = Ranks(size, device)
            stack.callback(ranks.close)
            return ranks

        yield world


@pytest.fixture(
    params=[(3, "cpu"), pytest.param((2, "cuda"), marks=pytest.mark.gpu)],
    ids=["gloo", "nccl"],
)
def ranks(request: pytest.FixtureRequest, world: World) -> Ranks:
    """Three ranks on the CPU, among which little divides evenly, or two GPUs."""
    return world(*request.param)


@pytest.fixture
def two_gpus(world: World) -> Ranks:
    """For tests marked ``gpu``."""
    return world(2, "cuda")


@pytest.fixture
def two_ranks(world: World) -> Ranks:
    return world(2, "cpu")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT, whose decoder is tied to its word embeddings."""
    return tiny_masked_lm(
        tmp_path_factory.mktemp("bert"),
        TEXTS,
        layers=2,
        bias=0.1,
        vocab_size=VOCABULARY,
    )


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny ModernBERT whose decoder has a weight of its own."""
    options = {"layers": 2, "bias": 0.1, "vocab_size": VOCABULARY, "tie_word_embeddings": False}
    return tiny_masked_lm(tmp_path_factory.mktemp("untied"), TEXTS, "modernbert", **options)
