"""Selection of scores above a minimum, in blocks of the vocabulary, and sparse rows of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold._internal.csr import csr_tensor


class CapacityRows(NamedTuple):
    """Sparse rows of a fixed capacity, whose sizes the CPU does not need to know.

    Attributes:
        counts: ``[B]`` int32 entries of each row. A count above the capacity says that some did not
            fit.
        n_stored: ``[B]`` int32 entries that are stored: at most the capacity, or ``top_k``.
        columns: ``[B, capacity]`` (or ``[B, top_k]``) int32 columns in rising order; undefined from
            ``n_stored[b]`` on.
        values: scores of the columns.
        vocab_size: V.
    """

    counts: Tensor
    n_stored: Tensor
    columns: Tensor
    values: Tensor
    vocab_size: int


def select_rows(
    blocks: Iterable[tuple[int, Tensor]],
    shape: tuple[int, int],
    top_k: int | None,
    min_weight: float,
    dtype: torch.dtype,
) -> Tensor:
    """Select scores block by block, and return them as a CSR tensor.

    Memory holds the selected entries of all blocks, or with ``top_k`` the largest of each row so
    far.

    Args:
        blocks: first column and scores ``[B, C]`` of each block, in rising order of columns.
        shape: ``(B, V)``.
        top_k: largest number of entries per row; ``None`` selects all.
        min_weight: entries have to be greater. NaN is always selected.
        dtype: dtype of the result.
    """
    if top_k is None:
        entries = []
        for first_column, scores in blocks:
            is_selected = ~(scores <= min_weight)  # not `scores > min_weight`: true for NaN, too
            rows, positions = is_selected.nonzero(as_tuple=True)
            entries.append((rows, positions + first_column, scores[rows, positions]))
        rows, columns, values = (torch.cat(parts) for parts in zip(*entries, strict=True))
        return csr_from_entries(rows, columns, values, shape, dtype)

    top_scores: Tensor | None = None
    top_columns: Tensor | None = None
    for first_column, scores in blocks:
        columns = torch.arange(
            first_column,
            first_column + scores.size(1),
            device=scores.device,
        ).expand(scores.size(0), -1)
        if top_scores is None or top_columns is None:
            top_scores, top_columns = largest(scores, columns, top_k)
        else:
            candidates = torch.cat([top_scores, scores], dim=1)
            candidate_columns = torch.cat([top_columns, columns], dim=1)
            top_scores, top_columns = largest(candidates, candidate_columns, top_k)
    if top_scores is None or top_columns is None:
        raise ValueError("blocks must not be empty, got none; V must be at least 1.")
    is_selected = ~(top_scores <= min_weight)
    rows, positions = is_selected.nonzero(as_tuple=True)
    return csr_from_entries(
        rows,
        top_columns[rows, positions],
        top_scores[rows, positions],
        shape,
        dtype,
    )


def largest(scores: Tensor, columns: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` largest scores of each row and their columns, in the order of columns.

    Among equal scores the first ones are selected.

    Args:
        scores: ``[B, C]``.
        columns: ``[B, C]`` in ascending order.
        top_k: number of entries. If rows have no more, all are returned.
    """
    if scores.size(1) <= top_k:
        return scores, columns
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k].sort(dim=1).values
    return scores.gather(1, order), columns.gather(1, order)


def csr_from_entries(
    rows: Tensor,
    columns: Tensor,
    scores: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """Return entries as a ``torch.sparse_csr`` tensor of ``dtype``.

    Args:
        rows: ``[n]`` rows of the entries, in any order.
        columns: ``[n]`` columns of the entries, ascending within a row.
        scores: ``[n]`` values of the entries.
        shape: ``(B, V)``.
        dtype: dtype of the result.
    """
    order = rows.sort(stable=True).indices
    counts = torch.bincount(rows, minlength=shape[0])
    row_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return csr_tensor(row_starts, columns[order], scores[order].to(dtype), shape)


def rows_of_scores(
    scores: Tensor,
    capacity: int,
    top_k: int | None,
    min_weight: float,
) -> CapacityRows:
    """Return the scores above a threshold as sparse rows with memory for ``capacity`` entries each.

    The shapes do not depend on the scores, so this never synchronises with the device. NaN is
    always selected, so that it is noticed.

    Args:
        scores: ``[B, V]``.
        capacity: entries that a row can hold. Further ones are counted, but not stored.
        top_k: largest number of entries per row; ``None`` selects all that fit.
        min_weight: only scores above this are selected.
    """
    is_selected = ~(scores <= min_weight)  # true for NaN
    counts = is_selected.sum(1, dtype=torch.int32)
    # The position of an entry is the number of selected ones before it in its row. One more
    # position takes all entries that are not selected, or do not fit, and is removed at the end.
    positions = torch.where(is_selected, is_selected.cumsum(1) - 1, capacity).clamp(max=capacity)
    shape = scores.size(0), capacity + 1
    all_columns = torch.arange(scores.size(1), dtype=torch.int32, device=scores.device).expand(
        scores.shape,
    )
    columns = all_columns.new_zeros(shape).scatter_(1, positions, all_columns)[:, :capacity]
    values = scores.new_zeros(shape).scatter_(1, positions, scores)[:, :capacity]
    rows = CapacityRows(counts, counts.clamp(max=capacity), columns, values, scores.size(1))
    return largest_entries(rows, top_k)


def largest_entries(rows: CapacityRows, top_k: int | None) -> CapacityRows:
    """Return rows with at most the ``top_k`` largest entries of each row, in the order of columns.

    Args:
        rows: sparse rows, each with memory for the same number of entries (their capacity).
        top_k: largest number of entries of a row; ``None`` selects all.
    """
    capacity = rows.columns.size(1)
    if top_k is None or top_k >= capacity:
        return rows
    # NaN sorts first. Unused positions are -inf, and sort last.
    is_unused = torch.arange(capacity, device=rows.columns.device) >= rows.n_stored[:, None]
    values, columns = largest(rows.values.masked_fill(is_unused, -math.inf), rows.columns, top_k)
    return rows._replace(
        n_stored=rows.n_stored.clamp(max=top_k),
        columns=columns,
        values=values,
    )
