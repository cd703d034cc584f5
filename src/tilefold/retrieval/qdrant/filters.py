"""Conditions on the payload of documents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilefold.retrieval._files import is_unicode
from tilefold.retrieval.qdrant.layout import check_field

_BOUNDS = ("gt", "gte", "lt", "lte")


class Condition(NamedTuple):
    """A field that is any of some `values`, or a number within `bounds`."""

    name: str
    values: list[Any] | None
    bounds: dict[str, float] | None


@dataclass(frozen=True)
class Filter:
    """Documents whose payload matches all of `must` and none of `must_not`.

    Both are field -> a text, integer or boolean; a list of texts or of integers, of which one must be there; or a range
    such as ``{"gte": 2000, "lt": 2010}``. A field that is a list itself matches with any of its values. ``"by.name"``
    is a field in an object, and ``'"a name"'`` one that holds more than letters, digits, ``-`` and ``_``.

    Raises:
        ValueError: no condition, or one of another form.
    """

    must: Mapping[str, Any] = field(default_factory=dict)
    must_not: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.conditions() and not self.conditions(must=False):
            raise ValueError("where: expected at least one condition, got none. Leave it out to search everything.")

    def conditions(self, must: bool = True) -> list[Condition]:
        """Those of `must`, or of `must_not`."""
        return [_condition(name, value) for name, value in (self.must if must else self.must_not).items()]

    @classmethod
    def of(cls, where: Filter | Mapping[str, Any] | None) -> Filter | None:
        """A mapping as a filter that must match."""
        return where if where is None or isinstance(where, Filter) else cls(where)


def _condition(name: str, value: Any) -> Condition:
    check_field(name, "where")
    if isinstance(value, Mapping):
        wrong = [bound for bound in value if bound not in _BOUNDS]
        if wrong or not value or not all(_is_number(bound) for bound in value.values()):
            raise ValueError(f"where: expected numbers under {', '.join(_BOUNDS)} for {name!r}, got {dict(value)!r}.")
        return Condition(name, None, {bound: float(number) for bound, number in value.items()})
    several: list[Any] = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    kinds = {type(item) for item in several}
    if isinstance(value, (str, bool, int)):
        several = [value]
    elif len(kinds) != 1 or kinds & {bool, float} or not isinstance(several[0], (str, int)):
        raise ValueError(
            f"where: expected a text, an integer, a boolean, a list of texts or of integers, or a range for {name!r}, "
            f"got {value!r}."
        )
    wrong = [item for item in several if not _is_kept(item)]
    if wrong:
        raise ValueError(f"where: expected Unicode or an integer of 64 bits for {name!r}, got {wrong[0]!r}.")
    return Condition(name, several, None)


def _is_kept(value: Any) -> bool:
    return is_unicode(value) if isinstance(value, str) else -(1 << 63) <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
