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
    found = _candidates(scores, k)
    if found.size > k:
        values = scores[found]
        threshold = np.partition(values, found.size - k)[found.size - k]
        above = found[values > threshold]
        found = np.concatenate([above, found[values == threshold][: k - above.size]])
    order = np.lexsort((found, -scores[found]))
    return [int(i) for i in found[order]]


def _candidates(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """Positions, ascending, that hold the `k` highest positive scores: in large arrays, few more.

    The `k`-th best score is not below the `k`-th best of the largest of each block, and only blocks whose largest
    reaches that are looked into.
    """
    for width in _BLOCKS:
        blocks = scores.size // width
        if blocks < 4 * k:
            continue
        whole = scores[: blocks * width].reshape(blocks, width)
        largest = whole.max(axis=1)
        bound = np.partition(largest, blocks - k)[blocks - k]
        if not bound > 0:
            break
        reach = np.flatnonzero(largest >= bound)
        inside = np.flatnonzero(whole[reach] >= bound)
        behind = blocks * width + np.flatnonzero(scores[blocks * width :] >= bound)
        return np.concatenate([reach[inside // width] * width + inside % width, behind])
    return np.flatnonzero(scores > 0)
