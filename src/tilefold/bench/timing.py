"""Timers and memory probes for CUDA devices and CPUs."""

from __future__ import annotations

import ctypes
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from tilefold._internal.memory import memory_left
from tilefold.bench.spec import DTYPES, Ceilings

# several times the L2 cache of any GPU so far
_FLUSH_BYTES = 256 * 2**20
# a peak that was reset may exceed the resident memory by this much
_HIGH_WATER_SLACK_KIB = 1024
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Timing:
    """Percentiles of the milliseconds of a call, and the number of timed calls."""

    p20: float
    p50: float
    p80: float
    reps: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Return the percentiles of ``samples``, the milliseconds of each call."""
        values = torch.tensor(samples, dtype=torch.float64)
        levels = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
        p20, p50, p80 = torch.quantile(values, levels).tolist()
        return cls(p20, p50, p80, len(samples))


@dataclass(frozen=True)
class TimeBudget:
    """Time to spend on one phase of one implementation.

    Attributes:
        seconds: time to spend.
        min_reps: smallest number of timed calls.
        max_reps: largest number of timed calls.
        rounds: how often the implementations take turns on a CUDA device.
        warmup: number of calls before the timed ones.
    """

    seconds: float = 0.5
    min_reps: int = 10
    max_reps: int = 200
    rounds: int = 3
    warmup: int = 2


def _time_cuda_calls(run: Callable[[], object], reps: int, flush: torch.Tensor) -> list[float]:
    """Time calls with CUDA events, each with an empty (cold) L2 cache.

    Args:
        run: the function to call.
        reps: number of calls.
        flush: a tensor larger than the L2 cache. Writing it displaces the inputs from the cache.

    Returns:
        Milliseconds of each call.
    """
    new_event: Callable[[], Any] = partial(torch.cuda.Event, enable_timing=True)
    events = [(new_event(), new_event()) for _ in range(reps)]
    for start, end in events:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def time_cuda(runs: Mapping[str, Callable[[], object]], budget: TimeBudget) -> dict[str, Timing]:
    """Time calls with CUDA events and a cold L2 cache.

    The implementations take turns in rounds, so that a drift of the clock rate affects all of them.

    Args:
        runs: functions to time, by the name of the implementation.
        budget: seconds and numbers of calls for each implementation, over all rounds.

    Returns:
        Percentiles of the milliseconds of a call, by the name of the implementation.
    """
    min_reps = math.ceil(budget.min_reps / budget.rounds)
    max_reps = math.ceil(budget.max_reps / budget.rounds)
    round_ms = 1e3 * budget.seconds / budget.rounds
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(budget.rounds):
        for name, run in runs.items():
            for _ in range(budget.warmup):
                run()
            # the time of one call determines how many calls fit into the round
            (estimated_ms,) = _time_cuda_calls(run, 1, flush)
            reps = int(round_ms / max(estimated_ms, 1e-3))
            reps = min(max(reps, min_reps), max_reps)
            samples[name] += _time_cuda_calls(run, reps, flush)
    return {name: Timing.of(values) for name, values in samples.items()}


def time_cpu(runs: Mapping[str, Callable[[], object]], budget: TimeBudget) -> dict[str, Timing]:
    """Time calls by wall clock.

    The implementations take turns after every call, so that noise affects all of them.

    Args:
        runs: functions to time, by the name of the implementation.
        budget: seconds and numbers of calls for each implementation.

    Returns:
        Percentiles of the milliseconds of a call, by the name of the implementation.
    """
    if budget.warmup:
        for run in runs.values():
            run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    deadline = time.perf_counter() + budget.seconds * len(runs)
    while runs:
        for name, run in runs.items():
            before = time.perf_counter()
            run()
            samples[name].append(1e3 * (time.perf_counter() - before))
        reps = len(next(iter(samples.values())))  # the same for all
        is_over_time = time.perf_counter() >= deadline
        if reps >= budget.max_reps or (reps >= budget.min_reps and is_over_time):
            break
    return {name: Timing.of(values) for name, values in samples.items()}


def time_all(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    budget: TimeBudget,
) -> dict[str, Timing]:
    """Time calls on a GPU or a CPU, on which the implementations take turns.

    Args:
        runs: functions to time, by the name of the implementation.
        device: the device on which they run.
        budget: seconds and numbers of calls for each implementation.

    Returns:
        Percentiles of the milliseconds of a call, by the name of the implementation.
    """
    return time_cuda(runs, budget) if device.type == "cuda" else time_cpu(runs, budget)


def cuda_extra_peak_mib(run: Callable[[], object]) -> float:
    """Measure the peak of GPU memory that one call of ``run`` adds, with its results, in MiB."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def in_fresh_process(
    call: Callable[_Arguments, _Result],
    *args: _Arguments.args,
    **kwargs: _Arguments.kwargs,
) -> _Result:
    """Call a function in a new interpreter, and return its result.

    Raises:
        RuntimeError: if the process died without a result.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(call, *args, **kwargs).result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "the measuring process was killed, most likely for lack of memory",
            ) from error


def _read_proc_kib(file: str, field: str) -> int | None:
    """Return a field of a file in /proc, in KiB.

    Args:
        file: the file, such as ``"self/status"``.
        field: the name at the beginning of the line, such as ``"VmRSS"``.

    Returns:
        The number, or None if there is no such file or field.
    """
    with suppress(OSError):
        for line in Path("/proc", file).read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
    return None


def _reset_resident_peak() -> bool:
    """Reset the peak resident memory of this process, and return whether that worked."""
    try:
        # Linux: "5" resets the peak (VmHWM) to the current resident memory (VmRSS)
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    peak = _read_proc_kib("self/status", "VmHWM")
    resident = _read_proc_kib("self/status", "VmRSS")
    if peak is None or resident is None:
        return False
    return peak <= resident + _HIGH_WATER_SLACK_KIB


def resident_mib() -> float:
    """Return the resident memory of this process in MiB.

    Without /proc, the result is the largest resident memory that the process ever had.
    """
    resident = _read_proc_kib("self/status", "VmRSS")
    if resident is None:
        resident = _read_max_rss_kib()
    return resident / 1024


def resident_peak_mib(run: Callable[[], object]) -> float:
    """Measure the peak of resident memory that one call of ``run`` adds, in MiB.

    The unused memory of the allocator is returned to the system first, so that the call has to
    request it again.

    Without /proc, the result is too low if the process has used more memory earlier.
    """
    # a function of glibc; other C libraries do not have it
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
    was_reset = _reset_resident_peak()
    before = resident_mib()
    result = run()  # the result is part of the peak
    peak_kib = _read_proc_kib("self/status", "VmHWM") if was_reset else _read_max_rss_kib()
    del result
    return max(0.0, (peak_kib or 0) / 1024 - before)


def _read_max_rss_kib() -> int:
    """Return the largest resident memory that this process ever had, in KiB."""
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # in bytes on macOS, in KiB elsewhere
    return max_rss // 1024 if sys.platform == "darwin" else max_rss


def free_memory_bytes(device: torch.device) -> int | None:
    """Return the free memory of ``device`` in bytes, or None if it cannot be read."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_left()


