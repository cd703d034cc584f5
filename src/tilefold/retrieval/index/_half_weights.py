"""Conversion of positive float32 weights to 16-bit floats.

All weights are multiplied by one power of two. Weights that are still too small for 16 bits are
kept apart, in 32 bits.
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
# Smallest normal float16. Smaller ones have less than 11 bits of precision.
_SMALLEST_NORMAL = 2.0**-14
# The same as an exponent of math.frexp, which is e for numbers in [2^(e - 1), 2^e).
_SMALLEST_NORMAL_EXPONENT = -13
# Scaled weights are below 2^15.
_LARGEST_EXPONENT = 15

Rows = npt.NDArray[np.int64]


@dataclass
class SmallWeights:
    """Weights that are too small for 16 bits with the scale of the largest weights.

    Attributes:
        rows: ascending rows ``[M]`` of the documents that have such weights.
        vectors: ``[M, V]``, the small weights of these documents, in float32.
    """

    rows: Rows
    vectors: SparseVectors

    @cached_property
    def _postings(self) -> Postings:
        return Postings.from_vectors(self.vectors)

    def scores(
        self,
        terms: npt.NDArray[np.int32],
        weights: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """Return the inner products ``[M]`` of a query with the small weights.

        Args:
            terms: terms of the query.
            weights: weights of these terms.
        """
        products = np.zeros(len(self.rows), np.float32)
        self._postings.add(products, terms, weights)
        return products


@dataclass
class HalfWeights:
    """Conversion of weights to 16-bit floats with a relative error below 2^-11.

    Attributes:
        exponent: weights are multiplied by ``2 ** exponent``, which is exact.
        small: weights that are still too small after that; None if there are none.
    """

    exponent: int = 0
    small: SmallWeights | None = None

    @classmethod
    def split(cls, vectors: SparseVectors) -> tuple[HalfWeights, SparseVectors]:
        """Scale the weights for 16 bits, and split off weights that are still too small.

        Args:
            vectors: sparse vectors with at least one positive weight. Zeros are dropped.

        Returns:
            The conversion, and the scaled vectors in float32, without weights that are too small.
            They are still to be rounded to 16 bits.
        """
        positive = vectors.above(0.0)
        exponent = _choose_exponent(float(positive.data.min()), float(positive.data.max()))
        scaled = positive
        if exponent:
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
        """Undo the scale of weights, or of scores that were computed from scaled weights."""
        return np.ldexp(values, -self.exponent)

    def with_small_weights(self, vectors: SparseVectors) -> SparseVectors:
        """Add the small weights, which are kept apart, to the vectors of all documents.

        Args:
            vectors: the vectors without small weights, divided by the scale.

        Returns:
            The complete vectors. The terms of a row are not sorted.
        """
        if self.small is None:
            return vectors
        # The entries of both are joined, and ordered by row.
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
        """Write the conversion to a ``.npz`` file."""
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
        """Read the conversion that :meth:`save` wrote.

        Args:
            file: the ``.npz`` file.
            n_documents: number of documents of the index. Rows must be below it.
            vocab_size: number of terms of the vocabulary. Terms must be below it.

        Raises:
            DataError: if rows, offsets, terms or weights are inconsistent or out of range.
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


def _choose_exponent(smallest: float, largest: float) -> int:
    """Choose the power of two that weights are multiplied by before a conversion to 16 bits.

    It is the smallest one that brings the smallest weight to 2^-14, the smallest normal float16,
    but keeps the largest weight below 2^15.

    Args:
        smallest: the smallest weight, above 0.
        largest: the largest weight.

    Returns:
        The exponent of 2. It is 0 if 16 bits represent all weights without a scale.
    """
    if smallest >= _SMALLEST_NORMAL and largest <= _LARGEST_HALF:
        return 0
    # The exponent e of math.frexp says that a number is in [2^(e - 1), 2^e).
    _, smallest_exponent = math.frexp(smallest)
    _, largest_exponent = math.frexp(largest)
    exponent_for_smallest = max(0, _SMALLEST_NORMAL_EXPONENT - smallest_exponent)
    return min(exponent_for_smallest, _LARGEST_EXPONENT - largest_exponent)
