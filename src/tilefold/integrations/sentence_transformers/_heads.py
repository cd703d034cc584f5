"""Finds pairs of a Transformer with an LM head and the pooling after it; the matrix of a head,
adapters included.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.base.modules.module import Module
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor, nn

from tilefold.modules.fused_pooling import FusedPooling, Head

_LOW_RANK_ALIGNMENT = 8  # extra columns are padded to this, so that rows of the weight stay aligned


class SpladePair(NamedTuple):
    """One route through the model: ``transformer`` runs ``head`` last, ``pooling`` comes next."""

    transformer: Any  # both are None where a module of :mod:`tilefold.modules` reads no logits
    head: Any
    pooling: Any
    last: bool = True  # nothing follows the pooling


def find_pairs(model: nn.Module) -> list[SpladePair]:
    """All distinct pairs of a SparseEncoder, over all routes of its Router modules."""
    pairs: dict[tuple[int, int], SpladePair] = {}
    unpooled: list[Transformer] = []
    for pipeline in pipelines_of(model):
        known = [
            (i, module)
            for i, module in enumerate(pipeline)
            if isinstance(module, SpladePooling | FusedPooling)
        ]
        readers = [i for i, module in known if getattr(module, "reads_logits", True)]
        found = [_pair_at(pipeline, readers)] if readers else []
        unpooled += (
            [] if readers else [module for module in pipeline if isinstance(module, Transformer)]
        )
        for place, module in enumerate(pipeline, 1):
            if isinstance(module, FusedPooling) and not module.reads_logits:
                found.append(SpladePair(None, None, module, place == len(pipeline)))
        for pair in found:
            key = id(pair.transformer), id(pair.pooling)
            pairs[key] = pair._replace(last=pair.last and pairs.get(key, pair).last)
    if not pairs:
        names = ", ".join(
            type(module).__name__ for module in model.modules() if isinstance(module, Module)
        )
        others = "models with a SparseAutoEncoder or only static embeddings have no such head and run as they are."
        expected = "a SpladePooling after a Transformer with an LM head"
        raise ValueError(f"model must contain {expected}, got {names or 'no modules'}; {others}")
    _check_exclusive([pair for pair in pairs.values() if pair.head is not None], unpooled)
    return list(pairs.values())


def is_multi_vector(model: object) -> bool:
    """Whether ``model`` is a ``MultiVectorEncoder``."""
    return isinstance(model, MultiVectorEncoder)


def pipelines_of(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Every sequence of plain modules that an input of the model may pass."""
    steps: list[list[list[nn.Module]]] = []
    for module in model._modules.values():
        if isinstance(module, Router):
            steps.append(
                [path for route in module.sub_modules.values() for path in pipelines_of(route)],
            )
        elif isinstance(module, nn.Sequential):
            steps.append(list(pipelines_of(module)))
        elif module is not None:
            steps.append([[module]])
    yield from ([module for path in choice for module in path] for choice in product(*steps))


def _pair_at(pipeline: list[nn.Module], poolings: list[int]) -> SpladePair:
    position = poolings[0]
    before = pipeline[position - 1] if position else None
    names = " -> ".join(type(module).__name__ for module in pipeline)
    if len(poolings) > 1 or not isinstance(before, Transformer):
        raise ValueError(
            f"one pooling of logits must directly follow a Transformer, got {names}; put nothing between.",
        )
    pooling = pipeline[position]
    if isinstance(pooling, FusedPooling):
        pooling.check_fusable()
    elif type(pooling).forward is not SpladePooling.forward or "forward" in vars(pooling):
        got = f"{type(pooling).__name__} with another one; use the stock one."
        raise ValueError(f"SpladePooling must run its own forward, got {got}")
    return SpladePair(before, _find_head(before.model), pooling, position == len(pipeline) - 1)


def _check_exclusive(pairs: list[SpladePair], unpooled: list[Transformer]) -> None:
    """A fused head may feed poolings only, and a pooling must belong to one head."""
    heads = {id(pair.head) for pair in pairs}
    for transformer in unpooled:
        getter = getattr(transformer.model, "get_output_embeddings", None)
        if callable(getter) and id(getter()) in heads:
            got = "one without it; give it its own Transformer."
            raise ValueError(f"an LM head must feed SpladePooling on every route, got {got}")
    for pair in pairs:
        kind = type(pair.pooling).__name__
        if any(other.pooling is pair.pooling and other.head is not pair.head for other in pairs):
            raise ValueError(
                f"a {kind} must belong to one LM head, got several; give each route its own {kind}.",
            )


