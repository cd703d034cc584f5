"""Approximate search with Seismic (Bruch, Nardini, Rulli and Venturini, SIGIR 2024).

The engine is the package pyseismic-lsr. This wrapper handles these properties of its releases 0.5.2
and 0.5.4:

* It prints while it builds and saves.
* A component beyond its dimension corrupts the answer.
* ``k = 0`` panics.
* Queries may come back in another order.
* Weights are 16-bit floats.
* The time to build grows with the vocabulary, used or not. Terms are therefore renumbered to those
  in use.
* Release 0.5.2 takes documents one by one, and numbers terms in the order in which it meets them.
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
from typing import Any, cast

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
from tilefold.retrieval.index.protocol import REMEDY, FolderIndex, Hit, StoredIds, naming_versions
from tilefold.retrieval.vectors.sparse import SparseVectors, check_buildable, check_search

__all__ = ["SeismicIndex", "SeismicOptions"]

_PACKAGE = "pyseismic-lsr"
# The package has other classes for more terms than 16 bits can number.
_SMALL_VOCABULARY = 1 << 16
# Number of documents from which on Seismic's authors search with other options.
_MANY_DOCUMENTS = 1_000_000
# The longest posting list of a term, as a multiple of n_postings.
_MAX_LIST_FRACTION = 1.5
# A filtered search retrieves this many times the documents that it needs on average.
_FILTER_MARGIN = 4

# Files of the index. The package appends ".index.seismic" to the stem.
_ENGINE_STEM = "seismic"
_ENGINE_FILE = f"{_ENGINE_STEM}.index.seismic"
_TERMS = "terms.npy"
_FILLED = "filled.npy"  # rows of the documents that have terms
_HALF_WEIGHTS = "half_weights.npz"  # only if weights are scaled
_RANKS = "ranks.npy"  # only if the package numbered the terms

Terms = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]


@dataclass(frozen=True)
class SeismicOptions:
    """Options of a Seismic index: five of the build, then the defaults of a search.

    Attributes:
        n_postings: postings kept per term, on average. None chooses by the collection, see
            :meth:`for_collection`.
        centroid_fraction: clusters of a posting list, as a fraction of its documents.
        min_cluster_size: documents of the smallest cluster.
        summary_energy: fraction of a cluster's weight that its summary keeps.
        doc_cut: number of heaviest terms of a document that clustering reads.
        query_cut: number of heaviest terms of a query that choose the clusters. Scores use all
            terms. None chooses by the collection.
        heap_factor: in [0, 1]. A lower value visits more clusters, which is slower and closer to
            exact. None chooses by the collection.
        num_threads: 0 uses one per core.

    Raises:
        ValueError: for a value out of range.
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
        """Raise ``ValueError`` for an option that is out of range."""
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
        """Create options from a mapping, or raise ``ValueError`` for an unknown name."""
        names = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise ArgumentError(
                "options", f"Seismic has {', '.join(names)}; got {', '.join(unknown)}."
            )
        return cls(**options)

    @property
    def is_complete(self) -> bool:
        """Whether no option is left to :meth:`for_collection`."""
        return None not in (self.n_postings, self.query_cut, self.heap_factor)

    def for_collection(self, documents: int, mean_postings: float) -> SeismicOptions:
        """Replace the options that are None by values that suit a collection.

        With L postings of a term on average, ``n_postings`` is ``10 * L ** 0.56``. With 10,000
        documents of 120 terms, that is twice L, because shorter lists lose documents there. With
        the 8.8 million documents of MS MARCO, it is 3,500, a tenth of L, as Seismic's authors set
        it.

        ``query_cut`` is 20 and ``heap_factor`` is 0.7. From a million documents on, they are 10 and
        0.8, which are also the authors' values.

        Args:
            documents: number of documents.
            mean_postings: L, the mean number of documents that have a term, over all terms that
                occur.

        Returns:
            A copy of the options, without None.
        """
        n_postings = self.n_postings
        if n_postings is None:
            n_postings = max(1, round(10 * mean_postings**0.56))
        has_many_documents = documents >= _MANY_DOCUMENTS
        query_cut = self.query_cut
        if query_cut is None:
            query_cut = 10 if has_many_documents else 20
        heap_factor = self.heap_factor
        if heap_factor is None:
            heap_factor = 0.8 if has_many_documents else 0.7
        return replace(
            self,
            n_postings=n_postings,
            query_cut=query_cut,
            heap_factor=heap_factor,
        )


