"""Choose the weights of a fusion on judged queries that are not those to be measured."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from tilefold.retrieval.evaluation import check_answers, evaluate
from tilefold.retrieval.fusion import Normalization, Run, interpolate

__all__ = ["choose_weights"]

MAX_TRIALS = 300


def choose_weights(
    runs: Sequence[Run],
    qrels: Mapping[str, Mapping[str, int]],
    *,
    measure: str = "nDCG@10",
    step: float = 0.1,
    normalization: Normalization = "min_max",
    k: int = 100,
) -> tuple[tuple[float, ...], float]:
    """Weights of :func:`tilefold.retrieval.interpolate` with the best `measure` on `qrels`, and that measure.

    All weights that are multiples of `step` and sum to 1 are tried; of equal ones, the largest for the first runs wins.
    The measure is in sample: report other queries. A step that does not divide 1, more than 300 combinations, no run,
    or one that answers no judged query is a ``ValueError``.
    """
    for number, run in enumerate(runs):
        check_answers(f"runs[{number}]", run, qrels)
    parts = round(1 / step) if 0 < step <= 1 else 0
    if not math.isclose(parts * step, 1):
        raise ValueError(f"step: expected 1 divided by a whole number, such as 0.1, got {step!r}.")
    mine = [{query: run[query] for query in qrels if query in run} for run in runs]
    grid = [counts for counts in itertools.product(range(parts + 1), repeat=len(runs)) if sum(counts) == parts]
    if not grid or len(grid) > MAX_TRIALS:
        raise ValueError(
            f"runs: expected 1 to {MAX_TRIALS} combinations of weights, got {len(grid)} for {len(runs)} runs at a step "
            f"of {step:g}. Fuse fewer runs, or take a larger step."
        )
    trials = []
    for counts in grid:
        weights = tuple(count / parts for count in counts)
        trials.append((evaluate(interpolate(mine, weights, normalization, k), qrels, (measure,))[measure], weights))
    score, best = max(trials)
    return best, score
