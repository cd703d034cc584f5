"""Checks of a recipe's fields, with one form of message."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = ["check_count", "check_flag", "check_number", "check_training"]


def check_count(name: str, value: Any, optional: bool, least: int = 1) -> None:
    """Raise an error unless the value is a whole number of at least `least` (or ``None``, where that is allowed)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        allowed = f"at least {least}{' or None' if optional else ''}"
        raise ValueError(f"{name} must be a whole number of {allowed}, got {value!r}.")


def check_number(name: str, value: Any, accept: Callable[[float], bool], expected: str) -> None:
    """Raise an error unless the value is a finite number that `accept` takes."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not accept(value):
        raise ValueError(f"{name} must be a number {expected}, got {value!r}.")


def check_flag(name: str, value: Any) -> None:
    """Raise an error unless the value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def check_training(recipe: Any) -> None:
    """Raise an error for values out of range in the fields that every recipe has.

    Raises:
        ValueError: naming the field.
    """
    if not isinstance(recipe.base_model, str) or not recipe.base_model:
        raise ValueError(f"base_model must be 'minilm', a folder or a model name, got {recipe.base_model!r}.")
    for name in ("max_length", "save_steps"):
        check_count(name, getattr(recipe, name), optional=False)
    check_count("batch_size", recipe.batch_size, optional=False, least=2)  # the others of a batch are the negatives
    check_number("save_minutes", recipe.save_minutes, lambda value: value >= 0, "of at least 0")
    check_count("max_steps", recipe.max_steps, optional=True, least=0)
    check_count("train_max_length", recipe.train_max_length, optional=True)
    for name in ("epochs", "learning_rate", "similarity_scale"):
        check_number(name, getattr(recipe, name), lambda value: value > 0, "greater than 0")
    check_number("warmup_ratio", recipe.warmup_ratio, lambda value: 0 <= value < 1, "in [0, 1)")
    seed = recipe.seed
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be a whole number of at least 0 and below 2^32, got {seed!r}.")
    if recipe.train_max_length is not None and recipe.train_max_length > recipe.max_length:
        raise ValueError(
            f"train_max_length must not exceed max_length ({recipe.max_length}), got {recipe.train_max_length}."
        )
    check_flag("graphs", recipe.graphs)
    if recipe.graphs and not recipe.fused:
        raise ValueError("graphs must be False without fused, got True; leave --graphs or --plain out.")
    if recipe.bf16 not in (None, True, False):
        raise ValueError(f"bf16 must be True, False or None (by hardware), got {recipe.bf16!r}.")
