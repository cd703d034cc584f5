"""Pseudo relevance feedback (arXiv 2108.11044, 2205.00235).

A query is moved towards the documents that it retrieved, and searched with again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal, cast

import numpy as np

from tilefold._internal.arguments import (
    ArgumentError,
    check_choice,
    check_count,
    check_instance,
    check_mapping,
    check_number,
    list_of,
)
from tilefold._internal.typing import Tensor
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.errors import ArgumentDataError
from tilefold.retrieval.search.fusion import Fusion, Normalization
from tilefold.retrieval.vectors.sparse import (
    Row,
    SparseVectors,
    check_same_vocabulary,
    check_vectors,
)

__all__ = [
    "Feedback",
    "Interpolation",
    "expand_dense",
    "expand_sparse",
    "feedback_documents",
    "with_feedback",
]

METHODS = ("average", "rocchio")
PLACES = ("before", "after", "both")
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
# Depths of the published tables.
_DEFAULT_DEPTHS = {"average": 3, "rocchio": 5}
# Rocchio's published alpha and beta, for documents' vectors of their own lengths.
PUBLISHED_WEIGHTS = (0.4, 0.6)
# Rocchio's alpha and beta for documents' vectors of the query's length, chosen by the
# measurements in benchmarks/notes/retrieval.md.
EQUAL_LENGTH_WEIGHTS = (0.9, 0.1)


@dataclass(frozen=True)
class Feedback:
    """Options of pseudo-relevance feedback.

    Attributes:
        method: ``"average"`` or ``"rocchio"``.
        depth: number of best documents that count as relevant; None is 3 for ``"average"`` and 5
            for ``"rocchio"``.
        alpha, beta: Rocchio's weights of the query and of the mean of the best documents. The
            defaults are 0.9 and 0.1 if vectors are scaled to equal lengths, which were measured to
            do little harm, and otherwise the published 0.4 and 0.6.
        gamma: Rocchio's weight of the mean of the worst documents, which is subtracted.
        bottom: number of documents at the end of the ranking that count as the worst ones. A
            document that is among the best is not among the worst.
        top_terms: number of heaviest terms that a sparse query keeps; None keeps all. Of terms
            with equal weights, the lower ones are kept.
        equal_lengths: whether to scale each document's vector to the query's length (Euclidean
            norm) before they are added. If not, longer vectors count more, and documents mostly
            have longer vectors than queries. None scales for Rocchio without alpha and beta only.

    Raises:
        ValueError: if a value is out of range, an option of Rocchio is used with ``"average"``, or
            only one of gamma and bottom is above 0.

    Examples:
        >>> from tilefold.retrieval import BM25Index, Searcher, SearchRequest, load_collection
        >>> collection = load_collection("bank")
        >>> searcher = Searcher(BM25Index.build(collection.contents()))
        >>> request = SearchRequest(k=3, feedback=Feedback("rocchio", depth=2))
        >>> searcher.search("stolen card", request)[0]["id"]
        'cards'
    """

    method: Literal["average", "rocchio"] = "average"
    depth: int | None = None
    alpha: float | None = None
    beta: float | None = None
    gamma: float = 0.0
    bottom: int = 0
    top_terms: int | None = None
    equal_lengths: bool | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if an option is out of range or conflicts with another one."""
        check_choice("method", self.method, METHODS)
        for name, minimum in (("depth", 1), ("bottom", 0), ("top_terms", 1)):
            count = getattr(self, name)
            if count is not None:
                check_count(name, count, minimum)
        for name in ("alpha", "beta", "gamma"):
            weight = getattr(self, name)
            if weight is not None:
                _check_weight(name, weight)
        self._check_conflicts()

    def _check_conflicts(self) -> None:
        """Raise ``ArgumentError`` if options conflict with each other."""
        uses_rocchio_option = (
            self.alpha is not None or self.beta is not None or self.gamma != 0 or self.bottom != 0
        )
        if self.method == "average" and uses_rocchio_option:
            raise ArgumentError(
                ("alpha", "beta", "gamma", "bottom"),
                "expected none of them with method='average', got at least one; they are options "
                "of method='rocchio'.",
            )
        # gamma is the weight of the `bottom` worst documents, so neither has an effect alone.
        if bool(self.gamma) != bool(self.bottom):
            raise ArgumentError(
                ("gamma", "bottom"),
                f"expected both above 0 or neither, got {self.gamma} and {self.bottom}.",
            )
        if self.method == "rocchio" and self.alpha == self.beta == 0:
            raise ArgumentError(
                ("alpha", "beta"),
                "expected at least one above 0, got 0 and 0, which make every query empty.",
            )

    @property
    def k(self) -> int:
        """Number of best documents that count as relevant."""
        return self.depth or _DEFAULT_DEPTHS[self.method]

    def best_and_worst(self, ranking: Iterable[str]) -> tuple[list[str], list[str]]:
        """Return the best and the worst documents of a ranking, both in the order of the ranking.

        A document that is among the best is not among the worst.
        """
        ranked = list(ranking)
        best = ranked[: self.k]
        if not self.bottom:
            return best, []
        worst_begin = max(len(best), len(ranked) - self.bottom)
        return best, ranked[worst_begin:]

    def weights(self, n_best: int, n_worst: int) -> tuple[float, float, float]:
        """Return the weights of the query, of each best document and of each worst document.

        The weight of all best (or worst) documents is divided by their number.
        """
        if self.method == "average":
            return 1 / (1 + n_best), 1 / (1 + n_best), 0.0
        alpha, beta = EQUAL_LENGTH_WEIGHTS if self.scales else PUBLISHED_WEIGHTS
        if self.alpha is not None:
            alpha = self.alpha
        if self.beta is not None:
            beta = self.beta
        return alpha, beta / max(1, n_best), -self.gamma / max(1, n_worst)

    @property
    def scales(self) -> bool:
        """Whether documents' vectors are scaled to the query's length."""
        if self.equal_lengths is None:
            return self.method == "rocchio" and self.alpha is None and self.beta is None
        return self.equal_lengths


