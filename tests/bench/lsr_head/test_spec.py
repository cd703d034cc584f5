"""The benchmark of the LSR head: its inputs, its least work and its claims."""

from __future__ import annotations

import pytest
import torch

from tilefold.bench.lsr_head import CPU_TRAIN, SPEC, make_inputs
from tilefold.bench.runner import BenchRow, verdicts
from tilefold.bench.spec import BenchCase

CPU = torch.device("cpu")


def test_padding_does_not_count_as_work() -> None:
    dims = {"B": 4, "S": 50, "D": 16, "V": 100}
    full, ragged = (
        SPEC.work(case, make_inputs(case, CPU), "forward")
        for case in (BenchCase("c", "cpu", "float32", dims, variant) for variant in ("dense", "ragged"))
    )
    assert ragged.flops / full.flops == pytest.approx(0.33, abs=0.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_2pct_inputs_have_about_two_percent_positive_scores(dtype: str) -> None:
    case = BenchCase("c", "cpu", dtype, {"B": 8, "S": 40, "D": 32, "V": 5000}, "2pct")
    inputs = make_inputs(case, CPU)
    scores = torch.nn.functional.linear(*inputs.leaves).amax(dim=1)
    assert 0.012 < (scores > 0).float().mean().item() < 0.03
    assert inputs.active == pytest.approx(0.02, abs=0.005)


def test_requirements_show_both_sides_and_whether_they_held() -> None:
    case = CPU_TRAIN.name

    def row(impl: str, ms: float, mib: float) -> BenchRow:
        return BenchRow("lsr_head", case, "float32", impl, forward_p50_ms=ms, forward_backward_peak_mib=mib)

    rows = [row("tilefold", 1.1, 100.0), row("eager", 4.0, 700.0), row("gemm-full", 1.0, 0.0)]
    time, memory = verdicts(SPEC, rows)
    assert (time.left, time.right, time.held) == (1.1, 1.0, True)
    assert (memory.left, memory.right, memory.held) == (100.0, 700.0, False)
    assert verdicts(SPEC, rows[:1])[0].held is None
    assert verdicts(SPEC, []) == []
