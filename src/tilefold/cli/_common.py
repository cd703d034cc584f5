"""Code that the commands share: errors, notes and progress on stderr, results, loading data."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.errors import PrecisionWarning

if TYPE_CHECKING:
    from rich.console import Console

    from tilefold.retrieval.data.collection import Collection


# Shows the number that is done, the total, and a remark, which may be empty.
ShowProgress = Callable[[int, int, str], None]

DEMO_DIR = Path("tilefold-demo")
SECONDS_PER_LINE = 60.0
# Columns of text that is not printed on a terminal, so that tables and notes are not cut.
RESULT_WIDTH = 160
NOTE_WIDTH = 400
FRESH = "--fresh does them again"
DATA_HELP = "A folder in the BEIR layout, or pydocs, the documentation of this Python."
DOCUMENTS_HELP = (
    "A BEIR folder, documents alone (.jsonl, .csv, .parquet, .tsv or .txt of id and text, all but "
    ".parquet also .gz; or a saved dataset), or pydocs, the documentation of this Python."
)
OVERWRITE_HELP = "Replace files that exist; without, they are refused before any work."
DROP_UNKNOWN_HELP = (
    "Leave out judgements of queries and documents that the collection lacks, in a sample of one."
)


class RanksInterruptedError(Exception):
    """A signal has ended the ranks of a command, and rank 0 has reported whether work is kept.

    Attributes:
        exit_code: exit code of the command.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the ranks ended with code {exit_code}")
        self.exit_code = exit_code


class CommandError(Exception):
    """A failure that the user can fix; exit code 1."""


class UsageError(CommandError):
    """An argument is wrong; exit code 2."""


