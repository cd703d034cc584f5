"""Run one case of one benchmark: gate, then memory, then time, for every implementation that was
right.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch

from tilefold.bench import spec as specs
from tilefold.bench import timing
from tilefold.bench.spec import (
    PHASES,
    BenchCase,
    BenchSpec,
    Ceilings,
    Gate,
    Implementation,
    Phase,
    Runnable,
)

SEED = 0  # of the inputs
CSV_KEY = ("op", "case", "dtype", "impl")
_MEMORY_SHARE = 0.8  # of the free memory that a case may be expected to take


@dataclass
class BenchRow:
    """One line of the table and of the CSV; no time unless the gate passed, ``None`` for what was
    not measured.
    """

    op: str
    case: str
    dtype: str
    impl: str
    label: str = ""
    dims: str = ""
    variant: str = ""
    valid_tokens: int = 0
    active: float | None = None
    status: str = "ok"
    note: str = ""
    forward_error: float | None = None
    gradient_error: float | None = None
    forward_p20_ms: float | None = None
    forward_p50_ms: float | None = None
    forward_p80_ms: float | None = None
    forward_reps: int | None = None
    forward_floor_ms: float | None = None
    forward_tflops: float | None = None
    forward_peak_mib: float | None = None
    forward_backward_p20_ms: float | None = None
    forward_backward_p50_ms: float | None = None
    forward_backward_p80_ms: float | None = None
    forward_backward_reps: int | None = None
    forward_backward_floor_ms: float | None = None
    forward_backward_peak_mib: float | None = None
    ceiling_tflops: float | None = None
    ceiling_tbps: float | None = None
    kind: str = field(default="ours", repr=False)  # of the implementation; not in the CSV

    @property
    def failed_gate(self) -> bool:
        """Whether the row is wrong: its check failed, or an implementation of ours raised an error."""
        return self.status == "FAILED" or (self.status == "ERROR" and self.kind == "ours")

    def fail(self, error: Exception) -> None:
        """Say why there is no time: one implementation must not take the others' rows with it."""
        if isinstance(error, torch.cuda.OutOfMemoryError):
            self.status, self.note = "OOM", "out of device memory"
        elif isinstance(error, specs.NotApplicable):
            self.status, self.note = "skipped", str(error)
        else:
            lines = str(error).strip().splitlines()
            self.status, self.note = (
                "ERROR",
                f"{type(error).__name__}: {lines[0] if lines else ''}"[:200],
            )

    def record(self) -> dict[str, object]:
        """The row as CSV fields."""
        return {name: value for name, value in asdict(self).items() if name != "kind"}


@dataclass(frozen=True)
class RunOptions:
    """Options of a run."""

    device: torch.device
    impls: Collection[str] | Mapping[str, Collection[str]] | None = (
        None  # names to run, of each case or of all
    )
    budget: timing.TimeBudget = field(default_factory=timing.TimeBudget)
    memory: bool = True  # measure peak memory too, on a CPU in a process for each implementation
    limit: float = math.inf  # seconds after which no further case is begun
    progress: Callable[[str], None] = lambda text: None


def chosen_implementations(
    spec: BenchSpec,
    options: RunOptions,
    case: str = "",
) -> list[Implementation]:
    """The implementations to run, by default those of the device, in the spec's order;
    ``ValueError`` for others.
    """
    names = options.impls.get(case, ()) if isinstance(options.impls, Mapping) else options.impls
    if names is None:
        return [i for i in spec.implementations if options.device.type in i.default_on]
    wanted = {spec.implementation(name).name for name in names}
    return [i for i in spec.implementations if i.name in wanted]


def run_case(
    spec: BenchSpec,
    case: BenchCase,
    options: RunOptions,
    ceilings: Ceilings,
) -> list[BenchRow]:
    """Gate, weigh and time the chosen implementations on ``case``; nothing that they raise escapes."""
    inputs = spec.make_inputs(case, options.device, SEED)
    options.progress(f"{spec.op}: {case.name}: computing the fp64 ground truth")
    gate = spec.make_gate(case, inputs)
    rows: list[BenchRow] = []
    runnables: dict[str, Runnable] = {}
    for implementation in chosen_implementations(spec, options):
        row = BenchRow(
            op=spec.op,
            case=case.name,
            dtype=case.dtype,
            impl=implementation.name,
            kind=implementation.kind,
            dims=" ".join(f"{name}={size}" for name, size in case.dims.items()),
            variant=case.variant,
            valid_tokens=inputs.valid_tokens,
            active=inputs.active,
            ceiling_tflops=ceilings.flops / 1e12,
            ceiling_tbps=ceilings.bandwidth / 1e12,
        )
        rows.append(row)
        options.progress(f"{spec.op}: {case.name}: checking {implementation.name}")
        if (
            runnable := _check_and_weigh(spec, case, gate, implementation, row, options)
        ) is not None:
            runnables[row.impl] = runnable
    for phase in PHASES:
        options.progress(f"{spec.op}: {case.name}: timing {phase.replace('_', ' + ')}")
        _time_phase(rows, runnables, phase, options)
    for row in (row for row in rows if row.status == "ok"):
        forward = spec.work(case, inputs, "forward")
        row.forward_floor_ms = forward.floor_ms(ceilings)
        if row.forward_p50_ms:
            row.forward_tflops = forward.flops / row.forward_p50_ms / 1e9
        if row.forward_backward_p50_ms is not None:
            row.forward_backward_floor_ms = spec.work(case, inputs, "forward_backward").floor_ms(
                ceilings,
            )
    return rows


