"""Releases of dependencies that are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sentence_transformers
import torch

from tests import programs
from tests.processes import environment
from tests.refusals import refused
from tilefold import retrieval
from tilefold._internal.sentence_transformers import check_sentence_transformers

VECTORS_INDEX = retrieval.build_index(retrieval.SparseVectors.from_rows({"a": {1: 1.0}}, 5))


@pytest.mark.parametrize("release", ["5.1.0", "6.0.0", "6.1.0", "6.2.0rc1"])
def test_an_older_sentence_transformers_is_refused(
    release: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sentence_transformers, "__version__", release)
    message = f"needs sentence-transformers 6.2 or later, got {release}.*pip install -U"
    refused(ImportError, message, check_sentence_transformers)


@pytest.mark.parametrize("release", ["6.2.0", "6.2.1", "6.10.0", "7.0.0"])
def test_a_newer_sentence_transformers_is_accepted(
    release: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sentence_transformers, "__version__", release)
    check_sentence_transformers()


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(
            lambda model: retrieval.encode_dense(model, {"q": "a"}, kind="query"), id="encode_dense"
        ),
        pytest.param(
            lambda model: retrieval.encode_queries(model, {"q": "a"}), id="encode_queries"
        ),
        pytest.param(lambda model: retrieval.Searcher(VECTORS_INDEX, model), id="Searcher"),
    ],
)
def test_a_model_of_an_older_sentence_transformers_is_refused(
    use: Callable[[object], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = sentence_transformers.SentenceTransformer(modules=[torch.nn.Identity()], device="cpu")
    monkeypatch.setattr(sentence_transformers, "__version__", "6.1.0")
    refused(ImportError, "needs sentence-transformers 6.2 or later, got 6.1.0", use, model)


IMPORT_WITH_AN_OLDER_RELEASE = """
import importlib

import sentence_transformers

sentence_transformers.__version__ = "6.1.0"
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(module, error)
"""


def test_modules_that_need_sentence_transformers_refuse_an_older_one_at_import() -> None:
    modules = [
        "tilefold.integrations.sentence_transformers",
        "tilefold.losses.base_splade",
        "tilefold.modules.fused_pooling",
    ]
    process = programs.run(
        "-c",
        IMPORT_WITH_AN_OLDER_RELEASE.format(modules=modules),
        env=environment(),
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert len(lines) == len(modules)
    for module, line in zip(modules, lines, strict=True):
        assert line.startswith(f"{module} ")
        assert "needs sentence-transformers 6.2 or later, got 6.1.0" in line
