"""Collections in Qdrant, with the contracts of the other indexes."""

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
    Condition,
    Filter,
    Where,
    check_comparable,
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

# Documents and bytes of a request that stores documents. A server takes 32 MB.
BATCH_DOCUMENTS = 2000
BATCH_BYTES = 8_000_000
# Documents of a request that reads documents.
_FETCHED_DOCUMENTS = 1000
# Documents with the score of the last result that a search looks through: a number per result, and
# at least this many.
_TIED_PER_RESULT = 10
_MIN_TIED = 1000
FUSIONS = ("rrf", "dbsf")

# Called with the number of documents that are stored, and the number of all.
Progress = Callable[[int, int], None]


class QdrantCollection:
    """A Qdrant collection of documents with sparse, dense and token vectors.

    It is opened by :meth:`embedded` or :meth:`server`. As a context manager it is closed at the
    end. Several threads may use it. Changes that a call has reported are durable, also if the
    process is killed, and the call may be repeated.

    **Order.** Hits are in descending order of score, and equal scores are in the order of ids. The
    engine computes scores in float32 (relative error about 2^-24 per term, or 2^-11 with
    ``weights="float16"``). For sparse vectors alone, this order also decides which documents are
    the `k` best, unless more than ``10 k + 1000`` documents share the last score. For other
    queries, the engine chooses among equal documents at the end of the `k` best.

    Sparse search and MaxSim compare every document. Dense search of a large collection uses a
    graph, which misses some documents, unless ``exact=True``.

    Attributes:
        place: where the collection is, for messages.
    """

    def __init__(self, engine: Engine, record: Record) -> None:
        self._engine = engine
        self._record = record
        self.place = engine.place
        # Closes the engine when nothing refers to the collection, or Python ends.
        self._finalizer = weakref.finalize(self, _close_quietly, engine)

    @classmethod
    def embedded(
        cls,
        folder: str | Path,
        layout: Layout | None = None,
        *,
        verify: bool = True,
    ) -> QdrantCollection:
        """Open or create the collection in a folder, which one process at a time can open.

        Args:
            folder: of the collection.
            layout: of a new collection. An existing one must have the same.
            verify: compare the files with their checksums, which takes 1 to 3 s per GB.

        Raises:
            FileNotFoundError: if there is no collection, without `layout`.
            InUseError: if it is open elsewhere.
            VocabularyMismatchError: if it has another vocabulary than `layout`.
            DataError: if it is damaged, or differs from `layout` otherwise.
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
        """Open or create a collection of a Qdrant server.

        Args:
            url: of the server.
            name: of the collection.
            layout: of a new collection. An existing one must have the same.
            api_key: key of the server; by default the environment variable ``QDRANT_API_KEY``.
            timeout: seconds for a request.
            patience: seconds for which a request is repeated while the server is unreachable or
                busy.

        Raises:
            UnreachableError: if the server does not answer.
            PermissionError: if the server refuses the key.

        The other errors are those of :meth:`embedded`.
        """
        from tilefold.retrieval.index.qdrant.server import ServerEngine

        return cls.of(ServerEngine(url, name, api_key, timeout, patience), layout)

    @classmethod
    def of(cls, engine: Engine, layout: Layout | None = None) -> QdrantCollection:
        """Open or create the collection of an engine, which is closed after an error.

        Args:
            engine: engine of a folder or of a server.
            layout: layout of a new collection. An existing one must have the same.

        Raises:
            FileNotFoundError: if there is no collection, without `layout`.
            VocabularyMismatchError: if the collection has another vocabulary than `layout`.
            DataError: if it is damaged, or differs from `layout` otherwise.
        """
        try:
            if layout is not None:
                check_instance("layout", layout, Layout, "Layout(vocab_size=...)")
            record = engine.record()
            if record is None:
                if layout is None:
                    raise FileNotFoundError(
                        f"{engine.place}: there is no such collection. Give a layout to make one.",
                    )
                engine.create(Record(layout))
                # Another process may have created it first.
                record = engine.record() or Record(layout)
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
        """Release the folder or the connections.

        This happens by itself when nothing refers to the collection, or Python ends.
        """
        self._finalizer.detach()
        self._engine.close()

    def add(self, documents: Documents, *, progress: Progress | None = None) -> None:
        """Add documents as :meth:`upsert` does.

        Raises:
            DataError: for an id that is there already; nothing is added.
        """
        self._check(documents)
        present_ids = self.present(documents.ids)
        repeated = [name for name in documents.ids if name in present_ids]
        if repeated:
            raise ArgumentDataError(
                "documents",
                f"{len(repeated)} of {len(documents)} ids are in {self.place} already, "
                f"{repeated[0]!r} the first. Nothing was added; upsert replaces documents.",
            )
        self._upsert(documents, BATCH_DOCUMENTS, progress)

    def upsert(
        self,
        documents: Documents,
        *,
        batch_size: int = BATCH_DOCUMENTS,
        progress: Progress | None = None,
    ) -> None:
        """Add documents, or replace documents with the same ids, with all vectors and the payload.

        Vectors of another precision than those of the collection are a ``PrecisionWarning``.

        Args:
            documents: with all kinds of vectors of the collection.
            batch_size: documents of a request, which are stored together or not at all.
            progress: called after each request as ``progress(documents stored, all)``.
        """
        self._check(documents)
        self._upsert(documents, batch_size, progress)

    def _upsert(
        self,
        documents: Documents,
        batch_size: int,
        progress: Progress | None,
    ) -> None:
        """Store checked documents, and warn if they have another precision than stored ones.

        Args:
            documents: documents that :meth:`_check` accepted.
            batch_size: documents of a request.
            progress: called after each request as ``progress(documents stored, all)``.
        """
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
        """Delete documents.

        Args:
            ids: of the documents; unknown ids are ignored.

        Returns:
            How many of the documents there were.

        Raises:
            TypeError: for one text instead of a list.
        """
        present_ids = sorted(self.present(ids))
        if present_ids:
            self._record_change(self._record.precisions, self._record.kinds)
        for start in range(0, len(present_ids), BATCH_DOCUMENTS):
            batch = present_ids[start : start + BATCH_DOCUMENTS]
            self._engine.delete([key_of(name) for name in batch])
        return len(present_ids)

    def build(
        self,
        documents: Documents,
        *,
        texts_sha256: str | None = None,
        batch_size: int = BATCH_DOCUMENTS,
        progress: Progress | None = None,
        resumes: Progress | None = None,
    ) -> None:
        """Fill an empty collection with documents, or resume an interrupted build of them.

        The collection is not :attr:`complete` until the build ends. A collection that has exactly
        these documents is left as it is.

        Args:
            documents: all documents of the collection.
            texts_sha256: digest of their texts; by default that of the sparse vectors.
            batch_size: documents of a request.
            progress: called after each request as ``progress(documents stored, all)``.
            resumes: called first, with the same arguments, if the build was interrupted before.

        Raises:
            DataError: for a collection with other documents, or an unfinished build of others.
        """
        self._check(documents)
        digest = documents.digest(self.layout)
        if self._record.vectors_sha256 == digest:
            if self.complete:
                return
            if resumes is not None:
                resumes(len(self), len(documents))
        elif not self.complete or len(self):
            got = "an unfinished build of other documents"
            if self.complete:
                got = f"{len(self)} documents"
            raise DataError(
                f"{self.place}: expected an empty collection, or an unfinished build of the same "
                f"vectors, got {got}. Choose another place, or drop it (overwrite=True or "
                "--overwrite).",
            )
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
        n_stored = len(self)
        if n_stored != len(documents):
            raise DataError(
                f"{self.place}: expected {len(documents)} documents, got {n_stored}. Does another "
                "write?",
            )
        self._write(replace(self._record, complete=True))

    def drop(self) -> None:
        """Remove the collection and close it."""
        self._engine.drop()
        self.close()

    def optimize(self) -> None:
        """Build the final index of documents that were added to an embedded collection.

        Search is then faster. A server does so by itself.
        """
        self._engine.optimize()

    def count(self, where: Where = None) -> int:
        """Return the number of documents, of all or of those that match."""
        return self._engine.count(self._checked_filter(where))

    def _checked_filter(self, where: Where) -> Filter | None:
        """Parse a filter, and check that documents can meet its conditions.

        Args:
            where: filter of documents; None for no filter.

        Raises:
            ValueError: for a condition on a field that no document has, or on a kind of values
                (such as numbers) that the field has in no document.
        """
        parsed = Filter.of(where)
        if parsed is None:
            return None
        must, must_not = parsed.conditions()
        for name, condition in [*must, *must_not]:
            try:
                check_comparable(name, condition, self.field_kinds)
            except ValueError:
                if self._may_hold(name, condition):
                    continue
                raise
        return parsed

    def _may_hold(self, name: str, condition: Condition) -> bool:
        """Return whether a document may meet a condition that no recorded field meets.

        The record of the fields may be incomplete. Other processes may have written documents since
        it was read, and other programs than tilefold do not record their fields.

        Args:
            name: name of the field.
            condition: condition on its values.
        """
        kinds = self._read_field_kinds()
        # Nothing can be excluded if the kinds are unknown. An empty collection accepts any filter.
        if kinds is None or not len(self):
            return True
        if not paths_of(name, kinds):
            # No document is known to have the field. The engine counts those that have it.
            return self._engine.count(Filter(must_not={name: None})) > 0
        with suppress(ValueError):
            check_comparable(name, condition, kinds)
            return True
        return False

    def _check(self, documents: Documents) -> None:
        """Raise an error unless the collection can store documents."""
        check_instance("documents", documents, Documents, "Documents(ids, vectors)")
        documents.check(self.layout, self.place)

    def _joined_kinds(self, documents: Documents) -> Mapping[str, list[str]] | None:
        """Return the kinds of the fields of all documents, with those of new ones."""
        recorded = self.field_kinds
        if recorded is not None and joined_kinds(recorded, documents.field_kinds) != recorded:
            # Another process may have recorded fields, which writing the record must not lose.
            recorded = self._read_field_kinds()
        return None if recorded is None else joined_kinds(recorded, documents.field_kinds)

    def _read_field_kinds(self) -> Mapping[str, list[str]] | None:
        """Read the kinds of fields again, to which other processes may have added."""
        latest = self._engine.record()
        if latest is not None:
            self._record = replace(self._record, kinds=latest.kinds)
        return self._record.kinds

    def ids(self) -> Iterator[str]:
        """Iterate over the ids of all documents, in no order."""
        yield from self._engine.ids()

    def present(self, ids: Sequence[str]) -> set[str]:
        """Return those of some ids that the collection has."""
        return set(self.payloads(ids))

    def payloads(self, ids: Sequence[str]) -> dict[str, Json]:
        """Return id -> payload, without ids that the collection lacks."""
        payload_by_id = {}
        for point in self._points(ids):
            payload = dict(point.payload)
            name = payload.pop(ID)
            payload_by_id[name] = payload
        return payload_by_id

    def vectors(self, ids: Sequence[str]) -> SparseVectors:
        """Return the sparse vectors of documents, with their stored weights.

        Args:
            ids: of the documents; unknown ids are left out.

        Returns:
            The vectors, in the order of `ids`.
        """
        ids = checked_ids(ids)
        weights_by_id: dict[str, dict[int, float]] = {}
        for point in self._points(ids, vectors=True):
            terms, weights = point.vectors.get(SPARSE, ([], []))
            weights_by_id[point.payload[ID]] = dict(zip(terms, weights, strict=True))
        vectors = SparseVectors.from_rows(
            {name: weights_by_id[name] for name in ids if name in weights_by_id},
            self.layout.vocab_size or 1,
            self.layout.fingerprint,
        )
        vectors.provenance = replace(self.provenance, texts_sha256=None)
        return vectors

    def has_metadata(self) -> bool:
        """Whether any document has a field besides its id.

        It reads until the first one that has.
        """
        ids = self.ids()
        while names := list(itertools.islice(ids, _FETCHED_DOCUMENTS)):
            if any(self.payloads(names).values()):
                return True
        return False

    def _points(self, ids: Sequence[str], vectors: bool = False) -> Iterator[Point]:
        """Iterate over the documents with some ids, in any order.

        Args:
            ids: of the documents; unknown ids are left out.
            vectors: whether to read the vectors too.
        """
        keys = [key_of(name) for name in checked_ids(ids)]
        for start in range(0, len(keys), _FETCHED_DOCUMENTS):
            yield from self._engine.fetch(
                keys[start : start + _FETCHED_DOCUMENTS],
                vectors=vectors,
            )

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
        """Return at most `k` documents for each query, in the order that the class promises.

        Sparse scores are inner products, and documents that share no term with the query are not
        returned. Dense scores are dot products or cosines, and scores of token vectors are MaxSim.
        A document without a vector of a kind is not found by that kind.

        Args:
            queries: with the kinds of vectors that are searched.
            k: documents per query.
            where: field -> value, list or range that must match, or a :class:`Filter`.
            fusion: how the engine joins the rankings of several kinds of vectors. ``"rrf"`` is the
                sum of ``1 / (rank_constant + rank)``, as in
                :func:`tilefold.retrieval.reciprocal_rank_fusion`. ``"dbsf"`` is the sum of scores
                that are normalized by their distribution.
            rerank: score the `depth` best documents of the first stage by MaxSim.
            depth: documents of each ranking that is fused or reranked, `k` at least.
            rank_constant: of ``"rrf"``.
            exact: compare dense vectors with every document.

        Raises:
            ValueError: for a wrong option, several kinds of vectors without a fusion, and a
                condition on a field or a kind of values that no document has.
            VocabularyMismatchError: for queries over another vocabulary.
            DataError: for queries with vectors that the collection lacks.
        """
        check_k(k)
        if isinstance(queries, SparseVectors):
            queries = Queries(queries.ids, queries)
        check_instance("queries", queries, Queries, "SparseVectors or Queries(ids, vectors)")
        queries.check(self.layout, self.place)
        _check_options(queries, fusion, rerank, depth, rank_constant)
        stage_of_rows = {}
        for row in range(len(queries)):
            stage = last_stage(
                queries.vectors(row),
                k,
                fusion=fusion,
                rerank=rerank,
                depth=max(depth, k),
                rank_constant=rank_constant,
                exact=exact,
            )
            if stage is not None:
                stage_of_rows[row] = stage
        parsed_filter = self._checked_filter(where)
        rankings = self._engine.query(list(stage_of_rows.values()), parsed_filter)
        hits: list[list[Hit]] = [[] for _ in range(len(queries))]
        for (row, stage), ranking in zip(stage_of_rows.items(), rankings, strict=True):
            hits[row] = self._hits(stage, parsed_filter, ranking, k)
        return hits

    def _hits(
        self,
        stage: Stage,
        where: Filter | None,
        ranking: list[tuple[str, float]],
        k: int,
    ) -> list[Hit]:
        """Return the `k` best documents of a ranking, equal scores in the order of ids.

        For sparse vectors, the engine was asked for ``k + 1`` documents. If the last two have equal
        scores, more documents may share that score, and the engine chose any of them. It is then
        asked again for up to ``10 k + 1000`` more documents, so that the order of ids decides.

        Args:
            stage: stage of the search that gave the ranking.
            where: filter of the documents.
            ranking: ids and scores, best first.
            k: the most documents to return.
        """
        is_sparse = stage.using == SPARSE
        if is_sparse and len(ranking) > k and ranking[k - 1][1] == ranking[k][1]:
            limit = k + _TIED_PER_RESULT * k + _MIN_TIED
            (ranking,) = self._engine.query([stage._replace(limit=limit)], where)
        for name, score in ranking:
            if not math.isfinite(score):
                raise DataError(
                    f"{self.place}: expected finite scores, got {score} for {name!r}. {REMEDY}",
                )
        hits = [Hit(name, score) for name, score in ranking if score > 0 or not is_sparse]
        return sorted(hits, key=lambda hit: (-hit.score, hit.id))[:k]

    def _put(
        self,
        documents: Documents,
        batch_size: int,
        progress: Progress | None,
        resume: bool,
    ) -> None:
        """Store documents, batch by batch.

        Args:
            documents: to store.
            batch_size: documents of a request.
            progress: called after each request.
            resume: leave out batches whose documents an interrupted build has stored.
        """
        check_count("batch_size", batch_size)
        n_done = 0
        for rows in documents.batches(batch_size, BATCH_BYTES):
            points = documents.points(rows)
            if not (resume and self._has_all(points)):
                self._engine.upsert(points)
            n_done += len(rows)
            if progress is not None:
                progress(n_done, len(documents))

    def _has_all(self, points: Sequence[Point]) -> bool:
        """Whether the collection has all of some documents."""
        stored = self._engine.fetch([point.key for point in points], vectors=False)
        return len(stored) == len(points)

    def _record_change(
        self,
        precisions: Mapping[str, str],
        kinds: Mapping[str, list[str]] | None,
    ) -> None:
        """Record that single documents are about to change.

        The digests of the texts and vectors of the build are removed, because they will no longer
        be true.

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
        """Replace the record of the collection."""
        self._engine.write_record(record)
        self._record = record


