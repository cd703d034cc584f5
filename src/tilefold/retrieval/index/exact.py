"""Exact search with an inverted index.

The index is built in little memory. A stored index is memory-mapped, and a query reads and checks
the postings of its own terms only.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import ArgumentError
from tilefold.pipeline.ragged import offsets_of, row_ranges
from tilefold.retrieval.common.array_checks import check_positions, check_weights
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.metadata import Mask, Where, allowed_by
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.protocol import (
    REMEDY,
    FolderIndex,
    Hit,
    StoredIds,
    read_array,
    read_offsets,
)
from tilefold.retrieval.vectors.sparse import SparseVectors, check_buildable, check_search

if TYPE_CHECKING:
    from tilefold.retrieval.index.on_device import DeviceIndex

__all__ = ["ExactIndex"]

_OFFSETS = "offsets.npy"
_DOCUMENTS = "documents.npy"
_WEIGHTS = "weights.npy"
_CHECKSUMS = "checksums.npy"
# Files that are checked term by term, when a query reads them.
_LARGE_FILES = (_DOCUMENTS, _WEIGHTS)
# Sizes of blocks of scores that are tried to find the best ones. Large blocks come first, since
# there are fewer of them. With too few blocks, the bound that they give is low.
_BLOCK_SIZES = (256, 64, 16)
# Weights that are transposed at a time.
_WEIGHTS_PER_PIECE = 1 << 22
# Vocabulary size up to which terms are sorted as 16-bit integers, which numpy does by radix sort.
_MAX_SHORT_TERMS = 1 << 16

Scores = npt.NDArray[np.float32]
Lists = list[tuple[npt.NDArray[np.int32], Scores]]
"""Postings of some terms: documents and weights of each."""
AddPostings = Callable[[Scores, Lists, Scores], None]
"""A function of ``(scores, lists, values)`` that adds ``value * weights`` to the scores of the
documents, for each list of postings and its value."""


@dataclass
class Postings:
    """Postings of all terms: the documents that have a term, and its weights in them.

    Attributes:
        offsets: ``[V + 1]``; the postings of term ``t`` are those from ``offsets[t]`` to
            ``offsets[t + 1]``.
        documents: ``[nnz]``, positions of documents, ascending for each term.
        weights: ``[nnz]``, positive.
        n_documents: number of documents of the index.
        checksums: ``[V]``, CRC-32 of the documents and weights of each term; None for postings that
            were not read from files.
        trusted: ``[V]``, whether the postings of a term were checked.
    """

    offsets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    n_documents: int
    checksums: npt.NDArray[np.uint32] | None = None
    trusted: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.trusted = np.zeros(self.n_terms, bool)

    @property
    def n_terms(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, vectors: SparseVectors) -> Postings:
        """Transpose the positive weights of sparse vectors.

        A first pass over the vectors counts the postings of each term, and a second pass writes
        them to their positions. Each pass reads the vectors piece by piece. This takes 8 bytes per
        weight for the result and 200 MB for a piece.
        """
        counts = np.zeros(vectors.vocab_size, np.int64)
        for row_begin, row_end in row_ranges(vectors.indptr, _WEIGHTS_PER_PIECE):
            span = slice(vectors.indptr[row_begin], vectors.indptr[row_end])
            positive_terms = vectors.indices[span][vectors.data[span] > 0]
            counts += np.bincount(positive_terms, minlength=vectors.vocab_size)
        offsets = offsets_of(counts)
        documents = np.empty(offsets[-1], np.int32)
        weights = np.empty(offsets[-1], np.float32)
        next_positions = offsets[:-1].copy()  # of the next posting of each term
        has_short_terms = vectors.vocab_size <= _MAX_SHORT_TERMS
        for row_begin, row_end in row_ranges(vectors.indptr, _WEIGHTS_PER_PIECE):
            span = slice(vectors.indptr[row_begin], vectors.indptr[row_end])
            is_positive = vectors.data[span] > 0
            row_lengths = np.diff(vectors.indptr[row_begin : row_end + 1])
            rows = np.repeat(np.arange(row_begin, row_end, dtype=np.int32), row_lengths)
            rows = rows[is_positive]
            terms = vectors.indices[span][is_positive]
            values = vectors.data[span][is_positive]
            sort_keys = terms.astype(np.uint16) if has_short_terms else terms
            order = np.argsort(sort_keys, kind="stable")
            counts = np.bincount(terms, minlength=vectors.vocab_size)
            # In the sorted piece, the entries of a term are consecutive and begin at first_entries.
            # They go to consecutive positions of the result, from the term's next position on.
            first_entries = np.cumsum(counts) - counts
            shifts = np.repeat(next_positions - first_entries, counts)
            positions = np.arange(terms.size) + shifts
            documents[positions] = rows[order]
            weights[positions] = values[order]
            next_positions += counts
        postings = cls(offsets, documents, weights, len(vectors))
        postings.trusted[:] = True
        return postings

    @classmethod
    def joined(cls, parts: Sequence[Postings]) -> Postings:
        """Concatenate the documents of several indexes with the same vocabulary.

        The documents of a part are numbered after those of the parts before it, so that the
        documents of each term stay ascending.
        """
        part_counts = [np.diff(part.offsets) for part in parts]
        offsets = offsets_of(sum(part_counts[1:], part_counts[0]))
        documents = np.empty(offsets[-1], np.int32)
        weights = np.empty(offsets[-1], np.float32)
        next_positions = offsets[:-1].copy()  # of the next posting of each term
        n_documents = 0
        for part, counts in zip(parts, part_counts, strict=True):
            # The part's postings of a term move from its offset in the part to its next position.
            shifts = np.repeat(next_positions - part.offsets[:-1], counts)
            positions = np.arange(part.offsets[-1]) + shifts
            documents[positions] = part.documents + np.int32(n_documents)
            weights[positions] = part.weights
            next_positions += counts
            n_documents += part.n_documents
        return cls(offsets, documents, weights, n_documents)

    def vectors(
        self,
        ids: Sequence[str],
        fingerprint: str | None,
        provenance: Provenance,
    ) -> SparseVectors:
        """Transpose the postings back to sparse vectors of the documents, in memory.

        Args:
            ids: ids of the documents.
            fingerprint: digest of the vocabulary; None if it is unknown.
            provenance: model and texts that the vectors were computed from.
        """
        # Postings by document. The sort is stable, so the terms of a document ascend.
        order = np.argsort(self.documents, kind="stable")
        terms = np.repeat(np.arange(self.n_terms, dtype=np.int32), np.diff(self.offsets))[order]
        indptr = offsets_of(np.bincount(self.documents, minlength=self.n_documents))
        weights = np.asarray(self.weights)[order]
        return SparseVectors(
            list(ids),
            indptr,
            terms,
            weights,
            self.n_terms,
            fingerprint,
            provenance,
        )

    def add(self, scores: Scores, terms: npt.NDArray[np.int32], values: Scores) -> None:
        """Add the products of a query's weights and the postings of its terms to scores.

        Args:
            scores: float32 ``[N]``, one score per document, changed in place. Terms are added in
                the order of `terms`.
            terms: terms of the query.
            values: weights of the query's terms.

        Raises:
            DataError: for postings that are not those that were saved.
        """
        self.check(terms)
        lists = [(self.documents[span], self.weights[span]) for span in self._spans(terms)]
        add_postings = choose_add_postings()
        add_postings(scores, lists, values)

    def documents_of(self, terms: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """Return the documents of each term, ascending.

        Raises:
            DataError: for postings that are not those that were saved.
        """
        self.check(terms)
        return [self.documents[span] for span in self._spans(terms)]

    def _spans(self, terms: npt.NDArray[np.int32]) -> list[slice]:
        """Return the span of the postings of each term."""
        begins = self.offsets[terms].tolist()
        ends = self.offsets[terms + 1].tolist()
        return list(map(slice, begins, ends))

    def check(self, terms: npt.NDArray[np.int32]) -> None:
        """Raise ``DataError`` if the postings of any of the terms are not those that were saved.

        Postings of a term are checked once, when a query first reads them.
        """
        is_trusted = self.trusted[terms]
        if is_trusted.all():
            return
        for term in terms[~is_trusted].tolist():
            span = slice(self.offsets[term], self.offsets[term + 1])
            try:
                if self.checksums is not None and self.checksum(term) != self.checksums[term]:
                    raise DataError("Their checksum is another.")
                check_positions("documents", self.documents[span], self.n_documents)
                check_weights("weights", self.weights[span])
            except DataError as error:
                raise DataError(
                    f"documents.npy, weights.npy: damaged; the postings of term {term} are not "
                    f"those that were saved. {error} {REMEDY}",
                ) from error
            self.trusted[term] = True

    def checksum(self, term: int) -> int:
        """CRC-32 of the documents and weights of a term."""
        span = slice(self.offsets[term], self.offsets[term + 1])
        return zlib.crc32(self.weights[span].data, zlib.crc32(self.documents[span].data))


def add_with_numpy(scores: Scores, lists: Lists, values: Scores) -> None:
    """Add ``value * weights`` to the scores of the documents of each list, in numpy."""
    for (documents, weights), value in zip(lists, values, strict=True):
        np.add.at(scores, documents, value * weights)


def with_rounded_products(add: AddPostings) -> AddPostings:
    """Wrap `add` so that each product is rounded to float32 before it is added.

    A compiler may turn a multiplication and an addition into one fused multiply-add, as on ARM. It
    does not round the product, so the sum may differ from numpy's in the last bit. Here numpy
    multiplies, and `add` multiplies the rounded products by 1, which is exact.
    """
    one = np.ones(1, np.float32)

    def add_rounded_products(scores: Scores, lists: Lists, values: Scores) -> None:
        for (documents, weights), value in zip(lists, values, strict=True):
            add(scores, [(documents, value * weights)], one)

    return add_rounded_products


@cache
def choose_add_postings() -> AddPostings:
    """Return the fastest function that adds postings with the same bits as numpy does.

    scipy's compiled product of a sparse matrix and a vector takes a third of numpy's time. The
    function is private to scipy, so its result is compared with :func:`add_with_numpy` before it is
    used. The public products of scipy allocate or copy arrays for every term.
    """
    try:
        sparsetools = import_module("scipy.sparse._sparsetools")
    except ImportError:
        return add_with_numpy

    def add_with_scipy(scores: Scores, lists: Lists, values: Scores) -> None:
        """Add ``value * weights`` to the scores of the documents of each list, in scipy.

        The postings of a term are a sparse matrix ``[N, 1]`` in CSC, whose column begins at 0 and
        ends at the number of postings. The matrix is multiplied by the vector ``[value]``.
        """
        column_offsets = np.zeros((len(lists), 2), np.int32)
        column_offsets[:, 1] = [len(documents) for documents, _ in lists]
        for position, (documents, weights) in enumerate(lists):
            sparsetools.csc_matvec(
                scores.size,  # rows
                1,  # columns
                column_offsets[position],
                documents,
                weights,
                values[position : position + 1],
                scores,
            )

    for add in (add_with_scipy, with_rounded_products(add_with_scipy)):
        if _has_bits_of_numpy(add):
            return add
    warnings.warn(
        "scipy: its product of sparse matrices does not add as expected, so that numpy searches "
        "exact indexes, more slowly. Scores are the same.",
        RuntimeWarning,
        stacklevel=4,
    )
    return add_with_numpy


def _has_bits_of_numpy(add: AddPostings) -> bool:
    """Return whether `add` gives the same bits as :func:`add_with_numpy`.

    The test adds ``value * value`` to ``-rounded(value * value)``, where the square is not exact in
    float32. The sum is 0 with a rounded product, and the rounding error with a fused multiply-add.
    """
    value = np.array([1 + 2**-12], np.float32)
    # One list of three of four documents, so that the score of document 1 must not change.
    lists = [(np.array([0, 2, 3], np.int32), np.repeat(value, 3))]
    expected = -np.repeat(value * value, 4)
    scores = expected.copy()
    try:
        add(scores, lists, value)
    except Exception:  # another version of scipy may raise any error
        return False
    add_with_numpy(expected, lists, value)
    return bool((scores == expected).all())


def top_positive(scores: npt.NDArray[np.float32], k: int) -> list[int]:
    """Return the positions of the `k` highest positive scores, best first.

    Among equal scores, lower positions come first and are preferred.

    Args:
        scores: float32 ``[N]``.
        k: number of positions. There are fewer if fewer scores are positive.
    """
    candidates = _high_positions(scores, k)
    if candidates.size > k:
        # `threshold` is the k-th highest score. Scores above it are all taken.
        values = scores[candidates]
        threshold = np.partition(values, candidates.size - k)[candidates.size - k]
        above = candidates[values > threshold]
        equal = candidates[values == threshold]
        candidates = np.concatenate([above, equal[: k - above.size]])
    order = np.lexsort((candidates, -scores[candidates]))
    positions: list[int] = candidates[order].tolist()
    return positions


def _high_positions(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """Return the positions of the `k` highest positive scores and of a few others, ascending.

    This saves a sort of all scores. The scores are divided into blocks. At least `k` scores reach
    the `k`-th highest of the blocks' maxima, which is therefore a lower bound of the `k`-th highest
    score. Only blocks whose maximum reaches the bound are searched. All positive scores are
    returned if there are too few blocks or too few positive ones.
    """
    for block_size in _BLOCK_SIZES:
        n_blocks = scores.size // block_size
        # With fewer blocks, many scores would reach the bound. Smaller blocks are tried then.
        if n_blocks < 4 * k:
            continue
        n_in_blocks = n_blocks * block_size
        blocks = scores[:n_in_blocks].reshape(n_blocks, block_size)
        maxima = blocks.max(axis=1)
        bound = np.partition(maxima, n_blocks - k)[n_blocks - k]
        if not bound > 0:  # fewer than k blocks have a positive score
            break
        high_blocks = np.flatnonzero(maxima >= bound)
        # Positions within the concatenation of the high blocks, then within all scores.
        entries = np.flatnonzero(blocks[high_blocks] >= bound)
        in_blocks = high_blocks[entries // block_size] * block_size + entries % block_size
        # The last scores do not fill a block.
        after_blocks = n_in_blocks + np.flatnonzero(scores[n_in_blocks:] >= bound)
        return np.concatenate([in_blocks, after_blocks])
    return np.flatnonzero(scores > 0)


class ExactIndex(FolderIndex):
    """Term-at-a-time exact inner products: the ground truth for approximate backends.

    A query adds the postings of its terms, ascending, to one float32 score per document. Results do
    not depend on batch, threads or packages. Equal scores are in document order. Time grows with
    the postings read and the number of documents. An index takes 8 bytes per weight on disk. Memory
    holds the part that queries have read, and 4 bytes per document.
    """

    backend = "exact"
    own_files = (_OFFSETS, _CHECKSUMS, *_LARGE_FILES)
    unread = _LARGE_FILES

    def __init__(
        self,
        ids: Sequence[str],
        postings: Postings,
        fingerprint: str | None,
        provenance: Provenance,
    ) -> None:
        """Create an index of postings.

        Args:
            ids: ids of the documents, in the order of their positions in the postings.
            postings: documents and weights of each term.
            fingerprint: digest of the vocabulary; None if it is unknown.
            provenance: model and texts that the vectors were computed from.
        """
        self.ids = ids
        self._postings = postings
        self.vocab_size = postings.n_terms
        self.fingerprint = fingerprint
        self.provenance = provenance

    @classmethod
    def build(cls, vectors: SparseVectors, **options: object) -> ExactIndex:
        """Build an index of the positive weights of sparse vectors.

        Args:
            vectors: sparse vectors of the documents.
            options: none are accepted. Other backends have some, and are built by the same call.

        Raises:
            ValueError: for vectors without a positive weight, or any option.
        """
        if options:
            raise ArgumentError(
                "options",
                f"the exact index has none, got {', '.join(sorted(options))}.",
            )
        check_buildable(vectors)
        return cls.of_any(vectors)

    @classmethod
    def of_any(cls, vectors: SparseVectors) -> ExactIndex:
        """Build an index of vectors, which may all be empty, as after an update."""
        return cls(list(vectors.ids), Postings.of(vectors), vectors.fingerprint, vectors.provenance)

    def stored(self) -> SparseVectors:
        """Return the vectors of the documents, without zero weights, in memory."""
        return self.postings().vectors(self.ids, self.fingerprint, self.provenance)

    def search(
        self,
        queries: SparseVectors,
        k: int,
        *,
        where: Where = None,
        allowed: Mask | None = None,
    ) -> list[list[Hit]]:
        """Return the `k` documents with the highest inner products, best first, for each query.

        Documents that share no term with the query are not returned. A product that underflows to 0
        does not count as a shared term.

        Args:
            queries: sparse vectors over the vocabulary of the index.
            k: documents per query.
            where: filter of the documents' metadata.
            allowed: bool ``[N]``, False for documents that are left out.

        Raises:
            DataError: for postings that are not those that were saved.
        """
        check_search(self, queries, k)
        allowed = allowed_by(self.metadata, where, allowed)
        scores = np.empty(self.n_documents, np.float32)
        results: list[list[Hit]] = []
        for query_row in range(len(queries)):
            terms, weights = queries.row(query_row)
            scores.fill(0.0)
            self._postings.add(scores, terms, weights)
            if allowed is not None:
                scores[~allowed] = 0.0
            positions = top_positive(scores, k)
            # One conversion of all scores is faster than one of each.
            top_scores = scores[positions].tolist()
            hits = [
                Hit(self.ids[position], score)
                for position, score in zip(positions, top_scores, strict=True)
            ]
            results.append(hits)
        return results

    def postings(self) -> Postings:
        """Return the inverted index, after a check of every term."""
        self._postings.check(np.arange(self.vocab_size, dtype=np.int32))
        return self._postings

    def documents_of(self, terms: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """Return the positions of the documents of each term, see :meth:`Postings.documents_of`."""
        return self._postings.documents_of(terms)

    def on(self, device: str = "cuda") -> DeviceIndex:
        """Check all postings, and copy them to a GPU for :meth:`DeviceIndex.search`."""
        from tilefold.retrieval.index.on_device import DeviceIndex  # brings torch

        return DeviceIndex(self.ids, self.postings(), self, device)

    def _write(self, folder: Path) -> None:
        np.save(folder / _OFFSETS, self._postings.offsets)
        np.save(folder / _DOCUMENTS, self._postings.documents)
        np.save(folder / _WEIGHTS, self._postings.weights)
        checksums = [self._postings.checksum(term) for term in range(self.vocab_size)]
        np.save(folder / _CHECKSUMS, np.array(checksums, np.uint32))

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> ExactIndex:
        """Map the postings of a saved index into memory.

        Documents and weights of a term are checked when a query first reads them.
        """
        vocab_size = manifest["vocab_size"]
        offsets = read_offsets(folder / _OFFSETS, vocab_size)
        choose_add_postings()  # imports scipy here, so that the first query does not wait for it
        n_postings = int(offsets[-1])
        postings = Postings(
            offsets,
            documents=read_array(folder / _DOCUMENTS, np.int32, n_postings),
            weights=read_array(folder / _WEIGHTS, np.float32, n_postings),
            n_documents=len(ids),
            checksums=read_array(folder / _CHECKSUMS, np.uint32, vocab_size),
        )
        return cls(ids, postings, manifest.get("fingerprint"), Provenance.from_dict(manifest))
