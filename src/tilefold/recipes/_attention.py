"""The attention that a recipe trains with."""
# ruff: noqa: PLC0415 - transformers is imported by the functions that need it

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilefold.recipes._checks import check_number

__all__ = [
    "ATTENTIONS",
    "AttentionChoice",
    "attention_callbacks",
    "check_loaded_attention",
    "register_entmax",
    "use_attention",
]

ATTENTIONS = ("softmax", "entmax")


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The fields of a recipe that choose its attention; the class of a recipe inherits from this one.

    Attributes:
        attention: ``"softmax"``, ``"entmax"``, or ``None`` for that of the base model (softmax in a stock one).
        alpha: of entmax, in [1, 2]; ``None`` takes 1.5.
        anneal_alpha: share of the steps, in [0, 1], over which alpha rises from 1, which is softmax; 0 for none.
    """

    attention: str | None = None
    alpha: float | None = None
    anneal_alpha: float = 0.0

    def check_attention(self) -> None:
        """Refuse values out of range, and alphas without entmax attention.

        Raises:
            ValueError: naming the field.
        """
        if self.attention not in (None, *ATTENTIONS):
            raise ValueError(f"attention must be 'softmax', 'entmax' or None, got {self.attention!r}.")
        if self.alpha is not None:
            check_number("alpha", self.alpha, lambda value: 1 <= value <= 2, "in [1, 2]")
        check_number("anneal_alpha", self.anneal_alpha, lambda value: 0 <= value <= 1, "in [0, 1]")
        for name in ("alpha", "anneal_alpha"):
            if getattr(self, name) and self.attention != "entmax":
                raise ValueError(f"{name} must be left out without attention='entmax', got {getattr(self, name)!r}.")


def register_entmax() -> None:
    """Let transformers load checkpoints that ask for entmax attention, where it is new enough to have it."""
    try:
        from tilefold.integrations.transformers import register
    except ImportError:
        return  # it is missing, or it refuses such a checkpoint itself
    register()


def check_loaded_attention(model: Any) -> None:
    """Refuse a model that has alphas and would run softmax.

    Raises:
        ValueError: saying what to do.
    """
    try:
        from tilefold.integrations.transformers import runs_entmax
    except ImportError:
        return
    runs_entmax(model)


def use_attention(model: Any, recipe: object) -> None:
    """Give `model` the attention of a recipe.

    Raises:
        ValueError: for a model whose attention cannot be chosen.
    """
    if not isinstance(recipe, AttentionChoice) or recipe.attention is None:
        return
    from tilefold.integrations.transformers import runs_entmax, use_entmax, use_softmax

    if recipe.attention == "entmax":
        use_entmax(model, 1.5 if recipe.alpha is None else recipe.alpha)
    elif runs_entmax(model):
        use_softmax(model)


def attention_callbacks(recipe: object) -> list[Any]:
    """What the trainer of a recipe needs for its attention."""
    if not isinstance(recipe, AttentionChoice) or not recipe.anneal_alpha:
        return []
    from tilefold.integrations.transformers import AlphaSchedule

    return [AlphaSchedule(1.5 if recipe.alpha is None else recipe.alpha, until=float(recipe.anneal_alpha))]
