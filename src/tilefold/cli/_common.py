"""Code that the commands share: errors, notes and progress on stderr, results, loading data."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
import unicodedata
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from tilefold._internal.termination import raise_if_terminated
from tilefold.retrieval.common.files import is_unicode
from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.data.pages import PageRanges
from tilefold.retrieval.errors import PrecisionWarning

if TYPE_CHECKING:
    from rich.console import Console

    from tilefold.retrieval.data.collection import Collection


# A function that shows the number of finished items, their total, and a remark, which may be empty.
ShowProgress = Callable[[int, int, str], None]

DEMO_DIR = Path("tilefold-demo")
SECONDS_PER_LINE = 60.0
# Width in characters of output that does not go to a terminal: tables and notes are not cut.
RESULT_WIDTH = 160
NOTE_WIDTH = 400
FRESH_HINT = "--fresh starts over"
DATA_HELP = "A folder in the BEIR layout, or pydocs, the documentation of this Python."
DOCUMENTS_HELP = (
    "A BEIR folder, documents alone (.jsonl, .csv, .parquet, .tsv or .txt of id and text, all but "
    ".parquet also .gz; or a saved dataset), a folder of PDFs and images, or pydocs, the "
    "documentation of this Python."
)
SHOWN_UNREAD_FILES = 5
OVERWRITE_HELP = "Replace existing files; otherwise the command refuses them before any work."
DROP_UNKNOWN_HELP = (
    "Leave out judgements of queries and documents that the collection, a sample, does not have."
)


class RanksInterruptedError(Exception):
    """A signal has ended all ranks of a command, and rank 0 has printed whether work is kept.

    Attributes:
        exit_code: the exit code of the command.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"the ranks ended with code {exit_code}")
        self.exit_code = exit_code


class CommandError(Exception):
    """A failure that the user can fix; exit code 1."""


class UsageError(CommandError):
    """An argument is wrong; exit code 2."""


