"""Collections in a folder, through qdrant-edge: the engine of Qdrant in this process.

This wrapper handles these properties of qdrant-edge-py 0.9.0:

* Opening a folder that is open already fails, but damages it for the process that has it open. A
  lock file is therefore locked first.
* Errors are bare ``Exception``.
* Numbers that are not finite, repeated terms and token vectors beyond the server's limit are stored
  without an error. ``Documents`` refuses them.
* ``MatchValue(True)`` matches the integer 1.
* There are no checksums. If bytes of a file change, a search gives other rankings, aborts the
  process or never returns. :class:`Checksums` are therefore compared before a folder is opened.
* It maps files before they have space. On a full disk, the system then kills the process, so the
  free space is checked first.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tilefold._internal.files import (
    LOCK,
    DiskFullError,
    InUseError,
    lock_folder,
    naming_full_disk,
    sync,
    unlock_folder,
)
from tilefold.retrieval.common.files import Json, read_json_object, require, write_json_object
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import REMEDY
from tilefold.retrieval.index.qdrant.engine import ID, SPARSE, Engine, Record, Stage

RECORD = "collection.json"
SHARD = "shard"
CHECKSUMS = "checksums.json"
COLLECTION_NAMES = (RECORD, SHARD, CHECKSUMS, LOCK)

# Bytes that a batch of 8 MB may write: two log files of 32 MB.
_WRITE_AHEAD_BYTES = 64 << 20
# Number of documents of a page of ids.
_PAGE_SIZE = 1000
# Size of the blocks in which a checksum is computed.
_BLOCK_BYTES = 1 << 16
_ZERO_BLOCK = bytes(_BLOCK_BYTES)
_CHECKSUM_THREADS = min(8, os.cpu_count() or 1)


class EdgeEngine(Engine):
    """A collection in a folder, which one process at a time can open.

    Files are compared with their checksums when the folder is opened. Missing checksums are
    computed when it is closed.
    """

    prefetch_argument = "prefetches"
    batch_queries = 64
    # The open shard of the engine; None before it is created and after it was closed.
    _shard: Any = None
    # Id of the process that opened the folder. A process that was forked from it must not close it.
    _process: int | None = None

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        """Lock the folder, and open the collection if there is one.

        Args:
            folder: the folder of the collection. It is created if it is missing.
            verify: whether to compare the files with their checksums.

        Raises:
            InUseError: if the collection is open elsewhere.
            DataError: if the collection is damaged.
        """
        self.api = require(
            "qdrant_edge",
            "qdrant-edge-py",
            "An embedded Qdrant collection",
            "qdrant",
        )
        self.point_type = self.api.Point
        self.range_type = self.api.RangeFloat
        self.folder = folder
        self.location = str(folder)
        try:
            self._lock = lock_folder(folder, reentrant=False)
        except InUseError:
            raise InUseError(
                f"{folder}: the collection is open elsewhere, and an embedded one can be open once "
                "at a time. Close it there, or use a Qdrant server.",
            ) from None
        self._checksums = Checksums(folder / SHARD, version("qdrant-edge-py"))
        try:
            record = self.read_record()
            if record is not None:
                self._load(record, verify)
        except RuntimeError as error:
            unlock_folder(self._lock)
            raise DataError(f"{error} {REMEDY}") from error
        except BaseException:
            unlock_folder(self._lock)
            raise
        self._process = os.getpid()

    def _load(self, record: Record, verify: bool) -> None:
        """Open the shard of an existing collection.

        Args:
            record: the record of the collection.
            verify: whether to compare the files with their checksums.

        Raises:
            DataError: if files are damaged.
        """
        self._checksums.read(verify=verify)
        if verify and record.complete and not self._checksums.exist:
            warnings.warn(
                f"{self.location}: the collection was not closed properly and has no checksums, so "
                "damage cannot be detected. Close it to write them.",
                RuntimeWarning,
                stacklevel=5,
            )
        if not self._checksums.exist:
            # The shard was not closed, and opening it will write files.
            need_space(self.folder)
        with self._errors():
            self._shard = self.api.EdgeShard.load(str(self.folder / SHARD))
        self._checksums.remove_if_files_changed()

    def read_record(self) -> Record | None:
        file = self.folder / RECORD
        if not file.exists():
            return None
        return Record.from_dict(read_json_object(file, REMEDY), self.location)

    def create(self, record: Record) -> None:
        """Create an empty collection.

        The record is written last. A shard without a record is a leftover of a killed process, and
        is removed.

        Args:
            record: the record of the collection, with its layout.
        """
        edge = self.api
        layout = record.layout
        self._prepare_change()
        shutil.rmtree(self.folder / SHARD, ignore_errors=True)
        # With m = 0 links per node, no HNSW graph is built. MaxSim then compares all documents and
        # is exact. The other arguments are required, but have no effect without a graph.
        no_graph = edge.HnswIndexConfig(m=0, ef_construct=4, full_scan_threshold=10_000)
        vectors = self._create_vector_params(
            layout,
            edge.EdgeVectorParams,
            distances={"dot": edge.Distance.Dot, "cosine": edge.Distance.Cosine},
            maxsim_options={
                "multivector_config": edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim),
                "hnsw_config": no_graph,
            },
        )
        sparse_vectors = {}
        if layout.vocab_size is not None:
            # The engine's names are those of the layout with a capital letter, such as Float32.
            datatype = getattr(edge.VectorStorageDatatype, layout.weights.capitalize())
            sparse_vectors[SPARSE] = edge.EdgeSparseVectorParams(datatype=datatype)
        with self._errors():
            config = edge.EdgeConfig(vectors=vectors, sparse_vectors=sparse_vectors)
            self._shard = edge.EdgeShard.create(str(self.folder / SHARD), config)
            for name, field_kind in layout.fields.items():
                field_type = getattr(edge.PayloadSchemaType, field_kind.capitalize())
                self._shard.update(edge.UpdateOperation.create_field_index(name, field_type))
            self._shard.flush()
        self.write_record(record)

    def write_record(self, record: Record) -> None:
        write_json_object(self.folder / RECORD, record.to_dict())

    def drop(self) -> None:
        """Remove the collection from the folder, and leave the folder locked."""
        # The record is removed first. If the process is killed afterwards, the other files are no
        # collection without it.
        (self.folder / RECORD).unlink(missing_ok=True)
        if self._shard is not None:
            self._call("close")
            self._shard = None
        self._checksums.remove()
        shutil.rmtree(self.folder / SHARD, ignore_errors=True)

    def delete(self, keys: Sequence[str]) -> None:
        self._update(self.api.UpdateOperation.delete_points(list(keys)))

    def _put(self, points: Sequence[object]) -> None:
        self._update(self.api.UpdateOperation.upsert_points(points))

    def _update(self, operation: object) -> None:
        """Change the collection, and flush the change."""
        self._prepare_change()
        self._call("update", operation)
        self._call("flush")

    def _get(self, keys: list[str], with_vectors: bool) -> list[Any]:
        with_payload = True
        return list(self._call("retrieve", keys, with_payload, with_vectors))

    def _page(self, offset: object) -> tuple[list[Any], Any]:
        request = self.api.ScrollRequest(offset=offset, limit=_PAGE_SIZE, with_payload=[ID])
        points, next_offset = self._call("scroll", request)
        return points, next_offset

    def _count(self, client_filter: object) -> int:
        return int(self._call("count", self.api.CountRequest(exact=True, filter=client_filter)))

    def _query_batch(self, requests: Sequence[object]) -> list[Any]:
        return list(self._call("query_batch", self.api.QueryBatchRequest(requests)))

    def optimize(self) -> None:
        """Build the final index of documents that were added, in a second copy of the files."""
        self._prepare_change(allocated(self.folder / SHARD))
        self._call("optimize")
        self._call("flush")

    def close(self) -> None:
        """Flush, write checksums, and let other processes open the folder.

        Nothing is written for a collection that is closed already, or that this process has
        inherited through a fork.
        """
        is_forked = self._process != os.getpid()
        is_closed = not self._lock.is_locked
        if is_forked:
            self._keep_shard_forever()
        if is_forked or is_closed:
            return
        try:
            if self._shard is not None:
                self._call("close")
                self._checksums.remove_if_files_changed()
                self._write_checksums()
        finally:
            self._shard = None
            unlock_folder(self._lock)

    def _keep_shard_forever(self) -> None:
        """Never delete the shard of a forked process, not even when Python ends.

        Its deletion would wait for threads of the engine, which the process has not inherited, and
        for a lock that one of them may have held during the fork.
        """
        if self._shard is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._shard))
            self._shard = None

    def _prepare_change(self, more_bytes: int = 0) -> None:
        """Check the free space, and remove the checksums, before a change.

        Args:
            more_bytes: number of bytes that the change writes in addition to the log.
        """
        is_closed = self._shard is None and self.read_record() is not None
        if is_closed:
            # The call that makes the change raises an error that says so.
            return
        need_space(self.folder, more_bytes)
        self._checksums.remove()

    def _write_checksums(self) -> None:
        """Write the checksums of a closed and complete collection, if it has none.

        A failure only warns, because the collection is complete without checksums.
        """
        record = self.read_record()
        if self._checksums.exist or record is None or not record.complete:
            return
        try:
            need_space(self.folder)
            with self._errors():
                # The engine defers some work to the next opening, which would change files. So the
                # shard is opened and closed once more before the checksums are computed.
                self.api.EdgeShard.load(str(self.folder / SHARD)).close()
            self._checksums.write()
        except (OSError, RuntimeError) as error:
            warnings.warn(
                f"{self.location}: the collection is complete, but its checksums could not be "
                f"written ({error}), so damage would go unnoticed. Open and close it to retry.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _create_query_arguments(self, stage: Stage) -> Json:
        """Create the arguments with which the engine searches or fuses in a stage."""
        if stage.fusion == "rrf":
            # The engine counts ranks from 0.
            return {"query": self.api.Fusion.Rrf(stage.rank_constant + 1)}
        if stage.fusion:
            return {"query": self.api.Fusion.Dbsf()}
        vector = self._convert_vector(stage.using, stage.vector)
        return {"query": self.api.Query.Nearest(vector, using=stage.using)}

    def _create_match(self, value: object) -> object:
        # The engine treats Python's bool as an integer, so True would match 1. It treats numpy's
        # bool as a truth value.
        return super()._create_match(np.bool_(value) if isinstance(value, bool) else value)

    def _create_empty_condition(self, name: str) -> object:
        return self.api.IsEmptyCondition(name)

    def _call(self, method: str, *arguments: object) -> Any:
        """Call a method of the shard.

        Args:
            method: the name of the method.
            arguments: arguments of the method.

        Raises:
            RuntimeError: if the collection is closed, or the engine fails.
        """
        shard = self._shard
        if shard is None:
            raise RuntimeError(f"{self.location}: the collection is closed. Open it again.")
        with self._errors():
            return getattr(shard, method)(*arguments)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors and panics of the engine into a ``RuntimeError`` that names the folder."""
        try:
            with naming_full_disk(self.folder):
                yield
        except BaseException as error:
            # The engine raises a bare Exception. The class of panics cannot be imported.
            if type(error) is Exception or type(error).__name__ == "PanicException":
                raise RuntimeError(f"{self.location}: Qdrant failed: {error}.") from error
            raise


