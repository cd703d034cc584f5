"""``tilefold bench`` times operators and baselines; ``tilefold warmup`` compiles kernels ahead."""

from __future__ import annotations

import functools
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tilefold.cli import _common, _models
from tilefold.cli._common import UsageError
from tilefold.cli._options import Options, argument, option, positive, refuse_options

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from tilefold.bench.claims import Verdict
    from tilefold.bench.results import Provenance
    from tilefold.bench.runner import BenchRow, RunOptions
    from tilefold.bench.spec import BenchCase, BenchSpec
    from tilefold.ops.warm_up import Built

# Seconds for which one phase (forward, or both passes) of an implementation is timed.
SECONDS = 0.5
_QUICK_SECONDS = 0.15
# A call on a CPU takes longer and varies more: it is timed for longer, with fewer calls.
_CPU_SECONDS_FACTOR = 6
_MIN_CALLS = 5
_CPU_MAX_CALLS = 50
# Tokens of the longest query and the longest document of a batch that kernels are compiled for.
DEFAULT_LENGTHS = [32, 256]
_CLAIMS = "claims"  # the argument that measures the claims, in place of an operator
# Results of other devices, by which the claims about them are judged.
_COMMITTED_RESULTS = Path("benchmarks/results")
# Width in characters of output that does not go to a terminal. The widest table fits
# (token_scatter).
_FILE_WIDTH = 190


@dataclass(frozen=True, kw_only=True)
class BenchRequest(Options):
    """Options of ``tilefold bench``."""

    op: Annotated[
        str | None,
        argument(
            "Operator to time, such as lsr_head; or claims, those of papers and the README.",
        ),
    ] = None
    every: Annotated[
        bool,
        option(
            "Time every operator.",
            "--all",
        ),
    ] = False
    listing: Annotated[
        bool,
        option(
            "List shapes and implementations instead of timing them.",
            "--list",
        ),
    ] = False
    shape: Annotated[
        list[str] | None,
        option(
            "Named shape; may be repeated.",
            "--shape",
            "--only",
        ),
    ] = None
    impl: Annotated[
        list[str] | None,
        option(
            "Implementation; may be repeated.",
        ),
    ] = None
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        option(
            "Device; by default the GPU if there is one.",
        ),
    ] = None
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        option(
            "Data type, instead of those of the shapes.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        option(
            "Folder for the results, as <device>/<op>.csv.",
        ),
    ] = None
    quick: Annotated[
        bool,
        option(
            "Time a few shapes, and each for a short time; results are saved only with --output.",
            "--quick",
        ),
    ] = False
    seconds: Annotated[
        float,
        option(
            "Seconds of timing per implementation and phase.",
            min=0,
        ),
    ] = SECONDS
    minutes: Annotated[
        float,
        option(
            "Time limit after which no further shape is started; slow baselines run last.",
            min=0,
            show_default=False,
        ),
    ] = math.inf

    def validate(self) -> None:
        """Raise ``UsageError`` for options without effect."""
        super().validate()
        if self.listing:
            refuse_options(
                {
                    "--shape/--only": self.shape,
                    "--impl": self.impl,
                    "--device": self.device,
                    "--dtype": self.dtype,
                    "--output": self.output,
                    "--quick": self.quick,
                    "--seconds": self.seconds != SECONDS,
                    "--minutes": self.minutes != math.inf,
                },
                "cannot be combined with --list, which runs nothing",
            )
        exceeds_quick_limit = self.seconds != SECONDS and self.seconds > _QUICK_SECONDS
        if self.quick and exceeds_quick_limit:
            raise UsageError(
                f"--seconds has no effect above {_QUICK_SECONDS:g} with --quick: leave it out.",
            )


def bench(request: BenchRequest) -> None:
    """Check operators and their baselines, then time them; a row whose check fails shows no time.

    Without --output, results are saved in benchmarks/results if the current directory has that
    folder. The exit code is 1 if an implementation failed its check.

    Example:
        tilefold bench lsr_head --quick
    """
    if request.every and request.op is not None:
        raise UsageError(f"--all cannot be combined with the operator {request.op}.")
    measures_claims = request.op == _CLAIMS
    try:
        if measures_claims:
            passed = _check_claims(request)
        elif request.listing:
            _print_listing(_selected_specs(request))
            passed = True
        else:
            passed = _time_operators(request)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not passed:
        raise typer.Exit(1)


