"""Benchmarks of whole jobs as users run them: cases, rows and command lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tilefold.bench.results import (
    choose_device,
    collect,
    print_header,
    results_file,
    results_folder,
    short_number,
    write_csv,
)
from tilefold.bench.timing import TimeBudget, Timing, time_cpu

Row = Mapping[str, object]
# columns of a table on something that is not a terminal
_TABLE_WIDTH = 190


@dataclass(frozen=True)
class JobCase:
    """One setting of a job.

    Attributes:
        name: the name that `--shape` takes.
        devices: device types that it runs on by default.
        quick: whether `--quick` runs it.
        numbers: sizes and choices, by name.
    """

    name: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    quick: bool = False
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobOptions:
    """Options of a run.

    Attributes:
        device: the device to measure.
        impls: the names of the implementations to measure. None measures all.
        quick: whether to use the smallest sizes.
        tokenizer: the folder of a tokenizer for models with a large vocabulary, or None.
    """

    device: torch.device
    impls: Sequence[str] | None = None
    quick: bool = False
    tokenizer: Path | None = None


@dataclass(frozen=True)
class Job:
    """A job: its cases, and the function that measures one.

    Attributes:
        name: the name of the job, and of its results file.
        cases: its settings.
        key: the columns that identify a row of the results.
        shown: the columns that are printed.
        run: a function that yields rows as they are measured. ``row["gate"]`` is ``"ok"``, or the
            reason why the check failed. The row then has no times, and the command exits with 1.
    """

    name: str
    cases: tuple[JobCase, ...]
    key: tuple[str, ...]
    shown: tuple[str, ...]
    run: Callable[[JobCase, JobOptions], Iterator[Row]]

    def chosen(self, names: Sequence[str] | None, device: str, quick: bool) -> list[JobCase]:
        """Return the cases to run.

        Args:
            names: the names of the cases. Without names, the cases of the device are run.
            device: the type of the device.
            quick: whether to leave out cases that are not quick, if there are no names.

        Raises:
            ValueError: if no case has one of the names.
        """
        if not names:
            return [
                case for case in self.cases if device in case.devices and (case.quick or not quick)
            ]
        cases = {case.name: case for case in self.cases}
        for name in names:
            if name not in cases:
                raise ValueError(f"shape must be one of {', '.join(cases)}, got {name!r}.")
        return [cases[name] for name in names]


@dataclass(frozen=True)
class SearchMethod:
    """A search of a collection, which is timed in turns with other searches.

    Attributes:
        run: a function that searches once.
        queries: the number of queries of a call.
        stored_bytes: the size of the collection.
        read_bytes: the bytes of the collection that a call reads. 0 if they are not known.
        goal: the value that a GPU should reach, for the table.
        gate: ``"ok"``, or the reason why the results are wrong.
    """

    run: Callable[[], object]
    queries: int
    stored_bytes: int
    read_bytes: int = 0
    goal: object = ""
    gate: str = "ok"

    def run_and_wait(self, device: torch.device) -> None:
        """Search once, and wait until the device has finished."""
        self.run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def row(self, name: str, timing: Timing) -> dict[str, Any]:
        """Return the row of the results.

        Args:
            name: the name of the method.
            timing: the milliseconds of a call. They are only in the note if the gate failed.
        """
        row: dict[str, Any] = {
            "way": name,
            "queries": self.queries,
            "gb": self.stored_bytes / 1e9,
            "goal": self.goal,
            "gate": self.gate,
        }
        if self.gate != "ok":
            row["note"] = f"it took {timing.p50:.3g} ms"
            return row
        row.update(
            p50_ms=timing.p50,
            p20_ms=timing.p20,
            p80_ms=timing.p80,
            rounds=timing.reps,
            # empty where there are no queries, or the bytes are not known
            queries_s=1e3 * self.queries / timing.p50 or "",
            tb_s=self.read_bytes / timing.p50 / 1e9 or "",
        )
        return row


def time_methods(
    methods: Mapping[str, SearchMethod],
    device: torch.device,
    budget: TimeBudget,
) -> Iterator[dict[str, Any]]:
    """Time searches by the wall clock, in turns.

    Args:
        methods: the ways, by name.
        device: the device that they use, which each call waits for.
        budget: the time to spend.

    Yields:
        A row for each one.
    """
    runs = {name: partial(method.run_and_wait, device) for name, method in methods.items()}
    timings = time_cpu(runs, budget)
    for name, method in methods.items():
        yield method.row(name, timings[name])


def main(job: Job, doc: str | None, arguments: Sequence[str] | None = None) -> int:
    """Measure the cases that the command line selects.

    Args:
        job: the job.
        doc: docstring of the script, for `--help`.
        arguments: the command line. By default that of the process.

    Returns:
        The exit code: 1 if a row failed its gate.
    """
    parser = _parser(job, doc)
    options = parser.parse_args(arguments)
    if options.list:
        for case in job.cases:
            quick = "  quick" if case.quick else ""
            print(f"{case.name:32} {', '.join(case.devices):10}{quick}")
        return 0
    try:
        job_options = JobOptions(
            device=choose_device(options.device),
            impls=options.impl,
            quick=options.quick,
            tokenizer=options.tokenizer,
        )
        cases = job.chosen(options.shape, job_options.device.type, options.quick)
    except ValueError as error:
        parser.error(str(error))
    folder = results_folder(options.output, options.quick)
    all_passed = _run(job, cases, job_options, folder)
    return 0 if all_passed else 1


def _parser(job: Job, doc: str | None) -> argparse.ArgumentParser:
    """Create the parser of a job's command line."""
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="list the cases, run nothing")
    parser.add_argument("--shape", "--only", action="append", help="a case; repeat for several")
    parser.add_argument("--impl", action="append", help="an implementation; repeat for several")
    parser.add_argument("--device", help="cpu or cuda; by default the GPU if there is one")
    parser.add_argument("--output", type=Path, help=f"folder for <device>/{job.name}.csv")
    parser.add_argument(
        "--quick",
        "--tiny",
        action="store_true",
        help="the quick cases; saved only with --output",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder of a tokenizer for V = 250,002, of training",
    )
    return parser


def _run(job: Job, cases: Sequence[JobCase], options: JobOptions, folder: Path | None) -> bool:
    """Measure cases, print their tables, and save every row when it is measured.

    Args:
        job: the job.
        cases: the cases to measure.
        options: the options of the run.
        folder: the folder of the results, or None to save nothing.

    Returns:
        Whether all rows passed their gate.
    """
    provenance = collect(options.device)
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    print_header(console, provenance)
    path = results_file(folder, job.name, provenance) if folder is not None else None
    all_passed = True
    for case in cases:
        table = Table(*job.shown, title=f"{job.name} {case.name}", title_justify="left")
        for row in job.run(case, options):
            all_passed = all_passed and row["gate"] == "ok"
            table.add_row(*(_cell(row.get(name, "")) for name in job.shown))
            if row.get("note"):
                console.print(f"  {row[job.key[0]]}: {row['note']}", markup=False)
            if path is not None:
                write_csv(path, [row], provenance, job.key)
        console.print(table)
    if path is not None:
        console.print(f"results: {path}", markup=False)
    return all_passed


def _cell(value: object) -> str:
    """Format a value for the table."""
    return short_number(value) if isinstance(value, float) else str(value)
