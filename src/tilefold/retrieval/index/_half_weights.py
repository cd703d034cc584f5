"""Positive float32 weights as 16-bit floats: a power of two for all, and an exact store for the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tilefold.pipeline.ragged import offsets_of
from tilefold.retrieval.common.array_checks import check_offsets, check_positions, check_weights
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index.exact import Postings
from tilefold.retrieval.vectors.sparse import SparseVectors

_LARGEST = 65504.0
_SMALLEST_NORMAL = 2.0**-14  # smaller ones have fewer than 11 bits
_LARGEST_EXPONENT = 15  # scaled weights are at most 2^15

Rows = npt.NDArray[np.int64]


@dataclass
class SmallWeights:
    """Entries of documents that are too small for 16 bits beside their largest weights.

    Attributes:
        rows: ascending rows ``[M]`` of the documents that have such entries.
        vectors: the entries of these documents, in float32.
    """

    rows: Rows
    vectors: SparseVectors

    @cached_property
    def _postings(self) -> Postings:
        return Postings.of(self.vectors)

    def scores(
        self,
        terms: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """Inner products ``[M]`` of a query with these entries."""
        products = np.zeros(len(self.rows), np.float32)
        self._postings.add(products, terms, weights)
        return products


@dataclass
class HalfWeights:
    """How weights become 16-bit floats with a relative error below 2^-11.

    Attributes:
        exponent: weights are stored times ``2 ** exponent``, which is exact.
        small: entries that would lose bits nevertheless, which are stored apart; None without any.
    """

    exponent: int = 0
    small: SmallWeights | None = None

    @classmethod
    def split(cls, vectors: SparseVectors) -> tuple[HalfWeights, SparseVectors]:
        """Choose the scale for `vectors`, and return it with the scaled entries that suit 16 bits.

        Vectors whose weights all suit 16 bits as they are keep them. At least one weight must be
        positive; zeros are dropped.
        """
        positive = vectors.above(0.0)
        smallest, largest = float(positive.data.min()), float(positive.data.max())
        if smallest >= _SMALLEST_NORMAL and largest <= _LARGEST:
            return cls(), positive
        # a number with the exponent e of frexp is in [2^(e - 1), 2^e)
        needed = max(0, -13 - math.frexp(smallest)[1])
        exponent = min(needed, _LARGEST_EXPONENT - math.frexp(largest)[1])
        scaled = replace(positive, data=np.ldexp(positive.data, exponent))
        is_small = scaled.data < _SMALLEST_NORMAL
        if not is_small.any():
            return cls(exponent), scaled
        apart = positive.selected(is_small)
        rows = np.flatnonzero(np.diff(apart.indptr))
        return cls(exponent, SmallWeights(rows, apart.take(rows))), scaled.selected(~is_small)

    @property
    def is_default(self) -> bool:
        """Whether all weights suit 16 bits as they are."""
        return self.exponent == 0 and self.small is None

    def unscaled(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Stored weights, or scores of them, without the scale."""
        return np.ldexp(values, -self.exponent)

    def joined(self, vectors: SparseVectors) -> SparseVectors:
        """Unscaled vectors together with the entries that are stored apart."""
        if self.small is None:
            return vectors
        owners = np.concatenate(
            [
                np.repeat(np.arange(len(vectors)), np.diff(vectors.indptr)),
                np.repeat(self.small.rows, np.diff(self.small.vectors.indptr)),
            ],
        )
        order = np.argsort(owners, kind="stable")
        return replace(
            vectors,
            indptr=offsets_of(np.bincount(owners, minlength=len(vectors))),
            indices=np.concatenate([vectors.indices, self.small.vectors.indices])[order],
            data=np.concatenate([vectors.data, self.small.vectors.data])[order],
        )

    def save(self, file: Path) -> None:
        """Write scale and entries; only needed where they differ from the default."""
        small = self.small
        np.savez(
            file,
            exponent=np.int64(self.exponent),
            rows=np.empty(0, np.int64) if small is None else small.rows,
            indptr=np.zeros(1, np.int64) if small is None else small.vectors.indptr,
            terms=np.empty(0, np.int32) if small is None else small.vectors.indices,
            weights=np.empty(0, np.float32) if small is None else small.vectors.data,
        )

    @classmethod
    def load(cls, file: Path, n_documents: int, vocab_size: int) -> HalfWeights:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: for arrays that do not describe entries of such documents and terms.
        """
        with np.load(file, allow_pickle=False) as arrays:
            exponent = int(arrays["exponent"])
            rows, indptr = arrays["rows"], arrays["indptr"]
            terms, weights = arrays["terms"], arrays["weights"]
        if not rows.size:
            return cls(exponent)
        check_offsets(indptr, terms.size)
        check_positions("rows", rows, n_documents)
        check_weights("weights", weights)
        if (np.diff(rows) <= 0).any() or len(indptr) != rows.size + 1:
            raise DataError(f"{file.name}: expected ascending rows and an offset after each.")
        ids = [str(row) for row in rows.tolist()]
        return cls(
            exponent,
            SmallWeights(rows, SparseVectors(ids, indptr, terms, weights, vocab_size)),
        )
