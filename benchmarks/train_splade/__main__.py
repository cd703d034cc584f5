"""Time SPLADE training with the stock head and with the fused one.

    python -m benchmarks.train_splade --memory-gib 40 --output benchmarks/results

Timed: a step of the sentence-transformers trainer on (query, document) pairs, over an encoder with
random weights, at the largest batch that fits into memory and at a batch that fits on both sides.
Peak memory is measured too.

Baseline: the stock head. The sides differ in ``accelerate(model, packed=False)`` only.

Gate: loss and gradients of both heads are compared first, in fp32 and in the precision of the step.
A row whose check fails has no numbers, and the command exits with 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.train_splade.measure import run
from benchmarks.train_splade.options import CSV_KEY, DEFAULT_MODELS, TrainOptions, TrainRow
from benchmarks.train_splade.report import plot_results, print_cell
from tilefold.bench.results import (
    Provenance,
    choose_device,
    collect,
    print_header,
    results_file,
    results_folder,
    write_csv,
)
from tilefold.bench.spec import parse_dtype

_CHECKPOINTING = {"off": (False,), "on": (True,), "both": (False, True)}
_QUICK_SECONDS = 0.5


def main(argv: Sequence[str]) -> int:
    """Run the command line.

    Args:
        argv: its arguments.

    Returns:
        The exit code: 1 if a check failed, 2 for wrong arguments.
    """
    arguments = _parser().parse_args(argv)
    try:
        options = _options(arguments)
        provenance = collect(options.device)
        console = Console(width=None if Console().is_terminal else 190)
        print_header(console, provenance)
        rows = _run(options, results_folder(arguments.output, arguments.quick), provenance, console)
    except (ValueError, FileNotFoundError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return int(any(row.status == "FAILED" for row in rows))


def _parser() -> argparse.ArgumentParser:
    """Create the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_splade",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--model",
        action="append",
        help="bert-base, xlmr-base or tiny; repeat for several; by default both bases",
    )
    add("--length", default="256,512", help="tokens of a document, several with commas")
    add("--checkpointing", default="both", help="gradient checkpointing: off, on or both")
    add(
        "--memory-gib",
        type=float,
        help="limit of torch's allocator in GiB; by default the whole GPU",
    )
    add(
        "--batch",
        type=int,
        help="common batch; by default the largest power of two that fits on both sides",
    )
    add("--max-batch", type=int, default=8192, help="no larger batch is tried")
    add("--seconds", type=float, default=2.0, help="timing budget of one side at one batch")
    add("--dtype", help="bf16 (autocast) or fp32; by default bf16 on a GPU, else fp32")
    add("--data", default="pydocs", help="pydocs, or a BEIR folder")
    add("--tokenizer", type=Path, help="folder of a tokenizer; by default the packaged one")
    add(
        "--natural",
        action="store_true",
        help="documents as they are; by default filled up, so that none is padded",
    )
    add("--device", help="cpu or cuda; the GPU if there is one")
    add("--output", type=Path, help="folder for <device>/train_splade.csv and its picture")
    add(
        "--quick",
        action="store_true",
        help="first length only, short timing; saved only with --output",
    )
    return parser


def _options(arguments: argparse.Namespace) -> TrainOptions:
    """Convert parsed arguments.

    Raises:
        ValueError: if a value is not possible.
    """
    if arguments.checkpointing not in _CHECKPOINTING:
        raise ValueError(
            f"checkpointing must be one of {', '.join(_CHECKPOINTING)}, got "
            f"{arguments.checkpointing!r}.",
        )
    dtype = None if arguments.dtype is None else parse_dtype(arguments.dtype)
    if dtype not in (None, "bfloat16", "float32"):
        raise ValueError(f"dtype must be bf16 or fp32, got {arguments.dtype!r}.")
    lengths = _lengths(arguments.length)
    return TrainOptions(
        device=choose_device(arguments.device),
        models=tuple(arguments.model or DEFAULT_MODELS),
        lengths=lengths[:1] if arguments.quick else lengths,
        checkpointing=_CHECKPOINTING[arguments.checkpointing],
        bf16=None if dtype is None else dtype == "bfloat16",
        memory_gib=arguments.memory_gib,
        batch=arguments.batch,
        max_batch=arguments.max_batch,
        seconds=min(arguments.seconds, _QUICK_SECONDS) if arguments.quick else arguments.seconds,
        data=arguments.data,
        tokenizer=arguments.tokenizer,
        natural=arguments.natural,
    )


def _lengths(text: str) -> tuple[int, ...]:
    """Parse lengths with commas between them, and leave out repeated ones."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ValueError(
            f"length must be whole numbers with commas between them, got {text!r}.",
        ) from None


def _run(
    options: TrainOptions,
    folder: Path | None,
    provenance: Provenance,
    console: Console,
) -> list[TrainRow]:
    """Measure, print and save all cells.

    Args:
        options: the options of the run.
        folder: the folder of the results, or None to save nothing.
        provenance: machine and versions, for the results.
        console: the console that prints the tables.
    """
    path = results_file(folder, "train_splade", provenance) if folder is not None else None

    def print_and_save(rows: list[TrainRow]) -> None:
        """Print and save the rows of a cell, so that a run that dies loses no finished cell."""
        print_cell(console, rows)
        if path is not None:
            write_csv(path, [row.record() for row in rows], provenance, CSV_KEY)

    with console.status("train-splade: starting") as status:
        all_rows = run(
            options,
            on_rows=print_and_save,
            progress=lambda text: status.update(f"train-splade: {text}"),
        )
    if path is not None and all_rows:
        console.print(f"results: {path}", markup=False)
        _draw(path, console)
    return all_rows


def _draw(path: Path, console: Console) -> None:
    """Draw a results file, and print the path of the picture or why there is none."""
    try:
        picture = plot_results(path, path.with_suffix(".png"))
    except (ImportError, ValueError) as error:
        # matplotlib is missing, or no row was measured
        console.print(f"no picture: {error}", markup=False)
    else:
        console.print(f"picture: {picture}", markup=False)


if __name__ == "__main__":
    # Set before torch starts its threads, as in the command line. Threads that spin at barriers
    # would slow small operations.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main(sys.argv[1:]))
