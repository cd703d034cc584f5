"""``tilefold bench``, operators against their baselines, and ``tilefold warmup``, kernels built
ahead.
"""

from __future__ import annotations

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
    from torch import device

    from tilefold.bench.runner import BenchRow, RunOptions
    from tilefold.bench.spec import BenchCase, BenchSpec

SECONDS = 0.5  # of an implementation and phase
_QUICK_SECONDS = 0.15


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
    from tilefold.bench.results import choose_device, results_folder
    from tilefold.bench.runner import RunOptions
    from tilefold.bench.spec import OPERATORS, get_spec
    from tilefold.bench.timing import TimeBudget

    try:
        if request.every and request.op is not None:
            raise UsageError(f"--all times every operator: leave it out, or {request.op}.")
        if request.op == "claims":
            raise typer.Exit(
                int(
                    not _claims(
                        choose_device(request.device),
                        _QUICK_SECONDS if request.quick else request.seconds,
                        request.minutes,
                        request.output,
                    ),
                ),
            )
        names = (
            OPERATORS
            if request.every or (request.listing and request.op is None)
            else (request.op,)
            if request.op is not None
            else ()
        )
        if not (specs := [get_spec(name) for name in names]):
            raise ValueError(
                f"op must be given, one of {', '.join(OPERATORS)}, claims; or use --all.",
            )
        if request.listing:
            for spec in specs:
                typer.echo(f"{spec.op}: shapes")
                for case in spec.cases:
                    typer.echo(
                        f"  {case.name:32} {case.device:5} "
                        f"{case.dtype}{'  quick' if case.quick else ''}",
                    )
                typer.echo(f"{spec.op}: implementations")
                for each in spec.implementations:
                    typer.echo(
                        f"  {each.name:32} {each.kind:9} "
                        f"{', '.join(each.default_on) or 'on request'}",
                    )
            return
        target = choose_device(request.device)
        chosen = [
            (spec, _cases(spec, request.shape, target.type, request.dtype, request.quick))
            for spec in specs
        ]
        seconds = min(request.seconds, _QUICK_SECONDS) if request.quick else request.seconds
        # on the CPU a call takes long enough that its own noise, not the clock's, decides: more
        # seconds, fewer calls
        on_cpu = TimeBudget(seconds=6 * seconds, min_reps=5, max_reps=50)
        budget = TimeBudget(seconds=seconds) if target.type == "cuda" else on_cpu
        options = RunOptions(
            device=target, impls=request.impl or None, budget=budget, limit=60 * request.minutes
        )
        failed = _run_all(chosen, options, results_folder(request.output, request.quick))
    except ValueError as error:
        raise UsageError(str(error)) from error
    if failed:
        raise typer.Exit(1)


def _claims(target: device, seconds: float, minutes: float, output: Path | None) -> bool:
    """Measure what claims need on this device, and print a row for each claim; False if a check
    failed.
    """
    from tempfile import TemporaryDirectory

    from tilefold.bench import claims
    from tilefold.bench.results import collect, results_file
    from tilefold.bench.runner import RunOptions
    from tilefold.bench.spec import get_spec
    from tilefold.bench.timing import TimeBudget

    started, found, right = time.monotonic(), list[claims.Verdict](), True
    committed = Path("benchmarks/results")
    with TemporaryDirectory() as temporary:
        folder, provenance = output or Path(temporary), collect(target)
        for op, cases in claims.measured_by(target.type).items():
            spec, left = get_spec(op), 60 * minutes - (time.monotonic() - started)
            options = RunOptions(
                device=target,
                impls=cases,
                budget=TimeBudget(seconds=seconds, min_reps=5),
                limit=left,
            )
            chosen = [(spec, [spec.case(name) for name in sorted(cases)])]
            right &= not _run_all(chosen, options, folder, with_claims=False)
        for claim in claims.CLAIMS:
            fresh = claim.side == "impl" and (claim.device == "cpu") == (target.type == "cpu")
            if fresh or claim.device != "cpu":
                path = committed / claim.device / f"{claim.file}.csv"
                path = results_file(folder, claim.file, provenance) if fresh else path
                found.append(
                    claims.judge(claim, claims.read_rows(path), "" if fresh else " (committed)"),
                )
    typer.echo("\n".join(claims.table(found)))
    return right


