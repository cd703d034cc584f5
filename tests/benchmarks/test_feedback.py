"""The rows of the feedback benchmark, on a collection where every retriever finds everything."""

from __future__ import annotations

import math

import pytest

from benchmarks import feedback
from tests.recipes.small import small_collection


def test_every_row_is_measured_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feedback, "WEIGHTS", (0.5,))
    rows = feedback.measure(small_collection(), "test", "train", 64)
    assert len({(row["retriever"], row["method"], row["place"]) for row in rows}) == len(rows) == 20
    for row in rows:
        assert (row["queries"], row["tuned_on"], row["ndcg10"], row["over_plain"]) == (4, 12, 1.0, 0.0)
        assert math.isnan(row["weight_of_other"]) == (row["place"] == "none")


def test_a_difference_is_paired() -> None:
    table = {"a": {"nDCG@10": 1.0}, "b": {"nDCG@10": 0.5}}
    beside = {"a": {"nDCG@10": 0.5}, "b": {"nDCG@10": 0.4}}
    assert feedback.difference("x", table, beside) == pytest.approx({"x": 0.3, "x_se": 0.2})
