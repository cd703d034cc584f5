"""Approximate search with Seismic (Bruch, Nardini, Rulli and Venturini, SIGIR 2024), package
pyseismic-lsr.

Behaviour of pyseismic-lsr 0.5.2 and 0.5.4 that this wrapper handles: it prints while it builds and saves; a
component beyond its dimension corrupts the answer; ``k = 0`` panics; queries may come back in
another order; weights are 16-bit floats; and time to build grows with the vocabulary, used or not,
so terms are renumbered to those in use.

Release 0.5.2 takes documents one by one, and numbers terms in the order in which it meets them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

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

_SMALL_VOCABULARY, _MANY_DOCUMENTS = 1 << 16, 1_000_000
_LONGEST_LIST = 1.5  # times n_postings, the most postings that are kept of one term
_CHOSEN = ("n_postings", "query_cut", "heap_factor")  # by the collection, where None
_INTEGERS = {"n_postings": 1, "min_cluster_size": 1, "doc_cut": 1, "query_cut": 1, "num_threads": 0}
_FRACTIONS = {"centroid_fraction": "(", "summary_energy": "(", "heap_factor": "["}
_PACKAGE = "pyseismic-lsr"
Terms = npt.NDArray[np.int32]
Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]
_Origin = tuple[
    int,
    str | None,
    Provenance,
]  # size and fingerprint of the vocabulary, model and texts
_STEM = "seismic"
_FILE, _TERMS, _FILLED = f"{_STEM}.index.seismic", "terms.npy", "filled.npy"
_HALF_WEIGHTS = "half_weights.npz"  # only where weights are scaled
_RANKS = "ranks.npy"  # only where the package numbered the terms by itself
_DEEPER = 4  # times as many documents are looked for as a filter is expected to let through


@dataclass(frozen=True)
class SeismicOptions:
    """Build options (the first five) and defaults of a search.

    Attributes:
        n_postings: postings kept per term, on average; None chooses by the collection, see
            :meth:`for_collection`.
        centroid_fraction: clusters of a posting list, as a fraction of its documents.
        min_cluster_size: documents of the smallest cluster.
        summary_energy: fraction of a cluster's weight that its summary keeps.
        doc_cut: heaviest terms of a document that clustering looks at.
        query_cut: heaviest terms of a query that choose the clusters to look into; scores use all
            terms. None chooses.
        heap_factor: in [0, 1]; a lower one visits more clusters, which is slower and closer to
            exact. None chooses.
        num_threads: 0 is one per core.
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
        for name in (item.name for item in fields(self)):
            value, least, opening = getattr(self, name), _INTEGERS.get(name), _FRACTIONS.get(name)
            if value is None and name in _CHOSEN:
                continue
            number = isinstance(value, Real if least is None else int) and not isinstance(
                value,
                bool,
            )
            if least is not None and (not number or value < least):
                raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}.")
            if opening and (
                not number or not 0.0 <= value <= 1.0 or (opening == "(" and value == 0.0)
            ):
                raise ValueError(f"{name}: expected a number in {opening}0, 1], got {value!r}.")

    @classmethod
    def parse(cls, options: Json) -> SeismicOptions:
        known = [item.name for item in fields(cls)]
        if unknown := sorted(set(options) - set(known)):
            raise ValueError(f"options: Seismic has {', '.join(known)}; got {', '.join(unknown)}.")
        return cls(**options)

    def for_collection(self, documents: int, mean_postings: float) -> SeismicOptions:
        """Options with numbers in the place of None.

        With L, the mean number of documents of a term that occurs, ``n_postings`` is ``10 * L **
        0.56``: twice L at 10,000 documents of 120 terms, where shorter lists lose documents, and a
        tenth of L, 3,500, at the 8.8 million of MS MARCO, as Seismic's authors set it.
        ``query_cut`` and ``heap_factor`` are 20 and 0.7, and from a million documents on 10 and
        0.8, also theirs.
        """
        many = documents >= _MANY_DOCUMENTS
        found = {
            "n_postings": max(1, round(10 * mean_postings**0.56)),
            "query_cut": 10 if many else 20,
            "heap_factor": 0.8 if many else 0.7,
        }
        return replace(
            self,
            **{name: value for name, value in found.items() if getattr(self, name) is None},
        )


