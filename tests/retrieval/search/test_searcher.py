"""A search as one call against its functions; feedback against sums by hand and Pyserini's
formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.sparse import csr_matrix

from tests.recipes.small import small_collection, small_masked_lm
from tests.refusals import refused
from tilefold import retrieval as r
from tilefold.recipes import ColbertRecipe
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.search.feedback import Feedback, Interpolation

QUERY = {"query": "how do I work with csv files"}
COLLECTION = small_collection()
TEXTS = COLLECTION.contents()


@pytest.fixture(scope="module")
def parts(splade: Any, late: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An index with all that a searcher takes beside it."""
    folder = tmp_path_factory.mktemp("searcher")
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


@pytest.mark.parametrize(
    "stored",
    [True, False],
    ids=["stored vectors", "in memory, candidates encoded"],
)
def test_a_search_is_the_functions_one_after_another(
    parts: dict[str, Any],
    splade: Any,
    stored: bool,
) -> None:
    index, late, vectors = parts["index"], parts["late"], r.read_vectors(parts["vectors"])
    feedback, fusion = r.Feedback("rocchio", 2), r.Fusion("interpolation", 0.3)
    queries = r.encode_queries(splade, QUERY)
    moved = r.expand_sparse(
        queries,
        vectors,
        r.hits_to_run(queries, index.search(queries, 9)),
        feedback,
    )
    own = r.hits_to_run(moved, index.search(moved, 9))
    fused = r.interpolate([own, parts["second"].search(QUERY, 9)], [0.7, 0.3], k=9)
    expected = r.rerank(fused, r.encode_texts(late, QUERY, kind="query"), parts["tokens"], depth=9)[
        "query"
    ]

    given = parts if stored else {**parts, "vectors": vectors, "tokens": None}
    hits = r.Searcher(**given).search(
        QUERY["query"],
        r.SearchRequest(4, feedback, None, fusion, r.Reranking(9)),
    )
    assert [hit["id"] for hit in hits] == list(expected)[:4] and [hit["rank"] for hit in hits] == [
        1,
        2,
        3,
        4,
    ]
    for hit in hits:
        name = hit["id"]
        assert hit["score"] == pytest.approx(
            expected[name],
            abs=0 if stored else 1e-2,
        )  # stored ones are fp16
        assert hit["first"] == {
            "rank": list(fused["query"]).index(name) + 1,
            "score": fused["query"][name],
        }
        assert hit["title"] == COLLECTION.documents[name].title
        if name in own["query"]:
            assert sum(term["contribution"] for term in hit["terms"]) == pytest.approx(
                own["query"][name],
                rel=1e-5,
            )
            assert sum(term["share"] for term in hit["terms"]) == pytest.approx(1, rel=1e-5)


def test_words_and_a_second_run_are_searched_alike(parts: dict[str, Any]) -> None:
    words, run = parts["second"], {"query": {"d3": 3.0, "d5": 2.0, "d9": 1.0}, "other": {"d1": 1.0}}
    plain = r.Searcher(words).search(QUERY["query"], r.SearchRequest(3))
    assert {hit["id"]: hit["score"] for hit in plain} == words.search(QUERY, 3)["query"]
    assert (plain[0]["title"], plain[0]["terms"], "first" in plain[0]) == ("", [], False)
    request = r.SearchRequest(16, r.Feedback(), r.Interpolation(weight=1.0))
    mixed = r.Searcher(words, second=run).search(QUERY["query"], request)
    assert [hit["id"] for hit in mixed[:2]] == ["d3", "d5"]
    assert r.Searcher(words).search("zebra") == []


def test_parts_that_do_not_belong_together_are_refused(
    parts: dict[str, Any],
    tmp_path: Path,
) -> None:
    few = dict(list(TEXTS.items())[:4])
    r.encode_tokens(parts["late"], few, tmp_path / "tokens")
    r.encode_collection(parts["model"], few, tmp_path / "vectors")
    other = ColbertRecipe(
        base_model=str(small_masked_lm(tmp_path / "lm", seed=1)),
        dimension=8,
    ).start()
    for changed, message in (
        ({"model": other}, "model: .* not the model that made the index"),
        (
            {"vectors": tmp_path / "vectors"},
            "vectors: .* holds vectors of another model or of other documents",
        ),
        ({"second": r.BM25Index.build(few)}, "second: was made from other documents"),
        (
            {"tokens": r.open_tokens(tmp_path / "tokens")},
            "tokens: .* holds token vectors of other documents",
        ),
        ({"late": other}, "model: makes vectors of dimension 8, and .* of dimension 16"),
    ):
        refused(DataError, message, r.Searcher, **{**parts, **changed})
    assert r.Searcher(**{**parts, "model": other, "late": None}, other_model=True)
    for name in ("model", "vectors"):
        with pytest.raises(ValueError, match=f"{name}: does nothing here.* a BM25 index"):
            r.Searcher(parts["second"], **{name: parts[name]})
    elsewhere = {"x": r.Document("x", "", "of another collection")}
    of_others = r.Searcher(parts["index"], parts["model"], documents=elsewhere)
    refused(
        DataError,
        r"documents: none of the documents found is in .* \(the first is 'd",
        of_others.search,
        "csv",
    )


