"""Pseudo relevance feedback against sums by hand, and interpolation before and after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.sparse import csr_matrix

from tests.recipes.small import small_collection
from tilefold import retrieval as r
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.errors import DataError, VocabularyMismatchError
from tilefold.retrieval.search.feedback import Feedback, Interpolation

VOCAB_SIZE = 6
QUERIES = r.SparseVectors.from_rows({"q": {0: 1.0, 3: 2.0}, "lost": {5: 1.0}}, VOCAB_SIZE)
DOCUMENTS = r.SparseVectors.from_rows(
    {
        "a": {0: 3.0, 1: 6.0},
        "b": {1: 1.0, 2: 2.0},
        "c": {3: 8.0},
        "d": {0: 100.0, 4: 1.0},
    },
    VOCAB_SIZE,
)
RUN: Run = {"q": {"a": 9.0, "b": 5.0, "c": 4.0, "d": 1.0}, "lost": {}}


def to_dense(vectors: r.SparseVectors) -> torch.Tensor:
    """Vectors as a matrix ``[len(vectors), VOCAB_SIZE]``."""
    csr = csr_matrix(
        (vectors.data, vectors.indices, vectors.indptr),
        (len(vectors), VOCAB_SIZE),
    )
    return torch.from_numpy(csr.toarray())


SUMS_BY_HAND = [
    pytest.param(
        Feedback("average", 2),
        {0: 4 / 3, 1: 7 / 3, 2: 2 / 3, 3: 2 / 3},
        id="average: (q + a + b) / 3",
    ),
    pytest.param(
        Feedback("average", 9),
        {0: 104 / 5, 1: 7 / 5, 2: 2 / 5, 3: 2.0, 4: 1 / 5},
        id="average: a mean over the four documents if the depth is larger",
    ),
    pytest.param(
        Feedback("average", 1, equal_lengths=True),
        {0: 1.0, 1: 1.0, 3: 1.0},
        id="average: the document scaled to the length of the query",
    ),
    pytest.param(
        Feedback("rocchio", equal_lengths=False),
        {0: 15.85, 1: 1.05, 2: 0.3, 3: 2.0, 4: 0.15},
        id="rocchio: 0.4 q + 0.6 mean(a, b, c, d) by default",
    ),
    pytest.param(
        Feedback("rocchio", beta=0.6),
        {0: 15.85, 1: 1.05, 2: 0.3, 3: 2.0, 4: 0.15},
        id="rocchio: 0.4 q + 0.6 mean(a, b, c, d) with beta",
    ),
    pytest.param(
        Feedback("rocchio", 1, alpha=0.5, beta=0.25),
        {0: 1.25, 1: 1.5, 3: 1.0},
        id="rocchio: 0.5 q + 0.25 a",
    ),
    pytest.param(
        Feedback("rocchio", 1, alpha=0.5, beta=0.25, equal_lengths=True),
        {0: 0.75, 1: 0.5, 3: 1.0},
        id="rocchio: 0.5 q + 0.25 a / 3, as a is three times as long as q",
    ),
    pytest.param(
        Feedback("rocchio", 2, alpha=0.9, beta=0.1, gamma=0.1, bottom=2),
        {0: -3.95, 1: 0.35, 2: 0.1, 3: 1.4, 4: -0.05},
        id="rocchio: 0.9 q + 0.1 mean(a, b) - 0.1 mean(c, d)",
    ),
    pytest.param(
        Feedback("rocchio", 2, alpha=0.9, beta=0.1, gamma=0.1, bottom=3),
        {0: -3.95, 1: 0.35, 2: 0.1, 3: 1.4, 4: -0.05},
        id="rocchio: the last three without the best two are the last two",
    ),
]


def expand_sparse_from_needed_documents(feedback: Feedback) -> r.SparseVectors:
    """The queries moved by ``feedback``, which gets no other document than it names."""
    names = r.feedback_documents(RUN, feedback)
    documents = DOCUMENTS.take([DOCUMENTS.ids.index(name) for name in names])
    return r.expand_sparse(QUERIES, documents, RUN, feedback)


@pytest.mark.parametrize(
    ("feedback", "expected"),
    [
        *SUMS_BY_HAND,
        pytest.param(
            Feedback("average", 2, top_terms=2),
            {0: 4 / 3, 1: 7 / 3},
            id="average: the two largest terms",
        ),
        pytest.param(
            Feedback("average", 2, top_terms=3),
            {0: 4 / 3, 1: 7 / 3, 2: 2 / 3},
            id="average: of terms 2 and 3, which tie, the lower",
        ),
    ],
)
def test_sparse_queries_are_moved_by_the_sums_by_hand(
    feedback: Feedback,
    expected: dict[int, float],
) -> None:
    expanded = expand_sparse_from_needed_documents(feedback)
    terms, weights = expanded.row(0)
    positive = {term: weight for term, weight in expected.items() if weight > 0}
    actual = dict(zip(terms.tolist(), weights.tolist(), strict=True))
    assert actual == pytest.approx(positive, rel=1e-6)
    terms_without_hits, _ = expanded.row(1)
    assert terms_without_hits.tolist() == [5], "a query without hits does not change"


@pytest.mark.parametrize(("feedback", "expected"), SUMS_BY_HAND)
def test_dense_queries_are_moved_by_the_sums_by_hand(
    feedback: Feedback,
    expected: dict[int, float],
) -> None:
    queries = to_dense(QUERIES)
    shuffled = DOCUMENTS.take([3, 1, 0, 2])
    expanded = r.expand_dense(
        queries,
        QUERIES.ids,
        to_dense(shuffled),
        shuffled.ids,
        RUN,
        feedback,
    )
    weights = [expected.get(term, 0.0) for term in range(VOCAB_SIZE)]
    assert expanded[0].tolist() == pytest.approx(weights, rel=1e-5)
    assert torch.equal(expanded[1], queries[1]), "a query without hits does not change"


def test_default_weights_of_rocchio_are_for_vectors_of_equal_length() -> None:
    by_default = r.expand_sparse(QUERIES, DOCUMENTS, RUN, Feedback("rocchio", 2))
    explicit = r.expand_sparse(
        QUERIES,
        DOCUMENTS,
        RUN,
        Feedback("rocchio", 2, alpha=0.9, beta=0.1, equal_lengths=True),
    )
    assert by_default.data.tolist() == explicit.data.tolist()
    assert by_default.indices.tolist() == explicit.indices.tolist()


def test_a_document_without_terms_has_no_length_to_scale() -> None:
    documents = r.SparseVectors.from_rows({"a": {}, "b": {1: 1.0}}, VOCAB_SIZE)
    run: Run = {"q": {"a": 2.0, "b": 1.0}}
    feedback = Feedback("rocchio", 2)
    sparse = r.expand_sparse(QUERIES, documents, run, feedback)
    dense = r.expand_dense(
        to_dense(QUERIES),
        QUERIES.ids,
        to_dense(documents),
        documents.ids,
        run,
        feedback,
    )
    assert torch.allclose(to_dense(sparse), dense)


class SecondSearch:
    """A search with moved queries: records the run that it was given, returns a fixed one."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.basis: Run | None = None

    def __call__(self, basis: Run) -> Run:
        self.basis = basis
        return self.run


