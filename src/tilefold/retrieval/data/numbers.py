"""Exact comparisons of integers and floats, also beyond 2^53, where float64 skips integers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

Number = int | float
Bounds = Mapping[str, Number]  # some of gt, gte, lt and lte -> a finite number
INT64 = range(-(1 << 63), 1 << 63)


class FloatInterval(NamedTuple):
    """Closed interval of float64.

    It is empty if `low` is above `high`.
    """

    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, float) and self.low <= value <= self.high


def integers_within(bounds: Bounds) -> range:
    """Return the 64-bit integers that satisfy all bounds.

    Args:
        bounds: ``gt``, ``gte``, ``lt`` or ``lte`` -> number, which may be a float.

    Returns:
        All integers from the least to the greatest one; an empty range if there is none.
    """
    low = INT64[0]
    high = INT64[-1]
    for bound, number in bounds.items():
        if bound == "gte":
            low = max(low, math.ceil(number))
        elif bound == "gt":
            low = max(low, math.floor(number) + 1)
        elif bound == "lte":
            high = min(high, math.floor(number))
        else:
            high = min(high, math.ceil(number) - 1)
    return range(low, high + 1)


def floats_within(bounds: Bounds) -> FloatInterval:
    """Return the interval of float64 values that satisfy all bounds. Comparisons are exact.

    A bound may be an integer that float64 cannot represent. Its nearest float64 may lie on either
    side of the bound. If that value violates the bound, the interval ends at the next float64.

    Args:
        bounds: ``gt``, ``gte``, ``lt`` or ``lte`` -> number.
    """
    low = -math.inf
    high = math.inf
    for bound, number in bounds.items():
        nearest = float(number)  # Python compares a float and an integer exactly
        if bound in ("gt", "gte"):
            satisfied = nearest > number or (bound == "gte" and nearest == number)
            low = max(low, nearest if satisfied else math.nextafter(nearest, math.inf))
        else:
            satisfied = nearest < number or (bound == "lte" and nearest == number)
            high = min(high, nearest if satisfied else math.nextafter(nearest, -math.inf))
    return FloatInterval(low, high)


def integers_rounding_to(value: float) -> list[int]:
    """Return the 64-bit integers whose nearest float64 is `value`."""
    if not math.isfinite(value) or abs(value) > -float(INT64[0]):  # 2^63
        return []
    spacing = math.ceil(math.ulp(value))  # no integer further away rounds to the value
    center = math.floor(value)
    candidates = range(center - spacing, center + spacing + 1)
    return [number for number in candidates if number in INT64 and float(number) == value]


class RoundedRange(NamedTuple):
    """Bounds for an engine that compares numbers as float64, and matches 64-bit integers exactly.

    A stored number satisfies the original bounds if one of the attributes matches it.

    Attributes:
        interval: matches a number whose float64 is within. None if no value can be.
        integers: match a number that equals one of them.
        boundaries: pairs of a float64 and integers. A pair matches a number whose float64 equals
            the first, unless it is one of the integers.
    """

    interval: FloatInterval | None
    integers: list[int]
    boundaries: list[tuple[float, list[int]]]


def rounded_range(bounds: Bounds) -> RoundedRange:
    """Return bounds for an engine that rounds stored integers to float64.

    Rounding may move an integer across a bound. For ``{"lt": 2**53 + 1}``, the engine would match
    the integer 2^53 + 1, because it rounds to 2^53, which is below the bound. So the interval ends
    before 2^53, the integer 2^53 is matched exactly, and 2^53 becomes a boundary that excludes the
    integer 2^53 + 1.

    Rounding keeps the order, so only integers that round to a float64 at or next to an end of the
    range need this. Below 2^53 there are none, because float64 represents all integers there.

    Args:
        bounds: ``gt``, ``gte``, ``lt`` or ``lte`` -> number.
    """
    integers_inside = integers_within(bounds)
    interval = floats_within(bounds)
    extra_integers: list[int] = []
    boundaries: list[tuple[float, list[int]]] = []
    for value in _values_at_ends(interval):
        integers_of_value = integers_rounding_to(value)
        satisfying = [number for number in integers_of_value if number in integers_inside]
        violating = [number for number in integers_of_value if number not in integers_inside]
        if value not in interval:
            extra_integers += satisfying  # the interval would miss them
        elif violating:
            # The interval would match them, so the value is removed from it.
            extra_integers += satisfying
            boundaries.append((value, violating))
    removed_values = {value for value, _ in boundaries}
    return RoundedRange(_without_ends(interval, removed_values), extra_integers, boundaries)


def _values_at_ends(interval: FloatInterval) -> list[float]:
    """Return the float64 values at both ends of an interval and next to them outside, sorted."""
    low, high = interval
    below = math.nextafter(low, -math.inf)
    above = math.nextafter(high, math.inf)
    return sorted({below, low, high, above})


def _without_ends(interval: FloatInterval, removed_values: set[float]) -> FloatInterval | None:
    """Shrink an interval by the ends that are removed.

    Args:
        interval: the interval.
        removed_values: ends to remove.

    Returns:
        The interval, or None if it has no finite value.
    """
    low, high = interval
    if low in removed_values:
        low = math.nextafter(low, math.inf)
    if high in removed_values:
        high = math.nextafter(high, -math.inf)
    if low > high or low == math.inf or high == -math.inf:
        return None
    return FloatInterval(low, high)


def canonical_number(number: Number) -> Number:
    """Return a number as an integer if it equals a 64-bit one: 5.0 as 5, and -0.0 as 0."""
    if isinstance(number, float) and number.is_integer() and int(number) in INT64:
        return int(number)
    return number
