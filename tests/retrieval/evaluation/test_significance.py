"""Means with errors, paired tests and their correction: by hand, by enumeration, by simulation."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from tilefold import retrieval as r
from tilefold.retrieval.evaluation.measures import conventions
from tilefold.retrieval.evaluation.significance import holm

Table = dict[str, dict[str, float]]
OLD = [0.0, 0.5, 0.25, 1.0, 0.3, 0.3, 0.9]
NEW = [0.5, 0.75, 0.25, 0.875, 0.9, 0.1 + 0.2, 0.1]


def table_of(values: Any, measure: str = "nDCG@10") -> Table:
    """A value of one measure for queries ``q0``, ``q1``, ..."""
    return {f"q{number}": {measure: float(value)} for number, value in enumerate(values)}


def p_value_of_all_sign_flips(differences: Sequence[float]) -> float:
    """The share of sign flips with a sum at least as far from 0 as that of the differences."""
    observed = abs(sum(differences))
    sums = []
    for signs in itertools.product((1, -1), repeat=len(differences)):
        sums.append(abs(np.dot(signs, differences)))
    return float(np.mean(np.array(sums) >= observed - 1e-12))


def test_a_difference_has_the_p_values_of_all_sign_flips_and_of_the_paired_t_test() -> None:
    (comparison,) = r.compare({"old": table_of(OLD), "new": table_of(NEW)})
    differences = np.subtract(NEW, OLD)
    expected = p_value_of_all_sign_flips(differences.tolist())
    assert comparison.p_randomisation == pytest.approx(expected)
    assert comparison.p_t == pytest.approx(ttest_rel(NEW, OLD).pvalue)
    assert comparison.difference.mean == pytest.approx(differences.mean())
    assert comparison.p_holm == comparison.p_randomisation
    assert not comparison.different


def test_a_comparison_names_its_runs_and_counts_queries() -> None:
    (comparison,) = r.compare({"old": table_of(OLD), "new": table_of(NEW)})
    assert comparison.run == "new"
    assert comparison.over == "old"
    assert comparison.measure == "nDCG@10"
    assert comparison.wins == 3
    assert comparison.losses == 2
    assert comparison.ties == 2, "0.1 + 0.2 differs from 0.3 by a rounding error only"
    assert list(comparison.by_query)[:2] == ["q6", "q3"], "largest losses first"
    assert "by_query" not in comparison.to_dict()


def test_a_mean_has_its_standard_error_and_an_interval_around_it() -> None:
    mean = r.mean_of(NEW)
    error = statistics.stdev(NEW) / len(NEW) ** 0.5
    assert mean.mean == statistics.fmean(NEW)
    assert mean.standard_error == pytest.approx(error)
    assert mean.low == pytest.approx(mean.mean - 1.96 * error, abs=0.06)
    assert mean.high == pytest.approx(mean.mean + 1.96 * error, abs=0.06)
    assert r.mean_of(NEW) == mean, "equal seeds give equal numbers"


def test_a_mean_of_equal_values_has_no_error() -> None:
    value = pytest.approx(3.09)
    assert r.mean_of([3.09] * 11) == r.Mean(value, 0.0, value, value)


def test_a_mean_of_one_value_has_no_known_error() -> None:
    assert r.mean_of([0.5]) == r.Mean(0.5, None, None, None)


def test_a_mean_of_no_values_is_refused() -> None:
    with pytest.raises(ValueError, match="values: expected at least one value, got none"):
        r.mean_of([])


def test_holms_correction_follows_the_hand_computation() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.fixture
def four_tables() -> dict[str, Table]:
    """Tables a and d are equal, b and c are better."""
    return {
        "a": table_of(OLD),
        "b": table_of(np.add(OLD, 0.1)),
        "c": table_of(np.add(OLD, 0.2)),
        "d": table_of(OLD),
    }


def test_runs_are_compared_with_the_first_or_in_all_pairs(four_tables: dict[str, Table]) -> None:
    with_first = r.compare(four_tables)
    in_pairs = r.compare(four_tables, all_pairs=True)
    first_pairs = [(comparison.over, comparison.run) for comparison in with_first]
    all_pairs = [(comparison.over, comparison.run) for comparison in in_pairs]
    assert first_pairs == [("a", "b"), ("a", "c"), ("a", "d")]
    assert all_pairs == list(itertools.combinations("abcd", 2))


def test_p_values_of_all_comparisons_are_corrected_together(
    four_tables: dict[str, Table],
) -> None:
    comparisons = r.compare(four_tables, all_pairs=True)
    p_values = [comparison.p_randomisation for comparison in comparisons]
    corrected = [comparison.p_holm for comparison in comparisons]
    assert corrected == pytest.approx(holm(p_values))


def test_equal_runs_are_not_different(four_tables: dict[str, Table]) -> None:
    (comparison,) = r.compare({"a": four_tables["a"], "d": four_tables["d"]})
    assert comparison.p_randomisation == 1.0
    assert comparison.p_t == 1.0
    assert comparison.ties == len(OLD)
    assert not comparison.different


@pytest.mark.slow
def test_runs_that_do_not_differ_are_seldom_called_different_and_others_are() -> None:
    """Simulates 1,000 triples of runs whose values have one distribution for every query."""
    generator = np.random.default_rng(7)
    n_queries = 24
    n_trials = 1000
    # Frequent values of nDCG@10 with one relevant document.
    levels = np.array([0.0, 0.0, 0.3869, 0.5, 0.6309, 1.0, 1.0])
    n_different_pairs = 0
    n_families_with_difference = 0
    n_improvements_found = 0
    for trial in range(n_trials):
        difficulty = generator.random(n_queries)  # shared by the runs, so that they are paired
        runs = []
        for _ in range(3):
            noise = generator.normal(0, 0.2, n_queries)
            runs.append(np.quantile(levels, np.clip(difficulty + noise, 0, 1)))
        a, b, c = (table_of(values) for values in runs)
        (comparison,) = r.compare({"a": a, "b": b}, resamples=199, seed=trial)
        n_different_pairs += comparison.different
        if trial % 5 == 0:
            family = r.compare(
                {"a": a, "b": b, "c": c},
                all_pairs=True,
                resamples=199,
                seed=trial,
            )
            n_families_with_difference += any(pair.different for pair in family)
            improved = table_of(np.minimum(runs[0] + 0.2, 1))
            (comparison,) = r.compare({"a": a, "better": improved}, resamples=199, seed=trial)
            n_improvements_found += comparison.different
    assert 0.03 * n_trials < n_different_pairs <= 0.06 * n_trials
    assert n_families_with_difference <= 0.06 * n_trials / 5
    assert n_improvements_found > 0.95 * n_trials / 5


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        pytest.param(
            {"a": table_of(OLD)},
            {},
            "runs to compare: expected at least 2, got 1",
            id="one run",
        ),
        pytest.param(
            {"a": table_of([1]), "b": table_of([1])},
            {},
            "tables: expected at least 2 queries to compare runs on, got 1",
            id="one query",
        ),
        pytest.param(
            {"a": table_of(OLD), "b": table_of(OLD[:-1])},
            {},
            "tables: expected the same queries in all runs, but 'q6' is in ",
            id="different queries",
        ),
        pytest.param(
            {"a": table_of(OLD), "b": table_of(OLD, "AP")},
            {},
            r"measures: expected measures that run 'b' has \(AP\), got 'nDCG@10'",
            id="different measures",
        ),
        pytest.param(
            {"a": table_of(OLD), "b": table_of(OLD)},
            {"alpha": 1.0},
            "alpha: expected a number between 0 and 1, got 1.0",
            id="alpha of 1",
        ),
        pytest.param(
            {"a": table_of(OLD), "b": table_of(OLD)},
            {"resamples": 5},
            "resamples: expected an integer of at least 99, got 5",
            id="too few resamples",
        ),
    ],
)
def test_tables_that_cannot_be_compared_are_refused(
    tables: dict[str, Table],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        r.compare(tables, **options)


def test_conventions_count_unjudged_documents_negative_grades_and_ties() -> None:
    qrels = {"q": {"a": 1, "b": -2, "c": 0}, "p": {"a": 1}, "silent": {"a": -1}}
    run = {
        "q": {"a": 2.0, "x": 1.0, "b": 1.0 + 1e-9},
        "p": {"a": 3.0, "x": 2.0, "y": 2.0},
        "other": {"a": 1, "b": 1},
    }
    assert conventions(run, qrels) == {
        "judged@10": pytest.approx((2 / 3 + 1 / 3) / 3),
        "negative": 2,
        "tied": 2,
        "ignored_identical_ids": 0,
        "counted_identical_ids": 0,
    }
    assert conventions(run, qrels, depth=1)["tied"] == 0
