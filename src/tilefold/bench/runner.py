"""Run the cases of a benchmark: check the results, measure peak memory, and time."""

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

# seed of the random inputs
SEED = 0
# columns that identify a row of a CSV file
CSV_KEY = ("op", "case", "dtype", "impl")
# longest error message of a row, in characters
_MAX_NOTE_LENGTH = 200
# share of the free memory that an implementation may need
_MEMORY_SHARE = 0.8


@dataclass(frozen=True)
class PhaseResult:
    """Times and memory of one phase of an implementation; None for values that were not measured.

    Attributes:
        p20_ms: 20th percentile of the times of a call, in milliseconds.
        p50_ms: median of the times.
        p80_ms: 80th percentile of the times.
        floor_ms: time of the minimum work at the peak throughput of the device.
        peak_mib: peak of the memory that a call adds, in MiB.
    """

    p20_ms: float | None
    p50_ms: float | None
    p80_ms: float | None
    floor_ms: float | None
    peak_mib: float | None


@dataclass
class BenchRow:
    """One implementation on one case: a row of the table, and of the CSV file with these columns.

    Values that were not measured are None. There are no times unless the accuracy gate passed.
    Columns of a phase begin with ``forward_`` or ``forward_backward_``.

    Attributes:
        op: Name of the operator.
        case: Name of the case.
        dtype: Data type of the tensors.
        impl: Name of the implementation.
        label: What the implementation ran, such as the function that was called.
        dims: Sizes by name, such as ``B=32 S=512``.
        variant: Variant of the inputs.
        valid_tokens: Tokens that are not padding.
        active: Share of the scores that are positive, or None if scores have no sign.
        status: ``"ok"``, ``"FAILED"`` (the accuracy gate), ``"ERROR"``, ``"OOM"`` or ``"skipped"``.
        note: Reason of a status other than ``"ok"``.
        forward_error: Relative error of the output against fp64, on the checked slices.
        gradient_error: Largest relative error of a gradient.
        forward_p20_ms: 20th percentile of the times of a call; 50th and 80th have columns, too.
        forward_reps: Number of timed calls.
        forward_floor_ms: Time of the minimum work at the peak throughput of the device.
        forward_tflops: Minimum operations of a call over its median time, in 10^12 per second.
        forward_peak_mib: Peak of the memory that a call adds, including its results, in MiB.
        ceiling_tflops: Throughput of a large matrix product, in 10^12 operations per second.
        ceiling_tbps: Throughput of a large copy, in 10^12 bytes per second.
        kind: Kind of the implementation. The CSV file does not have it.
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
        """Whether the accuracy gate failed, or an implementation of tilefold raised an error."""
        return self.status == "FAILED" or (self.status == "ERROR" and self.kind == "ours")

    def phase(self, phase: Phase) -> PhaseResult:
        """Return the times and the memory of a phase."""
        if phase == "forward":
            return PhaseResult(
                p20_ms=self.forward_p20_ms,
                p50_ms=self.forward_p50_ms,
                p80_ms=self.forward_p80_ms,
                floor_ms=self.forward_floor_ms,
                peak_mib=self.forward_peak_mib,
            )
        return PhaseResult(
            p20_ms=self.forward_backward_p20_ms,
            p50_ms=self.forward_backward_p50_ms,
            p80_ms=self.forward_backward_p80_ms,
            floor_ms=self.forward_backward_floor_ms,
            peak_mib=self.forward_backward_peak_mib,
        )

    def set_timing(self, phase: Phase, times: timing.Timing) -> None:
        """Store the times of a phase, and the number of timed calls."""
        if phase == "forward":
            self.forward_p20_ms = times.p20
            self.forward_p50_ms = times.p50
            self.forward_p80_ms = times.p80
            self.forward_reps = times.reps
        else:
            self.forward_backward_p20_ms = times.p20
            self.forward_backward_p50_ms = times.p50
            self.forward_backward_p80_ms = times.p80
            self.forward_backward_reps = times.reps

    def fail(self, error: Exception) -> None:
        """Store an exception that the implementation raised as the row's status and note."""
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
        """Return the columns of the CSV file, by name."""
        return {name: value for name, value in asdict(self).items() if name != "kind"}


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    Attributes:
        device: the device to measure.
        impls: names of the implementations to run, either for all cases or by the name of the
            case. None runs the default implementations of the device.
        budget: time to spend on timing.
        memory: whether to measure peak memory, too. On a CPU, each implementation then runs in a
            process of its own.
        limit: seconds after which no more cases are started.
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
    """Return the implementations to run on a case, in the order in which the benchmark lists them.

    Args:
        spec: the benchmark.
        options: ``impls`` names the implementations. If it is None, those run that the benchmark
            declares as default for the type of ``device``.
        case: name of the case, if ``impls`` maps cases to names. Nothing runs on other cases.

    Raises:
        ValueError: for a name that the benchmark does not have.
    """
    if options.impls is None:
        return [
            implementation
            for implementation in spec.implementations
            if options.device.type in implementation.default_on
        ]
    names = options.impls.get(case, ()) if isinstance(options.impls, Mapping) else options.impls
    # raises ValueError for an unknown name
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
    """Check the results of implementations on a case, then measure their memory and their times.

    An exception that an implementation raises is stored in its row.

    Args:
        spec: the benchmark.
        case: shape and dtype.
        options: device, implementations and time.
        ceilings: peak throughput of the device, from which the time of the minimum work follows.

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
        runnable = _check_and_measure_memory(spec, case, gate, implementation, row, options)
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


def _check_and_measure_memory(
    spec: BenchSpec,
    case: BenchCase,
    gate: Gate,
    implementation: Implementation,
    row: BenchRow,
    options: RunOptions,
) -> Runnable | None:
    """Check the results of an implementation, and measure its peak memory.

    Both are stored in the row. A ``"bare"`` implementation, such as a bare matrix product, computes
    another function. It is neither checked nor measured, only timed.

    Args:
        spec: the benchmark.
        case: shape and dtype.
        gate: the check of results against fp64, with the inputs of the case.
        implementation: the implementation.
        row: the row of the implementation, which changes.
        options: the device, and whether memory is measured.

    Returns:
        The calls that run the implementation on the inputs. None if it cannot be timed; the note of
        the row then says why.
    """
    _release_memory(options.device)
    row.note = _explain_lack_of_memory(spec, case, implementation.name, options.device)
    if row.note:
        row.status = "skipped"
        return None
    try:
        runnable = implementation.build(gate.inputs)
        row.label = runnable.label
        if implementation.kind == "bare":
            return runnable
        result = gate.check(runnable, implementation.kind)
        row.forward_error = result.worst(gradients=False)
        row.gradient_error = result.worst(gradients=True)
        if not result.passed:
            row.status = "FAILED"
            row.note = "; ".join(result.failures) or "the gate checked nothing"
            return None
        if options.memory:
            peaks = _measure_peak_memory(spec, case, runnable, row.impl, options.device)
            row.forward_peak_mib = peaks.get("forward")
            row.forward_backward_peak_mib = peaks.get("forward_backward")
        return runnable
    except Exception as error:
        row.fail(error)
    return None


def _explain_lack_of_memory(
    spec: BenchSpec, case: BenchCase, impl: str, device: torch.device
) -> str:
    """Return why the memory of a device cannot suffice for an implementation, or ``""``.

    Args:
        spec: the benchmark.
        case: the case.
        impl: name of the implementation.
        device: the device.
    """
    min_bytes = spec.min_bytes(case, impl)
    free_bytes = timing.free_memory_bytes(device)
    if free_bytes is None or min_bytes <= _MEMORY_SHARE * free_bytes:
        return ""
    return f"needs about {min_bytes / 2**30:.1f} GiB, {free_bytes / 2**30:.1f} GiB free"


def _measure_peak_memory(
    spec: BenchSpec,
    case: BenchCase,
    runnable: Runnable,
    impl: str,
    device: torch.device,
) -> Mapping[Phase, float]:
    """Measure the peak memory of each phase: forward, and forward with backward.

    A GPU's allocator counts the peak of a call. On a CPU the implementation runs in a new process,
    because the peak of this process includes earlier calls.

    Args:
        spec: the benchmark.
        case: shape and dtype.
        runnable: the calls that run the implementation on inputs on ``device``.
        impl: name of the implementation.
        device: the device.

    Returns:
        MiB above the inputs, by phase. A phase that the implementation lacks is missing.
    """
    if device.type != "cuda":
        return measure_peaks(spec.op, case, impl)
    peaks: dict[Phase, float] = {}
    for phase in PHASES:
        run = runnable.phase(phase)
        if run is not None:
            peaks[phase] = timing.cuda_extra_peak_mib(run)
    return peaks


def measure_peaks(op: str, case: BenchCase, impl: str) -> dict[Phase, float]:
    """Measure the peak resident memory of each phase of an implementation in a new process.

    Args:
        op: name of the operator.
        case: shape and dtype.
        impl: name of the implementation.

    Returns:
        MiB above the inputs, by phase. A phase that the implementation lacks is missing.
    """
    return timing.in_fresh_process(_measure_peaks_in_this_process, op, case, impl)


def _measure_peaks_in_this_process(op: str, case: BenchCase, impl: str) -> dict[Phase, float]:
    """Measure the peak resident memory of each phase: forward, and forward with backward.

    Each phase first runs on a tiny case, the probe. This loads libraries and starts threads, whose
    memory is not counted.

    Args:
        op: name of the operator.
        case: shape and dtype.
        impl: name of the implementation.

    Returns:
        MiB above the inputs, by phase. A phase that the implementation lacks is missing.
    """
    spec = specs.get_spec(op)
    device = torch.device(case.device)
    build = spec.implementation(impl).build
    runnable = build(spec.make_inputs(case, device, SEED))
    probe = build(spec.make_inputs(spec.probe(case), device, SEED))
    peaks: dict[Phase, float] = {}
    # forward runs first, since it needs less memory: a peak that cannot be reset only grows
    for phase in PHASES:
        run_case_phase = runnable.phase(phase)
        run_probe_phase = probe.phase(phase)
        if run_case_phase is not None and run_probe_phase is not None:
            run_probe_phase()
            peaks[phase] = timing.resident_peak_mib(run_case_phase)
    return peaks


def _time_phase(
    rows: Sequence[BenchRow],
    runnables: Mapping[str, Runnable],
    phase: Phase,
    options: RunOptions,
) -> None:
    """Time one phase of all implementations, and store the times in their rows.

    The implementations take turns, so that a change of the clock rate affects all of them. If one
    raises an exception, each is timed separately, and only the failing one has no times.

    Args:
        rows: rows of the case. Only those with the status "ok" are timed.
        runnables: the calls that run an implementation on the inputs, by its name.
        phase: forward, or forward and backward.
        options: device and time.
    """
    runs: dict[str, Callable[[], object]] = {}
    for row in rows:
        if row.status == "ok":
            run = runnables[row.impl].phase(phase)
            if run is not None:
                runs[row.impl] = run
    timed_rows = [row for row in rows if row.impl in runs]
    _release_memory(options.device)
    try:
        timings = timing.time_all(runs, options.device, options.budget)
    except Exception:  # _time_separately stores it in the row of the failing implementation
        timings = _time_separately(timed_rows, runs, options)
    for row in timed_rows:
        if row.impl in timings:
            row.set_timing(phase, timings[row.impl])


def _time_separately(
    rows: Sequence[BenchRow],
    runs: Mapping[str, Callable[[], object]],
    options: RunOptions,
) -> dict[str, timing.Timing]:
    """Time implementations one after another, and store exceptions in their rows.

    Args:
        rows: the rows of the implementations.
        runs: the call to time, by the name of the implementation.
        options: device and time.

    Returns:
        Times by the name of the implementation, without those that raised an exception.
    """
    timings: dict[str, timing.Timing] = {}
    for row in rows:
        _release_memory(options.device)
        single_run = {row.impl: runs[row.impl]}
        try:
            timings.update(timing.time_all(single_run, options.device, options.budget))
        except Exception as error:
            row.fail(error)
    return timings


def _release_memory(device: torch.device) -> None:
    """Collect garbage, and return the unused memory of a GPU's allocator."""
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
    """Check and time an operator on its cases, those implementations that compile for long last.

    No case is started after ``options.limit`` seconds, so that the result may lack rows.

    Args:
        spec: the benchmark.
        cases: the cases to run.
        options: device, implementations and time.
        on_rows: called when a case has new rows, with the case and all its rows so far.

    Returns:
        The rows of all cases.
    """
    started = time.monotonic()
    ceilings: dict[str, Ceilings] = {}
    rows: dict[str, list[BenchRow]] = {}
    previous_dims: Mapping[str, int] | None = None
    for case, names in _order_in_rounds(spec, cases, options):
        if time.monotonic() - started > options.limit:
            break
        if previous_dims is not None and previous_dims != case.dims:
            # compiled baselines recompile for each new shape, and would soon reach dynamo's limit
            torch.compiler.reset()
        previous_dims = case.dims
        if case.dtype not in ceilings:
            options.progress(f"{spec.op}: measuring the ceilings in {case.dtype}")
            ceilings[case.dtype] = timing.measure_ceilings(options.device, case.dtype)
        round_rows = run_case(spec, case, replace(options, impls=names), ceilings[case.dtype])
        rows[case.name] = rows.get(case.name, []) + round_rows
        on_rows(case, rows[case.name])
        _release_memory(options.device)
    return list(itertools.chain.from_iterable(rows.values()))


def _order_in_rounds(
    spec: BenchSpec,
    cases: Sequence[BenchCase],
    options: RunOptions,
) -> list[tuple[BenchCase, list[str]]]:
    """Return what to run: all cases with fast implementations, then all cases with slow ones.

    Slow implementations compile or tune for long before their first result.

    Args:
        spec: the benchmark.
        cases: the cases to run.
        options: device and implementations.

    Returns:
        Cases, with the names of the implementations. Cases without any are left out.

    Raises:
        ValueError: for an implementation that the spec does not have.
    """
    chosen = {case.name: chosen_implementations(spec, options, case.name) for case in cases}
    rounds: list[tuple[BenchCase, list[str]]] = []
    for is_slow in (False, True):
        for case in cases:
            names = [
                implementation.name
                for implementation in chosen[case.name]
                if implementation.slow is is_slow
            ]
            if names:
                rounds.append((case, names))
    return rounds
