"""Means with errors, paired tests and their correction: by hand, by enumeration, and over runs that
do not differ.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from tests.refusals import refused
from tilefold import retrieval as r
from tilefold.retrieval.evaluation.measures import conventions
from tilefold.retrieval.evaluation.significance import holm


def table(values: Any, measure: str = "nDCG@10") -> dict[str, dict[str, float]]:
    return {f"q{number}": {measure: float(value)} for number, value in enumerate(values)}


OLD = [0.0, 0.5, 0.25, 1.0, 0.3, 0.3, 0.9]
NEW = [0.5, 0.75, 0.25, 0.875, 0.9, 0.1 + 0.2, 0.1]


def test_a_difference_has_the_p_values_of_all_sign_flips_and_of_the_paired_t_test() -> None:
    (found,) = r.compare({"old": table(OLD), "new": table(NEW)})
    differences = np.subtract(NEW, OLD)
    flips = [
        abs(np.dot(signs, differences)) for signs in itertools.product((1, -1), repeat=len(OLD))
    ]
    assert found.p_randomisation == pytest.approx(
        np.mean(np.array(flips) >= abs(differences.sum()) - 1e-12),
    )
    assert found.p_t == pytest.approx(ttest_rel(NEW, OLD).pvalue)
    assert found.difference.mean == pytest.approx(differences.mean())
    assert (found.run, found.over, found.measure) == ("new", "old", "nDCG@10")
    assert (found.wins, found.losses, found.ties) == (3, 2, 2), (
        "0.1 + 0.2 is 0.3 but for a rounding"
    )
    assert list(found.by_query)[:2] == ["q6", "q3"] and "by_query" not in found.to_dict()
    assert found.p_holm == found.p_randomisation and not found.different


def test_a_mean_has_its_standard_error_and_an_interval_around_it() -> None:
    found = r.mean_of(NEW)
    error = statistics.stdev(NEW) / len(NEW) ** 0.5
    assert (found.mean, found.standard_error) == (statistics.fmean(NEW), pytest.approx(error))
    assert found.low == pytest.approx(found.mean - 1.96 * error, abs=0.06)
    assert found.high == pytest.approx(found.mean + 1.96 * error, abs=0.06)
    assert r.mean_of(NEW) == found, "equal seeds give equal numbers"
    assert r.mean_of([3.09] * 11) == r.Mean(
        pytest.approx(3.09),
        0.0,
        pytest.approx(3.09),
        pytest.approx(3.09),
    )
    assert r.mean_of([0.5]) == r.Mean(0.5, None, None, None)
    refused(ValueError, "values: expected one query at least, got none", r.mean_of, [])


def test_holms_correction_follows_the_hand_computation() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []
    tables = {
        name: table(np.add(OLD, shift))
        for name, shift in (("a", 0.0), ("b", 0.1), ("c", 0.2), ("d", 0.0))
    }
    found = r.compare(tables, all_pairs=True)
    assert [(each.over, each.run) for each in found] == list(itertools.combinations("abcd", 2))
    assert [(each.over, each.run) for each in r.compare(tables)] == [
        ("a", "b"),
        ("a", "c"),
        ("a", "d"),
    ]
    assert [each.p_holm for each in found] == pytest.approx(
        holm([each.p_randomisation for each in found]),
    )
    same = found[2]
    assert (same.p_randomisation, same.p_t, same.ties, same.different) == (
        1.0,
        1.0,
        len(OLD),
        False,
    )


def test_runs_that_do_not_differ_are_seldom_called_different_and_others_are() -> None:
    """1,000 pairs of runs whose values come from one distribution, query by query; and families of
    three.
    """
    chance, queries, trials = np.random.default_rng(7), 24, 1000
    levels = np.array(
        [0.0, 0.0, 0.3869, 0.5, 0.6309, 1.0, 1.0],
    )  # as of nDCG@10 with one relevant document
    called, families, power = 0, 0, 0
    for trial in range(trials):
        hardness = chance.random(queries)  # shared by the runs, so that they are paired
        draws = [
            np.quantile(levels, np.clip(hardness + chance.normal(0, 0.2, queries), 0, 1))
            for _ in range(3)
        ]
        tables = dict(zip("abc", map(table, draws), strict=True))
        options: Any = {"resamples": 199, "seed": trial}
        called += r.compare({name: tables[name] for name in "ab"}, **options)[0].different
        if trial % 5 == 0:
            families += any(each.different for each in r.compare(tables, all_pairs=True, **options))
            better = table(np.minimum(draws[0] + 0.2, 1))
            power += r.compare({"a": tables["a"], "better": better}, **options)[0].different
    assert 0.03 * trials < called <= 0.06 * trials
    assert families <= 0.06 * trials / 5
    assert power > 0.95 * trials / 5


def test_tables_that_cannot_be_compared_are_refused() -> None:
    old = table(OLD)
    cases: list[tuple[dict[str, Any], dict[str, float], str]] = []
    cases += [({"a": old}, {}, "runs to compare: expected at least 2, got 1")]
    cases += [
        (
            {"a": table([1]), "b": table([1])},
            {},
            "tables: expected at least 2 queries to compare runs on, got 1",
        ),
    ]
    cases += [
        (
            {"a": old, "b": table(OLD[:-1])},
            {},
            "tables: expected the same queries in all, but 'q6' is not both",
        ),
    ]
    cases += [
        (
            {"a": old, "b": table(OLD, "AP")},
            {},
            "measures: expected some of AP, which 'b' has, got 'nDCG@10'",
        ),
    ]
    cases += [
        ({"a": old, "b": old}, {"alpha": 1.0}, "alpha: expected a number between 0 and 1, got 1.0"),
    ]
    cases += [
        (
            {"a": old, "b": old},
            {"resamples": 5},
            "resamples: expected an integer of at least 99, got 5",
        ),
    ]
    for tables, options, message in cases:
        refused(ValueError, message, r.compare, tables, **options)


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
