"""Documents that stay in their file, JSON lines or a table of ids and texts: where each line begins
is kept in a cache.

8-byte keys of an id, sorted, and of a text, 12 bytes for a line: 8.8 million passages take 250 MB,
mapped into memory.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tilefold._internal.files import InUseError, atomic_directory, read_json, write_json
from tilefold.retrieval.common.provenance import TextsDigest
from tilefold.retrieval.data.collection import Document, load_documents
from tilefold.retrieval.data.document_lines import (
    all_lines,
    contents_of_line,
    document_of_line,
    encoding,
    id_key,
)
from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.data.tables import USUAL_FIELDS, numbered_lines, text_columns
from tilefold.retrieval.errors import DataError

__all__ = ["LazyDocuments", "id_key", "open_lazy_documents"]

SETTLED_SECONDS = (
    2.0  # a file that was written just now may be written again within the resolution of its times
)
_ARRAYS, _FACTS = ("keys.npy", "order.npy", "starts.npy", "texts.npy"), "facts.json"
_KEYS = 2  # which :func:`id_key` the arrays are of

V = TypeVar("V")
Parse = Callable[..., tuple[str, V]]  # a line, its file, and names of fields -> id and value
_logger = logging.getLogger(__name__)


class LazyDocuments(Mapping[str, V]):
    """Document id -> what `parse` makes of its line, read when asked for; ``DataError`` once the
    file has changed.

    Attributes:
        path: the file.
        sha256: :func:`tilefold.retrieval.texts_digest` of all contents.
        text_keys: :func:`id_key` of the contents of each place ``[N]``.
    """

    def __init__(
        self,
        path: Path,
        state: list[int],
        sha256: str,
        arrays: Sequence[npt.NDArray[Any]],
        parse: Parse[V],
        fields: DocumentFields = USUAL_FIELDS,
    ) -> None:
        self.path, self.state, self.sha256, self.arrays = path, state, sha256, arrays
        # sorted [N]; the place of each [N]; where each line begins, and the end of the file [N + 1]
        self._keys, self._order, self._starts, self.text_keys = arrays
        self._fields = fields
        self._parse: Callable[[str, str], tuple[str, V]] = functools.partial(parse, fields=fields)

    def contents(self) -> LazyDocuments[str]:
        """Document id -> contents."""
        return LazyDocuments(
            self.path,
            self.state,
            self.sha256,
            self.arrays,
            contents_of_line,
            self._fields,
        )

    def at(self, places: Sequence[int]) -> list[V]:
        """The values of places in the file, from 0."""
        return [value for _, value in self.pairs_at(places)]

    def sizes(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Bytes of the lines of n places, ``[n]``; none is read."""
        return np.asarray(self._starts[places + 1] - self._starts[places])

    def pairs_at(self, places: Sequence[int]) -> list[tuple[str, V]]:
        """Ids and values of places in the file, from 0."""
        self.check()
        chosen, found, name = np.asarray(places), [], str(self.path)
        with self.path.open("rb", buffering=0) as stream:
            for start, stop in zip(
                self._starts[chosen].tolist(),
                self._starts[chosen + 1].tolist(),
                strict=True,
            ):
                stream.seek(start)
                line = stream.read(stop - start).decode(encoding(start))
                found.append(self._parse(line.partition("\n")[0], name))
        return found

    def check(self) -> None:
        """Raise a ``DataError`` if the file is not the one that was opened."""
        try:
            now = _state(self.path)
        except FileNotFoundError:
            now = []
        if (
            now[:2] + now[3:] != self.state[:2] + self.state[3:]
        ):  # a new link or owner changes the third alone
            raise DataError(
                f"{self.path}: has changed since it was opened, or is gone. Start the command again.",
            )

    def places(self, names: Iterable[str]) -> npt.NDArray[np.int64]:
        """The place of each of n names, -1 for an unknown one, int64 ``[n]``; one in 2^40 unknown
        ones has a place.
        """
        names = names if self._distinct else list(names)
        keys = np.fromiter(map(id_key, names), np.uint64)
        sorted_first = np.argsort(keys)  # keys that are near each other are in one page
        at = np.empty(len(keys), np.int64)
        at[sorted_first] = np.searchsorted(self._keys, keys[sorted_first])
        at[at == len(self._keys)] = 0
        found = np.where(self._keys[at] == keys, self._order[at], -1).astype(np.int64)
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
            if self.pairs_at([place := int(self._order[at])])[0][0] == name:
                return place
            at += 1
        return None

    def __getitem__(self, name: str) -> V:
        place = self._place(name) if isinstance(name, str) else None
        if place is None:
            raise KeyError(name)
        return self.at([place])[0]

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str) or not self._distinct:
            return isinstance(name, str) and self._place(name) is not None
        at = int(self._keys.searchsorted(key := np.uint64(id_key(name))))
        return at < len(self._keys) and bool(self._keys[at] == key)

    def __len__(self) -> int:
        return len(self._keys)

    def pairs(self) -> Iterator[tuple[str, V]]:
        """All ids and values, in the order of the file, which is read once."""
        self.check()
        return (self._parse(text, str(self.path)) for _, text in _lines(self.path))

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.pairs())

    def items(self) -> ItemsView[str, V]:
        return _Items(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)


