"""Sparse vectors in memory: CSR arrays with ids, a vocabulary size and a vocabulary fingerprint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tilefold._internal.arguments import (
    ArgumentError,
    check_instance,
    check_integer,
    check_k,
    check_mapping,
    list_of,
)
from tilefold._internal.typing import Tensor
from tilefold.pipeline.ragged import gather_positions, offsets_of
from tilefold.retrieval.common.array_checks import (
    check_offsets,
    first_invalid_weight,
    first_outside,
)
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.errors import DataError, VocabularyMismatchError

Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

Row = tuple[Ints, Floats]  # terms and weights


@dataclass
class SparseVectors:
    """N sparse vectors over a vocabulary of V terms, stored as CSR and checked on construction.

    The terms of each row are sorted.

    Attributes:
        ids: N unique, non-empty strings.
        indptr: int64 ``[N + 1]``; row `i` is ``indices[indptr[i]:indptr[i + 1]]``.
        indices: int32 ``[nnz]``, terms in ``[0, V)``, ascending and unique within a row.
        data: float32 ``[nnz]``, finite and not negative.
        vocab_size: number of terms of the vocabulary, V.
        fingerprint: digest of the tokenizer's vocabulary (:func:`vocabulary_fingerprint`), or None
            if it is unknown.
        provenance: model and texts of the vectors, as far as they are known.

    `ids` may be any sequence, such as a pandas Series, and are read by position.

    Raises:
        DataError: if shapes are inconsistent, a term is out of range or twice in a row, a weight is
            NaN, infinite or negative, or an id is empty or repeated. The message names the row.

    Examples:
        >>> rows = {"d1": {0: 1.0, 2: 0.5}, "d2": {1: 2.0}}  # text -> term -> weight
        >>> vectors = SparseVectors.from_rows(rows, vocab_size=3)
        >>> vectors.ids, vectors.indices.tolist()
        (['d1', 'd2'], [0, 2, 1])
    """

    ids: list[str]
    indptr: Longs
    indices: Ints
    data: Floats
    vocab_size: int
    fingerprint: str | None = None
    provenance: Provenance = field(default_factory=Provenance)

    def __post_init__(self) -> None:
        """Convert the arrays to their dtypes, check them, and sort the terms of each row."""
        self.ids = list(list_of("ids", self.ids))
        self.indptr = np.ascontiguousarray(self.indptr, dtype=np.int64)
        self.indices = _as_int32(self.indices)
        self.data = np.ascontiguousarray(self.data, dtype=np.float32)
        check_ids(self.ids)
        self._check()
        if not self._in_order():
            self._sort_rows()

    def _sort_rows(self) -> None:
        """Sort the terms of each row, with their weights.

        Raises:
            DataError: if a row has a term twice.
        """
        # One key sorts by row, then by term. Keys are equal only for a repeated term.
        rows = np.repeat(np.arange(len(self.ids), dtype=np.int64), np.diff(self.indptr))
        keys = rows * self.vocab_size + self.indices
        order = np.argsort(keys, kind="stable")
        self.indices = self.indices[order]
        self.data = self.data[order]
        repeated = np.flatnonzero(np.diff(keys[order]) == 0)
        if repeated.size:
            position = int(repeated[0])
            raise DataError(
                f"indices: term {self.indices[position]} occurs twice in the row of "
                f"{self._row_id_at(position)}.",
            )

    def _check(self) -> None:
        """Raise ``DataError`` if shapes are inconsistent, or terms or weights are invalid."""
        n_rows = len(self.ids)
        n_weights = self.indices.size
        check_integer("vocab_size", self.vocab_size)
        if self.vocab_size < 1:
            raise DataError(f"vocab_size: expected at least 1, got {self.vocab_size}.")
        if self.indptr.shape != (n_rows + 1,):
            raise DataError(
                f"indptr: expected {n_rows + 1} offsets for {n_rows} ids, got shape "
                f"{self.indptr.shape}.",
            )
        if self.indices.shape != (n_weights,) or self.data.shape != (n_weights,):
            raise DataError(
                "indices and data: expected two flat arrays of the same length, got shapes "
                f"{self.indices.shape} and {self.data.shape}.",
            )
        check_offsets(self.indptr, n_weights)
        position = first_outside(self.indices, self.vocab_size)
        if position is not None:
            raise DataError(
                f"indices: expected terms in [0, {self.vocab_size}), got {self.indices[position]} "
                f"for {self._row_id_at(position)}. Were the vectors computed with another "
                "vocabulary?",
            )
        position = first_invalid_weight(self.data)
        if position is not None:
            n_invalid = int((~np.isfinite(self.data) | (self.data < 0)).sum())
            raise DataError(
                f"data: expected finite weights of at least 0, got {self.data[position]} for "
                f"{self._row_id_at(position)} ({n_invalid} in all). Check the model's output and "
                "its activation.",
            )

    def _in_order(self) -> bool:
        """Whether the terms of every row are ascending and unique.

        The check takes one byte of memory per entry, and a sort takes many.
        """
        # Entry i says whether the term at position i + 1 is above the term at position i.
        rises = self.indices[1:] > self.indices[:-1]
        # The first term of a row may be below the last term of the row before. Empty rows at either
        # end of the matrix start where there is no pair of entries.
        row_starts = self.indptr[1:-1]
        inner_starts = row_starts[(row_starts > 0) & (row_starts < self.indices.size)]
        rises[inner_starts - 1] = True
        return bool(rises.all())

    def _row_id_at(self, position: int) -> str:
        """Return the id of the row that has the entry at a position, for errors."""
        return repr(self.ids[int(np.searchsorted(self.indptr, position, side="right")) - 1])

    @classmethod
    def from_rows(
        cls,
        rows: Mapping[str, Mapping[int, float]],
        vocab_size: int,
        fingerprint: str | None = None,
    ) -> SparseVectors:
        """Create vectors from dictionaries.

        Args:
            rows: id -> term -> weight.
            vocab_size: number of terms of the vocabulary, V.
            fingerprint: digest of the vocabulary; None if it is unknown.

        Raises:
            DataError: if a term, weight or id is invalid.
        """
        check_mapping("rows", rows, "id -> weights by term")
        for identifier, row in rows.items():
            check_mapping(f"rows[{identifier!r}]", row, "term -> weight")
        lengths = np.array([len(row) for row in rows.values()], np.int64)
        indices = np.fromiter((term for row in rows.values() for term in row), dtype=np.int64)
        data = np.fromiter(
            (weight for row in rows.values() for weight in row.values()),
            dtype=np.float32,
        )
        return cls(
            list(rows),
            offsets_of(lengths),
            _as_int32(indices),
            data,
            vocab_size,
            fingerprint,
        )

    @classmethod
    def from_torch(
        cls,
        ids: Sequence[str],
        matrix: Tensor,
        fingerprint: str | None = None,
        min_weight: float = 0.0,
    ) -> SparseVectors:
        """Create vectors from a torch tensor ``[N, V]``.

        Args:
            ids: N ids.
            matrix: a dense, sparse COO or CSR tensor, on any device and in any float dtype.
            fingerprint: digest of the vocabulary. None uses the digest that ``encode_sparse``
                attaches to the tensors that it returns, if `matrix` has one.
            min_weight: positive entries up to this weight are dropped, as zeros are. NaN and
                negative entries are kept, so that they are reported.
        """
        import torch

        ids = list_of("ids", ids)
        if not isinstance(matrix, torch.Tensor) or matrix.ndim != 2 or matrix.shape[0] != len(ids):
            got = tuple(matrix.shape) if isinstance(matrix, torch.Tensor) else type(matrix).__name__
            raise DataError(
                f"matrix: expected a tensor [{len(ids)}, V] for {len(ids)} ids, got {got}.",
            )
        fingerprint = fingerprint or getattr(matrix, "vocabulary_fingerprint", None)
        rows, columns, values = _extract_coordinates(matrix.detach())
        keep = (values > min_weight) | (values < 0) | values.isnan()
        rows, columns, values = (part[keep].cpu() for part in (rows, columns, values))
        return cls(
            ids,
            offsets_of(np.bincount(rows.numpy(), minlength=len(ids))),
            columns.to(torch.int32).numpy(),
            values.float().numpy(),
            int(matrix.shape[1]),
            fingerprint,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[SparseVectors]) -> SparseVectors:
        """Join the rows of several sets of vectors over one vocabulary, in order.

        Args:
            parts: at least one set of vectors.

        Raises:
            VocabularyMismatchError: if the vocabularies of the parts differ.
            DataError: if two parts have the same id.
        """
        parts = list_of("parts", parts)
        if not parts:
            raise ArgumentError("parts", "expected at least one set of vectors, got an empty list.")
        for number, part in enumerate(parts):
            check_vectors(f"parts[{number}]", part)
        for number, part in enumerate(parts[1:], start=1):
            check_same_vocabulary(parts[0], part, "parts[0]", f"parts[{number}]")
        return cls(
            [row_id for part in parts for row_id in part.ids],
            offsets_of(np.concatenate([np.diff(part.indptr) for part in parts])),
            np.concatenate([part.indices for part in parts]),
            np.concatenate([part.data for part in parts]),
            parts[0].vocab_size,
            next((part.fingerprint for part in parts if part.fingerprint), None),
            Provenance.shared(part.provenance for part in parts),
        )

    def take(self, rows: Sequence[int] | Longs) -> SparseVectors:
        """Return a copy of some rows.

        Args:
            rows: positions of rows, in the order of the result.

        Raises:
            TypeError: if the positions are not integers.
            IndexError: if a position is out of range.
        """
        row_numbers = np.asarray(rows)
        is_integer = row_numbers.dtype.kind in "iu"  # numpy's kinds of signed and unsigned integers
        if row_numbers.size and not is_integer:
            raise TypeError(
                f"rows: expected integers, got {row_numbers.dtype}; pass positions of rows.",
            )
        row_numbers = row_numbers.astype(np.int64)
        invalid_position = first_outside(row_numbers, len(self))
        if invalid_position is not None:
            raise IndexError(
                f"rows: expected positions among {len(self)} rows, got "
                f"{row_numbers[invalid_position]}.",
            )
        # Positions of the rows' entries in `indices` and `data`, and offsets of the new rows.
        entry_positions, new_offsets = gather_positions(self.indptr, row_numbers)
        return replace(
            self,
            ids=[self.ids[row] for row in row_numbers.tolist()],
            indptr=new_offsets,
            indices=self.indices[entry_positions],
            data=self.data[entry_positions],
        )

    def above(self, min_weight: float) -> SparseVectors:
        """Return the vectors without weights up to `min_weight`.

        If no weight is dropped, the vectors are not copied.
        """
        keep = self.data > min_weight
        return self if keep.all() else self.selected(keep)

    def without(self, terms: Collection[int]) -> SparseVectors:
        """Return a copy without the weights of some terms, in any order."""
        excluded_terms = np.asarray(list_of("terms", terms, ordered=False), np.int64)
        return self.selected(~np.isin(self.indices, excluded_terms))

    def selected(self, keep: npt.NDArray[np.bool_]) -> SparseVectors:
        """Return a copy with the entries for which a mask, bool ``[nnz]``, is True."""
        n_kept_before = offsets_of(keep)  # number of kept entries before each position
        return replace(
            self,
            indptr=n_kept_before[self.indptr],
            indices=self.indices[keep],
            data=self.data[keep],
        )

    @cached_property
    def row_of(self) -> dict[str, int]:
        """The row of each id."""
        return {name: row for row, name in enumerate(self.ids)}

    def row(self, i: int) -> Row:
        """Return the terms and the weights of row `i`, as views."""
        low = int(self.indptr[i])
        high = int(self.indptr[i + 1])
        return self.indices[low:high], self.data[low:high]

    def __len__(self) -> int:
        return len(self.ids)


class HasVocabulary(Protocol):
    """Sparse vectors, or a manifest or an index of sparse vectors."""

    @property
    def vocab_size(self) -> int | None: ...
    @property
    def fingerprint(self) -> str | None: ...


def check_same_vocabulary(
    left: HasVocabulary,
    right: HasVocabulary,
    left_name: str,
    right_name: str,
) -> None:
    """Raise ``VocabularyMismatchError`` if the vocabularies of two sets of vectors differ.

    Their sizes are compared, and their fingerprints if both are known (not None).

    Args:
        left: vectors, a manifest or an index with the expected vocabulary.
        right: vectors, a manifest or an index that is compared with it.
        left_name: name of `left` in the error.
        right_name: name of `right` in the error.
    """
    if left.vocab_size != right.vocab_size:
        raise VocabularyMismatchError(
            f"{right_name}: expected the vocabulary of {left_name} with {left.vocab_size} terms, "
            f"got one with {right.vocab_size}. Encode both with the same model.",
        )
    if left.fingerprint and right.fingerprint and left.fingerprint != right.fingerprint:
        raise VocabularyMismatchError(
            f"{right_name}: expected the vocabulary of {left_name} (fingerprint "
            f"{left.fingerprint[:12]}), got one of the same size (fingerprint "
            f"{right.fingerprint[:12]}). Encode both with the same model.",
        )


def check_vectors(
    name: str,
    vectors: object,
    remedy: str = "read_vectors(folder) or SparseVectors.from_rows(rows, vocab_size)",
) -> None:
    """Raise ``TypeError`` if an argument is not :class:`SparseVectors`.

    Args:
        name: name of the argument.
        vectors: value of the argument.
        remedy: expression that creates such vectors, for the error.
    """
    check_instance(name, vectors, SparseVectors, remedy)


def check_buildable(vectors: SparseVectors) -> None:
    """Raise an error if no index can be built from vectors.

    Raises:
        TypeError: if `vectors` is not ``SparseVectors``.
        ValueError: if no vector has a positive weight.
    """
    check_vectors("vectors", vectors)
    if not len(vectors) or not bool((vectors.data > 0).any()):
        raise ArgumentError(
            "vectors",
            "expected at least one vector with a positive weight, got "
            f"{len(vectors)} vector(s) without. Check the model.",
        )


def check_search(index: HasVocabulary, queries: SparseVectors, k: int) -> None:
    """Check the queries and the number of hits of a search.

    Args:
        index: the index, with its vocabulary.
        queries: sparse vectors of the queries.
        k: number of hits per query.

    Raises:
        TypeError: if `queries` are not sparse vectors.
        ValueError: if `k` is not an integer of at least 1.
        VocabularyMismatchError: if the queries have another vocabulary than the index.
    """
    check_vectors("queries", queries, "encode_queries(model, {id: text})")
    check_k(k)
    check_same_vocabulary(index, queries, "the index", "queries")


def _extract_coordinates(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows, the columns and the values of the entries of a matrix.

    Args:
        matrix: a dense, sparse COO or CSR tensor ``[N, V]`` without gradient, on any device.

    Returns:
        Three tensors ``[n]``, ordered by row. Those of a CSR tensor are on the
        CPU, the others on the device of the matrix.
    """
    import torch

    if matrix.layout == torch.sparse_csr:
        offsets = matrix.crow_indices().cpu()
        # numpy repeats the rows, because torch would start all its threads for a few rows. That can
        # take milliseconds.
        row_numbers = np.repeat(np.arange(matrix.shape[0]), offsets.diff().numpy())
        return torch.from_numpy(row_numbers), matrix.col_indices().cpu(), matrix.values().cpu()
    if matrix.layout != torch.sparse_coo:
        matrix = matrix.to_sparse()
    sparse = matrix.coalesce()
    rows, columns = sparse.indices().unbind(0)
    return rows, columns, sparse.values()


def _as_int32(indices: npt.ArrayLike) -> Ints:
    """Convert terms to a contiguous int32 array.

    Raises:
        DataError: if the numbers are not integers, or do not fit int32.
    """
    array = np.asarray(indices)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"indices: expected integers, got {array.dtype}.")
    limits = np.iinfo(np.int32)
    if array.size and (array.max() > limits.max or array.min() < limits.min):
        raise DataError(
            f"indices: expected terms that fit int32, got {array.min()} to {array.max()}.",
        )
    return np.ascontiguousarray(array, dtype=np.int32)


def check_ids(ids: list[str]) -> None:
    """Raise ``DataError`` if ids are not unique, non-empty strings."""
    earlier_ids: set[str] = set()
    for number, value in enumerate(ids):
        if not isinstance(value, str) or not value:
            raise DataError(f"ids[{number}]: expected a non-empty string, got {value!r}.")
        if value in earlier_ids:
            raise DataError(f"ids[{number}]: {value!r} is a duplicate. Ids must be unique.")
        earlier_ids.add(value)
