"""``tilefold mine`` draws from every kind of retriever what the Python functions draw, and says what made the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.program import Outcome, run_cli
from tests.recipes.small import small_collection
from tilefold import retrieval as r
from tilefold.retrieval.mining import Window, mine_negatives
from tilefold.retrieval.provenance import texts_digest

Call = Callable[..., Outcome]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, masked_lm: str) -> Path:
    """A collection, an untrained model with its vectors, and a BM25 index with its run of the training queries."""
    folder = tmp_path_factory.mktemp("mine")
    small_collection().save_beir(folder / "data")
    data = ("--data", folder / "data")
    for step in (
        ("train", *data, "--model", masked_lm, "--output", folder / "model", "--steps", "0"),
        ("encode", "--model", folder / "model", *data, "--output", folder / "vectors"),
        ("index", "--backend", "bm25", *data, "--output", folder / "bm25"),
        ("evaluate", *data, "--index", folder / "bm25", "--split", "train", "--save-run", folder / "bm25.trec"),
    ):
        assert run_cli(*step) == 0, step
    return folder


def measured(outcome: Outcome) -> Any:
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_vectors_are_mined_as_by_the_python_functions_with_what_made_them(call: Call, work: Path) -> None:
    output, collection = work / "negatives.parquet", small_collection()
    place = ("--data", work / "data", "--vectors", work / "vectors", "--model", work / "model", "--seed", "3")
    ranks = ("--ranks", "1-4", "--per-query", "2", "--ranks", "1-16", "--per-query", "3")
    found = measured(call("mine", *place, *ranks, "--output", output, "--json"))
    assert (found["queries"], found["relevant"], found["negatives"], found["queries_short"]) == (12, 12, 60, 0)
    from tilefold.cli._models import load_encoder

    index = r.build_index(r.read_vectors(work / "vectors"))
    queries = r.encode_queries(load_encoder(str(work / "model")), collection.split_queries("train"))
    run = r.hits_to_run(queries, index.search(queries, 16))
    expected = mine_negatives(run.items(), collection, "train", [Window(1, 4, 2), Window(1, 16, 3)], seed=3).rows({})
    rows = r.read_training_rows(output)
    assert [group.documents for group in rows.groups()] == [group.documents for group in expected.groups()]
    np.testing.assert_array_equal(rows.rank, expected.rank)
    rows.check_collection(collection)
    assert rows.provenance == index.provenance
    assert rows.made_by["queries_sha256"] == texts_digest(collection.split_queries("train"))
    assert rows.made_by["windows"] == [[1, 4, 2], [1, 16, 3]] and rows.made_by["seed"] == 3
    assert rows.made_by["retriever"] == f"--vectors {work / 'vectors'}"


def test_a_run_a_bm25_index_and_a_dense_model_are_mined(call: Call, work: Path, tmp_path: Path) -> None:
    collection, output = small_collection(), tmp_path / "negatives.parquet"
    data = ("--data", work / "data", "--output", output, "--ranks", "1-3", "--per-query", "2")
    every = {}
    for name, source in (("run", work / "bm25.trec"), ("index", work / "bm25"), ("model", "minilm")):
        outcome = call("mine", *data, f"--{name}", source)
        if name == "model":  # the words of two documents are in no other: nothing to draw for most queries
            assert outcome.code == 0 and "24 negatives for 12 queries" in outcome.out, outcome.err
            assert f"next: tilefold score {output}" in outcome.out
        else:
            assert outcome.code == 0 and "queries have no negative and are left out" in outcome.err, outcome.err
        every[name] = [(group.query, group.documents) for group in r.read_training_rows(output).groups()]
    assert every["run"] == every["index"]
    for query, documents in every["model"]:
        assert set(documents) & set(collection.qrels["train"][query]) == {documents[0]}


def test_possible_false_negatives_are_left_out_by_option(call: Call, work: Path, tmp_path: Path) -> None:
    command = ("mine", "--data", work / "data", "--model", "minilm", "--output", tmp_path / "negatives.parquet")
    found = measured(call(*command, "--max-score-share", "0.6", "--json"))
    rows = r.read_training_rows(tmp_path / "negatives.parquet")
    assert found["left_out_by_score"] > 0 and rows.made_by["max_score_share"] == 0.6
    for group in rows.groups():
        assert group.retrieved[~group.relevant].max() <= 0.6 * group.retrieved[group.relevant].max()
    refused = call(*command, "--margin", "5")
    assert refused.code == 1 and "no negative was found for any query" in refused.err
