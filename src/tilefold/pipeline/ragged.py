"""Packed token ids of several texts, and how texts are grouped into batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenIds:
    """Packed token ids of N texts with T tokens altogether.

    Text ``i`` has the tokens ``ids[offsets[i]:offsets[i + 1]]``.

    Attributes:
        ids: token ids, ``[T]``.
        positions: position ids that the model embeds, ``[T]``.
        offsets: where each text begins, ``[N + 1]``.
    """

    ids: Int64
    positions: Int64
    offsets: Int64

    @property
    def lengths(self) -> Int64:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, texts: Int64) -> TokenIds:
        """Return the texts at some positions, in that order."""
        sources, offsets = gather_positions(self.offsets, texts)
        return TokenIds(self.ids[sources], self.positions[sources], offsets)


def offsets_of(lengths: npt.ArrayLike) -> Int64:
    """Return ``[0, lengths[0], lengths[0] + lengths[1], ...]``, ``[N + 1]``."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def gather_positions(offsets: Int64, rows: Int64) -> tuple[Int64, Int64]:
    """Find the entries of some rows of packed storage.

    Args:
        offsets: where each row begins, ``[N + 1]``.
        rows: row numbers in any order, ``[M]``.

    Returns:
        The positions of the entries of these rows, one row after another, and the offsets of the
        rows once their entries have been gathered, ``[M + 1]``.
    """
    lengths = np.diff(offsets)[rows]
    new_offsets = offsets_of(lengths)
    # Position of an entry in the storage minus its position after gathering, for every entry.
    shifts = np.repeat(offsets[rows] - new_offsets[:-1], lengths)
    return shifts + np.arange(new_offsets[-1]), new_offsets


def row_ranges(
    offsets: Int64,
    size: int,
    low: int = 0,
    high: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Divide consecutive rows of packed storage into ranges with a limited number of entries.

    Args:
        offsets: where each row begins, ``[N + 1]``.
        size: number of entries per range. A row with more entries is a range by itself.
        low: first row.
        high: row after the last one; ``None`` means ``N``.

    Yields:
        First row of a range, and the row after its last one.
    """
    if high is None:
        high = len(offsets) - 1
    start = low
    while start < high:
        last_offset = offsets[start] + size
        # All rows before this one end within `size` entries of the first row's beginning.
        end_of_fitting_rows = int(np.searchsorted(offsets, last_offset, side="right")) - 1
        end = max(start + 1, min(end_of_fitting_rows, high))
        yield start, end
        start = end


def batches_by_tokens(
    lengths: Int64,
    max_tokens: int | None,
    max_texts: int | None = None,
) -> Iterator[Int64]:
    """Group texts of similar length into batches, the longest texts first.

    The batches have nearly equal numbers of tokens, and every text is in one of them.

    Args:
        lengths: number of tokens of each text.
        max_tokens: tokens per batch; ``None`` sets no limit. A longer text is a batch by itself.
        max_texts: texts per batch; ``None`` sets no limit.

    Yields:
        Positions of the texts of a batch.
    """
    order = np.argsort(-lengths, kind="stable")
    total = int(lengths.sum())
    if max_tokens is None:
        max_tokens = max(1, total)
    # A batch is closed at the mean size of the fewest possible batches, so that the last batch is
    # not much smaller than the others.
    min_batches = max(1, _ceil_divide(total, max_tokens))
    target_tokens = _ceil_divide(total, min_batches)
    start = 0  # position in `order` of the first text of the batch
    tokens = 0  # of the batch
    for position, length in enumerate(lengths[order].tolist()):
        n_texts = position - start
        full = tokens >= target_tokens or tokens + length > max_tokens or n_texts == max_texts
        if full and n_texts > 0:
            yield order[start:position]
            start = position
            tokens = 0
        tokens += length
    if start < len(order):
        yield order[start:]


def _ceil_divide(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)
