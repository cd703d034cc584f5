"""The benchmark of the token scatter: its gate lets right implementations through and stops wrong ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilefold.bench.runner import BenchRow, RunOptions, run_case
from tilefold.bench.spec import BenchCase, Ceilings, Implementation
from tilefold.bench.timing import TimeBudget
from tilefold.bench.token_scatter import SPEC, SPECIAL_IDS, make_inputs
from tilefold.ops import token_scatter

CPU = torch.device("cpu")
TINY = BenchCase("tiny", "cpu", "float32", {"B": 3, "S": 40, "V": 60}, "max")
OPTIONS = RunOptions(CPU, budget=TimeBudget(seconds=0.01, min_reps=2, max_reps=3), memory=False)
CEILINGS = Ceilings(flops=1e12, bandwidth=1e10)


@pytest.mark.parametrize("variant", ["max", "ragged"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ours_and_the_baselines_compute_the_same_function(variant: str, dtype: str) -> None:
    case = replace(TINY, variant=variant, dtype=dtype)
    options = replace(OPTIONS, impls=("tilefold", "reference", "scatter-reduce", "membership"))
    rows = run_case(SPEC, case, options, CEILINGS)
    assert [row.status for row in rows] == ["ok"] * 4, [row.note for row in rows]
    assert all(row.forward_p50_ms > 0 and row.forward_backward_p50_ms > 0 for row in rows)


def test_ours_and_the_dense_ways_to_csr_compute_the_same_scores() -> None:
    case = replace(TINY, variant="csr")
    rows = run_case(SPEC, case, replace(OPTIONS, impls=("tilefold", "tilefold-csr", "scatter-reduce")), CEILINGS)
    assert [row.status for row in rows] == ["ok"] * 3, [row.note for row in rows]
    assert all(row.forward_p50_ms > 0 and row.forward_backward_p50_ms is None for row in rows)


def rows_of(scatter) -> list[BenchRow]:
    candidate = Implementation("candidate", lambda inputs: inputs.bind(scatter, "wrong"), "ours")
    return run_case(replace(SPEC, implementations=(candidate,)), TINY, OPTIONS, CEILINGS)


def counts_special_tokens(weights: Tensor, ids: Tensor, unused: Tensor, vocab: int) -> Tensor:
    return token_scatter(weights, ids, vocab)


def adds_up(weights: Tensor, ids: Tensor, unused: Tensor, vocab: int) -> Tensor:
    return token_scatter(weights, ids, vocab, ignore_ids=SPECIAL_IDS, reduce="sum")


def gives_everyone_a_gradient(weights: Tensor, ids: Tensor, unused: Tensor, vocab: int) -> Tensor:
    right = token_scatter(weights, ids, vocab, ignore_ids=SPECIAL_IDS)
    everyone = token_scatter(weights, ids, vocab, ignore_ids=SPECIAL_IDS, reduce="sum")
    return right.detach() + everyone - everyone.detach()


@pytest.mark.parametrize("scatter", [counts_special_tokens, adds_up, gives_everyone_a_gradient])
def test_a_wrong_implementation_fails_and_shows_no_time(scatter) -> None:
    (row,) = rows_of(scatter)
    assert row.status == "FAILED" and row.note
    assert row.forward_p50_ms is None and row.forward_backward_p50_ms is None


def test_padding_counts_neither_as_tokens_nor_as_scores() -> None:
    full, ragged = (make_inputs(replace(TINY, variant=variant), CPU) for variant in ("max", "ragged"))
    assert full.valid_tokens == 3 * 38 and ragged.valid_tokens < full.valid_tokens / 2
    assert 0 < ragged.active < full.active < 1


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_every_default_implementation_passes_on_the_gpu() -> None:
    case = SPEC.case("64x32x30522-max")
    options = replace(OPTIONS, device=torch.device("cuda"))
    rows = run_case(SPEC, case, options, CEILINGS)
    expected = ["skipped" if row.impl == "tilefold-csr" else "ok" for row in rows]  # which gives no dense scores
    assert [row.status for row in rows] == expected, [row.note for row in rows]
