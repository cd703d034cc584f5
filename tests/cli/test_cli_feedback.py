"""``--prf`` in search and evaluate gives what the Python functions give, and explains it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.program import Outcome, run_cli
from tests.recipes.small import small_collection
from tilefold import retrieval as r
from tilefold.cli._models import load_dense, load_encoder

Call = Callable[..., Outcome]
QUERY = "how do I work with csv files"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, masked_lm: str) -> Path:
    """A collection, an untrained model, its vectors and index, a BM25 index and its run."""
    folder = tmp_path_factory.mktemp("feedback")
    small_collection().save_beir(folder / "data")
    data, model, vectors = ("--data", folder / "data"), folder / "model", folder / "vectors"
    bm25 = ("--index", folder / "bm25")
    for step in (
        ("train", *data, "--model", masked_lm, "--output", model, "--steps", "0"),
        ("encode", "--model", model, *data, "--output", vectors, "--top-k", "24", "--no-special-tokens"),
        ("index", "--vectors", vectors, "--output", folder / "index"),
        ("index", "--backend", "bm25", *data, "--output", folder / "bm25"),
        ("evaluate", *data, *bm25, "--split", "train", "--split", "test", "--save-run", folder / "bm25.trec"),
    ):
        assert run_cli(*step) == 0, step
    return folder


def measured(outcome: Outcome) -> Any:
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)


def test_search_explains_the_query_after_feedback(call: Call, work: Path) -> None:
    vectors = r.read_vectors(work / "vectors")
    index, encoder = r.load_index(work / "index"), load_encoder(str(work / "model"))
    queries = r.encode_queries(encoder, {"query": QUERY}, top_k=4)
    run = r.hits_to_run(queries, index.search(queries, 10))
    expanded = r.expand_sparse(queries, vectors, run, r.Feedback("average", 2, top_terms=40))
    expected = r.hits_to_run(expanded, index.search(expanded, 10))["query"]
    place = ("--index", work / "index", "--model", work / "model", "--vectors", work / "vectors")
    asked = ("search", QUERY, *place, "--prf", "average", "--prf-depth", "2", "--prf-terms", "40", "--query-top-k", "4")
    hits = measured(call(*asked, "--json"))["hits"]
    assert {hit["id"]: hit["score"] for hit in hits} == pytest.approx(expected)
    own = set(encoder.tokenizer.convert_ids_to_tokens(queries.row(0)[0].tolist()))
    for hit in hits:  # no special token is stored, so that the terms are the whole score
        assert sum(term["contribution"] for term in hit["terms"]) == pytest.approx(hit["score"], rel=1e-5)
        assert sum(term["share"] for term in hit["terms"]) == pytest.approx(1, rel=1e-5)
        assert all(term["feedback"] == (term["term"] not in own) for term in hit["terms"])
    added = [term["term"] for term in hits[0]["terms"][:6] if term["feedback"]]
    shown = call(*asked)
    assert added and shown.code == 0 and all(f"+{term}" in shown.out for term in added)


def test_search_interpolates_with_bm25_and_explains_its_own_part(call: Call, work: Path) -> None:
    place = ("--index", work / "index", "--model", work / "model", "--vectors", work / "vectors")
    asked = ("search", QUERY, *place, "--prf", "rocchio", "--prf-with", work / "bm25", "--prf-weight", "0.9", "--json")
    hits = measured(call(*asked, "--k", "3"))["hits"]
    assert hits[0]["id"] == "d0" and hits[0]["score"] == pytest.approx(1, abs=0.1), "normalised scores, not products"
    assert sum(term["share"] for term in hits[0]["terms"]) == pytest.approx(1, rel=1e-5)
    late = call(*asked, "--prf-place", "before", "--k", "3")
    assert measured(late)["hits"][0]["score"] > 1, "the last ranking is not interpolated"


def test_evaluate_with_feedback_from_words_is_the_python_functions(call: Call, work: Path, tmp_path: Path) -> None:
    collection = small_collection()
    index, queries = r.BM25Index.build(collection.contents()), collection.split_queries("test")
    vectors, asked = index.document_vectors(), index.query_vectors(collection.split_queries("test"))
    exact = r.build_index(vectors)
    feedback = r.Feedback("rocchio", 2, alpha=0.9, beta=0.3, gamma=0.1, bottom=2)
    expanded = r.expand_sparse(asked, vectors, index.search(queries, 1000), feedback)
    expected = r.hits_to_run(expanded, exact.search(expanded, 100))
    options = {"depth": 2, "alpha": 0.9, "beta": 0.3, "gamma": 0.1, "bottom": 2}
    given = [word for name, value in options.items() for word in (f"--prf-{name}", str(value))]
    command = ("evaluate", "--data", work / "data", "--index", work / "bm25", "--prf", "rocchio", *given)
    found = measured(call(*command, "--save-run", tmp_path / "run.trec", "--json"))
    assert found["measures"] == pytest.approx(r.evaluate(expected, collection.qrels["test"]))
    saved = r.read_trec_run(tmp_path / "run.trec")
    assert {query: pytest.approx(scores, rel=1e-5) for query, scores in expected.items()} == saved
    again = measured(call("evaluate", "--data", work / "data", "--run", tmp_path / "run.trec", "--json"))
    assert again["measures"] == found["measures"], "the saved run carries the fingerprint of its texts"


def test_evaluate_with_dense_feedback_and_a_run_is_the_python_functions(call: Call, work: Path, tmp_path: Path) -> None:
    collection, model = small_collection(), load_dense("minilm")
    texts, queries = collection.contents(), collection.split_queries("test")
    vectors, asked = r.encode_dense(model, texts, kind="document"), r.encode_dense(model, queries, kind="query")

    def search(vectors_of_queries: Any) -> Any:
        return r.rank_by_similarity(model, vectors, vectors_of_queries.to(vectors), list(texts), list(queries), 1000)

    def again(basis: Any) -> Any:
        return search(r.expand_dense(asked, list(queries), vectors, list(texts), basis, r.Feedback()))

    second, mix = r.read_trec_run(work / "bm25.trec"), r.Interpolation("both", 0.3)
    expected = r.with_feedback(search(asked), again, 1000, second, mix)
    command = ("evaluate", "--data", work / "data", "--model", "minilm", "--prf", "average", "--prf-with",
               work / "bm25.trec", "--prf-weight", "0.3", "--save-run", tmp_path / "run.trec", "--json")  # fmt: skip
    found = measured(call(*command))
    assert found["measures"] == pytest.approx(r.evaluate(expected, collection.qrels["test"]))
    for query, scores in r.read_trec_run(tmp_path / "run.trec").items():
        assert scores == pytest.approx(expected[query], abs=1e-6)


def test_a_second_ranking_of_other_documents_is_refused(call: Call, work: Path, tmp_path: Path) -> None:
    other: Any = small_collection()
    other.documents.popitem()
    r.BM25Index.build(other.contents()).save(tmp_path / "other")
    data = ("evaluate", "--data", work / "data", "--index", work / "bm25")
    refused = call(*data, "--prf", "average", "--prf-with", tmp_path / "other")
    assert refused.code == 1 and "was made from other documents" in refused.err
