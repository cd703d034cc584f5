"""The published systems by name, and one ``train`` for all of them.

The entries lie in one file per family: ``_names_splade.py``, ``_names_unified.py`` and ``_names_decoders.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tilefold.recipes import _names_decoders, _names_splade, _names_unified, colbert, lsr, splade
from tilefold.recipes._entry import Config, Entry
from tilefold.recipes._training import Progress, TrainResult

if TYPE_CHECKING:
    from tilefold.retrieval.collection import Collection

__all__ = ["RECIPES", "Config", "Entry", "get_recipe", "train"]

_FAMILIES = (_names_splade, _names_unified, _names_decoders)

#: Name -> entry, in the order of the documentation.
RECIPES: Mapping[str, Entry] = MappingProxyType({entry.name: entry for family in _FAMILIES for entry in family.ENTRIES})


def get_recipe(name: str, **overrides: Any) -> Config:
    """The configuration of a system, with some fields replaced.

    Raises:
        ValueError: an unknown name or field, or a value out of range.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}.")
    recipe = RECIPES[name].recipe
    return type(recipe).from_dict(recipe.to_dict() | overrides) if overrides else replace(recipe)


def train(
    recipe: Config,
    collection: Collection,
    output_dir: str | Path,
    *,
    negatives: str | Path | None = None,
    resume: bool = True,
    overwrite: bool = False,
    progress: Progress | None = None,
    verbose: bool = False,
) -> TrainResult:
    """Train any recipe of the catalogue: see :func:`tilefold.recipes.lsr.train`.

    Raises:
        ValueError: `negatives` for a recipe that reads none, and what the recipe's own ``train`` refuses.
    """
    settings: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "progress": progress, "verbose": verbose}
    if isinstance(recipe, lsr.LsrRecipe):
        return lsr.train(recipe, collection, output_dir, negatives=negatives, **settings)
    if negatives is not None:
        raise ValueError(f"negatives must be left out for a {type(recipe).__name__}, which reads none.")
    if isinstance(recipe, colbert.ColbertRecipe):
        return colbert.train(recipe, collection, output_dir, **settings)
    return splade.train(recipe, collection, output_dir, **settings)
