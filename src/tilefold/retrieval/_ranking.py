"""The best scores of a row, with ties in a fixed order; checks of the options of a ranking."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

_BLOCKS = 256, 64, 16  # scores in a block; few blocks bound badly


def check_count(name: str, value: object, least: int = 1, kinds: tuple[type, ...] = (int,)) -> None:
    """Raise ``ValueError`` unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, kinds) or value < least:  # type: ignore[operator]
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}.")


def check_choice(name: str, value: object, allowed: Collection[str], remedy: str = "") -> None:
    """Raise ``ValueError`` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}.{remedy}")


def check_share(name: str, value: float) -> None:
    """Raise ``ValueError`` unless `value` is a number in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a number in [0, 1], got {value!r}.")


def check_k(k: int) -> None:
    check_count("k", k, kinds=(int, np.integer))


def top_positive(scores: npt.NDArray[np.float32], k: int) -> list[int]:
    """Positions of the `k` highest positive scores, best first, equal scores by position."""
    found = _candidates(scores, k)
    if found.size > k:
        values = scores[found]
        threshold = np.partition(values, found.size - k)[found.size - k]
        above = found[values > threshold]
        found = np.concatenate([above, found[values == threshold][: k - above.size]])
    positions: list[int] = found[np.lexsort((found, -scores[found]))].tolist()
    return positions


def _candidates(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """Positions, ascending, that hold the `k` highest positive scores: in large arrays, few more.

    The `k`-th best is not below the `k`-th best of the largest of each block: only blocks that reach it are read.
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
