"""Run the cases of a benchmark: check results, then measure memory, then time."""

from __future__ import annotations

import gc
import itertools
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

# of the random inputs
SEED = 0
# columns that identify a row of a CSV file
CSV_KEY = ("op", "case", "dtype", "impl")
# characters of an error in a row
_MAX_NOTE_LENGTH = 200
# share of the free memory that a case may take
_MEMORY_SHARE = 0.8


@dataclass
class BenchRow:
    """One implementation on one case: a row of the table, and of the CSV file with these columns.

    Values that were not measured are None. There is no time unless the gate passed. Columns of a
    phase begin with ``forward_`` or ``forward_backward_``.

    Attributes:
        op: Name of the operator.
        case: Name of the case.
        dtype: Data type of the tensors.
        impl: Name of the implementation.
        label: What the implementation ran, such as the function that was called.
        dims: Sizes by name, such as ``B=32 S=512``.
        variant: Variant of the inputs.
        valid_tokens: Tokens that are not padding.
        active: Share of positive scores, if the operator has such.
        status: ``"ok"``, ``"FAILED"`` (the gate), ``"ERROR"``, ``"OOM"`` or ``"skipped"``.
        note: Reason of a status that is not ``"ok"``.
        forward_error: Relative error of the output against fp64, on the checked slices.
        gradient_error: Largest relative error of a gradient.
        forward_p20_ms: 20th percentile of the times of a call; 50th and 80th are alike.
        forward_reps: Number of timed calls.
        forward_floor_ms: Time of the least work at the peak rates of the device.
        forward_tflops: Least operations of a call over its median time, in 10^12 per second.
        forward_peak_mib: Peak of the memory that a call adds, its results included, in MiB.
        ceiling_tflops: Measured rate of a large matrix product, in 10^12 operations per second.
        ceiling_tbps: Measured rate of a large copy, in 10^12 bytes per second.
        kind: Kind of the implementation; it is not in the CSV file.
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
    kind: str = field(default="ours", repr=False)

    @property
    def failed_gate(self) -> bool:
        """Whether the gate failed, or an implementation of tilefold raised an error."""
        return self.status == "FAILED" or (self.status == "ERROR" and self.kind == "ours")

    def fail(self, error: Exception) -> None:
        """Record an error of the implementation, so that other implementations still run."""
        if isinstance(error, torch.cuda.OutOfMemoryError):
            self.status = "OOM"
            self.note = "out of device memory"
        elif isinstance(error, specs.NotApplicable):
            self.status = "skipped"
            self.note = str(error)
        else:
            lines = str(error).strip().splitlines()
            first_line = lines[0] if lines else ""
            self.status = "ERROR"
            self.note = f"{type(error).__name__}: {first_line}"[:_MAX_NOTE_LENGTH]

    def record(self) -> dict[str, object]:
        """Return the row as CSV fields."""
        return {name: value for name, value in asdict(self).items() if name != "kind"}


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    Attributes:
        device: the device to measure.
        impls: names of the implementations to run, for all cases or by the name of the case. None
            runs those that are the default of the device.
        budget: time to spend on timing.
        memory: measure peak memory too, on a CPU in a process for each implementation.
        limit: seconds after which no further case starts.
        progress: called with a description of each step.
    """

    device: torch.device
    impls: Collection[str] | Mapping[str, Collection[str]] | None = None
    budget: timing.TimeBudget = field(default_factory=timing.TimeBudget)
    memory: bool = True
    limit: float = math.inf
    progress: Callable[[str], None] = lambda text: None


def chosen_implementations(
    spec: BenchSpec,
    options: RunOptions,
    case: str = "",
) -> list[Implementation]:
    """Return the implementations to run, in the order of the spec.

    Raises:
        ValueError: for a name that the spec does not have.
    """
    names = options.impls.get(case, ()) if isinstance(options.impls, Mapping) else options.impls
    if names is None:
        return [
            implementation
            for implementation in spec.implementations
            if options.device.type in implementation.default_on
        ]
    # the lookup refuses unknown names
    chosen = {spec.implementation(name).name for name in names}
    return [
        implementation for implementation in spec.implementations if implementation.name in chosen
    ]


def run_case(
    spec: BenchSpec,
    case: BenchCase,
    options: RunOptions,
    ceilings: Ceilings,
) -> list[BenchRow]:
    """Check and measure the chosen implementations on a case.

    An error of an implementation is recorded in its row.

    Args:
        spec: the benchmark.
        case: shapes and data types.
        options: device, implementations and time.
        ceilings: rates of the device, for the floor of the time.

    Returns:
        One row per implementation.
    """
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
        runnable = _check_and_weigh(spec, case, gate, implementation, row, options)
        if runnable is not None:
            runnables[row.impl] = runnable
    for phase in PHASES:
        options.progress(f"{spec.op}: {case.name}: timing {phase.replace('_', ' + ')}")
        _time_phase(rows, runnables, phase, options)
    for row in rows:
        if row.status != "ok":
            continue
        forward_work = spec.work(case, inputs, "forward")
        row.forward_floor_ms = forward_work.floor_ms(ceilings)
        if row.forward_p50_ms:
            row.forward_tflops = forward_work.flops / row.forward_p50_ms / 1e9
        if row.forward_backward_p50_ms is not None:
            total_work = spec.work(case, inputs, "forward_backward")
            row.forward_backward_floor_ms = total_work.floor_ms(ceilings)
    return rows


