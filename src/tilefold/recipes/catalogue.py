"""The published systems by name: their sources, and the settings in which each differs from its
class of recipe.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilefold.recipes._settings import KINDS, EncoderSpec, Settings
from tilefold.recipes._training import TrainResult, train
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.recipes.lsr import LsrRecipe
from tilefold.recipes.splade import SpladeRecipe

__all__ = ["RECIPES", "Config", "Entry", "TrainResult", "describe", "get_recipe", "train"]

Config = SpladeRecipe | ColbertRecipe | LsrRecipe
_CLASSES: dict[str, type[Config]] = {
    kind.__name__: kind for kind in (SpladeRecipe, ColbertRecipe, LsrRecipe)
}


@dataclass(frozen=True)
class Entry:
    """A published system under its name."""

    name: str  # as ``tilefold train --recipe`` takes it
    summary: str
    paper: str  # arXiv number, empty without one
    recipe: Config  # with the defaults of this package, for thousands of pairs and one GPU or CPU
    published: str = ""  # the settings of the paper or its code, in words
    publishes: str = "none published"  # the number of the paper and where it is measured
    base: str = "masked-lm"  # kind of base model, or "causal-lm", "encoder", "multi-vector"

    @property
    def needs(self) -> tuple[str, ...]:
        """The data that training takes: ``"pairs"``, ``"negatives"``, ``"scores"``."""
        return self.recipe.needs

    def to_dict(self) -> dict[str, Any]:
        """The entry as a JSON object, with the configuration's fields."""
        return {**asdict(self), "needs": list(self.needs), "kind": type(self.recipe).__name__}


def _entries() -> Iterator[Entry]:
    for row in json.loads((Path(__file__).parent / "systems.json").read_text(encoding="utf-8")):
        settings, kind = row.pop("recipe", {}), row.pop("kind", "LsrRecipe")
        row.pop("comment", None)
        named = {"name": row["name"]} if kind == "LsrRecipe" else {}
        yield Entry(recipe=_CLASSES[kind].from_dict(named | settings), **row)


#: Name -> entry, in the order of the documentation.
RECIPES: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _entries()})


def get_recipe(name: str, **overrides: Any) -> Config:
    """The configuration of a system, with some fields replaced.

    Raises:
        ValueError: an unknown name or field, or a value out of range.
    """
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}.")
    recipe = RECIPES[name].recipe
    return type(recipe).from_dict(recipe.to_dict() | overrides) if overrides else replace(recipe)


def describe(recipe: Config) -> Iterator[tuple[str, object, str]]:
    """Name as ``--set`` takes it, JSON value and meaning of the fields of a recipe, and of those
    inside that apply.
    """
    values = recipe.to_dict()
    for name, text in recipe.described().items():
        inside = getattr(recipe, name)
        if not isinstance(inside, Settings):
            if name != "name":
                yield name, values[name], text
            continue
        applies = (
            KINDS[inside.kind] | {"kind", "base_model"}
            if isinstance(inside, EncoderSpec)
            else values[name]
        )
        for part, meaning in inside.described().items():
            if part in applies:
                yield f"{name}.{part}", values[name][part], meaning