def test_special_tokens_match_everywhere_and_are_no_matched_terms(splade: Any) -> None:
    vectors, special = r.encode_queries(splade, TEXTS), splade.tokenizer.all_special_ids
    names = set(splade.tokenizer.convert_ids_to_tokens(special))
    for hit in r.Searcher(r.build_index(vectors), splade, vectors=vectors).search(QUERY["query"]):
        assert set(special) & set(vectors.row(vectors.ids.index(hit["id"]))[0].tolist())
        assert hit["terms"] and not names & {term["term"] for term in hit["terms"]}


def test_what_is_no_part_of_a_search_or_needs_another_part_is_named(parts: dict[str, Any]) -> None:
    index, words, vectors = parts["index"], parts["second"], r.read_vectors(parts["vectors"])
    bare = r.Searcher(index, parts["model"])
    asked = {"feedback": r.Feedback(), "fusion": r.Fusion(), "reranking": r.Reranking()}
    needs = {name: r.SearchRequest(**{name: part}) for name, part in asked.items()}  # type: ignore[arg-type]
    rocchio: Any = partial(Feedback, "rocchio")
    wrong: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (
            ValueError,
            "vectors: expected those of the docum.*, which",
            lambda: bare.search("csv", needs["feedback"]),
        ),
        (
            ValueError,
            "second: expected a BM25 index or a run",
            lambda: bare.search("csv", needs["fusion"]),
        ),
        (
            ValueError,
            "reranking: .*with a late-interaction model",
            lambda: bare.search("csv", needs["reranking"]),
        ),
        (
            TypeError,
            "index: expected what build_index .* got SparseVectors",
            lambda: r.Searcher(vectors),
        ),
        (
            TypeError,
            "model: expected the encoder of the index, got str; load it",
            lambda: r.Searcher(index, "minilm"),
        ),
        (
            ValueError,
            "model: expected the SparseEncoder that made",
            lambda: r.Searcher(index).search("csv"),
        ),
        (
            TypeError,
            r"query: expected a string, got list; rank\(\)",
            lambda: r.Searcher(words).search(["csv"]),
        ),
        (
            TypeError,
            r"request: expected a SearchRequest, .* got 5",
            lambda: r.Searcher(words).search("csv", 5),
        ),
        (ValueError, "k: expected an integer of at least 1, got 0", lambda: r.SearchRequest(0)),
        (
            ValueError,
            "interpolation: expected feedback",
            lambda: r.SearchRequest(interpolation=r.Interpolation()),
        ),
        (ValueError, "depth: expected at least 1, got 0", lambda: r.Reranking(0)),
        (
            ValueError,
            "tail: expected one of keep, drop, got 'cut'",
            lambda: r.Reranking(tail="cut"),
        ),
        (
            ValueError,
            r"weight: expected a number in \[0, 1\], got 2",
            lambda: r.Reranking(weight=2.0),
        ),
        (
            ValueError,
            "method: expected one of rrf, interpolation, got 'best'",
            lambda: r.Fusion("best"),
        ),
        (ValueError, "k: expected an integer of at least 1, got 2.5", lambda: r.SearchRequest(2.5)),
        (ValueError, "k: expected an integer of at least 1, got '3'", lambda: r.SearchRequest("3")),
        (ValueError, "method: expected one of average, rocchio", lambda: r.Feedback("mean")),
        (ValueError, "depth: expected an integer of at least 1", lambda: Feedback(depth=0)),
        (ValueError, ".*expected none of them with method='average'", lambda: Feedback(alpha=0.5)),
        (ValueError, "gamma, bottom: expected both", lambda: rocchio(gamma=0.1)),
        (ValueError, "beta: expected a finite number", lambda: rocchio(beta=float("nan"))),
        (ValueError, ".*expected one above 0", lambda: rocchio(alpha=0.0, beta=0.0)),
        (ValueError, "top_terms: expected an integer of at least 1", lambda: Feedback(top_terms=0)),
        (
            ValueError,
            "place: expected one of before, after, both, got 'middle'",
            lambda: Interpolation("middle"),
        ),
        (
            ValueError,
            r"weight: expected a number in \[0, 1\], got 1.5",
            lambda: Interpolation(weight=1.5),
        ),
    ]
    for kind, message, call in wrong:
        refused(kind, f"^{message}", call)