def need_space(folder: Path, more_bytes: int = 0, reported_path: Path | None = None) -> None:
    """Raise ``DiskFullError`` if a disk has less space than a change may need.

    Every change needs space for the engine's write-ahead log.

    Args:
        folder: a folder on the disk.
        more_bytes: number of bytes that the change writes in addition to the log.
        reported_path: the path that the error names; None names the folder.
    """
    free_bytes = shutil.disk_usage(folder).free
    needed_bytes = _WRITE_AHEAD_BYTES + more_bytes
    if free_bytes < needed_bytes:
        raise DiskFullError(
            f"{reported_path or folder}: could not be written because the disk is full: Qdrant "
            f"needs up to {needed_bytes >> 20} MB, but only {free_bytes >> 20} MB are free. Free "
            "some space there, or choose another folder. Complete data is kept.",
        )


def allocated(folder: Path) -> int:
    """Return the number of bytes that the files in a folder take on the disk; 0 on Windows."""
    if os.name == "nt":
        return 0
    # The system counts blocks of 512 bytes. Holes of sparse files have none.
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def _are_objects(values: Iterable[object]) -> bool:
    """Return whether all values of a JSON file are objects."""
    return all(isinstance(value, dict) for value in values)


class Checksums:
    """Sizes and SHA-256 of all files of a shard, stored in a file next to it.

    The file is removed before the shard is changed, and written after it was closed. So there are
    no checksums if the process is killed in between. Opening and closing a shard changes only the
    order of keys in its JSON files, which the checksums ignore.

    Args:
        shard: the folder of the shard.
        engine_version: version of the engine.
    """

    def __init__(self, shard: Path, engine_version: str) -> None:
        self._shard = shard
        self._file = shard.parent / CHECKSUMS
        self._engine_version = engine_version
        # Size of each file that has a checksum; None if there are no checksums.
        self._sizes: dict[str, int | None] | None = None

    @property
    def exist(self) -> bool:
        """Whether the files of the shard have checksums."""
        return self._sizes is not None

    def read(self, *, verify: bool) -> None:
        """Read the checksums, if there are any.

        Checksums that were written with another version of the engine are removed afterwards,
        because this version may change files when it opens the shard.

        Args:
            verify: whether to compare the files with their checksums.

        Raises:
            DataError: if a file differs or is missing.
        """
        if not self._file.is_file():
            return
        value = read_json_object(self._file, REMEDY)
        files = value.get("files")
        if not isinstance(files, dict) or not _are_objects(files.values()):
            raise DataError(
                f"{self._file}: expected the checksums of files, got {files!r:.80}. {REMEDY}",
            )
        if verify:
            self._check_files(files)
        self._sizes = {name: entry.get("bytes") for name, entry in files.items()}
        # The files are intact, but another version of the engine may change them on opening.
        if value.get("engine") != self._engine_version:
            self.remove()

    def _check_files(self, listed: Mapping[str, Json]) -> None:
        """Raise ``DataError`` if a file of the shard is missing or differs from its checksum.

        Args:
            listed: relative name of a file -> its ``bytes`` and ``sha256``.
        """
        entries = _checksum_entries(self._shard)
        damaged = sorted(name for name, entry in listed.items() if entries.get(name) != entry)
        if not damaged:
            return
        first = damaged[0]
        problem = f"it is missing, but listed in {self._file.name}"
        if first in entries:
            problem = f"its size or checksum is not that in {self._file.name}"
        raise DataError(
            f"{self._shard / first}: damaged; {problem} "
            f"({len(damaged)} of {len(listed)} files). {REMEDY}",
        )

    def remove_if_files_changed(self) -> None:
        """Remove the checksums if the engine has created, removed or resized a file."""
        if not self.exist:
            return
        if self._sizes != {name: _size(file) for name, file in _files(self._shard)}:
            self.remove()

    def remove(self) -> None:
        """Remove the checksums, before the shard is changed."""
        self._sizes = None
        with suppress(FileNotFoundError):
            self._file.unlink()
            # Without this, the file could reappear after a loss of power.
            sync(self._file.parent)

    def write(self) -> None:
        """Write the checksums of the current files."""
        files = _checksum_entries(self._shard)
        write_json_object(
            self._file,
            {"engine": self._engine_version, "files": files},
            durable=True,
        )
        self._sizes = {name: entry["bytes"] for name, entry in files.items()}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Iterate over the relative names and the paths of all files in a folder, sorted by path."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield file.relative_to(folder).as_posix(), file


