"""Documents that are read from their file when they are needed.

The file has JSON lines, or lines of an id, a tab and a text. A cache has the offset of each line,
and 8-byte keys of ids and texts. Its arrays are mapped into memory, and take 250 MB for 8.8 million
passages.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

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

# A file that was written just now may be written again within the resolution of its times.
SETTLED_SECONDS = 2.0
_ARRAYS = ("keys.npy", "order.npy", "starts.npy", "texts.npy")
_FACTS = "facts.json"
_KEYS_VERSION = 2  # of :func:`id_key`, whose keys the arrays hold

V = TypeVar("V")
Parse = Callable[..., tuple[str, V]]  # a line, its file, and names of fields -> id and value
_logger = logging.getLogger(__name__)


class FileState(NamedTuple):
    """Size, times and inode of a file, by which a change is noticed."""

    size: int  # bytes
    modified_ns: int
    changed_ns: int  # also by a new link or owner
    inode: int

    @classmethod
    def of(cls, file: Path) -> FileState:
        """Read the state of a file."""
        status = file.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def same_contents(self, other: FileState) -> bool:
        """Whether only a link or the owner of the file may have changed."""
        return self._replace(changed_ns=0) == other._replace(changed_ns=0)


class LazyDocuments(Mapping[str, V]):
    """Document id -> value, which `parse` makes of the document's line when it is asked for.

    A ``DataError`` is raised once the file has changed. A position is that of a document in the
    file, from 0.

    Args:
        path: the file.
        state: its size, times and inode when it was indexed.
        sha256: :func:`tilefold.retrieval.texts_digest` of all contents.
        arrays: sorted keys of ids ``[N]``, the position of each ``[N]``, the offset of each line
            and the size of the file ``[N + 1]``, and keys of contents ``[N]``.
        parse: returns id and value of a line.
        fields: names of the fields of documents that are not the usual ones.

    Attributes:
        text_keys: :func:`id_key` of the contents at each position ``[N]``.
    """

    def __init__(
        self,
        path: Path,
        state: FileState,
        sha256: str,
        arrays: Sequence[npt.NDArray[Any]],
        parse: Parse[V],
        fields: DocumentFields = USUAL_FIELDS,
    ) -> None:
        """Create a mapping of the documents in a file.

        Args:
            path: the file.
            state: size and times of the file when it was read.
            sha256: digest of ids and texts.
            arrays: four arrays about the N documents. Keys of their ids in ascending order ``[N]``,
                position of the document of each key ``[N]``, offset of each document in the file
                and the size of the file ``[N + 1]``, and keys of their texts ``[N]``. A key is a
                64-bit hash.
            parse: reads the id and the value in a line.
            fields: names of the fields of documents that are not the usual ones.
        """
        self.path = path
        self.state = state
        self.sha256 = sha256
        self.arrays = arrays
        self._keys, self._order, self._offsets, self.text_keys = arrays
        self._fields = fields
        self._parse: Callable[[str, str], tuple[str, V]] = functools.partial(parse, fields=fields)

    def contents(self) -> LazyDocuments[str]:
        """Return the same documents as document id -> contents."""
        return LazyDocuments(
            self.path,
            self.state,
            self.sha256,
            self.arrays,
            contents_of_line,
            self._fields,
        )

    def at(self, positions: Sequence[int]) -> list[V]:
        """Return the values at n positions."""
        return [value for _, value in self.pairs_at(positions)]

    def sizes(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the bytes of the lines at n positions, ``[n]``, without reading them."""
        return np.asarray(self._offsets[positions + 1] - self._offsets[positions])

    def pairs_at(self, positions: Sequence[int]) -> list[tuple[str, V]]:
        """Read the ids and values at some positions from the file.

        Args:
            positions: positions of documents in the file, counted from 0.

        Raises:
            DataError: if the file has changed since it was opened.
        """
        self.check()
        chosen = np.asarray(positions)
        starts = self._offsets[chosen].tolist()
        stops = self._offsets[chosen + 1].tolist()
        pairs = []
        with self.path.open("rb", buffering=0) as stream:
            for start, stop in zip(starts, stops, strict=True):
                stream.seek(start)
                text = stream.read(stop - start).decode(encoding(start))
                line = text.partition("\n")[0]  # blank lines may follow
                pairs.append(self._parse(line, str(self.path)))
        return pairs

    def check(self) -> None:
        """Raise ``DataError`` if the file has changed since it was opened."""
        try:
            unchanged = FileState.of(self.path).same_contents(self.state)
        except FileNotFoundError:
            unchanged = False
        if not unchanged:
            raise DataError(
                f"{self.path}: has changed since it was opened, or is gone. Start the command "
                "again.",
            )

    def positions_of(self, names: Iterable[str]) -> npt.NDArray[np.int64]:
        """Look up the positions of documents by their ids.

        If no two ids of the file share a 64-bit key, only keys are compared. An unknown id is then
        taken for one of the N documents with a probability of N / 2^64.

        Args:
            names: n ids.

        Returns:
            Position of each document in the file, int64 ``[n]``, and -1 for an unknown id.
        """
        if not self._keys_are_unique:
            positions = [self._position(name) for name in names]
            return np.array(
                [-1 if position is None else position for position in positions],
                np.int64,
            )
        keys = np.fromiter(map(id_key, names), np.uint64)
        # Keys are looked up in sorted order, because neighbours are in one page of the mapped file.
        order = np.argsort(keys)
        ranks = np.empty(len(keys), np.int64)
        ranks[order] = np.searchsorted(self._keys, keys[order])
        ranks[ranks == len(self._keys)] = 0  # any valid rank, because the keys differ anyway
        return np.where(self._keys[ranks] == keys, self._order[ranks], -1).astype(np.int64)

    @cached_property
    def _keys_are_unique(self) -> bool:
        """Whether no two ids have one key."""
        return not bool((self._keys[1:] == self._keys[:-1]).any())

    def _position(self, name: str) -> int | None:
        """Return the position of an id, or None for an unknown one.

        Several ids may share a key, so the id in the file is compared too.
        """
        key = np.uint64(id_key(name))
        first = int(np.searchsorted(self._keys, key))
        last = int(np.searchsorted(self._keys, key, side="right"))
        for position in self._order[first:last].tolist():
            ((stored_name, _),) = self.pairs_at([position])
            if stored_name == name:
                return int(position)
        return None

    def __getitem__(self, name: str) -> V:
        position = self._position(name) if isinstance(name, str) else None
        if position is None:
            raise KeyError(name)
        return self.at([position])[0]

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if not self._keys_are_unique:
            return self._position(name) is not None
        key = np.uint64(id_key(name))
        rank = int(self._keys.searchsorted(key))
        return rank < len(self._keys) and bool(self._keys[rank] == key)

    def __len__(self) -> int:
        return len(self._keys)

    def pairs(self) -> Iterator[tuple[str, V]]:
        """Return all ids and values in the order of the file, which is read once."""
        self.check()
        return (self._parse(text, str(self.path)) for text in _filled_lines(self.path))

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.pairs())

    def items(self) -> ItemsView[str, V]:
        return _Items(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)