def _check_fraction(name: str, value: Any, *, zero_allowed: bool = False) -> None:
    """Raise ``ValueError`` unless an option is a number in (0, 1], or in [0, 1]."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if is_number and 0.0 <= value <= 1.0 and (zero_allowed or value != 0.0):
        return
    interval = "[0, 1]" if zero_allowed else "(0, 1]"
    raise ArgumentError(name, f"expected a number in {interval}, got {value!r}.")


class SeismicIndex(FolderIndex):
    """Clustered inverted lists with summaries, which find documents approximately.

    Scores are inner products of all query terms with weights rounded to 16-bit floats, whose
    relative error is below 1e-3. Weights that are too small or too large for 16 bits are multiplied
    by a power of two. Weights that are then still too small are stored in 32 bits and searched
    exactly. Building uses random clustering, so two builds may miss different documents.

    Args:
        engine: index of the package, or None if no document has a term.
        ids: of all documents.
        terms: int32 ``[M]``, ascending terms in use. The package numbers them from 0.
        nonempty_rows: ascending rows of the documents that have terms. Only they are in the engine.
        options: without None.
        vocab_size: number of terms of the vocabulary.
        fingerprint: of the vocabulary.
        provenance: the model and the texts that the vectors were made from.
        half_weights: conversion of the weights to 16-bit floats.
        ranks: int32 ``[M]``, position in `terms` of each term as the engine numbers it. None if
            the engine numbers the terms in ascending order.
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
        ranks: Terms | None = None,
    ) -> None:
        """Create an index of an engine that was built or loaded.

        Args:
            engine: index of the package, or None if no document has a term.
            ids: ids of all documents.
            terms: int32 ``[M]``, ascending, the terms that documents have. The engine numbers them
                from 0 to M - 1.
            nonempty_rows: ascending rows of the documents that have terms. Only they are in the
                engine.
            options: options of the index, without None.
            vocab_size: number of terms of the vocabulary.
            fingerprint: digest of the vocabulary; None if it is unknown.
            provenance: model and texts that the vectors were computed from.
            half_weights: how weights are scaled to the 16-bit floats of the engine. None for
                weights that are not scaled.
            ranks: int32 ``[M]``, position in `terms` of each term as the engine numbers it. None if
                the engine numbers the terms in ascending order.
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
        self._ranks = ranks
        # Folder that the index was loaded from.
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
        SeismicOptions.parse(options)
        _package()
        check_buildable(vectors)
        return cls.of_any(vectors, **options)

    @classmethod
    def of_any(cls, vectors: SparseVectors, **options: object) -> SeismicIndex:
        """Build an index of vectors that may all be empty, as after an update."""
        chosen = SeismicOptions.parse(options)
        package = _package()
        if not (vectors.data > 0).any():
            return cls(
                None,
                list(vectors.ids),
                np.empty(0, np.int32),
                np.empty(0, np.int64),
                chosen.for_collection(len(vectors), mean_postings=0),
                vocab_size=vectors.vocab_size,
                fingerprint=vectors.fingerprint,
                provenance=vectors.provenance,
            )
        half_weights, scaled = HalfWeights.split(vectors)
        terms = np.flatnonzero(np.bincount(scaled.indices, minlength=vectors.vocab_size))
        # The number that the package knows a term by is its position in `terms`.
        numbers = np.zeros(vectors.vocab_size, np.int64)
        numbers[terms] = np.arange(terms.size)
        chosen = chosen.for_collection(len(vectors), scaled.indices.size / terms.size)
        if terms.size > _SMALL_VOCABULARY:
            dataset_type = package.SeismicDatasetLV
            engine_type = package.SeismicIndexLV
        else:
            dataset_type = package.SeismicDataset
            engine_type = package.SeismicIndex
        with _silenced_output():
            dataset, ranks = _dataset(
                dataset_type,
                numbers[scaled.indices],
                scaled.data,
                scaled.indptr,
                terms.size,
            )
            engine = engine_type.build_from_dataset(
                dataset,
                n_postings=chosen.n_postings,
                centroid_fraction=chosen.centroid_fraction,
                min_cluster_size=chosen.min_cluster_size,
                summary_energy=chosen.summary_energy,
                doc_cut=chosen.doc_cut,
                num_threads=chosen.num_threads,
                max_fraction=_MAX_LIST_FRACTION,
                nknn=0,
            )
        return cls(
            engine,
            list(vectors.ids),
            terms.astype(np.int32),
            np.flatnonzero(np.diff(scaled.indptr)),
            chosen,
            vocab_size=vectors.vocab_size,
            fingerprint=vectors.fingerprint,
            provenance=vectors.provenance,
            half_weights=half_weights,
            ranks=ranks,
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
        are left, or if few documents match at all, it scores all matching documents exactly.

        Args:
            queries: over the vocabulary of the index.
            k: documents per query.
            query_cut: see :class:`SeismicOptions`; by default the option of the build.
            heap_factor: see :class:`SeismicOptions`; by default the option of the build.
            where: filter of the documents' metadata.
            allowed: bool ``[N]``, the documents that may be returned.
        """
        check_search(self, queries, k)
        options = replace(
            self.options,
            query_cut=self.options.query_cut if query_cut is None else query_cut,
            heap_factor=self.options.heap_factor if heap_factor is None else heap_factor,
        )
        mask = allowed_by(self.metadata, where, allowed)
        if mask is None:
            ranked_documents = self._ranked(queries, k, options)
            return [
                [Hit(self.ids[row], score) for row, score in ranked] for ranked in ranked_documents
            ]
        return self._filtered_search(queries, k, options, mask)

    def _filtered_search(
        self,
        queries: SparseVectors,
        k: int,
        options: SeismicOptions,
        mask: Mask,
    ) -> list[list[Hit]]:
        """Return the `k` best documents in a mask for each query.

        The approximate search retrieves four times as many documents as contain `k` matching ones
        on average. A query that still has fewer than `k` is searched exactly. All queries are, if
        the approximate search would retrieve more than a quarter of the documents.

        Args:
            queries: over the vocabulary of the index.
            k: documents per query.
            options: options of the approximate search.
            mask: bool ``[N]``, the documents that may be returned.
        """
        # k documents match among k * N / n_matching documents, on average.
        n_matching = max(1, int(mask.sum()))
        depth = _FILTER_MARGIN * k * self.n_documents // n_matching
        hits: list[list[Hit]] = [[] for _ in range(len(queries))]
        if depth < self.n_documents // _FILTER_MARGIN:
            for query_row, ranked in enumerate(self._ranked(queries, depth, options)):
                matching = [Hit(self.ids[row], score) for row, score in ranked if mask[row]]
                hits[query_row] = matching[:k]
        short_rows = [query_row for query_row, row_hits in enumerate(hits) if len(row_hits) < k]
        if short_rows:
            exact_hits = self._exact.search(queries.take(short_rows), k, allowed=mask)
            for query_row, row_hits in zip(short_rows, exact_hits, strict=True):
                hits[query_row] = row_hits
        return hits

    def stored(self) -> SparseVectors:
        """Return the vectors of the documents with their stored weights, without zeros.

        Weights are those that the engine has in 16 bits, so they are rounded. Small weights, which
        are stored outside of the engine, are included in 32 bits.
        """
        n_terms = np.zeros(self.n_documents, np.int64)
        # The lists begin with empty arrays, because an index without terms has nothing to
        # concatenate.
        term_positions = [np.empty(0, np.int32)]
        weights = [np.empty(0, np.float32)]
        for position, row in enumerate(self._nonempty_rows.tolist()):
            numbers, document_weights = self._engine.get(position)
            document_terms, document_weights = self._in_order(
                np.array(numbers, np.int32),
                np.array(document_weights, np.float32),
            )
            n_terms[row] = len(document_terms)
            term_positions.append(document_terms)
            weights.append(document_weights)
        vectors = SparseVectors(
            list(self.ids),
            offsets_of(n_terms),
            self._terms[np.concatenate(term_positions)],
            self._half_weights.unscaled(np.concatenate(weights)),
            self.vocab_size,
            self.fingerprint,
            self.provenance,
        )
        return self._half_weights.joined(vectors)

    def _in_order(self, numbers: Terms, weights: Scores) -> tuple[Terms, Scores]:
        """Translate the engine's terms of a document to positions, and sort them.

        Args:
            numbers: numbers by which the engine knows the terms.
            weights: weights of these terms.

        Returns:
            Ascending positions in ``self._terms``, and the weights in their order.
        """
        if self._ranks is None:
            return numbers, weights
        positions = self._ranks[numbers]
        order = np.argsort(positions)
        return positions[order], weights[order]

    @cached_property
    def _exact(self) -> ExactIndex:
        return ExactIndex.of_any(self.stored())

    def _ranked(
        self,
        queries: SparseVectors,
        k: int,
        options: SeismicOptions,
    ) -> list[list[tuple[int, float]]]:
        """Rank documents for each query.

        Args:
            queries: over the vocabulary of the index.
            k: the most documents per query.
            options: options of the approximate search.

        Returns:
            For each query, pairs of a document's row and its score, best first. Scores are
            positive.
        """
        small = self._half_weights.small
        ranked_documents: list[list[tuple[int, float]]] = []
        engine_answers = self._engine_answers(queries, k, options)
        for query_row, (engine_rows, scaled_scores) in enumerate(engine_answers):
            rows = engine_rows
            scores = self._half_weights.unscaled(scaled_scores)
            if small is not None:
                terms, weights = queries.row(query_row)
                rows, scores = self._with_small_weights(rows, scores, small, terms, weights, k)
            # By falling score, then by rising row.
            order = np.lexsort((rows, -scores))[:k]
            order = order[scores[order] > 0]
            ranked_documents.append(
                list(zip(rows[order].tolist(), scores[order].tolist(), strict=True)),
            )
        return ranked_documents

    def _with_small_weights(
        self,
        rows: Rows,
        scores: Scores,
        small: SmallWeights,
        terms: Terms,
        weights: Scores,
        k: int,
    ) -> tuple[Rows, Scores]:
        """Add small weights, which the engine does not have, to the scores of a query.

        A document's score is the inner product of the query with its weights in the engine, plus
        the inner product with its small weights. Documents that the engine did not retrieve are
        added if they are among the best `k` by their small weights.

        Args:
            rows: rows of the documents that the engine retrieved.
            scores: their scores by the engine's weights, unscaled.
            small: the small weights, of some documents.
            terms: terms of the query, ascending.
            weights: weights of these terms.
            k: the most documents that are added.

        Returns:
            Rows of documents, in any order, and their scores.
        """
        products = small.scores(terms, weights)
        # Position of each retrieved document in `small.rows`, if it has small weights. The minimum
        # keeps the positions valid for the comparison in the next line.
        positions = np.minimum(np.searchsorted(small.rows, rows), len(small.rows) - 1)
        has_small = small.rows[positions] == rows
        scores = scores + np.where(has_small, products[positions], np.float32(0))
        joining = np.flatnonzero((products > 0) & ~np.isin(small.rows, rows))
        joining = joining[np.argsort(-products[joining], kind="stable")[:k]]
        joining_rows = small.rows[joining]
        engine_parts = [self._engine_score(row, terms, weights) for row in joining_rows.tolist()]
        joining_scores = products[joining] + np.array(engine_parts, np.float32)
        return np.concatenate([rows, joining_rows]), np.concatenate([scores, joining_scores])

    def _engine_score(self, row: int, terms: Terms, weights: Scores) -> float:
        """Return the inner product of a query with the weights of one document in the engine.

        Args:
            row: row of the document.
            terms: terms of the query, ascending.
            weights: weights of these terms.

        Returns:
            The product without the scale of the stored weights. It is 0 for a document that the
            engine does not have.
        """
        position = int(np.searchsorted(self._nonempty_rows, row))
        if position == len(self._nonempty_rows) or self._nonempty_rows[position] != row:
            return 0.0
        numbers, stored = self._engine.get(position)
        document_terms = self._terms[np.asarray(numbers, np.int64)]
        document_weights = self._half_weights.unscaled(np.asarray(stored, np.float32))
        _, in_query, in_document = np.intersect1d(
            terms,
            document_terms,
            assume_unique=True,
            return_indices=True,
        )
        return float(weights[in_query] @ document_weights[in_document])

    def _engine_answers(
        self,
        queries: SparseVectors,
        k: int,
        options: SeismicOptions,
    ) -> list[tuple[Rows, Scores]]:
        """Search with the engine.

        Args:
            queries: over the vocabulary of the index.
            k: the most documents per query.
            options: options of the search.

        Returns:
            For each query, rows of documents in any order, and their scores, which have the scale
            of the stored weights.

        Raises:
            DataError: if the engine fails, and was loaded from a folder.
        """
        no_documents = (np.empty(0, np.int64), np.empty(0, np.float32))
        results = [no_documents for _ in range(len(queries))]
        if self._engine is None:
            return results
        names, components, weights = self._engine_queries(queries)
        if not names:
            return results
        n_results = min(int(k), self.n_documents)
        heap_factor = float(cast("float", options.heap_factor))
        with self._naming_folder():
            if len(names) == 1:
                # Starting the pool of threads of a batch takes longer than one query.
                answers = [
                    self._engine.search(
                        names[0],
                        components[0],
                        weights[0],
                        k=n_results,
                        query_cut=options.query_cut,
                        heap_factor=heap_factor,
                    ),
                ]
            else:
                answers = self._engine.batch_search(
                    np.array(names, dtype=_package().get_seismic_string()),
                    components,
                    weights,
                    k=n_results,
                    query_cut=options.query_cut,
                    heap_factor=heap_factor,
                    num_threads=options.num_threads,
                )
            # Each answer is a list of (query's name, score, document's name).
            for answer in answers:
                rows = np.array([int(document) for _, _, document in answer], np.int64)
                scores = np.array([score for _, score, _ in answer], np.float32)
                check_positions("documents", rows, self.n_documents)
                check_weights("scores", scores)
                if answer:
                    query_name = answer[0][0]
                    results[int(query_name)] = (rows, scores)
        return results

    def _engine_queries(
        self,
        queries: SparseVectors,
    ) -> tuple[list[str], list[npt.NDArray[Any]], list[Scores]]:
        """Convert queries for the engine, and leave out those without a term of the index.

        The engine takes texts as names of queries and of terms.

        Args:
            queries: over the vocabulary of the index.

        Returns:
            Three lists with one entry per remaining query: its name, which is its row as a text;
            the names of its terms, which are their positions in ``self._terms``; and the weights of
            these terms.
        """
        string_type = _package().get_seismic_string()
        names: list[str] = []
        components: list[npt.NDArray[Any]] = []
        weights: list[Scores] = []
        for query_row in range(len(queries)):
            query_terms, query_weights = queries.row(query_row)
            positions = np.searchsorted(self._terms, query_terms)
            positions = np.minimum(positions, self._terms.size - 1)
            in_index = (self._terms[positions] == query_terms) & (query_weights > 0)
            if in_index.any():
                names.append(str(query_row))
                components.append(positions[in_index].astype(string_type))
                weights.append(np.ascontiguousarray(query_weights[in_index]))
        return names, components, weights

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
        if self._ranks is not None:
            np.save(folder / _RANKS, self._ranks)

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> SeismicIndex:
        """Load the engine of a saved index, and check that all files fit together.

        Args:
            folder: folder of the index.
            manifest: its manifest, with the options of the build.
            ids: ids of all documents.

        Raises:
            DataError: for files that do not fit together.
        """
        _package()
        vocab_size = manifest["vocab_size"]
        engine = None
        half_weights = None
        ranks = None
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
                    f"{_FILLED}: expected no rows without a term, got {nonempty_rows.size}."
                )
            if _HALF_WEIGHTS in manifest["files"]:
                half_weights = HalfWeights.load(folder / _HALF_WEIGHTS, len(ids), vocab_size)
            if _RANKS in manifest["files"]:
                ranks = _read_ranks(folder, terms.size)
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
            ranks=ranks,
        )
        index._folder = folder
        return index


