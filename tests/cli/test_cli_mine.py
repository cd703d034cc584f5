"""``tilefold mine`` and ``tilefold score`` write what the Python functions give, and recipes train on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.program import Call, done, fails, measured, run_steps
from tests.inside import load_encoder
from tests.recipes.small import small_collection, tiny_masked_lm
from tests.retrieval.test_retrieval_teachers import reranker
from tilefold import retrieval as r
from tilefold.recipes import RECIPES
from tilefold.retrieval import teachers
from tilefold.retrieval.mining import FalseNegatives, Window, drop_false_negatives, mine_negatives
from tilefold.retrieval.provenance import texts_digest
from tilefold.retrieval.teachers import ensemble


def test_vectors_are_mined_as_by_python_functions(call: Call, shared: Path, masked_lm: str, tmp_path: Path) -> None:
    output, collection = tmp_path / "negatives.parquet", small_collection()
    place = ("--data", shared / "data", "--vectors", shared / "vectors", "--model", masked_lm, "--seed", "3")
    ranks = ("--ranks", "1-4", "--per-query", "2", "--ranks", "1-16", "--per-query", "3")
    found = measured(call("mine", *place, *ranks, "--output", output, "--json"))
    assert (found["queries"], found["relevant"], found["negatives"], found["queries_short"]) == (12, 12, 60, 0)
    index = r.build_index(r.read_vectors(shared / "vectors"))
    queries = r.encode_queries(load_encoder(masked_lm), collection.split_queries("train"))
    run = r.hits_to_run(queries, index.search(queries, 16))
    expected = mine_negatives(run.items(), collection, "train", [Window(1, 4, 2), Window(1, 16, 3)], seed=3).rows({})
    rows = r.read_training_rows(output)
    assert [group.documents for group in rows.groups()] == [group.documents for group in expected.groups()]
    np.testing.assert_array_equal(rows.rank, expected.rank)
    rows.check_collection(collection)
    assert rows.provenance == index.provenance
    assert rows.made_by["queries_sha256"] == texts_digest(collection.split_queries("train"))
    assert rows.made_by["windows"] == [[1, 4, 2], [1, 16, 3]] and rows.made_by["seed"] == 3
    assert rows.made_by["retriever"] == f"--vectors {shared / 'vectors'}"


def test_a_run_a_bm25_index_and_a_dense_model_are_mined(call: Call, shared: Path, tmp_path: Path) -> None:
    collection, output = small_collection(), tmp_path / "negatives.parquet"
    data = ("--data", shared / "data", "--output", output, "--ranks", "1-3", "--per-query", "2")
    every = {}
    for name, source in (("run", shared / "bm25.trec"), ("index", shared / "bm25"), ("model", "minilm")):
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


def test_possible_false_negatives_are_left_out_by_option(call: Call, shared: Path, tmp_path: Path) -> None:
    command = ("mine", "--data", shared / "data", "--model", "minilm", "--output", tmp_path / "negatives.parquet")
    found = measured(call(*command, "--max-score-share", "0.6", "--json"))
    rows = r.read_training_rows(tmp_path / "negatives.parquet")
    assert found["left_out_by_score"] > 0 and rows.made_by["max_score_share"] == 0.6
    for group in rows.groups():
        assert group.retrieved[~group.relevant].max() <= 0.6 * group.retrieved[group.relevant].max()
    fails(call(*command, "--margin", "5"), 1, "no negative was found for any query")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection, negatives mined with minilm, and a small reranker."""
    folder = tmp_path_factory.mktemp("score")
    small_collection().save_beir(folder / "data")
    reranker(folder / "reranker")
    mined = ("--model", "minilm", "--per-query", "4", "--output", folder / "mined.parquet")
    run_steps(("mine", "--data", folder / "data", *mined))
    return folder


def test_teachers_and_their_ensemble_are_written_and_more_can_be_added(call: Call, work: Path) -> None:
    data, output = ("--data", work / "data"), work / "scored.parquet"
    found = measured(call("score", work / "mined.parquet", *data, "--teacher", "bm25", "--teacher", work / "reranker",
                          "--output", output, "--json"))  # fmt: skip
    assert (found["rows"], found["teachers"]) == (60, ["bm25", "reranker"])
    mined, rows = r.read_training_rows(work / "mined.parquet"), r.read_training_rows(output)
    np.testing.assert_array_equal(rows.retrieved, mined.retrieved)
    run = r.BM25Index.build(small_collection().contents()).search(small_collection().queries, 16)
    own = [run[group.query].get(name, 0.0) for group in rows.groups() for name in group.documents]
    np.testing.assert_allclose(rows.teachers["bm25"], own, rtol=1e-5)
    assert rows.target is not None
    np.testing.assert_allclose(rows.target, ensemble(rows, rows.teachers), rtol=1e-6)
    assert rows.target.max() <= 30 and rows.target.min() == 0
    assert rows.made_by["teachers"].keys() == {"bm25", "reranker"} and rows.made_by["split"] == "train"
    rows.check_collection(small_collection())
    more = ("--teacher", "minilm", "--like", "minilm", "--max-score-share", "0.7", "--output", work / "more.parquet")
    added = done(call("score", output, *data, *more))
    assert "rows were left out" in added.err and "scored by bm25, reranker, minilm" in added.out
    three = r.read_training_rows(work / "more.parquet")
    assert list(three.teachers) == ["bm25", "reranker", "minilm"]
    whole = r.TrainingRows(**vars(rows) | {"teachers": rows.teachers | {"minilm": mined.retrieved}})
    whole.target = ensemble(whole, whole.teachers, like="minilm")
    left = drop_false_negatives(whole, FalseNegatives(max_share=0.7))
    assert [group.documents for group in three.groups()] == [group.documents for group in left.groups()]
    np.testing.assert_allclose(three.target, left.target, atol=2**-5)  # minilm mined and scores in batches of its own
    assert not list(work.glob(".*scoring")), "what was kept is removed when the file is written"


