"""Converts a recipe to a dictionary and back."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, TypeVar

__all__ = ["DictMixin"]

R = TypeVar("R", bound="DictMixin")


class DictMixin:
    """What the dataclass of every recipe inherits."""

    def to_dict(self) -> dict[str, Any]:
        """Field names and values, as a JSON object."""
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls: type[R], values: dict[str, Any]) -> R:
        """The inverse of :meth:`to_dict`.

        Raises:
            ValueError: for an unknown field, or a value out of range.
        """
        known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
        if unknown := sorted(set(values) - known):
            raise ValueError(f"unknown recipe fields {unknown}; the fields are {sorted(known)}.")
        return cls(**values)