def _selected_specs(request: BenchRequest) -> list[BenchSpec]:
    """Return the benchmark of the given operator, or those of all operators.

    Args:
        request: the options of the command.

    Raises:
        UsageError: if no operator is given, without ``--all`` and ``--list``.
        ValueError: if the operator is unknown.
    """
    from tilefold.bench.spec import OPERATORS, get_spec

    if request.op is not None:
        return [get_spec(request.op)]
    if request.every or request.listing:
        return [get_spec(name) for name in OPERATORS]
    raise UsageError(f"give an operator ({', '.join(OPERATORS)}), {_CLAIMS}, or --all.")


def _print_listing(specs: list[BenchSpec]) -> None:
    """Print the shapes and the implementations of operators, with the devices that they run on."""
    for spec in specs:
        typer.echo(f"{spec.op}: shapes")
        for case in spec.cases:
            quick = "  quick" if case.quick else ""
            typer.echo(f"  {case.name:32} {case.device:5} {case.dtype}{quick}")
        typer.echo(f"{spec.op}: implementations")
        for implementation in spec.implementations:
            devices = ", ".join(implementation.default_on) or "on request"
            typer.echo(f"  {implementation.name:32} {implementation.kind:9} {devices}")


def _time_operators(request: BenchRequest) -> bool:
    """Check and time the operators of a request, and save the results.

    A CPU is slower than a GPU and its times vary more, so it gets more time, with a limited number
    of calls.

    Args:
        request: the options of the command.

    Returns:
        Whether all implementations passed their checks.
    """
    from tilefold.bench.results import choose_device, results_folder
    from tilefold.bench.runner import RunOptions
    from tilefold.bench.timing import TimeBudget

    specs = _selected_specs(request)
    device = choose_device(request.device)
    cases_by_spec = [
        (spec, _select_cases(spec, request.shape, device.type, request.dtype, request.quick))
        for spec in specs
    ]
    seconds = request.seconds
    if request.quick:
        seconds = min(seconds, _QUICK_SECONDS)
    if device.type == "cuda":
        budget = TimeBudget(seconds=seconds)
    else:
        budget = TimeBudget(
            seconds=_CPU_SECONDS_FACTOR * seconds,
            min_reps=_MIN_CALLS,
            max_reps=_CPU_MAX_CALLS,
        )
    options = RunOptions(
        device=device,
        impls=request.impl or None,
        budget=budget,
        limit=60 * request.minutes,
    )
    return _run_all(cases_by_spec, options, results_folder(request.output, request.quick))


def _check_claims(request: BenchRequest) -> bool:
    """Measure what the documents claim about the speed on this device, and print which claims hold.

    A claim says how many times better one row of the results is than another, such as the time of
    an operator. Claims about other devices are printed too, by the results in the repository.

    Args:
        request: the options of the command.

    Returns:
        Whether all measured implementations computed correct results. A claim that does not hold
        is only printed.
    """
    from tempfile import TemporaryDirectory

    from tilefold.bench import claims
    from tilefold.bench.results import choose_device

    device = choose_device(request.device)
    with TemporaryDirectory() as temporary:
        folder = request.output or Path(temporary)
        all_correct = _measure_claims(request, device, folder)
        verdicts = _judge_claims(device, folder)
    typer.echo("\n".join(claims.table(verdicts)))
    return all_correct


def _judge_claims(device: torch.device, folder: Path) -> list[Verdict]:
    """Compare each claim about speed or memory with measured results.

    Claims about operators on this type of device are compared with the results of this run, and
    others with the results in the repository. On a GPU, claims about CPUs are left out, because
    the repository has no results for them.

    Args:
        device: the device that was measured.
        folder: the folder of the results of this run.
    """
    from tilefold.bench import claims
    from tilefold.bench.results import collect, results_file

    provenance = collect(device)
    verdicts: list[Verdict] = []
    for claim in claims.CLAIMS:
        if claim.is_about_operator and claim.runs_on(device.type):
            path = results_file(folder, claim.file, provenance)
            verdicts.append(claims.judge(claim, claims.read_rows(path)))
        elif claim.device != "cpu":
            path = _COMMITTED_RESULTS / claim.device / f"{claim.file}.csv"
            verdicts.append(claims.judge(claim, claims.read_rows(path), " (committed)"))
    return verdicts


