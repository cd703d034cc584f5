from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.program import Outcome, run_cli
from tests.heap import small_heap  # noqa: F401 - for all files of this folder
from tests.recipes.small import small_collection, small_masked_lm
from tilefold.retrieval.collection import Collection


@pytest.fixture(scope="session")
def collection() -> Collection:
    return small_collection()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Run the command line in this process, as its entry point does."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")

    def run(*args: str | Path) -> Outcome:
        capsys.readouterr()
        code = run_cli(*args)
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_masked_lm(tmp_path_factory.mktemp("masked-lm")))
