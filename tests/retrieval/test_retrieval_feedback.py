"""Feedback against sums by hand and against Pyserini's formulas, sparse and dense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.recipes.small import small_collection
from tests.refusals import refused
from tilefold.retrieval import (
    BM25Index,
    SparseVectors,
    build_index,
    expand_dense,
    expand_sparse,
    feedback_documents,
    hits_to_run,
    interpolate,
    with_feedback,
)
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.feedback import Feedback, Interpolation
from tilefold.retrieval.fusion import Run

QUERIES = SparseVectors.from_rows({"q": {0: 1.0, 3: 2.0}, "lost": {5: 1.0}}, 6)
DOCUMENTS = SparseVectors.from_rows(
    {"a": {0: 3.0, 1: 6.0}, "b": {1: 1.0, 2: 2.0}, "c": {3: 8.0}, "d": {0: 100.0, 4: 1.0}}, 6
)
RUN: Run = {"q": {"a": 9.0, "b": 5.0, "c": 4.0, "d": 1.0}, "lost": {}}


def rows(vectors: SparseVectors) -> dict[str, dict[int, float]]:
    found = {}
    for i, name in enumerate(vectors.ids):
        terms, weights = vectors.row(i)
        found[name] = dict(zip(terms.tolist(), weights.tolist(), strict=True))
    return found


@pytest.mark.parametrize(
    ("feedback", "expected"),
    [
        # (q + a + b) / 3
        (Feedback("average", 2), {0: 4 / 3, 1: 7 / 3, 2: 2 / 3, 3: 2 / 3}),
        (Feedback("average", 2, top_terms=2), {0: 4 / 3, 1: 7 / 3}),
        (Feedback("average", 2, top_terms=3), {0: 4 / 3, 1: 7 / 3, 2: 2 / 3}),  # 2 and 3 tie: the lower index
        # more asked for than found: the mean is over the four
        (Feedback("average", 9), {0: 104 / 5, 1: 7 / 5, 2: 2 / 5, 3: 2.0, 4: 1 / 5}),
        # .4 q + .6 mean(a, b, c, d)
        (Feedback("rocchio"), {0: 15.85, 1: 1.05, 2: 0.3, 3: 2.0, 4: 0.15}),
        (Feedback("rocchio", 1, alpha=0.5, beta=0.25), {0: 1.25, 1: 1.5, 3: 1.0}),
        # .9 q + .1 mean(a, b) - .1 mean(c, d): term 0 falls below 0, and is left out like term 4
        (Feedback("rocchio", 2, alpha=0.9, beta=0.1, gamma=0.1, bottom=2), {1: 0.35, 2: 0.1, 3: 1.4}),
        # the last three without the best two are the last two
        (Feedback("rocchio", 2, alpha=0.9, beta=0.1, gamma=0.1, bottom=3), {1: 0.35, 2: 0.1, 3: 1.4}),
    ],
)
def test_sparse_queries_are_the_sums_by_hand(feedback: Feedback, expected: dict[int, float]) -> None:
    needed = feedback_documents(RUN, feedback)
    stored = DOCUMENTS.take([DOCUMENTS.ids.index(name) for name in needed])
    found = rows(expand_sparse(QUERIES, stored, RUN, feedback))
    assert found["q"] == pytest.approx(expected, rel=1e-6) and found["q"].keys() == expected.keys()
    assert found["lost"] == {5: 1.0}, "a query that found nothing stays as it is"


def pyserini(query: np.ndarray, best: np.ndarray, worst: np.ndarray, feedback: Feedback) -> np.ndarray:
    """The mean of the stacked vectors; or the weighted sum of the query and of the means."""
    if feedback.method == "average":
        return np.mean(np.vstack((query, best)), axis=0)
    kept = np.vstack((feedback.alpha * query, feedback.beta * best.mean(axis=0)))
    return np.sum(kept, axis=0) - (feedback.gamma * worst.mean(axis=0) if len(worst) else 0)


@pytest.mark.parametrize(
    "feedback",
    [Feedback(), Feedback("rocchio"), Feedback("rocchio", 3, alpha=0.9, beta=0.1, gamma=0.1, bottom=2)],
    ids=["average", "rocchio", "rocchio with the worst"],
)
def test_dense_queries_are_those_of_pyserini_and_of_the_same_vectors_as_csr(feedback: Feedback) -> None:
    torch.manual_seed(0)
    queries, documents = torch.rand(4, 24), torch.rand(30, 24)
    query_ids, document_ids = [f"q{i}" for i in range(4)], [f"d{i}" for i in range(30)]
    scores = queries @ documents.T
    run = {
        name: {document_ids[at]: float(scores[i, at]) for at in scores[i].argsort(descending=True).tolist()[:10]}
        for i, name in enumerate(query_ids)
    }
    found = expand_dense(queries, query_ids, documents, document_ids, run, feedback)
    for i, name in enumerate(query_ids):
        order = [document_ids.index(document) for document in run[name]]
        best, worst = documents[order[: feedback.k]].numpy(), documents[order[10 - feedback.bottom :]].numpy()
        np.testing.assert_allclose(found[i], pyserini(queries[i].numpy(), best, worst, feedback), rtol=1e-6, atol=1e-7)
    sparse = expand_sparse(
        SparseVectors.from_torch(query_ids, queries), SparseVectors.from_torch(document_ids, documents), run, feedback
    )
    positive = found.clamp(min=0)  # sparse vectors have no weights below 0
    np.testing.assert_allclose(sparse.data, positive[positive > 0].numpy(), rtol=1e-6)
    assert sparse.indices.tolist() == positive.nonzero()[:, 1].tolist()


def test_interpolation_is_that_of_pyserini() -> None:
    """``alpha * second + first``, the minimum of its side for what is missing; normalised: (s - middle) / range."""
    first, second = {"a": 3.0, "b": 2.0, "c": 1.0}, {"b": 30.0, "d": 20.0, "a": 10.0, "e": 12.0}
    for normalization in ("none", "min_max"):
        for weight in (0.1, 0.4, 0.75):
            sides = []
            for side in (first, second):
                low, high = min(side.values()), max(side.values())
                divide = (high - low) if normalization == "min_max" else 1
                middle = (low + high) / 2 if normalization == "min_max" else 0
                sides.append({name: (side.get(name, low) - middle) / divide for name in {**first, **second}})
            alpha = weight / (1 - weight)
            hybrid = {name: alpha * sides[1][name] + sides[0][name] for name in sides[0]}
            mix = Interpolation("after", weight, normalization)  # type: ignore[arg-type]
            found = mix.mix({"q": first}, {"q": second, "other": second}, 10)
            assert list(found) == ["q"], "only queries of the first ranking"
            assert list(found["q"]) == sorted(hybrid, key=lambda name: (-hybrid[name], list(hybrid).index(name)))


def test_interpolation_goes_before_feedback_after_it_or_both() -> None:
    first: Run = {"q": {"a": 2.0, "b": 1.0}}
    second: Run = {"q": {"c": 9.0, "a": 1.0}}
    after: Run = {"q": {"b": 5.0, "a": 4.0, "c": 3.0}}
    seen: list[Run] = []

    def again(basis: Run) -> Run:
        seen.append(basis)
        return after

    fused_first, fused_after = (interpolate([run, second], [0.7, 0.3], "min_max", k=9) for run in (first, after))
    places: tuple[tuple[Any, Run, Run], ...] = (
        ("before", fused_first, after),
        ("after", first, fused_after),
        ("both", fused_first, fused_after),
    )
    for place, basis, result in places:
        assert with_feedback(first, again, 9, second, Interpolation(place, 0.3)) == result
        assert seen.pop() == basis
    assert with_feedback(first, again, 9) == after and seen == [first]
    refused(ValueError, "both or neither", with_feedback, first, again, 9, second)


def test_vectors_of_bm25_score_as_its_search_does_and_take_feedback() -> None:
    collection = small_collection()
    index = BM25Index.build(collection.contents())
    queries = index.query_vectors(collection.queries)
    documents = index.document_vectors()
    assert (documents.ids, documents.provenance) == (list(collection.documents), index.provenance)
    exact = build_index(documents, "exact")
    run = hits_to_run(queries, exact.search(queries, 16))
    expected = index.search(collection.queries, 16)
    for query, scores in expected.items():
        assert run[query] == pytest.approx(scores, rel=1e-5)
    expanded = expand_sparse(queries, documents, run, Feedback("rocchio", 1))
    found = hits_to_run(expanded, exact.search(expanded, 16))
    assert all(next(iter(found[query])) == next(iter(run[query])) for query in run)
    assert any(len(found[query]) > len(run[query]) for query in run), "words of the first document find more"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Feedback, {"method": "mean"}, "method: expected one of average, rocchio"),
        (Feedback, {"depth": 0}, "depth: expected an integer of at least 1"),
        (Feedback, {"alpha": 0.5}, "expected none of them with method='average'"),
        (Feedback, {"method": "rocchio", "gamma": 0.1}, "gamma, bottom: expected both"),
        (Feedback, {"method": "rocchio", "beta": float("nan")}, "beta: expected a finite number"),
        (Feedback, {"method": "rocchio", "alpha": 0.0, "beta": 0.0}, "expected one above 0"),
        (Feedback, {"top_terms": 0}, "top_terms: expected an integer of at least 1"),
        (Interpolation, {"place": "middle"}, "place: expected one of before, after, both, got 'middle'"),
        (Interpolation, {"weight": 1.5}, r"weight: expected a number in \[0, 1\], got 1.5"),
    ],
)
def test_wrong_options_are_refused(kind: Any, options: Any, message: str) -> None:
    refused(ValueError, message, kind, **options)


def test_vectors_that_do_not_fit_and_sums_that_overflow_are_refused() -> None:
    with pytest.raises(DataError, match=r"vector of 'c', which was found for query 'q', got .* 2 others, \['a', 'b'\]"):
        expand_sparse(QUERIES, DOCUMENTS.take([0, 1]), RUN, Feedback())
    with pytest.raises(VocabularyMismatchError):
        expand_sparse(QUERIES, SparseVectors.from_rows({"a": {0: 1.0}}, 7), RUN, Feedback())
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"documents: expected \[2, 2\], got \(1, 2\)"):
        expand_dense(ones, ["q"], ones, ["a", "b"], RUN, Feedback())
    refused(ValueError, "top_terms: expected None", expand_dense, ones, ["q"], ones, ["a"], {}, Feedback(top_terms=3))
    for feedback in (Feedback("rocchio", 2, alpha=1e39), Feedback("rocchio", 2, beta=1e300)):
        with pytest.raises(DataError, match=r"alpha, beta, gamma: expected weights .* give smaller ones"):
            expand_sparse(QUERIES, DOCUMENTS, RUN, feedback)
        with pytest.raises(DataError, match=r"alpha, beta, gamma: expected weights .* give smaller ones"):
            expand_dense(torch.ones(1, 4), ["q"], torch.ones(4, 4), DOCUMENTS.ids, RUN, feedback)
