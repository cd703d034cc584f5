"""Pseudo relevance feedback (arXiv 2108.11044, 2205.00235): a query moved towards the documents
that it found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Literal, cast

import numpy as np

from tilefold._internal.arguments import (
    check_choice,
    check_count,
    check_instance,
    check_mapping,
    check_share,
    list_of,
)
from tilefold._internal.typing import Tensor
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.errors import DataError
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
_LARGEST = float(np.finfo(np.float32).max)
_DEPTHS = {"average": 3, "rocchio": 5}  # of the published tables
PUBLISHED = 0.4, 0.6  # Rocchio's alpha and beta, of vectors as they are
EQUAL = (
    0.9,
    0.1,
)  # of vectors of equal length: docs/cli.md has what they were chosen on, of every kind of vectors


@dataclass(frozen=True)
class Feedback:
    """Options of pseudo-relevance feedback.

    Attributes:
        method: ``"average"`` or ``"rocchio"``.
        depth: k, the best documents that count as relevant; by default 3 for average and 5 for
            Rocchio.
        alpha, beta: Rocchio's weights of the query and of the mean of the best documents. By
            default 0.9 and 0.1 of vectors of equal length, which were measured to do little harm,
            else the published 0.4 and 0.6.
        gamma: Rocchio's weight of the mean of the worst ones, which is subtracted.
        bottom: m, how many documents at the end of the ranking are the worst ones; those among the
            best are not.
        top_terms: sparse queries keep this many heaviest terms; None keeps all. Equal weights: the
            lower index stays.
        equal_lengths: bring each document's vector to the query's length (Euclidean norm) before
            they are added, so that weights are shares, and not shares times lengths, of which
            documents mostly have the larger ones. None does so for Rocchio without alpha and beta,
            and takes vectors as they are otherwise.

    A value out of range, an option of Rocchio with average, or gamma without bottom is a
    ``ValueError``.
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
        check_choice("method", self.method, METHODS)
        for name, least in (("depth", 1), ("bottom", 0), ("top_terms", 1)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least)
        for name in ("alpha", "beta", "gamma"):
            if (value := getattr(self, name)) is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}: expected a finite number of at least 0, got {value!r}.")
        if self.method == "average" and (self.alpha, self.beta, self.gamma, self.bottom) != (
            None,
            None,
            0.0,
            0,
        ):
            raise ValueError(
                "alpha, beta, gamma, bottom: expected none of them with method='average', got one.",
            )
        if bool(self.gamma) != bool(self.bottom):
            raise ValueError("gamma, bottom: expected both or neither, got one alone.")
        if self.method == "rocchio" and self.alpha == self.beta == 0:
            raise ValueError(
                "alpha, beta: expected one above 0, got 0 and 0, which leave nothing of a query.",
            )

    @property
    def k(self) -> int:
        return self.depth or _DEPTHS[self.method]

    def chosen(self, ranking: Iterable[str]) -> tuple[list[str], list[str]]:
        """The best and the worst documents of a ranking, best first."""
        ranked = list(ranking)
        best = ranked[: self.k]
        return best, ranked[max(len(best), len(ranked) - self.bottom) :] if self.bottom else []

    def weights(self, n_best: int, n_worst: int) -> tuple[float, float, float]:
        """Weights of the query, of each of the best, and of each of the worst documents."""
        if self.method == "average":
            return 1 / (1 + n_best), 1 / (1 + n_best), 0.0
        alpha, beta = EQUAL if self.scales else PUBLISHED
        alpha, beta = (
            (alpha if self.alpha is None else self.alpha),
            (beta if self.beta is None else self.beta),
        )
        return alpha, beta / max(1, n_best), -self.gamma / max(1, n_worst)

    @property
    def scales(self) -> bool:
        """Whether documents' vectors are brought to the query's length."""
        if self.equal_lengths is None:
            return self.method == "rocchio" and self.alpha is None and self.beta is None
        return self.equal_lengths


