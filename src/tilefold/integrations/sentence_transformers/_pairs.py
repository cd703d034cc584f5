"""Finds the pairs of a Transformer with an LM head and the SpladePooling after it in a SparseEncoder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.base.modules.module import Module
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import nn

from tilefold.integrations.sentence_transformers._heads import find_head
from tilefold.modules.fused_pooling import FusedPooling


class SpladePair(NamedTuple):
    """One route through the model: ``transformer`` runs ``head`` last, ``pooling`` comes next.

    Both are None where a module of :mod:`tilefold.modules` reads no logits. ``last``: nothing follows the pooling.
    """

    transformer: Any
    head: Any
    pooling: Any
    last: bool = True


def find_pairs(model: nn.Module) -> list[SpladePair]:
    """All distinct pairs of a SparseEncoder, over all routes of its Router modules.

    Raises:
        ValueError: if there is none, or a head also feeds something other than its pooling.
    """
    pairs: dict[tuple[int, int], SpladePair] = {}
    unpooled: list[Any] = []
    for pipeline in pipelines_of(model):
        readers = [i for i, module in enumerate(pipeline) if _pools_logits(module)]
        found = [_pair_at(pipeline, readers)] if readers else []
        unpooled += [] if readers else [module for module in pipeline if isinstance(module, Transformer)]
        for place, module in enumerate(pipeline, 1):
            if isinstance(module, FusedPooling) and not module.reads_logits:
                found.append(SpladePair(None, None, module, place == len(pipeline)))
        for pair in found:
            key = id(pair.transformer), id(pair.pooling)
            pairs[key] = pair._replace(last=pair.last and pairs.get(key, pair).last)
    if not pairs:
        names = ", ".join(type(module).__name__ for module in model.modules() if isinstance(module, Module))
        raise ValueError(
            f"model must contain a SpladePooling after a Transformer with an LM head, got {names or 'no modules'}; "
            "models with a SparseAutoEncoder or only static embeddings have no such head and run as they are."
        )
    _check_exclusive([pair for pair in pairs.values() if pair.head is not None], unpooled)
    return list(pairs.values())


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
    if len(poolings) > 1 or not isinstance(before, Transformer):
        raise ValueError(
            f"one pooling of logits must directly follow a Transformer, got {names}; a module between them would "
            "read logits that a fused head never computes."
        )
    pooling = pipeline[position]
    if isinstance(pooling, FusedPooling):
        pooling.check_fusable()
    elif type(pooling).forward is not SpladePooling.forward or "forward" in vars(pooling):
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
