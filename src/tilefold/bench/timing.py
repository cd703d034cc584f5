"""Timers and memory probes: device events with a cold L2 on CUDA, interleaved wall clock on the
CPU.
"""

from __future__ import annotations

import ctypes
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

_FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU so far
_Asked = ParamSpec("_Asked")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call at the 20th, 50th and 80th percentile, over ``reps`` calls."""

    p20: float
    p50: float
    p80: float
    reps: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Percentiles of ``samples`` in milliseconds."""
        values = torch.tensor(samples, dtype=torch.float64)
        p20, p50, p80 = torch.quantile(
            values,
            torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64),
        ).tolist()
        return cls(p20, p50, p80, len(samples))


@dataclass(frozen=True)
class TimeBudget:
    """Time to spend on timing: seconds for one implementation and phase, and bounds on the number
    of calls.
    """

    seconds: float = 0.5
    min_reps: int = 10
    max_reps: int = 200
    rounds: int = 3
    warmup: int = 2


def _cuda_samples(run: Callable[[], object], reps: int, flush: torch.Tensor) -> list[float]:
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
    """Time every call of ``runs`` with CUDA events, L2 flushed before each, in rounds that share a
    clock's drift.
    """
    flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(budget.rounds):
        for name, run in runs.items():
            for _ in range(budget.warmup):
                run()
            estimate = _cuda_samples(run, 1, flush)[0]
            wanted = int(1e3 * budget.seconds / budget.rounds / max(estimate, 1e-3))
            low, high = (-(-reps // budget.rounds) for reps in (budget.min_reps, budget.max_reps))
            samples[name] += _cuda_samples(run, min(max(wanted, low), high), flush)
    return {name: Timing.of(values) for name, values in samples.items()}


def time_cpu(runs: Mapping[str, Callable[[], object]], budget: TimeBudget) -> dict[str, Timing]:
    """Time every call of ``runs`` by wall clock, one of each in turn, as many as the slowest one
    allows.
    """
    for run in runs.values() if budget.warmup else ():
        run()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    deadline = time.perf_counter() + budget.seconds * len(runs)
    while runs:
        for name, run in runs.items():
            before = time.perf_counter()
            run()
            samples[name].append(1e3 * (time.perf_counter() - before))
        reps = len(next(iter(samples.values())))
        if reps >= budget.max_reps or (reps >= budget.min_reps and time.perf_counter() >= deadline):
            break
    return {name: Timing.of(values) for name, values in samples.items()}


def time_all(
    runs: Mapping[str, Callable[[], object]],
    device: torch.device,
    budget: TimeBudget,
) -> dict[str, Timing]:
    """``time_cuda`` or ``time_cpu``, whichever fits ``device``."""
    return time_cuda(runs, budget) if device.type == "cuda" else time_cpu(runs, budget)


def cuda_extra_peak_mib(run: Callable[[], object]) -> float:
    """MiB that one call of ``run`` allocates at its peak above what is held before it, its results
    included.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def in_fresh_process(
    call: Callable[_Asked, _Answer],
    *args: _Asked.args,
    **kwargs: _Asked.kwargs,
) -> _Answer:
    """``call`` of these arguments in a new interpreter; ``RuntimeError`` when it died without an
    answer.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(call, *args, **kwargs).result()
        except BrokenProcessPool as error:
            raise RuntimeError(
                "the measuring process was killed, most likely for lack of memory",
            ) from error


def _proc_kib(file: str, field: str) -> int | None:
    """A line of a file of /proc, or ``None`` where there is none."""
    with suppress(OSError):
        for line in Path("/proc", file).read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1])
    return None


def _reset_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    high, now = _proc_kib("self/status", "VmHWM"), _proc_kib("self/status", "VmRSS")
    return high is not None and now is not None and high <= now + 1024


def resident_mib() -> float:
    """MiB of memory that this process holds now; where the system does not say, the most that it
    ever held.
    """
    now = _proc_kib("self/status", "VmRSS")
    return (_max_rss_kib() if now is None else now) / 1024


def resident_peak_mib(run: Callable[[], object]) -> float:
    """MiB of resident memory that one call of ``run`` adds at its peak, in a process that did
    nothing bigger before.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    was_reset = _reset_high_water()
    before = resident_mib()
    result = run()
    high = _proc_kib("self/status", "VmHWM") if was_reset else _max_rss_kib()
    del result
    return max(0.0, (high or 0) / 1024 - before)


def _max_rss_kib() -> int:
    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value // 1024 if sys.platform == "darwin" else value


def free_memory_bytes(device: torch.device) -> int | None:
    """Memory that ``device`` can still hand out, or ``None`` where that cannot be read."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_left()


def measure_ceilings(device: torch.device, dtype: str) -> Ceilings:
    """Rate of a large matrix product in ``dtype`` and of a large copy, by the 20th percentile of
    their times.
    """
    size, copy_bytes = (8192, 2**31) if device.type == "cuda" else (2048, 2**28)
    budget = TimeBudget(seconds=0.3, min_reps=5, max_reps=30, rounds=1, warmup=3)
    torch_dtype = DTYPES[dtype]
    a = torch.randn(size, size, device=device).to(torch_dtype)
    b = torch.randn(size, size, device=device).to(torch_dtype)
    c = torch.empty(size, size, device=device, dtype=torch_dtype)
    product = time_all({"mm": lambda: torch.mm(a, b, out=c)}, device, budget)["mm"].p20
    source = torch.randint(0, 2**30, (copy_bytes // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy = time_all({"copy": lambda: target.copy_(source)}, device, budget)["copy"].p20
    return Ceilings(flops=2 * size**3 / product * 1e3, bandwidth=2 * copy_bytes / copy * 1e3)
