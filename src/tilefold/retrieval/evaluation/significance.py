"""Statistics over queries: means with errors and intervals, and paired tests of differences between
runs.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import check_count, check_least, check_mapping, list_of
from tilefold.retrieval.common.files import Json, require

__all__ = ["Difference", "Mean", "compare", "mean_of"]

RESAMPLES = 9_999
CONFIDENCE = 0.95
DIGITS = (
    12  # of a difference between values of a measure, which lie in [0, 1]: what is less is rounding
)
_BLOCK = 1 << 21  # resampled numbers at a time

_Floats = npt.NDArray[np.float64]
Table = Mapping[str, Mapping[str, float]]
"""Query id -> measure -> value, as :func:`tilefold.retrieval.evaluate_per_query` gives it."""


@dataclass(frozen=True)
class Mean:
    """Mean over queries; of a single query the others are None.

    Attributes:
        mean: the arithmetic mean.
        standard_error: sample standard deviation over the square root of the number of queries.
        low, high: ends of the 95% percentile bootstrap interval over queries.
    """

    mean: float
    standard_error: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Difference:
    """A paired difference between two runs, `run` minus `over`, in one measure over the same
    queries.

    Attributes:
        difference: its mean over queries.
        wins, losses, ties: queries in which `run` is higher, lower or equal, to 12 digits.
        p_randomisation: two-sided, of the paired randomisation test (signs of differences are
            flipped).
        p_t: two-sided, of the paired t-test.
        p_holm: `p_randomisation` after Holm's correction over all comparisons of the call.
        different: whether `p_holm` is below alpha.
        by_query: query id -> difference, the lowest first.
    """

    run: str
    over: str
    measure: str
    difference: Mean
    wins: int
    losses: int
    ties: int
    p_randomisation: float
    p_t: float
    p_holm: float
    different: bool
    by_query: dict[str, float]

    def to_dict(self) -> Json:
        """The fields as a JSON object, without those of single queries."""
        return {name: value for name, value in asdict(self).items() if name != "by_query"}


def mean_of(values: Iterable[float], *, resamples: int = RESAMPLES, seed: int = 0) -> Mean:
    """The mean of values of queries, with its standard error and bootstrap interval; none is a
    ``ValueError``.
    """
    found = np.asarray(list_of("values", values, ordered=False), np.float64)
    if not found.size:
        raise ValueError("values: expected one query at least, got none.")
    if found.size < 2:
        return Mean(float(found[0]), None, None, None)
    stats, batch = _stats(), max(1, _BLOCK // found.size)
    chance = np.random.default_rng(seed)
    options = {
        "n_resamples": resamples,
        "confidence_level": CONFIDENCE,
        "method": "percentile",
        "vectorized": True,
    }
    low, high = stats.bootstrap(
        (found,),
        np.mean,
        batch=batch,
        rng=chance,
        **options,
    ).confidence_interval
    # equal values, whose mean may be rounded to another number, have no error
    error = 0.0 if (found == found[0]).all() else float(found.std(ddof=1) / math.sqrt(found.size))
    return Mean(fmean(found.tolist()), error, float(low), float(high))


def compare(
    tables: Mapping[str, Table],
    measures: Sequence[str] | None = None,
    *,
    all_pairs: bool = False,
    alpha: float = 0.05,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Difference]:
    """Differences between runs, each tested with the same queries: every other run minus the first
    one.

    The test that decides is Fisher's randomisation test: under the hypothesis that two runs do not
    differ, the sign of each query's difference is chance, and the p-value is the share of random
    sign flips whose mean difference is as large in magnitude (all of them where there are no more
    than `resamples`; Smucker, Allan and Carterette, CIKM 2007). Holm's step-down correction bounds
    by `alpha` the chance of calling any two equal runs of the call different.

    Args:
        tables: name of a run -> its values by query
            (:func:`tilefold.retrieval.evaluate_per_query`).
        measures: of the tables; all if None.
        all_pairs: compare every two runs, later ones minus earlier ones.
        alpha: in (0, 1).
        resamples: sign flips, and samples of each bootstrap.
        seed: equal seeds give equal numbers.

    Raises:
        ValueError: fewer than two runs or queries, tables of different queries, a measure that one
            lacks.
    """
    check_mapping("tables", tables, "name of a run -> values by query")
    for name, table in tables.items():
        check_mapping(f"tables[{name!r}]", table, "query id -> value by measure")
    measures = None if measures is None else list_of("measures", measures)
    check_count("resamples", resamples, 99)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha: expected a number between 0 and 1, got {alpha!r}.")
    names, queries = list(tables), list(next(iter(tables.values()), ()))
    check_least("runs to compare", len(names), 2)
    check_least("queries to compare runs on", len(queries), 2)
    for name, table in tables.items():
        if table.keys() != set(queries):
            strange = next(iter(table.keys() ^ set(queries)))
            raise ValueError(
                f"tables: expected the same queries in all, but {strange!r} is not both in {names[0]!r} "
                f"and in {name!r}. Evaluate them with the same judgements.",
            )
    chosen = list(tables[names[0]][queries[0]]) if measures is None else measures
    pairs = (
        list(itertools.combinations(names, 2))
        if all_pairs
        else [(names[0], name) for name in names[1:]]
    )
    compared = [(run, over, measure) for measure in chosen for over, run in pairs]
    found: list[_Floats] = []
    for run, over, measure in compared:
        mine, theirs = (_column(tables[name], queries, name, measure) for name in (run, over))
        found.append(np.round(mine - theirs, DIGITS))
    tested = [_tests(values, resamples, seed) for values in found]
    rows = zip(compared, found, tested, holm([p for p, _ in tested]), strict=True)
    return [
        Difference(
            run=run,
            over=over,
            measure=measure,
            difference=mean_of(values, resamples=resamples, seed=seed),
            wins=int(np.count_nonzero(values > 0)),
            losses=int(np.count_nonzero(values < 0)),
            ties=int(np.count_nonzero(values == 0)),
            p_randomisation=p_randomisation,
            p_t=p_t,
            p_holm=p_holm,
            different=p_holm < alpha,
            by_query={queries[at]: float(values[at]) for at in np.argsort(values, kind="stable")},
        )
        for (run, over, measure), values, (p_randomisation, p_t), p_holm in rows
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment (Scand. J. Statist. 6, 1979): ``max over j <= i of (m - j + 1)
    p_(j)``, at most 1.
    """
    p = np.asarray(p_values, np.float64)
    order = np.argsort(p, kind="stable")
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)))
    return [float(value) for value in adjusted]


def _column(table: Table, queries: Sequence[str], name: str, measure: str) -> _Floats:
    if measure not in table[queries[0]]:
        known = ", ".join(table[queries[0]])
        raise ValueError(
            f"measures: expected some of {known}, which {name!r} has, got {measure!r}.",
        )
    return np.array([table[query][measure] for query in queries], np.float64)


def _tests(values: _Floats, resamples: int, seed: int) -> tuple[float, float]:
    """Two-sided p-values of differences: of the randomisation test, and of the t-test."""
    if not values.any():
        return 1.0, 1.0
    stats = _stats()
    options = {"permutation_type": "samples", "vectorized": True, "n_resamples": resamples}
    batch, chance = max(1, _BLOCK // values.size), np.random.default_rng(seed)
    flipped = stats.permutation_test((values,), np.mean, batch=batch, rng=chance, **options)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # equal differences: their p-value is 0
        p_t = float(stats.ttest_1samp(values, 0.0).pvalue)
    return float(flipped.pvalue), p_t


def _stats() -> Any:
    return require("scipy.stats", "scipy", "Statistics of measures")
