"""Combine the runs of several retrievers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple

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


class _NormalizedScores(NamedTuple):
    """Scores of a run for one query after normalisation.

    Attributes:
        scores: document id -> normalised score.
        missing_score: the score of a document that is missing from the run.
    """

    scores: dict[str, float]
    missing_score: float


def interpolate(
    runs: Sequence[Run],
    weights: Sequence[float] | None = None,
    normalization: Normalization = "min_max",
    k: int = 1000,
) -> Run:
    """Fuse runs by weighted sums of their normalised scores, query by query.

    The scores of each run for a query are normalised by themselves: ``min_max`` maps them to
    [0, 1], ``z_score`` to mean 0 and standard deviation 1, ``none`` does not change them. A
    document that is missing from a run gets the minimum of that run after normalisation. If all
    scores of a run are equal, ``min_max`` gives 1 to its documents and 0 to missing ones, and
    ``z_score`` gives 0 to all. A run without results for a query adds nothing to that query.

    With ``min_max``, the tail of :func:`tilefold.retrieval.rerank` (``tail="keep"``) has the
    minimum of the run, to within rounding. With ``z_score``, it would change the mean, so use
    ``tail="drop"``.

    Args:
        runs: at least one run.
        weights: one finite number per run; None gives each run the weight ``1 / len(runs)``.
        normalization: ``"min_max"``, ``"z_score"`` or ``"none"``.
        k: number of documents per query that are kept, by descending score. Equal scores keep the
            order of the runs.

    Raises:
        ValueError: if there is no run, if the normalisation is unknown, or if a score, weight or
            sum is not finite.

    Examples:
        >>> words = {"q1": {"cards": 3.0, "pin": 1.0}}
        >>> dense = {"q1": {"pin": 0.8, "cards": 0.2}}
        >>> interpolate([words, dense], weights=[0.7, 0.3])
        {'q1': {'cards': 0.7, 'pin': 0.3}}
    """
    runs = list_of("runs", runs)
    weights = _check_runs(runs, weights, k)
    check_choice("normalization", normalization, _NORMALIZERS)
    return _sum_normalized(_normalize(runs, normalization), weights, k)


def interpolate_by_each(
    runs: Sequence[Run],
    all_weights: Sequence[Sequence[float]],
    normalization: Normalization = "min_max",
    k: int = 1000,
) -> Iterator[Run]:
    """Fuse the same runs by weighted sums with several weights; scores are normalised only once.

    Args:
        runs: at least one run.
        all_weights: for each fusion, one finite number per run.
        normalization: ``"min_max"``, ``"z_score"`` or ``"none"``.
        k: number of documents per query that are kept.

    Yields:
        The fused run of each of `all_weights`.

    Raises:
        ValueError: if there is no run, if the normalisation is unknown, or if a score, weight or
            sum is not finite.
    """
    runs = list_of("runs", runs)
    _check_runs(runs, weights=None, k=k)
    check_choice("normalization", normalization, _NORMALIZERS)
    normalized_runs = _normalize(runs, normalization)
    for weights in all_weights:
        yield _sum_normalized(normalized_runs, _check_weights(weights, len(runs)), k)


def _normalize(
    runs: Sequence[Run],
    normalization: Normalization,
) -> dict[str, list[_NormalizedScores | None]]:
    """Normalise the scores of each run, query by query.

    Args:
        runs: the runs: query id -> document id -> score.
        normalization: how the scores of a query are normalised.

    Returns:
        Query id -> the scores of each run; None for a run without results for the query.
    """
    normalize = _NORMALIZERS[normalization]
    return {
        query_id: [normalize(run[query_id]) if run.get(query_id) else None for run in runs]
        for query_id in _query_ids(runs)
    }


def _sum_normalized(
    normalized_runs: Mapping[str, Sequence[_NormalizedScores | None]],
    weights: Sequence[float],
    k: int,
) -> Run:
    """Sum normalised scores with weights, query by query.

    Args:
        normalized_runs: the result of :func:`_normalize`.
        weights: one number per run.
        k: number of documents per query that are kept.

    Raises:
        ArgumentError: if a sum is not finite.
    """
    fused: Run = {}
    for query_id, scores_by_run in normalized_runs.items():
        weighted = [
            (weight, normalized)
            for weight, normalized in zip(weights, scores_by_run, strict=True)
            if normalized is not None
        ]
        documents = dict.fromkeys(
            document for _, normalized in weighted for document in normalized.scores
        )
        sums = {
            document: sum(
                weight * normalized.scores.get(document, normalized.missing_score)
                for weight, normalized in weighted
            )
            for document in documents
        }
        for score in sums.values():
            if not math.isfinite(score):
                raise ArgumentError(
                    ("weights", "normalization"),
                    f"expected finite sums, got {score} for query "
                    f"{query_id!r}. Use smaller weights, or normalization='min_max'.",
                )
        fused[query_id] = _top(sums, k)
    return fused


def reciprocal_rank_fusion(runs: Sequence[Run], k: int = 60) -> Run:
    """Fuse runs by the sum of ``1 / (k + rank)``, with ranks from 1.

    Cormack, Clarke and Büttcher, SIGIR 2009. A run adds nothing to documents that are missing from
    it. Equal scores within a run are ranked in the order of the run.

    Args:
        runs: at least one run.
        k: constant that reduces the influence of the first ranks.

    Returns:
        Query id -> document id -> sum, best first, with all documents of the runs.

    Examples:
        >>> words = {"q1": {"cards": 3.2, "pin": 1.1}}
        >>> dense = {"q1": {"pin": 0.8, "limits": 0.7}}
        >>> list(reciprocal_rank_fusion([words, dense])["q1"])
        ['pin', 'cards', 'limits']
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
    """Options of fusing two runs.

    Attributes:
        method: ``"rrf"`` (reciprocal ranks) or ``"interpolation"``.
        weight: weight of the second run in an interpolation, in [0, 1].
        normalization: how an interpolation normalises scores, as in :func:`interpolate`.

    Examples:
        >>> from tilefold.retrieval import Searcher, SearchRequest
        >>> request = SearchRequest(k=10, fusion=Fusion("interpolation", weight=0.3))
        >>> request.fusion.method
        'interpolation'
    """

    method: Literal["rrf", "interpolation"] = "rrf"
    weight: float = 0.5
    normalization: Normalization = "min_max"

    def __post_init__(self) -> None:
        check_choice("method", self.method, METHODS)
        check_share("weight", self.weight)
        check_choice("normalization", self.normalization, _NORMALIZERS)

    def mix(self, run: Run, second: Run, k: int) -> Run:
        """Fuse two runs, and keep the `k` best documents of each query of `run`."""
        # Queries of `second` that `run` lacks are left out.
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
        name: the name of the argument that is the run, for errors.
        query_id: the id of the query.
        scores: document id -> score.
        finite: whether to refuse infinite scores, too.

    Raises:
        TypeError: if `scores` is not a mapping, or an id is not a string.
        ValueError: if a score is NaN, not a number or, with `finite`, infinite.
    """
    check_mapping(f"{name}[{query_id!r}]", scores, "document id -> score")
    check_text_ids(name, scores)
    expected = "finite scores" if finite else "a number as each score"
    for document, score in scores.items():
        try:
            is_valid = math.isfinite(score) if finite else not math.isnan(score)
        except TypeError:
            is_valid = False
        if not is_valid:
            raise ArgumentError(
                name,
                f"expected {expected}, got {score!r} for {document!r} of query {query_id!r}.",
            )


def _check_runs(runs: Sequence[Run], weights: Sequence[float] | None, k: int) -> Sequence[float]:
    """Check the arguments of a fusion, and return the weight of each run.

    Args:
        runs: the runs to fuse.
        weights: one finite number per run; None for equal weights that sum to 1.
        k: an integer of at least 1.

    Raises:
        TypeError: if a run is not a mapping of mappings, or a weight is not a number.
        ArgumentError: if there are no runs, if the numbers of weights and runs differ, or if a
            score or weight is not finite.
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
    return _check_weights(weights, len(runs))


