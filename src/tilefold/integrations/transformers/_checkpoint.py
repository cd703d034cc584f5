"""Entmax attention that a checkpoint remembers, and alphas that were learned."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tilefold.integrations.transformers._alpha import (
    ATTRIBUTE,
    LEARNED,
    add_learned_alpha,
    attention_modules,
    checked_attention_modules,
    forget_alpha,
)
from tilefold.integrations.transformers._attention import MARK, entmax_attention_forward
from tilefold.nn.entmax import EntmaxAlpha

SUFFIX = f".{ATTRIBUTE}.theta"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def use_softmax(model: nn.Module, attn_implementation: str = "sdpa") -> None:
    """Undo :func:`use_entmax`: softmax attention, and no alphas in the model, its configuration and its checkpoints.

    Args:
        model: a transformers model, or any module with one inside.
        attn_implementation: which of transformers' implementations to run.
    """
    for module in checked_attention_modules(model):
        forget_alpha(module)
    for inner in outer_models(model):
        inner.set_attn_implementation(attn_implementation)
    for config in configs(model):
        for name in (MARK, ATTRIBUTE):
            if name in vars(config):
                delattr(config, name)


def runs_entmax(model: nn.Module) -> bool:
    """Whether any attention layer of a model runs entmax attention.

    Raises:
        ValueError: if a layer does not, although its configuration has alphas: it would run softmax instead.
    """
    runs = {module: _runs_entmax(module) for module in attention_modules(model)}
    meant = [module for module in runs if not runs[module] and hasattr(module.config, ATTRIBUTE)]
    if meant:
        raise ValueError(
            f"model must run entmax attention where its configuration has entmax_alpha, got {len(meant)} layers with "
            f"attn_implementation={implementation_of(meant[0])!r}; call use_entmax(model, alpha), or "
            "use_softmax(model) if softmax is meant."
        )
    return any(runs.values())


def implementation_of(module: nn.Module) -> Any:
    return getattr(module.config, "_attn_implementation", None)


def _runs_entmax(module: nn.Module) -> bool:
    return AttentionInterface._global_mapping.get(implementation_of(module)) is entmax_attention_forward


def load_learned_alpha(model: nn.Module, name_or_path: str | Path, hub: dict[str, Any]) -> list[EntmaxAlpha]:
    """Run ``load_alpha`` on a transformers model."""
    found = _read_thetas(str(name_or_path), hub)
    layers = set(checked_attention_modules(model))
    modules = [name for name, module in model.named_modules() if module in layers]
    chosen = {name: _theta_of(name, found) for name in modules}
    if not found or any(theta is None for theta in chosen.values()):
        missing = [name for name, theta in chosen.items() if theta is None]
        raise ValueError(
            f"name_or_path {str(name_or_path)!r} must hold learned alphas of {len(chosen)} attention layers, got "
            f"{len(found)} (none for {', '.join(missing[:3])}); use set_alpha or learn_alpha for new ones."
        )
    made = add_learned_alpha(model)
    for alpha, (name, theta) in zip(made, chosen.items(), strict=True):
        if theta is None or theta.shape != alpha.theta.shape:
            got = "nothing" if theta is None else list(theta.shape)
            raise ValueError(f"theta of {name} must have shape {list(alpha.theta.shape)}, got {got} in {name_or_path}.")
        with torch.no_grad():
            alpha.theta.copy_(theta)
    return made


def has_learned_alpha(model: nn.Module) -> bool:
    """Whether the configuration of a model says that its alphas are learned."""
    return any(getattr(config, ATTRIBUTE, None) == LEARNED for config in configs(model))


def outer_models(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The outermost transformers models in a module."""
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            yield module


def configs(model: nn.Module) -> list[Any]:
    """The configurations of a module's transformers models and attention layers, each once."""
    owners = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    owners += [module for module in model.modules() if ATTRIBUTE in vars(getattr(module, "config", module))]
    return list({id(owner.config): owner.config for owner in owners if hasattr(owner, "config")}.values())


def _theta_of(name: str, found: dict[str, Tensor]) -> Tensor | None:
    """The theta of a module, whose name may have more or fewer prefixes than in the checkpoint."""
    if name + SUFFIX in found:
        return found[name + SUFFIX]
    matches = [key for key in found if key.endswith(f".{name}{SUFFIX}") or f".{name}{SUFFIX}".endswith(f".{key}")]
    return found[matches[0]] if len(matches) == 1 else None


def _read_thetas(name_or_path: str, hub: dict[str, Any]) -> dict[str, Tensor]:
    """All learned alphas in the weight files of a checkpoint, by their names there."""
    from transformers.utils import cached_file  # needs the hub's client

    options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_gated_repo": True}
    for name in WEIGHTS:
        file = cached_file(name_or_path, name, **options, **hub)
        if file is None:
            continue
        if not name.endswith("index.json"):
            return _thetas_in(file)
        weights = json.loads(Path(file).read_text(encoding="utf-8"))["weight_map"]
        found: dict[str, Tensor] = {}
        for part in sorted({part for key, part in weights.items() if key.endswith(SUFFIX)}):
            found |= _thetas_in(cached_file(name_or_path, part, **hub))
        return found
    got = sorted(file.name for file in Path(name_or_path).glob("*"))[:3] or "no such file"
    raise OSError(f"{name_or_path} must hold one of {', '.join(WEIGHTS)}, got {got}; save the model there.")


def _thetas_in(file: str) -> dict[str, Tensor]:
    if file.endswith(".safetensors"):
        from safetensors import safe_open  # comes with transformers

        with safe_open(file, framework="pt") as weights:
            return {key: weights.get_tensor(key) for key in weights.keys() if key.endswith(SUFFIX)}  # noqa: SIM118
    weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {key: value for key, value in weights.items() if key.endswith(SUFFIX)}
