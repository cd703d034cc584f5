"""Documents that are read from their file when they are needed.

The file has JSON lines, or lines ``id<tab>text``. A cache has the offset of each line, and 8-byte
keys of ids and texts. Its arrays are mapped into memory. They take 250 MB for 8.8 million passages.
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
from tilefold.retrieval.data.collection import Document, PageRowError, load_documents
from tilefold.retrieval.data.document_lines import (
    all_lines,
    encoding_at,
    id_and_contents_of_line,
    id_and_document_of_line,
    id_key,
)
from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.data.tables import USUAL_FIELDS, is_header, numbered_lines
from tilefold.retrieval.errors import DataError

__all__ = ["LazyDocuments", "id_key", "open_lazy_documents"]

# A file that was written just now may be written again without a change of its timestamps.
SETTLED_SECONDS = 2.0
_DESCRIPTION_FILE = "facts.json"  # the state of the documents' file, and what the cache holds
_KEYS_VERSION = 2  # version of :func:`id_key`, which computed the keys in a cache

V = TypeVar("V")  # value of an id: a Document, or its contents
Parse = Callable[..., tuple[str, V]]  # (line, path of its file, fields=custom names) -> id, value
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
        """Whether at most links or the owner of the file have changed."""
        return self._replace(changed_ns=0) == other._replace(changed_ns=0)


class LineIndex(NamedTuple):
    """Where the N documents of a file are, and 64-bit keys of them (:func:`id_key`).

    A position is the number of a document in the file, from 0.

    Attributes:
        sorted_id_keys: keys of the ids in ascending order, uint64 ``[N]``.
        positions: position of the document of each of these keys, int32 ``[N]``.
        offsets: byte offset of each document in the file, and the size of the file, int64
            ``[N + 1]``.
        text_keys: key of the contents of each document, uint64 ``[N]``.
    """

    sorted_id_keys: npt.NDArray[Any]
    positions: npt.NDArray[Any]
    offsets: npt.NDArray[Any]
    text_keys: npt.NDArray[Any]

    def has_shapes_of(self, n_documents: int) -> bool:
        """Return whether all arrays have the shapes for a number of documents."""
        shapes = (
            self.sorted_id_keys.shape,
            self.positions.shape,
            self.offsets.shape,
            self.text_keys.shape,
        )
        return shapes == ((n_documents,), (n_documents,), (n_documents + 1,), (n_documents,))


# Field of a LineIndex -> its file in the cache.
_ARRAY_FILES = {
    "sorted_id_keys": "keys.npy",
    "positions": "order.npy",
    "offsets": "starts.npy",
    "text_keys": "texts.npy",
}


class LazyDocuments(Mapping[str, V]):
    """Document id -> value, which is parsed from the document's line on access.

    A position is the number of a document in the file, from 0. A ``DataError`` is raised once the
    file has changed.

    Attributes:
        path: the file.
        state: size, times and inode of the file when it was indexed.
        sha256: :func:`tilefold.retrieval.texts_digest` of all contents.
        line_index: where the documents are in the file, and their keys.
        text_keys: :func:`id_key` of the contents at each position ``[N]``.
    """

    def __init__(
        self,
        path: Path,
        state: FileState,
        sha256: str,
        line_index: LineIndex,
        parse: Parse[V],
        fields: DocumentFields = USUAL_FIELDS,
    ) -> None:
        """Create a mapping of the documents in a file.

        Args:
            path: the file.
            state: size, times and inode of the file when it was indexed.
            sha256: digest of ids and contents.
            line_index: where the documents are in the file, and their keys.
            parse: returns the id and the value in a line.
            fields: custom names of the document fields.
        """
        self.path = path
        self.state = state
        self.sha256 = sha256
        self.line_index = line_index
        self.text_keys = line_index.text_keys
        self._sorted_id_keys = line_index.sorted_id_keys
        self._offsets = line_index.offsets
        self._fields = fields
        self._parse: Callable[[str, str], tuple[str, V]] = functools.partial(parse, fields=fields)

    def contents(self) -> LazyDocuments[str]:
        """Return the same documents as document id -> contents."""
        return LazyDocuments(
            self.path,
            self.state,
            self.sha256,
            self.line_index,
            id_and_contents_of_line,
            self._fields,
        )

    def at(self, positions: Sequence[int]) -> list[V]:
        """Return the values at n positions."""
        return [value for _, value in self.pairs_at(positions)]

    def sizes(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of bytes of the lines at n positions, ``[n]``, without reading them."""
        return np.asarray(self._offsets[positions + 1] - self._offsets[positions])

    def pairs_at(self, positions: Sequence[int]) -> list[tuple[str, V]]:
        """Read the ids and values at the given positions from the file.

        Args:
            positions: positions of documents in the file, from 0.

        Raises:
            DataError: if the file has changed since it was opened.
        """
        self.check()
        position_array = np.asarray(positions)
        starts = self._offsets[position_array].tolist()
        stops = self._offsets[position_array + 1].tolist()
        pairs = []
        with self.path.open("rb", buffering=0) as stream:
            for start, stop in zip(starts, stops, strict=True):
                stream.seek(start)
                text = stream.read(stop - start).decode(encoding_at(start))
                line = text.partition("\n")[0]  # without the blank lines that may follow
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
            return self._positions_one_by_one(names)
        keys = np.fromiter(map(id_key, names), np.uint64)
        # Keys are looked up in sorted order, because neighbours are in one page of the mapped file.
        order = np.argsort(keys)
        ranks = np.empty(len(keys), np.int64)
        ranks[order] = np.searchsorted(self._sorted_id_keys, keys[order])
        # A key above all keys of the file has the rank N. It is compared with the last key instead,
        # from which it differs.
        ranks = np.minimum(ranks, len(self) - 1)
        is_known = self._sorted_id_keys[ranks] == keys
        return np.where(is_known, self.line_index.positions[ranks], -1).astype(np.int64)

    def _positions_one_by_one(self, names: Iterable[str]) -> npt.NDArray[np.int64]:
        """Look up the positions of n ids that may share keys, int64 ``[n]``; -1 if unknown."""
        positions: list[int] = []
        for name in names:
            position = self._position(name)
            positions.append(-1 if position is None else position)
        return np.array(positions, np.int64)

    @cached_property
    def _keys_are_unique(self) -> bool:
        """Whether no two ids share a key."""
        return not bool((self._sorted_id_keys[1:] == self._sorted_id_keys[:-1]).any())

    def _position(self, name: str) -> int | None:
        """Return the position of an id in the file, or None if it is unknown.

        Several ids may share a 64-bit key. The ids in the lines of all documents with the key are
        therefore compared, too.
        """
        key = np.uint64(id_key(name))
        first = int(np.searchsorted(self._sorted_id_keys, key))
        end = int(np.searchsorted(self._sorted_id_keys, key, side="right"))
        for position in self.line_index.positions[first:end].tolist():
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
        rank = int(self._sorted_id_keys.searchsorted(key))
        return rank < len(self) and bool(self._sorted_id_keys[rank] == key)

    def __len__(self) -> int:
        return len(self._sorted_id_keys)

    def pairs(self) -> Iterator[tuple[str, V]]:
        """Return all ids and values in file order, in one pass over the file."""
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

    ``ItemsView`` would look up each id.
    """

    _mapping: LazyDocuments[V]

    def __iter__(self) -> Iterator[tuple[str, V]]:
        return self._mapping.pairs()


class _Values(ValuesView[V]):
    """Values in one pass over the file.

    ``ValuesView`` would look up each id.
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

    The file is read once. Offsets and keys of its lines are cached until the size, the times or
    the inode of the file change.

    Args:
        file: JSON lines, or lines ``id<tab>text``.
        cache: folder of the cache.
        fields: custom names of the document fields.

    Returns:
        The documents, or None if the file has another format, or names images.

    Raises:
        DataError: if a line is invalid, or an id is missing or repeated.
    """
    if not _has_a_document_per_line(file, fields):
        return None
    state = FileState.of(file)
    folder = _cache_folder(cache, file, fields)
    documents = _read_cache(folder, file, state, fields)
    if documents is None:
        try:
            documents = _index_file(file, state, fields)
        except PageRowError:
            return None
        _write_cache(folder, documents)
    return documents


def _cache_folder(cache: Path, file: Path, fields: DocumentFields) -> Path:
    """Return the folder of the cache for a file.

    Args:
        cache: folder of the whole cache.
        file: the file of documents.
        fields: custom names of the document fields, with which the file is read.
    """
    key = os.fsencode(file.resolve())
    if fields != USUAL_FIELDS:
        key += b"\0" + json.dumps(fields.names).encode()
    return cache / "stored" / hashlib.sha256(key).hexdigest()[:32]


def _has_a_document_per_line(file: Path, fields: DocumentFields) -> bool:
    """Whether a file has JSON lines, or lines ``id<tab>text`` without a header."""
    if file.name.endswith(".jsonl"):
        return True
    if not file.name.endswith((".tsv", ".txt")) or fields != USUAL_FIELDS:
        return False
    first_line = next((text for _, text in numbered_lines(file) if text.strip()), "")
    return not is_header(first_line.rstrip("\r\n").split("\t"), f"{file}:1")


class _FileKeys(NamedTuple):
    """Offsets and keys of the N documents of a file, in its order.

    Attributes:
        offsets: byte offset of each document, int64 ``[N]``.
        id_keys: key of each id, uint64 ``[N]``.
        text_keys: key of the contents of each document, uint64 ``[N]``.
        sha256: digest of all documents.
    """

    offsets: npt.NDArray[np.int64]
    id_keys: npt.NDArray[np.uint64]
    text_keys: npt.NDArray[np.uint64]
    sha256: str


def _read_keys(file: Path, size: int, fields: DocumentFields) -> _FileKeys:
    """Read a file of documents once, and compute the keys and the digest of its documents.

    A key is a 64-bit hash of an id or a text.

    Args:
        file: JSON lines, or lines ``id<tab>text``.
        size: size of the file in bytes.
        fields: custom names of the document fields.
    """
    no_keys = np.empty(0, np.uint64)  # concatenate() needs an array if the file is empty
    offset_parts = [no_keys]
    id_key_parts = [no_keys]
    text_key_parts = [no_keys]
    digest = TextsDigest()
    # hashlib releases the GIL, so that a thread can compute the digest of a range of lines while
    # the next range is read. At most one range waits for the thread.
    with ThreadPoolExecutor(1) as executor:
        pending: Future[None] | None = None  # the digest of the range before
        for lines in all_lines(file, size, fields):
            offset_parts.append(lines.offsets)
            id_key_parts.append(lines.id_keys)
            text_key_parts.append(lines.text_keys)
            if pending is not None:
                pending.result()
            pending = executor.submit(digest.add_encoded, lines.encoded)
        if pending is not None:
            pending.result()
    return _FileKeys(
        np.concatenate(offset_parts).astype(np.int64),
        np.concatenate(id_key_parts),
        np.concatenate(text_key_parts),
        digest.hexdigest(),
    )


def _index_file(
    file: Path,
    state: FileState,
    fields: DocumentFields,
) -> LazyDocuments[Document]:
    """Read a file once, and record the offset of each document, and keys by which it is found.

    Args:
        file: JSON lines, or lines ``id<tab>text``.
        state: size, times and inode of the file.
        fields: custom names of the document fields.

    Raises:
        DataError: if a line is malformed, or an id is missing or repeated.
    """
    try:
        keys = _read_keys(file, state.size, fields)
    except PageRowError:
        raise
    except (ValueError, RecursionError, UnicodeError):
        load_documents(file, fields)  # raises an error that names the line
        raise
    id_keys = keys.id_keys
    positions = np.argsort(id_keys, kind="stable")
    sorted_id_keys = id_keys[positions]
    has_equal_keys = bool((np.diff(sorted_id_keys) == 0).any())
    if not len(id_keys) or has_equal_keys:
        load_documents(file, fields)  # raises an error, unless two different ids share a key
    line_index = LineIndex(
        sorted_id_keys=sorted_id_keys,
        positions=positions.astype(np.int32),
        offsets=np.append(keys.offsets, state.size),
        text_keys=keys.text_keys,
    )
    return LazyDocuments(
        file,
        state,
        keys.sha256,
        line_index,
        id_and_document_of_line,
        fields,
    )


def _filled_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file that are not blank."""
    offset = 0
    with file.open("rb") as stream:
        for line in stream:
            text = line.decode(encoding_at(offset))
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
        state: current size, times and inode of the file.
        fields: custom names of the document fields.

    Returns:
        The documents, or None if the cache does not have them or is outdated.
    """
    description = read_json(folder / _DESCRIPTION_FILE) or {}
    count = description.get("documents")
    sha256 = description.get("texts_sha256")
    has_current_keys = description.get("keys") == _KEYS_VERSION
    is_unchanged = description.get("state") == list(state)
    if not has_current_keys or not is_unchanged:
        return None
    if not isinstance(sha256, str) or not isinstance(count, int):
        return None
    arrays: dict[str, npt.NDArray[Any]] = {}
    try:
        for name, array_file in _ARRAY_FILES.items():
            array = np.load(folder / array_file, mmap_mode="r", allow_pickle=False)
            arrays[name] = np.asarray(array)
    except (OSError, ValueError, EOFError):
        return None
    line_index = LineIndex(**arrays)
    if not line_index.has_shapes_of(count):
        return None
    return LazyDocuments(file, state, sha256, line_index, id_and_document_of_line, fields)


def _write_cache(folder: Path, documents: LazyDocuments[Document]) -> None:
    """Write the line index of documents into the cache.

    Nothing is written if the file has changed since it was read. Nothing is written either if the
    file was modified in the last seconds, because another change might not alter its timestamps.

    Args:
        folder: folder of the file in the cache.
        documents: the documents of the file.
    """
    state = documents.state
    last_written = max(state.modified_ns, state.changed_ns) / 1e9
    if FileState.of(documents.path) != state or time.time() - last_written < SETTLED_SECONDS:
        return
    description = {
        "state": list(state),
        "documents": len(documents),
        "texts_sha256": documents.sha256,
        "keys": _KEYS_VERSION,
    }
    try:
        with atomic_directory(
            folder,
            own_names=(*_ARRAY_FILES.values(), _DESCRIPTION_FILE),
            overwrite=True,
        ) as temporary:
            for name, array_file in _ARRAY_FILES.items():
                array = getattr(documents.line_index, name)
                np.save(temporary / array_file, array, allow_pickle=False)
            write_json(temporary / _DESCRIPTION_FILE, description)
    except (OSError, InUseError) as error:
        _logger.warning(
            "the offsets of the documents in %s could not be cached: %s",
            documents.path,
            error,
        )
