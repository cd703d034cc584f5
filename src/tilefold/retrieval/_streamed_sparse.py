"""Sparse vectors of the batches of a stream."""

from __future__ import annotations

import numpy as np

from tilefold.pipeline.rows import SparseBatch
from tilefold.retrieval._made import PlainBatch
from tilefold.retrieval._sparse import SparseVectors


class SparseMaker:
    """Makes the vectors of a folder, see :class:`tilefold.retrieval._made.Maker`.

    Args:
        vocab_size, fingerprint: of the folder.
        min_weight: smaller weights, and this one, are left out.
        dropped: terms that are left out.
    """

    def __init__(self, vocab_size: int, min_weight: float, fingerprint: str | None, dropped: list[int]) -> None:
        self.vocab_size, self.min_weight = vocab_size, min_weight
        self.fingerprint, self.dropped = fingerprint, dropped

    def vectors(self, names: list[str], batch: SparseBatch | PlainBatch) -> SparseVectors:
        """Vectors of a batch, checked."""
        made = self._made(names, batch)
        return made.without(self.dropped) if self.dropped else made

    def _made(self, names: list[str], batch: SparseBatch | PlainBatch) -> SparseVectors:
        if isinstance(batch, PlainBatch):
            return SparseVectors.from_torch(names, batch.rows, self.fingerprint, self.min_weight)
        weights = batch.values.float().numpy()
        indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(batch.counts.numpy())])
        made = SparseVectors(names, indptr, batch.columns.numpy(), weights, batch.vocab_size, self.fingerprint)
        return made.above(self.min_weight)

    def nothing(self) -> SparseVectors:
        """Vectors of no text."""
        return SparseVectors.from_rows({}, self.vocab_size, self.fingerprint)
