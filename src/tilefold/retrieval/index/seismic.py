"""Approximate search with Seismic (Bruch, Nardini, Rulli and Venturini, SIGIR 2024).

The engine is the package pyseismic-lsr. This wrapper handles these properties of its releases 0.5.2
and 0.5.4:

* It prints while it builds and saves.
* A component beyond its dimension corrupts the answer.
* ``k = 0`` panics.
* The answers of a batch may have another order than the queries.
* Weights are 16-bit floats.
* The time of a build grows with the vocabulary, used or not. Terms are therefore renumbered: the
  component of a term is its position among the terms that documents have.
* Release 0.5.2 takes documents one by one, and numbers components again in the order in which they
  occur.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import ArgumentError, check_count
from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.array_checks import check_positions, check_weights, first_outside
from tilefold.retrieval.common.files import Json, require
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.metadata import Mask, Where, allowed_by
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index._half_weights import HalfWeights, SmallWeights
from tilefold.retrieval.index.exact import ExactIndex
from tilefold.retrieval.index.protocol import (
    REMEDY,
    GrowingIndex,
    Hit,
    StoredIds,
    naming_versions,
)
from tilefold.retrieval.vectors.sparse import SparseVectors, check_buildable, check_search

__all__ = ["SeismicIndex", "SeismicOptions"]

_PACKAGE = "pyseismic-lsr"
# The package has separate classes (LV, large vocabulary) for more terms than 16 bits can number.
_SMALL_VOCABULARY = 1 << 16
# The default of n_postings is _POSTINGS_FACTOR * L ** _POSTINGS_EXPONENT. L is the mean number of
# postings of a term.
_POSTINGS_FACTOR = 10
_POSTINGS_EXPONENT = 0.56
_QUERY_CUT = 20
_HEAP_FACTOR = 0.7
# Number of documents from which on Seismic's authors search with other options.
_MANY_DOCUMENTS = 1_000_000
_QUERY_CUT_OF_MANY = 10
_HEAP_FACTOR_OF_MANY = 0.8
# The longest posting list of a term, as a multiple of n_postings.
_MAX_LIST_FRACTION = 1.5
# A filtered search retrieves this many times the documents that contain k matching ones on average.
_FILTER_MARGIN = 4
# Largest fraction of all documents that a filtered search retrieves. If it needs more, an exact
# search is faster.
_MAX_FILTERED_FRACTION = 0.25

# Files of the index. The package appends ".index.seismic" to the stem.
_ENGINE_STEM = "seismic"
_ENGINE_FILE = f"{_ENGINE_STEM}.index.seismic"
_TERMS = "terms.npy"
# Rows of the documents that have terms.
_FILLED = "filled.npy"
# Only if weights are scaled.
_HALF_WEIGHTS = "half_weights.npz"
# Position in `terms.npy` of each component of the engine. Only if the engine renumbered the
# components.
_RANKS = "ranks.npy"

Terms = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SeismicOptions:
    """Options of a Seismic index: five options of the build, then defaults of a search.

    Attributes:
        n_postings: number of postings (documents) that a term keeps, on average. None derives the
            number from the size of the collection (:meth:`for_collection`).
        centroid_fraction: number of clusters of a posting list, as a fraction of its documents.
        min_cluster_size: number of documents of the smallest cluster.
        summary_energy: fraction of a cluster's weight that its summary keeps.
        doc_cut: number of heaviest terms of a document that clustering reads.
        query_cut: number of heaviest terms of a query that choose the clusters. Scores use all
            terms. None derives the number from the size of the collection.
        heap_factor: a number in [0, 1]. A lower value visits more clusters, which is slower and
            closer to exact. None derives the number from the size of the collection.
        num_threads: number of threads; 0 uses one per core.

    Raises:
        ValueError: if a value is out of range.
    """

    n_postings: int | None = None
    centroid_fraction: float = 0.1
    min_cluster_size: int = 10
    summary_energy: float = 0.4
    doc_cut: int = 15
    query_cut: int | None = None
    heap_factor: float | None = None
    num_threads: int = 0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if an option is out of range."""
        if self.n_postings is not None:
            check_count("n_postings", self.n_postings)
        _check_fraction("centroid_fraction", self.centroid_fraction)
        check_count("min_cluster_size", self.min_cluster_size)
        _check_fraction("summary_energy", self.summary_energy)
        check_count("doc_cut", self.doc_cut)
        if self.query_cut is not None:
            check_count("query_cut", self.query_cut)
        if self.heap_factor is not None:
            _check_fraction("heap_factor", self.heap_factor, zero_allowed=True)
        check_count("num_threads", self.num_threads, least=0)

    @classmethod
    def parse(cls, options: Json) -> SeismicOptions:
        """Create options from a mapping, or raise ``ValueError`` if a name is unknown."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise ArgumentError(
                "options",
                f"Seismic has {', '.join(names)}; got {', '.join(unknown)}.",
            )
        return cls(**options)

    @property
    def is_complete(self) -> bool:
        """Whether every option has a value."""
        return None not in (self.n_postings, self.query_cut, self.heap_factor)

    def for_collection(self, documents: int, mean_postings: float) -> SeismicOptions:
        """Fill unset options with values that suit a collection.

        ``n_postings`` is ``10 * L ** 0.56``, where L is the mean number of postings of a term. For
        the 8.8 million documents of MS MARCO, it is 3,500, which is the value of Seismic's authors
        and a tenth of L. For 10,000 documents of 120 terms, it is 2 L, because shorter lists would
        lose documents.

        ``query_cut`` is 20 and ``heap_factor`` is 0.7. From a million documents on, they are 10 and
        0.8, the authors' values.

        Args:
            documents: number of documents.
            mean_postings: L, the mean number of documents that have a term, over all terms that
                occur.

        Returns:
            A copy of the options with no option left unset.
        """
        n_postings = self.n_postings
        if n_postings is None:
            n_postings = max(1, round(_POSTINGS_FACTOR * mean_postings**_POSTINGS_EXPONENT))
        has_many_documents = documents >= _MANY_DOCUMENTS
        query_cut = self.query_cut
        if query_cut is None:
            query_cut = _QUERY_CUT_OF_MANY if has_many_documents else _QUERY_CUT
        heap_factor = self.heap_factor
        if heap_factor is None:
            heap_factor = _HEAP_FACTOR_OF_MANY if has_many_documents else _HEAP_FACTOR
        return replace(
            self,
            n_postings=n_postings,
            query_cut=query_cut,
            heap_factor=heap_factor,
        )


def _check_fraction(name: str, value: Any, *, zero_allowed: bool = False) -> None:
    """Raise ``ArgumentError`` if an option is not in (0, 1] or, with `zero_allowed`, in [0, 1].

    Args:
        name: the name of the option.
        value: the value of the option.
        zero_allowed: whether 0 is valid.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and 0.0 <= value <= 1.0 and (zero_allowed or value != 0.0):
        return
    interval = "[0, 1]" if zero_allowed else "(0, 1]"
    raise ArgumentError(name, f"expected a number in {interval}, got {value!r}.")