class _Items(ItemsView[str, V]):
    _mapping: LazyDocuments[V]

    def __iter__(self) -> Iterator[tuple[str, V]]:
        return self._mapping.pairs()


class _Values(ValuesView[V]):
    _mapping: LazyDocuments[V]

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._mapping.pairs())


def open_lazy_documents(
    file: Path,
    cache: Path,
    fields: DocumentFields = USUAL_FIELDS,
) -> LazyDocuments[Document] | None:
    """The documents of JSON lines or of lines of an id, a tab and a text; None for a file of
    another kind.

    What reading it once finds out is kept in `cache` with the size, times and inode of the file,
    and is used until one of those changes, for the same names of `fields`. Errors are those of
    :func:`tilefold.retrieval.load_documents`.
    """
    if not _is_stored(file, fields):
        return None
    state = _state(file)
    key = os.fsencode(file.resolve())
    if fields != USUAL_FIELDS:
        key += b"\0" + json.dumps(fields.names).encode()
    folder = cache / "stored" / hashlib.sha256(key).hexdigest()[:32]
    if (found := _cached(folder, file, state, fields)) is None:
        found = _indexed(file, state, fields)
        _keep(folder, found)
    return found


def _is_stored(file: Path, fields: DocumentFields) -> bool:
    if file.name.endswith(".jsonl"):
        return True
    if not file.name.endswith((".tsv", ".txt")) or fields != USUAL_FIELDS:
        return False
    first = next((text for _, text in numbered_lines(file) if text.strip()), "")
    return not text_columns(first.rstrip("\r\n").split("\t"), f"{file}:1")


def _indexed(file: Path, state: list[int], fields: DocumentFields) -> LazyDocuments[Document]:
    found, digest, told = [np.empty((3, 0), np.uint64)], TextsDigest(), None
    try:
        with ThreadPoolExecutor(
            1,
        ) as beside:  # a digest of many bytes leaves the interpreter to others
            for numbers, encoded in all_lines(file, state[0], fields):
                found.append(numbers)
                if told:
                    told.result()
                told = beside.submit(digest.add_encoded, encoded)
            if told:
                told.result()
    except (ValueError, RecursionError, UnicodeError):
        load_documents(file, fields)  # says which line it is
        raise
    starts, keys, texts = np.concatenate(found, axis=1)
    order = np.argsort(keys, kind="stable")
    if not len(keys) or bool((np.diff(keys[order]) == 0).any()):
        load_documents(file, fields)  # raises an error, but for two ids of one key
    arrays = (
        keys[order],
        order.astype(np.int32),
        np.append(starts.astype(np.int64), state[0]),
        texts,
    )
    return LazyDocuments(file, state, digest.hexdigest(), arrays, document_of_line, fields)


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """The bytes before each line that is not blank, and its text."""
    start = 0
    with file.open("rb") as stream:
        for line in stream:
            text = line.decode(encoding(start))
            if text.strip():
                yield start, text
            start += len(line)


def _state(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _cached(
    folder: Path,
    file: Path,
    state: list[int],
    fields: DocumentFields,
) -> LazyDocuments[Document] | None:
    facts = read_json(folder / _FACTS) or {}
    if (
        facts.get("keys") != _KEYS
        or facts.get("state") != state
        or not isinstance(facts.get("texts_sha256"), str)
    ):
        return None
    try:
        arrays = [
            np.asarray(np.load(folder / name, mmap_mode="r", allow_pickle=False))
            for name in _ARRAYS
        ]
    except (OSError, ValueError, EOFError):
        return None
    count = facts.get("documents")
    if not isinstance(count, int) or [found.shape for found in arrays] != [
        (count,),
        (count,),
        (count + 1,),
        (count,),
    ]:
        return None
    return LazyDocuments(file, state, facts["texts_sha256"], arrays, document_of_line, fields)


def _keep(folder: Path, found: LazyDocuments[Document]) -> None:
    """Note where the documents lie, unless the file has changed meanwhile, or may change unnoticed."""
    written = max(found.state[1], found.state[2]) / 1e9
    if _state(found.path) != found.state or time.time() - written < SETTLED_SECONDS:
        return
    try:
        with atomic_directory(folder, own_names=(*_ARRAYS, _FACTS), overwrite=True) as made:
            for name, values in zip(_ARRAYS, found.arrays, strict=True):
                np.save(made / name, values, allow_pickle=False)
            facts = {
                "state": found.state,
                "documents": len(found),
                "texts_sha256": found.sha256,
                "keys": _KEYS,
            }
            write_json(made / _FACTS, facts)
    except (OSError, InUseError) as error:
        _logger.warning("where the documents of %s lie could not be kept: %s", found.path, error)