def _measure_claims(request: BenchRequest, device: torch.device, folder: Path) -> bool:
    """Time the cases (shapes) that the claims about this device name, and save the results.

    Args:
        request: the options of the command, with the time per phase and the time limit.
        device: the device to measure.
        folder: the folder for the results.

    Returns:
        Whether all measured implementations computed correct results.
    """
    from tilefold.bench import claims
    from tilefold.bench.runner import RunOptions
    from tilefold.bench.spec import get_spec
    from tilefold.bench.timing import TimeBudget

    started = time.monotonic()
    all_correct = True
    for op, cases in claims.implementations_by_case(device.type).items():
        spec = get_spec(op)
        elapsed = time.monotonic() - started
        options = RunOptions(
            device=device,
            impls=cases,
            budget=TimeBudget(
                seconds=_QUICK_SECONDS if request.quick else request.seconds,
                min_reps=_MIN_CALLS,
            ),
            limit=60 * request.minutes - elapsed,
        )
        cases_by_spec = [(spec, [spec.case(name) for name in sorted(cases)])]
        if not _run_all(cases_by_spec, options, folder, judges_claims=False):
            all_correct = False
    return all_correct


def _select_cases(
    spec: BenchSpec,
    shapes: list[str] | None,
    device: str,
    dtype: str | None,
    quick: bool,
) -> list[BenchCase]:
    """Return the cases (named shapes) of an operator to time.

    Args:
        spec: the benchmark of the operator.
        shapes: the names of cases; None takes all cases of the device.
        device: the type of the device, ``"cpu"`` or ``"cuda"``.
        dtype: the data type that replaces those of the cases; None keeps them.
        quick: whether only the quick cases are taken, without `shapes`.

    Raises:
        ValueError: if a named case is for the other type of device.
    """
    from tilefold.bench.spec import parse_dtype

    if shapes:
        cases = [spec.case(name) for name in shapes]
        for case in cases:
            if case.device != device:
                raise ValueError(
                    f"shape {case.name!r} is for {case.device!r}, and not for {device!r}; set "
                    "--device.",
                )
    else:
        cases = [case for case in spec.cases if case.device == device and (case.quick or not quick)]
    if dtype is None:
        return cases
    return [replace(case, dtype=parse_dtype(dtype)) for case in cases]


def _run_all(
    cases_by_spec: list[tuple[BenchSpec, list[BenchCase]]],
    options: RunOptions,
    folder: Path | None,
    judges_claims: bool = True,
) -> bool:
    """Check the results of operators on their cases (shapes), time them, and print and save rows.

    Args:
        cases_by_spec: the benchmarks, each with its cases.
        options: the device, the implementations and the time limit.
        folder: the folder for the results, with a file for each operator; None saves nothing.
        judges_claims: whether the claims about the speed of an operator are judged after its cases.

    Returns:
        Whether all implementations that were checked computed correct results.
    """
    from rich.console import Console

    from tilefold.bench import claims, results
    from tilefold.bench.results import collect, results_file
    from tilefold.bench.runner import run_spec

    provenance = collect(options.device)
    console = Console(width=None if Console().is_terminal else _FILE_WIDTH)
    results.print_header(console, provenance)
    all_correct = True
    for spec, cases in cases_by_spec:
        path = None
        if folder is not None:
            path = results_file(folder, spec.op, provenance)
        report_rows = functools.partial(_report_rows, console, spec, provenance, path)
        with console.status(f"{spec.op}: starting") as status:
            rows = run_spec(spec, cases, replace(options, progress=status.update), report_rows)
        if judges_claims:
            records = [results.cells(row.record(), provenance) for row in rows]
            verdicts = claims.judged(spec.op, records)
            if verdicts:
                table = "\n".join(claims.table(verdicts))
                console.print(table, markup=False, highlight=False, soft_wrap=True)
        if any(row.failed_gate for row in rows):  # a result was not correct
            all_correct = False
        if path is not None and rows:
            console.print(f"results: {path}", markup=False)
    return all_correct


