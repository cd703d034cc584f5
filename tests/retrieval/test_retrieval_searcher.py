"""A search as one call against the functions that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.small import small_collection, small_masked_lm
from tests.refusals import refused
from tilefold import retrieval as r
from tilefold.recipes import ColbertRecipe
from tilefold.recipes.colbert import load_base_model
from tilefold.retrieval.errors import DataError

QUERY = {"query": "how do I work with csv files"}
COLLECTION = small_collection()
TEXTS = COLLECTION.contents()


@pytest.fixture(scope="module")
def parts(splade: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An index with all that a searcher takes beside it."""
    folder = tmp_path_factory.mktemp("searcher")
    late = load_base_model(
        ColbertRecipe(base_model=str(small_masked_lm(folder / "lm")), dimension=16, max_length=32, bf16=False)
    )
    r.encode_collection(splade, TEXTS, folder / "vectors", top_k=24, special_tokens=False)
    r.encode_tokens(late, TEXTS, folder / "tokens")
    return {
        "index": r.build_index(r.read_vectors(folder / "vectors"), "exact"),
        "model": splade,
        "documents": COLLECTION.documents,
        "vectors": folder / "vectors",
        "second": r.BM25Index.build(TEXTS),
        "late": late,
        "tokens": r.open_tokens(folder / "tokens"),
    }


@pytest.mark.parametrize("stored", [True, False], ids=["stored vectors", "in memory, candidates encoded"])
def test_a_search_is_the_functions_one_after_another(parts: dict[str, Any], splade: Any, stored: bool) -> None:
    index, late, vectors = parts["index"], parts["late"], r.read_vectors(parts["vectors"])
    feedback, fusion = r.Feedback("rocchio", 2), r.Fusion("interpolation", 0.3)
    queries = r.encode_queries(splade, QUERY)
    first = r.hits_to_run(queries, index.search(queries, 9))
    moved = r.expand_sparse(queries, vectors, first, feedback)
    own = r.hits_to_run(moved, index.search(moved, 9))
    fused = r.interpolate([own, parts["second"].search(QUERY, 9)], [0.7, 0.3], k=9)
    asked = r.encode_texts(late, QUERY, kind="query")
    expected = r.rerank(fused, asked, parts["tokens"], depth=9)["query"]

    given = parts if stored else {**parts, "vectors": vectors, "tokens": None}
    request = r.SearchRequest(4, feedback, None, fusion, r.Reranking(9))
    hits = r.Searcher(**given).search(QUERY["query"], request)
    assert [hit["id"] for hit in hits] == list(expected)[:4] and [hit["rank"] for hit in hits] == [1, 2, 3, 4]
    for hit in hits:
        name = hit["id"]
        assert hit["score"] == pytest.approx(expected[name], abs=0 if stored else 1e-2)  # stored ones are fp16
        assert hit["first"] == {"rank": list(fused["query"]).index(name) + 1, "score": fused["query"][name]}
        assert hit["title"] == COLLECTION.documents[name].title
        if name in own["query"]:
            assert sum(term["contribution"] for term in hit["terms"]) == pytest.approx(own["query"][name], rel=1e-5)
            assert sum(term["share"] for term in hit["terms"]) == pytest.approx(1, rel=1e-5)


def test_words_and_a_second_run_are_searched_alike(parts: dict[str, Any]) -> None:
    words, run = parts["second"], {"query": {"d3": 3.0, "d5": 2.0, "d9": 1.0}, "other": {"d1": 1.0}}
    plain = r.Searcher(words).search(QUERY["query"], r.SearchRequest(3))
    assert {hit["id"]: hit["score"] for hit in plain} == words.search(QUERY, 3)["query"]
    assert (plain[0]["title"], plain[0]["terms"], "first" in plain[0]) == ("", [], False)
    mixed = r.Searcher(words, second=run).search(
        QUERY["query"], r.SearchRequest(16, r.Feedback(), r.Interpolation(weight=1.0))
    )
    assert [hit["id"] for hit in mixed[:2]] == ["d3", "d5"]
    assert r.Searcher(words).search("zebra") == []