BEFORE_FEEDBACK: Run = {"q": {"a": 2.0, "b": 1.0}}
AFTER_FEEDBACK: Run = {"q": {"b": 5.0, "a": 4.0, "c": 3.0}}
SECOND_RANKING: Run = {"q": {"c": 9.0, "a": 1.0}}
# Only queries of the first ranking are answered.
SECOND_RANKING_OF_MORE_QUERIES: Run = {**SECOND_RANKING, "other": {"d": 1.0}}


@pytest.mark.parametrize(
    ("place", "is_basis_fused", "is_result_fused"),
    [
        ("before", True, False),
        ("after", False, True),
        ("both", True, True),
    ],
)
def test_interpolation_goes_before_feedback_after_it_or_both(
    place: Any,
    is_basis_fused: bool,
    is_result_fused: bool,
) -> None:
    basis, expected = BEFORE_FEEDBACK, AFTER_FEEDBACK
    if is_basis_fused:
        basis = r.interpolate([basis, SECOND_RANKING], [0.7, 0.3], "min_max", k=9)
    if is_result_fused:
        expected = r.interpolate([expected, SECOND_RANKING], [0.7, 0.3], "min_max", k=9)
    search = SecondSearch(AFTER_FEEDBACK)

    result = r.with_feedback(
        BEFORE_FEEDBACK,
        search,
        9,
        SECOND_RANKING_OF_MORE_QUERIES,
        Interpolation(place, 0.3),
    )

    assert result == expected
    assert search.basis == basis


def test_feedback_without_a_second_ranking_starts_from_the_first() -> None:
    search = SecondSearch(AFTER_FEEDBACK)
    assert r.with_feedback(BEFORE_FEEDBACK, search, 9) == AFTER_FEEDBACK
    assert search.basis == BEFORE_FEEDBACK


def test_a_second_ranking_without_an_interpolation_is_refused() -> None:
    search = SecondSearch(AFTER_FEEDBACK)
    with pytest.raises(ValueError, match="both or neither"):
        r.with_feedback(BEFORE_FEEDBACK, search, 9, SECOND_RANKING)


