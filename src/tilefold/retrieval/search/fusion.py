"""Combine the runs of several retrievers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from tilefold._internal.arguments import (
    ArgumentError,
    check_choice,
    check_instance,
    check_integer,
    check_least,
    check_mapping,
    check_share,
    list_of,
)
from tilefold.retrieval.common.files import check_text_ids
from tilefold.retrieval.common.runs import Run

__all__ = ["Fusion", "Normalization", "interpolate", "reciprocal_rank_fusion"]

Normalization = Literal["min_max", "z_score", "none"]
"""How :func:`interpolate` makes scores of different retrievers comparable."""

METHODS = ("rrf", "interpolation")
_Scores = Mapping[str, float]
# Normalised scores of documents, and the score of a document that the run did not return.
_Normalized = tuple[dict[str, float], float]


def interpolate(
    runs: Sequence[Run],
    weights: Sequence[float] | None = None,
    normalization: Normalization = "min_max",
    k: int = 1000,
) -> Run:
    """Fuse runs by weighted sums of their normalised scores, query by query.

    Each run is normalised by its own scores for the query: ``min_max`` maps them to [0, 1],
    ``z_score`` to mean 0 and deviation 1, ``none`` leaves them. A document that a run did not
    return gets the minimum of that run for the query after normalisation. When all scores of a run
    are equal, ``min_max`` gives 1 to its documents and 0 to the others, and ``z_score`` gives 0 to
    all. A run without results for a query adds nothing to that query.

    A tail of :func:`tilefold.retrieval.rerank` (``tail="keep"``) counts as that minimum, to within
    a rounding, under ``min_max``. ``z_score`` takes its mean over the tail, so drop the tail there.

    Args:
        runs: at least one run.
        weights: one finite number per run; equal weights of ``1 / len(runs)`` when None.
        normalization: see above.
        k: documents kept per query, by descending score. Equal scores keep the order of the runs.

    Raises:
        ValueError: for no run, an unknown normalisation, or a score, weight or sum that is not
            finite.
    """
    runs = list_of("runs", runs)
    weights = _check_runs(runs, weights, k)
    check_choice("normalization", normalization, _NORMALIZERS)
    normalize = _NORMALIZERS[normalization]
    fused: Run = {}
    for query_id in _query_ids(runs):
        # Per run with results: its weight, normalised scores and the score of other documents.
        weighted: list[tuple[float, dict[str, float], float]] = []
        for run, weight in zip(runs, weights, strict=True):
            if run.get(query_id):
                scores, missing_score = normalize(run[query_id])
                weighted.append((weight, scores, missing_score))
        documents = dict.fromkeys(document for _, scores, _ in weighted for document in scores)
        sums = {
            document: sum(
                weight * scores.get(document, missing_score)
                for weight, scores, missing_score in weighted
            )
            for document in documents
        }
        for score in sums.values():
            if not math.isfinite(score):
                raise ArgumentError(
                    ("weights", "normalization"),
                    f"expected finite sums, got {score} for query "
                    f"{query_id!r}. Take smaller weights, or normalization='min_max'.",
                )
        fused[query_id] = _top(sums, k)
    return fused


def reciprocal_rank_fusion(runs: Sequence[Run], k: int = 60) -> Run:
    """Fuse runs by the sum of ``1 / (k + rank)``, with ranks from 1.

    Cormack, Clarke and Büttcher, SIGIR 2009. A run adds nothing to documents that it lacks. Equal
    scores within a run are ranked in the order of the run.

    Args:
        runs: at least one run.
        k: constant that reduces the influence of the first ranks.
    """
    runs = list_of("runs", runs)
    _check_runs(runs, weights=None, k=k)
    fused: Run = {}
    for query_id in _query_ids(runs):
        sums: dict[str, float] = {}
        for run in runs:
            ranked = _top(run.get(query_id, {}), k=None)
            for rank, document in enumerate(ranked, start=1):
                sums[document] = sums.get(document, 0.0) + 1.0 / (k + rank)
        fused[query_id] = _top(sums, k=None)
    return fused


@dataclass(frozen=True)
class Fusion:
    """Options of fusing two rankings.

    Attributes:
        method: ``"rrf"`` (reciprocal ranks) or ``"interpolation"``.
        weight: weight of the second ranking in an interpolation, in [0, 1].
        normalization: of :func:`interpolate`.
    """

    method: Literal["rrf", "interpolation"] = "rrf"
    weight: float = 0.5
    normalization: Normalization = "min_max"

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_share("weight", self.weight)
        check_choice("normalization", self.normalization, _NORMALIZERS)

    def mix(self, run: Run, second: Run, k: int) -> Run:
        """Fuse two runs for the queries of `run`; `k` documents are kept of each query."""
        runs = [run, {query: second[query] for query in run if query in second}]
        if self.method == "interpolation":
            return interpolate(runs, [1 - self.weight, self.weight], self.normalization, k=k)
        fused = reciprocal_rank_fusion(runs)
        return {query: dict(list(scores.items())[:k]) for query, scores in fused.items()}


def check_scores(
    name: str,
    query_id: str,
    scores: Mapping[str, float],
    *,
    finite: bool = True,
) -> None:
    """Check the scores of one query of a run.

    Args:
        name: name of the argument, for errors.
        query_id: of the scores.
        scores: document id -> score.
        finite: refuse infinite scores, too.

    Raises:
        TypeError: for scores that are no mapping, or ids that are no strings.
        ValueError: for scores that are NaN, no numbers or, with `finite`, infinite.
    """
    check_mapping(f"{name}[{query_id!r}]", scores, "document id -> score")
    check_text_ids(name, scores)
    for document, score in scores.items():
        try:
            is_valid = math.isfinite(score) if finite else not math.isnan(score)
        except TypeError:
            is_valid = False
        if is_valid:
            continue
        if finite:
            raise ArgumentError(
                name,
                f"expected finite scores, got {score!r} for {document!r} of query {query_id!r}.",
            )
        raise ArgumentError(
            name,
            f"query {query_id!r} has a score that is not a number: {score!r} for {document!r}.",
        )


def _check_runs(runs: Sequence[Run], weights: Sequence[float] | None, k: int) -> Sequence[float]:
    """Check the arguments of a fusion, and return the weight of each run.

    Args:
        runs: the runs to fuse.
        weights: one finite number per run; None for equal weights that sum to 1.
        k: an integer of at least 1.

    Raises:
        TypeError: for a run that is no mapping of mappings, or a weight that is no number.
        ValueError: for no runs, a weight missing or too many, or a number that is not finite.
    """
    if not runs:
        raise ArgumentError("runs", "expected at least one run, got an empty list.")
    check_integer("k", k)
    check_least("k", k)
    for number, run in enumerate(runs):
        check_mapping(f"runs[{number}]", run, "query id -> scores by document")
        check_text_ids("runs", run)
        for query_id, scores in run.items():
            check_scores("runs", query_id, scores)
    if weights is None:
        return [1.0 / len(runs)] * len(runs)
    weights = list_of("weights", weights)
    if len(weights) != len(runs):
        raise ArgumentError(
            "weights",
            f"expected one number for each of {len(runs)} runs, got {len(weights)}.",
        )
    for weight in weights:
        check_instance("weights", weight, Real, "one number per run")
    if not all(math.isfinite(weight) for weight in weights):
        raise ArgumentError("weights", f"expected finite numbers, got {weights}.")
    return weights


def _query_ids(runs: Sequence[Run]) -> list[str]:
    """Ids of the queries of all runs, each once."""
    return list(dict.fromkeys(query_id for run in runs for query_id in run))


def _top(scores: _Scores, k: int | None) -> dict[str, float]:
    """Return the `k` highest scores, best first; all of them if `k` is None."""
    return dict(sorted(scores.items(), key=lambda item: -item[1])[:k])


def _min_max(scores: _Scores) -> _Normalized:
    """Map the scores of a query linearly to [0, 1].

    Equal scores all become 1.

    Returns:
        The normalized scores, and 0 as the score of a document that the run lacks.
    """
    low = min(scores.values())
    high = max(scores.values())
    if high == low:
        return dict.fromkeys(scores, 1.0), 0.0
    # A power of 2 changes no digit, and brings the largest score to about 1: no difference is
    # infinite or loses digits.
    exponent = -math.frexp(max(abs(low), abs(high)))[1]
    low = math.ldexp(low, exponent)
    high = math.ldexp(high, exponent)
    normalized = {
        document: (math.ldexp(score, exponent) - low) / (high - low)
        for document, score in scores.items()
    }
    return normalized, 0.0


def _z_score(scores: _Scores) -> _Normalized:
    """Map the scores of a query to mean 0 and standard deviation 1.

    Equal scores all become 0.

    Returns:
        The normalized scores, and the lowest one as the score of a document that the run lacks.
    """
    # Equal scores are found by comparison. Their computed deviation may differ from 0, because
    # their mean is rounded.
    if min(scores.values()) == max(scores.values()):
        return dict.fromkeys(scores, 0.0), 0.0
    # Scores in [0, 1] have the same z-scores, and their squares do not overflow.
    scaled, _ = _min_max(scores)
    mean = math.fsum(scaled.values()) / len(scaled)
    variance = math.fsum((score - mean) ** 2 for score in scaled.values()) / len(scaled)
    deviation = math.sqrt(variance)
    normalized = {document: (score - mean) / deviation for document, score in scaled.items()}
    return normalized, min(normalized.values())


def _unchanged(scores: _Scores) -> _Normalized:
    """Leave scores as they are."""
    return dict(scores), min(scores.values())


_NORMALIZERS: dict[str, Callable[[_Scores], _Normalized]] = {
    "min_max": _min_max,
    "z_score": _z_score,
    "none": _unchanged,
}
