"""A collection in Qdrant, with the contracts of the other indexes."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tilefold._internal.arguments import (
    ArgumentError,
    check_choice,
    check_count,
    check_instance,
    check_k,
    path_of,
)
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.provenance import (
    Provenance,
    joined_precisions,
    warn_of_other_precision,
)
from tilefold.retrieval.data.metadata import (
    Filter,
    Wanted,
    Where,
    check_condition,
    joined_kinds,
    paths_of,
)
from tilefold.retrieval.errors import ArgumentDataError, DataError
from tilefold.retrieval.index.protocol import REMEDY, Hit
from tilefold.retrieval.index.qdrant.documents import Documents, Queries, checked_ids, key_of
from tilefold.retrieval.index.qdrant.engine import (
    ID,
    SPARSE,
    TOKENS,
    Engine,
    Layout,
    Point,
    Record,
    Stage,
    last_stage,
)
from tilefold.retrieval.vectors.sparse import SparseVectors

BATCH_BYTES = 8_000_000  # of a request; a server takes 32 MB
BATCH = 2000
_LOOKED_UP = 1000
FUSIONS = ("rrf", "dbsf")

Progress = Callable[[int, int], None]


class QdrantCollection:
    """Documents with sparse, dense and token vectors, to add to, replace in, delete from, filter
    and search.

    Opened by :meth:`embedded` or :meth:`server`; also a context manager, which closes it. Several
    threads may use it. What a call that adds or removes has reported is kept, also when the process
    is killed; it may be repeated.

    **Order.** Hits are in descending order of the score that the engine computed in float32
    (relative error about 2^-24 per term; 2^-11 with ``weights="float16"``), equal scores by id. For
    sparse vectors alone this also decides which documents are the `k` best, unless more than ``10 k
    + 1000`` documents share the last score; for other queries, which of equal documents are the
    last of the `k` best is the engine's choice. Sparse search and MaxSim look at every document;
    dense search uses a graph in large collections, and misses some, unless ``exact=True``.
    """

    def __init__(self, engine: Engine, record: Record) -> None:
        self._engine, self._record, self.place = engine, record, engine.place
        self._let_go = weakref.finalize(self, _close_quietly, engine)

    @classmethod
    def embedded(
        cls,
        folder: str | Path,
        layout: Layout | None = None,
        *,
        verify: bool = True,
    ) -> QdrantCollection:
        """The collection in `folder`, open in one process at a time; made there if a `layout` is
        given.

        `verify` compares its files with their checksums, which takes 1 to 3 s for each GB. No
        collection and no layout is a ``FileNotFoundError``, one that is open elsewhere an
        ``InUseError``, another layout or damage a ``VocabularyMismatchError`` or ``DataError``.
        """
        from tilefold.retrieval.index.qdrant.edge import RECORD, EdgeEngine

        folder = path_of("folder", folder)
        if layout is None and not (folder / RECORD).is_file():
            raise FileNotFoundError(
                f"{folder}: no collection there. Give a layout to make one (or tilefold index).",
            )
        return cls.of(EdgeEngine(folder, verify=verify), layout)

    @classmethod
    def server(
        cls,
        url: str,
        name: str,
        layout: Layout | None = None,
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        patience: float = 20.0,
    ) -> QdrantCollection:
        """The collection `name` of the Qdrant server at `url`; made there if a `layout` is given.

        `api_key` is by default ``QDRANT_API_KEY`` of the environment; `timeout` are the seconds for
        a request, `patience` those in which a server that is away or busy is asked again. Errors
        are those of :meth:`embedded`, ``UnreachableError`` without an answer, and
        ``PermissionError`` where the server refused the key.
        """
        from tilefold.retrieval.index.qdrant.server import ServerEngine

        return cls.of(ServerEngine(url, name, api_key, timeout, patience), layout)

    @classmethod
    def of(cls, engine: Engine, layout: Layout | None = None) -> QdrantCollection:
        """The collection of an engine, which is closed when it has another layout; errors as of the
        two above.
        """
        try:
            if layout is not None:
                check_instance("layout", layout, Layout, "Layout(vocab_size=...)")
            if (record := engine.record()) is None:
                if layout is None:
                    raise FileNotFoundError(
                        f"{engine.place}: there is no such collection. Give a layout to make one.",
                    )
                engine.create(Record(layout))
                record = engine.record() or Record(
                    layout,
                )  # of another process, where that was first
            if layout is not None:
                record.layout.check_same(layout, engine.place)
        except BaseException:
            engine.close()
            raise
        return cls(engine, record)

    @property
    def layout(self) -> Layout:
        return self._record.layout

    @property
    def complete(self) -> bool:
        return self._record.complete

    @property
    def provenance(self) -> Provenance:
        """Model and precision of the sparse vectors, and the texts.

        The texts are unknown once single documents were changed.
        """
        return Provenance(
            model_fingerprint=self.layout.models.get(SPARSE),
            texts_sha256=self._record.texts_sha256,
            passages=self.layout.passages,
            precision=self._record.precisions.get(SPARSE),
        )

    @property
    def field_kinds(self) -> Mapping[str, list[str]] | None:
        """Field of the payload -> kinds of its values, of all documents that there were.

        None for a collection of a version of tilefold that did not record them.
        """
        return self._record.kinds

    def __len__(self) -> int:
        return self._engine.count(None)

    def __enter__(self) -> QdrantCollection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder or the connections back; done at the end of Python, or when nothing
        refers to it any more.
        """
        self._let_go.detach()
        self._engine.close()

    def add(self, documents: Documents, *, progress: Progress | None = None) -> None:
        """Add documents as :meth:`upsert` does.

        Raises:
            DataError: for an id that is there already; nothing is added.
        """
        self._check(documents)
        present = self.present(documents.ids)
        if there := [name for name in documents.ids if name in present]:
            found = f"{len(there)} of {len(documents)} ids are in {self.place} already, {there[0]!r} the first"
            raise ArgumentDataError(
                "documents", f"{found}. Nothing was added; upsert replaces documents."
            )
        self._upsert(documents, BATCH, progress)

    def upsert(
        self,
        documents: Documents,
        *,
        batch_size: int = BATCH,
        progress: Progress | None = None,
    ) -> None:
        """Add documents, and replace those whose ids are there: vectors, of every kind of the
        collection, and payload.

        `batch_size` documents of a request are kept together or not at all; then `progress` gets
        (documents kept, all). Vectors of another precision than those of the collection are a
        ``PrecisionWarning``.
        """
        self._check(documents)
        self._upsert(documents, batch_size, progress)

    def _upsert(
        self,
        documents: Documents,
        batch_size: int,
        progress: Progress | None,
    ) -> None:
        """Put checked documents, and warn where they have another precision than the others."""
        precisions = dict(self._record.precisions)
        for kind, precision in documents.precisions.items():
            warn_of_other_precision(
                f"documents: their {kind} vectors",
                precision,
                self.place,
                precisions.get(kind),
                stacklevel=3,
            )
            precisions[kind] = joined_precisions([precision, precisions.get(kind)]) or precision
        self._record_change(precisions, self._joined_kinds(documents))
        self._put(documents, batch_size, progress, resume=False)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete documents; how many of the `ids` there were. One text instead of a list is a
        ``TypeError``.
        """
        if there := sorted(self.present(ids)):
            self._record_change(self._record.precisions, self._record.kinds)
        for start in range(0, len(there), BATCH):
            self._engine.delete([key_of(name) for name in there[start : start + BATCH]])
        return len(there)

    def build(
        self,
        documents: Documents,
        *,
        texts_sha256: str | None = None,
        batch_size: int = BATCH,
        progress: Progress | None = None,
        resumes: Progress | None = None,
    ) -> None:
        """Put `documents`, and nothing else, into an empty collection; the same call resumes an
        interrupted one.

        Until it ends the collection is not :attr:`complete`. One that holds exactly these is left
        as it is; one with other documents, or an unfinished build of others, is a ``DataError``.
        `texts_sha256` is by default that of the sparse vectors; `resumes` gets (documents kept,
        all) first, if the build was interrupted before.
        """
        self._check(documents)
        digest = documents.digest(self.layout)
        if self._record.vectors_sha256 == digest:
            if self.complete:
                return
            if resumes is not None:
                resumes(len(self), len(documents))
        elif not self.complete or len(self):
            what = (
                f"{len(self)} documents"
                if self.complete
                else "an unfinished build of other documents"
            )
            remedy = "Choose another place, or drop it (overwrite=True or --overwrite)."
            expected = "an empty collection, or an unfinished build of the same vectors"
            raise DataError(f"{self.place}: expected {expected}, got {what}. {remedy}")
        if texts_sha256 is None and documents.sparse is not None:
            texts_sha256 = documents.sparse.provenance.texts_sha256
        layout = replace(self.layout, models={**self.layout.models, **documents.models})
        self._write(
            Record(
                layout,
                texts_sha256,
                digest,
                complete=False,
                precisions=documents.precisions,
                kinds=documents.field_kinds,
            ),
        )
        self._put(documents, batch_size, progress, resume=True)
        self._engine.optimize()
        if (found := len(self)) != len(documents):
            raise DataError(
                f"{self.place}: expected {len(documents)} documents, got {found}. Does another "
                "write?",
            )
        self._write(replace(self._record, complete=True))

    def drop(self) -> None:
        """Remove the collection and close it."""
        self._engine.drop()
        self.close()

    def optimize(self) -> None:
        """Embedded: make the final index of what was added, for faster search. A server does so by
        itself.
        """
        self._engine.optimize()

    def count(self, where: Where = None) -> int:
        """Number of documents in all, or that match."""
        return self._engine.count(self._checked(where))

    def _checked(self, where: Where) -> Filter | None:
        """Return a filter, or raise ``ValueError`` for a condition that no document could meet.

        That is one on a field, or on a kind of values, that no document has, as in the other
        indexes.
        """
        checked = Filter.of(where)
        if checked is None:
            return None
        must, must_not = checked.conditions()
        for name, wanted in [*must, *must_not]:
            try:
                check_condition(name, wanted, self.field_kinds)
            except ValueError:
                if self._may_hold(name, wanted):
                    continue
                raise
        return checked

    def _may_hold(self, name: str, wanted: Wanted) -> bool:
        """Return whether a document may meet a condition that the known kinds of fields exclude.

        Other processes may have written documents since the record was read, and programs other
        than tilefold do not record the fields of theirs.
        """
        kinds = self._read_field_kinds()
        if kinds is None or not len(self):
            return True
        if not paths_of(name, kinds):
            return self._engine.count(Filter(must_not={name: None})) > 0
        with suppress(ValueError):
            check_condition(name, wanted, kinds)
            return True
        return False

    def _check(self, documents: Documents) -> None:
        """Raise an error unless the collection can take documents."""
        check_instance("documents", documents, Documents, "Documents(ids, vectors)")
        documents.check(self.layout, self.place)

    def _joined_kinds(self, documents: Documents) -> Mapping[str, list[str]] | None:
        """Return the kinds of the fields of all documents, with those of new ones."""
        recorded = self.field_kinds
        if recorded is not None and joined_kinds(recorded, documents.field_kinds) != recorded:
            recorded = self._read_field_kinds()  # so that none is lost when the record is written
        return None if recorded is None else joined_kinds(recorded, documents.field_kinds)

    def _read_field_kinds(self) -> Mapping[str, list[str]] | None:
        """Read the kinds of fields again, to which other processes may have added."""
        latest = self._engine.record()
        if latest is not None:
            self._record = replace(self._record, kinds=latest.kinds)
        return self._record.kinds

    def ids(self) -> Iterator[str]:
        """The ids of all documents, in no order."""
        yield from self._engine.ids()

    def present(self, ids: Sequence[str]) -> set[str]:
        """Subset of the `ids` that exist."""
        return set(self.payloads(ids))

    def payloads(self, ids: Sequence[str]) -> dict[str, Json]:
        """Id -> payload, of those of the `ids` that are there."""
        return {
            point.payload[ID]: {name: value for name, value in point.payload.items() if name != ID}
            for point in self._points(ids)
        }

    def vectors(self, ids: Sequence[str]) -> SparseVectors:
        """The sparse vectors of those of the `ids` that are there, in their order, as they are
        stored.
        """
        ids = checked_ids(ids)
        rows = {
            point.payload[ID]: dict(zip(*point.vectors.get(SPARSE, ([], [])), strict=True))
            for point in self._points(ids, vectors=True)
        }
        rows = {name: rows[name] for name in ids if name in rows}
        found = SparseVectors.from_rows(rows, self.layout.vocab_size or 1, self.layout.fingerprint)
        found.provenance = replace(self.provenance, texts_sha256=None)
        return found

    def has_metadata(self) -> bool:
        """Whether any document has a field beside its id; reads until the first that has one."""
        ids = self.ids()
        while names := list(itertools.islice(ids, _LOOKED_UP)):
            if any(self.payloads(names).values()):
                return True
        return False

    def _points(self, ids: Sequence[str], vectors: bool = False) -> Iterator[Point]:
        keys = [key_of(name) for name in checked_ids(ids)]
        for start in range(0, len(keys), _LOOKED_UP):
            yield from self._engine.fetch(keys[start : start + _LOOKED_UP], vectors)

    def search(
        self,
        queries: Queries | SparseVectors,
        k: int = 10,
        *,
        where: Where = None,
        fusion: str | None = None,
        rerank: bool = False,
        depth: int = 100,
        rank_constant: int = 60,
        exact: bool = False,
    ) -> list[list[Hit]]:
        """At most `k` documents for each query, in the order that the class promises.

        Sparse scores are inner products, and documents that share no term with the query are not
        returned; dense scores are dot products or cosines; those of token vectors are MaxSim. What
        has no vector of a kind is not found by it.

        Args:
            where: field -> value, list or range that must match, or a :class:`Filter`.
            fusion: of several kinds of vectors by the engine: ``"rrf"``, the sum of ``1 /
                (rank_constant + rank)`` as in :func:`tilefold.retrieval.reciprocal_rank_fusion`, or
                ``"dbsf"`` (scores by their distribution).
            rerank: score the `depth` best of the first stage by MaxSim of the token vectors.
            depth: documents of each ranking that is fused or reranked, `k` at least.
            exact: compare dense vectors with every document.

        A wrong option, several kinds of vectors without a fusion, or a condition on a field or a
        kind of values that no document has, is a ``ValueError``, queries that the collection has no vectors for a ``VocabularyMismatchError`` or ``DataError``.
        """
        check_k(k)
        if isinstance(queries, SparseVectors):
            queries = Queries(queries.ids, queries)
        check_instance("queries", queries, Queries, "SparseVectors or Queries(ids, vectors)")
        queries.check(self.layout, self.place)
        _check_options(queries, fusion, rerank, depth, rank_constant)
        options = (k, fusion, rerank, max(depth, k), rank_constant, exact)
        stages = [last_stage(queries.vectors(row), *options) for row in range(len(queries))]
        chosen = self._checked(where)
        answers = iter(self._engine.query([stage for stage in stages if stage is not None], chosen))
        return [
            [] if stage is None else self._ranked(stage, chosen, next(answers), k)
            for stage in stages
        ]

    def _ranked(
        self,
        stage: Stage,
        where: Filter | None,
        answer: list[tuple[str, float]],
        k: int,
    ) -> list[Hit]:
        """Hits of an answer; of sparse vectors with all that share the last score."""
        sparse = stage.using == SPARSE
        if sparse and len(answer) > k and answer[k - 1][1] == answer[k][1]:
            (answer,) = self._engine.query([stage._replace(limit=11 * k + 1000)], where)
        for name, score in answer:
            if not math.isfinite(score):
                raise DataError(
                    f"{self.place}: expected finite scores, got {score} for {name!r}. {REMEDY}",
                )
        hits = [Hit(name, score) for name, score in answer if score > 0 or not sparse]
        return sorted(hits, key=lambda hit: (-hit.score, hit.id))[:k]

    def _put(
        self,
        documents: Documents,
        batch_size: int,
        progress: Progress | None,
        resume: bool,
    ) -> None:
        check_count("batch_size", batch_size)
        done = 0
        for rows in documents.batches(batch_size, BATCH_BYTES):
            points = documents.points(rows)
            if not resume or len(
                self._engine.fetch([point.key for point in points], vectors=False),
            ) < len(points):
                self._engine.upsert(points)
            done += len(rows)
            if progress is not None:
                progress(done, len(documents))

    def _record_change(
        self,
        precisions: Mapping[str, str],
        kinds: Mapping[str, list[str]] | None,
    ) -> None:
        """Record, before single documents change, that the texts are no longer those of a build.

        Args:
            precisions: kind of vectors -> their precisions after the change.
            kinds: field of the payload -> kinds of its values after the change; None if unknown.

        Raises:
            DataError: for a collection whose build is not finished.
        """
        if not self.complete:
            raise DataError(
                f"{self.place}: its build is not finished. Finish it (tilefold index), or drop it.",
            )
        changed = replace(
            self._record,
            texts_sha256=None,
            vectors_sha256=None,
            precisions=precisions,
            kinds=kinds,
        )
        if self._record != changed:
            self._write(changed)

    def _write(self, record: Record) -> None:
        self._engine.write_record(record)
        self._record = record


def _close_quietly(engine: Engine) -> None:
    with suppress(Exception):
        engine.close()


def _check_options(
    queries: Queries,
    fusion: str | None,
    rerank: bool,
    depth: int,
    rank_constant: int,
) -> None:
    check_count("depth", depth)
    check_count("rank_constant", rank_constant)
    if fusion is not None:
        check_choice("fusion", fusion, FUSIONS)
    first = [kind for kind in queries.kinds if not (rerank and kind == TOKENS)]
    if rerank and (queries.tokens is None or not first):
        raise ArgumentError(
            "rerank",
            "expected queries with tokens, and with sparse or dense vectors for the first stage.",
        )
    if fusion is None and len(first) > 1:
        raise ArgumentError(
            "fusion",
            f"expected one of {', '.join(FUSIONS)} for {' and '.join(first)} vectors, got None.",
        )
    if fusion is not None and len(first) < 2:
        raise ArgumentError(
            "fusion",
            f"expected several kinds of vectors to fuse, got {', '.join(first)}. Leave it out.",
        )