def test_an_interrupted_command_goes_on(call: Call, work: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from sentence_transformers import CrossEncoder

    monkeypatch.setattr(teachers, "SHARD", 16)
    stock, calls = CrossEncoder.predict, []

    def predict(self: Any, pairs: Any, **options: Any) -> Any:
        calls.append(len(pairs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return stock(self, pairs, **options)

    monkeypatch.setattr(CrossEncoder, "predict", predict)
    command = ("score", work / "mined.parquet", "--data", work / "data", "--teacher", work / "reranker", "--output",
               tmp_path / "scored.parquet")  # fmt: skip
    stopped = call(*command)
    assert stopped.code == 130 and "Finished work is kept: run the same command again" in stopped.err
    assert not (tmp_path / "scored.parquet").exists()
    assert call(*command).code == 0 and calls == [16, 16, 16, 16, 12], "two of the four parts were kept"
    assert call(*command, "--fresh").code == 0 and calls[5:] == [16, 16, 16, 12]


def test_a_length_limit_is_that_of_the_models(call: Call, work: Path, tmp_path: Path) -> None:
    command = ("score", work / "mined.parquet", "--data", work / "data", "--output", tmp_path / "scored.parquet")
    found = []
    for length in ("6", "64"):
        assert call(*command, "--teacher", work / "reranker", "--max-length", length).code == 0
        found.append(r.read_training_rows(tmp_path / "scored.parquet").teachers["reranker"])
    assert np.abs(found[0] - found[1]).max() > 0.01
    r.BM25Index.build(small_collection().contents()).save(tmp_path / "bm25")
    assert call(*command, "--teacher", tmp_path / "bm25").code == 0, "the folder of an index is a teacher"


def test_rows_of_another_collection_and_no_rows_are_refused(call: Call, work: Path, tmp_path: Path) -> None:
    other = small_collection()
    other.documents["d0"] = r.Document("d0", "", "another text")
    other.save_beir(tmp_path / "other")
    command = ("--teacher", "bm25", "--output", tmp_path / "x.parquet", "--data", tmp_path / "other")
    fails(call("score", work / "mined.parquet", *command), 1, "made from other documents than those of other")
    fails(call("score", tmp_path / "none.parquet", *command), 1, "Make one with: tilefold mine")


def test_recipes_are_listed_with_what_they_need_and_what_their_papers_report(call: Call) -> None:
    table = done(call("recipes"))
    assert all(name in table.out for name in RECIPES)
    listed = measured(call("recipes", "--json"))
    assert [entry["name"] for entry in listed] == list(RECIPES)
    assert all(entry["publishes"] and entry["summary"] and entry["published"] for entry in listed)
    one = measured(call("recipes", "splade-v3", "--json"))
    assert one["needs"] == ["pairs", "negatives", "scores"] and one["recipe"]["negatives"] == 8
    assert "document_regularizer = " in call("recipes", "splade-doc").out


def test_options_and_fields_reach_the_recipe(call: Call, shared: Path, tmp_path: Path) -> None:
    model = tiny_masked_lm(tmp_path / "base", small_collection())
    given = ("--steps", "1", "--batch-size", "4", "--max-length", "24", "--regularizer", "0.5", "--fp32")
    place = ("--data", shared / "data", "--model", model, "--output", tmp_path / "m")
    asked = ("train", "--recipe", "splade-doc", *place, *given)
    made = done(call(*asked, "--set", "document.pooling=sum", "--set", "document_regularizer.threshold=3", "--json"))
    recipe = json.loads((tmp_path / "m/tilefold_training.json").read_text())["settings"]["recipe"]
    assert (recipe["query"]["kind"], recipe["document"]["pooling"]) == ("binary", "sum")
    assert recipe["query_regularizer"]["weight"] == 0.0  # there is none, and no weight makes one
    assert recipe["document_regularizer"]["weight"] == 0.5 and recipe["document_regularizer"]["threshold"] == 3
    assert "warning: document vectors have" in made.err


def test_what_mine_and_score_write_is_what_training_reads(call: Call, shared: Path, tmp_path: Path) -> None:
    model = tiny_masked_lm(tmp_path / "base", small_collection())
    mined, scored = shared / "mined.parquet", tmp_path / "scored.parquet"
    assert call("score", mined, "--data", shared / "data", "--teacher", "bm25", "--output", scored).code == 0
    given = ("--steps", "1", "--batch-size", "4", "--max-length", "24", "--fp32", "--model", model, "--json")
    asked = ("train", "--recipe", "splade-v3", "--data", shared / "data", "--set", "negatives=3", *given)
    fails(call(*asked, "--negatives", mined, "--output", tmp_path / "m"), 1, "has no teachers' scores")
    made = done(call(*asked, "--negatives", scored, "--output", tmp_path / "m"))
    assert json.loads(made.out)["steps"] == 1
    assert "of 12 training pairs were left out" in made.err  # BM25 found no other document for them
