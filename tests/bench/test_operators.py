"""The benchmark of each operator: its gate lets right implementations through and stops wrong ones; least work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilefold.bench.lsr_head import CPU_TRAIN
from tilefold.bench.runner import BenchRow, RunOptions, run_case, verdicts
from tilefold.bench.spec import BenchCase, Ceilings, Implementation, Inputs, get_spec
from tilefold.bench.timing import TimeBudget
from tilefold.bench.token_scatter import SPECIAL_IDS
from tilefold.ops import entmax, token_scatter

CPU = torch.device("cpu")
OPTIONS = RunOptions(CPU, budget=TimeBudget(seconds=0.01, min_reps=2, max_reps=3), memory=False)
CEILINGS = Ceilings(flops=1e12, bandwidth=1e10)
DIMS = {"entmax": {"R": 11, "N": 200}, "token_scatter": {"B": 3, "S": 40, "V": 60}}


def tiny(op: str, variant: str = "max", dtype: str = "float32") -> BenchCase:
    return BenchCase("tiny", "cpu", dtype, DIMS[op], variant)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("op", "variant", "impls"),
    [
        ("entmax", "normal", ("tilefold", "reference", "sort")),
        ("token_scatter", "max", ("tilefold", "reference", "scatter-reduce", "membership")),
        ("token_scatter", "ragged", ("tilefold", "reference", "scatter-reduce", "membership")),
        ("token_scatter", "csr", ("tilefold", "tilefold-csr", "scatter-reduce")),
    ],
)
def test_ours_and_the_baselines_compute_the_same_function(
    op: str, variant: str, impls: tuple[str, ...], dtype: str
) -> None:
    rows = run_case(get_spec(op), tiny(op, variant, dtype), replace(OPTIONS, impls=impls), CEILINGS)
    assert {row.impl: row.status for row in rows} == dict.fromkeys(impls, "ok"), [row.note for row in rows]
    assert all(row.forward_p50_ms > 0 for row in rows)
    assert all((row.forward_backward_p50_ms is None) is (variant == "csr") for row in rows)


def test_softmax_is_timed_but_another_function() -> None:
    (row,) = run_case(get_spec("entmax"), tiny("entmax"), replace(OPTIONS, impls=("softmax",)), CEILINGS)
    assert row.status == "ok" and row.forward_error is None


def another_alpha(x: Tensor) -> Tensor:
    p = entmax(x, 1.6)
    assert isinstance(p, Tensor)
    return p


def counts_special_tokens(weights: Tensor, ids: Tensor, unused: Tensor, vocab: int) -> Tensor:
    return token_scatter(weights, ids, vocab)


def adds_up(weights: Tensor, ids: Tensor, unused: Tensor, vocab: int) -> Tensor:
    return token_scatter(weights, ids, vocab, ignore_ids=SPECIAL_IDS, reduce="sum")


def gives_everyone_a_gradient(weights: Tensor, ids: Tensor, unused: Tensor, vocab: int) -> Tensor:
    right = token_scatter(weights, ids, vocab, ignore_ids=SPECIAL_IDS)
    everyone = token_scatter(weights, ids, vocab, ignore_ids=SPECIAL_IDS, reduce="sum")
    return right.detach() + everyone - everyone.detach()


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("entmax", another_alpha),
        *(("token_scatter", wrong) for wrong in (counts_special_tokens, adds_up, gives_everyone_a_gradient)),
    ],
)
def test_a_wrong_implementation_fails_and_shows_no_time(op: str, wrong: Callable[..., Tensor]) -> None:
    candidate = Implementation("candidate", lambda inputs: inputs.bind(wrong, "wrong"), "ours")
    (row,) = run_case(replace(get_spec(op), implementations=(candidate,)), tiny(op), OPTIONS, CEILINGS)
    assert row.status == "FAILED" and row.note
    assert row.forward_p50_ms is None and row.forward_backward_p50_ms is None


def inputs_of(op: str, variant: str, dims: dict[str, int], dtype: str = "float32") -> Inputs:
    return get_spec(op).make_inputs(BenchCase("c", "cpu", dtype, dims, variant), CPU, 0)


def test_padding_does_not_count_as_work_nor_as_scores() -> None:
    dims, spec = {"B": 4, "S": 50, "D": 16, "V": 100}, get_spec("lsr_head")
    full, ragged = (
        spec.work(BenchCase("c", "cpu", "float32", dims, variant), inputs_of("lsr_head", variant, dims), "forward")
        for variant in ("dense", "ragged")
    )
    assert ragged.flops / full.flops == pytest.approx(0.33, abs=0.02)
    scattered = [inputs_of("token_scatter", variant, DIMS["token_scatter"]) for variant in ("max", "ragged")]
    assert scattered[0].valid_tokens == 3 * 38 and scattered[1].valid_tokens < 3 * 19
    assert 0 < scattered[1].active < scattered[0].active < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_2pct_inputs_have_about_two_percent_positive_scores(dtype: str) -> None:
    inputs = inputs_of("lsr_head", "2pct", {"B": 8, "S": 40, "D": 32, "V": 5000}, dtype)
    scores = torch.nn.functional.linear(*inputs.leaves).amax(dim=1)
    assert 0.012 < (scores > 0).float().mean().item() < 0.03
    assert inputs.active == pytest.approx(0.02, abs=0.005)


def test_requirements_show_both_sides_and_whether_they_held() -> None:
    def row(impl: str, ms: float, mib: float) -> BenchRow:
        return BenchRow("lsr_head", CPU_TRAIN.name, "float32", impl, forward_p50_ms=ms, forward_backward_peak_mib=mib)

    rows = [row("tilefold", 1.1, 100.0), row("eager", 4.0, 700.0), row("gemm-full", 1.0, 0.0)]
    spec = get_spec("lsr_head")
    time, memory = verdicts(spec, rows)
    assert (time.left, time.right, time.held) == (1.1, 1.0, True)
    assert (memory.left, memory.right, memory.held) == (100.0, 700.0, False)
    assert verdicts(spec, rows[:1])[0].held is None
    assert verdicts(spec, []) == []


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_every_default_implementation_passes_on_the_gpu() -> None:
    spec = get_spec("token_scatter")
    rows = run_case(spec, spec.case("64x32x30522-max"), replace(OPTIONS, device=torch.device("cuda")), CEILINGS)
    expected = ["skipped" if row.impl == "tilefold-csr" else "ok" for row in rows]  # which gives no dense scores
    assert [row.status for row in rows] == expected, [row.note for row in rows]
