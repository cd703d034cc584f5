"""Alphas of a model's attention layers: set, learned, annealed, loaded; and its switch to entmax
attention.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.trainer_callback import TrainerCallback

from tilefold.integrations.transformers import attention
from tilefold.integrations.transformers.networks import check_network
from tilefold.nn.heads import EntmaxAlpha

SUFFIX = f".{attention.ALPHA}.theta"
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
SHAPES = ("linear", "cosine")
_HUB = ("subfolder", "revision", "token", "cache_dir", "local_files_only")


def set_alpha(model: nn.Module, alpha: float | Sequence[float]) -> None:
    """Set the alpha of every attention layer of ``model``: one number, or one per layer.

    The alphas, in [1, 2] (1 is softmax), are stored in the model's configuration, and with it in
    checkpoints; learned ones are removed. ``model`` is a transformers model, or any module with one
    inside, as sentence-transformers has.

    Raises:
        ValueError: for a list of another length, a number outside [1, 2], or a model without
            attention layers.
    """
    modules = attention.checked_attention_modules(model)
    by_config: dict[int, dict[nn.Module, float]] = {}
    for module, value in zip(modules, check_alphas(alpha, len(modules)), strict=True):
        _forget_alpha(module)
        by_config.setdefault(id(module.config), {})[module] = value
    for chosen in by_config.values():
        values, places = (
            list(chosen.values()),
            [getattr(module, "layer_idx", None) for module in chosen],
        )
        setattr(
            next(iter(chosen)).config,
            attention.ALPHA,
            values[0] if len(set(values)) == 1 else values,
        )
        if len(set(values)) > 1 and places != list(
            range(len(places)),
        ):  # the list could not be looked up
            for module, value in chosen.items():
                setattr(module, attention.ALPHA, value)


def learn_alpha(
    model: nn.Module,
    initial: float | Sequence[float] = attention.DEFAULT,
) -> list[EntmaxAlpha]:
    """Give every attention layer of ``model`` one learned alpha per head; returns the new modules,
    one per layer.

    The parameters join the model, its optimisers and its checkpoints as ``entmax_alpha.theta`` of
    every attention module: make the optimiser afterwards. The configuration then says that they are
    learned, and a model that is loaded without them raises instead of using others: see
    :func:`load_alpha`. In a sentence-transformers model the modules that hold transformers models
    become :class:`EntmaxTransformer`, which loads them by itself.

    Args:
        model: as for :func:`set_alpha`.
        initial: alpha at the start, strictly between 1 and 2; one number, or one for every layer.

    Raises:
        ValueError: for a model without attention layers, or an ``initial`` outside (1, 2).
    """
    modules = attention.checked_attention_modules(model)
    starts = check_alphas(initial, len(modules))
    made = [
        EntmaxAlpha(heads, start) for heads, start in zip(modules.values(), starts, strict=True)
    ]
    for module, alpha in zip(modules, made, strict=True):
        if (like := next(module.parameters(), None)) is not None:
            alpha.to(like.device)
        _forget_alpha(module)
        setattr(module, attention.ALPHA, alpha)
        setattr(module.config, attention.ALPHA, attention.LEARNED)
    for part in (
        model.modules()
    ):  # those of sentence-transformers that hold the model are to load its alphas, too
        kind = type(part)
        if kind.__name__ == "Transformer" and kind.__module__.startswith("sentence_transformers."):
            part.__class__ = entmax_transformer()
    return made


def load_alpha(model: nn.Module, name_or_path: str | Path, **hub: object) -> list[EntmaxAlpha]:
    """Load the learned alphas of a checkpoint into a model that ``from_pretrained`` made of it; the
    new modules.

    transformers reports ``entmax_alpha.theta`` as unexpected weights; the model refuses to run
    without its alphas.

    Args:
        model: a transformers model, of the saved class or another one of its architecture.
        name_or_path: the folder, or the name on the Hugging Face hub, that it was loaded from.
        hub: ``subfolder``, ``revision``, ``token``, ``cache_dir``, ``local_files_only`` as for
            ``from_pretrained``.

    Raises:
        ValueError: if the checkpoint has no learned alphas, or those of other layers.
        OSError: if there is no checkpoint.
    """
    check_network(model)
    found = _read_thetas(str(name_or_path), hub)
    layers = attention.checked_attention_modules(model)
    chosen = {
        name: _theta_of(name, found) for name, module in model.named_modules() if module in layers
    }
    if not found or any(theta is None for theta in chosen.values()):
        missing = [name for name, theta in chosen.items() if theta is None]
        got = f"{len(found)} (none for {', '.join(missing[:3])}); use set_alpha or learn_alpha for new ones."
        expected = f"learned alphas of {len(chosen)} attention layers"
        raise ValueError(f"name_or_path {str(name_or_path)!r} must hold {expected}, got {got}")
    made = learn_alpha(model)
    for alpha, (name, theta) in zip(made, chosen.items(), strict=True):
        if theta is None or theta.shape != alpha.theta.shape:
            got = "nothing" if theta is None else str(list(theta.shape))
            raise ValueError(
                f"theta of {name} must have shape {list(alpha.theta.shape)}, got {got} in "
                f"{name_or_path}.",
            )
        with torch.no_grad():
            alpha.theta.copy_(theta)
    return made


def use_entmax(
    model: nn.Module,
    alpha: float | list[float] = attention.DEFAULT,
    *,
    learn: bool = False,
) -> None:
    """Switch a model in memory, and its checkpoints, to alpha-entmax attention.

    ``config.json`` then holds ``"attn_implementation": "entmax"`` and the alphas. A checkpoint
    loads with entmax attention where :func:`register` was called, and raises where it was not; it
    never runs softmax silently.

    Args:
        model, alpha: as for :func:`set_alpha`.
        learn: learn one alpha per head, starting there, see :func:`learn_alpha`.

    Raises:
        ValueError: for alphas that do not fit, or a model with attention that does not go by
            transformers' attention interface.
    """
    check_network(model)
    attention.register()
    for inner in _outer_models(model):
        inner.set_attn_implementation(attention.NAME)
    modules = attention.checked_attention_modules(model)
    if stuck := [type(m).__name__ for m in modules if _implementation(m) != attention.NAME]:
        raise ValueError(
            f"model must support a choice of attention, got {sorted(set(stuck))}, which do not.",
        )
    (learn_alpha if learn else set_alpha)(model, alpha)
    for config in _configs(model):
        setattr(config, attention.MARK, attention.NAME)


def use_softmax(model: nn.Module, attn_implementation: str = "sdpa") -> None:
    """Undo :func:`use_entmax`: no alphas in the model and its checkpoints, and this one of
    transformers' attentions.
    """
    for module in attention.checked_attention_modules(model):
        _forget_alpha(module)
    for inner in _outer_models(model):
        inner.set_attn_implementation(attn_implementation)
    for config in _configs(model):
        for name in (attention.MARK, attention.ALPHA):
            if name in vars(config):
                delattr(config, name)


def runs_entmax(model: nn.Module) -> bool:
    """Whether any attention layer of a model runs entmax attention.

    Raises:
        ValueError: if a layer does not, although its configuration has alphas: it would run softmax
            instead.
    """
    known = AttentionInterface._global_mapping
    modules = attention.attention_modules(model)
    runs = {m: known.get(_implementation(m)) is attention.entmax_attention_forward for m in modules}
    meant = [
        module for module in modules if not runs[module] and hasattr(module.config, attention.ALPHA)
    ]
    if meant:
        got = f"{len(meant)} layers with attn_implementation={_implementation(meant[0])!r}"
        remedy = "call use_entmax(model, alpha), or use_softmax(model)."
        where = "where its configuration has entmax_alpha"
        raise ValueError(f"model must run entmax attention {where}, got {got}; {remedy}")
    return any(runs.values())


def has_learned_alpha(model: nn.Module) -> bool:
    """Whether the configuration of a model says that its alphas are learned."""
    return any(
        getattr(config, attention.ALPHA, None) == attention.LEARNED for config in _configs(model)
    )


def check_alphas(alpha: float | Sequence[float], layers: int) -> list[float]:
    """One alpha in [1, 2] per layer."""
    alphas: list[Any] = list(alpha) if isinstance(alpha, (list, tuple)) else [alpha] * layers
    if len(alphas) != layers:
        raise ValueError(
            f"alpha must be one number or {layers}, one for every attention layer, got {alphas}.",
        )
    if not all(
        isinstance(a, (int, float)) and not isinstance(a, bool) and 1 <= a <= 2 for a in alphas
    ):
        raise ValueError(f"alpha must lie in [1, 2], got {alphas}.")
    return [float(value) for value in alphas]


class AlphaSchedule(TrainerCallback):
    """Anneal alpha from softmax to its target while a trainer runs, as AdaSplash's encoders do
    (arXiv 2502.12082).

    A callback for ``transformers.Trainer`` and the trainers of sentence-transformers,
    ``callbacks=[AlphaSchedule()]``, of models that run entmax attention (:func:`use_entmax`). Alpha
    follows the number of optimiser steps done, in checkpoints, evaluations and resumed runs too,
    and stays at the target after ``until``. Alpha = 1 is softmax.

    Args:
        alpha: the target, in [1, 2]; one number, or one per attention layer.
        start: alpha at the first step.
        until: where the target is reached: a share of all steps in (0, 1] if it is a float, else a
            number of steps.
        shape: ``"linear"``, or ``"cosine"``, which starts and ends slowly.

    Raises:
        ValueError: for values out of range; when training starts, for a model without entmax
            attention, with learned alphas or another number of layers, or an ``until`` after the
            last step.
    """

    def __init__(
        self,
        alpha: float | Sequence[float] = 1.5,
        *,
        start: float = 1.0,
        until: float = 0.5,
        shape: str = "linear",
    ) -> None:
        self.targets = check_alphas(alpha, len(alpha) if isinstance(alpha, Sequence) else 1)
        self.alpha = alpha
        (self.start,) = check_alphas(start, 1)
        share = isinstance(until, float) and 0 < until <= 1
        if not share and (isinstance(until, bool) or not isinstance(until, int) or until < 1):
            raise ValueError(
                "until must be a share of the steps in (0, 1] or a whole number of them, got "
                f"{until!r}.",
            )
        if shape not in SHAPES:
            raise ValueError(f"shape must be one of {', '.join(map(repr, SHAPES))}, got {shape!r}.")
        self.until, self.shape = until, shape

    def alpha_at(self, step: int, steps: int) -> float | list[float]:
        """Alpha after ``step`` of ``steps`` optimiser steps: a number, or a list if the target is
        one.
        """
        last = max(
            1,
            math.ceil(self.until * steps) if isinstance(self.until, float) else self.until,
        )
        share = min(1.0, step / last)
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        values = [
            target if share == 1 else self.start + share * (target - self.start)
            for target in self.targets
        ]
        return values if isinstance(self.alpha, Sequence) else values[0]

    def on_train_begin(
        self,
        args: object,
        state: Any,
        control: object,
        model: nn.Module | None = None,
        **_: object,
    ) -> None:
        """Check the model, and set the alpha of the first step, or of the step that training
        resumes from.
        """
        if model is None:
            raise ValueError("model must be passed to the callback by its trainer, got None.")
        if not runs_entmax(model):
            raise ValueError(
                "model must run entmax attention, got one that runs none; call use_entmax(model) "
                "first.",
            )
        if has_learned_alpha(model):
            raise ValueError(
                "model must not have learned alphas, got some; a schedule would overwrite them.",
            )
        if isinstance(self.until, int) and self.until > state.max_steps:
            raise ValueError(
                f"until must not lie after the last step, {state.max_steps}, got {self.until}.",
            )
        set_alpha(model, self.alpha_at(state.global_step, state.max_steps))

    def on_step_end(
        self,
        args: object,
        state: Any,
        control: object,
        model: nn.Module | None = None,
        **_: object,
    ) -> None:
        """Set the alpha of the next step."""
        if model is not None:
            set_alpha(model, self.alpha_at(state.global_step, state.max_steps))


def _forget_alpha(module: nn.Module) -> None:
    if attention.ALPHA in vars(module) or attention.ALPHA in module._modules:
        delattr(module, attention.ALPHA)


@functools.cache
def entmax_transformer() -> type:
    """The class ``EntmaxTransformer``, which needs sentence-transformers."""
    from sentence_transformers.base.modules import Transformer

    class EntmaxTransformer(Transformer):
        """Stock ``Transformer`` that also loads learned alphas, with
        ``SentenceTransformer(folder)`` and on resuming.

        :func:`learn_alpha` makes the modules of a model into this. A checkpoint names it in
        ``modules.json``; since it is no class of sentence-transformers, version 6 asks for
        ``trust_remote_code=True`` (what runs is the installed tilefold).
        """

        __module__ = "tilefold.integrations.sentence_transformers.entmax"  # where checkpoints and pickles look for it
        __qualname__ = "EntmaxTransformer"

        def __init__(self, model_name_or_path: str | Path, **kwargs: Any) -> None:
            attention.register()
            super().__init__(model_name_or_path, **kwargs)
            if has_learned_alpha(self.model):
                given = kwargs.get("model_kwargs") or {}
                load_alpha(
                    self.model,
                    model_name_or_path,
                    **{name: given[name] for name in _HUB if name in given},
                )

    return EntmaxTransformer


def _implementation(module: nn.Module) -> object:
    return getattr(module.config, "_attn_implementation", None)


def _outer_models(model: nn.Module) -> Iterator[PreTrainedModel]:
    """The outermost transformers models in a module."""
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            yield module


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of a module's transformers models and attention layers, each once."""
    modules = [module for module in model.modules() if hasattr(module, "config")]
    kept = [
        m.config
        for m in modules
        if isinstance(m, PreTrainedModel) or attention.ALPHA in vars(m.config)
    ]
    return list({id(config): config for config in kept}.values())