def stdout() -> Console:
    """Return a console for results, which is wide on anything but a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else RESULT_WIDTH)


def stderr() -> Console:
    """Return a console for progress, notes and errors."""
    from rich.console import Console

    return Console(stderr=True, width=None if sys.stderr.isatty() else NOTE_WIDTH)


def note(text: str, style: str | None = None) -> None:
    """Print one line, of progress or an error, on stderr."""
    stderr().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def noting_precisions() -> Iterator[None]:
    """Print each ``PrecisionWarning`` in this context as a note on stderr.

    Other warnings are shown as before.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", PrecisionWarning)
        show_other = warnings.showwarning

        # The parameters are those of `warnings.showwarning`, which it replaces.
        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, PrecisionWarning):
                note(str(message))
            else:
                show_other(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def print_json(value: object) -> None:
    """Print the result of a ``--json`` call on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def shorten(text: str, cells: int) -> str:
    """Shorten a text to one line that fits into `cells` of a terminal; wide characters take two."""
    from rich.text import Text

    line = Text(" ".join(text.split()))
    line.truncate(cells, overflow="ellipsis")
    return line.plain


def print_table(
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    title: str = "",
    fold: Iterable[str] = (),
    **table_options: Any,
) -> None:
    """Print a table on stdout.

    Args:
        columns: names of the columns. A name that ends in ``>`` aligns its column right.
        rows: the cells of each row.
        title: printed above the table.
        fold: names of columns whose cells are wrapped, and never cut.
        table_options: further arguments of ``rich.table.Table``.
    """
    from rich.table import Table
    from rich.text import Text

    folded = set(fold)
    table = Table(title=Text(title) if title else None, **table_options)
    for name in columns:
        table.add_column(
            name.removesuffix(">"),
            justify="right" if name.endswith(">") else "left",
            overflow="fold" if name in folded else "ellipsis",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    stdout().print(table)


def next_command(*words: object) -> str:
    """Return the line ``next: tilefold ...`` with a command to paste into a shell.

    After ``--data``, the options that name the fields of documents are repeated from the command
    that is running.

    Args:
        words: the words of the command after ``tilefold``.
    """
    if "--data" in words:
        field_names = fields_of_documents()
        field_options: list[str] = []
        for option, name in (
            ("--id-field", field_names.id),
            ("--title-field", field_names.title),
            ("--text-field", field_names.text),
        ):
            if name:
                field_options += [option, name]
        after_data = words.index("--data") + 2  # the option and its value
        words = (*words[:after_data], *field_options, *words[after_data:])
    return f"next: tilefold {shlex.join(map(str, words))}"


def print_result(result: object, as_json: bool, *lines: str) -> None:
    """Print a result as JSON, or its lines for people."""
    if as_json:
        print_json(result)
        return
    for line in lines:
        typer.echo(line)


@contextmanager
def progress_bar(text: str, *, resumes: str | None = None) -> Iterator[Callable[..., None]]:
    """Show progress on stderr: a bar on a terminal, and otherwise a line per minute.

    Args:
        text: name of the work, such as ``"encoding"``.
        resumes: how to start over, or an empty text. The first reported number is then what an
            earlier run has done, and a line says so. None if the work cannot be resumed.

    Yields:
        A function that shows progress. It takes the number that is done, the total, and a remark
        or None.
    """
    console = stderr()
    display: AbstractContextManager[ShowProgress] = nullcontext(_LinePerMinute(text))
    if console.is_terminal:
        display = _terminal_bar(text, console)
    with display as show:
        announces_resumption = resumes is not None

        def update(done: int, total: int, remark: object = None) -> None:
            nonlocal announces_resumption
            if announces_resumption and done:
                state = "resumes" if done < total else "has nothing left to do"
                hint = f" ({resumes})" if resumes else ""
                line = f"{text} {state}: {done:,} of {total:,} were done before{hint}"
                console.print(line, markup=False, highlight=False)
            announces_resumption = False
            show(done, total, "" if remark is None else str(remark))

        yield update


@contextmanager
def _terminal_bar(text: str, console: Console) -> Iterator[ShowProgress]:
    """Show a progress bar on a terminal in this context.

    Args:
        text: name of the work.
        console: of the terminal.

    Yields:
        A function that shows the number that is done, the total, and a remark.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    bar = Progress(
        "{task.description}",
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        "{task.fields[note]}",
        console=console,
    )
    with bar:
        task = bar.add_task(text, total=None, note="")

        def show(done: int, total: int, remark: str) -> None:
            bar.update(task, completed=done, total=total, note=remark)

        yield show


class _LinePerMinute:
    """Progress as lines on stderr, one per minute at most, with rate and remaining time.

    Args:
        text: name of the work.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._first: tuple[float, int] | None = None  # time and number of the first call
        self._last_line = time.monotonic()

    def __call__(self, done: int, total: int, remark: str = "") -> None:
        """Print a line if the last one was a minute ago, and something was done since the first.

        Args:
            done: number of texts, queries or steps that are done.
            total: number of all of them.
            remark: text after the number; empty for none.
        """
        now = time.monotonic()
        if self._first is None:
            # Work of an earlier run, which does not count for the rate of this one.
            self._first = (now, done)
        first_time, first_done = self._first
        if now - self._last_line < SECONDS_PER_LINE or done == first_done:
            return
        self._last_line = now
        rate = (done - first_done) / (now - first_time)
        parts = [
            f"{done:,} of {total:,}",
            remark,
            f"{rate:.3g} per second",
            f"{duration((total - done) / rate)} left",
        ]
        note(f"{self._text}: {', '.join(part for part in parts if part)}")


def duration(seconds: float) -> str:
    """Return a length of time in seconds, minutes or hours, whichever suits it."""
    minutes = seconds / 60
    hours = seconds / 3600
    if minutes < 2:
        return f"{seconds:.0f} s"
    if hours < 2:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h"


def size(n_bytes: float) -> str:
    """Return a number of bytes in kB, MB or GB, whichever suits it."""
    if n_bytes < 1e6:
        return f"{n_bytes / 1e3:.1f} kB"
    if n_bytes < 1e9:
        return f"{n_bytes / 1e6:.1f} MB"
    return f"{n_bytes / 1e9:.1f} GB"


@contextmanager
def heartbeat(text: str) -> Iterator[None]:
    """Print a line per minute on stderr while the code of a ``with`` block runs.

    It is for work that cannot report its progress. A thread prints the time that has passed.

    Args:
        text: name of the work, such as ``"merging"``.
    """
    started = time.monotonic()
    ended = threading.Event()

    def print_lines() -> None:
        while not ended.wait(SECONDS_PER_LINE):
            note(f"{text}: {duration(time.monotonic() - started)} so far")

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# Functions that return, after Ctrl-C, whether there is work that the same command resumes from.
finished_work_checks: list[Callable[[], bool]] = []

# Names of the fields of documents, for the commands that run.
_fields: list[DocumentFields] = []


@contextmanager
def document_fields(fields: DocumentFields) -> Iterator[None]:
    """Read the documents of ``--data`` by these names of fields in this context."""
    _fields.append(fields)
    try:
        yield
    finally:
        _fields.pop()


def fields_of_documents() -> DocumentFields:
    """Return the names of the fields of ``--data``, where they are not the usual ones."""
    return _fields[-1] if _fields else DocumentFields()


def load_data(
    name_or_path: str,
    cache_dir: Path | None = None,
    *,
    drop_unknown: bool = False,
    **parts: Any,
) -> Collection:
    """Load the collection of ``--data``.

    Args:
        name_or_path: ``pydocs``, a BEIR folder, or a file of documents.
        cache_dir: folder of the collections that are made or downloaded.
        drop_unknown: leave out judgements of unknown queries and documents, which are an error.
        parts: what of the collection is loaded, as arguments of
            :func:`tilefold.retrieval.load_collection`.
    """
    from tilefold.retrieval.data.datasets import load_collection

    return load_collection(
        name_or_path,
        cache_dir,
        unknown="drop" if drop_unknown else "error",
        fields=fields_of_documents(),
        **parts,
    )


def texts_of(data: str | None) -> Callable[[], Mapping[str, str]] | None:
    """Return a function that loads the texts of ``--data`` by id; None without ``--data``."""
    if data is None:
        return None

    def load_texts() -> Mapping[str, str]:
        return load_data(data, documents_only=True).contents()

    return load_texts


def check_split(collection: Collection, split: str, option: str = "--split") -> None:
    """Raise an error for a split that the collection does not have."""
    if not collection.qrels:
        raise UsageError(
            f"--data: {collection.name} has no judgements; they belong in qrels/{split}.tsv.",
        )
    if split not in collection.qrels:
        splits = ", ".join(sorted(collection.qrels))
        raise UsageError(
            f"{option}: {split!r} is not a split of {collection.name}; it has {splits}.",
        )


def text_of(error: BaseException) -> str:
    """Return the text of an error; that of the operating system begins with the file."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename2 or error.filename}: {error.strerror}"
    return str(error).strip()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class if it has no text."""
    return (text_of(error).splitlines() or [type(error).__name__])[0]
