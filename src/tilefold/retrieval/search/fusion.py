"""Combine the runs of several retrievers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from tilefold._internal.arguments import (
    check_choice,
    check_instance,
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
_Normalized = tuple[dict[str, float], float]  # scores, and that of a document without one


def interpolate(
    runs: Sequence[Run],
    weights: Sequence[float] | None = None,
    normalization: Normalization = "min_max",
    k: int = 1000,
) -> Run:
    """Weighted sum of normalised scores, query by query.

    Each run is normalised by its own scores for the query: ``min_max`` maps them to [0, 1],
    ``z_score`` to mean 0 and deviation 1, ``none`` leaves them. A document that a run did not
    return gets the minimum of that run for the query after normalisation. When all scores of a run
    are equal, ``min_max`` gives 1 to its documents and 0 to the others, and ``z_score`` gives 0 to
    all. A run without results for a query adds nothing to that query. What
    :func:`tilefold.retrieval.rerank` puts below its depth (``tail="keep"``) counts as that minimum,
    to within a rounding, under ``min_max``; ``z_score`` takes its mean over it, so drop that tail
    there.

    Args:
        runs: at least one run.
        weights: one finite number per run; equal weights of ``1 / len(runs)`` when None.
        normalization: see above.
        k: documents kept per query, by descending score; equal scores keep the order of the runs.

    No run, an unknown normalisation, or a score, weight or sum that is not finite is a
    ``ValueError``.
    """
    runs = list_of("runs", runs)
    weights = _check(runs, weights, k)
    check_choice("normalization", normalization, _NORMALIZERS)
    normalize = _NORMALIZERS[normalization]
    fused: Run = {}
    for query_id in _queries(runs):
        weighted = zip(runs, weights, strict=True)
        present = [
            (weight, *normalize(run[query_id])) for run, weight in weighted if run.get(query_id)
        ]
        documents = dict.fromkeys(doc for _, scores, _ in present for doc in scores)
        total = {
            doc: sum(weight * scores.get(doc, low) for weight, scores, low in present)
            for doc in documents
        }
        for wrong in (score for score in total.values() if not math.isfinite(score)):
            got = (
                f"{wrong} for query {query_id!r}. Take smaller weights, or normalization='min_max'"
            )
            raise ValueError(f"weights, normalization: expected finite sums, got {got}.")
        fused[query_id] = _top(total, k)
    return fused


def reciprocal_rank_fusion(runs: Sequence[Run], k: int = 60) -> Run:
    """Sum of ``1 / (k + rank)`` over the runs, ranks from 1 (Cormack, Clarke and Büttcher, SIGIR
    2009).

    A run without a document adds nothing. Equal scores within a run are ranked in the order in
    which the run holds them.
    """
    runs = list_of("runs", runs)
    _check(runs, None, k)
    fused: Run = {}
    for query_id in _queries(runs):
        total: dict[str, float] = {}
        for run in runs:
            for rank, doc in enumerate(_top(run.get(query_id, {}), None), start=1):
                total[doc] = total.get(doc, 0.0) + 1.0 / (k + rank)
        fused[query_id] = _top(total, None)
    return fused


@dataclass(frozen=True)
class Fusion:
    """Options of fusing two rankings.

    Attributes:
        method: ``"rrf"`` (reciprocal ranks) or ``"interpolation"``.
        weight: of the second ranking in an interpolation, in [0, 1].
        normalization: of :func:`interpolate`.
    """

    method: Literal["rrf", "interpolation"] = "rrf"
    weight: float = 0.5
    normalization: Normalization = "min_max"

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_share("weight", self.weight)

    def mix(self, run: Run, second: Run, k: int) -> Run:
        """Both rankings of the queries of `run`, `k` documents each."""
        runs = [run, {query: second[query] for query in run if query in second}]
        if self.method == "interpolation":
            return interpolate(runs, [1 - self.weight, self.weight], self.normalization, k=k)
        return {
            query: dict(list(scores.items())[:k])
            for query, scores in reciprocal_rank_fusion(runs).items()
        }


def check_scores(
    name: str,
    query_id: str,
    scores: Mapping[str, float],
    *,
    finite: bool = True,
) -> None:
    """Raise an error for ids that are no text, and for scores that are NaN, no numbers or, if
    asked, not finite.
    """
    check_mapping(f"{name}[{query_id!r}]", scores, "document id -> score")
    check_text_ids(name, scores)
    right = math.isfinite if finite else lambda score: not math.isnan(score)
    for document, score in scores.items():
        try:
            if right(score):
                continue
        except TypeError:
            pass
        if finite:
            raise ValueError(
                f"{name}: expected finite scores, got {score!r} for {document!r} of query {query_id!r}.",
            )
        raise ValueError(
            f"{name}: query {query_id!r} has a score that is not a number: {score!r} for {document!r}.",
        )


def _check(runs: Sequence[Run], weights: Sequence[float] | None, k: int) -> Sequence[float]:
    if not runs:
        raise ValueError("runs: expected at least one run, got an empty list.")
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
        raise ValueError(
            f"weights: expected one number for each of {len(runs)} runs, got {len(weights)}.",
        )
    for weight in weights:
        check_instance("weights", weight, Real, "one number per run")
    if not all(math.isfinite(weight) for weight in weights):
        raise ValueError(f"weights: expected finite numbers, got {weights}.")
    return weights


def _queries(runs: Sequence[Run]) -> list[str]:
    return list(dict.fromkeys(query_id for run in runs for query_id in run))


def _top(scores: _Scores, k: int | None) -> dict[str, float]:
    return dict(sorted(scores.items(), key=lambda item: -item[1])[:k])


def _min_max(scores: _Scores) -> _Normalized:
    low, high = min(scores.values()), max(scores.values())
    if high == low:
        return dict.fromkeys(scores, 1.0), 0.0
    # A power of 2 changes no digit, and brings the largest score to about 1: no difference is
    # infinite or loses digits.
    exponent = -math.frexp(max(abs(low), abs(high)))[1]
    low, high = math.ldexp(low, exponent), math.ldexp(high, exponent)
    return {
        doc: (math.ldexp(score, exponent) - low) / (high - low) for doc, score in scores.items()
    }, 0.0


def _z_score(scores: _Scores) -> _Normalized:
    if min(scores.values()) == max(
        scores.values(),
    ):  # their mean may be another number, by a rounding
        return dict.fromkeys(scores, 0.0), 0.0
    within, _ = _min_max(scores)  # the same z-scores, of numbers whose squares are of ordinary size
    mean = math.fsum(within.values()) / len(within)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in within.values()) / len(within))
    normalized = {doc: (score - mean) / deviation for doc, score in within.items()}
    return normalized, min(normalized.values())


_NORMALIZERS: dict[str, Callable[[_Scores], _Normalized]] = {
    "min_max": _min_max,
    "z_score": _z_score,
    "none": lambda scores: (dict(scores), min(scores.values())),
}