class SeismicIndex(FolderIndex):
    """Clustered inverted lists with summaries; documents are found approximately.

    Scores are inner products of all query terms with weights rounded to 16-bit floats (relative
    error below 1e-3). Where weights are too small or too large for that they are multiplied by a
    power of two; those that are too small beside the largest are stored in 32 bits and searched
    exactly. Building uses random clustering, so two builds may miss different documents.
    """

    backend, package, own_files = (
        "seismic",
        _PACKAGE,
        (_TERMS, _FILLED, _FILE, _HALF_WEIGHTS, _RANKS),
    )

    def __init__(
        self,
        engine: Any,
        ids: Sequence[str],
        terms: Terms,
        filled: Rows,
        options: SeismicOptions,
        made_of: _Origin,
        half_weights: HalfWeights | None = None,
        ranks: Terms | None = None,
    ) -> None:
        # None where no document has a term
        self._engine, self.ids, self._terms, self.options = engine, ids, terms, options
        self._filled = filled  # rows of documents with terms, which alone are in the engine
        self._half_weights = half_weights or HalfWeights()
        # index into the terms by the engine's own number of a term; None where they are equal
        self._ranks = ranks
        self.vocab_size, self.fingerprint, self.provenance = made_of
        self._folder: Path | None = None  # that it was read from

    @classmethod
    def build(cls, vectors: SparseVectors, **options: object) -> SeismicIndex:
        """Build the index.

        Raises:
            ValueError: without a positive weight, or for a wrong option of :class:`SeismicOptions`.
        """
        SeismicOptions.parse(options)
        _package()
        check_buildable(vectors)
        return cls.of_any(vectors, **options)

    @classmethod
    def of_any(cls, vectors: SparseVectors, **options: object) -> SeismicIndex:
        """The index of vectors that may all be empty, as after an update."""
        chosen, seismic = SeismicOptions.parse(options), _package()
        origin = (vectors.vocab_size, vectors.fingerprint, vectors.provenance)
        if not (vectors.data > 0).any():
            return cls(
                None,
                list(vectors.ids),
                np.empty(0, np.int32),
                np.empty(0, np.int64),
                chosen.for_collection(len(vectors), 0),
                origin,
            )
        half_weights, scaled = HalfWeights.split(vectors)
        terms = np.flatnonzero(np.bincount(scaled.indices, minlength=vectors.vocab_size))
        numbers = np.zeros(vectors.vocab_size, np.int64)
        numbers[terms] = np.arange(terms.size)
        chosen = chosen.for_collection(len(vectors), scaled.indices.size / terms.size)
        large = terms.size > _SMALL_VOCABULARY
        settings = {
            name: value
            for name, value in asdict(chosen).items()
            if name not in ("query_cut", "heap_factor")
        }
        with _quiet():
            kind = seismic.SeismicDatasetLV if large else seismic.SeismicDataset
            dataset, ranks = _dataset(
                kind,
                numbers[scaled.indices],
                scaled.data,
                scaled.indptr,
                terms.size,
            )
            engine = (seismic.SeismicIndexLV if large else seismic.SeismicIndex).build_from_dataset(
                dataset,
                **settings,
                max_fraction=_LONGEST_LIST,
                nknn=0,
            )
        return cls(
            engine,
            list(vectors.ids),
            terms.astype(np.int32),
            np.flatnonzero(np.diff(scaled.indptr)),
            chosen,
            origin,
            half_weights,
            ranks,
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
        """See :class:`SparseIndex`; may find fewer. `query_cut` and `heap_factor` default to those
        of the build.

        Of the documents that match `where`, or are `allowed` (bool ``[N]``), it finds `k`, or all
        that share a term with the query: it looks deeper, and scores them all exactly where that
        finds fewer or few are allowed.
        """
        check_search(self, queries, k)
        changed: Json = {"query_cut": query_cut, "heap_factor": heap_factor}
        chosen = replace(
            self.options,
            **{name: value for name, value in changed.items() if value is not None},
        )
        mask, deep = allowed_by(self.metadata, where, allowed), k
        if mask is not None:
            deep = _DEEPER * k * self.n_documents // max(1, int(mask.sum()))
        answered = mask is None or deep < self.n_documents // _DEEPER
        found = (
            self._found(queries, deep, chosen) if answered else [[] for _ in range(len(queries))]
        )
        hits = [
            [Hit(self.ids[at], score) for at, score in row if mask is None or mask[at]][:k]
            for row in found
        ]
        short = [] if mask is None else [at for at, row in enumerate(hits) if len(row) < k]
        exact = self._exact.search(queries.take(short), k, allowed=mask) if short else []
        return [dict(zip(short, exact, strict=True)).get(at, row) for at, row in enumerate(hits)]

    def stored(self) -> SparseVectors:
        """The vectors of the documents as they are stored, without zero weights, in memory."""
        found = (self._engine.get(at) for at in range(len(self._filled)))
        rows = [
            self._in_order(np.array(terms, np.int32), np.array(weights, np.float32))
            for terms, weights in found
        ]
        counts = np.zeros(self.n_documents, np.int64)
        counts[self._filled] = [len(terms) for terms, _ in rows]
        terms = np.concatenate([row for row, _ in rows] or [np.empty(0, np.int32)])
        weights = np.concatenate([row for _, row in rows] or [np.empty(0, np.float32)])
        vectors = SparseVectors(
            list(self.ids),
            offsets_of(counts),
            self._terms[terms],
            self._half_weights.unscaled(weights),
            self.vocab_size,
            self.fingerprint,
            self.provenance,
        )
        return self._half_weights.joined(vectors)

    def _in_order(self, terms: Terms, weights: Scores) -> tuple[Terms, Scores]:
        """A document's terms as indices into those of the index, ascending, and their weights."""
        if self._ranks is None:
            return terms, weights
        ranks = self._ranks[terms]
        order = np.argsort(ranks)
        return ranks[order], weights[order]

    @cached_property
    def _exact(self) -> ExactIndex:
        return ExactIndex.of_any(self.stored())

    def _found(
        self,
        queries: SparseVectors,
        k: int,
        chosen: SeismicOptions,
    ) -> list[list[tuple[int, float]]]:
        """Rows of documents and their positive scores, best first, at most `k` of each query."""
        results: list[list[tuple[int, float]]] = []
        for number, answer in enumerate(self._engine_answers(queries, k, chosen)):
            scores_of_rows = answer[0], self._half_weights.unscaled(answer[1])
            if self._half_weights.small is not None:
                scores_of_rows = self._with_small_weights(
                    *scores_of_rows,
                    self._half_weights.small,
                    *queries.row(number),
                    k,
                )
            rows, scores = scores_of_rows
            best = np.lexsort((rows, -scores))[:k]
            best = best[scores[best] > 0]
            results.append(list(zip(rows[best].tolist(), scores[best].tolist(), strict=True)))
        return results

    def _with_small_weights(
        self,
        rows: Rows,
        scores: Scores,
        small: SmallWeights,
        terms: Terms,
        weights: Scores,
        k: int,
    ) -> tuple[Rows, Scores]:
        """Add the entries outside of the engine to a query's scores.

        The best `k` documents by these entries join those that the engine found.

        Args:
            rows: documents that the engine found.
            scores: their scores, without the scale.
            small: the entries outside of the engine.
            terms: of the query, ascending.
            weights: of these terms.
            k: how many documents may join.

        Returns:
            Documents in any order, and their scores.
        """
        products = small.scores(terms, weights)
        position = np.minimum(np.searchsorted(small.rows, rows), len(small.rows) - 1)
        has_small = small.rows[position] == rows
        scores = scores + np.where(has_small, products[position], np.float32(0))
        joining = np.flatnonzero((products > 0) & ~np.isin(small.rows, rows))
        joining = joining[np.argsort(-products[joining], kind="stable")[:k]]
        joining_rows = small.rows[joining]
        engine_parts = [self._engine_score(row, terms, weights) for row in joining_rows.tolist()]
        joining_scores = products[joining] + np.array(engine_parts, np.float32)
        return np.concatenate([rows, joining_rows]), np.concatenate([scores, joining_scores])

    def _engine_score(self, row: int, terms: Terms, weights: Scores) -> float:
        """Inner product of a query with the weights of one document in the engine."""
        position = int(np.searchsorted(self._filled, row))
        if position == len(self._filled) or self._filled[position] != row:
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
        chosen: SeismicOptions,
    ) -> list[tuple[Rows, Scores]]:
        """Rows of documents and their scaled scores for each query, in any order."""
        nothing = (np.empty(0, np.int64), np.empty(0, np.float32))
        results = [nothing for _ in range(len(queries))]
        if self._engine is None:
            return results
        string_type = _package().get_seismic_string()
        asked = []
        for i in range(len(queries)):
            terms, weights = queries.row(i)
            at = np.minimum(np.searchsorted(self._terms, terms), self._terms.size - 1)
            known = (self._terms[at] == terms) & (weights > 0)
            if known.any():
                asked.append(
                    (str(i), at[known].astype(string_type), np.ascontiguousarray(weights[known])),
                )
        if not asked:
            return results
        heap = float(cast("float", chosen.heap_factor))
        settings = {
            "k": min(int(k), self.n_documents),
            "query_cut": chosen.query_cut,
            "heap_factor": heap,
        }
        with self._answering():
            if len(asked) == 1:  # a pool of threads takes longer than one query
                answers = [self._engine.search(*asked[0], **settings)]
            else:
                names, components, values = map(list, zip(*asked, strict=True))
                several = np.array(names, dtype=string_type), components, values
                answers = self._engine.batch_search(
                    *several,
                    **settings,
                    num_threads=chosen.num_threads,
                )
            for answer in answers:
                rows = np.array([int(row) for _, _, row in answer], np.int64)
                scores = np.array([score for _, score, _ in answer], np.float32)
                check_positions("documents", rows, self.n_documents)
                check_weights("scores", scores)
                if answer:
                    results[int(answer[0][0])] = (rows, scores)
        return results

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Name the folder in what goes wrong while an index searches that was read from one: it is
        damaged.
        """
        try:
            with _panics_are_errors():
                yield
        except (RuntimeError, ValueError) as error:
            if self._folder is None:
                raise
            raise DataError(f"{self._folder}: could not be searched ({error}). {REMEDY}") from error

    def _write(self, folder: Path) -> None:
        if self._engine is not None:
            with _quiet():
                self._engine.save(str(folder / _STEM))
        np.save(folder / _TERMS, self._terms)
        np.save(folder / _FILLED, self._filled)
        if not self._half_weights.is_default:
            self._half_weights.save(folder / _HALF_WEIGHTS)
        if self._ranks is not None:
            np.save(folder / _RANKS, self._ranks)

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> SeismicIndex:
        _package()
        engine = None
        with naming_versions(folder, manifest, _PACKAGE):
            options = SeismicOptions.parse(manifest["options"])
            if None in (getattr(options, name) for name in _CHOSEN):
                raise DataError(
                    f"options: expected numbers for {', '.join(_CHOSEN)}, got {options}.",
                )
            terms, filled = (
                np.load(folder / name, allow_pickle=False) for name in (_TERMS, _FILLED)
            )
            if terms.dtype != np.int32 or terms.ndim != 1 or (terms[1:] <= terms[:-1]).any():
                raise DataError(
                    f"{_TERMS}: expected ascending int32 terms, got {terms.dtype} {terms.shape}.",
                )
            if (at := first_outside(terms, manifest["vocab_size"])) is not None:
                raise DataError(
                    f"{_TERMS}: expected terms in [0, {manifest['vocab_size']}), got {terms[at]}.",
                )
            if terms.size:
                engine = _load_engine(folder / _FILE, terms, filled, len(ids))
            elif filled.size:
                raise DataError(f"{_FILLED}: expected no rows without a term, got {filled.size}.")
            half_weights = None
            if _HALF_WEIGHTS in manifest["files"]:
                half_weights = HalfWeights.load(
                    folder / _HALF_WEIGHTS,
                    len(ids),
                    manifest["vocab_size"],
                )
            ranks = None
            if _RANKS in manifest["files"]:
                ranks = np.load(folder / _RANKS, allow_pickle=False)
                if ranks.dtype != np.int32 or not np.array_equal(
                    np.sort(ranks),
                    np.arange(terms.size),
                ):
                    raise DataError(
                        f"{_RANKS}: expected all int32 numbers below {terms.size}, "
                        f"got {ranks.dtype} {ranks.shape}.",
                    )
        origin = (
            manifest["vocab_size"],
            manifest.get("fingerprint"),
            Provenance.from_dict(manifest),
        )
        index = cls(engine, list(ids), terms, filled, options, origin, half_weights, ranks)
        index._folder = folder
        return index


def _dataset(
    kind: Any,
    numbers: Rows,
    weights: Scores,
    offsets: Rows,
    n_terms: int,
) -> tuple[Any, Terms | None]:
    """Dataset of Seismic's package with all documents that have terms, named by their rows.

    Args:
        kind: class of the dataset.
        numbers: terms of all documents, as numbers below ``n_terms``.
        weights: of these terms.
        offsets: first term of each document, and the number of all.
        n_terms: how many different terms there are.

    Returns:
        The dataset, and a term's number by the one that the package gives it; ``None`` where they
        are equal.
    """
    documents = len(offsets) - 1
    if hasattr(kind, "add_documents_by_id"):  # from 0.5.4 on; leaves documents without terms out
        dataset = kind(dim=int(n_terms))
        names = [str(row) for row in range(documents)]
        dataset.add_documents_by_id(names, numbers, weights, offsets)
        return dataset, None
    dataset = kind()
    tokens = np.arange(n_terms).astype(_package().get_seismic_string())
    for row in range(documents):
        start, end = offsets[row], offsets[row + 1]
        if start < end:
            dataset.add_document(str(row), tokens[numbers[start:end]], weights[start:end])
    _, first_occurrence = np.unique(numbers, return_index=True)
    return dataset, np.argsort(first_occurrence).astype(np.int32)


def _load_engine(file: Path, terms: Terms, filled: Rows, n_documents: int) -> Any:
    """The engine in `file`; ``DataError`` for one of other terms or documents."""
    seismic = _package()
    kind = seismic.SeismicIndexLV if terms.size > _SMALL_VOCABULARY else seismic.SeismicIndex
    with _quiet():
        engine = kind.load(str(file))
    if (
        engine.dim != terms.size
        or engine.len != filled.size
        or first_outside(filled, n_documents) is not None
    ):
        expected = f"{filled.size} of {n_documents} texts, of {terms.size} terms"
        raise DataError(f"{_FILE}: expected {expected}, got {engine.len}, {engine.dim}.")
    return engine


def _package() -> ModuleType:
    return require("seismic", _PACKAGE, "The seismic backend", extra="")


@contextmanager
def _panics_are_errors() -> Iterator[None]:
    """Raise what native code panics with as an ordinary error."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # a BaseException of pyo3
            raise RuntimeError(f"Seismic failed: {error}") from error
        raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what native code prints to the standard streams, of all threads, and turn its panics
    into errors.
    """
    saved: list[tuple[int, int]] = []
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    with Path(os.devnull).open("wb") as nowhere:
        for descriptor in (1, 2):
            with suppress(OSError):  # closed by the caller
                saved.append((descriptor, os.dup(descriptor)))
                os.dup2(nowhere.fileno(), descriptor)
        try:
            with _panics_are_errors():
                yield
        finally:
            for descriptor, copy in saved:
                os.dup2(copy, descriptor)
                os.close(copy)