def _read_terms(folder: Path, vocab_size: int) -> Terms:
    """Read the terms in use, or raise ``DataError`` unless they rise within ``[0, vocab_size)``."""
    terms: Terms = np.load(folder / _TERMS, allow_pickle=False)
    if terms.dtype != np.int32 or terms.ndim != 1 or (terms[1:] <= terms[:-1]).any():
        raise DataError(
            f"{_TERMS}: expected ascending int32 terms, got {terms.dtype} {terms.shape}.",
        )
    invalid = first_outside(terms, vocab_size)
    if invalid is not None:
        raise DataError(f"{_TERMS}: expected terms in [0, {vocab_size}), got {terms[invalid]}.")
    return terms


def _read_ranks(folder: Path, n_terms: int) -> Terms:
    """Read the position of each term of the engine among the terms in use.

    Args:
        folder: folder of the index.
        n_terms: number of terms in use.

    Raises:
        DataError: unless the file has each position once.
    """
    ranks: Terms = np.load(folder / _RANKS, allow_pickle=False)
    if ranks.dtype != np.int32 or not np.array_equal(np.sort(ranks), np.arange(n_terms)):
        raise DataError(
            f"{_RANKS}: expected all int32 numbers below {n_terms}, "
            f"got {ranks.dtype} {ranks.shape}.",
        )
    return ranks


