"""One case through the runner: a row shows a time only behind its gate, and costs no other row anything."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from tilefold.bench import report
from tilefold.bench.lsr_head import SPEC, stock_head
from tilefold.bench.runner import BenchRow, RunOptions, run_case
from tilefold.bench.spec import BenchCase, Ceilings, Implementation, Inputs, Runnable
from tilefold.bench.timing import TimeBudget

TINY = BenchCase("tiny", "cpu", "float32", {"B": 3, "S": 17, "D": 24, "V": 301}, "ragged-2pct")
OPTIONS = RunOptions(torch.device("cpu"), budget=TimeBudget(seconds=0.01, min_reps=2, max_reps=3), memory=False)
CEILINGS = Ceilings(flops=1e12, bandwidth=1e10)


def rows_of(build: Callable[[Inputs], Runnable], kind: str = "ours", case: BenchCase = TINY) -> list[BenchRow]:
    spec = replace(SPEC, implementations=(Implementation("candidate", build, kind),))
    return run_case(spec, case, OPTIONS, CEILINGS)


@pytest.mark.parametrize("variant", ["dense", "2pct", "ragged", "ragged-2pct"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_implementations_pass_their_gate_in_every_variant(variant: str, dtype: str) -> None:
    case = replace(TINY, variant=variant, dtype=dtype)
    for row in run_case(SPEC, case, replace(OPTIONS, impls=("tilefold", "reference")), CEILINGS):
        assert row.status == "ok", row.note
        assert row.forward_p50_ms > 0
        assert row.forward_backward_p50_ms > 0


def test_a_wrong_implementation_fails_and_shows_no_time() -> None:
    (row,) = rows_of(lambda inputs: inputs.bind(lambda *tensors: stock_head(*tensors) * 1.001, "wrong"))
    assert row.status == "FAILED"
    assert row.failed_gate
    assert row.note
    times = [value for name, value in row.record().items() if name.endswith("_ms")]
    assert times == [None] * len(times)

    report.print_case(Console(file=(file := io.StringIO()), width=200), SPEC, TINY, [row])
    printed = file.getvalue()
    assert "FAILED" in printed
    assert "TFLOP/s" in printed.splitlines()[2]
    assert ".." not in printed.split("FAILED")[1].splitlines()[0], "a spread of times was printed"


def test_an_implementation_that_raises_costs_only_its_own_row() -> None:
    def raising(inputs: Inputs) -> Runnable:
        raise ZeroDivisionError("no such kernel")

    candidates = (Implementation("broken", raising, "ours"), *SPEC.implementations[:1])
    spec = replace(SPEC, implementations=candidates)
    broken, good = run_case(spec, TINY, OPTIONS, CEILINGS)
    assert (broken.status, broken.note) == ("ERROR", "ZeroDivisionError: no such kernel")
    assert broken.failed_gate
    assert good.status == "ok"


def test_running_out_of_device_memory_is_a_status_not_a_crash() -> None:
    def hungry(inputs: Inputs) -> Runnable:
        raise torch.OutOfMemoryError("CUDA out of memory")

    (row,) = rows_of(hungry, kind="baseline")
    assert row.status == "OOM"
    assert not row.failed_gate


def test_a_case_that_cannot_fit_is_skipped_with_the_reason() -> None:
    spec = replace(SPEC, needs_bytes=lambda case, impl: 1 << 60)
    row = run_case(spec, TINY, OPTIONS, CEILINGS)[0]
    assert row.status == "skipped"
    assert "GiB free" in row.note


def test_bf16_eager_is_shown_with_the_gradient_error_that_its_rounded_logits_cause() -> None:
    case = replace(TINY, dtype="bfloat16", variant="dense", dims={"B": 4, "S": 64, "D": 32, "V": 500})
    (row,) = rows_of(lambda inputs: inputs.bind(stock_head, ""), kind="baseline", case=case)
    assert row.status == "ok"
    assert row.gradient_error > 0.05
    (row,) = rows_of(lambda inputs: inputs.bind(stock_head, ""), kind="ours", case=case)
    assert row.status == "FAILED"
