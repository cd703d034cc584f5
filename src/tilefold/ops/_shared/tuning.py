"""Launch configurations as tables: rows say where they hold, what they set, and where that was
measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tilefold.ops._shared._triton import releases

Facts = Mapping[str, Any]  # by name


class Between(NamedTuple):
    """From ``least`` to ``most``, both included; ``None`` is no bound."""

    least: Any = None
    most: Any = None

    def __contains__(self, value: Any) -> bool:
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )


class Row(NamedTuple):
    """One row of a table.

    Attributes:
        where: by the name of a fact the value that it must have, a frozenset of such values, or
            :class:`Between`. The fact ``release`` is the release of Triton, ``(3, 6)``.
        source: the device and release that the fields were timed or compiled with, and what was
            seen.
    """

    where: Facts
    fields: Facts
    source: str

    def holds(self, facts: Facts) -> bool:
        return all(
            facts[name] in condition
            if isinstance(condition, (Between, frozenset))
            else facts[name] == condition
            for name, condition in self.where.items()
        )


def lookup(table: Iterable[Row], **facts: Any) -> dict[str, Any]:
    """The fields of all rows that hold for ``facts``; what several set is as the last of them says."""
    known = {"release": releases.release()} | facts
    found: dict[str, Any] = {}
    for row in table:
        if row.holds(known):
            found.update(row.fields)
    return found
