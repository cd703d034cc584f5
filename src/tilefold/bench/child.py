"""Measure in a fresh process: resident memory has no other honest baseline, and a process that dies takes nobody along.

``python -m tilefold.bench.child '<json>'`` prints one JSON object per line, one for each measured case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tilefold.bench.registry import get_spec
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import PHASES, BenchCase, BenchSpec, Implementation
from tilefold.bench.timing import TimeBudget, cuda_extra_peak_mib, resident_peak_mib, time_all

_PACKAGE_PARENT = Path(__file__).resolve().parents[2]


class ChildError(RuntimeError):
    """The measuring process ended without an answer."""


def _job(op: str, cases: Sequence[BenchCase], impl: str, seed: int, measure: Sequence[str]) -> str:
    described = [
        {"name": c.name, "device": c.device, "dtype": c.dtype, "dims": dict(c.dims), "variant": c.variant}
        for c in cases
    ]
    return json.dumps({"op": op, "cases": described, "impl": impl, "seed": seed, "measure": list(measure)})


def stream(
    op: str,
    cases: Sequence[BenchCase],
    impl: str,
    *,
    seed: int = 0,
    measure: Sequence[str] = ("peak",),
    timeout: float = 600.0,
) -> Iterator[dict[str, Any]]:
    """Yield one result for each case as a fresh process measures it.

    Args:
        op: operator with a benchmark.
        cases: what to measure, smallest first.
        impl: the implementation's name.
        seed: of the inputs.
        measure: any of ``"peak"`` (MiB, both phases) and ``"time"`` (ms, both phases).
        timeout: seconds for the process to end after its last answer.

    Raises:
        ChildError: when the process ends early, with its last words or the signal that ended it.
    """
    command = [sys.executable, "-m", "tilefold.bench.child", _job(op, cases, impl, seed, measure)]
    path = os.pathsep.join(filter(None, [str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(  # noqa: S603
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    answers = 0
    with process:
        try:
            for line in process.stdout or ():
                if line.startswith("{"):
                    answers += 1
                    yield json.loads(line)
            words = process.stderr.read() if process.stderr is not None else ""
            process.wait(timeout=timeout)
        finally:
            if process.poll() is None:
                process.kill()
    if answers < len(cases) or process.returncode != 0:
        raise ChildError(_last_words(process.returncode, words))


def _last_words(returncode: int, words: str) -> str:
    if returncode == -9:
        return "the measuring process was killed, most likely for lack of memory"
    lines = [line for line in words.strip().splitlines() if line.strip()]
    return f"the measuring process ended with code {returncode}: {lines[-1] if lines else 'no message'}"


def measure_peaks(op: str, case: BenchCase, impl: str, seed: int) -> dict[str, float]:
    """Peak resident MiB above the inputs of ``"forward"`` and ``"forward_backward"``, taken in a fresh process."""
    peaks: dict[str, float] = {}
    for answer in stream(op, [case], impl, seed=seed, measure=("peak",)):
        peaks |= answer["peak_mib"]
    return peaks


def _peaks(
    spec: BenchSpec, case: BenchCase, implementation: Implementation, runnable: Runnable, seed: int
) -> dict[str, float]:
    device = torch.device(case.device)
    probe = implementation.build(spec.make_inputs(spec.probe(case), device, seed))
    peaks: dict[str, float] = {}
    for phase in PHASES:  # the smaller phase first: where the high-water mark cannot be reset it only grows
        run, warm = _phase(runnable, phase), _phase(probe, phase)
        if run is None or warm is None:
            continue
        warm()
        peaks[phase] = cuda_extra_peak_mib(run) if device.type == "cuda" else resident_peak_mib(run)
    return peaks


def _phase(runnable: Runnable, phase: str) -> Callable[[], Any] | None:
    run: Callable[[], Any] | None = getattr(runnable, phase)
    return run


def _times(case: BenchCase, runnable: Runnable, warm: bool) -> dict[str, float]:
    budget = TimeBudget(seconds=0.4, min_reps=2, max_reps=20, rounds=1, warmup=0 if warm else 1)
    times: dict[str, float] = {}
    for phase in PHASES:
        run = _phase(runnable, phase)
        if run is not None:
            times[phase] = time_all({phase: run}, torch.device(case.device), budget)[phase].p50
    return times


def main(argv: Sequence[str]) -> int:
    """Entry of the measuring process."""
    job = json.loads(argv[0])
    spec = get_spec(job["op"])
    implementation = spec.implementation(job["impl"])
    for described in job["cases"]:
        case = BenchCase(**described)
        inputs = spec.make_inputs(case, torch.device(case.device), job["seed"])
        runnable = implementation.build(inputs)
        answer: dict[str, Any] = {"case": case.name, "label": runnable.label}
        if "peak" in job["measure"]:
            answer["peak_mib"] = _peaks(spec, case, implementation, runnable, job["seed"])
        if "time" in job["measure"]:
            answer["time_ms"] = _times(case, runnable, warm="peak" in job["measure"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        del inputs, runnable
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # an orderly end of the interpreter takes half a second, with nothing left to do
