"""Which operators have a benchmark; their modules are imported only when one is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilefold.bench.spec import BenchSpec

SPEC_MODULES: dict[str, str] = {
    "lsr_head": "tilefold.bench.lsr_head.spec",
    "maxsim": "tilefold.bench.maxsim.spec",
    "token_scatter": "tilefold.bench.token_scatter.spec",
    "entmax": "tilefold.bench.entmax.spec",
    "entmax_attention": "tilefold.bench.entmax_attention.spec",
}


def operators() -> tuple[str, ...]:
    """Names of the operators that have a benchmark."""
    return tuple(SPEC_MODULES)


def get_spec(op: str) -> BenchSpec:
    """The benchmark of operator ``op``.

    Raises:
        ValueError: for an operator without a benchmark.
    """
    if op not in SPEC_MODULES:
        raise ValueError(f"op must be one of {', '.join(SPEC_MODULES)}, got {op!r}.")
    spec: BenchSpec = importlib.import_module(SPEC_MODULES[op]).SPEC
    return spec
