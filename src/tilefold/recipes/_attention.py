"""The attention that a recipe trains with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilefold._typing import Model

if TYPE_CHECKING:
    from tilefold.recipes._settings import TrainingSettings

__all__ = ["attention_callbacks", "check_loaded_attention", "register_entmax", "use_attention"]


def register_entmax() -> None:
    """Let transformers load checkpoints that ask for entmax attention, where it is new enough to have it."""
    try:
        from tilefold.integrations.transformers import register
    except ImportError:
        return  # it is missing, or it refuses such a checkpoint itself
    register()


def check_loaded_attention(model: Model) -> None:
    """Refuse a model that has alphas and would run softmax.

    Raises:
        ValueError: saying what to do.
    """
    try:
        from tilefold.integrations.transformers import runs_entmax
    except ImportError:
        return
    runs_entmax(model)


def use_attention(model: Model, recipe: TrainingSettings) -> None:
    """Give `model` the attention of a recipe.

    Raises:
        ValueError: for a model whose attention cannot be chosen.
    """
    if recipe.attention is None:
        return
    from tilefold.integrations.transformers import runs_entmax, use_entmax, use_softmax

    if recipe.attention == "entmax":
        use_entmax(model, 1.5 if recipe.alpha is None else recipe.alpha)
    elif runs_entmax(model):
        use_softmax(model)


def attention_callbacks(recipe: TrainingSettings) -> list[Any]:
    """The callbacks that the trainer of a recipe needs for its attention."""
    if not recipe.anneal_alpha:
        return []
    from tilefold.integrations.transformers import AlphaSchedule

    return [AlphaSchedule(1.5 if recipe.alpha is None else recipe.alpha, until=float(recipe.anneal_alpha))]
