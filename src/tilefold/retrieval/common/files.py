"""JSON that is checked, packages that may be missing, and ids, which are text in every file, index
and run.
"""

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

CHECKSUM = "checksum"  # of the other members of a JSON object, in it
Json = dict[str, Any]  # a JSON object


def require(module: str, package: str, purpose: str, extra: str = "retrieval") -> ModuleType:
    """Import an optional `module`, or say which `package` to install, what `extra` (if any) has it,
    and why.
    """
    try:
        return import_module(module)
    except ImportError as error:
        also = f" or `pip install 'tilefold[{extra}]'`" if extra else ""
        why = f"{purpose} needs {package}, which cannot be imported ({error})."
        raise MissingPackageError(
            f"{why} Install it with `pip install {package}`{also}.",
        ) from error


def arrow(purpose: str) -> tuple[ModuleType, ModuleType]:
    """``pyarrow`` and ``pyarrow.parquet``."""
    return require("pyarrow", "pyarrow", purpose), require("pyarrow.parquet", "pyarrow", purpose)


def write_json_object(path: Path, value: Mapping[str, object], *, durable: bool = False) -> None:
    """Write a JSON object with a checksum of itself, which :func:`read_json_object` compares."""
    write_json(path, {**value, CHECKSUM: _checksum(value)}, durable=durable)


def _checksum(value: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


# A file that only folders of one kind hold -> that kind, and what to do with such a folder.
_KINDS_OF_FOLDERS = {
    "index.json": "an index, which tilefold search reads (--index)",
    "manifest.json": "a folder of vectors, of which tilefold index makes an index (--vectors, --tokens)",
    "modules.json": "a model, with which tilefold encode makes vectors (--model)",
    "config.json": "a model, with which tilefold encode makes vectors (--model)",
    "corpus.jsonl": "a collection, which tilefold encode and index read (--data)",
}


def check_folder(folder: Path, manifest: str, expected: str) -> None:
    """Raise FileNotFoundError, which says what is there instead, unless a folder has its manifest.

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
    """The JSON object in `path`, whose checksum is compared and left out; else an error that ends
    in `remedy`.
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
    if (checksum := value.pop(CHECKSUM, None)) is not None and checksum != _checksum(value):
        said = f"damaged, or edited: its {CHECKSUM} is not that of the rest. {remedy}"
        raise DataError(f"{path}: {said} After an edit of your own, remove its {CHECKSUM!r}.")
    return value


def listed_file(folder: Path, name: str, digest: str | None, manifest: str, remedy: str) -> Path:
    """The file of a `name` that a manifest lists; an error where it is not there, or has not that
    SHA-256, if given.
    """
    file = folder / name
    if Path(name).name != name or not file.is_file():
        raise FileNotFoundError(
            f"{file}: listed in {manifest}, but there is no such file. {remedy}",
        )
    if digest is not None and sha256_file(file) != digest:
        raise DataError(f"{file}: damaged; its checksum is not the one in {manifest}. {remedy}")
    return file


def json_line(value: object) -> str:
    """`value` as a line of JSON in UTF-8; escapes are used only where a text has half a surrogate
    pair.
    """
    line = json.dumps(value, ensure_ascii=False)
    return (line if is_unicode(line) else json.dumps(value)) + "\n"


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode `text`; it cannot encode half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def check_text_ids(what: str, ids: Collection[object]) -> None:
    """Raise an error for the first of the `ids` of `what` that is no text, or that C would read as
    another one.
    """
    try:
        whole = "".join(ids)  # type: ignore[arg-type]
    except TypeError:
        raise not_a_string_error(
            what, next(name for name in ids if not isinstance(name, str))
        ) from None
    if "\0" in whole or not is_unicode(whole):
        wrong = next(name for name in ids if "\0" in str(name) or not is_unicode(str(name)))
        raise DataError(
            f"{what}: expected ids without zero bytes that UTF-8 can hold, got {wrong!r}. Rename it.",
        )


def not_a_string_error(what: str, name: object) -> TypeError:
    """Error for an id that is not a string."""
    said = f"expected strings as ids, as they are in files and indexes, got {name!r} ({type(name).__name__})"
    return TypeError(f"{what}: {said}. Turn ids into strings: str({name!r}).")
