"""Checksums of the files of an embedded collection, which the engine itself has none of."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from tilefold._files import sync
from tilefold.retrieval._files import read_json_object, write_json_object
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import REMEDY

CHECKSUMS = "checksums.json"
_BLOCK = 1 << 16
_ZEROS = bytes(_BLOCK)
_THREADS = min(8, os.cpu_count() or 1)


class Checksums:
    """Sizes and SHA-256 of all files of a shard, in a file beside it, which is there while the shard is as it says.

    The file is removed before the shard is changed, and written when that is over: a process that is killed in between
    leaves none. Opening and closing a shard changes no bytes but the order of members in its JSON files, of which the
    sorted text counts.

    Args:
        shard: the folder of the engine.
        engine: its version; what another one makes of a shard when it opens it is not known.
    """

    def __init__(self, shard: Path, engine: str) -> None:
        self._shard, self._file, self._engine = shard, shard.parent / CHECKSUMS, engine
        self._sizes: dict[str, int | None] | None = None  # of the files that the checksums are of

    @property
    def kept(self) -> bool:
        """Whether the file is there."""
        return self._sizes is not None

    def read(self, *, verify: bool) -> None:
        """Take the checksums that are there, if any, and compare them.

        Raises:
            DataError: a file of the shard, or that of the checksums, is damaged.
        """
        if not self._file.is_file():
            return
        found = read_json_object(self._file, REMEDY)
        files = found.get("files")
        if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
            raise DataError(f"{self._file}: expected the checksums of files, got others. {REMEDY}")
        if verify:
            self._compare(files)
        self._sizes = {name: entry.get("bytes") for name, entry in files.items()}
        if found.get("engine") != self._engine:
            self.remove()

    def _compare(self, files: dict[str, Any]) -> None:
        there = _entries(self._shard)
        damaged = sorted(name for name, entry in files.items() if there.get(name) != entry)
        if damaged:
            first = self._shard / damaged[0]
            what = "its checksum is not the one" if damaged[0] in there else "it is gone, and is"
            raise DataError(
                f"{first}: damaged; {what} in {self._file.name} ({len(damaged)} of {len(files)} files). {REMEDY}"
            )

    def confirm(self) -> None:
        """Remove the checksums where the engine has made, removed or resized a file since."""
        if self.kept and self._sizes != {name: _size(file) for name, file in _files(self._shard)}:
            self.remove()

    def remove(self) -> None:
        """Say, before the shard changes, that nothing is known of its files."""
        self._sizes = None
        with suppress(FileNotFoundError):
            self._file.unlink()
            sync(self._file.parent)  # else they could be there again after a loss of power

    def write(self) -> None:
        """Take the checksums of a shard that is closed."""
        files = _entries(self._shard)
        write_json_object(self._file, {"engine": self._engine, "files": files}, durable=True)
        self._sizes = {name: entry["bytes"] for name, entry in files.items()}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield file.relative_to(folder).as_posix(), file


def _size(file: Path) -> int | None:
    return None if file.suffix == ".json" else file.stat().st_size


def _entries(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> size and checksum of each file below a folder."""
    files = dict(_files(folder))
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(_sha256, files.values()))
    except RuntimeError:  # the interpreter ends, and starts no threads
        digests = list(map(_sha256, files.values()))
    return {
        name: {"bytes": _size(file), "sha256": digest}
        for (name, file), digest in zip(files.items(), digests, strict=True)
    }


def _sha256(file: Path) -> str:
    """Of a JSON file the text with sorted members; of others the blocks that are not zero, and where they are."""
    if file.suffix == ".json":
        content = file.read_bytes()
        with suppress(ValueError, RecursionError):
            content = json.dumps(json.loads(content), sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest()
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        at = _next_data(stream, 0)
        while at is not None and (block := stream.read(_BLOCK)):
            if block != _ZEROS[: len(block)]:
                digest.update(at.to_bytes(8, "big") + block)
            at = _next_data(stream, at + len(block))
    return digest.hexdigest()


def _next_data(stream: BinaryIO, at: int) -> int | None:
    """Go to the next block that holds something, `at` or later; the engine's files are large and mostly holes."""
    try:
        at = max(at, os.lseek(stream.fileno(), at, os.SEEK_DATA) // _BLOCK * _BLOCK)
    except AttributeError:  # another system: all is read
        pass
    except OSError as error:  # none, or a file system that does not know
        if error.errno == errno.ENXIO:
            return None
    return stream.seek(at)