class _EngineQueries(NamedTuple):
    """Queries in the form of the engine, which identifies queries and terms by strings.

    Attributes:
        names: the row of each query as a string.
        components: for each query, the positions of its terms among the terms of the index, as
            strings.
        weights: for each query, the weights of these terms.
    """

    names: list[str]
    components: list[npt.NDArray[Any]]
    weights: list[Scores]


class SeismicIndex(GrowingIndex):
    """An approximate index of clustered posting lists with summaries.

    Scores are inner products of all query terms with weights that are rounded to 16-bit floats,
    whose relative error is below 1e-3. If weights are too small or too large for 16 bits, all are
    multiplied by a power of two. Weights that are still too small are stored in 32 bits and
    searched exactly. Building uses random clustering, so two builds may miss different documents.
    """

    backend = "seismic"
    package = _PACKAGE
    own_files = (_TERMS, _FILLED, _ENGINE_FILE, _HALF_WEIGHTS, _RANKS)

    def __init__(
        self,
        engine: Any,
        ids: Sequence[str],
        terms: Terms,
        nonempty_rows: Rows,
        options: SeismicOptions,
        *,
        vocab_size: int,
        fingerprint: str | None,
        provenance: Provenance,
        half_weights: HalfWeights | None = None,
        engine_terms: Terms | None = None,
    ) -> None:
        """Wrap an engine that was built or loaded.

        Args:
            engine: an index of the package; None if no document has a term.
            ids: ids of all documents.
            terms: int32 ``[M]``, the terms that occur in documents, ascending.
            nonempty_rows: rows of the documents that have terms, ascending. Only these documents
                are in the engine.
            options: options of the index, with all defaults filled in.
            vocab_size: number of terms of the vocabulary.
            fingerprint: digest of the vocabulary; None if it is unknown.
            provenance: model and texts that the vectors were computed from.
            half_weights: conversion of the weights to the engine's 16-bit floats; None if they are
                not scaled.
            engine_terms: int32 ``[M]``, the term of each component of the engine; None if the
                engine has the terms in the order of `terms`.
        """
        self._engine = engine
        self.ids = ids
        self._terms = terms
        self._nonempty_rows = nonempty_rows
        self.options = options
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint
        self.provenance = provenance
        self._half_weights = half_weights or HalfWeights()
        self._engine_terms = terms if engine_terms is None else engine_terms
        # The folder that the index was loaded from; None for an index that was built in memory.
        self._folder: Path | None = None

    @classmethod
    def build(cls, vectors: SparseVectors, **options: object) -> SeismicIndex:
        """Build an index of sparse vectors.

        Args:
            vectors: sparse vectors of the documents.
            options: fields of :class:`SeismicOptions`.

        Raises:
            ValueError: if no weight is positive, or an option is wrong.
        """
        _import_seismic()
        check_buildable(vectors)
        return cls.build_unchecked(vectors, **options)

    @classmethod
    def build_unchecked(cls, vectors: SparseVectors, **options: object) -> SeismicIndex:
        """Build an index of vectors, which may all be empty after an update.

        Args:
            vectors: sparse vectors of the documents.
            options: fields of :class:`SeismicOptions`.

        Raises:
            ValueError: if an option is wrong.
        """
        parsed_options = SeismicOptions.parse(options)
        if not (vectors.data > 0).any():  # the engine cannot be built without a term
            return cls(
                None,
                list(vectors.ids),
                np.empty(0, np.int32),
                np.empty(0, np.int64),
                parsed_options.for_collection(len(vectors), mean_postings=0),
                vocab_size=vectors.vocab_size,
                fingerprint=vectors.fingerprint,
                provenance=vectors.provenance,
            )
        half_weights, scaled = HalfWeights.split(vectors)
        occurrences = np.bincount(scaled.indices, minlength=vectors.vocab_size)
        terms = np.flatnonzero(occurrences).astype(np.int32)
        full_options = parsed_options.for_collection(
            len(vectors),
            mean_postings=scaled.indices.size / terms.size,
        )
        engine, engine_terms = _build_engine(scaled, terms, full_options)
        return cls(
            engine,
            list(vectors.ids),
            terms,
            np.flatnonzero(np.diff(scaled.indptr)),
            full_options,
            vocab_size=vectors.vocab_size,
            fingerprint=vectors.fingerprint,
            provenance=vectors.provenance,
            half_weights=half_weights,
            engine_terms=engine_terms,
        )

    def search(
        self,
        queries: SparseVectors,
        k: int,
        *,
        query_cut: int | None = None,
        heap_factor: float | None = None,
        where: Where = None,
        allowed: Mask | None = None,
    ) -> list[list[Hit]]:
        """Return at most `k` documents for each query, best first.

        The search is approximate, so it may miss some of the best documents.

        A filtered search returns `k` matching documents, or all that share a term with the query.
        It retrieves more documents than `k` and drops those that do not match. If fewer than `k`
        are left, or if few documents match at all, it scores all matching documents exactly. If
        both `where` and `allowed` are passed, documents must match both.

        Args:
            queries: sparse vectors over the vocabulary of the index.
            k: number of documents per query.
            query_cut: number of heaviest terms of a query that choose the clusters to visit; None
                uses the value of the build.
            heap_factor: a number in [0, 1]; a lower value is slower and closer to exact. None uses
                the value of the build.
            where: filter of the documents' metadata.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.
        """
        check_search(self, queries, k)
        options = replace(
            self.options,
            query_cut=self.options.query_cut if query_cut is None else query_cut,
            heap_factor=self.options.heap_factor if heap_factor is None else heap_factor,
        )
        allowed = allowed_by(self.metadata, where, allowed)
        if allowed is None:
            return [
                [Hit(self.ids[row], score) for row, score in ranking]
                for ranking in self._rank(queries, k, options)
            ]
        return self._filtered_search(queries, k, options, allowed)

    def _filtered_search(
        self,
        queries: SparseVectors,
        k: int,
        options: SeismicOptions,
        allowed: Mask,
    ) -> list[list[Hit]]:
        """Return the `k` best allowed documents for each query.

        The approximate search cannot filter, so it retrieves more than `k` documents: four times
        the number that contains `k` allowed ones on average. A query that still has fewer than `k`
        hits is searched exactly. If the approximate search would retrieve more than a quarter of
        all documents, every query is searched exactly.

        Args:
            queries: sparse vectors over the vocabulary of the index.
            k: number of documents per query.
            options: options of the approximate search.
            allowed: bool ``[N]``, False for documents that are left out.
        """
        # On average, k * N / n_allowed documents contain k allowed ones.
        n_allowed = max(1, int(allowed.sum()))
        depth = _FILTER_MARGIN * k * self.n_documents // n_allowed
        hits: list[list[Hit]]
        if depth < int(self.n_documents * _MAX_FILTERED_FRACTION):
            hits = [
                [Hit(self.ids[row], score) for row, score in ranking if allowed[row]][:k]
                for ranking in self._rank(queries, depth, options)
            ]
        else:
            hits = [[] for _ in range(len(queries))]
        short_rows = [query_row for query_row, row_hits in enumerate(hits) if len(row_hits) < k]
        if short_rows:
            exact_hits = self._exact_index.search(queries.take(short_rows), k, allowed=allowed)
            for query_row, row_hits in zip(short_rows, exact_hits, strict=True):
                hits[query_row] = row_hits
        return hits

    def stored(self) -> SparseVectors:
        """Return the vectors of the documents with their stored weights, without zeros.

        The weights are rounded to 16 bits, as the engine stores them, except weights that are too
        small for 16 bits.
        """
        n_terms = np.zeros(self.n_documents, np.int64)
        # An empty array comes first, so that the arrays of an index without terms can be
        # concatenated.
        components = [np.empty(0, np.int32)]
        weights = [np.empty(0, np.float32)]
        for position, row in enumerate(self._nonempty_rows.tolist()):
            document_components, document_weights = self._engine.get(position)
            n_terms[row] = len(document_components)
            components.append(np.array(document_components, np.int32))
            weights.append(np.array(document_weights, np.float32))
        vectors = SparseVectors(
            list(self.ids),
            offsets_of(n_terms),
            self._engine_terms[np.concatenate(components)],
            self._half_weights.unscaled(np.concatenate(weights)),
            self.vocab_size,
            self.fingerprint,
            self.provenance,
        )
        return self._half_weights.with_small_weights(vectors)

    @cached_property
    def _exact_index(self) -> ExactIndex:
        return ExactIndex.build_unchecked(self.stored())

    def _rank(
        self,
        queries: SparseVectors,
        k: int,
        options: SeismicOptions,
    ) -> list[list[tuple[int, float]]]:
        """Rank documents for each query.

        Args:
            queries: sparse vectors over the vocabulary of the index.
            k: largest number of documents per query.
            options: options of the approximate search.

        Returns:
            For each query, pairs of a document's row and its score, best first. Scores are
            positive.
        """
        rankings: list[list[tuple[int, float]]] = []
        small = self._half_weights.small
        for query_row, answer in enumerate(self._search_engine(queries, k, options)):
            rows, scores = answer
            if small is not None:
                terms, weights = queries.row(query_row)
                rows, scores = self._add_small_weights(rows, scores, small, terms, weights, k)
            # By descending score, then by ascending row.
            order = np.lexsort((rows, -scores))[:k]
            order = order[scores[order] > 0]
            rankings.append(list(zip(rows[order].tolist(), scores[order].tolist(), strict=True)))
        return rankings

    def _add_small_weights(
        self,
        rows: Rows,
        scores: Scores,
        small: SmallWeights,
        terms: Terms,
        weights: Scores,
        k: int,
    ) -> tuple[Rows, Scores]:
        """Complete the engine's scores of a query by weights that are too small for 16 bits.

        These weights are stored outside of the engine. A document's score is the inner product of
        the query with its weights in the engine, plus the inner product with its small weights.
        Documents that the engine did not retrieve are added if they are among the best `k` by their
        small weights.

        Args:
            rows: rows of the documents that the engine retrieved.
            scores: scores of these documents by the engine's weights.
            small: the small weights of some documents.
            terms: terms of the query, ascending.
            weights: weights of these terms.
            k: largest number of documents that are added.

        Returns:
            Rows of documents, in any order, and their scores.
        """
        small_scores = small.scores(terms, weights)
        # Positions, in both arrays of rows, of the documents that occur in both.
        _, in_retrieved, in_small = np.intersect1d(
            rows,
            small.rows,
            assume_unique=True,
            return_indices=True,
        )
        scores = scores.copy()
        scores[in_retrieved] += small_scores[in_small]
        candidates = np.flatnonzero((small_scores > 0) & ~np.isin(small.rows, rows))
        best_first = np.argsort(-small_scores[candidates], kind="stable")
        added = candidates[best_first[:k]]
        added_rows = small.rows[added]
        engine_scores = [self._engine_score(row, terms, weights) for row in added_rows.tolist()]
        added_scores = small_scores[added] + np.array(engine_scores, np.float32)
        return np.concatenate([rows, added_rows]), np.concatenate([scores, added_scores])

    def _engine_score(self, row: int, terms: Terms, weights: Scores) -> float:
        """Return the inner product of a query with the weights of one document in the engine.

        Args:
            row: row of the document. If it has no weights in the engine, the product is 0.
            terms: terms of the query, ascending.
            weights: weights of these terms.
        """
        # The engine numbers the documents by their positions in `_nonempty_rows`.
        position = int(np.searchsorted(self._nonempty_rows, row))
        if position == len(self._nonempty_rows) or self._nonempty_rows[position] != row:
            return 0.0
        components, stored_weights = self._engine.get(position)
        document_terms = self._engine_terms[np.asarray(components, np.int64)]
        document_weights = self._half_weights.unscaled(np.asarray(stored_weights, np.float32))
        _, in_query, in_document = np.intersect1d(
            terms,
            document_terms,
            assume_unique=True,
            return_indices=True,
        )
        return float(weights[in_query] @ document_weights[in_document])

    def _search_engine(
        self,
        queries: SparseVectors,
        k: int,
        options: SeismicOptions,
    ) -> list[tuple[Rows, Scores]]:
        """Search with the engine, which is the index of the package.

        Args:
            queries: sparse vectors over the vocabulary of the index.
            k: largest number of documents per query.
            options: options of the search.

        Returns:
            For each query, rows of documents in any order, and their scores by the weights in the
            engine, with the scale of the weights undone.

        Raises:
            DataError: if the engine fails, and was loaded from a folder.
        """
        no_documents = (np.empty(0, np.int64), np.empty(0, np.float32))
        results = [no_documents for _ in range(len(queries))]
        if self._engine is None:
            return results
        engine_queries = self._convert_queries(queries)
        if not engine_queries.names:
            return results
        with self._naming_folder():
            for hits in self._call_engine(engine_queries, k, options):
                rows = np.array([int(document) for _, _, document in hits], np.int64)
                scaled_scores = np.array([score for _, score, _ in hits], np.float32)
                # A damaged engine may return anything.
                check_positions("documents", rows, self.n_documents)
                check_weights("scores", scaled_scores)
                if hits:
                    query_name, _, _ = hits[0]
                    results[int(query_name)] = (rows, self._half_weights.unscaled(scaled_scores))
        return results

    def _call_engine(
        self,
        queries: _EngineQueries,
        k: int,
        options: SeismicOptions,
    ) -> list[list[tuple[str, float, str]]]:
        """Search one query or a batch of queries with the engine's functions.

        Args:
            queries: at least one query.
            k: largest number of documents per query.
            options: options of the search.

        Returns:
            A list for each query, whose entries are the name of the query, the score, and the row
            of the document as a string.
        """
        n_results = min(int(k), self.n_documents)
        heap_factor = float(cast("float", options.heap_factor))
        if len(queries.names) > 1:
            hits_by_query: list[list[tuple[str, float, str]]] = self._engine.batch_search(
                np.array(queries.names, dtype=_import_seismic().get_seismic_string()),
                queries.components,
                queries.weights,
                k=n_results,
                query_cut=options.query_cut,
                heap_factor=heap_factor,
                num_threads=options.num_threads,
            )
            return hits_by_query
        # Starting the threads of a batch takes longer than one query.
        hits = self._engine.search(
            queries.names[0],
            queries.components[0],
            queries.weights[0],
            k=n_results,
            query_cut=options.query_cut,
            heap_factor=heap_factor,
        )
        return [hits]

    def _convert_queries(self, queries: SparseVectors) -> _EngineQueries:
        """Convert queries for the engine, and leave out queries without a term of the index.

        Args:
            queries: sparse vectors over the vocabulary of the index.
        """
        string_type = _import_seismic().get_seismic_string()
        engine_queries = _EngineQueries([], [], [])
        for query_row in range(len(queries)):
            query_terms, query_weights = queries.row(query_row)
            # Position of each query term among the terms of the index, if it is one of them. A term
            # above all of them is compared with the last one.
            positions = np.searchsorted(self._terms, query_terms)
            positions = np.minimum(positions, self._terms.size - 1)
            in_index = (self._terms[positions] == query_terms) & (query_weights > 0)
            if in_index.any():
                engine_queries.names.append(str(query_row))
                engine_queries.components.append(positions[in_index].astype(string_type))
                engine_queries.weights.append(np.ascontiguousarray(query_weights[in_index]))
        return engine_queries

    @contextmanager
    def _naming_folder(self) -> Iterator[None]:
        """Turn errors of the engine into a ``DataError`` that names the folder of a loaded index.

        If an engine that was loaded from files fails in a search, the files are damaged. Errors of
        an engine that was built in memory are passed on.
        """
        try:
            with _panics_as_errors():
                yield
        except (RuntimeError, ValueError) as error:
            if self._folder is None:
                raise
            raise DataError(f"{self._folder}: could not be searched ({error}). {REMEDY}") from error

    def _write(self, folder: Path) -> None:
        """Write the engine and the arrays that translate its rows, terms and weights."""
        if self._engine is not None:
            with _silenced_output():
                self._engine.save(str(folder / _ENGINE_STEM))
        np.save(folder / _TERMS, self._terms)
        np.save(folder / _FILLED, self._nonempty_rows)
        if not self._half_weights.is_default:
            self._half_weights.save(folder / _HALF_WEIGHTS)
        if not np.array_equal(self._engine_terms, self._terms):
            ranks = np.searchsorted(self._terms, self._engine_terms)
            np.save(folder / _RANKS, ranks.astype(np.int32))

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> SeismicIndex:
        """Load the engine of a saved index, and check that all files are consistent.

        Args:
            folder: the folder of the index.
            manifest: the manifest of the index, with the options of the build.
            ids: ids of all documents.

        Raises:
            DataError: if the files are inconsistent.
        """
        _import_seismic()
        vocab_size = manifest["vocab_size"]
        engine = None
        half_weights = None
        engine_terms = None
        with naming_versions(folder, manifest, _PACKAGE):
            options = SeismicOptions.parse(manifest["options"])
            if not options.is_complete:
                raise DataError(
                    "options: expected numbers for n_postings, query_cut, heap_factor, "
                    f"got {options}.",
                )
            terms = _read_terms(folder, vocab_size)
            nonempty_rows = np.load(folder / _FILLED, allow_pickle=False)
            if terms.size:
                engine = _load_engine(folder / _ENGINE_FILE, terms, nonempty_rows, len(ids))
            elif nonempty_rows.size:
                raise DataError(
                    f"{_FILLED}: expected no rows, because there are no terms, "
                    f"got {nonempty_rows.size}.",
                )
            if _HALF_WEIGHTS in manifest["files"]:
                half_weights = HalfWeights.load(folder / _HALF_WEIGHTS, len(ids), vocab_size)
            if _RANKS in manifest["files"]:
                engine_terms = terms[_read_permutation(folder / _RANKS, terms.size)]
        index = cls(
            engine,
            list(ids),
            terms,
            nonempty_rows,
            options,
            vocab_size=vocab_size,
            fingerprint=manifest.get("fingerprint"),
            provenance=Provenance.from_dict(manifest),
            half_weights=half_weights,
            engine_terms=engine_terms,
        )
        index._folder = folder
        return index


