"""The best scores of a row, with ties in a fixed order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_BLOCKS = 256, 64, 16  # scores in a block; few blocks bound badly


def check_k(k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
        raise ValueError(f"k: expected an integer of at least 1, got {k!r}.")


def top_positive(scores: npt.NDArray[np.float32], k: int) -> list[int]:
    """Positions of the `k` highest positive scores, best first, equal scores by position."""
    bound = _lower_bound(scores, k)
    found = np.flatnonzero(scores >= bound if bound > 0 else scores > 0)
    if found.size > k:
        values = scores[found]
        threshold = np.partition(values, found.size - k)[found.size - k]
        above = found[values > threshold]
        found = np.concatenate([above, found[values == threshold][: k - above.size]])
    order = np.lexsort((found, -scores[found]))
    return [int(i) for i in found[order]]


def _lower_bound(scores: npt.NDArray[np.float32], k: int) -> float:
    """What the `k`-th best score is not below: the `k`-th best of the largest of each block; 0 where blocks are few."""
    for width in _BLOCKS:
        blocks = scores.size // width
        if blocks >= 4 * k:
            largest = scores[: blocks * width].reshape(blocks, width).max(axis=1)
            return float(np.partition(largest, blocks - k)[blocks - k])
    return 0.0