def _cases(
    spec: BenchSpec,
    shape: list[str] | None,
    device: str,
    dtype: str | None,
    quick: bool,
) -> list[BenchCase]:
    from tilefold.bench.spec import parse_dtype

    if shape:
        cases = [spec.case(name) for name in shape]
        if foreign := [case.name for case in cases if case.device != device]:
            raise ValueError(
                f"shape {foreign[0]!r} belongs to another device than {device!r}; set --device.",
            )
    else:
        cases = [case for case in spec.cases if case.device == device and (case.quick or not quick)]
    return [replace(case, dtype=parse_dtype(dtype)) for case in cases] if dtype else cases


def _run_all(
    chosen: list[tuple[BenchSpec, list[BenchCase]]],
    options: RunOptions,
    folder: Path | None,
    with_claims: bool = True,
) -> bool:
    """Run, print and save; whether an implementation of ours failed its check."""
    from rich.console import Console

    from tilefold.bench import claims, results
    from tilefold.bench.results import collect, results_file, write_csv
    from tilefold.bench.runner import CSV_KEY, run_spec

    provenance = collect(options.device)
    console = Console(width=None if Console().is_terminal else 190)
    results.print_header(console, provenance)
    failed = False
    for spec, cases in chosen:
        path = results_file(folder, spec.op, provenance) if folder is not None else None

        def on_rows(
            case: BenchCase,
            rows: list[BenchRow],
            spec: BenchSpec = spec,
            path: Path | None = path,
        ) -> None:
            results.print_case(console, spec, case, rows)
            if path is not None:  # after every case: a run that dies keeps what it has
                write_csv(path, [row.record() for row in rows], provenance, CSV_KEY)

        with console.status(f"{spec.op}: starting") as status:
            rows = run_spec(spec, cases, replace(options, progress=status.update), on_rows)
        judged = claims.judged(spec.op, [results.cells(row.record(), provenance) for row in rows])
        if with_claims and judged:
            console.print(
                "\n".join(claims.table(judged)),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
        failed |= any(row.failed_gate for row in rows)
        if path is not None and rows:
            console.print(f"results: {path}", markup=False)
    return failed


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
    """Build the kernels that a model needs on this GPU, several at a time, into Triton's cache on
    the disk.

    A first call of an operator otherwise waits seconds for a compiler. Later processes of this user
    load what was built, as long as Triton, its settings and the GPU stay the same.

    Example:
        tilefold warmup --model MODEL --length 32 --length 256
    """
    lengths = request.length or [32, 256]
    if not (request.inference or request.training):
        raise UsageError("--no-inference and --no-training together leave nothing to build.")
    _models.find_model(request.model, "--model")
    from tilefold.ops.warm_up import check_kernels_can_be_built

    check_kernels_can_be_built()
    import torch

    from tilefold.integrations.sentence_transformers import warm_up

    loaded, _ = _models.load_model(request.model)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(request.precision)
    built = warm_up(
        loaded.to("cuda"),
        lengths,
        request.batch_size,
        inference=request.inference,
        training=request.training,
        dtype=dtype,
        workers=request.workers,
    )
    names = ", ".join(
        f"{name} x {count}" if count > 1 else name for name, count in sorted(built.kernels.items())
    )
    lines = [
        f"{built.count} kernels in {built.seconds:.1f} s: {names or 'none'}",
        f"in {built.cache}",
    ]
    lines += [f"not built: {message}" for message in built.failed]
    lines.append(f"first calls take up to {max(built.first_calls, default=0.0):.2f} s now")
    _common.print_result(
        asdict(built) | {"cache": str(built.cache), "count": built.count},
        request.as_json,
        *lines,
    )