def _check_and_weigh(
    spec: BenchSpec,
    case: BenchCase,
    gate: Gate,
    implementation: Implementation,
    row: BenchRow,
    options: RunOptions,
) -> Runnable | None:
    """The implementation bound to the inputs, or ``None`` with the reason in its row."""
    _release(options.device)
    needed, free = (
        spec.needs_bytes(case, implementation.name),
        timing.free_memory_bytes(options.device),
    )
    if free is not None and needed > _MEMORY_SHARE * free:
        row.status, row.note = (
            "skipped",
            f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free",
        )
        return None
    try:
        runnable = implementation.build(gate.inputs)
        row.label = runnable.label
        if implementation.kind != "bare":
            result = gate.check(runnable, implementation.kind)
            row.forward_error, row.gradient_error = (
                result.worst(gradients=False),
                result.worst(gradients=True),
            )
            if not result.passed:
                row.status, row.note = (
                    "FAILED",
                    "; ".join(result.failures) or "the gate checked nothing",
                )
                return None
            if options.memory:
                for phase, peak in _peaks(spec, case, runnable, row.impl, options).items():
                    setattr(row, f"{phase}_peak_mib", peak)
        return runnable
    except Exception as error:
        row.fail(error)
    return None


def _peaks(
    spec: BenchSpec,
    case: BenchCase,
    runnable: Runnable,
    impl: str,
    options: RunOptions,
) -> Mapping[str, float]:
    if options.device.type != "cuda":
        return measure_peaks(spec.op, case, impl)
    runs = {phase: getattr(runnable, phase) for phase in PHASES}
    return {
        phase: timing.cuda_extra_peak_mib(run) for phase, run in runs.items() if run is not None
    }


def measure_peaks(op: str, case: BenchCase, impl: str) -> dict[str, float]:
    """Peak resident MiB above the inputs of ``"forward"`` and ``"forward_backward"``, taken in a
    fresh process.
    """
    return timing.in_fresh_process(_resident_peaks, op, case, impl)


def _resident_peaks(op: str, case: BenchCase, impl: str) -> dict[str, float]:
    spec, device = specs.get_spec(op), torch.device(case.device)
    build = spec.implementation(impl).build
    runnable = build(spec.make_inputs(case, device, SEED))
    probe = build(spec.make_inputs(spec.probe(case), device, SEED))
    peaks: dict[str, float] = {}
    for (
        phase
    ) in PHASES:  # the smaller phase first: where the high-water mark cannot be reset it only grows
        run, warm = getattr(runnable, phase), getattr(probe, phase)
        if run is not None and warm is not None:
            warm()
            peaks[phase] = timing.resident_peak_mib(run)
    return peaks


def _time_phase(
    rows: Sequence[BenchRow],
    runnables: Mapping[str, Runnable],
    phase: Phase,
    options: RunOptions,
) -> None:
    """Time all together; if one raises an error, one by one, so that only the culprit loses its
    time.
    """
    runs = {row.impl: getattr(runnables[row.impl], phase) for row in rows if row.status == "ok"}
    runs = {name: run for name, run in runs.items() if run is not None}
    _release(options.device)
    try:
        measured = timing.time_all(runs, options.device, options.budget)
    except Exception:  # of one that is found below
        measured = {}
    for row in rows:
        if row.impl in runs and row.impl not in measured:
            _release(options.device)
            try:
                measured |= timing.time_all(
                    {row.impl: runs[row.impl]},
                    options.device,
                    options.budget,
                )
            except Exception as error:
                row.fail(error)
        if row.impl in measured:
            for percentile in ("p20", "p50", "p80"):
                setattr(row, f"{phase}_{percentile}_ms", getattr(measured[row.impl], percentile))
            setattr(row, f"{phase}_reps", measured[row.impl].reps)


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def run_spec(
    spec: BenchSpec,
    cases: Sequence[BenchCase],
    options: RunOptions,
    on_rows: Callable[[BenchCase, list[BenchRow]], None] = lambda case, rows: None,
) -> list[BenchRow]:
    """Run ``cases``, slow implementations in a second round; ``on_rows`` sees all rows of a case as
    it ends.
    """
    started = time.monotonic()
    ceilings: dict[str, Ceilings] = {}
    rows: dict[str, list[BenchRow]] = {}
    shape: Mapping[str, int] | None = None
    chosen = {case.name: chosen_implementations(spec, options, case.name) for case in cases}
    rounds = (
        ([i.name for i in chosen[case.name] if i.slow is slow], case)
        for slow in (False, True)
        for case in cases
    )
    for names, case in (each for each in rounds if each[0]):
        if time.monotonic() - started > options.limit:
            break
        if shape not in (None, case.dims):
            # compiled baselines recompile for a new shape: forget the last one, or dynamo's limit
            # is soon reached
            torch.compiler.reset()
        shape = case.dims
        if case.dtype not in ceilings:
            options.progress(f"{spec.op}: measuring the ceilings in {case.dtype}")
            ceilings[case.dtype] = timing.measure_ceilings(options.device, case.dtype)
        found = run_case(spec, case, replace(options, impls=names), ceilings[case.dtype])
        rows[case.name] = rows.get(case.name, []) + found
        on_rows(case, rows[case.name])
        _release(options.device)
    return [row for found in rows.values() for row in found]