def _dataset(
    dataset_type: Any,
    numbers: Rows,
    weights: Scores,
    offsets: Rows,
    n_terms: int,
) -> tuple[Any, Terms | None]:
    """Create the package's dataset of all documents that have terms, named by their rows.

    Before release 0.5.4, the package takes names of terms, and numbers the terms in the order in
    which they first occur. Later releases take numbers.

    Args:
        dataset_type: the package's class of the dataset.
        numbers: terms of all documents, one document after another, as numbers below `n_terms`.
        weights: weights of these terms.
        offsets: ``[N + 1]``, where the terms of each document begin.
        n_terms: number of different terms.

    Returns:
        The dataset, and the ranks: for each number that the package gives a term, its number in
        `numbers`. The ranks are None if the package keeps the numbers.
    """
    n_documents = len(offsets) - 1
    if hasattr(dataset_type, "add_documents_by_id"):
        # It leaves out documents without terms.
        dataset = dataset_type(dim=int(n_terms))
        names = [str(row) for row in range(n_documents)]
        dataset.add_documents_by_id(names, numbers, weights, offsets)
        return dataset, None
    dataset = dataset_type()
    term_names = np.arange(n_terms).astype(_package().get_seismic_string())
    for row in range(n_documents):
        start, end = offsets[row], offsets[row + 1]
        if start < end:
            dataset.add_document(str(row), term_names[numbers[start:end]], weights[start:end])
    _, first_occurrences = np.unique(numbers, return_index=True)
    return dataset, np.argsort(first_occurrences).astype(np.int32)


