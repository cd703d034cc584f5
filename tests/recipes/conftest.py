from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.program import run_cli
from tests.recipes.plots import trainings_without_plots  # noqa: F401 - an autouse fixture
from tests.recipes.small import (
    small_collection,
    small_masked_lm,
    tiny_dense,
    tiny_masked_lm,
    tiny_reranker,
)
from tilefold.retrieval.data.collection import Collection


@pytest.fixture(scope="session")
def collection() -> Collection:
    return small_collection()


@pytest.fixture(scope="session")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_masked_lm(tmp_path_factory.mktemp("masked-lm")))


@pytest.fixture(scope="session")
def teachers(collection: Collection, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of two cross-encoders and a dense model, of random weights: their parent, and a tiny
    masked LM.
    """
    folder = tmp_path_factory.mktemp("teachers")
    masked_lm = tiny_masked_lm(folder / "masked-lm", collection)
    for seed, name in enumerate(("reranker", "other-reranker")):
        tiny_reranker(folder / name, masked_lm, seed)
    tiny_dense(folder / "dense", masked_lm)
    return folder, masked_lm


@pytest.fixture(scope="session")
def scores(
    collection: Collection,
    teachers: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """What ``tilefold mine`` and ``tilefold score`` leave with two cross-encoders and a dense
    model; that mines too.
    """
    folder, (models, _) = tmp_path_factory.mktemp("scores"), teachers
    collection.save_beir(folder / "small")
    data = ("--data", folder / "small")
    mined = (
        "--model",
        models / "dense",
        "--per-query",
        "9",
        "--output",
        folder / "negatives.parquet",
    )
    assert run_cli("mine", *data, *mined) == 0
    named = [
        word
        for name in ("reranker", "other-reranker", "dense")
        for word in ("--teacher", models / name)
    ]
    output = folder / "scores.parquet"
    assert run_cli("score", folder / "negatives.parquet", *data, *named, "--output", output) == 0
    return output
