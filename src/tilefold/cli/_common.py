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
    "load_encoder",
    "load_model",
    "load_multi_vector",
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


def check_split(collection: Collection, split: str) -> None:
    """Raise an error for a split that the collection does not have."""
    if split not in collection.qrels:
        splits = ", ".join(sorted(collection.qrels)) or "none"
        raise UsageError(f"--split: {split!r} is not a split of {collection.name}; it has {splits}.")


def load_encoder(name_or_path: str) -> Any:
    """A SparseEncoder from a folder or a Hugging Face name, with the fused head where its architecture allows;
    see :func:`tilefold.recipes.loading.load_saved`.
    """
    model, kind = load_model(name_or_path)
    if kind == "multi-vector":
        raise UsageError(
            f"--model: {name_or_path} is a multi-vector model, whose token vectors no index holds; give a "
            "SparseEncoder here, and this one to --rerank."
        )
    return model


def load_multi_vector(name_or_path: str, option: str) -> Any:
    """A MultiVectorEncoder from a folder or a Hugging Face name; any other model is refused."""
    model, kind = load_model(name_or_path, option, only="multi-vector")
    if kind != "multi-vector":
        raise UsageError(
            f"{option}: {name_or_path} is not a multi-vector model; train one with: tilefold train --method colbert"
        )
    return model


def load_model(name_or_path: str, option: str = "--model", only: str | None = None) -> tuple[Any, str]:
    """A SparseEncoder or MultiVectorEncoder, and its kind: ``"sparse"`` or ``"multi-vector"``.

    With `only`, a model of another kind is not loaded, and comes back as None with its kind.
    """
    _check_sentence_transformers()
    from safetensors import SafetensorError

    from tilefold.recipes.loading import load_saved, saved_kind
    from tilefold.recipes.quiet import quiet_libraries

    local = Path(name_or_path).is_dir()
    if not local and (Path(name_or_path).is_absolute() or name_or_path.startswith((".", "~"))):
        raise UsageError(f"{option}: there is no folder {name_or_path}; train one with: tilefold train")
    with quiet_libraries():
        kind = saved_kind(name_or_path)
        if only is not None and kind != only:
            return None, kind
        if kind in ("dense", "cross-encoder"):
            raise UsageError(
                f"{option}: {name_or_path} is a {kind} model; expected a SparseEncoder or a MultiVectorEncoder. "
                "Train one from it with: tilefold train"
            )
        try:
            model = load_saved(name_or_path, kind)
        except OSError as error:
            raise CommandError(
                f"{option}: {name_or_path} is no folder with a model, and could not be fetched by that name "
                f"({first_line(error)})"
            ) from error
        except SafetensorError as error:
            raise CommandError(
                f"{option}: the weights in {name_or_path} are damaged ({first_line(error)}); fetch or train it again."
            ) from error
        if kind == "multi-vector":
            return model, kind
        _accelerate(model)
    return model, "sparse"


def _accelerate(model: Any) -> None:
    from tilefold.integrations.sentence_transformers import accelerate

    try:
        accelerate(model)
    except ValueError as error:
        note(f"encoding with the plain head: {first_line(error)}")


def _check_sentence_transformers() -> None:
    try:
        from sentence_transformers import MultiVectorEncoder, SparseEncoder  # noqa: F401 - 6 or later has both
    except ImportError as error:
        raise CommandError(
            'this needs sentence-transformers 6 or later: pip install "tilefold[sentence-transformers]"'
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class when it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
