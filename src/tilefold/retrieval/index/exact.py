"""Exact search: an inverted index, made in little memory, and read from disk as far as queries need
it.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

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

_OFFSETS, _DOCUMENTS, _WEIGHTS, _CHECKSUMS = (
    "offsets.npy",
    "documents.npy",
    "weights.npy",
    "checksums.npy",
)
_LARGE = (_DOCUMENTS, _WEIGHTS)  # checked term by term, when a query reads them
_BLOCKS = 256, 64, 16  # scores in a block; few blocks bound badly
_PIECE = 1 << 22  # weights that are transposed at a time
_SHORT_TERMS = 1 << 16  # below, terms are sorted as 16-bit integers, by radix

Scores = npt.NDArray[np.float32]
Lists = list[tuple[npt.NDArray[np.int32], Scores]]  # documents and weights
Add = Callable[[Scores, Lists, Scores], None]


@dataclass
class Postings:
    """For term `t`, ``documents[offsets[t]:offsets[t + 1]]``, ascending, and their positive
    weights.
    """

    offsets: npt.NDArray[np.int64]  # [V + 1]
    documents: npt.NDArray[np.int32]  # [nnz], in [0, n_documents)
    weights: npt.NDArray[np.float32]  # [nnz]
    n_documents: int
    checksums: npt.NDArray[np.uint32] | None = (
        None  # [V], CRC-32 of the documents and weights of a term
    )
    trusted: npt.NDArray[np.bool_] = field(
        init=False,
    )  # [V]: its postings need no check before they are used

    def __post_init__(self) -> None:
        self.trusted = np.zeros(self.n_terms, bool)

    @property
    def n_terms(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def of(cls, vectors: SparseVectors) -> Postings:
        """The positive weights of `vectors`, transposed piece by piece: 8 bytes per weight, and 200
        MB.
        """
        counts = np.zeros(vectors.vocab_size, np.int64)
        for low, high in row_ranges(vectors.indptr, _PIECE):
            span = slice(vectors.indptr[low], vectors.indptr[high])
            counts += np.bincount(
                vectors.indices[span][vectors.data[span] > 0],
                minlength=vectors.vocab_size,
            )
        offsets = offsets_of(counts)
        documents, weights = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], np.float32)
        free = offsets[:-1].copy()  # where the next posting of each term goes
        short = vectors.vocab_size <= _SHORT_TERMS
        for low, high in row_ranges(vectors.indptr, _PIECE):
            span = slice(vectors.indptr[low], vectors.indptr[high])
            keep = vectors.data[span] > 0
            rows = np.repeat(
                np.arange(low, high, dtype=np.int32),
                np.diff(vectors.indptr[low : high + 1]),
            )[keep]
            terms, values = vectors.indices[span][keep], vectors.data[span][keep]
            order = np.argsort(terms.astype(np.uint16) if short else terms, kind="stable")
            counts = np.bincount(terms, minlength=vectors.vocab_size)
            at = np.arange(terms.size) + np.repeat(free - (np.cumsum(counts) - counts), counts)
            documents[at], weights[at] = rows[order], values[order]
            free += counts
        made = cls(offsets, documents, weights, len(vectors))
        made.trusted[:] = True
        return made

    @classmethod
    def joined(cls, parts: Sequence[Postings]) -> Postings:
        """The postings of several indexes of one vocabulary, whose documents stand one after the
        other.
        """
        counts = [np.diff(part.offsets) for part in parts]
        offsets = offsets_of(sum(counts[1:], counts[0]))
        documents, weights = np.empty(offsets[-1], np.int32), np.empty(offsets[-1], np.float32)
        free, low = offsets[:-1].copy(), 0
        for part, count in zip(parts, counts, strict=True):
            at = np.arange(part.offsets[-1]) + np.repeat(free - part.offsets[:-1], count)
            documents[at], weights[at] = part.documents + np.int32(low), part.weights
            free, low = free + count, low + part.n_documents
        return cls(offsets, documents, weights, low)

    def vectors(
        self,
        ids: Sequence[str],
        fingerprint: str | None,
        provenance: Provenance,
    ) -> SparseVectors:
        """The vectors of the documents, which have these ids, in memory."""
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
        """Add ``values[j] * weights`` of each term to the `scores` of its documents, term after
        term, in float32.
        """
        self.check(terms)
        posting_slices = map(slice, self.offsets[terms].tolist(), self.offsets[terms + 1].tolist())
        fastest()(
            scores, [(self.documents[span], self.weights[span]) for span in posting_slices], values
        )

    def check(self, terms: npt.NDArray[np.int32]) -> None:
        """Raise ``DataError`` for postings of some terms that are not those that were saved."""
        for term in () if self.trusted[terms].all() else terms[~self.trusted[terms]].tolist():
            span = slice(self.offsets[term], self.offsets[term + 1])
            try:
                if self.checksums is not None and self.checksum(term) != self.checksums[term]:
                    raise DataError("Their checksum is another.")
                check_positions("documents", self.documents[span], self.n_documents)
                check_weights("weights", self.weights[span])
            except DataError as error:
                said = (
                    f"damaged; the postings of term {term} are not those that were saved. {error}"
                )
                raise DataError(f"documents.npy, weights.npy: {said} {REMEDY}") from error
            self.trusted[term] = True

    def checksum(self, term: int) -> int:
        span = slice(self.offsets[term], self.offsets[term + 1])
        return zlib.crc32(self.weights[span].data, zlib.crc32(self.documents[span].data))


def portable(scores: Scores, lists: Lists, values: Scores) -> None:
    """``scores[documents] += value * weights`` for one list after the other, in numpy."""
    for (documents, weights), value in zip(lists, values, strict=True):
        np.add.at(scores, documents, value * weights)


def of_rounded_products(add: Add) -> Add:
    """`add` of products that are rounded before: the bits of :func:`portable` where it fuses the
    two, as on ARM.
    """
    one = np.ones(1, np.float32)

    def rounded(scores: Scores, lists: Lists, values: Scores) -> None:
        for (documents, weights), value in zip(lists, values, strict=True):
            add(scores, [(documents, value * weights)], one)

    return rounded


@cache
def fastest() -> Add:
    """:func:`portable`, or scipy's compiled product where that rounds alike, three times as fast.

    It is private to scipy, so that it is tried first, on a sum that tells a fused multiply-add from
    a rounded product. The public products allocate or copy for every term.
    """
    try:
        tools = __import__("scipy.sparse._sparsetools", fromlist=["csc_matvec"])
    except ImportError:
        return portable

    def compiled(scores: Scores, lists: Lists, values: Scores) -> None:
        ends = np.zeros((len(lists), 2), np.int32)
        ends[:, 1] = [len(documents) for documents, _ in lists]
        for at, (documents, weights) in enumerate(lists):
            tools.csc_matvec(
                scores.size,
                1,
                ends[at],
                documents,
                weights,
                values[at : at + 1],
                scores,
            )

    for add in (compiled, of_rounded_products(compiled)):
        if _agrees(add):
            return add
    said = "its product of sparse matrices does not add as expected, so that numpy searches exact indexes, more slowly"
    warnings.warn(f"scipy: {said}. Scores are the same.", RuntimeWarning, stacklevel=4)
    return portable


def _agrees(add: Add) -> bool:
    """Whether `add` gives the bits of :func:`portable` where a product is not exact in float32."""
    value = np.array([1 + 2**-12], np.float32)
    lists = [(np.array([0, 2, 3], np.int32), np.repeat(value, 3))]
    expected = -np.repeat(value * value, 4)
    found = expected.copy()
    try:
        add(found, lists, value)
    except Exception:  # whatever another version of scipy raises
        return False
    portable(expected, lists, value)
    return bool((found == expected).all())


def top_positive(scores: npt.NDArray[np.float32], k: int) -> list[int]:
    """Positions of the `k` highest positive scores, best first, equal scores by position."""
    found = _candidates(scores, k)
    if found.size > k:
        values = scores[found]
        threshold = np.partition(values, found.size - k)[found.size - k]
        above = found[values > threshold]
        found = np.concatenate([above, found[values == threshold][: k - above.size]])
    positions: list[int] = found[np.lexsort((found, -scores[found]))].tolist()
    return positions


def _candidates(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """Positions, rising, of the `k` highest positive scores and few more: blocks that reach the
    `k`-th best of all.
    """
    for width in _BLOCKS:
        if (blocks := scores.size // width) < 4 * k:
            continue
        whole = scores[: blocks * width].reshape(blocks, width)
        largest = whole.max(axis=1)
        if not (bound := np.partition(largest, blocks - k)[blocks - k]) > 0:
            break
        reach = np.flatnonzero(largest >= bound)
        inside = np.flatnonzero(whole[reach] >= bound)
        behind = blocks * width + np.flatnonzero(scores[blocks * width :] >= bound)
        return np.concatenate([reach[inside // width] * width + inside % width, behind])
    return np.flatnonzero(scores > 0)


class ExactIndex(FolderIndex):
    """Term-at-a-time exact inner products: the ground truth for approximate backends.

    A query adds the postings of its terms, ascending, to one float32 score per document. Results do
    not depend on batch, threads or packages; equal scores are in document order. Time grows with
    the postings read and the number of documents. Disk holds 8 bytes per weight; memory, what
    queries have read of that, and 4 bytes per document.
    """

    backend = "exact"
    own_files, unread = (_OFFSETS, _CHECKSUMS, *_LARGE), _LARGE

    def __init__(
        self,
        ids: Sequence[str],
        postings: Postings,
        fingerprint: str | None,
        provenance: Provenance,
    ) -> None:
        self.ids, self._postings = ids, postings
        self.vocab_size, self.fingerprint, self.provenance = (
            postings.n_terms,
            fingerprint,
            provenance,
        )

    @classmethod
    def build(cls, vectors: SparseVectors, **options: object) -> ExactIndex:
        """Transpose `vectors`, without zero weights; a ``ValueError`` without a positive one, or
        with options.
        """
        if options:
            raise ValueError(
                f"options: the exact index has none, got {', '.join(sorted(options))}.",
            )
        check_buildable(vectors)
        return cls.of_any(vectors)

    @classmethod
    def of_any(cls, vectors: SparseVectors) -> ExactIndex:
        """The index of vectors that may all be empty, as after an update."""
        return cls(list(vectors.ids), Postings.of(vectors), vectors.fingerprint, vectors.provenance)

    def stored(self) -> SparseVectors:
        """The vectors of the documents, without zero weights, in memory."""
        return self.postings().vectors(self.ids, self.fingerprint, self.provenance)

    def search(
        self,
        queries: SparseVectors,
        k: int,
        *,
        where: Where = None,
        allowed: Mask | None = None,
    ) -> list[list[Hit]]:
        """See :class:`SparseIndex`; products that underflow to 0 are no shared term, damage is a
        ``DataError``.

        `allowed`, bool ``[N]``, leaves documents out, as `where` does.
        """
        check_search(self, queries, k)
        allowed = allowed_by(self.metadata, where, allowed)
        scores = np.empty(self.n_documents, np.float32)
        results: list[list[Hit]] = []
        for i in range(len(queries)):
            scores.fill(0.0)
            self._postings.add(scores, *queries.row(i))
            if allowed is not None:
                scores[~allowed] = 0.0
            results.append([Hit(self.ids[at], float(scores[at])) for at in top_positive(scores, k)])
        return results

    def postings(self) -> Postings:
        """All of the inverted index, after a check of every term."""
        self._postings.check(np.arange(self.vocab_size, dtype=np.int32))
        return self._postings

    def documents_of(self, terms: npt.NDArray[np.int32]) -> list[npt.NDArray[np.int32]]:
        """Positions of the documents of each term, rising; a ``DataError`` for damaged ones."""
        self._postings.check(terms)
        offsets = self._postings.offsets
        posting_slices = map(slice, offsets[terms].tolist(), offsets[terms + 1].tolist())
        return [self._postings.documents[span] for span in posting_slices]

    def on(self, device: str = "cuda") -> DeviceIndex:
        """Check all of the index and copy it to a GPU, for :meth:`DeviceIndex.search` there."""
        from tilefold.retrieval.index.on_device import DeviceIndex  # brings torch

        return DeviceIndex(self.ids, self.postings(), self, device)

    def _write(self, folder: Path) -> None:
        np.save(folder / _OFFSETS, self._postings.offsets)
        np.save(folder / _DOCUMENTS, self._postings.documents)
        np.save(folder / _WEIGHTS, self._postings.weights)
        sums = map(self._postings.checksum, range(self.vocab_size))
        np.save(folder / _CHECKSUMS, np.fromiter(sums, np.uint32, self.vocab_size))

    @classmethod
    def _read(cls, folder: Path, manifest: Json, ids: StoredIds) -> ExactIndex:
        size = manifest["vocab_size"]
        offsets = read_offsets(folder / _OFFSETS, size)
        fastest()  # its import is not part of the first query
        documents = read_array(folder / _DOCUMENTS, np.int32, int(offsets[-1]))
        weights = read_array(folder / _WEIGHTS, np.float32, int(offsets[-1]))
        postings = Postings(
            offsets,
            documents,
            weights,
            len(ids),
            read_array(folder / _CHECKSUMS, np.uint32, size),
        )
        return cls(ids, postings, manifest.get("fingerprint"), Provenance.from_dict(manifest))
