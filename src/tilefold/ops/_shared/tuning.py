"""Launch configurations as tables.

A row says where it applies, what it sets, and where that was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tilefold.ops._shared._triton import releases

Facts = Mapping[str, Any]  # by name


class Between(NamedTuple):
    """Values from ``least`` to ``most``, both included. ``None`` is no bound."""

    least: Any = None
    most: Any = None

    def __contains__(self, value: Any) -> bool:
        is_too_small = self.least is not None and value < self.least
        is_too_large = self.most is not None and value > self.most
        return not is_too_small and not is_too_large


class ConfigRow(NamedTuple):
    """One row of a table of launch configurations.

    Attributes:
        where: conditions, by the name of a fact: the value that it must have, a frozenset of
            values, or :class:`Between`. The fact ``release`` is the release of Triton, such as
            ``(3, 6)``.
        fields: what the row sets, by name.
        source: device and release that the fields were timed or compiled with, and the result.
    """

    where: Facts
    fields: Facts
    source: str

    def applies(self, facts: Facts) -> bool:
        """Whether all conditions are true."""
        for name, condition in self.where.items():
            if isinstance(condition, (Between, frozenset)):
                if facts[name] not in condition:
                    return False
            elif facts[name] != condition:
                return False
        return True


def lookup(table: Iterable[ConfigRow], **facts: Any) -> dict[str, Any]:
    """Return the fields of all rows that apply. A later row overrides an earlier one."""
    all_facts = {"release": releases.release(), **facts}
    fields: dict[str, Any] = {}
    for row in table:
        if row.applies(all_facts):
            fields.update(row.fields)
    return fields