QUERIES = r.SparseVectors.from_rows({"q": {0: 1.0, 3: 2.0}, "lost": {5: 1.0}}, 6)
ROWS = {"a": {0: 3.0, 1: 6.0}, "b": {1: 1.0, 2: 2.0}, "c": {3: 8.0}, "d": {0: 100.0, 4: 1.0}}
DOCUMENTS = r.SparseVectors.from_rows(ROWS, 6)
RUN: Run = {"q": {"a": 9.0, "b": 5.0, "c": 4.0, "d": 1.0}, "lost": {}}


def matrix(vectors: r.SparseVectors) -> torch.Tensor:
    return torch.from_numpy(
        csr_matrix((vectors.data, vectors.indices, vectors.indptr), (len(vectors), 6)).toarray(),
    )


@pytest.mark.parametrize(
    ("feedback", "expected"),
    [
        # (q + a + b) / 3
        (Feedback("average", 2), {0: 4 / 3, 1: 7 / 3, 2: 2 / 3, 3: 2 / 3}),
        (Feedback("average", 2, top_terms=2), {0: 4 / 3, 1: 7 / 3}),
        (
            Feedback("average", 2, top_terms=3),
            {0: 4 / 3, 1: 7 / 3, 2: 2 / 3},
        ),  # 2 and 3 tie: the lower index
        # more asked for than found: the mean is over the four
        (Feedback("average", 9), {0: 104 / 5, 1: 7 / 5, 2: 2 / 5, 3: 2.0, 4: 1 / 5}),
        # .4 q + .6 mean(a, b, c, d)
        (Feedback("rocchio", equal_lengths=False), {0: 15.85, 1: 1.05, 2: 0.3, 3: 2.0, 4: 0.15}),
        (Feedback("rocchio", beta=0.6), {0: 15.85, 1: 1.05, 2: 0.3, 3: 2.0, 4: 0.15}),
        (Feedback("rocchio", 1, alpha=0.5, beta=0.25), {0: 1.25, 1: 1.5, 3: 1.0}),
        # a is three times as long as q
        (
            Feedback("rocchio", 1, alpha=0.5, beta=0.25, equal_lengths=True),
            {0: 0.75, 1: 0.5, 3: 1.0},
        ),
        (Feedback("average", 1, equal_lengths=True), {0: 1.0, 1: 1.0, 3: 1.0}),
        # .9 q + .1 mean(a, b) - .1 mean(c, d); the last three without the best two are the last two
        (Feedback("rocchio", 2, 0.9, 0.1, 0.1, 2), {0: -3.95, 1: 0.35, 2: 0.1, 3: 1.4, 4: -0.05}),
        (Feedback("rocchio", 2, 0.9, 0.1, 0.1, 3), {0: -3.95, 1: 0.35, 2: 0.1, 3: 1.4, 4: -0.05}),
    ],
)
def test_sparse_and_dense_queries_are_the_sums_by_hand(
    feedback: Feedback,
    expected: dict[int, float],
) -> None:
    needed = r.feedback_documents(RUN, feedback)
    stored = DOCUMENTS.take([DOCUMENTS.ids.index(name) for name in needed])
    moved = r.expand_sparse(QUERIES, stored, RUN, feedback)
    (terms, weights), (other, _) = moved.row(0), moved.row(1)
    positive = {term: weight for term, weight in expected.items() if weight > 0}
    assert dict(zip(terms.tolist(), weights.tolist(), strict=True)) == pytest.approx(
        positive,
        rel=1e-6,
    )
    assert other.tolist() == [5], "a query that found nothing stays as it is"
    if feedback.top_terms is None:
        shuffled = DOCUMENTS.take([3, 1, 0, 2])
        queries, documents = matrix(QUERIES), matrix(shuffled)
        dense = r.expand_dense(queries, QUERIES.ids, documents, shuffled.ids, RUN, feedback)
        assert dense[0].tolist() == pytest.approx(
            [expected.get(term, 0.0) for term in range(6)],
            rel=1e-5,
        )
        assert torch.equal(dense[1], queries[1])


