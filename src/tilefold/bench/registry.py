"""Which operators have a benchmark; their modules are imported only when one is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
    spec: BenchSpec = module_of(SPEC_MODULES, "op", op).SPEC
    return spec


def module_of(modules: Mapping[str, str], what: str, name: str) -> Any:
    """The module of this name, imported.

    Args:
        modules: by name.
        what: the argument that `name` came as.

    Raises:
        ValueError: for a name that has no module.
    """
    if name not in modules:
        raise ValueError(f"{what} must be one of {', '.join(modules)}, got {name!r}.")
    return importlib.import_module(modules[name])
