"""Documents that stay in their file, JSON lines or a table of ids and texts: where each line begins is kept in a cache.

An 8-byte key of each id, sorted, and 12 bytes for its line: 8.8 million passages take 250 MB, mapped into memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import weakref
from abc import abstractmethod
from array import array
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tilefold._files import InUseError, atomic_directory, read_json, write_json
from tilefold.retrieval._files import check_text_ids
from tilefold.retrieval._tables import numbered_lines, text_columns
from tilefold.retrieval.collection import Document, document_of_row, load_documents
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.provenance import TextsDigest

__all__ = ["StoredContents", "StoredDocuments", "id_key", "stored_documents"]

SETTLED_SECONDS = 2.0  # a file that was written just now may be written again within the resolution of its times
_ARRAYS, _FACTS = ("keys.npy", "order.npy", "starts.npy"), "facts.json"
_LAST_READ = 1 << 14  # texts that are kept: a sampler compares those of rows that are read next

V = TypeVar("V")
_logger = logging.getLogger(__name__)


class _Streamed(Mapping[str, V]):
    """A mapping that is read from beginning to end where all of it is asked for."""

    @abstractmethod
    def pairs(self) -> Iterator[tuple[str, V]]: ...

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.pairs())

    def items(self) -> ItemsView[str, V]:
        return _Items(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)


class _Items(ItemsView[str, V]):
    _mapping: _Streamed[V]

    def __iter__(self) -> Iterator[tuple[str, V]]:
        return self._mapping.pairs()


class _Values(ValuesView[V]):
    _mapping: _Streamed[V]

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._mapping.pairs())


class StoredDocuments(_Streamed[Document]):
    """Document id -> :class:`Document`, read from its line when asked for; ``DataError`` once the file has changed.

    Attributes:
        path: the file.
        sha256: :func:`tilefold.retrieval.texts_digest` of all contents.
    """

    def __init__(self, path: Path, state: list[int], sha256: str, *arrays: npt.NDArray[Any]) -> None:
        self.path, self.state, self.sha256, self.arrays = path, state, sha256, arrays
        self._keys, self._order, self._starts = (
            arrays  # sorted [N]; the place of each [N]; of lines, and the end [N + 1]
        )

    def at(self, place: int) -> Document:
        """The document of a place in the file, from 0."""
        return _document(self.line(place), self.path)

    def line(self, place: int) -> str:
        """Its line."""
        start, stop = int(self._starts[place]), int(self._starts[place + 1])
        return self._bytes(start, stop).decode(_encoding(start)).partition("\n")[0]

    def _bytes(self, start: int, stop: int) -> bytes:
        self.check()
        if hasattr(os, "pread"):
            return os.pread(self._opened, stop - start, start)
        with self.path.open("rb") as stream:  # on Windows
            stream.seek(start)
            return stream.read(stop - start)

    @cached_property
    def _opened(self) -> int:
        descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opened"}

    def check(self) -> None:
        """Raise a ``DataError`` if the file is not the one that was opened."""
        if _state(self.path) != self.state:
            raise DataError(f"{self.path}: has changed since it was opened. Start the command again.")

    def places(self, names: Iterable[str]) -> npt.NDArray[np.int64]:
        """The place of each of n names, -1 for an unknown one, int64 ``[n]``; one in 2^40 unknown ones has a place."""
        names = names if self._distinct else list(names)
        keys = np.fromiter(map(id_key, names), np.uint64)
        sorted_first = np.argsort(keys)  # keys that are near each other are in one page
        at = np.empty(len(keys), np.int64)
        at[sorted_first] = np.searchsorted(self._keys, keys[sorted_first])
        at[at == len(self._keys)] = 0
        found = np.where(self._keys[at] == keys, self._order[at], np.int64(-1))
        if not self._distinct:
            found[:] = [-1 if (place := self._place(name)) is None else place for name in names]
        return found

    @cached_property
    def _distinct(self) -> bool:
        """Whether no two ids have one key."""
        return not bool((self._keys[1:] == self._keys[:-1]).any())

    def _place(self, name: str) -> int | None:
        key = np.uint64(id_key(name))
        at = int(np.searchsorted(self._keys, key))
        while at < len(self._keys) and self._keys[at] == key:
            if self.at(place := int(self._order[at])).id == name:
                return place
            at += 1
        return None

    def __getitem__(self, name: str) -> Document:
        place = self._place(name) if isinstance(name, str) else None
        if place is None:
            raise KeyError(name)
        return self.at(place)

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not self._distinct:
            return isinstance(name, str) and self._place(name) is not None
        at = int(self._keys.searchsorted(key := np.uint64(id_key(name))))
        return at < len(self._keys) and bool(self._keys[at] == key)

    def __len__(self) -> int:
        return len(self._keys)

    def pairs(self) -> Iterator[tuple[str, Document]]:
        """All documents with their ids, in the order of the file."""
        self.check()
        for _, text in _lines(self.path):
            document = _document(text, self.path)
            yield document.id, document

    def contents(self) -> StoredContents:
        """Document id -> contents."""
        return StoredContents(self)


class StoredContents(_Streamed[str]):
    """Document id -> contents of :class:`StoredDocuments`, whose digest is `sha256`."""

    def __init__(self, documents: StoredDocuments) -> None:
        self.documents, self.sha256 = documents, documents.sha256

    def __getitem__(self, name: str) -> str:
        return self.documents[name].contents

    def __contains__(self, name: object) -> bool:
        return name in self.documents

    def __len__(self) -> int:
        return len(self.documents)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """All contents with their ids, in the order of the file."""
        self.documents.check()
        return (_contents(text, self.documents.path) for _, text in _lines(self.documents.path))

    @cached_property
    def at(self) -> Callable[[int], str]:
        """The contents of a place in the file; those that were read last are kept."""
        documents = self.documents
        return lru_cache(_LAST_READ)(lambda place: _contents(documents.line(place), documents.path)[1])


def stored_documents(file: Path, cache: Path) -> StoredDocuments | None:
    """The documents of JSON lines or of lines of an id, a tab and a text; None for a file of another kind.

    What reading it once finds out is kept in `cache` with the size, times and inode of the file, and is used until one
    of those changes. Errors are those of :func:`tilefold.retrieval.load_documents`.
    """
    if not _is_stored(file):
        return None
    state = _state(file)
    folder = cache / "documents" / hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:32]
    found = _cached(folder, file, state)
    if found is None:
        found = _indexed(file, state)
        _keep(folder, found)
    return found


def _is_stored(file: Path) -> bool:
    if file.name.endswith(".jsonl"):
        return True
    if not file.name.endswith((".tsv", ".txt")):
        return False
    first = next((text for _, text in numbered_lines(file) if text.strip()), "")
    return not text_columns(first.rstrip("\r\n").split("\t"), f"{file}:1")


def _indexed(file: Path, state: list[int]) -> StoredDocuments:
    keys, starts, digest = array("Q"), array("q"), TextsDigest()
    try:
        for start, text in _lines(file):
            name, contents = _contents(text, file)
            if "\0" in name:
                check_text_ids("documents", [name])
            keys.append(id_key(name))
            digest.add(name, contents)
            starts.append(start)
    except (ValueError, RecursionError, UnicodeError):
        load_documents(file)  # says which line it is
        raise
    found = np.frombuffer(keys, np.uint64)
    order = np.argsort(found, kind="stable")
    if not len(found) or bool((np.diff(found[order]) == 0).any()):
        load_documents(file)  # raises an error, but for two ids of one key
    ends = np.append(np.frombuffer(starts, np.int64), state[0])
    return StoredDocuments(file, state, digest.hexdigest(), found[order], order.astype(np.int32), ends)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The bytes before each line that is not blank, and its text."""
    start = 0
    with file.open("rb") as stream:
        for line in stream:
            text = line.decode(_encoding(start))
            if text.strip():
                yield start, text
            start += len(line)


