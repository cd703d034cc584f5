"""What to train: one typed configuration and one ``train`` for each published system."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "ColbertRecipe": "colbert",
    "SpladeRecipe": "splade",
    "TrainResult": "splade",
    "train": "splade",
    "minilm_splade": "backbone",
    "minilm_path": "backbone",
    "load_dense_minilm": "backbone",
}

__all__ = [  # noqa: PLE0604 - the table above is the list
    *sorted(_HOME)
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