def test_interpolation_of_scores_that_are_not_normalized() -> None:
    expected = r.interpolate([BEFORE_FEEDBACK, SECOND_RANKING], [0.7, 0.3], "none", k=9)
    interpolation = Interpolation("after", 0.3, "none")
    mixed = interpolation.mix(BEFORE_FEEDBACK, SECOND_RANKING_OF_MORE_QUERIES, 9)
    assert mixed == expected


def test_vectors_of_bm25_score_as_its_search_does() -> None:
    collection = small_collection()
    index = r.BM25Index.build(collection.contents())
    queries = index.query_vectors(collection.queries)
    documents = index.document_vectors()
    assert documents.ids == list(collection.documents)
    assert documents.provenance == index.provenance

    run = r.hits_to_run(queries, r.build_index(documents, "exact").search(queries, 16))

    for query, scores in index.search(collection.queries, 16).items():
        assert run[query] == pytest.approx(scores, rel=1e-5)


def test_feedback_on_vectors_of_bm25_finds_more_documents() -> None:
    collection = small_collection()
    index = r.BM25Index.build(collection.contents())
    queries = index.query_vectors(collection.queries)
    documents = index.document_vectors()
    exact = r.build_index(documents, "exact")
    run = r.hits_to_run(queries, exact.search(queries, 16))

    expanded = r.expand_sparse(queries, documents, run, Feedback("rocchio", 1))
    run_after_feedback = r.hits_to_run(expanded, exact.search(expanded, 16))

    n_more = 0
    for query, scores in run.items():
        assert next(iter(run_after_feedback[query])) == next(iter(scores))
        n_more += len(run_after_feedback[query]) > len(scores)
    assert n_more > 0, "words of the first document find more documents"


def test_sparse_vectors_that_do_not_fit_are_refused() -> None:
    two_documents = DOCUMENTS.take([0, 1])
    message = "no vector of document 'c', which query 'q' retrieved, among the 2 vectors"
    with pytest.raises(DataError, match=message):
        r.expand_sparse(QUERIES, two_documents, RUN, Feedback())
    of_seven_terms = r.SparseVectors.from_rows({"a": {0: 1.0}}, 7)
    with pytest.raises(VocabularyMismatchError, match="vocabulary"):
        r.expand_sparse(QUERIES, of_seven_terms, RUN, Feedback())


def test_dense_vectors_that_do_not_fit_are_refused() -> None:
    vector = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"documents: expected \[2, 2\], got \(1, 2\)"):
        r.expand_dense(vector, ["q"], vector, ["a", "b"], RUN, Feedback())
    with pytest.raises(ValueError, match="top_terms: must be left out"):
        r.expand_dense(vector, ["q"], vector, ["a"], {}, Feedback(top_terms=3))


@pytest.mark.parametrize(
    "feedback",
    [
        pytest.param(Feedback("rocchio", 2, alpha=1e39), id="alpha"),
        pytest.param(Feedback("rocchio", 2, beta=1e300), id="beta"),
    ],
)
def test_sums_that_overflow_are_refused(feedback: Feedback) -> None:
    message = r"alpha, beta, gamma: expected weights .* use smaller weights"
    with pytest.raises(DataError, match=message):
        r.expand_sparse(QUERIES, DOCUMENTS, RUN, feedback)
    with pytest.raises(DataError, match=message):
        r.expand_dense(torch.ones(1, 4), ["q"], torch.ones(4, 4), DOCUMENTS.ids, RUN, feedback)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"method": "mean"},
            "^method: expected one of average, rocchio",
            id="unknown method",
        ),
        pytest.param({"depth": 0}, "^depth: expected an integer of at least 1", id="depth of 0"),
        pytest.param(
            {"top_terms": 0},
            "^top_terms: expected an integer of at least 1",
            id="top_terms of 0",
        ),
        pytest.param(
            {"alpha": 0.5},
            "^.*expected none of them with method='average'",
            id="average has no weights",
        ),
        pytest.param(
            {"method": "rocchio", "gamma": 0.1},
            "^gamma, bottom: expected both",
            id="gamma without bottom",
        ),
        pytest.param(
            {"method": "rocchio", "beta": float("nan")},
            "^beta: expected a finite number",
            id="beta of nan",
        ),
        pytest.param(
            {"method": "rocchio", "alpha": 0.0, "beta": 0.0},
            "^.*expected at least one above 0",
            id="alpha and beta of 0",
        ),
    ],
)
def test_wrong_options_of_feedback_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Feedback(**options)


def test_wrong_options_of_interpolation_are_refused() -> None:
    message = "^place: expected one of before, after, both, got 'middle'"
    with pytest.raises(ValueError, match=message):
        Interpolation("middle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^weight: expected a number in \[0, 1\], got 1.5"):
        Interpolation(weight=1.5)