def test_default_weights_of_rocchio_are_for_vectors_of_equal_length() -> None:
    alike = r.Feedback("rocchio", 2), r.Feedback("rocchio", 2, 0.9, 0.1, equal_lengths=True)
    mine, other = (r.expand_sparse(QUERIES, DOCUMENTS, RUN, feedback) for feedback in alike)
    assert (
        mine.data.tolist() == other.data.tolist()
        and mine.indices.tolist() == other.indices.tolist()
    )
    empty = r.SparseVectors.from_rows({"a": {}, "b": {1: 1.0}}, 6)
    run: Run = {"q": {"a": 2.0, "b": 1.0}}
    sparse = r.expand_sparse(QUERIES, empty, run, alike[0])
    dense = r.expand_dense(matrix(QUERIES), QUERIES.ids, matrix(empty), empty.ids, run, alike[0])
    assert torch.allclose(matrix(sparse), dense), "a document without terms has no length to change"


def test_interpolation_goes_before_feedback_after_it_or_both() -> None:
    first: Run = {"q": {"a": 2.0, "b": 1.0}}
    asked: Run = {"q": {"c": 9.0, "a": 1.0}}
    second: Run = {**asked, "other": {"d": 1.0}}  # only queries of the first ranking are answered
    after: Run = {"q": {"b": 5.0, "a": 4.0, "c": 3.0}}
    seen: list[Run] = []

    def again(basis: Run) -> Run:
        seen.append(basis)
        return after

    fused_first, fused_after = (
        r.interpolate([run, asked], [0.7, 0.3], "min_max", k=9) for run in (first, after)
    )
    places: tuple[tuple[Any, Run, Run], ...] = (
        ("before", fused_first, after),
        ("after", first, fused_after),
        ("both", fused_first, fused_after),
    )
    for place, basis, result in places:
        assert r.with_feedback(first, again, 9, second, Interpolation(place, 0.3)) == result
        assert seen.pop() == basis
    assert r.with_feedback(first, again, 9) == after and seen == [first]
    plain = r.interpolate([first, asked], [0.7, 0.3], "none", k=9)
    assert Interpolation("after", 0.3, "none").mix(first, second, 9) == plain
    refused(ValueError, "both or neither", r.with_feedback, first, again, 9, second)


def test_vectors_of_bm25_score_as_its_search_does_and_take_feedback() -> None:
    index = r.BM25Index.build(TEXTS)
    queries = index.query_vectors(COLLECTION.queries)
    documents = index.document_vectors()
    assert (documents.ids, documents.provenance) == (list(COLLECTION.documents), index.provenance)
    exact = r.build_index(documents, "exact")
    run = r.hits_to_run(queries, exact.search(queries, 16))
    for query, scores in index.search(COLLECTION.queries, 16).items():
        assert run[query] == pytest.approx(scores, rel=1e-5)
    expanded = r.expand_sparse(queries, documents, run, Feedback("rocchio", 1))
    found = r.hits_to_run(expanded, exact.search(expanded, 16))
    assert all(next(iter(found[query])) == next(iter(run[query])) for query in run)
    assert any(len(found[query]) > len(run[query]) for query in run), (
        "words of the first document find more"
    )


def test_vectors_that_do_not_fit_and_sums_that_overflow_are_refused() -> None:
    one, two, wide = (
        torch.ones(1, 2),
        DOCUMENTS.take([0, 1]),
        r.SparseVectors.from_rows({"a": {0: 1.0}}, 7),
    )
    said = r"vector of 'c', which was found for query 'q', got .* 2 others, \['a', 'b'\]"
    refused(DataError, said, r.expand_sparse, QUERIES, two, RUN, Feedback())
    refused(VocabularyMismatchError, "vocabulary", r.expand_sparse, QUERIES, wide, RUN, Feedback())
    said = r"documents: expected \[2, 2\], got \(1, 2\)"
    refused(ValueError, said, r.expand_dense, one, ["q"], one, ["a", "b"], RUN, Feedback())
    refused(
        ValueError,
        "top_terms: expected None",
        r.expand_dense,
        one,
        ["q"],
        one,
        ["a"],
        {},
        Feedback(top_terms=3),
    )
    said, query, rows = (
        r"alpha, beta, gamma: expected weights .* give smaller ones",
        torch.ones(1, 4),
        torch.ones(4, 4),
    )
    for feedback in (Feedback("rocchio", 2, alpha=1e39), Feedback("rocchio", 2, beta=1e300)):
        refused(DataError, said, r.expand_sparse, QUERIES, DOCUMENTS, RUN, feedback)
        refused(DataError, said, r.expand_dense, query, ["q"], rows, DOCUMENTS.ids, RUN, feedback)
