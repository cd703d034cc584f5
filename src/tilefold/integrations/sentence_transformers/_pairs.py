"""Finds the pairs of a Transformer with an LM head and the SpladePooling after it in a SparseEncoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.base.modules.module import Module
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import nn

from tilefold.integrations.sentence_transformers._heads import find_head
from tilefold.modules.fused_pooling import FusedPooling


class SpladePair(NamedTuple):
    """One route through the model: ``transformer`` runs ``head`` last, ``pooling`` comes next.

    ``last`` says that nothing follows the pooling.
    """

    transformer: Any
    head: nn.Module
    pooling: Any
    last: bool = True


class Scorer(NamedTuple):
    """A module of :mod:`tilefold.modules` that reads no logits; ``last`` says that nothing follows it."""

    module: FusedPooling
    last: bool


def find_pairs(model: nn.Module) -> list[SpladePair]:
    """All distinct pairs of a SparseEncoder, over all routes of its Router modules.

    Raises:
        TypeError: if ``model`` is not a SparseEncoder.
        ValueError: if it has neither a pair nor a :class:`Scorer`, or a head that also feeds something other than its
            pooling.
    """

    if not isinstance(model, SparseEncoder):
        raise TypeError(
            f"model must be a sentence_transformers.SparseEncoder, got {type(model).__name__}; only SPLADE models "
            "have a vocabulary-wide LM head to fuse."
        )
    pairs: dict[tuple[int, int], SpladePair] = {}
    unpooled: list[Any] = []
    for pipeline in pipelines_of(model):
        poolings = [i for i, module in enumerate(pipeline) if _pools_logits(module)]
        if not poolings:
            unpooled += [module for module in pipeline if _is_transformer(module)]
            continue
        pair = _pair_at(pipeline, poolings)
        key = id(pair.transformer), id(pair.pooling)
        known = pairs.get(key, pair)
        pairs[key] = pair._replace(last=pair.last and known.last)
    if not pairs and not find_scorers(model):
        found = ", ".join(type(module).__name__ for module in model.modules() if _is_step(module))
        raise ValueError(
            f"model must contain a SpladePooling after a Transformer with an LM head, got {found or 'no modules'}; "
            "models with a SparseAutoEncoder or only static embeddings have no such head and run as they are."
        )
    _check_exclusive(list(pairs.values()), unpooled)
    return list(pairs.values())


def find_scorers(model: nn.Module) -> list[Scorer]:
    """All distinct modules of ours that read no logits, over all routes of a SparseEncoder."""
    found: dict[int, Scorer] = {}
    for pipeline in pipelines_of(model):
        for place, module in enumerate(pipeline, 1):
            if isinstance(module, FusedPooling) and not module.reads_logits:
                last = place == len(pipeline) and found.get(id(module), (module, True))[1]
                found[id(module)] = Scorer(module, last)
    return list(found.values())


def pipelines_of(model: nn.Module) -> Iterator[list[Any]]:
    """Every sequence of modules that an input of the model may pass."""
    return _pipelines(model._modules.values())


def _pipelines(modules: Iterable[nn.Module | None]) -> Iterator[list[Any]]:
    """Every sequence of plain modules that an input may pass."""

    steps: list[list[list[Any]]] = []
    for module in modules:
        if isinstance(module, Router):
            routes = module.sub_modules.values()
            steps.append([path for route in routes for path in _pipelines(route._modules.values())])
        elif isinstance(module, nn.Sequential):
            steps.append(list(_pipelines(module._modules.values())))
        else:
            steps.append([[module]])
    for choice in product(*steps):
        yield [module for path in choice for module in path]


def _pair_at(pipeline: list[Any], poolings: list[int]) -> SpladePair:

    position = poolings[0]
    before: Any = pipeline[position - 1] if position else None
    names = " -> ".join(type(module).__name__ for module in pipeline)
    if len(poolings) > 1 or not _is_transformer(before):
        raise ValueError(
            f"one pooling of logits must directly follow a Transformer, got {names}; a module between them would "
            "read logits that a fused head never computes."
        )
    pooling = pipeline[position]
    if isinstance(pooling, FusedPooling):
        pooling.check_fusable()
        return SpladePair(before, find_head(before.model), pooling, position == len(pipeline) - 1)
    if type(pooling).forward is not SpladePooling.forward or "forward" in vars(pooling):
        raise ValueError(
            f"SpladePooling must run its own forward, got {type(pooling).__name__} with another one; use the stock "
            "SpladePooling, or call tilefold.ops.lsr_head in your forward."
        )
    return SpladePair(before, find_head(before.model), pooling, position == len(pipeline) - 1)


def _check_exclusive(pairs: list[SpladePair], unpooled: list[Any]) -> None:
    """A fused head may feed poolings only, and a pooling must belong to one head."""
    heads = {id(pair.head) for pair in pairs}
    for transformer in unpooled:
        getter = getattr(transformer.model, "get_output_embeddings", None)
        if callable(getter) and id(getter()) in heads:
            raise ValueError(
                "an LM head must feed SpladePooling on every route, got a route that uses the same model without it; "
                "give that route its own Transformer."
            )
    for pair in pairs:
        kind = type(pair.pooling).__name__
        if any(other.pooling is pair.pooling and other.head is not pair.head for other in pairs):
            raise ValueError(
                f"a {kind} must belong to one LM head, got one that several models share; give each route its own "
                f"{kind}."
            )


def _pools_logits(module: object) -> bool:

    return isinstance(module, SpladePooling) or (isinstance(module, FusedPooling) and module.reads_logits)


def _is_transformer(module: object) -> bool:

    return isinstance(module, Transformer)


def _is_step(module: object) -> bool:

    return isinstance(module, Module)
