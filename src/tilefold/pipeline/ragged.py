"""Token ids of several texts without padding, and how they are cut into batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenIds:
    """Token ids of N texts, packed; text `i` has ``ids[offsets[i]:offsets[i + 1]]``."""

    ids: Int64  # [T]
    positions: Int64  # [T], of the model's embeddings
    offsets: Int64  # [N + 1]

    @property
    def lengths(self) -> Int64:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, chosen: Int64) -> TokenIds:
        """The given texts, in the given order."""
        at, offsets = gathered(self.offsets, chosen)
        return TokenIds(self.ids[at], self.positions[at], offsets)


def offsets_of(lengths: npt.ArrayLike) -> Int64:
    """``[0, lengths[0], lengths[0] + lengths[1], ...]``."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def gathered(offsets: Int64, chosen: Int64) -> tuple[Int64, Int64]:
    """Places of the entries of the given rows, in the given order, and the offsets that they then
    have.
    """
    lengths = np.diff(offsets)[chosen]
    made = offsets_of(lengths)
    return np.repeat(offsets[chosen] - made[:-1], lengths) + np.arange(made[-1]), made


def spans(
    offsets: Int64,
    size: int,
    low: int = 0,
    high: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Ranges of consecutive rows of up to `size` entries, of at least one row."""
    high = len(offsets) - 1 if high is None else high
    while low < high:
        reach = int(np.searchsorted(offsets, offsets[low] + size, side="right")) - 1
        low, start = max(low + 1, min(reach, high)), low
        yield start, low


def cut_batches(lengths: Int64, budget: int | None, most: int | None = None) -> Iterator[Int64]:
    """Places of the texts of each batch, longest texts first; every text is in one batch.

    Batches hold at most `budget` tokens and `most` texts, and are nearly equal; a longer text is
    alone.
    """
    order = np.argsort(-lengths, kind="stable")
    total = int(lengths.sum())
    budget = max(1, total) if budget is None else budget
    target = -(
        -total // max(1, -(-total // budget))
    )  # as many tokens in each of the fewest batches
    start = tokens = 0
    for place, length in enumerate(lengths[order].tolist()):
        full = tokens >= target or tokens + length > budget or place - start == most
        if full and place > start:
            yield order[start:place]
            start, tokens = place, 0
        tokens += length
    if start < len(order):
        yield order[start:]
