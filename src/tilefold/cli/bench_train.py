"""``tilefold bench train-splade``: batch and step time of SPLADE training, stock beside fused."""
# ruff: noqa: PLC0415 - torch and sentence-transformers are imported when the verb runs, so that --help is fast

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from tilefold.bench.provenance import Provenance
    from tilefold.bench.train_splade import TrainOptions, TrainRow

_CHECKPOINTING = {"off": (False,), "on": (True,), "both": (False, True)}
_QUICK_SECONDS = 0.5


def train_splade(
    model: Annotated[
        list[str] | None, typer.Option(help="bert-base, xlmr-base or tiny; repeat for several; by default both bases.")
    ] = None,
    length: Annotated[str, typer.Option(help="Tokens of a document, several with commas.")] = "256,512",
    checkpointing: Annotated[str, typer.Option(help="Gradient checkpointing: off, on or both.")] = "both",
    memory_gib: Annotated[
        float | None, typer.Option(help="Limit of torch's allocator in GiB; by default the whole GPU.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Common batch; by default the largest power of two that fits on both sides.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="No larger batch is tried.")] = 8192,
    seconds: Annotated[float, typer.Option(help="Timing budget of one side at one batch.")] = 2.0,
    dtype: Annotated[
        str | None, typer.Option(help="bf16 (autocast) or fp32; by default bf16 on a GPU, else fp32.")
    ] = None,
    data: Annotated[str, typer.Option(help="pydocs, or a BEIR folder.")] = "pydocs",
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of a tokenizer; by default the packaged one.")] = None,
    natural: Annotated[
        bool, typer.Option("--natural", help="Documents as they are; by default filled up, so that none is padded.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU if there is one.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for <device>/train_splade.csv and its picture.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="First length only, short timing; saved only with --output.")
    ] = False,
) -> None:
    """Measure SPLADE training with the plain head and with the fused one: largest batch, step time, peak memory.

    A step is that of the sentence-transformers trainer on (query, document) pairs, over an encoder with random weights.
    Both heads are compared first; a row whose check fails shows no numbers, and the command exits with 1.
    """
    from rich.console import Console

    from tilefold.bench import report
    from tilefold.bench.provenance import collect

    try:
        options = _options(
            model, length, checkpointing, memory_gib, batch, max_batch, seconds, dtype, data, tokenizer, natural,
            device, quick,
        )  # fmt: skip
        provenance = collect(options.device)
        console = Console(width=None if Console().is_terminal else 190)
        report.print_header(console, provenance)
        rows = _run(options, _folder(output, quick), provenance, console)
    except (ValueError, FileNotFoundError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    if any(row.status == "FAILED" for row in rows):
        raise typer.Exit(1)


def _options(
    model: list[str] | None,
    length: str,
    checkpointing: str,
    memory_gib: float | None,
    batch: int | None,
    max_batch: int,
    seconds: float,
    dtype: str | None,
    data: str,
    tokenizer: Path | None,
    natural: bool,
    device: str | None,
    quick: bool,
) -> TrainOptions:
    from tilefold.bench.registry import parse_dtype
    from tilefold.bench.train_splade import DEFAULT_MODELS, TrainOptions
    from tilefold.cli.bench import choose_device

    if checkpointing not in _CHECKPOINTING:
        raise ValueError(f"checkpointing must be one of {', '.join(_CHECKPOINTING)}, got {checkpointing!r}.")
    full = None if dtype is None else parse_dtype(dtype)
    if full not in (None, "bfloat16", "float32"):
        raise ValueError(f"dtype must be bf16 or fp32, got {dtype!r}.")
    lengths = _lengths(length)
    return TrainOptions(
        device=choose_device(device),
        models=tuple(model or DEFAULT_MODELS),
        lengths=lengths[:1] if quick else lengths,
        checkpointing=_CHECKPOINTING[checkpointing],
        bf16=None if full is None else full == "bfloat16",
        memory_gib=memory_gib,
        batch=batch,
        max_batch=max_batch,
        seconds=min(seconds, _QUICK_SECONDS) if quick else seconds,
        data=data,
        tokenizer=tokenizer,
        natural=natural,
    )


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(f"length must be whole numbers with commas between them, got {text!r}.") from None


def _folder(output: Path | None, quick: bool) -> Path | None:
    from tilefold.cli.bench import RESULTS

    return output or (RESULTS if RESULTS.parent.is_dir() and not quick else None)


def _run(options: TrainOptions, folder: Path | None, provenance: Provenance, console: Console) -> list[TrainRow]:
    from tilefold.bench.provenance import device_slug, write_csv
    from tilefold.bench.train_splade import CSV_KEY, run
    from tilefold.bench.train_splade_report import print_cell

    path = folder / device_slug(provenance) / "train_splade.csv" if folder is not None else None

    def on_rows(rows: list[TrainRow]) -> None:
        print_cell(console, rows)
        if path is not None:  # after every cell: a run that dies keeps what it has
            write_csv(path, [row.record() for row in rows], provenance, CSV_KEY)

    with console.status("train-splade: starting") as status:
        found = run(options, on_rows=on_rows, progress=lambda text: status.update(f"train-splade: {text}"))
    if path is not None and found:
        console.print(f"results: {path}", markup=False)
        _draw(path, console)
    return found


def _draw(path: Path, console: Console) -> None:
    from tilefold.bench.train_splade_report import plot_results

    try:
        console.print(f"picture: {plot_results(path, path.with_suffix('.png'))}", markup=False)
    except (ImportError, ValueError) as error:  # no matplotlib, or nothing but failures
        console.print(f"no picture: {error}", markup=False)
