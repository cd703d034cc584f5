"""Learned alphas, and the switch of a model to entmax attention; models of sentence-transformers included."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from tilefold.integrations.transformers._alpha import DEFAULT, add_learned_alpha, checked_attention_modules, set_alpha
from tilefold.integrations.transformers._attention import MARK, NAME, register
from tilefold.integrations.transformers._checkpoint import (
    configs,
    implementation_of,
    load_learned_alpha,
    outer_models,
)
from tilefold.nn.entmax import EntmaxAlpha


def learn_alpha(model: nn.Module, initial: float | Sequence[float] = DEFAULT) -> list[EntmaxAlpha]:
    """Give every attention layer of ``model`` one learned alpha per head.

    The parameters join the model, its optimisers and its checkpoints as ``entmax_alpha.theta`` of every attention
    module: make the optimiser afterwards. The configuration then says that they are learned, and a model that is loaded
    without them raises instead of using others: see :func:`load_alpha`. In a sentence-transformers model the modules
    that hold transformers models become :class:`EntmaxTransformer`, which loads them by itself.

    Args:
        model: a transformers model, or any module with one inside.
        initial: alpha at the start, strictly between 1 and 2; one number, or one for every layer.

    Returns:
        The new modules, one per layer.

    Raises:
        ValueError: for a model without attention layers, or an ``initial`` outside (1, 2).
    """
    made = add_learned_alpha(model, initial)
    _let_reload(model)
    return made


def load_alpha(model: nn.Module, name_or_path: str | Path, **hub: Any) -> list[EntmaxAlpha]:
    """Load the learned alphas of a checkpoint into a model that ``from_pretrained`` made of it.

    transformers makes a stock model, reports ``entmax_alpha.theta`` as unexpected weights, and the model refuses to run
    until its alphas are loaded.

    Args:
        model: a transformers model, of the saved class or another one of its architecture.
        name_or_path: the folder, or the name on the Hugging Face hub, that it was loaded from.
        hub: where to look, as for ``from_pretrained``: ``subfolder``, ``revision``, ``token``, ``cache_dir``,
            ``local_files_only``.

    Returns:
        The new modules, one per attention layer.

    Raises:
        ValueError: if the checkpoint has no learned alphas, or those of other layers.
        OSError: if there is no checkpoint.
    """
    made = load_learned_alpha(model, name_or_path, hub)
    _let_reload(model)
    return made


def use_entmax(model: nn.Module, alpha: float | list[float] = DEFAULT, *, learn: bool = False) -> None:
    """Switch a model in memory, and its checkpoints, to alpha-entmax attention.

    ``config.json`` then holds ``"attn_implementation": "entmax"`` and the alphas. transformers follows it: a checkpoint
    loads with entmax attention where :func:`register` was called, and raises where it was not; it never runs softmax
    silently.

    Args:
        model: a transformers model, or any module with one inside, such as a sentence-transformers model.
        alpha: in [1, 2], one number or one per attention layer; 1 is softmax.
        learn: learn one alpha per head, starting there, see :func:`learn_alpha`.

    Raises:
        ValueError: for alphas that do not fit, or a model with attention that does not go by transformers' attention
            interface.
    """
    register()
    for inner in outer_models(model):
        inner.set_attn_implementation(NAME)
    modules = checked_attention_modules(model)
    stuck = [type(m).__name__ for m in modules if implementation_of(m) != NAME]
    if stuck:
        raise ValueError(f"model must support a choice of attention, got {sorted(set(stuck))}, which do not.")
    if learn:
        learn_alpha(model, alpha)
    else:
        set_alpha(model, alpha)
    for config in configs(model):
        setattr(config, MARK, NAME)


def _let_reload(model: nn.Module) -> None:
    """Make the modules of sentence-transformers that hold a transformers model able to load learned alphas."""
    if not any(type(part).__module__.startswith("sentence_transformers.") for part in model.modules()):
        return
    from sentence_transformers.base.modules import Transformer  # optional

    from tilefold.integrations.transformers.entmax_transformer import EntmaxTransformer  # needs it

    for part in model.modules():
        if type(part) is Transformer:
            part.__class__ = EntmaxTransformer