def _check_weights(weights: Sequence[float], n_runs: int) -> Sequence[float]:
    """Check that there is one finite number per run, and return the weights.

    Raises:
        TypeError: if a weight is not a number.
        ArgumentError: if the numbers of weights and runs differ, or if a weight is not finite.
    """
    weights = list_of("weights", weights)
    if len(weights) != n_runs:
        raise ArgumentError(
            "weights",
            f"expected one number for each of {n_runs} runs, got {len(weights)}.",
        )
    for weight in weights:
        check_instance("weights", weight, Real, "one number per run")
    if not all(math.isfinite(weight) for weight in weights):
        raise ArgumentError("weights", f"expected finite numbers, got {weights}.")
    return weights


def _query_ids(runs: Sequence[Run]) -> list[str]:
    """Return the ids of the queries of all runs, each once."""
    return list(dict.fromkeys(query_id for run in runs for query_id in run))


def _top(scores: _Scores, k: int | None) -> dict[str, float]:
    """Return the `k` highest scores, best first; all of them if `k` is None."""
    return dict(sorted(scores.items(), key=lambda item: -item[1])[:k])


def _min_max(scores: _Scores) -> _NormalizedScores:
    """Map the scores of a query linearly to [0, 1].

    If all scores are equal, they become 1. The score of a missing document is 0.
    """
    low = min(scores.values())
    high = max(scores.values())
    if high == low:
        return _NormalizedScores(dict.fromkeys(scores, 1.0), missing_score=0.0)
    # Scaling by a power of two is exact. It brings the largest score to about 1, so that
    # `high - low` neither overflows nor underflows. frexp returns a mantissa and an exponent.
    _, largest_exponent = math.frexp(max(abs(low), abs(high)))
    exponent = -largest_exponent
    low = math.ldexp(low, exponent)
    high = math.ldexp(high, exponent)
    normalized = {
        document: (math.ldexp(score, exponent) - low) / (high - low)
        for document, score in scores.items()
    }
    return _NormalizedScores(normalized, missing_score=0.0)


def _z_score(scores: _Scores) -> _NormalizedScores:
    """Map the scores of a query to mean 0 and standard deviation 1.

    If all scores are equal, they become 0. A missing document gets the lowest score.
    """
    # Equal scores are a special case: their mean is rounded, so that their computed deviation may
    # differ from 0.
    if min(scores.values()) == max(scores.values()):
        return _NormalizedScores(dict.fromkeys(scores, 0.0), missing_score=0.0)
    # Mapping the scores to [0, 1] first does not change their z-scores, and avoids an overflow of
    # their squares.
    scaled = _min_max(scores).scores
    mean = math.fsum(scaled.values()) / len(scaled)
    variance = math.fsum((score - mean) ** 2 for score in scaled.values()) / len(scaled)
    deviation = math.sqrt(variance)
    normalized = {document: (score - mean) / deviation for document, score in scaled.items()}
    return _NormalizedScores(normalized, missing_score=min(normalized.values()))


def _without_normalization(scores: _Scores) -> _NormalizedScores:
    """Leave the scores of a query as they are. A missing document gets the lowest score."""
    return _NormalizedScores(dict(scores), missing_score=min(scores.values()))


_NORMALIZERS: dict[str, Callable[[_Scores], _NormalizedScores]] = {
    "min_max": _min_max,
    "z_score": _z_score,
    "none": _without_normalization,
}