def _check_weight(name: str, weight: float) -> None:
    """Raise an error if a weight is not a finite number of at least 0."""
    check_number(name, weight)
    if not 0 <= weight < math.inf:
        raise ArgumentError(name, f"expected a finite number of at least 0, got {weight!r}.")


@dataclass(frozen=True)
class Interpolation:
    """Options of mixing the run of a second retriever into a run with feedback.

    Attributes:
        place: when the runs are mixed: ``"before"`` feedback, ``"after"`` it, or ``"both"``.
        weight: weight of the second run, in [0, 1]; the other run has ``1 - weight``.
        normalization: how scores are normalised, as in :func:`tilefold.retrieval.interpolate`.
            ``"none"`` with weight w orders as Pyserini's ``alpha * second + first`` with
            ``alpha = w / (1 - w)``, and ``"min_max"`` as its normalised form. A document that is
            missing from one run gets the minimum of that run.
    """

    place: Literal["before", "after", "both"] = "both"
    weight: float = 0.5
    normalization: Normalization = "min_max"

    def __post_init__(self) -> None:
        check_choice("place", self.place, PLACES)
        # A fusion checks its weight and its normalisation.
        Fusion("interpolation", self.weight, self.normalization)

    @property
    def mixes_before_feedback(self) -> bool:
        """Whether feedback reads a mixed run."""
        return self.place != "after"

    @property
    def mixes_after_feedback(self) -> bool:
        """Whether the run after feedback is mixed."""
        return self.place != "before"

    def mix(self, run: Run, second: Run, k: int) -> Run:
        """Mix two runs, and keep the `k` best documents of each query of `run`."""
        return Fusion("interpolation", self.weight, self.normalization).mix(run, second, k)

    def before_feedback(self, run: Run, second: Run, k: int) -> Run:
        """Return the run that feedback reads: `run`, or its mixture with the second run."""
        return self.mix(run, second, k) if self.mixes_before_feedback else run

    def after_feedback(self, run: Run, second: Run, k: int) -> Run:
        """Return the run after feedback: `run`, or its mixture with the second run."""
        return self.mix(run, second, k) if self.mixes_after_feedback else run


def with_feedback(
    run: Run,
    search_with_feedback: Callable[[Run], Run],
    k: int,
    second: Run | None = None,
    mix: Interpolation | None = None,
) -> Run:
    """Search again with feedback from a run, and interpolate with a second run.

    The second run is mixed into the run that feedback reads, into the result, or into both, as
    ``mix.place`` says.

    Args:
        run: the run without feedback.
        search_with_feedback: a function that expands the queries by the documents of a run
            (:func:`expand_sparse`, :func:`expand_dense`), searches with them and returns the new
            run.
        k: number of documents per query that an interpolation keeps.
        second: the run that is mixed in; None for no interpolation.
        mix: options of the interpolation; required if `second` is passed.

    Returns:
        The run of the expanded queries.

    Raises:
        ValueError: if only one of `second` and `mix` is passed.
    """
    if (second is None) != (mix is None):
        raise ArgumentError(("second", "mix"), "expected both or neither, got only one of them.")
    if second is None or mix is None:
        return search_with_feedback(run)
    feedback_run = mix.before_feedback(run, second, k)
    return mix.after_feedback(search_with_feedback(feedback_run), second, k)


