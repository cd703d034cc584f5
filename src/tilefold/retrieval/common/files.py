"""JSON with checksums, optional packages, and checks of ids, which are strings everywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tilefold._internal.files import sha256_file, write_json
from tilefold.retrieval.errors import DataError, MissingPackageError

CHECKSUM = "checksum"  # member of a JSON object with the checksum of the other members
Json = dict[str, Any]  # a JSON object


def require(module: str, package: str, purpose: str, extra: str = "retrieval") -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: name of the module.
        package: name of the distribution that provides it.
        purpose: the feature that needs the package, for the error message.
        extra: tilefold's extra that installs the package; empty if there is none.

    Raises:
        MissingPackageError: if the module cannot be imported.
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
    """Import ``pyarrow`` and ``pyarrow.parquet``.

    Args:
        purpose: the feature that needs them, for the error message.
    """
    return require("pyarrow", "pyarrow", purpose), require("pyarrow.parquet", "pyarrow", purpose)


def write_json_object(path: Path, value: Mapping[str, object], *, durable: bool = False) -> None:
    """Write a JSON object with a checksum, which :func:`read_json_object` verifies."""
    write_json(path, {**value, CHECKSUM: _checksum(value)}, durable=durable)


def _checksum(value: Mapping[str, object]) -> str:
    """Return the SHA-256 of a JSON object."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


# Name of a file -> the kind of folder that has such a file, and the option that reads the folder.
_KINDS_OF_FOLDERS = {
    "index.json": "an index, which tilefold search reads (--index)",
    "manifest.json": (
        "a folder of vectors; to search them, make an index: tilefold index --vectors, or --tokens "
        "for token vectors"
    ),
    "modules.json": "a model, with which tilefold encode makes vectors (--model)",
    "config.json": "a model, with which tilefold encode makes vectors (--model)",
    "corpus.jsonl": "a collection, which tilefold encode and index read (--data)",
}


def check_folder(folder: Path, manifest: str, expected: str) -> None:
    """Check that a folder is of the expected kind, by its manifest.

    Args:
        folder: the folder to be read.
        manifest: name of the file that describes a folder of this kind.
        expected: the kind of folder and the command that writes it, for the error message.

    Raises:
        FileNotFoundError: if the folder has no manifest. The message says what is at the path
            instead.
    """
    if (folder / manifest).is_file():
        return
    if not folder.exists():
        got = "nothing: there is no such file or folder"
    elif not folder.is_dir():
        got = "a file"
    else:
        got = kind_of_folder(folder) or f"a folder without {manifest}"
    raise FileNotFoundError(f"{folder}: expected {expected}, got {got}.")


def kind_of_folder(folder: Path) -> str | None:
    """Return what a folder of tilefold is, and what reads it, for an error message.

    Args:
        folder: an existing folder.

    Returns:
        Words such as ``"an index, which tilefold search reads (--index)"``; None for a folder of
        other files.
    """
    kinds = (kind for name, kind in _KINDS_OF_FOLDERS.items() if (folder / name).is_file())
    return next(kinds, None)


def read_json_object(path: Path, remedy: str) -> Json:
    """Read a JSON object, and verify its checksum if it has one.

    Args:
        path: path of the file.
        remedy: a sentence that tells the user what to do, for the error message.

    Returns:
        The object without its checksum.

    Raises:
        FileNotFoundError: if there is no such file.
        DataError: if the file has no JSON object, or the checksum does not match.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path}: no such file. {remedy}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise DataError(
            f"{path}: expected a JSON object, got malformed JSON ({error}). {remedy}",
        ) from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}. {remedy}")
    checksum = value.pop(CHECKSUM, None)  # a file that was written by hand has none
    if checksum is not None and checksum != _checksum(value):
        raise DataError(
            f"{path}: the {CHECKSUM} does not match: the file is damaged or was edited. {remedy} "
            f"If you edited the file, remove its {CHECKSUM!r}.",
        )
    return value


def listed_file(folder: Path, name: str, digest: str | None, listed_in: str, remedy: str) -> Path:
    """Return the path of a file that a manifest lists, after checking the file.

    Args:
        folder: the folder of the file.
        name: name of the file.
        digest: SHA-256 that the file should have; None skips this check, which reads the file.
        listed_in: the manifest, for the error message.
        remedy: a sentence that tells the user what to do, for the error message.

    Raises:
        FileNotFoundError: if there is no such file in the folder.
        DataError: if the file has another SHA-256.
    """
    file = folder / name
    # A name with a slash could point outside the folder.
    if Path(name).name != name or not file.is_file():
        raise FileNotFoundError(
            f"{file}: listed in {listed_in}, but there is no such file. {remedy}",
        )
    if digest is not None and sha256_file(file) != digest:
        raise DataError(f"{file}: damaged; its checksum is not the one in {listed_in}. {remedy}")
    return file


def json_line(value: object) -> str:
    """Serialize a value to a line of JSON, escaping only texts that UTF-8 cannot encode."""
    line = json.dumps(value, ensure_ascii=False)
    return (line if is_unicode(line) else json.dumps(value)) + "\n"


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode a text.

    A Python string may hold half a surrogate pair (UTF-16), which UTF-8 cannot encode.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class FileIdentity(NamedTuple):
    """Numbers by which a file differs from the files that replace it.

    Attributes:
        device: device number of the file system.
        inode: inode number.
        modified_ns: time of the last change in nanoseconds.
        size: number of bytes.
    """

    device: int
    inode: int
    modified_ns: int
    size: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Return the identity of a file."""
        status = path.stat()
        return cls(status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)


def check_text_ids(argument: str, ids: Collection[object]) -> None:
    """Check that ids are strings that UTF-8 can encode, without zero bytes.

    C libraries end a string at the first zero byte, and so would confuse ids.

    Args:
        argument: name of the argument, for the error message.
        ids: the ids.

    Raises:
        TypeError: if an id is not a string.
        DataError: if an id has a zero byte, or UTF-8 cannot encode it.
    """
    # One check of all ids together is faster than a check of each id.
    try:
        joined = "".join(ids)  # type: ignore[arg-type]
    except TypeError:  # an id is not a string
        invalid = next(name for name in ids if not isinstance(name, str))
        raise not_a_string_error(argument, invalid) from None
    if "\0" in joined or not is_unicode(joined):
        invalid = next(name for name in ids if "\0" in str(name) or not is_unicode(str(name)))
        raise DataError(
            f"{argument}: expected ids that UTF-8 can encode, without zero bytes, got "
            f"{invalid!r}. Rename it.",
        )


def not_a_string_error(argument: str, name: object) -> TypeError:
    """Return the error for an id that is not a string."""
    return TypeError(
        f"{argument}: expected strings as ids, as they are in files and indexes, got {name!r} "
        f"({type(name).__name__}). Turn ids into strings: str({name!r}).",
    )
