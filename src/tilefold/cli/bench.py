"""``tilefold bench`` times operators and baselines; ``tilefold warmup`` builds kernels ahead."""

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

    from tilefold.bench.results import Provenance
    from tilefold.bench.runner import BenchRow, RunOptions
    from tilefold.bench.spec import BenchCase, BenchSpec

# Seconds for which one phase (forward, or both passes) of an implementation is timed.
SECONDS = 0.5
_QUICK_SECONDS = 0.15
# On a CPU, a call takes long, and varies more than the clock: longer timing, but fewer calls.
_CPU_SECONDS_FACTOR = 6
_MIN_CALLS = 5
_CPU_MAX_CALLS = 50
# Tokens of the longest query and document of a batch for which kernels are built.
DEFAULT_LENGTHS = [32, 256]
_CLAIMS = "claims"
# Results of other devices, which claims are judged by.
_COMMITTED_RESULTS = Path("benchmarks/results")
# Characters of a line where the output is not a terminal. The widest table fits (token_scatter).
_FILE_WIDTH = 190


@dataclass(frozen=True, kw_only=True)
class BenchRequest(Options):
    """Options of ``tilefold bench``."""

    op: Annotated[
        str | None,
        argument(
            "Operator to time, such as lsr_head; or claims: those of papers and the README.",
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
            "List shapes and implementations, run nothing.",
            "--list",
        ),
    ] = False
    shape: Annotated[
        list[str] | None,
        option(
            "Named shape; repeat for several.",
            "--shape",
            "--only",
        ),
    ] = None
    impl: Annotated[
        list[str] | None,
        option(
            "Implementation; repeat for several.",
        ),
    ] = None
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        option(
            "By default the GPU if there is one.",
        ),
    ] = None
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"] | None,
        option(
            "Override the shapes' dtype.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        option(
            "Folder for <device>/<op>.csv.",
        ),
    ] = None
    quick: Annotated[
        bool,
        option(
            "A few shapes, short timing; saved only with --output.",
            "--quick",
        ),
    ] = False
    seconds: Annotated[
        float,
        option(
            "Timing budget of one implementation and phase.",
            min=0,
        ),
    ] = SECONDS
    minutes: Annotated[
        float,
        option(
            "Start no further shape after this many; slow peers run last.",
            min=0,
            show_default=False,
        ),
    ] = math.inf

    def validate(self) -> None:
        """Raise ``UsageError`` for options that exclude one another."""
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
                "does nothing with --list, which runs nothing: leave it out",
            )
        if self.quick:
            refuse_options(
                {"--seconds": self.seconds != SECONDS and self.seconds > _QUICK_SECONDS},
                f"does nothing above {_QUICK_SECONDS:g} with --quick: leave it out",
            )


def bench(request: BenchRequest) -> None:
    """Check, then time operators and their baselines; a row whose check fails shows no time.

    Without --output, results go to benchmarks/results if the current directory has benchmarks.
    Exits with 1 if an implementation failed its check.

    Example:
        tilefold bench lsr_head --quick
    """
    if request.every and request.op is not None:
        raise UsageError(f"--all times every operator: leave it out, or {request.op}.")
    try:
        if request.op == _CLAIMS:
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
    """Return the benchmarks of the operator that is named, or of all operators.

    Args:
        request: options of the command.

    Raises:
        ValueError: for an unknown operator, or for none without ``--all`` and ``--list``.
    """
    from tilefold.bench.spec import OPERATORS, get_spec

    if request.op is not None:
        return [get_spec(request.op)]
    if request.every or request.listing:
        return [get_spec(name) for name in OPERATORS]
    raise ValueError(
        f"op must be given, one of {', '.join(OPERATORS)}, {_CLAIMS}; or use --all.",
    )


def _print_listing(specs: list[BenchSpec]) -> None:
    """Print the shapes and the implementations of operators."""
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

    A CPU is slower and its times vary more than a GPU's, so that it gets more seconds, with limits
    of the number of calls.

    Args:
        request: options of the command.

    Returns:
        Whether every check of an implementation passed.
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
    """Measure what claims about this device need, and print for each claim whether it holds.

    A claim says how many times better one row of the results is than another, such as the time of
    an operator. Claims about other devices are judged by the results in the repository.

    Args:
        request: options of the command.

    Returns:
        Whether every check of an implementation passed.
    """
    from tempfile import TemporaryDirectory

    from tilefold.bench import claims
    from tilefold.bench.results import choose_device, collect, results_file

    device = choose_device(request.device)
    with TemporaryDirectory() as temporary:
        folder = request.output or Path(temporary)
        passed = _measure_claims(request, device, folder)
        provenance = collect(device)
        verdicts: list[claims.Verdict] = []
        for claim in claims.CLAIMS:
            if claim.is_about_operator and claim.runs_on(device.type):
                path = results_file(folder, claim.file, provenance)
                verdicts.append(claims.judge(claim, claims.read_rows(path)))
            elif claim.device != "cpu":
                path = _COMMITTED_RESULTS / claim.device / f"{claim.file}.csv"
                verdicts.append(claims.judge(claim, claims.read_rows(path), " (committed)"))
    typer.echo("\n".join(claims.table(verdicts)))
    return passed


def _measure_claims(request: BenchRequest, device: torch.device, folder: Path) -> bool:
    """Time the cases that claims about this device name, and save the results.

    Args:
        request: with the time of a phase, and the minutes after which no shape is started.
        device: to measure on.
        folder: where the results are written.

    Returns:
        Whether every check of an implementation passed.
    """
    from tilefold.bench import claims
    from tilefold.bench.runner import RunOptions
    from tilefold.bench.spec import get_spec
    from tilefold.bench.timing import TimeBudget

    started = time.monotonic()
    passed = True
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
        if not _run_all(cases_by_spec, options, folder, with_claims=False):
            passed = False
    return passed


