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
        offsets: position of each text's first token, and T, ``[N + 1]``.
    """

    ids: Int64
    positions: Int64
    offsets: Int64

    @property
    def lengths(self) -> Int64:
        """Number of tokens of each text, ``[N]``."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, texts: Int64) -> TokenIds:
        """Return the texts with these numbers, in the order of the numbers."""
        sources, offsets = gather_positions(self.offsets, texts)
        return TokenIds(self.ids[sources], self.positions[sources], offsets)


def offsets_of(lengths: npt.ArrayLike) -> Int64:
    """Compute where each of N packed rows begins, and where the last one ends.

    Returns:
        ``[0, lengths[0], lengths[0] + lengths[1], ...]``, ``[N + 1]``.

    Examples:
        >>> offsets_of([3, 0, 2])
        array([0, 3, 3, 5])
    """
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def gather_positions(offsets: Int64, rows: Int64) -> tuple[Int64, Int64]:
    """Compute the positions at which the entries of chosen rows are in packed storage.

    Args:
        offsets: position of each row's first entry, ``[N + 1]``.
        rows: numbers of the chosen rows in any order, ``[M]``.

    Returns:
        The positions of the entries, one row after another, and the offsets ``[M + 1]`` of the
        chosen rows when only their entries are stored, in this order.

    Examples:
        >>> import numpy as np
        >>> positions, offsets = gather_positions(np.array([0, 3, 3, 5]), np.array([2, 0]))
        >>> positions.tolist(), offsets.tolist()
        ([3, 4, 0, 1, 2], [0, 2, 5])
    """
    lengths = np.diff(offsets)[rows]
    gathered_offsets = offsets_of(lengths)
    gathered_positions = np.arange(gathered_offsets[-1])
    # position in the storage = gathered position + shift of the row
    row_shifts = offsets[rows] - gathered_offsets[:-1]
    return gathered_positions + np.repeat(row_shifts, lengths), gathered_offsets


def row_ranges(
    offsets: Int64,
    size: int,
    low: int = 0,
    high: int | None = None,
) -> Iterator[tuple[int, int]]:
    """Divide consecutive rows of packed storage into ranges with a limited number of entries.

    Args:
        offsets: position of each row's first entry, ``[N + 1]``.
        size: largest number of entries of a range. A row with more entries is a range by itself.
        low: first row.
        high: row after the last one; ``None`` means ``N``.

    Yields:
        First row of a range, and the row after its last one.
    """
    if high is None:
        high = len(offsets) - 1
    start = low
    while start < high:
        largest_end = offsets[start] + size
        # All rows before this one end within `size` entries of the first row's beginning.
        end_of_fitting_rows = int(np.searchsorted(offsets, largest_end, side="right")) - 1
        # at least one row, even if it has more entries
        end = max(start + 1, min(end_of_fitting_rows, high))
        yield start, end
        start = end


def batches_by_tokens(
    lengths: Int64,
    max_tokens: int | None,
    max_texts: int | None = None,
) -> Iterator[Int64]:
    """Group texts of similar length into batches with nearly equal numbers of tokens.

    The longest texts come first. Every text is in one batch.

    Args:
        lengths: number of tokens of each text.
        max_tokens: largest number of tokens of a batch; ``None`` sets no limit. A longer text is a
            batch by itself.
        max_texts: largest number of texts of a batch; ``None`` sets no limit.

    Yields:
        Positions of the texts of a batch.

    Examples:
        >>> import numpy as np
        >>> [batch.tolist() for batch in batches_by_tokens(np.array([3, 9, 4, 8]), max_tokens=18)]
        [[1, 3], [2, 0]]
    """
    order = np.argsort(-lengths, kind="stable")
    total = int(lengths.sum())
    if max_tokens is None:
        max_tokens = max(1, total)
    # A batch is closed once it has the mean size of the smallest possible number of batches, so
    # that the last batch is not much smaller than the others.
    min_batches = max(1, _ceil_divide(total, max_tokens))
    target_tokens = _ceil_divide(total, min_batches)
    start = 0  # position in `order` of the first text of the batch
    batch_tokens = 0
    for position, length in enumerate(lengths[order].tolist()):
        n_texts = position - start
        is_full = (
            batch_tokens >= target_tokens
            or batch_tokens + length > max_tokens
            or n_texts == max_texts
        )
        if is_full and n_texts > 0:
            yield order[start:position]
            start = position
            batch_tokens = 0
        batch_tokens += length
    if start < len(order):
        yield order[start:]


def _ceil_divide(dividend: int, divisor: int) -> int:
    """Divide two integers, rounding up."""
    return -(-dividend // divisor)
