"""Interpolation of normalized scores and reciprocal rank fusion against computations by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tilefold import retrieval as r

FIRST_RUN = {"q": {"x": 3.0, "y": 1.0}}
SECOND_RUN = {"q": {"y": 10.0, "z": 5.0, "x": 0.0}}
DEVIATION_OF_SECOND_RUN = math.sqrt(50 / 3)
RUN_WITH_NAN = {"q": {"a": math.nan}}


@pytest.mark.parametrize(
    ("weights", "options", "expected"),
    [
        pytest.param(
            [0.5, 0.5],
            {},
            {"x": 0.5, "y": 0.5, "z": 0.25},
            id="min_max: equal scores are in the order of the runs",
        ),
        pytest.param([0.5, 0.5], {"k": 1}, {"x": 0.5}, id="min_max: best document"),
        pytest.param(
            [1.0, 1.0],
            {"normalization": "none"},
            {"y": 11.0, "z": 6.0, "x": 3.0},
            id="none: a missing document has the minimum of the run",
        ),
        pytest.param(
            [1.0, 1.0],
            {"normalization": "z_score"},
            {
                "y": -1 + 5 / DEVIATION_OF_SECOND_RUN,
                "x": 1 - 5 / DEVIATION_OF_SECOND_RUN,
                "z": -1.0,
            },
            id="z_score",
        ),
    ],
)
def test_interpolation_follows_the_hand_computation(
    weights: list[float],
    options: dict[str, Any],
    expected: dict[str, float],
) -> None:
    fused = r.interpolate([FIRST_RUN, SECOND_RUN], weights, **options)["q"]
    assert fused == pytest.approx(expected)
    assert list(fused) == list(expected)


def test_interpolation_of_runs_with_few_documents() -> None:
    run_of_one = {"q": {"x": 7.0}}
    assert r.interpolate([run_of_one, {}], [1.0, 1.0]) == {"q": {"x": 1.0}}
    assert r.interpolate([run_of_one], [1.0], "z_score") == {"q": {"x": 0.0}}
    assert r.interpolate([{"q": {}}, {"q": {}}]) == {"q": {}}


def test_reciprocal_rank_fusion_follows_the_hand_computation() -> None:
    fused = r.reciprocal_rank_fusion([FIRST_RUN, SECOND_RUN])["q"]
    assert fused == pytest.approx({"y": 1 / 62 + 1 / 61, "x": 1 / 61 + 1 / 63, "z": 1 / 62})
    assert list(fused) == ["y", "x", "z"]


def test_reciprocal_rank_fusion_with_an_empty_run() -> None:
    fused = r.reciprocal_rank_fusion([{"q": {"x": 7.0}}, {"q": {}}])
    assert fused == {"q": {"x": 1 / 61}}


@pytest.mark.parametrize("score", [3.09, 0.3, 1e200, -7.7e-300])
def test_z_scores_of_equal_scores_are_zero_whatever_their_mean_rounds_to(score: float) -> None:
    equal_scores = {"q": {f"d{number}": score for number in range(11)}}
    other = {"q": {"d0": 2.0, "x": 1.0}}
    normalized = r.interpolate([equal_scores], [1.0], "z_score")
    assert normalized == {"q": dict.fromkeys(equal_scores["q"], 0.0)}
    fused = r.interpolate([equal_scores, other], normalization="z_score")
    assert fused["q"]["x"] == -0.5


@pytest.mark.parametrize("scale", [5e-324, 1e-200, 1.0, 1e200, 4e307])
def test_scores_of_any_size_are_normalized(scale: float) -> None:
    run = {"q": {"a": 4 * scale, "b": 2 * scale, "c": -2 * scale, "d": -4 * scale}}
    min_max = r.interpolate([run], [1.0])["q"]
    assert min_max == {"a": 1.0, "b": 0.75, "c": 0.25, "d": 0.0}
    z_scores = r.interpolate([run], [1.0], "z_score")["q"]
    deviation = math.sqrt(10)
    expected = {"a": 4 / deviation, "b": 2 / deviation, "c": -2 / deviation, "d": -4 / deviation}
    assert z_scores == pytest.approx(expected)


@pytest.mark.parametrize(
    ("runs", "options", "message"),
    [
        pytest.param(
            [],
            {},
            "runs: expected at least one run, got an empty list",
            id="no runs",
        ),
        pytest.param(
            [FIRST_RUN, SECOND_RUN],
            {"weights": [1.0]},
            "one number for each of 2 runs, got 1",
            id="too few weights",
        ),
        pytest.param([FIRST_RUN], {"weights": [math.inf]}, "expected finite", id="infinite weight"),
        pytest.param(
            [FIRST_RUN],
            {"normalization": "softmax"},
            "min_max, z_score, none, got 'softmax'",
            id="unknown normalization",
        ),
        pytest.param(
            [{"q": {"a": 1e308, "b": 1.0}}] * 2,
            {"weights": [1.0, 1.0], "normalization": "none"},
            "expected finite sums, got inf for query 'q'",
            id="sum that overflows",
        ),
        pytest.param(
            [FIRST_RUN, RUN_WITH_NAN],
            {},
            "runs: expected finite scores, got nan for 'a' of query 'q'",
            id="score that is nan",
        ),
        pytest.param(
            [FIRST_RUN, {"q": {"a": 1.0, "b": "high"}}],
            {},
            "runs: expected finite scores, got 'high' for 'b' of query 'q'",
            id="score that is a text",
        ),
    ],
)
def test_interpolation_refuses_wrong_arguments(
    runs: list[Any],
    options: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        r.interpolate(runs, **options)


def test_reciprocal_rank_fusion_refuses_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="k: expected at least 1"):
        r.reciprocal_rank_fusion([FIRST_RUN], k=0)
    message = "runs: expected finite scores, got nan for 'a' of query 'q'"
    with pytest.raises(ValueError, match=message):
        r.reciprocal_rank_fusion([FIRST_RUN, RUN_WITH_NAN])