def _select_cases(
    spec: BenchSpec,
    shapes: list[str] | None,
    device: str,
    dtype: str | None,
    quick: bool,
) -> list[BenchCase]:
    """Return the cases of an operator that are timed.

    Args:
        spec: benchmark of the operator.
        shapes: names of cases; None takes all cases of the device.
        device: type of the device, ``"cpu"`` or ``"cuda"``.
        dtype: replaces the dtype of the cases; None leaves it.
        quick: without `shapes`, take the quick cases only.

    Raises:
        ValueError: for a named case of another type of device.
    """
    from tilefold.bench.spec import parse_dtype

    if shapes:
        cases = [spec.case(name) for name in shapes]
        for case in cases:
            if case.device != device:
                raise ValueError(
                    f"shape {case.name!r} belongs to another device than {device!r}; set --device.",
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
    with_claims: bool = True,
) -> bool:
    """Check and time cases, print their results, and save them.

    Args:
        cases_by_spec: benchmarks with the cases of each.
        options: device, implementations and time.
        folder: where results are written, a file for each operator; None writes none.
        with_claims: judge the claims about an operator after its cases.

    Returns:
        Whether every check of an implementation of this library passed.
    """
    from rich.console import Console

    from tilefold.bench import claims, results
    from tilefold.bench.results import collect, results_file
    from tilefold.bench.runner import run_spec

    provenance = collect(options.device)
    console = Console(width=None if Console().is_terminal else _FILE_WIDTH)
    results.print_header(console, provenance)
    passed = True
    for spec, cases in cases_by_spec:
        path = None
        if folder is not None:
            path = results_file(folder, spec.op, provenance)
        report_rows = functools.partial(_report_rows, console, spec, provenance, path)
        with console.status(f"{spec.op}: starting") as status:
            rows = run_spec(spec, cases, replace(options, progress=status.update), report_rows)
        records = [results.cells(row.record(), provenance) for row in rows]
        verdicts = claims.judged(spec.op, records)
        if with_claims and verdicts:
            table = "\n".join(claims.table(verdicts))
            console.print(table, markup=False, highlight=False, soft_wrap=True)
        if any(row.failed_gate for row in rows):
            passed = False
        if path is not None and rows:
            console.print(f"results: {path}", markup=False)
    return passed


def _report_rows(
    console: Console,
    spec: BenchSpec,
    provenance: Provenance,
    path: Path | None,
    case: BenchCase,
    rows: list[BenchRow],
) -> None:
    """Print the rows of a case, and add them to the file of results.

    The file is written after each case, so that a run that is interrupted keeps its results.

    Args:
        console: where the rows are printed.
        spec: benchmark of the operator.
        provenance: device and versions.
        path: file of the results of the operator; None writes none.
        case: the case that was timed.
        rows: one row per implementation and phase.
    """
    from tilefold.bench import results
    from tilefold.bench.runner import CSV_KEY  # columns of a row that tell it from others

    results.print_case(console, spec, case, rows)
    if path is not None:
        results.write_csv(path, [row.record() for row in rows], provenance, CSV_KEY)


@dataclass(frozen=True, kw_only=True)
class WarmupRequest(Options):
    """Options of ``tilefold warmup``."""

    model: Annotated[
        str,
        option(
            "A SparseEncoder or multi-vector model: folder or Hugging Face name.",
        ),
    ]
    length: Annotated[
        list[int] | None,
        positive(
            "Tokens of the longest text of a batch; may be repeated, first that of queries. [32, "
            "256]",
        ),
    ] = None
    batch_size: Annotated[
        int,
        positive(
            "Texts per batch: kernels are chosen by shape.",
        ),
    ] = 32
    inference: Annotated[
        bool,
        option(
            "Kernels of scores alone.",
            "--inference/--no-inference",
        ),
    ] = True
    training: Annotated[
        bool,
        option(
            "Kernels of gradients too.",
            "--training/--no-training",
        ),
    ] = True
    precision: Annotated[
        Literal["bf16", "fp16", "fp32"],
        option(
            "Of autocast; fp32 for none.",
        ),
    ] = "bf16"
    workers: Annotated[
        int | None,
        positive(
            "Kernels built at a time; by default one per core.",
        ),
    ] = None
    as_json: Annotated[
        bool,
        option(
            "What was built as JSON on stdout.",
            "--json",
        ),
    ] = False


def warmup(request: WarmupRequest) -> None:
    """Build the kernels that a model needs on this GPU into Triton's cache on the disk.

    A first call of an operator otherwise waits seconds for a compiler. Several kernels are built at
    a time. Later processes of this user load what was built, as long as Triton, its settings and
    the GPU stay the same.

    Example:
        tilefold warmup --model MODEL --length 32 --length 256
    """
    if not (request.inference or request.training):
        raise UsageError("--no-inference and --no-training together leave nothing to build.")
    _models.find_model(request.model, "--model")
    from tilefold.ops.warm_up import check_kernels_can_be_built

    check_kernels_can_be_built()
    import torch

    from tilefold.integrations.sentence_transformers import warm_up

    model, _ = _models.load_model(request.model)
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
    kernels = []
    for name, count in sorted(result.kernels.items()):
        kernels.append(f"{name} x {count}" if count > 1 else name)
    slowest_call = max(result.first_calls, default=0.0)  # seconds
    _common.print_result(
        {**asdict(result), "cache": str(result.cache), "count": result.count},
        request.as_json,
        f"{result.count} kernels in {result.seconds:.1f} s: {', '.join(kernels) or 'none'}",
        f"in {result.cache}",
        *[f"not built: {message}" for message in result.failed],
        f"first calls take up to {slowest_call:.2f} s now",
    )