def _close_quietly(engine: Engine) -> None:
    """Close an engine without raising an error, for a finalizer."""
    with suppress(Exception):
        engine.close()


def _check_options(
    queries: Queries,
    fusion: str | None,
    rerank: bool,
    depth: int,
    rank_constant: int,
) -> None:
    """Raise ``ValueError`` for options of a search that do not go together.

    Args:
        queries: queries with vectors of one or several kinds (sparse, dense, tokens).
        fusion: how the rankings of several kinds are fused; None for one kind.
        rerank: whether token vectors rank the results of the other kinds anew.
        depth: documents that each kind retrieves before fusion or reranking.
        rank_constant: constant of reciprocal rank fusion.
    """
    check_count("depth", depth)
    check_count("rank_constant", rank_constant)
    if fusion is not None:
        check_choice("fusion", fusion, FUSIONS)
    # Kinds of the first stage. Tokens that rerank belong to the second stage.
    first_kinds = [kind for kind in queries.kinds if not (rerank and kind == TOKENS)]
    if rerank and (queries.tokens is None or not first_kinds):
        raise ArgumentError(
            "rerank",
            "expected queries with tokens, and with sparse or dense vectors for the first stage.",
        )
    if fusion is None and len(first_kinds) > 1:
        raise ArgumentError(
            "fusion",
            f"expected one of {', '.join(FUSIONS)} for {' and '.join(first_kinds)} vectors, got "
            "None.",
        )
    if fusion is not None and len(first_kinds) < 2:
        raise ArgumentError(
            "fusion",
            f"expected several kinds of vectors to fuse, got {', '.join(first_kinds)}. "
            "Leave it out.",
        )
