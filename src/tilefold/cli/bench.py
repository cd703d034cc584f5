"""``tilefold bench``: time the operators against their baselines, behind a correctness gate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tilefold.cli.bench_train import train_splade

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from tilefold.bench.provenance import Provenance
    from tilefold.bench.registry import BenchCase, BenchSpec
    from tilefold.bench.runner import BenchRow, RunOptions

RESULTS = Path("benchmarks/results")
DEFAULT_COMMAND = "operators"


class BenchGroup(TyperGroup):
    """``tilefold bench`` with subcommands; anything that names none of them goes to ``operators``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)


def bench_app() -> typer.Typer:
    """The group of benchmark commands."""
    app = typer.Typer(
        name="bench",
        cls=BenchGroup,
        help="Check, then time: operators (`tilefold bench lsr_head`), or whole training steps.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.command(DEFAULT_COMMAND)(bench)
    app.command("train-splade")(train_splade)
    return app


def bench(
    op: Annotated[str | None, typer.Argument(help="Operator to time, for instance lsr_head.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Time every operator.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="List shapes and implementations, run nothing.")] = False,
    shape: Annotated[list[str] | None, typer.Option(help="Named shape; repeat for several.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help="Implementation; repeat for several.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Override the shapes' dtype: bf16, fp16 or fp32.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for <device>/<op>.csv.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few shapes, short timing; saved only with --output.")
    ] = False,
    seconds: Annotated[float, typer.Option(help="Timing budget of one implementation and phase.")] = 0.5,
    minutes: Annotated[float | None, typer.Option(help="Begin no shape after this; slow peers run last.")] = None,
) -> None:
    """Check, then time operators and their baselines; a row whose check fails shows no time.

    Without --output, results go to benchmarks/results if the current directory has benchmarks.
    Exits with 1 if an implementation failed its check.
    """
    from tilefold.bench.registry import get_spec, operators  # noqa: PLC0415

    try:
        names = operators() if every or (listing and op is None) else (op,) if op is not None else ()
        specs = [get_spec(name) for name in names]
        if not specs:
            raise ValueError(f"op must be given, one of {', '.join(operators())}; or use --all.")
        if listing:
            for spec in specs:
                _list(spec)
            return
        failed = _run_all(specs, shape, impl, device, dtype, output, quick, seconds, minutes)
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    if failed:
        raise typer.Exit(1)


def _list(spec: BenchSpec) -> None:
    typer.echo(f"{spec.op}: shapes")
    for case in spec.cases:
        typer.echo(f"  {case.name:32} {case.device:5} {case.dtype}{'  quick' if case.quick else ''}")
    typer.echo(f"{spec.op}: implementations")
    for implementation in spec.implementations:
        where = ", ".join(implementation.default_on) or "on request"
        typer.echo(f"  {implementation.name:32} {implementation.kind:9} {where}")


def _run_all(
    specs: list[BenchSpec],
    shape: list[str] | None,
    impl: list[str] | None,
    device: str | None,
    dtype: str | None,
    output: Path | None,
    quick: bool,
    seconds: float,
    minutes: float | None,
) -> bool:
    from rich.console import Console  # noqa: PLC0415

    from tilefold.bench import report  # noqa: PLC0415
    from tilefold.bench.provenance import collect, device_slug  # noqa: PLC0415
    from tilefold.bench.runner import RunOptions, verdicts  # noqa: PLC0415
    from tilefold.bench.timing import TimeBudget  # noqa: PLC0415

    target = choose_device(device)
    on_gpu = target.type == "cuda"
    seconds = min(seconds, 0.15) if quick else seconds
    # on the CPU a call takes long enough that its own noise, not the clock's, decides: more seconds, fewer calls
    budget = TimeBudget(seconds=seconds) if on_gpu else TimeBudget(seconds=6 * seconds, min_reps=5, max_reps=50)
    options = RunOptions(device=target, impls=impl or None, budget=budget, limit=60 * (minutes or math.inf))
    provenance = collect(target)
    console = Console(width=None if Console().is_terminal else 190)
    report.print_header(console, provenance)
    folder = output or (RESULTS if RESULTS.parent.is_dir() and not quick else None)
    failed = False
    for spec in specs:
        cases = _cases(spec, shape, target.type, dtype, quick)
        path = folder / device_slug(provenance) / f"{spec.op}.csv" if folder is not None else None
        rows = _run_one(spec, cases, options, console, path, provenance)
        report.print_verdicts(console, verdicts(spec, rows))
        failed |= any(row.failed_gate for row in rows)
        if path is not None and rows:
            console.print(f"results: {path}", markup=False)
    return failed


def _run_one(
    spec: BenchSpec,
    cases: list[BenchCase],
    options: RunOptions,
    console: Console,
    path: Path | None,
    provenance: Provenance,
) -> list[BenchRow]:
    from tilefold.bench import report  # noqa: PLC0415
    from tilefold.bench.provenance import write_csv  # noqa: PLC0415
    from tilefold.bench.runner import CSV_KEY, run_spec  # noqa: PLC0415

    def on_rows(case: BenchCase, rows: list[BenchRow]) -> None:
        report.print_case(console, spec, case, rows)
        if path is not None:  # after every case: a run that dies keeps what it has
            write_csv(path, [row.record() for row in rows], provenance, CSV_KEY)

    with console.status(f"{spec.op}: starting") as status:
        return run_spec(
            spec,
            cases,
            options,
            on_rows=on_rows,
            progress=lambda text: status.update(f"{spec.op}: {text}"),
        )


def choose_device(name: str | None) -> torch.device:
    """The device called ``name``, by default the GPU if there is one; ``ValueError`` if there is none such."""
    import torch  # noqa: PLC0415

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is cuda, but torch sees no CUDA device here; use --device cpu.")
    return torch.device(name)


def _cases(spec: BenchSpec, shape: list[str] | None, device: str, dtype: str | None, quick: bool) -> list[BenchCase]:
    from tilefold.bench.registry import parse_dtype  # noqa: PLC0415
    from tilefold.bench.runner import with_dtype  # noqa: PLC0415

    if shape:
        cases = [spec.case(name) for name in shape]
        foreign = [case.name for case in cases if case.device != device]
        if foreign:
            raise ValueError(f"shape {foreign[0]!r} belongs to another device than {device!r}; set --device.")
    else:
        cases = [case for case in spec.cases if case.device == device and (case.quick or not quick)]
    return [with_dtype(case, parse_dtype(dtype)) for case in cases] if dtype else cases
