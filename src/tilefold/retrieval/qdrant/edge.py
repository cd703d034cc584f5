"""A collection in a folder, through qdrant-edge: the engine of Qdrant in this process.

Behaviour of qdrant-edge-py 0.9.0 that this wrapper handles: opening a folder that is open already fails, but damages it
for the one that has it open, so a lock of ours comes first; errors are bare ``Exception``; numbers that are not finite,
terms given twice and token vectors beyond the server's limit are stored without a word (``Documents`` refuses them);
``MatchValue(True)`` is that of the integer 1. It has no checksums: bytes that changed give other rankings, abort the
process or never return (``Checksums`` comes first). It maps files ahead that have no space yet: where the disk is full,
the system ends the process (so space is asked for first).
"""

from __future__ import annotations

import atexit
import os
import shutil
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tilefold._files import LOCK, DiskFullError, InUseError, hold_folder, naming_full_disk, release_folder
from tilefold.retrieval._files import read_json_object, require, write_json_object
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import REMEDY
from tilefold.retrieval.qdrant.checksums import CHECKSUMS, Checksums
from tilefold.retrieval.qdrant.filters import Condition, Filter
from tilefold.retrieval.qdrant.layout import DENSE, ID, SPARSE, TOKENS, Layout, Record
from tilefold.retrieval.qdrant.plans import Plan, Point, Stage

