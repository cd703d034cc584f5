"""The benchmark of entmax: its gate lets right implementations through and stops wrong ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilefold.bench.entmax import SPEC
from tilefold.bench.runner import RunOptions, run_case
from tilefold.bench.spec import BenchCase, Ceilings, Implementation
from tilefold.bench.timing import TimeBudget
from tilefold.ops import entmax

TINY = BenchCase("tiny", "cpu", "float32", {"R": 11, "N": 200}, "normal")
OPTIONS = RunOptions(torch.device("cpu"), budget=TimeBudget(seconds=0.01, min_reps=2, max_reps=3), memory=False)
CEILINGS = Ceilings(flops=1e12, bandwidth=1e10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ours_and_the_sort_compute_the_same_function(dtype: str) -> None:
    options = replace(OPTIONS, impls=("tilefold", "reference", "sort"))
    rows = run_case(SPEC, replace(TINY, dtype=dtype), options, CEILINGS)
    assert [row.status for row in rows] == ["ok"] * 3, [row.note for row in rows]
    assert all(row.forward_p50_ms > 0 and row.forward_backward_p50_ms > 0 for row in rows)


def test_softmax_is_timed_but_another_function() -> None:
    (row,) = run_case(SPEC, TINY, replace(OPTIONS, impls=("softmax",)), CEILINGS)
    assert row.status == "ok" and row.forward_error is None


def test_another_alpha_fails_and_shows_no_time() -> None:
    def rows(x: Tensor) -> Tensor:
        p = entmax(x, 1.6)
        assert isinstance(p, Tensor)
        return p

    candidate = Implementation("candidate", lambda inputs: inputs.bind(rows, "wrong"), "ours")
    (row,) = run_case(replace(SPEC, implementations=(candidate,)), TINY, OPTIONS, CEILINGS)
    assert row.status == "FAILED" and row.note and row.forward_p50_ms is None
