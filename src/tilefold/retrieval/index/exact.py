"""Exact search with an inverted index.

The index is built in little memory. A stored index is memory-mapped, and a query reads and checks
the postings of its own terms only.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
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
    GrowingIndex,
    Hit,
    StoredIds,
    read_array,
    read_offsets,
)
from tilefold.retrieval.vectors.sparse import SparseVectors, check_buildable, check_search

if TYPE_CHECKING:
    from tilefold.retrieval.index.devices import Devices
    from tilefold.retrieval.index.on_device import DeviceIndex

__all__ = ["ExactIndex"]

_OFFSETS = "offsets.npy"
_DOCUMENTS = "documents.npy"
_WEIGHTS = "weights.npy"
_CHECKSUMS = "checksums.npy"
# Files that are checked term by term, when a query reads them.
_LARGE_FILES = (_DOCUMENTS, _WEIGHTS)
# Sizes of the blocks of scores in a search for the highest scores, largest first. Fewer blocks are
# faster, but give a lower bound of the k-th highest score.
_BLOCK_SIZES = (256, 64, 16)
# Number of blocks per wanted score below which the bound would be too low.
_MIN_BLOCKS_PER_SCORE = 4
# Number of weights that are transposed at a time.
_WEIGHTS_PER_PIECE = 1 << 22
# Largest vocabulary whose terms are sorted as 16-bit integers, for which numpy has a radix sort.
_MAX_SHORT_TERMS = 1 << 16

Scores = npt.NDArray[np.float32]
Lists = list[tuple[npt.NDArray[np.int32], Scores]]
"""Posting lists of some terms: the documents of each term, and its weights in them."""
AddPostings = Callable[[Scores, Lists, Scores], None]
"""A function of ``(scores, lists, values)`` that adds ``value * weights`` to the scores of the
documents, for each posting list and its value."""


@dataclass
class Postings:
    """Postings of all terms: the documents that have a term, and its weights in them.

    Attributes:
        offsets: ``[V + 1]``; the postings of term ``t`` begin at ``offsets[t]`` and end before
            ``offsets[t + 1]``.
        documents: ``[nnz]``, positions of documents, ascending for each term.
        weights: ``[nnz]``, all positive.
        n_documents: number of documents of the index.
        checksums: ``[V]``, CRC-32 of the documents and weights of each term; None if the postings
            were not read from files.
        folder: folder of the files that the postings were read from, for errors; None if they were
            not read from files.
        trusted: ``[V]``, whether the postings of a term were checked.
    """

    offsets: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    n_documents: int
    checksums: npt.NDArray[np.uint32] | None = None
    folder: Path | None = None
    trusted: npt.NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.trusted = np.zeros(self.n_terms, bool)

    @property
    def n_terms(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_vectors(cls, vectors: SparseVectors) -> Postings:
        """Transpose the positive weights of sparse vectors.

        A first pass over the vectors counts the postings of each term, and a second pass writes
        them to their positions. Both read the vectors piece by piece. This takes 8 bytes per weight
        for the result and 200 MB for a piece.

        Args:
            vectors: sparse vectors of the documents.
        """
        vocab_size = vectors.vocab_size
        pieces = list(row_ranges(vectors.indptr, _WEIGHTS_PER_PIECE))
        term_counts = np.zeros(vocab_size, np.int64)
        for row_begin, row_end in pieces:
            span = slice(vectors.indptr[row_begin], vectors.indptr[row_end])
            positive_terms = vectors.indices[span][vectors.data[span] > 0]
            term_counts += np.bincount(positive_terms, minlength=vocab_size)
        offsets = offsets_of(term_counts)
        postings = cls(
            offsets,
            np.empty(offsets[-1], np.int32),
            np.empty(offsets[-1], np.float32),
            len(vectors),
        )
        # Where the next posting of each term is written.
        next_positions = offsets[:-1].copy()
        for row_begin, row_end in pieces:
            piece = _transpose_rows(vectors, row_begin, row_end)
            postings._insert(piece, next_positions, row_begin)
        postings.trusted[:] = True  # what was just computed needs no check
        return postings

    @classmethod
    def concatenate(cls, parts: Sequence[Postings]) -> Postings:
        """Concatenate the documents of several indexes with the same vocabulary.

        The documents of a part are numbered after those of the parts before it, so that the
        documents of each term stay ascending.
        """
        offsets = np.sum([part.offsets for part in parts], axis=0)
        postings = cls(
            offsets,
            np.empty(offsets[-1], np.int32),
            np.empty(offsets[-1], np.float32),
            sum(part.n_documents for part in parts),
        )
        # Where the next posting of each term is written.
        next_positions = offsets[:-1].copy()
        first_document = 0
        for part in parts:
            postings._insert(part, next_positions, first_document)
            first_document += part.n_documents
        return postings

    def divide(self, bounds: Sequence[int]) -> Iterator[Postings]:
        """Divide the documents into parts, whose documents are numbered from 0.

        Args:
            bounds: ``[parts + 1]``, ascending from 0 to the number of documents. The documents of
                part `i` are ``bounds[i]`` to ``bounds[i + 1]``, exclusive.

        Yields:
            The postings of each part, in memory.
        """
        # Column i is where part i begins in the list of each term, and part i - 1 ends.
        part_offsets = np.empty((self.n_terms, len(bounds)), np.int64)
        for term in range(self.n_terms):
            begin, end = self.offsets[term : term + 2].tolist()
            part_offsets[term] = begin + np.searchsorted(self.documents[begin:end], bounds)
        for part in range(len(bounds) - 1):
            first_document, end_document = bounds[part : part + 2]
            begins = part_offsets[:, part]
            ends = part_offsets[:, part + 1]
            spans = list(map(slice, begins.tolist(), ends.tolist()))
            documents = np.concatenate([self.documents[span] for span in spans])
            documents -= np.int32(first_document)
            yield Postings(
                offsets_of(ends - begins),
                documents,
                np.concatenate([self.weights[span] for span in spans]),
                end_document - first_document,
            )

    def _insert(
        self,
        part: Postings,
        next_positions: npt.NDArray[np.int64],
        first_document: int,
    ) -> None:
        """Write the postings of consecutive documents into these postings, whose arrays exist.

        Args:
            part: the postings to write.
            next_positions: ``[V]``, where the next posting of each term is written. It is advanced
                in place.
            first_document: number of the first document of the part in these postings.
        """
        counts = np.diff(part.offsets)
        # The postings of a term move from its offset in the part to its next position.
        shifts = np.repeat(next_positions - part.offsets[:-1], counts)
        positions = np.arange(part.offsets[-1]) + shifts
        self.documents[positions] = part.documents + np.int32(first_document)
        self.weights[positions] = part.weights
        next_positions += counts

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
        # A stable sort by document keeps the terms of each document ascending.
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
            DataError: if the postings have changed since they were saved.
        """
        self.check(terms)
        lists = [(self.documents[span], self.weights[span]) for span in self._spans(terms)]
        add_postings = choose_add_postings()
        add_postings(scores, lists, values)

    def documents_of(self, terms: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """Return the documents of each term, ascending.

        Raises:
            DataError: if the postings have changed since they were saved.
        """
        self.check(terms)
        return [self.documents[span] for span in self._spans(terms)]

    def _spans(self, terms: npt.NDArray[np.int32]) -> list[slice]:
        """Return the span of the postings of each term."""
        begins = self.offsets[terms].tolist()
        ends = self.offsets[terms + 1].tolist()
        return list(map(slice, begins, ends))

    def check(self, terms: npt.NDArray[np.int32]) -> None:
        """Check the postings of terms that have not been checked before.

        Raises:
            DataError: if the postings have changed since they were saved.
        """
        is_trusted = self.trusted[terms]
        if is_trusted.all():
            return
        for term in terms[~is_trusted].tolist():
            self._check_term(term)
            self.trusted[term] = True

    def _check_term(self, term: int) -> None:
        """Raise ``DataError`` if the postings of a term have changed since they were saved."""
        files = f"{_DOCUMENTS}, {_WEIGHTS}"
        if self.folder is not None:
            files = f"{self.folder / _DOCUMENTS}, {self.folder / _WEIGHTS}"
        damage = f"{files}: damaged; the postings of term {term} have changed"
        if self.checksums is not None and self.checksum(term) != self.checksums[term]:
            raise DataError(f"{damage}. Their checksum does not match. {REMEDY}")
        span = slice(self.offsets[term], self.offsets[term + 1])
        try:
            check_positions("documents", self.documents[span], self.n_documents)
            check_weights("weights", self.weights[span])
        except DataError as error:
            raise DataError(f"{damage}. {error} {REMEDY}") from error

    def checksum(self, term: int) -> int:
        """Return the CRC-32 of the documents and weights of a term."""
        span = slice(self.offsets[term], self.offsets[term + 1])
        return zlib.crc32(self.weights[span].data, zlib.crc32(self.documents[span].data))


def _transpose_rows(vectors: SparseVectors, row_begin: int, row_end: int) -> Postings:
    """Transpose the positive weights of some rows of sparse vectors to postings.

    The documents of the postings are numbered from 0, which is the first of these rows.

    Args:
        vectors: the sparse vectors.
        row_begin: the first row.
        row_end: the row after the last one.
    """
    span = slice(vectors.indptr[row_begin], vectors.indptr[row_end])
    row_lengths = np.diff(vectors.indptr[row_begin : row_end + 1])
    rows = np.repeat(np.arange(row_end - row_begin, dtype=np.int32), row_lengths)
    is_positive = vectors.data[span] > 0
    rows = rows[is_positive]
    terms = vectors.indices[span][is_positive]
    weights = vectors.data[span][is_positive]
    # numpy sorts 16-bit integers faster, by a radix sort.
    has_short_terms = vectors.vocab_size <= _MAX_SHORT_TERMS
    order = np.argsort(terms.astype(np.uint16) if has_short_terms else terms, kind="stable")
    return Postings(
        offsets_of(np.bincount(terms, minlength=vectors.vocab_size)),
        rows[order],
        weights[order],
        row_end - row_begin,
    )


def add_with_numpy(scores: Scores, lists: Lists, values: Scores) -> None:
    """Add ``value * weights`` to the scores of the documents of each posting list, with numpy."""
    for (documents, weights), value in zip(lists, values, strict=True):
        np.add.at(scores, documents, value * weights)


def with_rounded_products(add: AddPostings) -> AddPostings:
    """Wrap `add` so that each product is rounded to float32 before it is added.

    A compiler may turn a multiplication and an addition into one fused multiply-add, as on ARM,
    which does not round the product. The sum may then differ from numpy's in the last bit. In the
    wrapper, numpy multiplies, and `add` multiplies the rounded products by 1, which is exact.
    """
    one = np.ones(1, np.float32)

    def add_rounded_products(scores: Scores, lists: Lists, values: Scores) -> None:
        for (documents, weights), value in zip(lists, values, strict=True):
            add(scores, [(documents, value * weights)], one)

    return add_rounded_products


@cache
def choose_add_postings() -> AddPostings:
    """Return the fastest function that adds postings to scores and is bit-identical to numpy.

    Postings are the documents of a term and its weights in them. scipy's compiled product of a
    sparse matrix and a vector takes a third of numpy's time. The function is private to scipy, so
    its result is compared with :func:`add_with_numpy` before it is used. The public products of
    scipy allocate or copy arrays for every term.
    """
    try:
        sparsetools = import_module("scipy.sparse._sparsetools")
    except ImportError:
        return add_with_numpy

    def add_with_scipy(scores: Scores, lists: Lists, values: Scores) -> None:
        """Add ``value * weights`` to the scores of the documents of each list, with scipy.

        scipy's ``csc_matvec`` adds the product of a sparse matrix and a vector to an array, without
        a temporary array. A posting list is a matrix ``[N, 1]`` in CSC layout, and its value is the
        vector.
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
        if _matches_numpy_bitwise(add):
            return add
    warnings.warn(
        "scipy's product of sparse matrices gives unexpected results, so exact indexes are "
        "searched with numpy, which is slower. Scores are the same.",
        RuntimeWarning,
        stacklevel=4,
    )
    return add_with_numpy


def _matches_numpy_bitwise(add: AddPostings) -> bool:
    """Return whether a function adds postings to scores with the same bits as numpy.

    The test adds ``value * value`` to ``-rounded(value * value)``, for a value whose square is not
    exact in float32. The sum is exactly 0 if the product is rounded. With a fused multiply-add, the
    sum is the rounding error.
    """
    value = np.array([1 + 2**-12], np.float32)
    # The posting list skips document 1, whose score must not change.
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

    Lower positions win ties.

    Args:
        scores: float32 ``[N]``.
        k: number of positions. There are fewer if fewer scores are positive.
    """
    # Ascending positions of all scores that are at least the k-th highest, and of some others.
    candidates = _find_high_positions(scores, k)
    if candidates.size > k:
        values = scores[candidates]
        kth_position = candidates.size - k  # in ascending order
        kth_highest = np.partition(values, kth_position)[kth_position]
        above = candidates[values > kth_highest]
        tied = candidates[values == kth_highest]
        candidates = np.concatenate([above, tied[: k - above.size]])
    order = np.lexsort((candidates, -scores[candidates]))
    positions: list[int] = candidates[order].tolist()
    return positions


def _find_high_positions(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """Return a superset of the positions of the `k` highest positive scores, ascending.

    The superset includes every score that ties with the `k`-th highest one.

    To avoid a sort of all scores, they are divided into blocks. The `k`-th highest block maximum is
    a lower bound of the `k`-th highest score, because at least `k` scores reach it. Only blocks
    whose maximum reaches the bound are searched. If there are too few blocks or too few positive
    scores, all positive scores are returned.
    """
    for block_size in _BLOCK_SIZES:
        n_blocks = scores.size // block_size
        if n_blocks < _MIN_BLOCKS_PER_SCORE * k:
            continue
        n_in_blocks = n_blocks * block_size
        blocks = scores[:n_in_blocks].reshape(n_blocks, block_size)
        maxima = blocks.max(axis=1)
        bound = np.partition(maxima, n_blocks - k)[n_blocks - k]
        if not bound > 0:
            # Fewer than k blocks have a positive score.
            break
        high_blocks = np.flatnonzero(maxima >= bound)
        entries = np.flatnonzero(blocks[high_blocks] >= bound)
        high_block, position_in_block = np.divmod(entries, block_size)
        in_blocks = high_blocks[high_block] * block_size + position_in_block
        # The last scores do not fill a block.
        after_blocks = n_in_blocks + np.flatnonzero(scores[n_in_blocks:] >= bound)
        return np.concatenate([in_blocks, after_blocks])
    return np.flatnonzero(scores > 0)


class ExactIndex(GrowingIndex):
    """An inverted index that computes exact inner products, term by term.

    Postings are the documents of a term and its weights in them. A query adds the postings of its
    terms, in ascending order, to one float32 score per document. Results do not depend on the
    batch, threads or packages. Equal scores are in document order. The time of a search grows with
    the postings read and the number of documents. An index takes 8 bytes per weight on disk. In
    memory, it takes the postings that queries have read, and 4 bytes per document.
    """

    backend = "exact"
    own_files = (_OFFSETS, _CHECKSUMS, *_LARGE_FILES)
    checked_lazily = _LARGE_FILES

    def __init__(
        self,
        ids: Sequence[str],
        postings: Postings,
        fingerprint: str | None,
        provenance: Provenance,
    ) -> None:
        """Wrap postings as an index.

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
            options: must be empty. Other backends, which are built by the same call, have options.

        Raises:
            ValueError: if no weight is positive, or an option is passed.
        """
        check_buildable(vectors)
        return cls.build_unchecked(vectors, **options)

    @classmethod
    def build_unchecked(cls, vectors: SparseVectors, **options: object) -> ExactIndex:
        """Build an index of vectors, which may all be empty after an update.

        Args:
            vectors: sparse vectors of the documents.
            options: must be empty.
        """
        if options:
            raise ArgumentError(
                "options",
                f"the exact index takes no options, got {', '.join(sorted(options))}.",
            )
        return cls(
            list(vectors.ids),
            Postings.from_vectors(vectors),
            vectors.fingerprint,
            vectors.provenance,
        )

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
        does not count as a shared term. If both `where` and `allowed` are passed, documents must
        match both.

        Args:
            queries: sparse vectors over the vocabulary of the index.
            k: number of documents per query.
            where: filter of the documents' metadata.
            allowed: bool ``[N]``, False for documents that are left out; None allows all.

        Raises:
            DataError: if the postings on disk are damaged.
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
        """Return the positions of the documents of each term, ascending.

        Raises:
            DataError: if the postings on disk are damaged.
        """
        return self._postings.documents_of(terms)

    def on(self, device: Devices = "cuda") -> DeviceIndex:
        """Return an index whose postings are checked and copied to one or several devices.

        Args:
            device: a device, such as ``"cuda"``; or several among which the documents are divided,
                such as ``["cuda:0", "cuda:1"]``, which give the same results.
        """
        from tilefold.retrieval.index.on_device import DeviceIndex  # needs torch

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

        Args:
            folder: the folder of the index.
            manifest: the manifest of the index.
            ids: ids of the documents.
        """
        vocab_size = manifest["vocab_size"]
        offsets = read_offsets(folder / _OFFSETS, vocab_size)
        # This imports scipy, so that the first query does not wait for it. The result is cached.
        choose_add_postings()
        n_postings = int(offsets[-1])
        postings = Postings(
            offsets=offsets,
            documents=read_array(folder / _DOCUMENTS, np.int32, n_postings),
            weights=read_array(folder / _WEIGHTS, np.float32, n_postings),
            n_documents=len(ids),
            checksums=read_array(folder / _CHECKSUMS, np.uint32, vocab_size),
            folder=folder,
        )
        return cls(ids, postings, manifest.get("fingerprint"), Provenance.from_dict(manifest))