def _find_head(network: object) -> nn.Module:
    """The output embeddings of a transformers model."""
    getter = getattr(network, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if isinstance(head, nn.Module):
        return head
    remedy = 'load it with Transformer(..., transformer_task="fill-mask") (or "text-generation"), backend "torch".'
    got = f"{type(network).__name__} without one"
    raise ValueError(f"model must have an LM head before its SpladePooling, got {got}; {remedy}")


def check_head(head: Any) -> None:
    """Raise an error for a head whose output is not ``hidden @ weight.T + bias``."""
    inside: list[nn.Module] = []
    if _is_peft(head, "ModulesToSaveWrapper"):
        inside = [head.original_module, *head.modules_to_save.values()]
    elif _is_peft(head, "Linear"):
        inside = [head.base_layer]
    for layer in [head, *inside]:
        if "forward" in vars(layer):
            got = f"a {type(layer).__name__} with another one on the instance (device_map and offloading do this)"
            raise ValueError(
                f"the LM head must run the forward of its class, got {got}; load it without device_map.",
            )
        if layer._forward_hooks or layer._forward_pre_hooks:
            got = f"a {type(layer).__name__} with some; remove them first."
            raise ValueError(f"the LM head must have no hooks, got {got}")
    base_linear(head)


def head_operands(head: nn.Module, hidden: Tensor) -> Head:
    """Write ``head(hidden)`` as one product ``hidden' @ weight'.T + bias'``, differentiable in
    every part.

    A LoRA update stays exact, dropout included: ``W h + s B A drop(h)`` is ``[W | B]`` times ``[h ;
    s A drop(h)]``.
    """
    *wrappers, linear = _layers_of(head)
    for layer in wrappers:
        if _is_peft(layer, "Linear") and layer.disable_adapters and layer.merged:
            layer.unmerge()  # as its own forward does
    _check_whole(linear.weight, linear, hidden)
    found = Head(hidden, linear.weight, linear.bias)
    for layer in reversed(wrappers):
        if _is_peft(layer, "Linear") and not (layer.disable_adapters or layer.merged):
            found = _with_lora(layer, hidden, found)
    return found


def base_linear(head: nn.Module) -> nn.Linear:
    """The ``nn.Linear`` inside a supported head."""
    linear: nn.Linear
    *_, linear = _layers_of(head)
    return linear


def _layers_of(head: nn.Module) -> Iterator[Any]:
    """The layers that run in a head, from the outermost to its ``nn.Linear``."""
    layer: Any = head
    while type(layer).forward is not nn.Linear.forward:
        yield layer
        if _is_peft(layer, "ModulesToSaveWrapper"):
            active, saved = layer.active_adapters, layer.modules_to_save
            stock = layer.disable_adapters or not active or active[0] not in saved
            layer = layer.original_module if stock else saved[active[0]]
        elif _is_peft(layer, "Linear"):
            variants = [
                name for name in layer.active_adapters if name in getattr(layer, "lora_variant", {})
            ]
            if variants or layer.fan_in_fan_out:
                got = f"a variant (DoRA or alike) in {variants or layer.active_adapters}"
                remedy = "merge it first, or leave the LM head out of target_modules."
                raise ValueError(
                    f"a LoRA adapter on the LM head must be a plain one, got {got}; {remedy}",
                )
            layer = layer.base_layer
        else:
            got = f"{type(layer).__module__}.{type(layer).__qualname__}"
            remedy = "keep the LM head out of quantisation; merge it."
            expected = "a torch.nn.Linear, plain or in a LoRA or modules_to_save wrapper of peft"
            raise ValueError(f"the LM head must be {expected}, got {got}; {remedy}")
    yield layer


def _with_lora(layer: Any, hidden: Tensor, base: Head) -> Head:
    features, columns, bias = [hidden], [base.weight], base.bias
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        down, up, scaling = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
        low_rank = (
            down(layer.lora_dropout[name](hidden.to(down.weight.dtype))) * scaling
        )  # [..., r]
        features.append(low_rank.to(hidden.dtype))
        columns.append(up.weight.to(base.weight.dtype))
        if up.bias is not None:
            shift = (up.bias * scaling).to(base.weight.dtype)
            bias = shift if bias is None else bias + shift
    if padding := -sum(column.size(1) for column in columns[1:]) % _LOW_RANK_ALIGNMENT:
        features.append(hidden.new_zeros(*hidden.shape[:-1], padding))
        columns.append(base.weight.new_zeros(base.weight.size(0), padding))
    return (
        base
        if len(columns) == 1
        else Head(torch.cat(features, dim=-1), torch.cat(columns, dim=-1), bias)
    )


def _is_peft(layer: nn.Module, name: str) -> bool:
    """Whether ``layer`` is PEFT's class ``name``; compared by name, so that peft need not be
    installed.
    """
    home = {"Linear": "peft.tuners.lora.layer", "ModulesToSaveWrapper": "peft.utils.other"}[name]
    return type(layer).__module__ == home and type(layer).__qualname__ == name


def _check_whole(weight: Tensor, head: nn.Linear, hidden: Tensor) -> None:
    """Raise an error for a sharded weight or one on another device: it is read outside of its
    module's forward.
    """
    if type(weight).__name__ == "DTensor" or weight.numel() < head.out_features * head.in_features:
        remedy = "apply FSDP to the whole model, to the head with reshard_after_forward=False (ZeRO-3: exclude it)."
        raise RuntimeError(
            f"the weight of the LM head must be whole when the pooling reads it, got a shard; {remedy}",
        )
    if weight.device != hidden.device:
        remedy = "torch.nn.DataParallel replicates modules without parameters: use torchrun, or show it one GPU."
        devices = f"the device of the hidden states ({hidden.device}), got {weight.device}"
        raise RuntimeError(f"the weight of the LM head must be on {devices}; {remedy}")
