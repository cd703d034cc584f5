"""Worlds of several processes: gloo on the CPU everywhere, NCCL where there are two GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def worlds() -> Iterator[dict[tuple[int, str], Ranks]]:
    """The worlds that this session has made, closed at its end."""
    made: dict[tuple[int, str], Ranks] = {}
    yield made
    for world in made.values():
        world.close()


@pytest.fixture(params=[pytest.param("cpu", id="gloo"), pytest.param("cuda", id="nccl", marks=pytest.mark.gpu)])
def ranks(request: pytest.FixtureRequest, worlds: dict[tuple[int, str], Ranks]) -> Ranks:
    """Three ranks on the CPU, among which little divides evenly, or two GPUs."""
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    size = 2 if request.param == "cuda" else 3
    return worlds.setdefault((size, request.param), Ranks(size, request.param))


@pytest.fixture
def two_gpus(worlds: dict[tuple[int, str], Ranks]) -> Ranks:
    """Two ranks with a GPU each; for tests marked ``gpu``."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return worlds.setdefault((2, "cuda"), Ranks(2, "cuda"))


@pytest.fixture
def two_ranks(worlds: dict[tuple[int, str], Ranks]) -> Ranks:
    """Two ranks on the CPU."""
    return worlds.setdefault((2, "cpu"), Ranks(2, "cpu"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a stock SparseEncoder with a tiny BERT, whose decoder is tied to its word embeddings."""
    return _save_tiny("bert", tmp_path_factory)


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a tiny ModernBERT whose decoder has a weight of its own."""
    return _save_tiny("modernbert-untied", tmp_path_factory)


def _save_tiny(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.distributed.models import save_tiny_splade

    folder = tmp_path_factory.mktemp(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what saving a model warns of is another project's business
        save_tiny_splade(kind, folder)
    return folder
