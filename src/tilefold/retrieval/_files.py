"""Directories that appear whole, JSON that is checked, and packages that may be missing."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection as AnyCollection
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from tilefold._files import hold_path, naming_full_disk, scratch_folder
from tilefold.retrieval.errors import DataError, MissingPackageError


def require(module: str, package: str, purpose: str) -> Any:
    """Import an optional `module`, or say which `package` to install and why it is needed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs the package {package}, which could not be imported ({error}). "
            f"Install it with `pip install {package}` or `pip install 'tilefold[retrieval]'`."
        ) from error


@contextmanager
def atomic_directory(path: Path, *, own_names: AnyCollection[str]) -> Iterator[Path]:
    """Yield a temporary directory beside `path`, which replaces `path` if the block ends without an error.

    A directory that already holds anything but `own_names` is never replaced. What killed processes left of earlier
    saves beside it is removed.

    Raises:
        FileExistsError: `path` holds other files.
        InUseError: another process writes `path`.
    """
    check_replaceable(path, own_names)
    with hold_path(path), scratch_folder(path) as temporary:
        made = temporary / "made"
        made.mkdir()
        with naming_full_disk(path):
            yield made
        _swap(made, path)


def check_replaceable(path: Path, own_names: AnyCollection[str]) -> None:
    """Raise FileExistsError when `path` is a file, or a directory with names other than `own_names`."""
    if not path.exists():
        return
    if not path.is_dir():
        raise FileExistsError(
            f"{path}: expected a new directory or one that tilefold wrote, got a file. Choose another path."
        )
    strange = sorted(entry.name for entry in path.iterdir() if entry.name not in own_names)
    if strange:
        raise FileExistsError(
            f"{path}: expected a new directory or one that tilefold wrote, got one with other files "
            f"({', '.join(strange[:3])}). Choose another path; nothing was overwritten."
        )


def _swap(new: Path, path: Path) -> None:
    if not path.exists():
        new.replace(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    path.replace(old)
    try:
        new.replace(path)
    except OSError:
        old.replace(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in `path`; FileNotFoundError or DataError otherwise, ending in `remedy`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file. {remedy}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: expected a JSON object, got malformed JSON ({error}). {remedy}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}. {remedy}")
    return value


def json_line(value: Any) -> str:
    """`value` as a line of JSON in UTF-8; escapes are used only where a text has half a surrogate pair."""
    line = json.dumps(value, ensure_ascii=False)
    return (line if is_unicode(line) else json.dumps(value)) + "\n"


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode `text`; it cannot encode half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
