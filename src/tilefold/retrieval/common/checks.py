"""Checks of options, and of arrays that a store reads."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from tilefold.retrieval.errors import DataError

Array = npt.NDArray[np.number]


def check_count(name: str, value: object, least: int = 1, kinds: tuple[type, ...] = (int,)) -> None:
    """Raise ``ValueError`` unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, kinds) or value < least:  # type: ignore[operator]
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}.")


def check_least(name: str, value: float | None, least: int = 1) -> None:
    """Raise ``ValueError`` unless `value` is None, or a number of at least `least`."""
    if value is not None and not value >= least:
        raise ValueError(f"{name}: expected at least {least}, got {value}.")


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ``ValueError`` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}.")


def check_share(name: str, value: float) -> None:
    """Raise ``ValueError`` unless `value` is a number in [0, 1]."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a number in [0, 1], got {value!r}.")


def check_k(k: int) -> None:
    """Raise an error unless `k` is an integer of at least 1."""
    check_count("k", k, kinds=(int, np.integer))


def check_offsets(offsets: Array, size: int, name: str = "indptr") -> None:
    """Raise ``DataError`` unless `offsets` rise from 0 to `size`."""
    falls = offsets[1:] < offsets[:-1]
    if not offsets.size:
        shown = "an empty array"
    elif bool(falls.any()):
        at = int(falls.argmax())
        shown = f"{offsets[at + 1]} after {offsets[at]}"
    elif offsets[0] != 0 or offsets[-1] != size:
        shown = f"some from {offsets[0]} to {offsets[-1]}"
    else:
        return
    raise DataError(f"{name}: expected offsets that rise from 0 to {size}, got {shown}.")


def outside(positions: Array, limit: int) -> int | None:
    """Index of the first position that is not in ``[0, limit)``; None where all are."""
    if not positions.size or 0 <= positions.min() <= positions.max() < limit:
        return None
    return int(np.flatnonzero((positions < 0) | (positions >= limit))[0])


def no_weight(values: Array) -> int | None:
    """Index of the first number that is NaN, infinite or negative; None where all are weights."""
    if (
        not values.size or 0 <= values.min() <= values.max() < np.inf
    ):  # a NaN among them is the lowest and the highest
        return None
    return int(np.flatnonzero(~np.isfinite(values) | (values < 0))[0])


def check_arrays(places: tuple[str, Array, int], weights: tuple[str, Array]) -> None:
    """Raise ``DataError``, with the name of the array, unless these are positions below a limit and
    their weights.
    """
    name, positions, limit = places
    if (at := outside(positions, limit)) is not None:
        raise DataError(f"{name}: expected positions in [0, {limit}), got {positions[at]}.")
    name, values = weights
    if (at := no_weight(values)) is not None:
        raise DataError(f"{name}: expected finite weights of at least 0, got {values[at]}.")