def _read_terms(folder: Path, vocab_size: int) -> Terms:
    """Read the terms that occur in at least one document of an index.

    Args:
        folder: the folder of the index.
        vocab_size: number of terms of the vocabulary.

    Raises:
        DataError: if the terms are not an ascending int32 array within ``[0, vocab_size)``.
    """
    terms: Terms = np.load(folder / _TERMS, allow_pickle=False)
    if terms.dtype != np.int32 or terms.ndim != 1 or (terms[1:] <= terms[:-1]).any():
        raise DataError(
            f"{_TERMS}: expected ascending int32 terms, got {terms.dtype} {terms.shape}.",
        )
    invalid_position = first_outside(terms, vocab_size)
    if invalid_position is not None:
        raise DataError(
            f"{_TERMS}: expected terms in [0, {vocab_size}), got {terms[invalid_position]}.",
        )
    return terms


def _read_permutation(file: Path, n_terms: int) -> Terms:
    """Read which term each component of the engine is, as a position among the index's terms.

    Args:
        file: the file of the permutation.
        n_terms: number of terms of the index.

    Raises:
        DataError: if the file does not have each position once.
    """
    permutation: Terms = np.load(file, allow_pickle=False)
    is_permutation = np.array_equal(np.sort(permutation), np.arange(n_terms))
    if permutation.dtype != np.int32 or not is_permutation:
        raise DataError(
            f"{file.name}: expected each int32 number below {n_terms} once, "
            f"got {permutation.dtype} {permutation.shape}.",
        )
    return permutation