def _report_rows(
    console: Console,
    spec: BenchSpec,
    provenance: Provenance,
    path: Path | None,
    case: BenchCase,
    rows: list[BenchRow],
) -> None:
    """Print the rows of a case, and add them to the file of results.

    The file is written after each case, so that an interrupted run keeps its results.

    Args:
        console: the console that prints the rows.
        spec: the benchmark of the operator.
        provenance: the device and the versions.
        path: the file of the operator's results; None saves nothing.
        case: the case that was timed.
        rows: the rows of the case, one per implementation and phase.
    """
    from tilefold.bench import results
    from tilefold.bench.runner import CSV_KEY  # the columns that identify a row

    results.print_case(console, spec, case, rows)
    if path is not None:
        results.write_csv(path, [row.record() for row in rows], provenance, CSV_KEY)


@dataclass(frozen=True, kw_only=True)
class WarmupRequest(Options):
    """Options of ``tilefold warmup``."""

    model: Annotated[
        str,
        option(
            "Folder or Hugging Face name of a SparseEncoder or multi-vector model.",
        ),
    ]
    length: Annotated[
        list[int] | None,
        positive(
            "Tokens of the longest text of a batch; may be repeated, with that of queries first; "
            "by default 32 and 256.",
        ),
    ] = None
    batch_size: Annotated[
        int,
        positive(
            "Texts per batch, which affect the choice of kernels.",
        ),
    ] = 32
    inference: Annotated[
        bool,
        option(
            "Compile the kernels of scores without gradients.",
            "--inference/--no-inference",
        ),
    ] = True
    training: Annotated[
        bool,
        option(
            "Compile the kernels of scores with gradients.",
            "--training/--no-training",
        ),
    ] = True
    precision: Annotated[
        Literal["bf16", "fp16", "fp32"],
        option(
            "Precision of autocast; fp32 for no autocast.",
        ),
    ] = "bf16"
    workers: Annotated[
        int | None,
        positive(
            "Number of kernels to compile at a time; by default one per core.",
        ),
    ] = None
    as_json: Annotated[
        bool,
        option(
            "The result as JSON on stdout.",
            "--json",
        ),
    ] = False


def warmup(request: WarmupRequest) -> None:
    """Compile the kernels that a model needs on this GPU, and store them in Triton's disk cache.

    Otherwise, the first call of an operator waits seconds for the compiler. Later processes of this
    user load the kernels from the cache, as long as Triton, its settings and the GPU stay the same.

    Example:
        tilefold warmup --model MODEL --length 32 --length 256
    """
    if not (request.inference or request.training):
        raise UsageError("--no-inference and --no-training together leave nothing to build.")
    _models.checked_model_name(request.model, "--model")
    from tilefold.ops.warm_up import check_kernels_can_be_built

    check_kernels_can_be_built()
    import torch

    from tilefold.integrations.sentence_transformers import warm_up

    model, _ = _models.load_model(request.model, dtype=request.precision)
    autocast_dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
    result = warm_up(
        model.to("cuda"),
        request.length or DEFAULT_LENGTHS,
        request.batch_size,
        inference=request.inference,
        training=request.training,
        dtype=autocast_dtypes[request.precision],
        workers=request.workers,
    )
    _common.print_result(
        {**asdict(result), "cache": str(result.cache), "count": result.count},
        request.as_json,
        *_summarise_warm_up(result),
    )


def _summarise_warm_up(result: Built) -> list[str]:
    """Return the lines that summarise a warm-up: its kernels, their cache, and the first calls."""
    kernels = []
    for name, count in sorted(result.kernels.items()):
        kernels.append(f"{name} x {count}" if count > 1 else name)
    slowest_first_call = max(result.first_calls, default=0.0)  # seconds
    return [
        f"{result.count} kernels in {result.seconds:.1f} s: {', '.join(kernels) or 'none'}",
        f"in {result.cache}",
        *[f"not built: {message}" for message in result.failed],
        f"first calls now take up to {slowest_first_call:.2f} s",
    ]
