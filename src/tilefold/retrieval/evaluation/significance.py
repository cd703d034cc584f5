"""Statistics over queries: means with intervals, and paired tests of differences between runs."""

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

from tilefold._internal.arguments import (
    ArgumentError,
    check_count,
    check_least,
    check_mapping,
    list_of,
)
from tilefold.retrieval.common.files import Json, require

__all__ = ["Difference", "Mean", "compare", "mean_of"]

RESAMPLES = 9_999
CONFIDENCE = 0.95
# Differences are rounded to this number of decimal digits. Values of a measure are in [0, 1], and
# smaller differences are rounding errors.
DIGITS = 12
MIN_RESAMPLES = 99
# Resampled numbers in memory at a time.
_NUMBERS_PER_BATCH = 1 << 21

_Floats = npt.NDArray[np.float64]
# Query id -> measure -> value, as :func:`tilefold.retrieval.evaluate_per_query` returns it.
Table = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Mean:
    """Mean over queries, with its standard error and its bootstrap interval.

    Attributes:
        mean: the arithmetic mean.
        standard_error: sample standard deviation divided by the square root of the number of
            queries; None for a single query.
        low, high: ends of the 95% percentile bootstrap interval over queries; None for a single
            query.
    """

    mean: float
    standard_error: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Difference:
    """Paired difference between two runs in one measure, `run` minus `over`.

    Attributes:
        run, over: names of the two runs.
        measure: name of the measure.
        difference: mean of the difference over queries.
        wins, losses, ties: numbers of queries in which `run` is higher, lower or equal, to 12
            digits.
        p_randomisation: two-sided p-value of the paired randomisation test, which flips the signs
            of differences.
        p_t: two-sided p-value of the paired t-test.
        p_holm: `p_randomisation` after Holm's correction over all comparisons of the call.
        different: whether `p_holm` is below alpha.
        by_query: query id -> difference, from the lowest to the highest.
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
        """Return the fields as a JSON object, without ``by_query``."""
        return {name: value for name, value in asdict(self).items() if name != "by_query"}


def mean_of(values: Iterable[float], *, resamples: int = RESAMPLES, seed: int = 0) -> Mean:
    """Return the mean of the values of queries, with its standard error and bootstrap interval.

    Args:
        values: one value per query.
        resamples: number of bootstrap samples.
        seed: seed of the bootstrap.

    Raises:
        ValueError: if there is no value.

    Examples:
        >>> mean = mean_of([0.2, 0.4, 0.6])
        >>> round(mean.mean, 3), round(mean.standard_error, 3)
        (0.4, 0.115)
    """
    array = np.asarray(list_of("values", values, ordered=False), np.float64)
    if not array.size:
        raise ArgumentError("values", "expected at least one value, got none.")
    if array.size < 2:
        return Mean(float(array[0]), standard_error=None, low=None, high=None)
    interval = (
        _import_scipy_stats()
        .bootstrap(
            (array,),
            np.mean,
            n_resamples=resamples,
            batch=_batch_size(array),
            vectorized=True,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
        .confidence_interval
    )
    standard_error = 0.0
    # The error of equal values is 0. Rounding of their mean could make it nonzero.
    if not (array == array[0]).all():
        standard_error = float(array.std(ddof=1) / math.sqrt(array.size))
    return Mean(
        fmean(array.tolist()),
        standard_error,
        low=float(interval.low),
        high=float(interval.high),
    )


def _batch_size(values: _Floats) -> int:
    """Return how many resamples of `values` to compute at a time."""
    return max(1, _NUMBERS_PER_BATCH // values.size)


def compare(
    tables: Mapping[str, Table],
    measures: Sequence[str] | None = None,
    *,
    all_pairs: bool = False,
    alpha: float = 0.05,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Difference]:
    """Compare runs over the same queries, and test each difference.

    By default, every other run is compared with the first one. The test is Fisher's randomisation
    test (Smucker, Allan and Carterette, CIKM 2007). Under the hypothesis that two runs do not
    differ, the sign of each query's difference is random. The p-value is the share of random sign
    flips whose mean difference has at least the same magnitude. All flips are tried if there are no
    more than `resamples`. With Holm's step-down correction, the probability that any two equal runs
    of the call are called different is at most `alpha`.

    Args:
        tables: name of a run -> its values by query
            (:func:`tilefold.retrieval.evaluate_per_query`).
        measures: names of measures in the tables; None compares all of them.
        all_pairs: whether to compare every two runs, the later minus the earlier one.
        alpha: significance level, in (0, 1).
        resamples: number of sign flips, and number of samples of each bootstrap.
        seed: seed of the sign flips and of the bootstrap.

    Returns:
        The differences, by measure and then by pair of runs.

    Raises:
        ValueError: if there are fewer than two runs or queries, if tables have different queries,
            or if a measure is missing from a table.

    Examples:
        >>> from tilefold.retrieval import evaluate_per_query
        >>> qrels = {f"q{i}": {"cards": 1} for i in range(20)}
        >>> good = {query: {"cards": 2.0, "pin": 1.0} for query in qrels}
        >>> poor = {query: {"cards": 1.0, "pin": 2.0} for query in qrels}
        >>> tables = {
        ...     name: evaluate_per_query(run, qrels, ["RR@10"])
        ...     for name, run in (("poor", poor), ("good", good))
        ... }
        >>> (difference,) = compare(tables)
        >>> difference.run, difference.over, difference.difference.mean, difference.different
        ('good', 'poor', 0.5, True)
    """
    check_mapping("tables", tables, "name of a run -> values by query")
    for name, table in tables.items():
        check_mapping(f"tables[{name!r}]", table, "query id -> value by measure")
    if measures is not None:
        measures = list_of("measures", measures)
    check_count("resamples", resamples, MIN_RESAMPLES)
    if not 0 < alpha < 1:
        raise ArgumentError("alpha", f"expected a number between 0 and 1, got {alpha!r}.")
    runs = list(tables)
    queries = _common_queries(tables)
    if measures is None:
        measures = list(tables[runs[0]][queries[0]])
    pairs = [(runs[0], run) for run in runs[1:]]
    if all_pairs:
        pairs = list(itertools.combinations(runs, 2))
    comparisons = [
        _Comparison.of(tables, queries, run, over, measure)
        for measure in measures
        for over, run in pairs
    ]
    p_values = [_p_values(comparison.differences, resamples, seed) for comparison in comparisons]
    p_holm_values = holm([p_randomisation for p_randomisation, _ in p_values])
    results = []
    for comparison, (p_randomisation, p_t), p_holm in zip(
        comparisons,
        p_values,
        p_holm_values,
        strict=True,
    ):
        differences = comparison.differences
        lowest_first = np.argsort(differences, kind="stable")
        result = Difference(
            run=comparison.run,
            over=comparison.over,
            measure=comparison.measure,
            difference=mean_of(differences, resamples=resamples, seed=seed),
            wins=int(np.count_nonzero(differences > 0)),
            losses=int(np.count_nonzero(differences < 0)),
            ties=int(np.count_nonzero(differences == 0)),
            p_randomisation=p_randomisation,
            p_t=p_t,
            p_holm=p_holm,
            different=p_holm < alpha,
            by_query={queries[row]: float(differences[row]) for row in lowest_first},
        )
        results.append(result)
    return results


@dataclass(frozen=True)
class _Comparison:
    """Two runs that are compared in one measure, before the tests.

    Attributes:
        run: name of the run whose values are the minuend.
        over: name of the run whose values are subtracted.
        measure: name of the measure.
        differences: `run` minus `over` for each query, float64 ``[Q]``.
    """

    run: str
    over: str
    measure: str
    differences: _Floats

    @classmethod
    def of(
        cls,
        tables: Mapping[str, Table],
        queries: Sequence[str],
        run: str,
        over: str,
        measure: str,
    ) -> _Comparison:
        """Subtract the values of one run from those of another one, query by query.

        Args:
            tables: name of a run -> its values by query.
            queries: ids of the Q queries, which all tables have.
            run: name of the run whose values are the minuend.
            over: name of the run whose values are subtracted.
            measure: name of the measure.

        Raises:
            ValueError: if the measure is missing from one of the two tables.
        """
        values = _values_of_measure(tables[run], queries, run, measure)
        values_over = _values_of_measure(tables[over], queries, over, measure)
        return cls(run, over, measure, np.round(values - values_over, DIGITS))


def _common_queries(tables: Mapping[str, Table]) -> list[str]:
    """Return the queries of several tables, and check that all tables have the same ones.

    Args:
        tables: name of a run -> query id -> measure -> value.

    Raises:
        ValueError: if there are fewer than two tables or queries, or tables have different queries.
    """
    runs = list(tables)
    queries = list(next(iter(tables.values()), ()))
    check_least("runs to compare", len(runs), 2)
    if len(queries) < 2:
        raise ArgumentError(
            "tables",
            f"expected at least 2 queries to compare runs on, got {len(queries)}.",
        )
    first_run = runs[0]
    for run, table in tables.items():
        unshared = table.keys() ^ set(queries)
        if unshared:
            query = next(iter(unshared))
            having, lacking = (run, first_run) if query in table else (first_run, run)
            raise ArgumentError(
                "tables",
                f"expected the same queries in all runs, but {query!r} is in {having!r} and not "
                f"in {lacking!r}. Evaluate the runs with the same judgements.",
            )
    return queries


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values after Holm's step-down correction (Scand. J. Statist. 6, 1979).

    The i-th smallest of m p-values becomes ``max over j <= i of (m - j + 1) p_(j)``, at most 1.

    Args:
        p_values: one p-value per comparison.

    Returns:
        The corrected p-values, in the order of `p_values`.
    """
    p = np.asarray(p_values, np.float64)
    ascending = np.argsort(p, kind="stable")
    factors = np.arange(p.size, 0, -1)  # m for the smallest p-value, 1 for the largest
    corrected = np.empty_like(p)
    corrected[ascending] = np.maximum.accumulate(p[ascending] * factors)
    return [float(value) for value in np.minimum(1, corrected)]