def stdout() -> Console:
    """Return a console for results on stdout, which is wide unless stdout is a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else RESULT_WIDTH)


def stderr() -> Console:
    """Return a console for progress, notes and errors on stderr."""
    from rich.console import Console

    return Console(stderr=True, width=None if sys.stderr.isatty() else NOTE_WIDTH)


def note(text: str, style: str | None = None) -> None:
    """Print a line on stderr."""
    stderr().print(printable(text), style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def precision_warnings_as_notes() -> Iterator[None]:
    """Print each ``PrecisionWarning`` in this context as a line on stderr, without its source.

    Other warnings are shown as before.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", PrecisionWarning)
        original_showwarning = warnings.showwarning

        def show_warning(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            """Show a warning, with the signature of ``warnings.showwarning``."""
            if issubclass(category, PrecisionWarning):
                note(str(message))
            else:
                original_showwarning(message, category, filename, lineno, file, line)

        warnings.showwarning = show_warning
        yield


def print_json(value: object) -> None:
    """Print a value as JSON on stdout, escaping only texts that UTF-8 cannot encode."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if not is_unicode(text):
        text = json.dumps(value, indent=2)
    sys.stdout.write(text + "\n")


def printable(text: str) -> str:
    """Escape the characters of a text that a terminal would execute or cannot show.

    These are control characters, such as the escape sequences that move the cursor, and halves of
    surrogate pairs, which UTF-8 cannot encode. Line breaks stay.
    """
    return "".join(
        _backslash_escape(character) if _is_unprintable(character) else character
        for character in text
    )


def _is_unprintable(character: str) -> bool:
    """Return whether a character is half of a surrogate pair, or a control but no line break."""
    return character != "\n" and unicodedata.category(character) in {"Cc", "Cs"}


def _backslash_escape(character: str) -> str:
    """Return a character as in a Python string, such as ``\\t`` or ``\\x1b``."""
    return character.encode("unicode_escape").decode("ascii")


def shorten(text: str, cells: int) -> str:
    """Shorten a text to one line of at most `cells` terminal cells; wide characters take two."""
    from rich.text import Text

    line = Text(" ".join(text.split()))
    line.truncate(cells, overflow="ellipsis")
    return line.plain


def print_table(
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    title: str = "",
    *,
    right_aligned: Iterable[str] = (),
    wrapped: Iterable[str] = (),
    **table_options: Any,
) -> None:
    """Print a table on stdout, whose title and cells are escaped by :func:`printable`.

    Args:
        columns: the titles of the columns.
        rows: the cells of each row.
        title: the title above the table; empty for none.
        right_aligned: the titles of the columns that are aligned right.
        wrapped: the titles of the columns whose long cells are wrapped instead of cut.
        table_options: additional arguments of ``rich.table.Table``.
    """
    from rich.table import Table
    from rich.text import Text

    right_aligned_columns = set(right_aligned)
    wrapped_columns = set(wrapped)
    table = Table(title=Text(printable(title)) if title else None, **table_options)
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in right_aligned_columns else "left",
            overflow="fold" if column in wrapped_columns else "ellipsis",
        )
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    stdout().print(table)


def next_command(*words: object) -> str:
    """Return the line ``next: tilefold ...`` with a command to paste into a shell.

    A command that reads ``--data`` needs the same field names as the command that is running. Their
    options are added after ``--data``.

    Args:
        words: the words of the command after ``tilefold``.
    """
    if "--data" in words:
        after_data = words.index("--data") + 2  # the option and its value
        words = (*words[:after_data], *_field_name_options(), *words[after_data:])
    return f"next: tilefold {shlex.join(map(str, words))}"


def _field_name_options() -> list[str]:
    """Return the options of the running command about ``--data``, such as ``--id-field ID``."""
    field_names = current_document_fields()
    page_ranges = current_page_ranges()
    words: list[str] = []
    for option, name in (
        ("--id-field", field_names.id),
        ("--title-field", field_names.title),
        ("--text-field", field_names.text),
        ("--pages", None if page_ranges is None else str(page_ranges)),
    ):
        if name:
            words += [option, name]
    return words


def print_result(result: object, as_json: bool, *lines: str) -> None:
    """Print a result on stdout.

    Args:
        result: the result as a value for JSON.
        as_json: whether JSON is printed instead of the lines.
        lines: the result as text.
    """
    if as_json:
        print_json(result)
        return
    for line in lines:
        typer.echo(line)


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[..., None]]:
    """Show progress on stderr: a bar on a terminal, and otherwise a line per minute.

    Args:
        text: the name of the work, such as ``"encoding"``.

    Yields:
        A function that shows progress. It takes the number of finished items, their total, and an
        optional remark. It ends the command if a SIGTERM has arrived.
    """
    with _progress_display(text, stderr()) as show:

        def update(done: int, total: int, remark: object = None) -> None:
            raise_if_terminated()
            show(done, total, "" if remark is None else str(remark))

        yield update


@contextmanager
def resumable_progress_bar(text: str, hint: str = "") -> Iterator[Callable[..., None]]:
    """Show progress on stderr, of work that may resume an earlier run.

    There is a bar on a terminal, and otherwise a line per minute. If the first report counts items
    of the earlier run, a line says so.

    Args:
        text: the name of the work, such as ``"encoding"``.
        hint: how to start over, for that line; empty for no hint.

    Yields:
        A function that shows progress. It takes the number of finished items, their total, and an
        optional remark. It ends the command if a SIGTERM has arrived.
    """
    is_first_report = True
    console = stderr()
    with _progress_display(text, console) as show:

        def update(done: int, total: int, remark: object = None) -> None:
            """Show progress, after a line about earlier work at the first call."""
            nonlocal is_first_report
            raise_if_terminated()
            if is_first_report and done:
                state = "resumes" if done < total else "has nothing left to do"
                line = f"{text} {state}: {done:,} of {total:,} were done before"
                if hint:
                    line += f" ({hint})"
                console.print(line, markup=False, highlight=False)
            is_first_report = False
            show(done, total, "" if remark is None else str(remark))

        yield update


def _progress_display(text: str, console: Console) -> AbstractContextManager[ShowProgress]:
    """Return a context that shows progress, as a bar on a terminal and otherwise in lines.

    Args:
        text: the name of the work.
        console: the console of stderr.
    """
    if console.is_terminal:
        return _terminal_bar(text, console)
    return nullcontext(_LinePerMinute(text))


@contextmanager
def _terminal_bar(text: str, console: Console) -> Iterator[ShowProgress]:
    """Show a progress bar on a terminal in this context.

    Args:
        text: the name of the work.
        console: the console that prints on the terminal.

    Yields:
        A function that shows the number of finished items, their total, and a remark.
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
    """Prints progress on stderr, at most one line per minute, with rate and remaining time.

    Args:
        text: the name of the work.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        # Time and number of finished items of the first call.
        self._first_call: tuple[float, int] | None = None
        self._last_line = time.monotonic()

    def __call__(self, done: int, total: int, remark: str = "") -> None:
        """Print a line, at most once a minute, once there is progress since the first call.

        Args:
            done: the number of finished texts, queries or steps.
            total: the number of all texts, queries or steps.
            remark: a remark after the number; empty for none.
        """
        now = time.monotonic()
        if self._first_call is None:
            # `done` may already include the work of an earlier run, which the rate leaves out.
            self._first_call = (now, done)
        first_time, first_done = self._first_call
        if now - self._last_line < SECONDS_PER_LINE or done == first_done:
            return
        self._last_line = now
        rate = (done - first_done) / (now - first_time)
        parts = [
            f"{done:,} of {total:,}",
            remark,
            f"{rate:.3g} per second",
            f"{format_duration((total - done) / rate)} left",
        ]
        note(f"{self._text}: {', '.join(part for part in parts if part)}")


def format_duration(seconds: float) -> str:
    """Format a duration in seconds, minutes or hours, depending on its length."""
    minutes = seconds / 60
    hours = seconds / 3600
    if minutes < 2:
        return f"{seconds:.0f} s"
    if hours < 2:
        return f"{minutes:.0f} min"
    return f"{hours:.1f} h"


def format_size(n_bytes: float) -> str:
    """Format a number of bytes in kB, MB or GB, depending on its size."""
    if n_bytes < 1e6:
        return f"{n_bytes / 1e3:.1f} kB"
    if n_bytes < 1e9:
        return f"{n_bytes / 1e6:.1f} MB"
    return f"{n_bytes / 1e9:.1f} GB"


@contextmanager
def heartbeat(text: str) -> Iterator[None]:
    """Print the elapsed time on stderr every minute, from a thread, until the context ends.

    The context is for work that cannot report its progress.

    Args:
        text: the name of the work, such as ``"merging"``.
    """
    started = time.monotonic()
    ended = threading.Event()

    def print_lines() -> None:
        while not ended.wait(SECONDS_PER_LINE):  # True as soon as the context ends
            note(f"{text}: {format_duration(time.monotonic() - started)} so far")

    thread = threading.Thread(target=print_lines, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


# Functions that are called after Ctrl-C or SIGTERM. Each returns whether the same command would
# resume from finished work.
finished_work_checks: list[Callable[[], bool]] = []

# Functions that are called after Ctrl-C or SIGTERM. Each returns a sentence about where the same
# command would resume.
resume_notes: list[Callable[[], str]] = []

# Field names of the documents of `--data`; the last entry belongs to the running command.
_fields: list[DocumentFields] = []
_page_ranges: list[PageRanges | None] = []


@contextmanager
def document_fields(
    fields: DocumentFields,
    page_ranges: PageRanges | None = None,
) -> Iterator[None]:
    """Let :func:`load_data` read documents with custom field names, until the context ends.

    Args:
        fields: the names of the id, title and text fields of ``--data``.
        page_ranges: the pages to read of each PDF; None for all.
    """
    _fields.append(fields)
    _page_ranges.append(page_ranges)
    try:
        yield
    finally:
        _fields.pop()
        _page_ranges.pop()


def current_document_fields() -> DocumentFields:
    """Return the names of the id, title and text fields that the running command was given."""
    return _fields[-1] if _fields else DocumentFields()


def current_page_ranges() -> PageRanges | None:
    """Return the pages of each PDF that the running command was given; None for all."""
    return _page_ranges[-1] if _page_ranges else None


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
        cache_dir: the folder of collections that are made or downloaded.
        drop_unknown: leave out judgements of unknown queries and documents, which are otherwise an
            error.
        parts: the parts of the collection to load, as arguments of
            :func:`tilefold.retrieval.load_collection`.
    """
    from tilefold.retrieval.data.datasets import load_collection

    collection = load_collection(
        name_or_path,
        cache_dir,
        unknown="drop" if drop_unknown else "error",
        fields=current_document_fields(),
        page_ranges=current_page_ranges(),
        **parts,
    )
    _note_unread_files(collection.unread_files)
    return collection


def _note_unread_files(unread_files: Mapping[str, str]) -> None:
    """Print how many files of pages could not be opened, and the first reasons."""
    if not unread_files:
        return
    possessive = "its" if len(unread_files) == 1 else "their"
    note(
        f"--data: {counted(len(unread_files), 'file')} could not be opened, and {possessive} pages "
        "are left out",
    )
    for name, reason in list(unread_files.items())[:SHOWN_UNREAD_FILES]:
        note(f"not opened: {name}: {reason}")
    if len(unread_files) > SHOWN_UNREAD_FILES:
        note(f"and {len(unread_files) - SHOWN_UNREAD_FILES} more")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as ``"1 part"`` or ``"2 parts"``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def check_split(collection: Collection, split: str, option: str = "--split") -> None:
    """Raise ``UsageError`` if a collection does not have a split that `option` names.

    Args:
        collection: the collection.
        split: the split.
        option: the option, for the error.
    """
    if not collection.qrels:
        raise UsageError(
            f"--data: {collection.name} has no judgements; expected a folder with corpus.jsonl, "
            f"queries.jsonl and qrels/{split}.tsv.",
        )
    if split not in collection.qrels:
        splits = ", ".join(sorted(collection.qrels))
        raise UsageError(
            f"{option}: {split!r} is not a split of {collection.name}; it has {splits}.",
        )


def text_of(error: BaseException) -> str:
    """Return the text of an error; for an error of the system, its file and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename2 or error.filename}: {error.strerror}"
    return str(error).strip()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its class if it has no text."""
    return (text_of(error).splitlines() or [type(error).__name__])[0]
