"""A sequence that is indexed by label and has no truth value, as a pandas Series does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class LabelledSeries:
    """Values by label, in an order of their own: ``series[i]`` is not the value at position ``i``.

    Behaves as a pandas Series with an integer index: iterates by position, is indexed by label,
    and refuses to be a truth value.

    Args:
        values: N values, by position.
        labels: N labels, such as a permutation of the positions.
    """

    ndim = 1

    def __init__(self, values: Sequence[Any], labels: Sequence[int]) -> None:
        self._values, self._labels = list(values), list(labels)

    def __getitem__(self, label: int) -> Any:
        try:
            return self._values[self._labels.index(label)]
        except ValueError:
            raise KeyError(label) from None

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __contains__(self, label: object) -> bool:
        return label in self._labels

    def __len__(self) -> int:
        return len(self._values)

    def __bool__(self) -> bool:
        raise ValueError("The truth value of a Series is ambiguous.")

    def tolist(self) -> list[Any]:
        return list(self._values)
