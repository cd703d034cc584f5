"""Collects the scores that are kept, block of vocabulary by block, into a CSR tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold._csr import csr_tensor


class SparseRows:
    """Kept entries of ``[B, V]`` scores that arrive as blocks of columns, in rising order.

    With ``top_k`` only the ``top_k`` best of each row so far are held, as dense ``[B, <= top_k]`` pairs; without it,
    the entries above ``min_weight`` of each block.
    """

    def __init__(self, batch: int, vocab: int, top_k: int | None, min_weight: float, device: torch.device) -> None:
        self.batch, self.vocab, self.top_k, self.min_weight, self.device = (
            batch,
            vocab,
            top_k,
            min_weight,
            device,
        )
        self._best: tuple[Tensor, Tensor] | None = None  # scores and columns, [B, <= top_k], columns rising
        self._entries: list[tuple[Tensor, Tensor, Tensor]] = []  # rows, columns, scores

    def add(self, scores: Tensor, first_column: int) -> None:
        """Take the scores ``[B, C]`` of columns ``first_column`` to ``first_column + C - 1``."""
        if self.top_k is None:
            self._entries.append(self._above_minimum(scores, None, first_column))
            return
        columns = torch.arange(first_column, first_column + scores.size(1), device=scores.device)
        columns = columns.expand(scores.size(0), -1)
        if self._best is not None:
            scores = torch.cat([self._best[0], scores], dim=1)
            columns = torch.cat([self._best[1], columns], dim=1)
        if scores.size(1) > self.top_k:
            # stable: among equal scores the lowest column stays
            order = scores.sort(dim=1, descending=True, stable=True).indices[:, : self.top_k]
            order = order.sort(dim=1).values
            scores, columns = scores.gather(1, order), columns.gather(1, order)
        self._best = (scores, columns)

    def to_csr(self, dtype: torch.dtype) -> Tensor:
        """The kept entries as a ``[B, V]`` ``torch.sparse_csr`` tensor of ``dtype``."""
        if self._best is not None:
            self._entries = [self._above_minimum(*self._best, 0)]
        rows = torch.cat([entry[0] for entry in self._entries])
        columns = torch.cat([entry[1] for entry in self._entries])
        scores = torch.cat([entry[2] for entry in self._entries])
        return csr_from_entries(rows, columns, scores, (self.batch, self.vocab), dtype)

    def _above_minimum(
        self, scores: Tensor, columns: Tensor | None, first_column: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, places = (~(scores <= self.min_weight)).nonzero(as_tuple=True)
        kept_columns = places + first_column if columns is None else columns[rows, places]
        return rows, kept_columns, scores[rows, places]


def csr_from_entries(
    rows: Tensor, columns: Tensor, scores: Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Entries as a ``torch.sparse_csr`` tensor of ``dtype``; within a row they come in the order of their columns."""
    order = rows.sort(stable=True).indices
    counts = torch.bincount(rows, minlength=shape[0])
    row_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return csr_tensor(row_starts, columns[order], scores[order].to(dtype), shape)
