"""Timers and memory probes, in this process and in a fresh one."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from tilefold.bench.runner import measure_peaks
from tilefold.bench.spec import BenchCase, Ceilings, Work
from tilefold.bench.timing import TimeBudget, Timing, in_fresh_process, resident_peak_mib, time_cpu

SMALL = BenchCase("small", "cpu", "float32", {"B": 2, "S": 128, "D": 64, "V": 30522}, "dense")


def test_cpu_timing_takes_turns_so_that_noise_hits_all_alike() -> None:
    calls: list[str] = []
    runs = {name: (lambda name=name: calls.append(name)) for name in ("a", "b")}
    timings = time_cpu(runs, TimeBudget(seconds=0, min_reps=4, max_reps=4, warmup=1))
    assert calls == ["a", "b"] * 5
    assert {name: timing.reps for name, timing in timings.items()} == {"a": 4, "b": 4}


def test_percentiles_are_those_of_the_samples() -> None:
    assert Timing.of([5.0, 1.0, 2.0, 4.0, 3.0, 0.0]) == Timing(1.0, 2.5, 4.0, 6)


def test_a_peak_is_seen_even_when_the_memory_is_gone_again() -> None:
    """A block of this size is mapped anew, whatever was freed before. Linux counts pages per CPU and adds them up in
    batches of max(32, 2 CPUs): what it says before and at the peak may be off by 8 MiB each where there are 32 CPUs.
    """
    peak = resident_peak_mib(lambda: torch.ones(256 * 2**18).sum())
    assert abs(peak - 256) < 32


def test_a_fresh_process_weighs_the_plain_head_by_its_logits_and_ours_without_them() -> None:
    logits_mib = 2 * 128 * 30522 * 4 / 2**20
    plain = measure_peaks("lsr_head", SMALL, "eager", 0)
    ours = measure_peaks("lsr_head", SMALL, "tilefold", 0)
    assert plain["forward"] > logits_mib
    assert plain["forward_backward"] > 2 * logits_mib
    assert ours["forward_backward"] < plain["forward_backward"] / 2


def test_a_measuring_process_that_dies_says_so() -> None:
    impossible = replace(SMALL, dims={"B": 1, "S": 1, "D": -1, "V": 8})
    with pytest.raises(RuntimeError, match="negative dimension"):
        measure_peaks("lsr_head", impossible, "eager", 0)
    with pytest.raises(RuntimeError, match="was killed, most likely for lack of memory"):
        in_fresh_process(os._exit, 1)


def test_the_floor_is_the_slower_of_arithmetic_and_traffic() -> None:
    ceilings = Ceilings(flops=1e12, bandwidth=1e9)
    assert Work(flops=2e9, bytes=1e6).floor_ms(ceilings) == pytest.approx(2.0)
    assert Work(flops=2e9, bytes=1e7).floor_ms(ceilings) == pytest.approx(10.0)