def measure_ceilings(device: torch.device, dtype: str) -> Ceilings:
    """Measure the peak throughput of a device, by a large matrix product and a large copy.

    No implementation can be faster than the two allow (its ceilings).

    Args:
        device: the device.
        dtype: name of the dtype of the product.

    Returns:
        Operations per second and bytes per second.
    """
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 2048
    copy_bytes = 2**31 if on_gpu else 2**28
    torch_dtype = DTYPES[dtype]
    a = torch.randn(size, size, device=device).to(torch_dtype)
    b = torch.randn(size, size, device=device).to(torch_dtype)
    c = torch.empty(size, size, device=device, dtype=torch_dtype)
    product_seconds = _measure_seconds(lambda: torch.mm(a, b, out=c), device)
    source = torch.randint(0, 2**30, (copy_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy_seconds = _measure_seconds(lambda: target.copy_(source), device)
    return Ceilings(
        # a multiplication and an addition for each of size^3 terms
        flops=2 * size**3 / product_seconds,
        # a copy reads and writes
        bandwidth=2 * copy_bytes / copy_seconds,
    )


def _measure_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Measure the seconds of a call: the 20th percentile of its times, which is no outlier.

    Args:
        run: the function to time.
        device: the device on which it runs.

    Returns:
        Seconds.
    """
    budget = TimeBudget(seconds=0.3, min_reps=5, max_reps=30, rounds=1, warmup=3)
    timings = time_all({"run": run}, device, budget)
    return timings["run"].p20 / 1e3
