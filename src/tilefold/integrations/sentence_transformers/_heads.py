"""LM heads of a model: the poolings that read them, and their weights, adapters included."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.base.modules.module import Module
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor, nn

from tilefold.modules.fused_pooling import FusedPooling, Head

# Columns of LoRA updates are padded to a multiple of this, so that rows of the weight stay aligned.
_LOW_RANK_ALIGNMENT = 8


class SpladePair(NamedTuple):
    """A pooling on one route through the model, and the LM head that it reads.

    Attributes:
        transformer: the module before the pooling, which runs `head` last; ``None`` for a module of
            :mod:`tilefold.modules` that reads no logits.
        head: the LM head; ``None`` for such a module, too.
        pooling: the pooling.
        last: whether the pooling is the last module of the route.
    """

    transformer: Any
    head: Any
    pooling: Any
    last: bool = True


def find_pairs(model: nn.Module) -> list[SpladePair]:
    """Return the poolings of a SparseEncoder with the LM heads that they read.

    All routes of its Router modules are searched. A pair on several routes is listed once.

    Args:
        model: the SparseEncoder.

    Raises:
        ValueError: if there is none, or a pair cannot be fused.
    """
    pairs: dict[tuple[int, int], SpladePair] = {}
    unpooled: list[Transformer] = []
    for pipeline in pipelines_of(model):
        positions = _logit_readers(pipeline)
        route_pairs = _headless_pairs(pipeline)
        if positions:
            route_pairs.insert(0, _pair_at(pipeline, positions))
        else:
            unpooled += [module for module in pipeline if isinstance(module, Transformer)]
        for pair in route_pairs:
            # A pooling counts as the last module only if it is the last one on all of its routes.
            key = id(pair.transformer), id(pair.pooling)
            is_last_so_far = key not in pairs or pairs[key].last
            pairs[key] = pair._replace(last=pair.last and is_last_so_far)
    if not pairs:
        modules = [module for module in model.modules() if isinstance(module, Module)]
        names = ", ".join(type(module).__name__ for module in modules)
        raise ValueError(
            "model must contain a SpladePooling after a Transformer with an LM head, "
            f"got {names or 'no modules'}; models with a SparseAutoEncoder or only static "
            "embeddings have no such head and run as they are.",
        )
    _check_exclusive([pair for pair in pairs.values() if pair.head is not None], unpooled)
    return list(pairs.values())


def _logit_readers(pipeline: list[nn.Module]) -> list[int]:
    """Return the positions of poolings that read logits."""
    return [
        position
        for position, module in enumerate(pipeline)
        if isinstance(module, SpladePooling)
        or (isinstance(module, FusedPooling) and module.reads_logits)
    ]


def _headless_pairs(pipeline: list[nn.Module]) -> list[SpladePair]:
    """Return pairs without a head, of the modules that read no logits."""
    return [
        SpladePair(
            transformer=None,
            head=None,
            pooling=module,
            last=position == len(pipeline) - 1,
        )
        for position, module in enumerate(pipeline)
        if isinstance(module, FusedPooling) and not module.reads_logits
    ]


def is_multi_vector(model: object) -> bool:
    """Return whether ``model`` is a ``MultiVectorEncoder``."""
    return isinstance(model, MultiVectorEncoder)


def pipelines_of(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield every sequence of modules that an input may pass, over all routes of Routers.

    Args:
        model: a model, whose modules run one after another. A Router runs one of its routes.
    """
    # For each module of the model, the sequences of modules that may run in its place: one per
    # route of a Router.
    alternatives: list[list[list[nn.Module]]] = []
    for module in model._modules.values():
        if isinstance(module, Router):
            routes = module.sub_modules.values()
            alternatives.append([path for route in routes for path in pipelines_of(route)])
        elif isinstance(module, nn.Sequential):
            alternatives.append(list(pipelines_of(module)))
        elif module is not None:
            alternatives.append([[module]])
    for paths in product(*alternatives):
        yield list(chain.from_iterable(paths))


def _pair_at(pipeline: list[nn.Module], positions: list[int]) -> SpladePair:
    """Return the pair of a pooling that reads logits.

    Args:
        pipeline: the modules of a route.
        positions: positions of the poolings that read logits.

    Raises:
        ValueError: if there are several, if no Transformer precedes the pooling directly, or if the
            pooling's forward cannot be fused.
    """
    position = positions[0]
    transformer = pipeline[position - 1] if position > 0 else None
    if len(positions) > 1 or not isinstance(transformer, Transformer):
        names = " -> ".join(type(module).__name__ for module in pipeline)
        raise ValueError(
            "one pooling of logits must directly follow a Transformer, "
            f"got {names}; put nothing between.",
        )
    pooling = pipeline[position]
    if isinstance(pooling, FusedPooling):
        pooling.check_fusable()
    elif type(pooling).forward is not SpladePooling.forward or "forward" in vars(pooling):
        raise ValueError(
            "SpladePooling must run its own forward, "
            f"got {type(pooling).__name__} with another one; use the stock one.",
        )
    return SpladePair(
        transformer=transformer,
        head=_find_head(transformer.model),
        pooling=pooling,
        last=position == len(pipeline) - 1,
    )