def _check_and_weigh(
    spec: BenchSpec,
    case: BenchCase,
    gate: Gate,
    implementation: Implementation,
    row: BenchRow,
    options: RunOptions,
) -> Runnable | None:
    """Check an implementation against the gate, and measure its peak memory.

    Returns:
        The implementation bound to the inputs, or None if it cannot be timed. Its row then has the
        reason.
    """
    _release(options.device)
    needed = spec.needs_bytes(case, implementation.name)
    free = timing.free_memory_bytes(options.device)
    if free is not None and needed > _MEMORY_SHARE * free:
        row.status = "skipped"
        row.note = f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
        return None
    try:
        runnable = implementation.build(gate.inputs)
        row.label = runnable.label
        if implementation.kind != "bare":
            result = gate.check(runnable, implementation.kind)
            row.forward_error = result.worst(gradients=False)
            row.gradient_error = result.worst(gradients=True)
            if not result.passed:
                row.status = "FAILED"
                row.note = "; ".join(result.failures) or "the gate checked nothing"
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
    """Measure the peak memory of each phase that an implementation has, in MiB.

    On a GPU the allocator knows the peak. On a CPU a fresh process is needed, since resident memory
    of earlier calls would count.
    """
    if options.device.type != "cuda":
        return measure_peaks(spec.op, case, impl)
    peaks: dict[str, float] = {}
    for phase in PHASES:
        run = getattr(runnable, phase)
        if run is not None:
            peaks[phase] = timing.cuda_extra_peak_mib(run)
    return peaks


def measure_peaks(op: str, case: BenchCase, impl: str) -> dict[str, float]:
    """Measure the peak resident memory of each phase in a fresh process.

    Returns:
        MiB above the inputs, by ``"forward"`` and ``"forward_backward"``.
    """
    return timing.in_fresh_process(_resident_peaks, op, case, impl)


def _resident_peaks(op: str, case: BenchCase, impl: str) -> dict[str, float]:
    """Measure the peak resident memory of each phase in this process, in MiB.

    Each phase runs first on a tiny case, the probe, so that memory for libraries is not counted.
    """
    spec = specs.get_spec(op)
    device = torch.device(case.device)
    build = spec.implementation(impl).build
    runnable = build(spec.make_inputs(case, device, SEED))
    probe = build(spec.make_inputs(spec.probe(case), device, SEED))
    peaks: dict[str, float] = {}
    # the smaller phase first, because a high-water mark that cannot be reset only grows
    for phase in PHASES:
        run = getattr(runnable, phase)
        warm_up = getattr(probe, phase)
        if run is not None and warm_up is not None:
            warm_up()
            peaks[phase] = timing.resident_peak_mib(run)
    return peaks


def _time_phase(
    rows: Sequence[BenchRow],
    runnables: Mapping[str, Runnable],
    phase: Phase,
    options: RunOptions,
) -> None:
    """Time one phase of all implementations, and write the times into their rows.

    They are timed together. If one raises an error, they are timed one by one, so that only the
    failing implementation has no time.

    Args:
        rows: rows of the case. Only those with the status "ok" are timed.
        runnables: implementations that are bound to the inputs, by name.
        phase: the phase.
        options: device and time.
    """
    runs = {}
    for row in rows:
        if row.status == "ok":
            run = getattr(runnables[row.impl], phase)
            if run is not None:
                runs[row.impl] = run
    _release(options.device)
    try:
        timings = timing.time_all(runs, options.device, options.budget)
    except Exception:  # the loop below records it in the row of the implementation that raised it
        timings = {}
    for row in rows:
        if row.impl in runs and row.impl not in timings:
            _release(options.device)
            run = runs[row.impl]
            try:
                timings.update(timing.time_all({row.impl: run}, options.device, options.budget))
            except Exception as error:
                row.fail(error)
        if row.impl in timings:
            for percentile in ("p20", "p50", "p80"):
                setattr(row, f"{phase}_{percentile}_ms", getattr(timings[row.impl], percentile))
            setattr(row, f"{phase}_reps", timings[row.impl].reps)


def _release(device: torch.device) -> None:
    """Free unused memory of the host and the device."""
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
    """Run cases, with slow implementations in a second round.

    Args:
        spec: the benchmark.
        cases: the cases to run.
        options: device, implementations and time.
        on_rows: called with a case and all its rows after each round of it.

    Returns:
        The rows of all cases.
    """
    started = time.monotonic()
    ceilings: dict[str, Ceilings] = {}
    rows: dict[str, list[BenchRow]] = {}
    shape: Mapping[str, int] | None = None
    chosen = {case.name: chosen_implementations(spec, options, case.name) for case in cases}
    for slow, case in itertools.product((False, True), cases):
        names = [
            implementation.name
            for implementation in chosen[case.name]
            if implementation.slow is slow
        ]
        if not names:
            continue
        if time.monotonic() - started > options.limit:
            break
        if shape not in (None, case.dims):
            # compiled baselines recompile for each new shape, and would soon reach dynamo's limit
            torch.compiler.reset()
        shape = case.dims
        if case.dtype not in ceilings:
            options.progress(f"{spec.op}: measuring the ceilings in {case.dtype}")
            ceilings[case.dtype] = timing.measure_ceilings(options.device, case.dtype)
        round_rows = run_case(spec, case, replace(options, impls=names), ceilings[case.dtype])
        rows[case.name] = rows.get(case.name, []) + round_rows
        on_rows(case, rows[case.name])
        _release(options.device)
    return list(itertools.chain.from_iterable(rows.values()))