class _Items(ItemsView[str, V]):
    """Ids and values in one pass over the file.

    The usual view would look up each id.
    """

    _mapping: LazyDocuments[V]

    def __iter__(self) -> Iterator[tuple[str, V]]:
        return self._mapping.pairs()


class _Values(ValuesView[V]):
    """Values in one pass over the file.

    The usual view would look up each id.
    """

    _mapping: LazyDocuments[V]

    def __iter__(self) -> Iterator[V]:
        return (value for _, value in self._mapping.pairs())


def open_lazy_documents(
    file: Path,
    cache: Path,
    fields: DocumentFields = USUAL_FIELDS,
) -> LazyDocuments[Document] | None:
    """Open a file of documents without holding them in memory.

    The file is read once. Offsets and keys of its lines are kept in the cache, and used until the
    size, the times or the inode of the file change.

    Args:
        file: JSON lines, or lines of an id, a tab and a text.
        cache: folder of the cache.
        fields: names of the fields of documents that are not the usual ones.

    Returns:
        The documents, or None for a file of another kind.

    Raises:
        DataError: as :func:`tilefold.retrieval.load_documents`.
    """
    if not _has_a_document_per_line(file, fields):
        return None
    state = FileState.of(file)
    key = os.fsencode(file.resolve())
    if fields != USUAL_FIELDS:
        key += b"\0" + json.dumps(fields.names).encode()
    folder = cache / "stored" / hashlib.sha256(key).hexdigest()[:32]
    documents = _read_cache(folder, file, state, fields)
    if documents is None:
        documents = _index_file(file, state, fields)
        _write_cache(folder, documents)
    return documents


def _has_a_document_per_line(file: Path, fields: DocumentFields) -> bool:
    """Whether a file has JSON lines, or lines of an id, a tab and a text without column names."""
    if file.name.endswith(".jsonl"):
        return True
    if not file.name.endswith((".tsv", ".txt")) or fields != USUAL_FIELDS:
        return False
    first_line = next((text for _, text in numbered_lines(file) if text.strip()), "")
    return not text_columns(first_line.rstrip("\r\n").split("\t"), f"{file}:1")