def _theta_of(name: str, found: dict[str, Tensor]) -> Tensor | None:
    """The theta of a module, whose name may have more or fewer prefixes than in the checkpoint."""
    if name + SUFFIX in found:
        return found[name + SUFFIX]
    matches = [
        key
        for key in found
        if key.endswith(f".{name}{SUFFIX}") or f".{name}{SUFFIX}".endswith(f".{key}")
    ]
    return found[matches[0]] if len(matches) == 1 else None


def _read_thetas(name_or_path: str, hub: dict[str, object]) -> dict[str, Tensor]:
    from transformers.utils import cached_file  # needs the hub's client

    options = {
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_gated_repo": True,
    }
    for name in WEIGHTS:
        if (file := cached_file(name_or_path, name, **options, **hub)) is None:
            continue
        if not name.endswith("index.json"):
            return _thetas_in(file)
        weights = json.loads(Path(file).read_text(encoding="utf-8"))["weight_map"]
        found: dict[str, Tensor] = {}
        for part in sorted({part for key, part in weights.items() if key.endswith(SUFFIX)}):
            found |= _thetas_in(cached_file(name_or_path, part, **hub))
        return found
    got = sorted(file.name for file in Path(name_or_path).glob("*"))[:3] or "no such file"
    raise OSError(
        f"{name_or_path} must hold one of {', '.join(WEIGHTS)}, got {got}; save the model there.",
    )


def _thetas_in(file: str) -> dict[str, Tensor]:
    if file.endswith(".safetensors"):
        from safetensors import safe_open  # comes with transformers

        with safe_open(file, framework="pt") as weights:
            return {key: weights.get_tensor(key) for key in weights.keys() if key.endswith(SUFFIX)}  # noqa: SIM118
    weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return {key: value for key, value in weights.items() if key.endswith(SUFFIX)}