@dataclass(frozen=True)
class Interpolation:
    """Options of mixing a second ranking in: ``weight`` of it, ``1 - weight`` of the one with
    feedback.

    Attributes:
        place: ``"before"`` feedback, ``"after"`` it, or ``"both"``.
        weight: of the second ranking, in [0, 1].
        normalization: of :func:`tilefold.retrieval.interpolate`. ``"none"`` with weight w orders as
            Pyserini's ``alpha * second + first`` with ``alpha = w / (1 - w)``, and ``"min_max"`` as
            its normalised form. A document that one side lacks takes that side's minimum.
    """

    place: Literal["before", "after", "both"] = "both"
    weight: float = 0.5
    normalization: Normalization = "min_max"

    def __post_init__(self) -> None:
        check_choice("place", self.place, PLACES)
        check_share("weight", self.weight)

    def mix(self, run: Run, second: Run, k: int) -> Run:
        """Both rankings of the queries of `run`, `k` documents each."""
        return Fusion("interpolation", self.weight, self.normalization).mix(run, second, k)


def with_feedback(
    first: Run,
    again: Callable[[Run], Run],
    k: int,
    second: Run | None = None,
    mix: Interpolation | None = None,
) -> Run:
    """The ranking after feedback from `first`, interpolated with a `second` one where `mix` says;
    both or neither.

    `again` expands queries by the documents of a given ranking (:func:`expand_sparse`,
    :func:`expand_dense`), and searches; an interpolation keeps `k` documents per query.
    """
    if (second is None) != (mix is None):
        raise ValueError("second, mix: expected both or neither, got one alone.")
    if second is None or mix is None:
        return again(first)
    found = again(first if mix.place == "after" else mix.mix(first, second, k))
    return found if mix.place == "before" else mix.mix(found, second, k)


def _check_run_and_feedback(run: object, feedback: object) -> None:
    """Raise ``TypeError`` unless these are a run and options of feedback."""
    check_mapping("run", run, "query id -> scores by document")
    for query, scores in cast("Mapping[object, object]", run).items():
        check_mapping(f"run[{query!r}]", scores, "document id -> score")
    check_instance("feedback", feedback, Feedback, "Feedback()")


def feedback_documents(run: Run, feedback: Feedback) -> list[str]:
    """The distinct documents whose vectors :func:`expand_sparse` and :func:`expand_dense` need."""
    _check_run_and_feedback(run, feedback)
    return list(
        dict.fromkeys(
            name for scores in run.values() for part in feedback.chosen(scores) for name in part
        ),
    )


def expand_sparse(
    queries: SparseVectors,
    documents: SparseVectors,
    run: Run,
    feedback: Feedback,
) -> SparseVectors:
    """The queries after feedback from the documents that `run` ranks first (and last) for them.

    Sums of the Q vectors ``[Q, V]`` and those of at least :func:`feedback_documents` are taken in
    float64; weights below 0, which Rocchio's gamma can give, become 0. Where fewer than k documents
    were found, the mean is over those, and a query for which none was found stays as it is.
    Documents of another vocabulary are a ``VocabularyMismatchError``, a missing one or weights so
    large that the query's overflows a ``DataError``.
    """
    check_vectors("queries", queries)
    check_vectors("documents", documents)
    _check_run_and_feedback(run, feedback)
    check_same_vocabulary(queries, documents, "queries", "documents")
    rows = [(np.zeros(0, np.int32), np.zeros(0, np.float32))]
    for i, name in enumerate(queries.ids):
        rows.append(
            _expanded(
                queries.row(i),
                *_parts(name, run, documents.row_of, feedback),
                documents,
                feedback,
            ),
        )
    terms, weights = (np.concatenate(part) for part in zip(*rows, strict=True))
    offsets = offsets_of(np.array([len(row) for row, _ in rows[1:]], np.int64))
    return replace(queries, indptr=offsets, indices=terms, data=weights)


