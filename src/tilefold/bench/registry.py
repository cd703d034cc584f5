"""Operators that have a benchmark; their modules are imported only when one is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilefold.bench.spec import BenchSpec

OPERATORS = ("lsr_head", "maxsim", "token_scatter", "entmax", "entmax_attention")


def operators() -> tuple[str, ...]:
    """Names of the operators that have a benchmark."""
    return OPERATORS


def get_spec(op: str) -> BenchSpec:
    """The benchmark of operator ``op``.

    Raises:
        ValueError: for an operator without a benchmark.
    """
    if op not in OPERATORS:
        raise ValueError(f"op must be one of {', '.join(OPERATORS)}, got {op!r}.")
    spec: BenchSpec = importlib.import_module(f"{__package__}.{op}").SPEC
    return spec
