"""Shared by the commands: one-line errors, progress on stderr, JSON on stdout, loading data and models."""
# ruff: noqa: PLC0415 - a verb imports heavy packages when it runs, so that --help is fast

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from tilefold.retrieval.collection import Collection

__all__ = [
    "CommandError",
    "UsageError",
    "load_data",
    "note",
    "print_json",
    "progress_bar",
    "stderr",
    "stdout",
]

DEMO_DIR = Path("tilefold-demo")


class CommandError(Exception):
    """A failure that the user can fix; exit code 1."""


class UsageError(CommandError):
    """An argument is wrong; exit code 2."""


def stdout() -> Console:
    """A console for results. If stdout is not a terminal it is wide, so that tables are not cut."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def stderr() -> Console:
    """A console for progress, notes and errors."""
    from rich.console import Console

    return Console(stderr=True, width=None if sys.stderr.isatty() else 400)


def note(text: str) -> None:
    """Print one line about progress on stderr."""
    stderr().print(text, markup=False, highlight=False)


def print_json(value: Any) -> None:
    """Print the result of a ``--json`` call on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr if that is a terminal; yields a function of (done, total, note)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    console = stderr()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None, note="")

        def update(done: int, total: int, note: str = "") -> None:
            progress.update(task, completed=done, total=total, note=note)

        yield update


def load_data(name_or_path: str, cache_dir: Path | None = None) -> Collection:
    """``pydocs`` or a BEIR folder."""
    from tilefold.retrieval.datasets import load_collection

    return load_collection(name_or_path, cache_dir=cache_dir)


def check_at_least_one(**options: int | None) -> None:
    """Raise an error for a count below 1; the option is the name with dashes."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')}: expected at least 1, got {value}.")


def refuse(option: str, value: object, why: str) -> None:
    """Raise an error for an option that was given (is not None) where it does nothing."""
    if value is not None:
        raise UsageError(f"{option} {why}.")


def check_split(collection: Collection, split: str) -> None:
    """Raise an error for a split that the collection does not have."""
    if split not in collection.qrels:
        splits = ", ".join(sorted(collection.qrels)) or "none"
        raise UsageError(f"--split: {split!r} is not a split of {collection.name}; it has {splits}.")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class when it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