def _check_exclusive(pairs: list[SpladePair], unpooled: list[Transformer]) -> None:
    """Check that fused heads feed poolings only, and that a pooling belongs to one head.

    A fused head returns hidden states, with which only its pooling can work.

    Args:
        pairs: the pairs with a head.
        unpooled: Transformers on routes without a pooling of logits.

    Raises:
        ValueError: if a head is also used without a pooling, or a pooling has several heads.
    """
    heads = {id(pair.head) for pair in pairs}
    for transformer in unpooled:
        getter = getattr(transformer.model, "get_output_embeddings", None)
        if callable(getter) and id(getter()) in heads:
            raise ValueError(
                "an LM head must feed SpladePooling on every route, "
                "got one without it; give it its own Transformer.",
            )
    for pair in pairs:
        kind = type(pair.pooling).__name__
        if any(other.pooling is pair.pooling and other.head is not pair.head for other in pairs):
            raise ValueError(
                f"a {kind} must belong to one LM head, got several; "
                f"give each route its own {kind}.",
            )


def _find_head(network: object) -> nn.Module:
    """Return the LM head (output embeddings) of a transformers model.

    Args:
        network: the model.

    Raises:
        ValueError: if it has none.
    """
    getter = getattr(network, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if isinstance(head, nn.Module):
        return head
    raise ValueError(
        "model must have an LM head before its SpladePooling, "
        f"got {type(network).__name__} without one; load it with "
        'Transformer(..., transformer_task="fill-mask") (or "text-generation"), backend "torch".',
    )


def check_head(head: Any) -> None:
    """Check that an LM head computes ``hidden @ weight.T + bias``, and return nothing.

    peft may have wrapped the head, as a module to save or with LoRA adapters.

    Args:
        head: the LM head.

    Raises:
        ValueError: for another forward on an instance, hooks, or a layer that is not supported.
    """
    layers = [head]
    if _is_peft(head, "ModulesToSaveWrapper"):
        layers += [head.original_module, *head.modules_to_save.values()]
    elif _is_peft(head, "Linear"):
        layers.append(head.base_layer)
    for layer in layers:
        name = type(layer).__name__
        if "forward" in vars(layer):
            raise ValueError(
                f"the LM head must run the forward of its class, got a {name} with another one on "
                "the instance (device_map and offloading do this); load it without device_map.",
            )
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise ValueError(
                f"the LM head must have no hooks, got a {name} with some; remove them first.",
            )
    base_linear(head)  # raises an error for a layer that is not supported


def head_operands(head: nn.Module, hidden: Tensor) -> Head:
    """Return operands with which one product computes the logits of an LM head.

    The logits are ``operands.hidden @ operands.weight.T + operands.bias``. A LoRA update becomes
    additional columns of both factors: ``W h + s B A drop(h)`` is ``[W | B]`` times
    ``[h ; s A drop(h)]``, with adapter weights A and B, scaling s and dropout. So the product is
    exact, and differentiable in all parameters.

    Args:
        head: an LM head that :func:`check_head` accepts.
        hidden: hidden states ``[..., D]``.
    """
    *wrappers, linear = _layers_of(head)
    for layer in wrappers:
        if _is_peft(layer, "Linear") and layer.disable_adapters and layer.merged:
            layer.unmerge()  # peft's forward does so, too, if adapters are disabled
    _check_weight_is_local(linear.weight, linear, hidden)
    operands = Head(hidden, linear.weight, linear.bias)
    for layer in reversed(wrappers):  # from the innermost adapter outwards
        if _is_peft(layer, "Linear") and not (layer.disable_adapters or layer.merged):
            operands = _with_lora(layer, hidden, operands)
    return operands


def base_linear(head: nn.Module) -> nn.Linear:
    """Return the ``nn.Linear`` inside a supported head."""
    linear: nn.Linear
    *_, linear = _layers_of(head)
    return linear


def _layers_of(head: nn.Module) -> Iterator[Any]:
    """Yield the active layers of a head, from the outermost wrapper of peft to the ``nn.Linear``.

    A ``ModulesToSaveWrapper`` holds the original head and a trained copy per adapter, of which one
    is active. A LoRA ``Linear`` adds adapters to its base layer.

    Args:
        head: the LM head.

    Raises:
        ValueError: for a layer that is not supported.
    """
    layer: Any = head
    while type(layer).forward is not nn.Linear.forward:
        yield layer
        if _is_peft(layer, "ModulesToSaveWrapper"):
            adapters = layer.active_adapters
            saved = layer.modules_to_save
            is_original = layer.disable_adapters or not adapters or adapters[0] not in saved
            layer = layer.original_module if is_original else saved[adapters[0]]
        elif _is_peft(layer, "Linear"):
            all_variants = getattr(layer, "lora_variant", {})
            variants = [name for name in layer.active_adapters if name in all_variants]
            if variants or layer.fan_in_fan_out:
                raise ValueError(
                    "a LoRA adapter on the LM head must be a plain one, got a variant (DoRA or "
                    f"alike) in {variants or layer.active_adapters}; merge it first, or leave the "
                    "LM head out of target_modules.",
                )
            layer = layer.base_layer
        else:
            raise ValueError(
                "the LM head must be a torch.nn.Linear, plain or in a LoRA or modules_to_save "
                f"wrapper of peft, got {type(layer).__module__}.{type(layer).__qualname__}; "
                "keep the LM head out of quantisation; merge it.",
            )
    yield layer


def _with_lora(layer: Any, hidden: Tensor, base: Head) -> Head:
    """Append the active LoRA updates of a layer to the operands of its base layer.

    An adapter of rank r adds r columns to the hidden states and to the weight: with down-projection
    A, up-projection B and scaling s, ``W h + s B A drop(h)`` is ``[W | B]`` times
    ``[h ; s A drop(h)]``. Columns of zeros keep rows of the weight aligned.

    Args:
        layer: peft's LoRA layer.
        hidden: its input ``[..., D]``.
        base: operands of the base layer.

    Returns:
        Operands of the layer with its adapters.
    """
    features = [hidden]  # columns of the new hidden states
    columns = [base.weight]  # columns of the new weight
    bias = base.bias
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        down = layer.lora_A[name]
        up = layer.lora_B[name]
        scaling = layer.scaling[name]
        dropped = layer.lora_dropout[name](hidden.to(down.weight.dtype))
        low_rank = down(dropped) * scaling  # [..., r]
        features.append(low_rank.to(hidden.dtype))
        columns.append(up.weight.to(base.weight.dtype))
        if up.bias is not None:
            update_bias = (up.bias * scaling).to(base.weight.dtype)
            bias = update_bias if bias is None else bias + update_bias
    total_rank = sum(column.size(1) for column in columns[1:])
    padding = -total_rank % _LOW_RANK_ALIGNMENT
    if padding > 0:
        features.append(hidden.new_zeros(*hidden.shape[:-1], padding))
        columns.append(base.weight.new_zeros(base.weight.size(0), padding))
    if len(columns) == 1:
        return base
    return Head(torch.cat(features, dim=-1), torch.cat(columns, dim=-1), bias)


_PEFT_MODULES = {"Linear": "peft.tuners.lora.layer", "ModulesToSaveWrapper": "peft.utils.other"}


def _is_peft(layer: nn.Module, name: str) -> bool:
    """Whether ``layer`` is PEFT's class ``name``.

    The class is compared by name, so that peft need not be installed.
    """
    kind = type(layer)
    return kind.__module__ == _PEFT_MODULES[name] and kind.__qualname__ == name


def _check_weight_is_local(weight: Tensor, head: nn.Linear, hidden: Tensor) -> None:
    """Raise an error for a sharded weight, or one on another device than the hidden states.

    The pooling reads the weight outside of its module's forward. FSDP gathers shards only for that.

    Args:
        weight: the weight as it is when the pooling reads it.
        head: the LM head, which knows the full size.
        hidden: the hidden states.
    """
    is_shard = weight.numel() < head.out_features * head.in_features
    if is_shard or type(weight).__name__ == "DTensor":
        raise RuntimeError(
            "the weight of the LM head must be whole when the pooling reads it, got a shard; "
            "apply FSDP to the whole model, to the head with reshard_after_forward=False "
            "(ZeRO-3: exclude it).",
        )
    if weight.device != hidden.device:
        raise RuntimeError(
            "the weight of the LM head must be on the device of the hidden states "
            f"({hidden.device}), got {weight.device}; torch.nn.DataParallel replicates modules "
            "without parameters: use torchrun, or show it one GPU.",
        )
