"""Catalogue of published systems, with a name, sources and a training recipe for each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tilefold._internal.arguments import suggestion
from tilefold.recipes._settings import Settings
from tilefold.recipes._training import TrainResult, train
from tilefold.recipes.colbert import ColbertRecipe
from tilefold.recipes.lsr import LsrRecipe

__all__ = ["RECIPES", "Config", "Entry", "TrainResult", "describe", "get_recipe", "train"]

Config = ColbertRecipe | LsrRecipe
_CLASSES: dict[str, type[Config]] = {"ColbertRecipe": ColbertRecipe, "LsrRecipe": LsrRecipe}


@dataclass(frozen=True)
class Entry:
    """A published system of the catalogue.

    Attributes:
        name: name of the system, for ``tilefold train --recipe``.
        summary: one sentence about the system.
        paper: arXiv number of the paper; empty if it has none.
        recipe: the training recipe, with defaults for thousands of pairs and one GPU or CPU.
        published: description of the settings in the paper or in its code.
        publishes: result that the paper reports, with its data set.
        base: kind of base model: ``"masked-lm"``, ``"causal-lm"``, ``"encoder"`` or
            ``"multi-vector"``.
    """

    name: str
    summary: str
    paper: str
    recipe: Config
    published: str = ""
    publishes: str = "none published"
    base: str = "masked-lm"

    @property
    def needs(self) -> tuple[str, ...]:
        """The data that training reads: ``"pairs"``, ``"negatives"``, ``"scores"``."""
        return self.recipe.needs

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as a JSON object, with the recipe as a nested object.

        Besides the attributes, it has ``"needs"``, and the name of the recipe's class as
        ``"kind"``.
        """
        return {
            "name": self.name,
            "summary": self.summary,
            "paper": self.paper,
            "recipe": self.recipe.to_dict(),
            "published": self.published,
            "publishes": self.publishes,
            "base": self.base,
            "needs": list(self.needs),
            "kind": type(self.recipe).__name__,
        }


def _read_entries() -> Iterator[Entry]:
    """Read the entries of ``systems.json``."""
    path = Path(__file__).parent / "systems.json"
    for system in json.loads(path.read_text(encoding="utf-8")):
        settings = system.pop("recipe", {})
        class_name = system.pop("kind", "LsrRecipe")
        system.pop("comment", None)
        if class_name == "LsrRecipe":
            settings = {"name": system["name"], **settings}
        yield Entry(recipe=_CLASSES[class_name].from_dict(settings), **system)


#: Name -> entry, in the order of the documentation.
RECIPES: Mapping[str, Entry] = MappingProxyType({entry.name: entry for entry in _read_entries()})


def get_recipe(name: str, **overrides: Any) -> Config:
    """Return the recipe of a published system, with some fields replaced.

    Args:
        name: name of the system, such as ``"splade"``.
        overrides: field -> new value, as a Python object or in its JSON form.

    Raises:
        ValueError: if a name or field is unknown, or a value is out of range.

    Examples:
        >>> recipe = get_recipe("splade", base_model="minilm", max_steps=200, batch_size=32)
        >>> recipe.max_steps
        200
        >>> get_recipe("colbert", dimension=64).dimension
        64
    """
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(
            f"recipe must be one of {', '.join(RECIPES)}, got {name!r}.{suggestion(name, RECIPES)}",
        )
    recipe = RECIPES[name].recipe
    return type(recipe).from_dict(recipe.to_dict() | overrides)


def describe(recipe: Config) -> Iterator[tuple[str, object, str]]:
    """Describe the fields of a recipe, and the fields of its encoders and regularizers.

    Args:
        recipe: the recipe. Its name is not described, because it cannot be set.

    Yields:
        The name of a field as in ``tilefold train --set``, such as ``document.top_k``; the value
        of the field in JSON; and a description.
    """
    json_values = recipe.to_dict()
    for name, description in recipe.field_descriptions().items():
        value = getattr(recipe, name)
        if isinstance(value, Settings):  # an encoder or a regularizer
            yield from _describe_nested(name, value)
        elif name != "name":
            yield name, json_values[name], description


def _describe_nested(prefix: str, settings: Settings) -> Iterator[tuple[str, object, str]]:
    """Describe the fields of an encoder or a regularizer, with names ``<prefix>.<field>``."""
    for name, description in settings.field_descriptions().items():
        yield f"{prefix}.{name}", getattr(settings, name), description
