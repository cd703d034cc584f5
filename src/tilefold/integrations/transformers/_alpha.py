"""Where a layer's alpha comes from: its own attribute, a learned module on it, or the model's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tilefold.nn.entmax import EntmaxAlpha

ATTRIBUTE = "entmax_alpha"


def layer_alpha(module: nn.Module) -> float | Tensor:
    """The alpha of an attention module: its ``entmax_alpha``, else its configuration's, else 1.5.

    A configuration may hold one number, or one for every layer.

    Raises:
        ValueError: for a configuration with a list and a module that does not know its layer.
    """
    own = getattr(module, ATTRIBUTE, None)
    if isinstance(own, EntmaxAlpha):
        alphas: Tensor = own()
        return alphas
    if own is not None:
        return own  # type: ignore[no-any-return]
    given: Any = getattr(getattr(module, "config", None), ATTRIBUTE, 1.5)
    if not isinstance(given, (list, tuple)):
        return given  # type: ignore[no-any-return]
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(given):
        raise ValueError(
            f"config.entmax_alpha must be one number or one for every layer, got {len(given)} for layer {layer} of "
            f"{type(module).__name__}; use set_alpha(model, [...]) instead."
        )
    return float(given[layer])


def attention_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules that call the attention interface, first layer first: those that know their heads' dimension."""
    for module in model.modules():
        if hasattr(module, "is_causal") and hasattr(module, "config") and _heads(module) is not None:
            yield module


def _heads(module: nn.Module) -> int | None:
    for source, names in ((module, ("num_attention_heads", "num_heads")), (module.config, ("num_attention_heads",))):
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int):
                return value
    return None


def set_alpha(model: nn.Module, alpha: float | list[float]) -> None:
    """Give every attention layer of ``model`` an alpha: one number, or one for every layer.

    Args:
        model: a transformers model.
        alpha: in [1, 2]; 1 is softmax.

    Raises:
        ValueError: for a list of another length, a number outside [1, 2], or a model without attention layers.
    """
    modules = list(attention_modules(model))
    alphas = list(alpha) if isinstance(alpha, (list, tuple)) else [alpha] * len(modules)
    if not modules or len(alphas) != len(modules):
        raise ValueError(f"alpha must be one number or {len(modules)}, one for every attention layer, got {alphas}.")
    if not all(1 <= value <= 2 for value in alphas):
        raise ValueError(f"alpha must lie in [1, 2], got {alphas}.")
    for module, value in zip(modules, alphas, strict=True):
        setattr(module, ATTRIBUTE, float(value))


def learn_alpha(model: nn.Module, initial: float = 1.5) -> list[EntmaxAlpha]:
    """Give every attention layer of ``model`` a learned alpha for each head.

    The parameters join the model (and its checkpoints) as ``entmax_alpha.theta`` of every attention module.

    Args:
        model: a transformers model.
        initial: alpha at the start, strictly between 1 and 2.

    Returns:
        The new modules, one a layer.

    Raises:
        ValueError: for a model without attention layers, or an ``initial`` outside (1, 2).
    """
    made: list[EntmaxAlpha] = []
    for module in list(attention_modules(model)):
        alpha = EntmaxAlpha(_heads(module) or 1, initial)
        like = next(module.parameters(), None)
        if like is not None:
            alpha.to(like.device)
        if ATTRIBUTE in vars(module):
            delattr(module, ATTRIBUTE)  # a number from set_alpha would hide the module
        setattr(module, ATTRIBUTE, alpha)
        made.append(alpha)
    if not made:
        raise ValueError(
            f"model must have attention layers that call the attention interface, got {type(model).__name__}."
        )
    return made