def expand_dense(
    queries: Tensor,
    query_ids: Sequence[str],
    documents: Tensor,
    document_ids: Sequence[str],
    run: Run,
    feedback: Feedback,
) -> Tensor:
    """Expand dense vectors ``[Q, D]`` by ``[N, D]``, as :func:`expand_sparse`: float32 ``[Q, D]``,
    on their device.

    With a model that compares by cosine, give normalised vectors or ask for ``equal_lengths``.
    Shapes that do not fit are a ``ValueError``, and so is `top_terms`, which is for sparse queries.
    """
    _check_run_and_feedback(run, feedback)
    query_ids = list_of("query_ids", query_ids)
    document_ids = list_of("document_ids", document_ids)
    for name, vectors, ids in (
        ("queries", queries, query_ids),
        ("documents", documents, document_ids),
    ):
        check_instance(name, vectors, import_module("torch").Tensor, "a tensor [N, D]")
        if (
            vectors.ndim != 2
            or vectors.shape[0] != len(ids)
            or vectors.shape[1] != queries.shape[-1]
        ):
            raise ValueError(
                f"{name}: expected [{len(ids)}, {queries.shape[-1]}], got {tuple(vectors.shape)}.",
            )
    if feedback.top_terms is not None:
        raise ValueError("top_terms: expected None for dense vectors, which have no terms to cut.")
    double = import_module("torch").float64
    row_of = {name: row for row, name in enumerate(document_ids)}
    expanded = queries.float().clone()
    for i, name in enumerate(query_ids):
        best, worst = _parts(name, run, row_of, feedback)
        if best:
            own, each, each_worst = feedback.weights(len(best), len(worst))
            query, moves = queries[i].to(double), documents[[*best, *worst]].to(double)
            if feedback.scales:
                moves *= (query.norm() / moves.norm(dim=1, keepdim=True)).nan_to_num(0.0, 0.0)
            total = (
                own * query
                + each * moves[: len(best)].sum(0)
                + each_worst * moves[len(best) :].sum(0)
            )
            _check_finite(float(total.abs().max()))
            expanded[i] = total.float()
    return expanded


def _parts(
    query: str,
    run: Run,
    row_of: Mapping[str, int],
    feedback: Feedback,
) -> tuple[list[int], list[int]]:
    """Rows of the best and the worst documents of a query."""
    best, worst = feedback.chosen(run.get(query, {}))
    if (
        missing := next((name for name in (*best, *worst) if name not in row_of), None)
    ) is not None:
        got = f"those of {len(row_of)} others, {list(row_of)[:3]} first. Give those searched"
        raise DataError(
            f"documents: expected a vector of {missing!r}, which was found for query {query!r}, got {got}.",
        )
    return [row_of[name] for name in best], [row_of[name] for name in worst]


def _check_finite(largest: float) -> None:
    if not largest <= _LARGEST:
        got = f"got an entry of {largest:.3g}; give smaller ones"
        raise DataError(
            f"alpha, beta, gamma: expected weights that keep a query below {_LARGEST:.1e}, {got}.",
        )


def _expanded(
    query: Row,
    best: list[int],
    worst: list[int],
    documents: SparseVectors,
    feedback: Feedback,
) -> Row:
    """Terms, ascending, and positive weights of one query after feedback."""
    if not best:
        return query
    own, each, each_worst = feedback.weights(len(best), len(worst))
    parts = [query, *map(documents.row, (*best, *worst))]
    factors = [own, *[each] * len(best), *[each_worst] * len(worst)]
    if feedback.scales:
        length, *others = (
            math.sqrt(float(np.square(row, dtype=np.float64).sum())) for _, row in parts
        )
        factors[1:] = [
            each * length / other if other else 0.0
            for each, other in zip(factors[1:], others, strict=True)
        ]
    terms, where = np.unique(np.concatenate([row for row, _ in parts]), return_inverse=True)
    values = np.concatenate(
        [row.astype(np.float64) * factor for (_, row), factor in zip(parts, factors, strict=True)],
    )
    sums = np.bincount(where, values, minlength=len(terms))
    _check_finite(float(sums.max(initial=0.0)))
    totals = np.maximum(sums, 0.0).astype(np.float32)
    keep = np.flatnonzero(totals > 0)
    if feedback.top_terms is not None and keep.size > feedback.top_terms:
        keep = np.sort(keep[np.lexsort((terms[keep], -totals[keep]))[: feedback.top_terms]])
    return terms[keep], totals[keep]
