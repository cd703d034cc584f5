"""Checks of a recipe's fields, with one form of message."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = ["check_count", "check_number", "check_seed"]


def check_count(name: str, value: Any, optional: bool) -> None:
    """Raise an error unless the value is a whole number of at least 1 (or ``None``, where that is allowed)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1{' or None' if optional else ''}, got {value!r}.")


def check_number(name: str, value: Any, accept: Callable[[float], bool], expected: str) -> None:
    """Raise an error unless the value is a finite number that `accept` takes."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not accept(value):
        raise ValueError(f"{name} must be a number {expected}, got {value!r}.")


def check_seed(value: Any) -> None:
    """Raise an error unless the value is a valid seed."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**32:
        raise ValueError(f"seed must be a whole number of at least 0 and below 2^32, got {value!r}.")