def _build_engine(
    vectors: SparseVectors,
    terms: Terms,
    options: SeismicOptions,
) -> tuple[Any, Terms]:
    """Build the package's index (the engine) of all documents that have terms.

    The engine's name of a document is its row, and its components are numbers of terms.

    Args:
        vectors: sparse vectors of the documents, with weights that 16 bits represent.
        terms: int32 ``[M]``, the terms that occur in documents, ascending.
        options: options of the build.

    Returns:
        The engine, and the term of each of its components, int32 ``[M]``.
    """
    package = _import_seismic()
    if terms.size > _SMALL_VOCABULARY:
        dataset_type = package.SeismicDatasetLV
        engine_type = package.SeismicIndexLV
    else:
        dataset_type = package.SeismicDataset
        engine_type = package.SeismicIndex
    # The component of a term is its position in `terms`.
    component_of_term = np.zeros(vectors.vocab_size, np.int64)
    component_of_term[terms] = np.arange(terms.size)
    components = component_of_term[vectors.indices]
    with _silenced_output():
        if hasattr(dataset_type, "add_documents_by_id"):  # since release 0.5.4
            dataset = dataset_type(dim=int(terms.size))
            names = [str(row) for row in range(len(vectors))]
            # Documents without terms are left out.
            dataset.add_documents_by_id(names, components, vectors.data, vectors.indptr)
            engine_terms = terms
        else:
            dataset = _dataset_of_named_components(dataset_type, vectors, components, terms.size)
            # The package numbered the components in the order in which they first occur.
            _, first_occurrences = np.unique(components, return_index=True)
            engine_terms = terms[np.argsort(first_occurrences)]
        engine = engine_type.build_from_dataset(
            dataset,
            n_postings=options.n_postings,
            centroid_fraction=options.centroid_fraction,
            min_cluster_size=options.min_cluster_size,
            summary_energy=options.summary_energy,
            doc_cut=options.doc_cut,
            num_threads=options.num_threads,
            max_fraction=_MAX_LIST_FRACTION,
            nknn=0,
        )
    return engine, engine_terms


