from __future__ import annotations

from pathlib import Path

import pytest

from tests import programs
from tests.cli.program import Call, Outcome, run_cli, run_steps
from tests.recipes.plots import trainings_without_plots  # noqa: F401 - an autouse fixture
from tests.recipes.small import small_collection, small_masked_lm
from tilefold.retrieval.data.collection import Collection


@pytest.fixture(scope="session")
def collection() -> Collection:
    return small_collection()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run the command line in this process, as its entry point does."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")

    def run(*args: str | Path) -> Outcome:
        capsys.readouterr()
        return Outcome(run_cli(*args), *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, masked_lm: str) -> Path:
    """A collection with its sparse and token vectors, their model, an index of each kind and a run;
    to be read only.
    """
    folder = tmp_path_factory.mktemp("shared")
    small_collection().save_beir(folder / "data")
    data, late = ("--data", folder / "data"), folder / "late"
    small = ("--steps", "2", "--batch-size", "4", "--dimension", "16", "--max-length", "24")
    run = ("--split", "train", "--split", "test", "--save-run", folder / "bm25.trec")
    run_steps(
        ("encode", "--model", masked_lm, *data, "--output", folder / "vectors", "--top-k", "64"),
        ("index", "--vectors", folder / "vectors", "--output", folder / "index"),
        ("index", "--backend", "bm25", *data, "--output", folder / "bm25"),
        ("evaluate", *data, "--index", folder / "bm25", *run),
        ("mine", *data, "--index", folder / "bm25", "--output", folder / "mined.parquet"),
        ("train", "--recipe", "colbert", *data, "--model", masked_lm, "--output", late, *small),
        ("encode", "--model", late, *data, "--output", folder / "tokens", "--shard-size", "10"),
        ("encode", "--model", late, *data, "--output", folder / "asked", "--queries"),
        ("encode", "--model", masked_lm, *data, "--output", folder / "queries", "--queries"),
    )
    return folder


@pytest.fixture(scope="session")
def masked_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_masked_lm(tmp_path_factory.mktemp("masked-lm")))


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory, masked_lm: str) -> Path:
    """A folder with a collection, a model trained from it, its vectors and an index, all made by
    the program.
    """
    folder = tmp_path_factory.mktemp("work")
    small_collection().save_beir(folder / "data")
    steps = (
        [
            "train",
            "--data",
            "data",
            "--model",
            masked_lm,
            "--output",
            "model",
            "--steps",
            "2",
            "--batch-size",
            "4",
        ],
        ["encode", "--model", "model", "--data", "data", "--output", "vectors", "--top-k", "64"],
        ["index", "--vectors", "vectors", "--output", "index"],
    )
    for step in steps:
        done = programs.run("-m", "tilefold.cli", *step, "--json", cwd=folder)
        assert done.returncode == 0, done.stderr
        (folder / f"{step[0]}.json").write_text(done.stdout)
        (folder / f"{step[0]}.err").write_text(done.stderr)
    return folder
