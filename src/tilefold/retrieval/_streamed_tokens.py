"""Token vectors of the batches of a stream."""

from __future__ import annotations

import torch

from tilefold.pipeline.tokens import TokenBatch
from tilefold.retrieval._made import PlainBatch
from tilefold.retrieval._token_vectors import TokenVectors
from tilefold.retrieval.errors import DataError


class TokenMaker:
    """Makes the vectors of a folder, see :class:`tilefold.retrieval._made.Maker`.

    Args:
        dimension, storage: of the folder.
    """

    def __init__(self, dimension: int, storage: str) -> None:
        self.dimension, self.storage = dimension, storage

    def vectors(self, names: list[str], batch: TokenBatch | PlainBatch) -> TokenVectors:
        """Vectors of a batch, checked."""
        if isinstance(batch, PlainBatch):
            return TokenVectors.pack(names, batch.rows, self.dimension, self.storage)
        offsets = torch.nn.functional.pad(batch.counts.cumsum(0), (1, 0))
        if not bool(batch.finite.all()):
            at = int((~batch.finite).nonzero()[0])
            owner = names[int(torch.searchsorted(offsets, at, right=True)) - 1]
            raise DataError(
                f"vectors: expected finite numbers within the range of {self.storage}, got others for {owner!r}."
            )
        return TokenVectors(names, offsets, batch.values, batch.scales)

    def nothing(self) -> TokenVectors:
        """Vectors of no text."""
        return TokenVectors.pack([], [], self.dimension, self.storage)