def _dataset_of_named_components(
    dataset_type: Any,
    vectors: SparseVectors,
    components: Rows,
    n_components: int,
) -> Any:
    """Create the dataset of a package before release 0.5.4, which takes components as strings.

    Args:
        dataset_type: the package's class of the dataset.
        vectors: sparse vectors of the documents.
        components: component of each weight of the vectors, as a number.
        n_components: number of components.
    """
    dataset = dataset_type()
    names = np.arange(n_components).astype(_import_seismic().get_seismic_string())
    for row in range(len(vectors)):
        entries = slice(vectors.indptr[row], vectors.indptr[row + 1])
        if entries.start < entries.stop:
            dataset.add_document(str(row), names[components[entries]], vectors.data[entries])
    return dataset


def _load_engine(file: Path, terms: Terms, nonempty_rows: Rows, n_documents: int) -> Any:
    """Load the engine of an index.

    Args:
        file: the file that the engine wrote.
        terms: the terms that occur in documents. Their number decides the engine's class.
        nonempty_rows: rows of the documents that have terms.
        n_documents: number of documents of the index.

    Raises:
        DataError: if the engine has another number of terms or documents, or if a row is not below
            `n_documents`.
    """
    package = _import_seismic()
    is_large = terms.size > _SMALL_VOCABULARY
    engine_type = package.SeismicIndexLV if is_large else package.SeismicIndex
    with _silenced_output():
        engine = engine_type.load(str(file))
    if engine.dim != terms.size or engine.len != nonempty_rows.size:
        raise DataError(
            f"{_ENGINE_FILE}: expected {nonempty_rows.size} texts and {terms.size} terms, got "
            f"{engine.len} texts and {engine.dim} terms.",
        )
    invalid_position = first_outside(nonempty_rows, n_documents)
    if invalid_position is not None:
        raise DataError(
            f"{_FILLED}: expected rows in [0, {n_documents}), got "
            f"{nonempty_rows[invalid_position]}.",
        )
    return engine


def _import_seismic() -> ModuleType:
    return require("seismic", _PACKAGE, "The seismic backend", extra="")


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raise panics of native code as ``RuntimeError``."""
    try:
        yield
    except BaseException as error:
        # pyo3's exception is a BaseException, and cannot be imported.
        if type(error).__name__ == "PanicException":
            raise RuntimeError(f"Seismic failed: {error}") from error
        raise


@contextmanager
def _silenced_output() -> Iterator[None]:
    """Discard the output of native code, and raise its panics as ``RuntimeError``.

    Native code prints to the file descriptors 1 and 2, which ``contextlib.redirect_stdout`` does
    not reach. Within the block, both write to the null device, for all threads of the process.
    """
    # Descriptors, each with a copy from which it is restored.
    saved: list[tuple[int, int]] = []
    # Output that Python has buffered must not go to the null device.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with Path(os.devnull).open("wb") as null_device:
        for descriptor in (1, 2):
            with suppress(OSError):  # a program may have closed the descriptor
                saved.append((descriptor, os.dup(descriptor)))
                os.dup2(null_device.fileno(), descriptor)
        try:
            with _panics_as_errors():
                yield
        finally:
            for descriptor, copy in saved:
                os.dup2(copy, descriptor)
                os.close(copy)