def _size(file: Path) -> int | None:
    """Return the size of a file, or None for a JSON file, whose text the engine may reformat."""
    return None if file.suffix == ".json" else file.stat().st_size


def _checksum_entries(folder: Path) -> dict[str, Json]:
    """Compute the size and the checksum of each file in a folder, several files at a time.

    Returns:
        Relative name of a file -> its ``bytes`` (None for a JSON file) and ``sha256``.
    """
    files = dict(_files(folder))
    try:
        with ThreadPoolExecutor(_CHECKSUM_THREADS) as pool:
            digests = list(pool.map(_sha256, files.values()))
    except RuntimeError:
        # The interpreter is shutting down, and cannot start threads.
        digests = [_sha256(file) for file in files.values()]
    return {
        name: {"bytes": _size(file), "sha256": digest}
        for (name, file), digest in zip(files.items(), digests, strict=True)
    }


def _sha256(file: Path) -> str:
    """Compute a SHA-256 that identifies the content of a file of the engine.

    The text of a JSON file is digested with sorted keys, because the engine reorders them. Other
    files are large, and mostly zeros: only blocks with other bytes are digested, with their
    positions.
    """
    if file.suffix == ".json":
        content = file.read_bytes()
        with suppress(ValueError, RecursionError):
            content = json.dumps(json.loads(content), sort_keys=True).encode()
        return hashlib.sha256(content).hexdigest()
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        position = _seek_data(stream, 0)
        # The position is None if the rest of the file is a hole.
        while position is not None:
            block = stream.read(_BLOCK_BYTES)
            if not block:
                break
            if block != _ZERO_BLOCK[: len(block)]:
                digest.update(position.to_bytes(8, "big") + block)
            position = _seek_data(stream, position + len(block))
    return digest.hexdigest()


def _seek_data(stream: BinaryIO, position: int) -> int | None:
    """Seek to the next block that has data, to skip the holes of a sparse file.

    Args:
        stream: the open file.
        position: the position in bytes where the search begins.

    Returns:
        The position of the block, or None if the rest of the file is a hole.
    """
    try:
        data = os.lseek(stream.fileno(), position, os.SEEK_DATA)
        # Blocks begin at multiples of their size.
        position = max(position, data // _BLOCK_BYTES * _BLOCK_BYTES)
    except AttributeError:
        # The system has no SEEK_DATA, so everything is read.
        pass
    except OSError as error:
        if error.errno == errno.ENXIO:
            # There is no data after the position.
            return None
        # The file system has no SEEK_DATA, so everything is read.
    return stream.seek(position)
