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

# Largest number of documents and bytes of a request that stores documents. A server accepts 32 MB.
BATCH_DOCUMENTS = 2000
BATCH_BYTES = 8_000_000
# Number of documents of a request that reads documents.
_DOCUMENTS_PER_FETCH = 1000
# Number of extra documents that a search retrieves if documents tie for the last place: this many
# for each result, and a constant.
_TIED_PER_RESULT = 10
_MIN_TIED = 1000
FUSIONS = ("rrf", "dbsf")

# Called with the number of stored documents and the total number of documents.
Progress = Callable[[int, int], None]


class QdrantCollection:
    """A Qdrant collection of documents with sparse, dense and token vectors.

    It is opened by :meth:`embedded` or :meth:`server`. As a context manager, it is closed at the
    end. Several threads may use it. Changes that a call has reported are durable, even if the
    process is killed, and the call may be repeated.

    **Order.** Hits are in descending order of score, and equal scores are in the order of ids. The
    engine computes scores in float32 (relative error about 2^-24 per term, or 2^-11 with
    ``weights="float16"``). For sparse vectors alone, this order also decides which documents are
    the `k` best, if no more than ``10 k + 1000`` documents share the last score. For other queries,
    the engine chooses arbitrarily among documents that tie for the last place.

    Sparse search and MaxSim compare every document. Dense search of a large collection uses a
    graph, which misses some documents, if ``exact`` is False.

    Attributes:
        location: folder or address of the collection, for messages.
    """

    def __init__(self, engine: Engine, record: Record) -> None:
        self._engine = engine
        self._record = record
        self.location = engine.location
        # Closes the engine when the collection is garbage-collected, or when Python exits.
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
            folder: the folder of the collection.
            layout: the layout of a new collection. An existing collection must have the same
                layout. None opens an existing collection only.
            verify: whether to compare the files with their checksums, which takes 1 to 3 s per GB.

        Raises:
            FileNotFoundError: if there is no collection and `layout` is None.
            InUseError: if the collection is open elsewhere.
            VocabularyMismatchError: if the vocabularies of the collection and `layout` differ.
            DataError: if the collection is damaged, or differs from `layout` in another way.
        """
        from tilefold.retrieval.index.qdrant.edge import RECORD, EdgeEngine

        folder = path_of("folder", folder)
        if layout is None and not (folder / RECORD).is_file():
            raise FileNotFoundError(
                f"{folder}: there is no collection. Pass a layout to create one (or run tilefold "
                "index).",
            )
        return cls.open(EdgeEngine(folder, verify=verify), layout)

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
            url: URL of the server.
            name: name of the collection.
            layout: the layout of a new collection. An existing collection must have the same
                layout. None opens an existing collection only.
            api_key: API key of the server; None uses the environment variable ``QDRANT_API_KEY``.
            timeout: time-out of a request, in seconds.
            patience: number of seconds for which a request is retried while the server is
                unreachable or busy.

        Raises:
            FileNotFoundError: if there is no collection and `layout` is None.
            VocabularyMismatchError: if the vocabularies of the collection and `layout` differ.
            DataError: if the collection differs from `layout` in another way.
            UnreachableError: if the server does not answer.
            PermissionError: if the server refuses the key.
        """
        from tilefold.retrieval.index.qdrant.server import ServerEngine

        return cls.open(ServerEngine(url, name, api_key, timeout, patience), layout)

    @classmethod
    def open(cls, engine: Engine, layout: Layout | None = None) -> QdrantCollection:
        """Open or create the collection of an engine, and close the engine on an error.

        Args:
            engine: the engine of a folder or of a server.
            layout: the layout of a new collection. An existing collection must have the same
                layout. None opens an existing collection only.

        Raises:
            FileNotFoundError: if there is no collection and `layout` is None.
            VocabularyMismatchError: if the vocabularies of the collection and `layout` differ.
            DataError: if the collection is damaged, or differs from `layout` in another way.
        """
        try:
            if layout is not None:
                check_instance("layout", layout, Layout, "Layout(vocab_size=...)")
            record = engine.read_record()
            if record is None:
                if layout is None:
                    raise FileNotFoundError(
                        f"{engine.location}: there is no such collection. Pass a layout to create "
                        "one.",
                    )
                engine.create(Record(layout))
                # Another process may have created the collection first, with another record.
                record = engine.read_record() or Record(layout)
            if layout is not None:
                record.layout.check_same(layout, engine.location)
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
        """Fingerprint of the model, precision of the sparse vectors, and digest of the texts.

        There is no digest after individual documents have been changed.
        """
        return Provenance(
            model_fingerprint=self.layout.models.get(SPARSE),
            texts_sha256=self._record.texts_sha256,
            passages=self.layout.passages,
            precision=self._record.precisions.get(SPARSE),
        )

    @property
    def field_kinds(self) -> Mapping[str, list[str]] | None:
        """Field of the payload -> types of its values in all documents that were ever stored.

        None if the collection was created by a version of tilefold that did not record them.
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

        This is automatic when the collection is garbage-collected, or when Python exits.
        """
        self._finalizer.detach()
        self._engine.close()

    def add(self, documents: Documents, *, progress: Progress | None = None) -> None:
        """Add new documents.

        Args:
            documents: documents with each kind of vectors that the collection has.
            progress: called after each request as ``progress(n_stored, n_total)``.

        Raises:
            ArgumentDataError: if an id is stored already. Nothing is added then.
        """
        self._check(documents)
        stored_ids = self.present(documents.ids)
        conflicts = [document_id for document_id in documents.ids if document_id in stored_ids]
        if conflicts:
            raise ArgumentDataError(
                "documents",
                f"{len(conflicts)} of {len(documents)} ids are in {self.location} already, for "
                f"example {conflicts[0]!r}. Nothing was added; upsert replaces documents.",
            )
        self._upsert(documents, BATCH_DOCUMENTS, progress)

    def upsert(
        self,
        documents: Documents,
        *,
        batch_size: int = BATCH_DOCUMENTS,
        progress: Progress | None = None,
    ) -> None:
        """Add documents, or replace the vectors and the payload of documents with the same ids.

        Args:
            documents: documents with each kind of vectors that the collection has.
            batch_size: number of documents per request, which are stored together or not at all.
            progress: called after each request as ``progress(n_stored, n_total)``.

        Warns:
            PrecisionWarning: if the vectors have another precision than those of the collection.
        """
        self._check(documents)
        self._upsert(documents, batch_size, progress)

    def _upsert(
        self,
        documents: Documents,
        batch_size: int,
        progress: Progress | None,
    ) -> None:
        """Store documents, and warn if their precision differs from that of the stored ones.

        Args:
            documents: documents that :meth:`_check` accepted.
            batch_size: number of documents per request.
            progress: called after each request as ``progress(n_stored, n_total)``.
        """
        precisions = dict(self._record.precisions)
        for kind, precision in documents.precisions.items():
            stored_precision = precisions.get(kind)
            warn_of_other_precision(
                f"documents: their {kind} vectors",
                precision,
                self.location,
                stored_precision,
                stacklevel=3,
            )
            precisions[kind] = joined_precisions([precision, stored_precision]) or precision
        field_kinds = self._merge_field_kinds(documents)
        self._start_change(replace(self._record, precisions=precisions, kinds=field_kinds))
        self._put(documents, batch_size, progress, resume=False)

    def delete(self, ids: Sequence[str]) -> int:
        """Delete documents.

        Args:
            ids: ids of the documents. Unknown ids are ignored.

        Returns:
            The number of documents that were deleted.

        Raises:
            TypeError: if `ids` is a string instead of a list.
        """
        present_ids = sorted(self.present(ids))
        if present_ids:
            self._start_change(self._record)
        for start in range(0, len(present_ids), BATCH_DOCUMENTS):
            batch = present_ids[start : start + BATCH_DOCUMENTS]
            self._engine.delete([key_of(document_id) for document_id in batch])
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
        these documents is not changed.

        Args:
            documents: all documents of the collection.
            texts_sha256: digest of the documents' texts; None uses that of the sparse vectors.
            batch_size: number of documents per request.
            progress: called after each request as ``progress(n_stored, n_total)``.
            resumes: called first, with the same arguments, if an interrupted build is resumed.

        Raises:
            DataError: if the collection has other documents, or an unfinished build of other
                documents.
        """
        self._check(documents)
        digest = documents.digest(self.layout)
        if self._record.vectors_sha256 == digest:  # the same documents
            if self.complete:
                return
            if resumes is not None:
                resumes(len(self), len(documents))
        elif not self.complete or len(self):
            got = "an unfinished build of other documents"
            if self.complete:
                got = f"{len(self)} documents"
            raise DataError(
                f"{self.location}: expected an empty collection, or an unfinished build of the "
                f"same vectors, got {got}. Choose another folder or name, or replace the "
                "collection (overwrite=True or --overwrite).",
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
                f"{self.location}: expected {len(documents)} documents, got {n_stored}. Does "
                "another program write to it?",
            )
        self._write(replace(self._record, complete=True))

    def drop(self) -> None:
        """Remove the collection and close it."""
        self._engine.drop()
        self.close()

    def optimize(self) -> None:
        """Build the final index of documents that were added to an embedded collection.

        Searches are then faster. A server does this automatically.
        """
        self._engine.optimize()

    def count(self, where: Where = None) -> int:
        """Return the number of documents that match a filter, or of all documents."""
        return self._engine.count(self._parse_filter(where))

    def _parse_filter(self, where: Where) -> Filter | None:
        """Parse a filter, and check that a document can match its conditions.

        Args:
            where: filter of documents; None for no filter.

        Raises:
            ValueError: if no document has the field of a condition, or has it with values of the
                condition's type, such as numbers.
        """
        parsed = Filter.of(where)
        if parsed is None:
            return None
        must, must_not = parsed.conditions()
        for name, condition in [*must, *must_not]:
            self._check_condition(name, condition)
        return parsed

    def _check_condition(self, name: str, condition: Condition) -> None:
        """Raise ``ValueError`` if no document can match a condition.

        Args:
            name: the name of the field.
            condition: the condition on its values.
        """
        if _is_comparable(name, condition, self.field_kinds):
            return
        # Other processes may have stored documents since the record was read.
        latest_kinds = self._read_field_kinds()
        # An empty collection accepts any filter.
        if latest_kinds is None or not len(self):
            return
        # A field may be unknown because another program, which records no fields, has stored it.
        is_recorded = bool(paths_of(name, latest_kinds))
        if not is_recorded and self._has_field(name):
            return
        check_comparable(name, condition, latest_kinds)

    def _has_field(self, name: str) -> bool:
        """Return whether a document has a value in a field of the payload."""
        return self._engine.count(Filter(must_not={name: None})) > 0

    def _check(self, documents: Documents) -> None:
        """Raise an error if the collection cannot store documents."""
        check_instance("documents", documents, Documents, "Documents(ids, vectors)")
        documents.check_compatible(self.layout, self.location)

    def _merge_field_kinds(self, documents: Documents) -> Mapping[str, list[str]] | None:
        """Return the types of values per field after an upsert.

        Args:
            documents: the new documents.

        Returns:
            Field -> types of its values in stored and new documents; None if the collection does
            not record them.
        """
        recorded = self.field_kinds
        if recorded is None:
            return None
        merged = joined_kinds(recorded, documents.field_kinds)
        if merged == recorded:
            return merged
        # The record will be replaced. It must keep what other processes have recorded meanwhile.
        latest = self._read_field_kinds()
        return None if latest is None else joined_kinds(latest, documents.field_kinds)

    def _read_field_kinds(self) -> Mapping[str, list[str]] | None:
        """Read the types of values per field again, because other processes may change them."""
        latest = self._engine.read_record()
        if latest is not None:
            self._record = replace(self._record, kinds=latest.kinds)
        return self._record.kinds

    def ids(self) -> Iterator[str]:
        """Iterate over the ids of all documents, in any order."""
        yield from self._engine.ids()

    def present(self, ids: Sequence[str]) -> set[str]:
        """Return the subset of ids that are in the collection."""
        return set(self.payloads(ids))

    def payloads(self, ids: Sequence[str]) -> dict[str, Json]:
        """Return the payloads of documents by id. Unknown ids are skipped."""
        payload_by_id = {}
        for point in self._fetch_points(ids, with_vectors=False):
            payload = dict(point.payload)
            document_id = payload.pop(ID)
            payload_by_id[document_id] = payload
        return payload_by_id

    def vectors(self, ids: Sequence[str]) -> SparseVectors:
        """Return the sparse vectors of documents, with their stored weights.

        Args:
            ids: ids of the documents. Unknown ids are skipped.

        Returns:
            The vectors, in the order of `ids`.
        """
        ids = checked_ids(ids)
        weights_by_id: dict[str, dict[int, float]] = {}
        for point in self._fetch_points(ids, with_vectors=True):
            terms, weights = point.vectors.get(SPARSE, ([], []))
            weights_by_id[point.payload[ID]] = dict(zip(terms, weights, strict=True))
        # A collection without sparse vectors has no vocabulary. Its rows are empty.
        vocab_size = self.layout.vocab_size or 1
        vectors = SparseVectors.from_rows(
            {document: weights_by_id[document] for document in ids if document in weights_by_id},
            vocab_size,
            self.layout.fingerprint,
        )
        # The recorded digest is that of all texts, and these vectors may be of some texts only.
        vectors.provenance = replace(self.provenance, texts_sha256=None)
        return vectors

    def has_metadata(self) -> bool:
        """Return whether any document has a field besides its id."""
        all_ids = self.ids()
        while ids := list(itertools.islice(all_ids, _DOCUMENTS_PER_FETCH)):
            if any(self.payloads(ids).values()):
                return True
        return False

    def _fetch_points(self, ids: Sequence[str], *, with_vectors: bool) -> Iterator[Point]:
        """Iterate over the documents with these ids, in any order.

        Args:
            ids: ids of the documents. Unknown ids are skipped.
            with_vectors: whether to read the vectors, too.
        """
        keys = [key_of(document_id) for document_id in checked_ids(ids)]
        for start in range(0, len(keys), _DOCUMENTS_PER_FETCH):
            yield from self._engine.fetch(
                keys[start : start + _DOCUMENTS_PER_FETCH],
                with_vectors=with_vectors,
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
        A document without a vector of a kind is not retrieved by that kind.

        Args:
            queries: queries with the kinds of vectors to search with.
            k: number of documents per query.
            where: field -> value, list or range that must match, or a :class:`Filter`.
            fusion: how the engine fuses the rankings of several kinds of vectors. ``"rrf"`` is the
                sum of ``1 / (rank_constant + rank)``, as in
                :func:`tilefold.retrieval.reciprocal_rank_fusion`. ``"dbsf"`` is the sum of scores
                that are normalized by their distribution.
            rerank: whether to score the `depth` best documents of the first stage by MaxSim.
            depth: number of documents of each ranking that is fused or reranked, at least `k`.
            rank_constant: constant of ``"rrf"``.
            exact: whether to compare dense vectors with every document.

        Raises:
            ValueError: if an option is wrong, if several kinds of vectors have no fusion, or if no
                document can match a condition of `where`.
            VocabularyMismatchError: if the vocabularies of queries and collection differ.
            DataError: if the collection does not have the vectors of the queries.
        """
        check_k(k)
        if isinstance(queries, SparseVectors):
            queries = Queries(queries.ids, queries)
        check_instance("queries", queries, Queries, "SparseVectors or Queries(ids, vectors)")
        queries.check_compatible(self.layout, self.location)
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
        parsed_filter = self._parse_filter(where)
        rankings = self._engine.query(list(stage_of_rows.values()), parsed_filter)
        hits: list[list[Hit]] = [[] for _ in range(len(queries))]
        for (row, stage), ranking in zip(stage_of_rows.items(), rankings, strict=True):
            hits[row] = self._rank_hits(stage, parsed_filter, ranking, k)
        return hits

    def _rank_hits(
        self,
        stage: Stage,
        where: Filter | None,
        ranking: list[tuple[str, float]],
        k: int,
    ) -> list[Hit]:
        """Return the `k` best documents of a ranking, equal scores in the order of ids.

        For sparse vectors, the ranking has ``k + 1`` documents. If the last two have equal scores,
        more documents may share that score, and the engine chose arbitrarily among them. The search
        is then repeated with a higher limit, so that the order of ids decides.

        Args:
            stage: the last stage of the search, whose result is the ranking.
            where: filter of the documents.
            ranking: ids and scores, best first.
            k: largest number of documents to return.
        """
        is_sparse = stage.using == SPARSE
        ranked = ranking
        if is_sparse and len(ranking) > k and ranking[k - 1][1] == ranking[k][1]:
            limit = k + _TIED_PER_RESULT * k + _MIN_TIED
            ranked = self._engine.query([stage._replace(limit=limit)], where)[0]
        for document_id, score in ranked:
            if not math.isfinite(score):
                raise DataError(
                    f"{self.location}: expected finite scores, got {score} for {document_id!r}. "
                    f"{REMEDY}",
                )
        # A sparse score of 0 means that no term is shared. Other scores may be negative.
        hits = [
            Hit(document_id, score) for document_id, score in ranked if score > 0 or not is_sparse
        ]
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
            documents: the documents to store.
            batch_size: number of documents per request.
            progress: called after each request as ``progress(n_stored, n_total)``.
            resume: whether to skip batches whose documents an interrupted build has stored.
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
        """Return whether the collection has all of some documents."""
        stored = self._engine.fetch([point.key for point in points], with_vectors=False)
        return len(stored) == len(points)

    def _start_change(self, record: Record) -> None:
        """Update the record of the collection before individual documents are changed.

        The digests of the build are removed from the record, because they will not match any more.

        Args:
            record: the record after the change.

        Raises:
            DataError: if the build of the collection is not finished.
        """
        if not self.complete:
            raise DataError(
                f"{self.location}: its build is not finished. Finish it (tilefold index), or drop "
                "the collection.",
            )
        changed = replace(record, texts_sha256=None, vectors_sha256=None)
        if self._record != changed:
            self._write(changed)

    def _write(self, record: Record) -> None:
        """Replace the record of the collection."""
        self._engine.write_record(record)
        self._record = record


def _is_comparable(
    name: str,
    condition: Condition,
    kinds: Mapping[str, Sequence[str]] | None,
) -> bool:
    """Return whether a document has a value that a condition can be compared with.

    Args:
        name: the name of the field.
        condition: the condition on its values.
        kinds: field -> kinds of its values in all documents; None if unknown.
    """
    try:
        check_comparable(name, condition, kinds)
    except ValueError:
        return False
    return True


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
    """Raise ``ArgumentError`` if options of a search are wrong or conflict with each other.

    Args:
        queries: queries with vectors of one or several kinds (sparse, dense, tokens).
        fusion: how the rankings of several kinds are fused; None for one kind.
        rerank: whether token vectors rerank the results of the other kinds.
        depth: number of documents that each kind retrieves before fusion or reranking.
        rank_constant: constant of reciprocal rank fusion.
    """
    check_count("depth", depth)
    check_count("rank_constant", rank_constant)
    if fusion is not None:
        check_choice("fusion", fusion, FUSIONS)
    # Token vectors that rerank are used in the second stage, on the results of the first.
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