def _values_of_measure(
    table: Table,
    queries: Sequence[str],
    run: str,
    measure: str,
) -> _Floats:
    """Return the values of a measure for some queries.

    Args:
        table: query id -> measure -> value, with the same measures for each query.
        queries: ids of Q queries of the table.
        run: the name of the run, for the error.
        measure: the name of the measure.

    Returns:
        The values, float64 ``[Q]``.

    Raises:
        ValueError: if the measure is missing from the table.
    """
    measures = table[queries[0]]
    if measure not in measures:
        raise ArgumentError(
            "measures",
            f"expected measures that run {run!r} has ({', '.join(measures)}), got {measure!r}.",
        )
    return np.array([table[query][measure] for query in queries], np.float64)


def _p_values(differences: _Floats, resamples: int, seed: int) -> tuple[float, float]:
    """Test whether the mean difference of two runs is 0.

    Args:
        differences: value of one run minus value of the other run, for each query, ``[Q]``.
        resamples: number of random sign flips in the randomisation test.
        seed: seed of the randomisation test.

    Returns:
        Two-sided p-values of the paired randomisation test and of the paired t-test. Both are 1 if
        all differences are 0.
    """
    if not differences.any():
        return 1.0, 1.0
    stats = _import_scipy_stats()
    randomisation = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=resamples,
        batch=_batch_size(differences),
        rng=np.random.default_rng(seed),
    )
    with np.errstate(all="ignore"), warnings.catch_warnings():
        # The t-test warns if all differences are equal, and then returns 0.
        warnings.simplefilter("ignore", RuntimeWarning)
        p_t = float(stats.ttest_1samp(differences, 0.0).pvalue)
    return float(randomisation.pvalue), p_t


def _import_scipy_stats() -> Any:
    return require("scipy.stats", "scipy", "Statistics of measures")
