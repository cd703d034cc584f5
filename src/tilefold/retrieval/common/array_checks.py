"""Checks of offsets, positions and weights in arrays that were read from files."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilefold.retrieval.errors import DataError

Array = npt.NDArray[np.number]


def check_offsets(offsets: Array, size: int, name: str = "indptr") -> None:
    """Check that offsets rise from 0 to the number of packed entries.

    Equal neighbours are valid: they are the bounds of an empty row.

    Args:
        offsets: position of each row's first entry in packed storage, ``[N + 1]``.
        size: number of packed entries.
        name: name of the array, for the error message.

    Raises:
        DataError: if an offset is below the one before it, the first is not 0, or the last is not
            `size`.
    """
    falls = offsets[1:] < offsets[:-1]
    if not offsets.size:
        got = "an empty array"
    elif bool(falls.any()):
        position = int(falls.argmax())  # of the first True
        got = f"{offsets[position + 1]} after {offsets[position]}"
    elif offsets[0] != 0 or offsets[-1] != size:
        got = f"some from {offsets[0]} to {offsets[-1]}"
    else:
        return
    raise DataError(f"{name}: expected offsets that rise from 0 to {size}, got {got}.")


def first_outside(positions: Array, limit: int) -> int | None:
    """Return the index of the first value outside ``[0, limit)``, or None if there is none."""
    if not positions.size or 0 <= positions.min() <= positions.max() < limit:
        return None
    return int(np.flatnonzero((positions < 0) | (positions >= limit))[0])


def first_invalid_weight(weights: Array) -> int | None:
    """Return the index of the first weight that is NaN, infinite or negative, or None."""
    # a NaN makes both the minimum and the maximum NaN
    if not weights.size or 0 <= weights.min() <= weights.max() < np.inf:
        return None
    return int(np.flatnonzero(~np.isfinite(weights) | (weights < 0))[0])


def check_positions(name: str, positions: Array, limit: int) -> None:
    """Raise a ``DataError`` that names the array if a position is outside ``[0, limit)``."""
    index = first_outside(positions, limit)
    if index is not None:
        raise DataError(f"{name}: expected positions in [0, {limit}), got {positions[index]}.")


def check_weights(name: str, weights: Array) -> None:
    """Raise a ``DataError`` that names the array if a weight is negative or not finite."""
    index = first_invalid_weight(weights)
    if index is not None:
        raise DataError(
            f"{name}: expected finite weights of at least 0, got {weights[index]}.",
        )