RECORD = "collection.json"
SHARD = "shard"
OWN_NAMES = (RECORD, SHARD, CHECKSUMS, LOCK)
_AHEAD = 64 << 20  # that a batch may fill, of 8 MB: two files of 32 MB of the log
_PAGE = 1000
_open: weakref.WeakSet[EdgeEngine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what a program that ends has left open, so that it has checksums."""
    for engine in list(_open):
        with suppress(Exception):
            engine.close()


class EdgeEngine:
    """The collection in `folder`, open in this process alone until it is closed.

    Its files are compared with their checksums before the engine opens them, unless ``verify=False``. Where there are
    none, which is warned of, they are made when it is closed.

    Raises:
        MissingPackageError: qdrant-edge-py is not installed.
        InUseError: the folder is open in a process, this one included.
        DataError: what is there cannot be read.
    """

    _shard: Any = None
    _process: int | None = None  # that has it open

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self._edge = require("qdrant_edge", "qdrant-edge-py", "An embedded Qdrant collection", "qdrant")
        self.folder, self.place = folder, str(folder)
        try:
            self._lock = hold_folder(folder, again=False)
        except InUseError:
            raise InUseError(
                f"{folder}: the collection is open elsewhere, and an embedded one can be open once at a time. Close it "
                "there, or keep the collection on a Qdrant server."
            ) from None
        self._checksums = Checksums(folder / SHARD, version("qdrant-edge-py"))
        try:
            record = self.record()
            if record is not None:
                self._load(record, verify)
        except RuntimeError as error:
            release_folder(self._lock)
            raise DataError(f"{error} {REMEDY}") from error
        except BaseException:
            release_folder(self._lock)
            raise
        self._process = os.getpid()
        _open.add(self)

    def _load(self, record: Record, verify: bool) -> None:
        self._checksums.read(verify=verify)
        if verify and record.complete and not self._checksums.kept:
            warnings.warn(
                f"{self.place}: its files have no checksums, so that damage is not noticed: an earlier tilefold made "
                "them, or a process that changed them did not close them. Closing it makes checksums.",
                RuntimeWarning,
                stacklevel=5,
            )
        if not self._checksums.kept:  # else it writes nothing
            self._need_space(0)
        with self._errors():
            self._shard = self._edge.EdgeShard.load(str(self.folder / SHARD))
        self._checksums.confirm()

    def record(self) -> Record | None:
        """What the collection says of itself; None where there is none."""
        file = self.folder / RECORD
        return Record.from_dict(read_json_object(file, REMEDY), self.place) if file.exists() else None

    def create(self, record: Record) -> None:
        """An empty collection. A shard without a record is what a killed creation left, and is removed."""
        edge, layout = self._edge, record.layout
        self._changing()
        shutil.rmtree(self.folder / SHARD, ignore_errors=True)
        vectors: dict[str, Any] = {}
        if layout.dense is not None:
            distance = edge.Distance.Dot if layout.distance == "dot" else edge.Distance.Cosine
            vectors[DENSE] = edge.EdgeVectorParams(size=layout.dense, distance=distance)
        if layout.tokens is not None:
            vectors[TOKENS] = edge.EdgeVectorParams(
                size=layout.tokens,
                distance=edge.Distance.Dot,
                multivector_config=edge.MultiVectorConfig(edge.MultiVectorComparator.MaxSim),
                hnsw_config=edge.HnswIndexConfig(0, 4, 10_000),  # no graph: MaxSim is exact
            )
        sparse = {}
        if layout.vocab_size is not None:
            kind = edge.VectorStorageDatatype
            datatype = kind.Float32 if layout.weights == "float32" else kind.Float16
            sparse[SPARSE] = edge.EdgeSparseVectorParams(datatype=datatype)
        with self._errors():
            config = edge.EdgeConfig(vectors=vectors, sparse_vectors=sparse)
            self._shard = edge.EdgeShard.create(str(self.folder / SHARD), config)
            for name, schema in layout.fields.items():
                kinds = edge.PayloadSchemaType
                self._shard.update(edge.UpdateOperation.create_field_index(name, getattr(kinds, schema.capitalize())))
            self._shard.flush()
        self.write_record(record)

    def write_record(self, record: Record) -> None:
        """Replace what the collection says of itself."""
        write_json_object(self.folder / RECORD, record.to_dict())

    def drop(self) -> None:
        """Remove the collection."""
        (self.folder / RECORD).unlink(missing_ok=True)
        if self._shard is not None:
            with self._errors():
                self._shard.close()
            self._shard = None
        self._checksums.remove()
        shutil.rmtree(self.folder / SHARD, ignore_errors=True)

    def upsert(self, points: Sequence[Point]) -> None:
        """Add or replace points, and flush them to disk."""
        edge = self._edge
        made = [edge.Point(point.key, self._vectors(point.vectors), point.payload) for point in points]
        self._changing()
        with self._errors():
            self._shard.update(edge.UpdateOperation.upsert_points(made))
            self._shard.flush()

    def delete(self, keys: Sequence[str]) -> None:
        """Remove points, and flush that to disk."""
        self._changing()
        with self._errors():
            self._shard.update(self._edge.UpdateOperation.delete_points(list(keys)))
            self._shard.flush()

    def fetch(self, keys: Sequence[str], vectors: bool) -> list[Point]:
        """Those of the points that there are, in any order."""
        with self._errors():
            found = self._shard.retrieve(list(keys), True, vectors)
        return [self._point(record) for record in found]

    def scroll(self) -> Iterator[Point]:
        """All points, without vectors and with their ids alone."""
        offset: Any = None
        while True:
            request = self._edge.ScrollRequest(offset=offset, limit=_PAGE, with_payload=[ID])
            with self._errors():
                page, offset = self._shard.scroll(request)
            yield from (self._point(record) for record in page)
            if offset is None:
                return

    def count(self, where: Filter | None) -> int:
        """How many points match."""
        with self._errors():
            request = self._edge.CountRequest(exact=True, filter=self._filter(where))
            return int(self._shard.count(request))

    def query(self, plans: Sequence[Plan], layout: Layout) -> list[list[tuple[str, float]]]:
        """Ids and scores for each plan."""
        edge = self._edge
        requests = []
        for stage, where in plans:
            chosen = self._filter(where)
            requests.append(
                edge.QueryRequest(
                    limit=stage.limit,
                    query=self._scoring(stage),
                    prefetches=[self._prefetch(part, chosen) for part in stage.stages] or None,
                    with_payload=[ID],
                    filter=chosen,
                    params=edge.SearchParams(exact=True) if stage.exact else None,
                )
            )
        with self._errors():
            answers = self._shard.query_batch(edge.QueryBatchRequest(requests))
        return [[(point.payload[ID], float(point.score)) for point in answer] for answer in answers]

    def optimize(self) -> None:
        """Make the final index of what was added."""
        self._changing(_allocated(self.folder / SHARD))  # which is written anew
        with self._errors():
            self._shard.optimize()
            self._shard.flush()

    def close(self) -> None:
        """Flush, and let others open the folder."""
        _open.discard(self)
        if self._process != os.getpid() or not self._lock.is_locked:  # of a process that forked this one, or closed
            return
        try:
            if self._shard is not None:
                with self._errors():
                    self._shard.close()
                self._checksums.confirm()
                self._keep_checksums()
        finally:
            self._shard = None
            release_folder(self._lock)

    def __del__(self) -> None:
        """Close what nobody can close any more, so that it has checksums."""
        if self._shard is not None:  # it may be closed, and the rest of this module gone
            with suppress(Exception):
                self.close()

    def _changing(self, more: int = 0) -> None:
        """Comes before every change, which may write 64 MB and `more` bytes.

        Raises:
            DiskFullError: there is no space for it.
        """
        if self._shard is None and self.record() is not None:
            return  # closed: the call will say so
        self._need_space(more)
        self._checksums.remove()

    def _need_space(self, more: int) -> None:
        free, needed = shutil.disk_usage(self.folder).free, _AHEAD + more
        if free < needed:
            raise DiskFullError(
                f"{self.place}: could not be written, the disk is full: Qdrant may need {needed >> 20} MB, "
                f"{free >> 20} MB are free. Free some space there, or choose another place; what was complete is kept."
            )

    def _keep_checksums(self) -> None:
        """Make the checksums of a shard that is closed, unless they are there or a build is unfinished."""
        record = self.record()
        if self._checksums.kept or record is None or not record.complete:
            return
        try:
            self._need_space(0)
            with self._errors():  # what it leaves to the next opening is done now
                self._edge.EdgeShard.load(str(self.folder / SHARD)).close()
            self._checksums.write()
        except (OSError, RuntimeError) as error:
            warnings.warn(
                f"{self.place}: the collection is whole, but has no checksums ({error}), so that damage would not be "
                "noticed. Open and close it again.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _vectors(self, vectors: dict[str, Any]) -> dict[str, Any]:
        sparse = vectors.get(SPARSE)
        return vectors if sparse is None else {**vectors, SPARSE: self._edge.SparseVector(*sparse)}

    def _point(self, record: Any) -> Point:
        vectors = dict(record.vector or {})
        if SPARSE in vectors:
            vectors[SPARSE] = (list(vectors[SPARSE].indices), list(vectors[SPARSE].values))
        return Point(str(record.id), dict(record.payload or {}), vectors)

    def _scoring(self, stage: Stage) -> Any:
        edge = self._edge
        if stage.fusion == "rrf":  # its ranks start at 0
            return edge.Fusion.Rrf(stage.rank_constant + 1)
        if stage.fusion:
            return edge.Fusion.Dbsf()
        vector = edge.SparseVector(*stage.vector) if stage.using == SPARSE else stage.vector
        return edge.Query.Nearest(vector, using=stage.using)

    def _prefetch(self, stage: Stage, chosen: Any) -> Any:
        return self._edge.Prefetch(
            limit=stage.limit,
            query=self._scoring(stage),
            prefetches=[self._prefetch(part, chosen) for part in stage.stages] or None,
            params=self._edge.SearchParams(exact=True) if stage.exact else None,
            filter=chosen,
        )

    def _filter(self, where: Filter | None) -> Any:
        if where is None:
            return None
        must, must_not = ([self._condition(item) for item in where.conditions(must)] for must in (True, False))
        return self._edge.Filter(must=must or None, must_not=must_not or None)

    def _condition(self, condition: Condition) -> Any:
        edge = self._edge
        if condition.values is None:
            return edge.FieldCondition(condition.name, range=edge.RangeFloat(**(condition.bounds or {})))
        single, value = len(condition.values) == 1, condition.values[0]
        value = (
            np.bool_(value) if isinstance(value, bool) else value
        )  # a plain one would be taken for the integer 1 or 0
        match = edge.MatchValue(value) if single else edge.MatchAny(condition.values)
        return edge.FieldCondition(condition.name, match=match)

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
                raise RuntimeError(f"{self.place}: the collection is closed. Open it again.") from error
            raise


def _allocated(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk."""
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file()) if os.name != "nt" else 0