def _load_engine(file: Path, terms: Terms, nonempty_rows: Rows, n_documents: int) -> Any:
    """Load the engine of an index.

    Args:
        file: file that the engine wrote.
        terms: ascending terms that occur in documents. Their number decides the engine's class.
        nonempty_rows: rows of the documents that have terms.
        n_documents: number of documents of the index.

    Raises:
        DataError: if the engine has another number of terms or documents than these arrays, or a
            row is outside of the index.
    """
    package = _package()
    is_large = terms.size > _SMALL_VOCABULARY
    engine_type = package.SeismicIndexLV if is_large else package.SeismicIndex
    with _silenced_output():
        engine = engine_type.load(str(file))
    if (
        engine.dim != terms.size
        or engine.len != nonempty_rows.size
        or first_outside(nonempty_rows, n_documents) is not None
    ):
        expected = f"{nonempty_rows.size} of {n_documents} texts, of {terms.size} terms"
        raise DataError(f"{_ENGINE_FILE}: expected {expected}, got {engine.len}, {engine.dim}.")
    return engine


def _package() -> ModuleType:
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
    not reach. They lead to the null device within the block, for all threads of the process.
    """
    saved: list[tuple[int, int]] = []  # a descriptor, and a copy of it to restore it from
    # What Python has buffered for the streams must not go to the null device.
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