def _check_run_and_feedback(run: object, feedback: object) -> None:
    """Raise ``TypeError`` if the arguments are not a run and options of feedback."""
    check_mapping("run", run, "query id -> scores by document")
    for query, scores in cast("Mapping[object, object]", run).items():
        check_mapping(f"run[{query!r}]", scores, "document id -> score")
    check_instance("feedback", feedback, Feedback, "Feedback()")


def feedback_documents(run: Run, feedback: Feedback) -> list[str]:
    """Return the ids of the documents whose vectors feedback needs, each once.

    They are the best and, if ``feedback.bottom`` is set, the worst documents of each query.
    """
    _check_run_and_feedback(run, feedback)
    documents: dict[str, None] = {}
    for scores in run.values():
        best, worst = feedback.best_and_worst(scores)
        documents.update(dict.fromkeys([*best, *worst]))
    return list(documents)


def expand_sparse(
    queries: SparseVectors,
    documents: SparseVectors,
    run: Run,
    feedback: Feedback,
) -> SparseVectors:
    """Expand sparse queries by the best (and worst) documents that a run has for them.

    Sums are computed in float64. Weights below 0, which Rocchio's gamma can cause, become 0.

    Args:
        queries: sparse vectors ``[Q, V]``.
        documents: sparse vectors ``[N, V]``, at least of the documents of
            :func:`feedback_documents`.
        run: query id -> document id -> score, best first. If a query has fewer documents than
            feedback reads, the mean is over all of them. A query without documents is not changed.
        feedback: options of feedback.

    Returns:
        The new queries ``[Q, V]``.

    Raises:
        VocabularyMismatchError: if queries and documents have different vocabularies.
        DataError: if a document has no vector, or if a weight of a query overflows float32.

    Examples:
        >>> from tilefold.retrieval import Feedback, SparseVectors
        >>> documents = SparseVectors.from_rows({"d1": {0: 1.0, 1: 1.0}}, vocab_size=3)
        >>> queries = SparseVectors.from_rows({"q1": {0: 1.0}}, vocab_size=3)
        >>> expanded = expand_sparse(queries, documents, {"q1": {"d1": 1.0}}, Feedback(depth=1))
        >>> expanded.indices.tolist(), expanded.data.tolist()  # the mean of the query and d1
        ([0, 1], [1.0, 0.5])
    """
    check_vectors("queries", queries)
    check_vectors("documents", documents)
    _check_run_and_feedback(run, feedback)
    check_same_vocabulary(queries, documents, "queries", "documents")
    # The empty arrays set the dtypes of the result if there are no queries.
    term_rows = [np.zeros(0, np.int32)]
    weight_rows = [np.zeros(0, np.float32)]
    lengths: list[int] = []
    for row, query in enumerate(queries.ids):
        best, worst = _find_document_rows(query, run, documents.row_of, feedback)
        terms, weights = _expand_row(queries.row(row), best, worst, documents, feedback)
        term_rows.append(terms)
        weight_rows.append(weights)
        lengths.append(len(terms))
    return replace(
        queries,
        indptr=offsets_of(np.array(lengths, np.int64)),
        indices=np.concatenate(term_rows),
        data=np.concatenate(weight_rows),
    )


def expand_dense(
    queries: Tensor,
    query_ids: Sequence[str],
    documents: Tensor,
    document_ids: Sequence[str],
    run: Run,
    feedback: Feedback,
) -> Tensor:
    """Expand dense queries by the best (and worst) documents that a run has for them.

    With a model that compares by cosine, pass normalised vectors or use ``equal_lengths``.

    Args:
        queries: query vectors ``[Q, D]``.
        query_ids: ids of the rows of `queries`.
        documents: document vectors ``[N, D]``, at least of the documents of
            :func:`feedback_documents`.
        document_ids: ids of the rows of `documents`.
        run: query id -> document id -> score, best first. A query without documents is not changed.
        feedback: options of feedback.

    Returns:
        The new queries ``[Q, D]`` in float32, on the device of `queries`.

    Raises:
        ValueError: if shapes do not match, or if `top_terms` is set, which is for sparse queries.
        DataError: if a document has no vector, or if an entry of a query overflows float32.
    """
    torch = import_module("torch")
    _check_run_and_feedback(run, feedback)
    query_ids = list_of("query_ids", query_ids)
    document_ids = list_of("document_ids", document_ids)
    for name, vectors, ids in (
        ("queries", queries, query_ids),
        ("documents", documents, document_ids),
    ):
        check_instance(name, vectors, torch.Tensor, "a tensor [N, D]")
        expected_shape = (len(ids), queries.shape[-1])
        if tuple(vectors.shape) != expected_shape:
            raise ArgumentError(
                name,
                f"expected {list(expected_shape)}, got {tuple(vectors.shape)}.",
            )
    if feedback.top_terms is not None:
        raise ArgumentError(
            "top_terms",
            "must be left out for dense vectors, which have no terms.",
        )
    row_of = {document: row for row, document in enumerate(document_ids)}
    expanded = queries.float().clone()
    for query_row, query_id in enumerate(query_ids):
        best, worst = _find_document_rows(query_id, run, row_of, feedback)
        if not best:
            continue
        query_weight, best_weight, worst_weight = feedback.weights(len(best), len(worst))
        query = queries[query_row].to(torch.float64)
        vectors = documents[[*best, *worst]].to(torch.float64)
        if feedback.scales:
            # Each document's vector is scaled to the query's length. A vector of zeros has no
            # finite scale, and stays as it is.
            scales = query.norm() / vectors.norm(dim=1, keepdim=True)
            vectors *= scales.nan_to_num(0.0, posinf=0.0)
        total = (
            query_weight * query
            + best_weight * vectors[: len(best)].sum(0)
            + worst_weight * vectors[len(best) :].sum(0)
        )
        _check_fits_float32(float(total.abs().max()))
        expanded[query_row] = total.float()
    return expanded


