"""JSON with checksums, optional packages, and checks of ids, which are strings everywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from tilefold._internal.files import sha256_file, write_json
from tilefold.retrieval.errors import DataError, MissingPackageError

CHECKSUM = "checksum"  # member of a JSON object with the checksum of the other members
Json = dict[str, Any]  # a JSON object


def require(module: str, package: str, purpose: str, extra: str = "retrieval") -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: the module.
        package: name of its distribution.
        purpose: what needs it, for the error.
        extra: extra of tilefold that installs it; empty if there is none.

    Raises:
        MissingPackageError: if it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        alternative = f" or `pip install 'tilefold[{extra}]'`" if extra else ""
        raise MissingPackageError(
            f"{purpose} needs {package}, which cannot be imported ({error}). Install it with "
            f"`pip install {package}`{alternative}.",
        ) from error


def arrow(purpose: str) -> tuple[ModuleType, ModuleType]:
    """Import ``pyarrow`` and ``pyarrow.parquet``."""
    return require("pyarrow", "pyarrow", purpose), require("pyarrow.parquet", "pyarrow", purpose)


def write_json_object(path: Path, value: Mapping[str, object], *, durable: bool = False) -> None:
    """Write a JSON object with a checksum of itself, which :func:`read_json_object` compares."""
    write_json(path, {**value, CHECKSUM: _checksum(value)}, durable=durable)


def _checksum(value: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


# A file that only folders of one kind hold -> that kind, and what to do with such a folder.
_KINDS_OF_FOLDERS = {
    "index.json": "an index, which tilefold search reads (--index)",
    "manifest.json": (
        "a folder of vectors, of which tilefold index makes an index (--vectors, --tokens)"
    ),
    "modules.json": "a model, with which tilefold encode makes vectors (--model)",
    "config.json": "a model, with which tilefold encode makes vectors (--model)",
    "corpus.jsonl": "a collection, which tilefold encode and index read (--data)",
}


def check_folder(folder: Path, manifest: str, expected: str) -> None:
    """Raise ``FileNotFoundError`` for a folder without its manifest.

    The error says what is at the path instead.

    Args:
        folder: the folder to be read.
        manifest: name of the file that describes such a folder.
        expected: what the folder should be, and what writes it.
    """
    if (folder / manifest).is_file():
        return
    if not folder.exists():
        got = "nothing: there is no such file or folder"
    elif not folder.is_dir():
        got = "a file"
    else:
        kinds = [kind for name, kind in _KINDS_OF_FOLDERS.items() if (folder / name).is_file()]
        got = kinds[0] if kinds else f"a folder without {manifest}"
    raise FileNotFoundError(f"{folder}: expected {expected}, got {got}.")


def read_json_object(path: Path, remedy: str) -> Json:
    """Read a JSON object, and compare it with the checksum that it may contain.

    Args:
        path: the file.
        remedy: last sentence of errors.

    Returns:
        The object without its checksum.

    Raises:
        FileNotFoundError: if there is no such file.
        DataError: for other contents, or another checksum.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path}: no such file. {remedy}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested without end
        raise DataError(
            f"{path}: expected a JSON object, got malformed JSON ({error}). {remedy}",
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}. {remedy}")
    checksum = value.pop(CHECKSUM, None)
    if checksum is not None and checksum != _checksum(value):
        raise DataError(
            f"{path}: damaged, or edited: its {CHECKSUM} is not that of the rest. {remedy} After "
            f"an edit of your own, remove its {CHECKSUM!r}.",
        )
    return value


def listed_file(folder: Path, name: str, digest: str | None, manifest: str, remedy: str) -> Path:
    """Return the path of a file that a manifest lists.

    Args:
        folder: the folder.
        name: name of the file in it.
        digest: SHA-256 of the file; None to leave it unread.
        manifest: what lists the file, for errors.
        remedy: last sentence of errors.

    Raises:
        FileNotFoundError: if there is no such file in the folder.
        DataError: if its SHA-256 differs.
    """
    file = folder / name
    # A name with a slash would lead out of the folder.
    if Path(name).name != name or not file.is_file():
        raise FileNotFoundError(
            f"{file}: listed in {manifest}, but there is no such file. {remedy}",
        )
    if digest is not None and sha256_file(file) != digest:
        raise DataError(f"{file}: damaged; its checksum is not the one in {manifest}. {remedy}")
    return file


def json_line(value: object) -> str:
    """Return a value as a line of JSON, with escapes only for texts that UTF-8 cannot encode."""
    line = json.dumps(value, ensure_ascii=False)
    return (line if is_unicode(line) else json.dumps(value)) + "\n"


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode `text`.

    It cannot encode half a surrogate pair.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_text_ids(argument: str, ids: Collection[object]) -> None:
    """Check that ids are strings that UTF-8 can encode, without zero bytes.

    Libraries in C would read an id with a zero byte as a shorter one.

    Args:
        argument: its name, for the error.
        ids: the ids.

    Raises:
        TypeError: for an id that is not a string.
        DataError: for a string that cannot be an id.
    """
    try:
        joined = "".join(ids)  # type: ignore[arg-type]
    except TypeError:
        invalid = next(name for name in ids if not isinstance(name, str))
        raise not_a_string_error(argument, invalid) from None
    if "\0" in joined or not is_unicode(joined):
        invalid = next(name for name in ids if "\0" in str(name) or not is_unicode(str(name)))
        raise DataError(
            f"{argument}: expected ids without zero bytes that UTF-8 can hold, got {invalid!r}. "
            "Rename it.",
        )


def not_a_string_error(argument: str, name: object) -> TypeError:
    """Return the error for an id that is not a string."""
    return TypeError(
        f"{argument}: expected strings as ids, as they are in files and indexes, got {name!r} "
        f"({type(name).__name__}). Turn ids into strings: str({name!r}).",
    )
