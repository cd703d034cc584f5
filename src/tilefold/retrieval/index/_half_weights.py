"""Positive float32 weights as 16-bit floats.

All weights are multiplied by one power of two. Entries that are still too small are stored in 32
bits.
"""

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

# Largest finite float16.
_LARGEST_HALF = 65504.0
# Smallest float16 with all 11 bits of precision, and its exponent as math.frexp returns it.
_SMALLEST_NORMAL = 2.0**-14
_SMALLEST_NORMAL_EXPONENT = -13
# Scaled weights are below 2^15.
_LARGEST_EXPONENT = 15

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
        """Return inner products ``[M]`` of a query with the small entries."""
        products = np.zeros(len(self.rows), np.float32)
        self._postings.add(products, terms, weights)
        return products


@dataclass
class HalfWeights:
    """Conversion of weights to 16-bit floats with a relative error below 2^-11.

    Attributes:
        exponent: weights are multiplied by ``2 ** exponent``, which is exact.
        small: entries that would still lose bits, and are stored in 32 bits; None if there are
            none.
    """

    exponent: int = 0
    small: SmallWeights | None = None

    @classmethod
    def split(cls, vectors: SparseVectors) -> tuple[HalfWeights, SparseVectors]:
        """Choose the scale of the weights, and separate entries that are too small for 16 bits.

        The scale is the smallest power of two that brings the smallest weight to 2^-14, from where
        float16 has its full precision. It is limited so that the largest weight stays below 2^15.

        Args:
            vectors: sparse vectors with at least one positive weight. Zeros are dropped.

        Returns:
            The conversion, and the scaled vectors (float32) without entries that are too small.
            They are not scaled if 16 bits represent all weights.
        """
        positive = vectors.above(0.0)
        smallest = float(positive.data.min())
        largest = float(positive.data.max())
        if smallest >= _SMALLEST_NORMAL and largest <= _LARGEST_HALF:
            return cls(), positive
        # A number with the exponent e of frexp is in [2^(e - 1), 2^e).
        _, smallest_exponent = math.frexp(smallest)
        _, largest_exponent = math.frexp(largest)
        exponent_for_smallest = max(0, _SMALLEST_NORMAL_EXPONENT - smallest_exponent)
        exponent = min(exponent_for_smallest, _LARGEST_EXPONENT - largest_exponent)
        scaled = replace(positive, data=np.ldexp(positive.data, exponent))
        is_small = scaled.data < _SMALLEST_NORMAL
        if not is_small.any():
            return cls(exponent), scaled
        small_vectors = positive.selected(is_small)
        rows = np.flatnonzero(np.diff(small_vectors.indptr))
        small = SmallWeights(rows, small_vectors.take(rows))
        return cls(exponent, small), scaled.selected(~is_small)

    @property
    def is_default(self) -> bool:
        """Whether 16 bits represent all weights without a scale."""
        return self.exponent == 0 and self.small is None

    def unscaled(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Return stored weights, or scores from them, without the scale."""
        return np.ldexp(values, -self.exponent)

    def joined(self, vectors: SparseVectors) -> SparseVectors:
        """Add the small entries, which are stored in 32 bits, to vectors of the other entries.

        Args:
            vectors: the vectors of all documents without their small entries, unscaled.

        Returns:
            The complete vectors. The terms of a row are not sorted.
        """
        if self.small is None:
            return vectors
        # Rows of all entries, first those of `vectors`. A stable sort brings each row together.
        rows = np.concatenate(
            [
                np.repeat(np.arange(len(vectors)), np.diff(vectors.indptr)),
                np.repeat(self.small.rows, np.diff(self.small.vectors.indptr)),
            ],
        )
        order = np.argsort(rows, kind="stable")
        return replace(
            vectors,
            indptr=offsets_of(np.bincount(rows, minlength=len(vectors))),
            indices=np.concatenate([vectors.indices, self.small.vectors.indices])[order],
            data=np.concatenate([vectors.data, self.small.vectors.data])[order],
        )

    def save(self, file: Path) -> None:
        """Write the conversion, which is needed unless it :attr:`is_default`."""
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
        """Read a conversion that :meth:`save` wrote.

        Args:
            file: the ``.npz`` file.
            n_documents: number of documents of the index, which limits the rows.
            vocab_size: number of terms of the vocabulary, which limits the terms.

        Raises:
            DataError: if rows, offsets, terms or weights do not fit together or exceed a limit.
        """
        with np.load(file, allow_pickle=False) as arrays:
            exponent = int(arrays["exponent"])
            rows = arrays["rows"]
            indptr = arrays["indptr"]
            terms = arrays["terms"]
            weights = arrays["weights"]
        if not rows.size:
            return cls(exponent)
        check_offsets(indptr, terms.size)
        check_positions("rows", rows, n_documents)
        check_weights("weights", weights)
        if (np.diff(rows) <= 0).any() or len(indptr) != rows.size + 1:
            raise DataError(f"{file.name}: expected ascending rows and an offset after each.")
        ids = [str(row) for row in rows.tolist()]
        vectors = SparseVectors(ids, indptr, terms, weights, vocab_size)
        return cls(exponent, SmallWeights(rows, vectors))
