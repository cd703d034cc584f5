"""Shared by the commands: options, one-line errors, progress on stderr, JSON on stdout, loading
data.
"""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.errors import PrecisionWarning

if TYPE_CHECKING:
    from rich.console import Console

    from tilefold.retrieval.data.collection import Collection


DEMO_DIR = Path("tilefold-demo")
SECONDS_PER_LINE = 60.0
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
    """A signal has ended the ranks of a command, of which rank 0 has reported what is kept.

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
    """A console for results. If stdout is not a terminal it is wide, so that tables are not cut."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def stderr() -> Console:
    """A console for progress, notes and errors."""
    from rich.console import Console

    return Console(stderr=True, width=None if sys.stderr.isatty() else 400)


def note(text: str, style: str | None = None) -> None:
    """Print one line, of progress or an error, on stderr."""
    stderr().print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def noting_precisions() -> Iterator[None]:
    """Print each ``PrecisionWarning`` as a note; other warnings are shown as before."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", PrecisionWarning)
        show_other = warnings.showwarning

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
    """Shorten a text to one line of at most so many cells; wide characters take two."""
    from rich.text import Text

    line = Text(" ".join(text.split()))
    line.truncate(cells, overflow="ellipsis")
    return line.plain


def print_table(
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    title: str = "",
    fold: Iterable[str] = (),
    **look: Any,
) -> None:
    """Print a table on stdout; a column whose name ends in ``>`` is aligned right, those to `fold`
    are never cut.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, **look)
    for name in columns:
        justify: Any = "right" if name.endswith(">") else "left"
        table.add_column(
            name.removesuffix(">"),
            justify=justify,
            overflow="fold" if name in fold else "ellipsis",
        )
    for row in rows:
        table.add_row(*map(Text, row))
    stdout().print(table)


def next_command(*words: object) -> str:
    """Return a command to go on with, to be pasted into a shell; --data has the fields of now."""
    if "--data" in words:
        named = fields_of_documents()
        options = {"--id-field": named.id, "--title-field": named.title, "--text-field": named.text}
        extra = [word for option, name in options.items() if name for word in (option, name)]
        at = words.index("--data") + 2
        words = (*words[:at], *extra, *words[at:])
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
        text: what is done.
        resumes: if given, the first reported number was done by an earlier run, and a line says so.
            The text says how to start over, and may be empty.

    Yields:
        A function of the number that is done, the total, and a remark or None.
    """
    console = stderr()
    announces_resumption = resumes is not None
    show: Callable[[int, int, str], None]

    def update(done: int, total: int, remark: object = None) -> None:
        nonlocal announces_resumption
        if announces_resumption and done:
            state = "resumes" if done < total else "has nothing left to do"
            hint = f" ({resumes})" if resumes else ""
            line = f"{text} {state}: {done:,} of {total:,} were done before{hint}"
            console.print(line, markup=False, highlight=False)
        announces_resumption = False
        show(done, total, "" if remark is None else str(remark))

    if not console.is_terminal:
        show = _LinePerMinute(text)
        yield update
        return
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

        yield update


class _LinePerMinute:
    """Progress as lines on stderr, one per minute at most, with rate and remaining time.

    Args:
        text: what is done.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._first: tuple[float, int] | None = None  # time and number of the first call
        self._last_line = time.monotonic()

    def __call__(self, done: int, total: int, remark: str = "") -> None:
        """Print a line if the last one was a minute ago, and something was done since the first."""
        now = time.monotonic()
        if self._first is None:
            self._first = (now, done)  # an earlier run may have done some
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
    """A length of time in seconds, minutes or hours, whichever suits it."""
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 2:
        return f"{seconds:.0f} s"
    if hours < 2:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h"


def size(n_bytes: float) -> str:
    """A number of bytes in kB, MB or GB, whichever suits it."""
    if n_bytes < 1e6:
        return f"{n_bytes / 1e3:.1f} kB"
    if n_bytes < 1e9:
        return f"{n_bytes / 1e6:.1f} MB"
    return f"{n_bytes / 1e9:.1f} GB"


@contextmanager
def heartbeat(text: str) -> Iterator[None]:
    """Print a line per minute on stderr while one call of unknown length runs."""
    ended, started = threading.Event(), time.monotonic()

    def speak() -> None:
        while not ended.wait(SECONDS_PER_LINE):
            note(f"{text}: {duration(time.monotonic() - started)} so far")

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# how to find out, after Ctrl-C, whether there is work that the same command would go on from
kept: list[Callable[[], bool]] = []


_fields: list[DocumentFields] = []  # of the command that runs


@contextmanager
def document_fields(fields: DocumentFields) -> Iterator[None]:
    """Read the documents of --data by these names of fields."""
    _fields.append(fields)
    try:
        yield
    finally:
        _fields.pop()


def fields_of_documents() -> DocumentFields:
    """Names of the fields of the documents of --data, where they are not the usual ones."""
    return _fields[-1] if _fields else DocumentFields()


def load_data(
    name_or_path: str,
    cache_dir: Path | None = None,
    *,
    drop_unknown: bool = False,
    **parts: Any,
) -> Collection:
    """``pydocs``, a BEIR folder, or documents alone; `parts` are those of ``load_collection``."""
    from tilefold.retrieval.data.datasets import load_collection

    return load_collection(
        name_or_path,
        cache_dir,
        unknown="drop" if drop_unknown else "error",
        fields=fields_of_documents(),
        **parts,
    )


def texts_of(data: str | None) -> Callable[[], Mapping[str, str]] | None:
    """Loader of the documents of --data, None without it."""
    return None if data is None else lambda: load_data(data, documents_only=True).contents()


def known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


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
    """The text of an error; that of one of the system begins with the file, like all others."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename2 or error.filename}: {error.strerror}"
    return str(error).strip()


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class when it has none."""
    return (text_of(error).splitlines() or [type(error).__name__])[0]
