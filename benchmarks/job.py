"""Benchmarks of whole jobs, as users run them: cases, rows, and the command line of their scripts."""

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
from tilefold.bench.timing import TimeBudget, time_cpu

Row = Mapping[str, object]


@dataclass(frozen=True)
class JobCase:
    """One setting of a job.

    Attributes:
        name: what `--shape` asks for.
        devices: device types that it runs on by default.
        quick: whether `--quick` has it.
        numbers: sizes and choices, by name.
    """

    name: str
    devices: tuple[str, ...] = ("cpu", "cuda")
    quick: bool = False
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class JobOptions:
    """Options of a run: the device, which implementations (all if None), whether to be quick, a
    tokenizer's folder.
    """

    device: torch.device
    impls: Sequence[str] | None = None
    quick: bool = False
    tokenizer: Path | None = None


@dataclass(frozen=True)
class Job:
    """A job: its cases, and what measures one.

    Attributes:
        name: of the job.
        cases: its settings.
        key: columns whose values name a row of the results.
        shown: columns that are printed.
        run: yields rows as they are measured. ``row["gate"]`` is ``"ok"``, or says what was wrong;
            then the row has no times, and the command exits with 1.
    """

    name: str
    cases: tuple[JobCase, ...]
    key: tuple[str, ...]
    shown: tuple[str, ...]
    run: Callable[[JobCase, JobOptions], Iterator[Row]]

    def chosen(self, names: Sequence[str] | None, device: str, quick: bool) -> list[JobCase]:
        """The cases of these names; without names those of the device, or its quick ones.

        Raises:
            ValueError: for a name that no case has.
        """
        if not names:
            return [
                case for case in self.cases if device in case.devices and (case.quick or not quick)
            ]
        known = {case.name: case for case in self.cases}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"shape must be one of {', '.join(known)}, got {unknown[0]!r}.")
        return [known[name] for name in names]


@dataclass(frozen=True)
class Way:
    """A way to search: a call, its queries, bytes of the collection, those that a call reads, the
    goal, the gate.
    """

    run: Callable[[], object]
    queries: int
    held: int
    read: int = 0
    goal: object = ""
    gate: str = "ok"

    def finished(self, device: torch.device) -> None:
        """The call, to the end of what it gave the device."""
        self.run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def in_turns(
    ways: Mapping[str, Way],
    device: torch.device,
    budget: TimeBudget,
) -> Iterator[dict[str, Any]]:
    """Rows of ways that take turns, by the wall clock."""
    times = time_cpu({name: partial(way.finished, device) for name, way in ways.items()}, budget)
    for name, way in ways.items():
        found, row = (
            times[name],
            {"way": name, "queries": way.queries, "gb": way.held / 1e9, "goal": way.goal},
        )
        rates = {
            "queries_s": 1e3 * way.queries / found.p50 or "",
            "tb_s": way.read / found.p50 / 1e9 or "",
        }
        measured = {
            "p50_ms": found.p50,
            "p20_ms": found.p20,
            "p80_ms": found.p80,
            "rounds": found.reps,
            **rates,
        }
        yield (
            row
            | {"gate": way.gate}
            | (measured if way.gate == "ok" else {"note": f"it took {found.p50:.3g} ms"})
        )


def main(job: Job, doc: str | None, arguments: Sequence[str] | None = None) -> int:
    """Measure the cases that the command line asks for; 1 if a row failed its gate."""
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
    asked = parser.parse_args(arguments)
    if asked.list:
        for case in job.cases:
            print(f"{case.name:32} {', '.join(case.devices):10}{'  quick' if case.quick else ''}")
        return 0
    try:
        options = JobOptions(choose_device(asked.device), asked.impl, asked.quick, asked.tokenizer)
        cases = job.chosen(asked.shape, options.device.type, options.quick)
    except ValueError as error:
        parser.error(str(error))
    failed = _run(job, cases, options, results_folder(asked.output, asked.quick))
    return int(failed)


def _run(job: Job, cases: Sequence[JobCase], options: JobOptions, folder: Path | None) -> bool:
    """Run, print, and save after every row; whether a row failed its gate."""
    provenance = collect(options.device)
    console = Console(width=None if sys.stdout.isatty() else 190)
    print_header(console, provenance)
    path = results_file(folder, job.name, provenance) if folder is not None else None
    failed = False
    for case in cases:
        table = Table(*job.shown, title=f"{job.name} {case.name}", title_justify="left")
        for row in job.run(case, options):
            failed |= row["gate"] != "ok"
            values = (row.get(name, "") for name in job.shown)
            table.add_row(
                *(
                    short_number(value) if isinstance(value, float) else str(value)
                    for value in values
                ),
            )
            if row.get("note"):
                console.print(f"  {row[job.key[0]]}: {row['note']}", markup=False)
            if path is not None:
                write_csv(path, [row], provenance, job.key)
        console.print(table)
    if path is not None:
        console.print(f"results: {path}", markup=False)
    return failed
