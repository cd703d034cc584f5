"""The correctness gate of the benchmarks: what it accepts, what it catches, what it hides."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import Tensor

from tilefold.bench import lsr_head as bench_lsr_head
from tilefold.bench import report
from tilefold.bench._lsr_head_baselines import runnable_head, stock_head
from tilefold.bench.gate import Budget, GateResult, relative_error
from tilefold.bench.registry import BenchCase, Ceilings, Implementation, Runnable
from tilefold.bench.runner import BenchRow, RunOptions, run_case
from tilefold.bench.timing import TimeBudget
from tilefold.ops import lsr_head

CPU = torch.device("cpu")
TINY = BenchCase("tiny", "cpu", "float32", {"B": 3, "S": 17, "D": 24, "V": 301}, "ragged-2pct")
OPTIONS = RunOptions(CPU, budget=TimeBudget(seconds=0.01, min_reps=2, max_reps=3), memory=False)
CEILINGS = Ceilings(flops=1e12, bandwidth=1e10)


def wrong_output(inputs: bench_lsr_head.LSRHeadInputs) -> Runnable:
    def head(hidden: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        return stock_head(hidden, weight, bias, mask) * 1.001

    return runnable_head(head, inputs, "wrong")


def wrong_gradient(inputs: bench_lsr_head.LSRHeadInputs) -> Runnable:
    right = runnable_head(stock_head, inputs, "")

    def forward_backward() -> tuple[Tensor, tuple[Tensor, ...]]:
        out, (dhidden, dweight, dbias) = right.forward_backward()
        return out, (dhidden, dweight.roll(1, dims=0), dbias)

    return Runnable(right.forward, forward_backward)


def ignores_padding(inputs: bench_lsr_head.LSRHeadInputs) -> Runnable:
    def head(hidden: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        return lsr_head(hidden, weight, bias)

    return runnable_head(head, inputs, "no mask")


def unwritten_element(inputs: bench_lsr_head.LSRHeadInputs) -> Runnable:
    def head(hidden: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        out = stock_head(hidden, weight, bias, mask).clone()
        out[1, 7] = float("nan")
        return out

    return runnable_head(head, inputs, "nan")


def rows_of(build, kind: str = "ours", case: BenchCase = TINY) -> list[BenchRow]:
    spec = replace(bench_lsr_head.SPEC, implementations=(Implementation("candidate", build, kind),))
    return run_case(spec, case, OPTIONS, CEILINGS)


@pytest.mark.parametrize("variant", ["dense", "2pct", "ragged", "ragged-2pct"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_implementations_pass_their_gate_in_every_variant(variant: str, dtype: str) -> None:
    case = replace(TINY, variant=variant, dtype=dtype)
    options = replace(OPTIONS, impls=("tilefold", "reference"))
    for row in run_case(bench_lsr_head.SPEC, case, options, CEILINGS):
        assert row.status == "ok", row.note
        assert row.forward_p50_ms > 0
        assert row.forward_backward_p50_ms > 0


@pytest.mark.parametrize("build", [wrong_output, wrong_gradient, ignores_padding, unwritten_element])
def test_a_wrong_implementation_fails_and_shows_no_time(build) -> None:
    (row,) = rows_of(build)
    assert row.status == "FAILED"
    assert row.failed_gate
    assert row.note
    times = [value for name, value in row.record().items() if name.endswith("_ms")]
    assert times == [None] * len(times)

    console = Console(file=io.StringIO(), width=200)
    report.print_case(console, bench_lsr_head.SPEC, TINY, [row])
    printed = console.file.getvalue()
    assert "FAILED" in printed
    assert "TFLOP/s" in printed.splitlines()[2]
    assert ".." not in printed.split("FAILED")[1].splitlines()[0], "a spread of times was printed"


def test_an_implementation_that_raises_costs_only_its_own_row() -> None:
    def raising(inputs: bench_lsr_head.LSRHeadInputs) -> Runnable:
        raise ZeroDivisionError("no such kernel")

    candidates = (Implementation("broken", raising, "ours"), *bench_lsr_head.SPEC.implementations[:1])
    spec = replace(bench_lsr_head.SPEC, implementations=candidates)
    broken, good = run_case(spec, TINY, OPTIONS, CEILINGS)
    assert (broken.status, broken.note) == ("ERROR", "ZeroDivisionError: no such kernel")
    assert broken.failed_gate
    assert good.status == "ok"


def test_running_out_of_device_memory_is_a_status_not_a_crash() -> None:
    def hungry(inputs: bench_lsr_head.LSRHeadInputs) -> Runnable:
        raise torch.OutOfMemoryError("CUDA out of memory")

    (row,) = rows_of(hungry, kind="baseline")
    assert row.status == "OOM"
    assert not row.failed_gate


def test_a_case_that_cannot_fit_is_skipped_with_the_reason() -> None:
    spec = replace(bench_lsr_head.SPEC, needs_bytes=lambda case, impl: 1 << 60)
    row = run_case(spec, TINY, OPTIONS, CEILINGS)[0]
    assert row.status == "skipped"
    assert "GiB free" in row.note


def test_bf16_eager_is_shown_with_the_gradient_error_that_its_rounded_logits_cause() -> None:
    case = replace(TINY, dtype="bfloat16", variant="dense", dims={"B": 4, "S": 64, "D": 32, "V": 500})
    (row,) = rows_of(lambda inputs: runnable_head(stock_head, inputs, ""), kind="baseline", case=case)
    assert row.status == "ok"
    assert row.gradient_error > 0.05
    (row,) = rows_of(lambda inputs: runnable_head(stock_head, inputs, ""), kind="ours", case=case)
    assert row.status == "FAILED"


def test_relative_error_is_infinite_for_nan_and_for_another_shape() -> None:
    ones = torch.ones(3)
    assert relative_error(ones, ones) == 0
    assert relative_error(torch.tensor([1.0, float("nan"), 1.0]), ones) == float("inf")
    assert relative_error(torch.ones(4), ones) == float("inf")
    assert relative_error(torch.tensor([0.0, 2.0]), torch.zeros(2)) == float("inf")


def test_a_gate_that_checked_nothing_does_not_pass() -> None:
    assert not GateResult({}, Budget(1, 1)).passed
    assert not GateResult({"out": float("nan")}, Budget(1, 1)).passed
    assert GateResult({"out": 0.5, "dweight": 0.5}, Budget(1, 1)).passed