def _find_document_rows(
    query: str,
    run: Run,
    row_of: Mapping[str, int],
    feedback: Feedback,
) -> tuple[list[int], list[int]]:
    """Return the rows of the best and of the worst documents of a query.

    Args:
        query: the id of the query.
        run: query id -> document id -> score, best first.
        row_of: document id -> row of its vector.
        feedback: how many documents count as the best and the worst ones.

    Returns:
        Rows of the best documents and rows of the worst documents, both in the order of the run.

    Raises:
        ArgumentDataError: if a document has no row.
    """
    best, worst = feedback.best_and_worst(run.get(query, {}))
    for document in [*best, *worst]:
        if document not in row_of:
            raise ArgumentDataError(
                "documents",
                f"no vector of document {document!r}, which query {query!r} retrieved, among the "
                f"{len(row_of)} vectors; pass the vectors of the index that was searched.",
            )
    return [row_of[document] for document in best], [row_of[document] for document in worst]


def _check_fits_float32(largest: float) -> None:
    """Raise ``ArgumentDataError`` if the largest entry of a query is NaN or overflows float32."""
    if not largest <= _LARGEST_FLOAT32:
        raise ArgumentDataError(
            ("alpha", "beta", "gamma"),
            f"expected weights that keep the entries of a query below {_LARGEST_FLOAT32:.1e}, "
            f"got an entry of {largest:.3g}; use smaller weights.",
        )


def _expand_row(
    query: Row,
    best: list[int],
    worst: list[int],
    documents: SparseVectors,
    feedback: Feedback,
) -> Row:
    """Compute one sparse query after feedback, which adds weighted documents to it.

    The new query is ``query_weight * query + best_weight * sum(best) + worst_weight *
    sum(worst)``. If ``feedback.scales``, the vector of each document is first scaled to the
    Euclidean norm of the query.

    Args:
        query: terms and weights of the query before feedback.
        best: rows of the best documents.
        worst: rows of the worst documents.
        documents: vectors of the documents.
        feedback: options of feedback.

    Returns:
        The terms, ascending, and their weights, all above 0.
    """
    if not best:
        return query
    query_weight, best_weight, worst_weight = feedback.weights(len(best), len(worst))
    document_rows = [documents.row(row) for row in (*best, *worst)]
    factors = [best_weight] * len(best) + [worst_weight] * len(worst)
    if feedback.scales:
        query_norm = _norm(query)
        for position, document_row in enumerate(document_rows):
            document_norm = _norm(document_row)
            # A document without terms has the norm 0 and adds nothing.
            if document_norm:
                factors[position] = factors[position] * query_norm / document_norm
    summands = [query, *document_rows]
    factors = [query_weight, *factors]
    # The products of the same term in all vectors are added up.
    terms, term_positions = np.unique(
        np.concatenate([terms for terms, _ in summands]),
        return_inverse=True,
    )
    products = np.concatenate(
        [
            weights.astype(np.float64) * factor
            for (_, weights), factor in zip(summands, factors, strict=True)
        ],
    )
    sums = np.bincount(term_positions, products, minlength=len(terms))
    _check_fits_float32(float(sums.max(initial=0.0)))
    totals = np.maximum(sums, 0.0).astype(np.float32)
    positions = np.flatnonzero(totals > 0)
    if feedback.top_terms is not None and positions.size > feedback.top_terms:
        heaviest_first = np.lexsort((terms[positions], -totals[positions]))
        positions = np.sort(positions[heaviest_first[: feedback.top_terms]])
    return terms[positions], totals[positions]


def _norm(row: Row) -> float:
    """Return the Euclidean norm of a sparse vector, summed in float64."""
    _, weights = row
    return math.sqrt(float(np.square(weights, dtype=np.float64).sum()))