def test_parts_that_do_not_belong_together_are_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    few = dict(list(TEXTS.items())[:4])
    r.encode_tokens(parts["late"], few, tmp_path / "tokens")
    r.encode_collection(parts["model"], few, tmp_path / "vectors")
    other = load_base_model(ColbertRecipe(base_model=str(small_masked_lm(tmp_path / "lm", seed=1)), dimension=8))
    for changed, message in (
        ({"model": other}, "model: .* not the model that made the index"),
        ({"vectors": tmp_path / "vectors"}, "vectors: .* holds vectors of another model or of other documents"),
        ({"second": r.BM25Index.build(few)}, "second: was made from other documents"),
        ({"tokens": r.open_tokens(tmp_path / "tokens")}, "tokens: .* holds token vectors of other documents"),
        ({"late": other}, "model: makes vectors of dimension 8, and .* of dimension 16"),
    ):
        refused(DataError, message, r.Searcher, **{**parts, **changed})
    assert r.Searcher(**{**parts, "model": other, "late": None}, other_model=True)
    for name in ("model", "vectors"):
        with pytest.raises(ValueError, match=f"{name}: does nothing here.* a BM25 index"):
            r.Searcher(parts["second"], **{name: parts[name]})
    elsewhere = {"x": r.Document("x", "", "of another collection")}
    with pytest.raises(DataError, match=r"documents: none of the documents found is in .* \(the first is 'd"):
        r.Searcher(parts["index"], parts["model"], documents=elsewhere).search("csv")


def test_a_request_needs_what_the_searcher_has(parts: dict[str, Any]) -> None:
    bare = r.Searcher(parts["index"], parts["model"])
    for request, message in (
        (r.SearchRequest(feedback=r.Feedback()), "vectors: expected those of the documents, which feedback reads"),
        (r.SearchRequest(fusion=r.Fusion()), "second: expected a BM25 index or a run"),
        (r.SearchRequest(reranking=r.Reranking()), "reranking: expected a searcher with a late-interaction model"),
    ):
        refused(ValueError, message, bare.search, "csv", request)


def test_special_tokens_match_everywhere_and_are_no_matched_terms(splade: Any) -> None:
    vectors, special = r.encode_queries(splade, TEXTS), splade.tokenizer.all_special_ids
    names = set(splade.tokenizer.convert_ids_to_tokens(special))
    for hit in r.Searcher(r.build_index(vectors), splade, vectors=vectors).search(QUERY["query"]):
        assert set(special) & set(vectors.row(vectors.ids.index(hit["id"]))[0].tolist())
        assert hit["terms"] and not names & {term["term"] for term in hit["terms"]}


def test_what_is_no_part_of_a_search_is_named(parts: dict[str, Any]) -> None:
    index, words, vectors = parts["index"], parts["second"], r.read_vectors(parts["vectors"])
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "index: expected what build_index .* got SparseVectors", lambda: r.Searcher(vectors)),
        (TypeError, "model: expected a SparseEncoder, got str; load it", lambda: r.Searcher(index, "minilm")),
        (ValueError, "model: expected the SparseEncoder that made", lambda: r.Searcher(index).search("csv")),
        (TypeError, r"query: expected a string, got list; rank\(\)", lambda: r.Searcher(words).search(["csv"])),
        (TypeError, r"request: expected a SearchRequest, .* got 5", lambda: r.Searcher(words).search("csv", 5)),
        (ValueError, "k: expected an integer of at least 1, got 0", lambda: r.SearchRequest(0)),
        (ValueError, "interpolation: expected feedback", lambda: r.SearchRequest(interpolation=r.Interpolation())),
        (ValueError, "depth: expected at least 1, got 0", lambda: r.Reranking(0)),
        (ValueError, "tail: expected keep or drop, got 'cut'", lambda: r.Reranking(tail="cut")),
        (ValueError, r"weight: expected a number in \[0, 1\], got 2", lambda: r.Reranking(weight=2.0)),
        (ValueError, "method: expected one of rrf, interpolation, got 'best'", lambda: r.Fusion("best")),
        (ValueError, "k: expected an integer of at least 1, got 2.5", lambda: r.SearchRequest(2.5)),
        (ValueError, "k: expected an integer of at least 1, got '3'", lambda: r.SearchRequest("3")),
    ]
    for kind, message, call in wrong:
        refused(kind, f"^{message}", call)