def _encoding(start: int) -> str:
    return "utf-8" if start else "utf-8-sig"


def _document(text: str, file: Path) -> Document:
    """The document of a line."""
    row = json.loads(text) if file.name.endswith(".jsonl") else dict(zip(("_id", "text"), _pair(text), strict=True))
    return document_of_row(row, str(file), ())


def _contents(text: str, file: Path) -> tuple[str, str]:
    """Id and contents of the document of a line."""
    if not file.name.endswith(".jsonl"):
        return _pair(text)
    document = _document(text, file)
    return document.id, document.contents


def _pair(text: str) -> tuple[str, str]:
    name, tab, rest = text.rstrip("\r\n").partition("\t")
    if not (name and tab):
        raise DataError(f"expected an id, a tab and a text, got {text!r}.")
    return name, rest


def _state(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _cached(folder: Path, file: Path, state: list[int]) -> StoredDocuments | None:
    facts = read_json(folder / _FACTS) or {}
    if facts.get("state") != state or not isinstance(facts.get("texts_sha256"), str):
        return None
    try:
        arrays = [np.asarray(np.load(folder / name, mmap_mode="r", allow_pickle=False)) for name in _ARRAYS]
    except (OSError, ValueError, EOFError):
        return None
    count = facts.get("documents")
    if not isinstance(count, int) or [found.shape for found in arrays] != [(count,), (count,), (count + 1,)]:
        return None
    return StoredDocuments(file, state, facts["texts_sha256"], *arrays)


def _keep(folder: Path, found: StoredDocuments) -> None:
    """Note where the documents lie, unless the file has changed meanwhile, or may change unnoticed."""
    written = max(found.state[1], found.state[2]) / 1e9
    if _state(found.path) != found.state or time.time() - written < SETTLED_SECONDS:
        return
    try:
        with atomic_directory(folder, own_names=(*_ARRAYS, _FACTS)) as made:
            for name, values in zip(_ARRAYS, found.arrays, strict=True):
                np.save(made / name, values, allow_pickle=False)
            facts = {"state": found.state, "documents": len(found), "texts_sha256": found.sha256}
            write_json(made / _FACTS, facts)
    except (OSError, InUseError) as error:
        _logger.warning("where the documents of %s lie could not be kept: %s", found.path, error)


def id_key(name: str) -> int:
    """64 bits of an id, which another one shares once in 2^64."""
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
