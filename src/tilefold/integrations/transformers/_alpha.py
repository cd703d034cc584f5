"""The alpha of a layer: from the model's configuration, or from a learned module on the layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from tilefold.nn.entmax import EntmaxAlpha

ATTRIBUTE = "entmax_alpha"
LEARNED = "learned"  # value of the configuration's entmax_alpha where alphas are parameters
DEFAULT = 1.5


def layer_alpha(module: nn.Module) -> float | Tensor:
    """The alpha of an attention module: its ``entmax_alpha``, else its configuration's, else 1.5.

    A configuration may hold one number, or one per layer.

    Raises:
        ValueError: for a configuration with a list and a module without ``layer_idx``, or if learned alphas were not
            loaded.
    """
    own = getattr(module, ATTRIBUTE, None)
    if isinstance(own, EntmaxAlpha):
        alphas: Tensor = own()
        return alphas
    if own is not None:
        return own  # type: ignore[no-any-return]
    given: Any = getattr(getattr(module, "config", None), ATTRIBUTE, DEFAULT)
    if given == LEARNED:
        raise ValueError(
            f"entmax_alpha of {type(module).__name__} must have been loaded, got a model whose configuration says that "
            "it is learned; call load_alpha(model, folder) from tilefold.integrations.transformers after "
            "from_pretrained(folder), or set_alpha(model, 1.5) for another one."
        )
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
    """The modules that call the attention interface, first layer first: those that know their number of heads."""
    for module in model.modules():
        if hasattr(module, "is_causal") and hasattr(module, "config") and heads_of(module) is not None:
            yield module


def checked_attention_modules(model: nn.Module) -> list[nn.Module]:
    """:func:`attention_modules`.

    Raises:
        ValueError: if there are none.
    """
    modules = list(attention_modules(model))
    if not modules:
        raise ValueError(
            f"model must have attention layers that call transformers' attention interface, got {type(model).__name__}."
        )
    return modules


def heads_of(module: nn.Module) -> int | None:
    """Number of query heads of an attention module."""
    for source, names in ((module, ("num_attention_heads", "num_heads")), (module.config, ("num_attention_heads",))):
        for name in names:
            value = getattr(source, name, None)
            if isinstance(value, int):
                return value
    return None


def forget_alpha(module: nn.Module) -> None:
    """Remove a module's own alpha, number or learned."""
    if ATTRIBUTE in vars(module) or ATTRIBUTE in module._modules:
        delattr(module, ATTRIBUTE)


def check_alphas(alpha: float | Sequence[float], layers: int) -> list[float]:
    """One alpha per layer.

    Raises:
        ValueError: for a list of another length, or a value that is not a number in [1, 2].
    """
    alphas: list[Any] = list(alpha) if isinstance(alpha, (list, tuple)) else [alpha] * layers
    if len(alphas) != layers:
        raise ValueError(f"alpha must be one number or {layers}, one for every attention layer, got {alphas}.")
    if not all(isinstance(a, (int, float)) and not isinstance(a, bool) and 1 <= a <= 2 for a in alphas):
        raise ValueError(f"alpha must lie in [1, 2], got {alphas}.")
    return [float(value) for value in alphas]


def set_alpha(model: nn.Module, alpha: float | Sequence[float]) -> None:
    """Set the alpha of every attention layer of ``model``: one number, or one per layer.

    The alphas are stored in the model's configuration, and with it in checkpoints; learned ones are removed.

    Args:
        model: a transformers model, or any module with one inside, such as a sentence-transformers model.
        alpha: in [1, 2]; 1 is softmax.

    Raises:
        ValueError: for a list of another length, a number outside [1, 2], or a model without attention layers.
    """
    modules = checked_attention_modules(model)
    alphas = check_alphas(alpha, len(modules))
    by_config: dict[int, list[tuple[nn.Module, float]]] = {}
    for module, value in zip(modules, alphas, strict=True):
        by_config.setdefault(id(module.config), []).append((module, value))
    for pairs in by_config.values():
        values: list[float] = [value for _, value in pairs]
        in_order = [getattr(module, "layer_idx", None) for module, _ in pairs] == list(range(len(pairs)))
        setattr(pairs[0][0].config, ATTRIBUTE, values[0] if len(set(values)) == 1 else values)
        for module, value in pairs:
            forget_alpha(module)
            if len(set(values)) > 1 and not in_order:  # the configuration's list could not be looked up
                setattr(module, ATTRIBUTE, value)


def add_learned_alpha(model: nn.Module, initial: float | Sequence[float] = DEFAULT) -> list[EntmaxAlpha]:
    """Run ``learn_alpha`` on a transformers model."""
    modules = checked_attention_modules(model)
    starts = check_alphas(initial, len(modules))
    made = [EntmaxAlpha(heads_of(module) or 1, start) for module, start in zip(modules, starts, strict=True)]
    for module, alpha in zip(modules, made, strict=True):
        like = next(module.parameters(), None)
        if like is not None:
            alpha.to(like.device)
        forget_alpha(module)
        setattr(module, ATTRIBUTE, alpha)
        setattr(module.config, ATTRIBUTE, LEARNED)
    return made
