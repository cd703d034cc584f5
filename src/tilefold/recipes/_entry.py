"""One entry of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilefold.recipes.colbert import ColbertRecipe
from tilefold.recipes.lsr import LsrRecipe
from tilefold.recipes.splade import SpladeRecipe

__all__ = ["Config", "Entry"]

Config = SpladeRecipe | ColbertRecipe | LsrRecipe


@dataclass(frozen=True)
class Entry:
    """A published system under its name.

    Attributes:
        name: as ``tilefold train --recipe`` takes it.
        summary: one line.
        paper: arXiv number, ``""`` for a system without a paper.
        recipe: the configuration with the defaults of this package, for thousands of pairs and one GPU or CPU.
        published: the settings of the paper or its code, in words.
        publishes: the number of the paper and where it is measured, or ``"none published"``.
        base: the kind of base model: ``"masked-lm"``, ``"causal-lm"``, ``"encoder"`` or ``"multi-vector"``.
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
        """The data that training takes: ``"pairs"``, ``"negatives"``, ``"scores"``."""
        return self.recipe.needs if isinstance(self.recipe, LsrRecipe) else ("pairs",)

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object, with the configuration's fields."""
        return {
            "name": self.name,
            "summary": self.summary,
            "paper": self.paper,
            "needs": list(self.needs),
            "published": self.published,
            "publishes": self.publishes,
            "base": self.base,
            "kind": type(self.recipe).__name__,
            "recipe": self.recipe.to_dict(),
        }
