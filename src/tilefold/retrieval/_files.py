"""JSON that is checked, and packages that may be missing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tilefold._files import write_json
from tilefold.retrieval.errors import DataError, MissingPackageError

CHECKSUM = "checksum"  # of the other members of a JSON object, in it


def require(module: str, package: str, purpose: str, extra: str = "retrieval") -> Any:
    """Import an optional `module`, or say which `package` to install and why it is needed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"{purpose} needs the package {package}, which could not be imported ({error}). "
            f"Install it with `pip install {package}` or `pip install 'tilefold[{extra}]'`."
        ) from error


def write_json_object(path: Path, value: Mapping[str, Any], *, durable: bool = False) -> None:
    """Write a JSON object with a checksum of itself, which :func:`read_json_object` compares."""
    write_json(path, {**value, CHECKSUM: _checksum(value)}, durable=durable)


def _checksum(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def read_json_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in `path`; FileNotFoundError or DataError otherwise, ending in `remedy`.

    Its checksum is compared and left out; those of earlier versions have none.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file. {remedy}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or nested without end
        raise DataError(f"{path}: expected a JSON object, got malformed JSON ({error}). {remedy}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, got {type(value).__name__}. {remedy}")
    checksum = value.pop(CHECKSUM, None)
    if checksum is not None and checksum != _checksum(value):
        raise DataError(
            f"{path}: damaged, or edited: its {CHECKSUM} is not that of the rest. {remedy} "
            f"After an edit of your own, remove its {CHECKSUM!r}."
        )
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