def _index_file(
    file: Path,
    state: FileState,
    fields: DocumentFields,
) -> LazyDocuments[Document]:
    """Read a file once, and record where its documents are.

    A key is a 64-bit hash of an id or of a text.

    Args:
        file: JSON lines, or lines of an id, a tab and a text.
        state: size and times of the file.
        fields: names of the fields of documents that are not the usual ones.

    Returns:
        The documents, with sorted keys of their ids, the position of each key's document, and the
        offset of each document in the file.

    Raises:
        DataError: for a malformed line, or missing or repeated ids.
    """
    parts = [np.empty((3, 0), np.uint64)]
    digest = TextsDigest()
    try:
        # hashlib releases the interpreter lock, so that a thread can compute the digest of a range
        # while the next range is read. At most one range waits for it.
        with ThreadPoolExecutor(1) as executor:
            pending: Future[None] | None = None
            for numbers, encoded in all_lines(file, state.size, fields):
                parts.append(numbers)
                if pending is not None:
                    pending.result()
                pending = executor.submit(digest.add_encoded, encoded)
            if pending is not None:
                pending.result()
    except (ValueError, RecursionError, UnicodeError):
        load_documents(file, fields)  # raises an error that names the line
        raise
    offsets, id_keys, text_keys = np.concatenate(parts, axis=1)
    order = np.argsort(id_keys, kind="stable")
    has_equal_keys = bool((np.diff(id_keys[order]) == 0).any())
    if not len(id_keys) or has_equal_keys:
        load_documents(file, fields)  # raises an error, unless two ids share one key
    arrays = (
        id_keys[order],
        order.astype(np.int32),
        np.append(offsets.astype(np.int64), state.size),
        text_keys,
    )
    return LazyDocuments(file, state, digest.hexdigest(), arrays, document_of_line, fields)


def _filled_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file that are not blank."""
    offset = 0
    with file.open("rb") as stream:
        for line in stream:
            text = line.decode(encoding(offset))
            if text.strip():
                yield text
            offset += len(line)


def _read_cache(
    folder: Path,
    file: Path,
    state: FileState,
    fields: DocumentFields,
) -> LazyDocuments[Document] | None:
    """Open the documents of a file from the cache.

    Args:
        folder: folder of the file in the cache.
        file: the file of documents.
        state: present size and times of the file.
        fields: names of the fields of documents that are not the usual ones.

    Returns:
        The documents, or None if they are not in the cache, or the file or the way in which keys
        are computed has changed since.
    """
    facts = read_json(folder / _FACTS) or {}
    count = facts.get("documents")
    sha256 = facts.get("texts_sha256")
    if (
        facts.get("keys") != _KEYS_VERSION
        or facts.get("state") != list(state)
        or not isinstance(sha256, str)
        or not isinstance(count, int)
    ):
        return None
    try:
        arrays = [
            np.asarray(np.load(folder / name, mmap_mode="r", allow_pickle=False))
            for name in _ARRAYS
        ]
    except (OSError, ValueError, EOFError):
        return None
    if [array.shape for array in arrays] != [(count,), (count,), (count + 1,), (count,)]:
        return None
    return LazyDocuments(file, state, sha256, arrays, document_of_line, fields)


def _write_cache(folder: Path, documents: LazyDocuments[Document]) -> None:
    """Write the arrays of documents into the cache.

    Nothing is written if the file has changed since it was read. The same holds if it was written
    in the last seconds, because another change could leave its times as they are.

    Args:
        folder: folder of the file in the cache.
        documents: documents of the file.
    """
    state = documents.state
    last_written = max(state.modified_ns, state.changed_ns) / 1e9
    if FileState.of(documents.path) != state or time.time() - last_written < SETTLED_SECONDS:
        return
    facts = {
        "state": list(state),
        "documents": len(documents),
        "texts_sha256": documents.sha256,
        "keys": _KEYS_VERSION,
    }
    try:
        with atomic_directory(
            folder,
            own_names=(*_ARRAYS, _FACTS),
            overwrite=True,
        ) as temporary:
            for name, array in zip(_ARRAYS, documents.arrays, strict=True):
                np.save(temporary / name, array, allow_pickle=False)
            write_json(temporary / _FACTS, facts)
    except (OSError, InUseError) as error:
        _logger.warning(
            "where the documents of %s lie could not be kept: %s",
            documents.path,
            error,
        )
