"""A collection in a folder, through qdrant-edge: the engine of Qdrant in this process.

Behaviour of qdrant-edge-py 0.9.0 that this wrapper handles: opening a folder that is open already
fails, but damages it for the one that has it open, so a lock of ours comes first; errors are bare
``Exception``; numbers that are not finite, terms given twice and token vectors beyond the server's
limit are stored without a word (``Documents`` refuses them); ``MatchValue(True)`` is that of the
integer 1. It has no checksums: bytes that changed give other rankings, abort the process or never
return (``Checksums`` comes first). It maps files ahead that have no space yet: where the disk is
full, the system ends the process (so space is asked for first).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
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
OWN_NAMES = (RECORD, SHARD, CHECKSUMS, LOCK)
_AHEAD = 64 << 20  # that a batch may fill, of 8 MB: two files of 32 MB of the log
_PAGE = 1000
_BLOCK = 1 << 16  # of a file whose checksum is taken
_ZEROS = bytes(_BLOCK)
_THREADS = min(8, os.cpu_count() or 1)


class EdgeEngine(Engine):
    """The collection in `folder`, open in this process alone until it is closed.

    Its files are compared with their checksums first, unless ``verify=False``; closing makes those
    that are missing.
    """

    prefetch, at_once = "prefetches", 64
    _shard: Any = None
    _process: int | None = None  # that has it open

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.api = require(
            "qdrant_edge",
            "qdrant-edge-py",
            "An embedded Qdrant collection",
            "qdrant",
        )
        self.point, self.range = self.api.Point, self.api.RangeFloat
        self.folder, self.place = folder, str(folder)
        try:
            self._lock = lock_folder(folder, again=False)
        except InUseError:
            said = (
                "the collection is open elsewhere, and an embedded one can be open once at a time"
            )
            raise InUseError(
                f"{folder}: {said}. Close it there, or keep it on a Qdrant server.",
            ) from None
        self._checksums = Checksums(folder / SHARD, version("qdrant-edge-py"))
        try:
            if (record := self.record()) is not None:
                self._load(record, verify)
        except BaseException as error:
            unlock_folder(self._lock)
            if isinstance(error, RuntimeError):
                raise DataError(f"{error} {REMEDY}") from error
            raise
        self._process = os.getpid()

    def _load(self, record: Record, verify: bool) -> None:
        self._checksums.read(verify=verify)
        if verify and record.complete and not self._checksums.kept:
            said = "its files have no checksums, so that damage is not noticed: a process that changed them did not"
            warnings.warn(
                f"{self.place}: {said} close them. Closing it makes some.",
                RuntimeWarning,
                stacklevel=5,
            )
        if not self._checksums.kept:  # else it writes nothing
            need_space(self.folder)
        with self._errors():
            self._shard = self.api.EdgeShard.load(str(self.folder / SHARD))
        self._checksums.confirm()

    def record(self) -> Record | None:
        file = self.folder / RECORD
        return (
            Record.from_dict(read_json_object(file, REMEDY), self.place) if file.exists() else None
        )

    def create(self, record: Record) -> None:
        """Make an empty collection. A shard without a record is what a killed creation left, and is
        removed.
        """
        edge, layout = self.api, record.layout
        self._changing()
        shutil.rmtree(self.folder / SHARD, ignore_errors=True)
        maxsim = edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim)
        no_graph = edge.HnswIndexConfig(0, 4, 10_000)  # MaxSim is exact
        kinds = edge.EdgeVectorParams, edge.Distance.Dot, edge.Distance.Cosine
        vectors = self._vector_params(
            layout,
            *kinds,
            multivector_config=maxsim,
            hnsw_config=no_graph,
        )
        sparse = {}
        if layout.vocab_size is not None:
            datatype = getattr(edge.VectorStorageDatatype, layout.weights.capitalize())
            sparse[SPARSE] = edge.EdgeSparseVectorParams(datatype=datatype)
        with self._errors():
            config = edge.EdgeConfig(vectors=vectors, sparse_vectors=sparse)
            self._shard = edge.EdgeShard.create(str(self.folder / SHARD), config)
            for name, schema in layout.fields.items():
                kind = getattr(edge.PayloadSchemaType, schema.capitalize())
                self._shard.update(edge.UpdateOperation.create_field_index(name, kind))
            self._shard.flush()
        self.write_record(record)

    def write_record(self, record: Record) -> None:
        write_json_object(self.folder / RECORD, record.to_dict())

    def drop(self) -> None:
        (self.folder / RECORD).unlink(missing_ok=True)
        if self._shard is not None:
            self._call("close")
            self._shard = None
        self._checksums.remove()
        shutil.rmtree(self.folder / SHARD, ignore_errors=True)

    def delete(self, keys: Sequence[str]) -> None:
        self._update("delete_points", list(keys))

    def _put(self, points: Sequence[object]) -> None:
        self._update("upsert_points", points)

    def _update(self, operation: str, *args: object) -> None:
        self._changing()
        self._call("update", getattr(self.api.UpdateOperation, operation)(*args))
        self._call("flush")

    def _get(self, keys: list[str], vectors: bool) -> list[Any]:
        return list(self._call("retrieve", keys, True, vectors))

    def _page(self, offset: object) -> tuple[list[Any], Any]:
        page, offset = self._call(
            "scroll",
            self.api.ScrollRequest(offset=offset, limit=_PAGE, with_payload=[ID]),
        )
        return page, offset

    def _count(self, chosen: object) -> int:
        return int(self._call("count", self.api.CountRequest(exact=True, filter=chosen)))

    def _answers(self, requests: Sequence[object]) -> list[Any]:
        return list(self._call("query_batch", self.api.QueryBatchRequest(requests)))

    def optimize(self) -> None:
        """Make the final index of what was added, in a second copy of the files."""
        self._changing(allocated(self.folder / SHARD))
        self._call("optimize")
        self._call("flush")

    def close(self) -> None:
        """Flush, make checksums, and let others open the folder."""
        if (
            self._process != os.getpid() or not self._lock.is_locked
        ):  # of a process that forked this one, or closed
            return
        try:
            if self._shard is not None:
                self._call("close")
                self._checksums.confirm()
                self._keep_checksums()
        finally:
            self._shard = None
            unlock_folder(self._lock)

    def _changing(self, more: int = 0) -> None:
        """Comes before every change, which may write 64 MB and `more` bytes."""
        if self._shard is None and self.record() is not None:
            return  # closed: the call will say so
        need_space(self.folder, more)
        self._checksums.remove()

    def _keep_checksums(self) -> None:
        """Make the checksums of a shard that is closed, unless they are there or a build is
        unfinished.
        """
        record = self.record()
        if self._checksums.kept or record is None or not record.complete:
            return
        try:
            need_space(self.folder)
            with self._errors():  # what it leaves to the next opening is done now
                self.api.EdgeShard.load(str(self.folder / SHARD)).close()
            self._checksums.write()
        except (OSError, RuntimeError) as error:
            said = f"is whole, but has no checksums ({error}), so that damage would not be noticed"
            warnings.warn(
                f"{self.place}: {said}. Open and close it again.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _scoring(self, stage: Stage) -> Json:
        if stage.fusion == "rrf":  # its ranks start at 0
            return {"query": self.api.Fusion.Rrf(stage.rank_constant + 1)}
        if stage.fusion:
            return {"query": self.api.Fusion.Dbsf()}
        return {
            "query": self.api.Query.Nearest(
                self._vector(stage.using, stage.vector),
                using=stage.using,
            ),
        }

    def _match(self, value: object) -> object:
        return super()._match(
            np.bool_(value) if isinstance(value, bool) else value,
        )  # else True would be 1

    def _empty(self, name: str) -> object:
        return self.api.IsEmptyCondition(name)

    def _call(self, method: str, *args: object) -> Any:
        with self._errors():
            return getattr(self._shard, method)(*args)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise what the engine raises, or panics with, as a RuntimeError that names the folder."""
        try:
            with naming_full_disk(self.folder):
                try:
                    yield
                except BaseException as error:
                    if type(error) is Exception or type(error).__name__ == "PanicException":
                        raise RuntimeError(f"{self.place}: Qdrant failed: {error}.") from error
                    raise
        except AttributeError as error:
            if self._shard is None:
                raise RuntimeError(
                    f"{self.place}: the collection is closed. Open it again.",
                ) from error
            raise


