"""Selection of kept scores, block of vocabulary by block, and their CSR tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold._csr import csr_tensor


class CapacityRows(NamedTuple):
    """Sparse rows of which the host need not know the sizes."""

    counts: (
        Tensor  # int32 [B], entries that each row has; more than the capacity if some did not fit
    )
    kept: Tensor  # int32 [B], entries that are stored: at most the capacity, or top_k
    columns: Tensor  # int32 [B, capacity] ([B, top_k]), rising; undefined behind kept[b]
    values: Tensor  # as columns
    vocab_size: int


def kept_rows(
    blocks: Iterable[tuple[int, Tensor]],
    shape: tuple[int, int],
    top_k: int | None,
    min_weight: float,
    dtype: torch.dtype,
) -> Tensor:
    """Entries above ``min_weight`` of scores ``[B, C]`` that come in rising order of their first
    columns, as CSR.

    With ``top_k`` only the best of each row so far are held; without it, the entries of each block.
    """
    best: tuple[Tensor, Tensor] | None = None
    entries = []
    for first, scores in blocks:
        if top_k is None:
            rows, places = (~(scores <= min_weight)).nonzero(as_tuple=True)
            entries.append((rows, places + first, scores[rows, places]))
            continue
        columns = torch.arange(first, first + scores.size(1), device=scores.device).expand(
            scores.size(0),
            -1,
        )
        if best is None:
            best = largest(scores, columns, top_k)
        else:
            best = largest(
                torch.cat([best[0], scores], dim=1),
                torch.cat([best[1], columns], dim=1),
                top_k,
            )
    if best is not None:
        rows, places = (~(best[0] <= min_weight)).nonzero(as_tuple=True)
        entries = [(rows, best[1][rows, places], best[0][rows, places])]
    rows, columns, scores = (torch.cat(parts) for parts in zip(*entries, strict=True))
    return csr_from_entries(rows, columns, scores, shape, dtype)


def largest(scores: Tensor, columns: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The ``top_k`` largest of each row and their columns, in the order of these; of equal scores
    the lowest stay.
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
    """Entries as a ``torch.sparse_csr`` tensor of ``dtype``; within a row they come in the order of
    their columns.
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
    """Entries of scores ``[B, V]`` above ``min_weight`` in rows with room for ``capacity``; waits
    for no device.
    """
    keep = ~(scores <= min_weight)  # NaN is kept, so that it is seen
    counts = keep.sum(1, dtype=torch.int32)
    at = torch.where(keep, keep.cumsum(1) - 1, capacity).clamp(max=capacity)
    every = torch.arange(scores.size(1), dtype=torch.int32, device=scores.device).expand(
        scores.shape,
    )
    shape = scores.size(0), capacity + 1  # the last place takes what is not kept
    columns = every.new_zeros(shape).scatter_(1, at, every)[:, :capacity]
    values = scores.new_zeros(shape).scatter_(1, at, scores)[:, :capacity]
    return best_of(
        CapacityRows(counts, counts.clamp(max=capacity), columns, values, scores.size(1)),
        top_k,
    )


def best_of(rows: CapacityRows, top_k: int | None) -> CapacityRows:
    """At most the ``top_k`` largest entries of each row."""
    counts, kept, columns, values, vocab_size = rows
    capacity = columns.size(1)
    if top_k is None or top_k >= capacity:
        return rows
    # NaN comes before all, and what lies behind the last entry last
    free = torch.arange(capacity, device=columns.device) >= kept[:, None]
    values, columns = largest(values.masked_fill(free, -math.inf), columns, top_k)
    return CapacityRows(counts, kept.clamp(max=top_k), columns, values, vocab_size)