def need_space(folder: Path, more: int = 0, of: Path | None = None) -> None:
    """Raise ``DiskFullError`` unless the disk of `folder` has space for what a change writes, and
    for `more` bytes.
    """
    free, needed = shutil.disk_usage(folder).free, _AHEAD + more
    if free < needed:
        why = f"the disk is full: Qdrant may need {needed >> 20} MB, {free >> 20} MB are free"
        remedy = "Free some space there, or choose another place; what was complete is kept."
        raise DiskFullError(f"{of or folder}: could not be written, {why}. {remedy}")


def allocated(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk."""
    return (
        sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
        if os.name != "nt"
        else 0
    )


class Checksums:
    """Sizes and SHA-256 of all files of a shard, in a file beside it, which is there while the
    shard is as it says.

    It is removed before the shard is changed, and written when that is over: a process that is
    killed in between leaves none. Opening and closing a shard changes only the order of members in
    its JSON files, of which the sorted text counts. What another version of the engine makes of a
    shard is not known.
    """

    def __init__(self, shard: Path, engine: str) -> None:
        self._shard, self._file, self._engine = shard, shard.parent / CHECKSUMS, engine
        self._sizes: dict[str, int | None] | None = None  # of the files that the checksums are of

    @property
    def kept(self) -> bool:
        return self._sizes is not None

    def read(self, *, verify: bool) -> None:
        """Take the checksums that are there, if any, and compare them."""
        if not self._file.is_file():
            return
        found = read_json_object(self._file, REMEDY)
        files = found.get("files")
        if not isinstance(files, dict) or not all(
            isinstance(entry, dict) for entry in files.values()
        ):
            raise DataError(
                f"{self._file}: expected the checksums of files, got {files!r:.80}. {REMEDY}",
            )
        there = _entries(self._shard) if verify else files
        if damaged := sorted(name for name, entry in files.items() if there.get(name) != entry):
            what = "its checksum is not the one" if damaged[0] in there else "it is gone, and is"
            where = f"{self._file.name} ({len(damaged)} of {len(files)} files)"
            raise DataError(f"{self._shard / damaged[0]}: damaged; {what} in {where}. {REMEDY}")
        self._sizes = {name: entry.get("bytes") for name, entry in files.items()}
        if found.get("engine") != self._engine:
            self.remove()

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
        files = _entries(self._shard)
        write_json_object(self._file, {"engine": self._engine, "files": files}, durable=True)
        self._sizes = {name: entry["bytes"] for name, entry in files.items()}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield file.relative_to(folder).as_posix(), file


def _size(file: Path) -> int | None:
    return None if file.suffix == ".json" else file.stat().st_size


def _entries(folder: Path) -> dict[str, Json]:
    """Name -> size and checksum of each file below a folder."""
    files = dict(_files(folder))
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(_sha256, files.values()))
    except RuntimeError:  # the interpreter ends, and starts no threads
        digests = list(map(_sha256, files.values()))
    return {
        n: {"bytes": _size(file), "sha256": d}
        for (n, file), d in zip(files.items(), digests, strict=True)
    }


def _sha256(file: Path) -> str:
    """Digest of the sorted text of a JSON file, and of the blocks of others that are not zero, with
    their places.
    """
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
    """Go to the next block that holds something, `at` or later; the engine's files are large and
    mostly holes.
    """
    try:
        at = max(at, os.lseek(stream.fileno(), at, os.SEEK_DATA) // _BLOCK * _BLOCK)
    except AttributeError:  # another system: all is read
        pass
    except OSError as error:  # none, or a file system that does not know
        if error.errno == errno.ENXIO:
            return None
    return stream.seek(at)
