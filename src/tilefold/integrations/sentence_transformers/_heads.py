"""Poolings of a model that can be fused, and the LM heads that they read, with LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from sentence_transformers import MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Router, Transformer
from sentence_transformers.base.modules.module import Module
from sentence_transformers.sparse_encoder.modules import SpladePooling
from torch import Tensor, nn

from tilefold.modules.fused_pooling import FusedPooling, Head

# LoRA updates are padded to a multiple of this number of columns, so that the rows of the weight
# stay aligned.
_LOW_RANK_ALIGNMENT = 8


class FusablePooling(NamedTuple):
    """A pooling on a route through the model, with the LM head that it reads, if any.

    Attributes:
        pooling: the pooling.
        transformer: the module before the pooling, whose last operation is the LM head; ``None`` if
            the pooling reads no logits, as some of :mod:`tilefold.modules`.
        head: the LM head; ``None`` if the pooling reads no logits.
        is_last: whether the pooling is the last module of all its routes.
    """

    pooling: Any
    transformer: Any
    head: Any
    is_last: bool = True


def find_fusable_poolings(model: nn.Module) -> list[FusablePooling]:
    """Return the poolings of a SparseEncoder that can be fused, each with its LM head, if any.

    A model with Routers has several routes: sequences of modules through which a text may pass. A
    pooling and head on several routes are listed once.

    Args:
        model: the SparseEncoder.

    Raises:
        ValueError: if there is no pooling, or one cannot be fused.
    """
    poolings: list[FusablePooling] = []
    unpooled: list[Transformer] = []  # on routes without a pooling of logits
    for pipeline in pipelines_of(model):
        positions = _positions_of_logit_readers(pipeline)
        if positions:
            poolings.append(_find_logit_pooling(pipeline, positions))
        else:
            unpooled += [module for module in pipeline if isinstance(module, Transformer)]
        poolings += _find_poolings_without_head(pipeline)
    if not poolings:
        modules = [module for module in model.modules() if isinstance(module, Module)]
        names = ", ".join(type(module).__name__ for module in modules)
        raise ValueError(
            "model must contain a SpladePooling after a Transformer with an LM head, "
            f"got {names or 'no modules'}; models with a SparseAutoEncoder or only static "
            "embeddings have no such head and run as they are.",
        )
    poolings = _merge_routes(poolings)
    with_head = [pooling for pooling in poolings if pooling.head is not None]
    _check_exclusive(with_head, unpooled)
    return poolings


def _merge_routes(poolings: list[FusablePooling]) -> list[FusablePooling]:
    """Merge the entries of poolings that occur on several routes.

    Args:
        poolings: one entry per pooling and route.
    """
    merged: dict[tuple[int, int], FusablePooling] = {}
    for entry in poolings:
        key = id(entry.transformer), id(entry.pooling)
        is_last_so_far = key not in merged or merged[key].is_last
        merged[key] = entry._replace(is_last=entry.is_last and is_last_so_far)
    return list(merged.values())


def _positions_of_logit_readers(pipeline: list[nn.Module]) -> list[int]:
    """Return the positions of the poolings that read logits."""
    return [
        position
        for position, module in enumerate(pipeline)
        if isinstance(module, SpladePooling)
        or (isinstance(module, FusedPooling) and module.reads_logits)
    ]


def _find_poolings_without_head(pipeline: list[nn.Module]) -> list[FusablePooling]:
    """Return the tilefold poolings of a route that read no logits of an LM head.

    ``accelerate`` changes only the layout of their scores.

    Args:
        pipeline: the modules of the route, in the order in which a text passes through them.
    """
    return [
        FusablePooling(
            pooling=module,
            transformer=None,
            head=None,
            is_last=position == len(pipeline) - 1,
        )
        for position, module in enumerate(pipeline)
        if isinstance(module, FusedPooling) and not module.reads_logits
    ]


def is_multi_vector(model: object) -> bool:
    """Return whether ``model`` is a ``MultiVectorEncoder``."""
    return isinstance(model, MultiVectorEncoder)


def is_dense(model: object) -> bool:
    """Return whether ``model`` is a ``SentenceTransformer``, which returns one vector per text."""
    return isinstance(model, SentenceTransformer)


def pipelines_of(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield every sequence of modules through which an input may pass, over all routes of Routers.

    Args:
        model: a model whose modules run one after another. A Router runs one of its routes.
    """
    # For each module of the model, the sequences of modules that may run in its place: one sequence
    # per route of a Router, and one of the module alone otherwise.
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


def _find_logit_pooling(pipeline: list[nn.Module], positions: list[int]) -> FusablePooling:
    """Return the pooling of a sequence of modules that reads logits, with the LM head before it.

    Args:
        pipeline: the modules through which a text passes.
        positions: the positions of the poolings that read logits, of which there must be one.

    Raises:
        ValueError: if there are several, if no Transformer directly precedes the pooling, or if the
            pooling's forward cannot be fused.
    """
    position = positions[0]
    transformer = pipeline[position - 1] if position > 0 else None
    if len(positions) > 1 or not isinstance(transformer, Transformer):
        names = " -> ".join(type(module).__name__ for module in pipeline)
        raise ValueError(
            "one pooling of logits must directly follow a Transformer, with nothing in between, "
            f"got {names}; remove the other modules.",
        )
    pooling = pipeline[position]
    if isinstance(pooling, FusedPooling):
        pooling.check_fusable()
    elif type(pooling).forward is not SpladePooling.forward or "forward" in vars(pooling):
        raise ValueError(
            "SpladePooling must run its own forward, "
            f"got {type(pooling).__name__} with another one; use the stock one.",
        )
    return FusablePooling(
        pooling=pooling,
        transformer=transformer,
        head=_find_head(transformer.model),
        is_last=position == len(pipeline) - 1,
    )


def _check_exclusive(poolings: list[FusablePooling], unpooled: list[Transformer]) -> None:
    """Check that a pooling follows every use of an LM head that is to be fused, and has no other.

    A fused head returns hidden states instead of logits, which only its pooling can read.

    Args:
        poolings: the poolings with an LM head.
        unpooled: the Transformers on routes (sequences of modules) without a pooling of logits.

    Raises:
        ValueError: if a head is also used without a pooling, or a pooling has several heads.
    """
    heads = {id(pooling.head) for pooling in poolings}
    for transformer in unpooled:
        getter = getattr(transformer.model, "get_output_embeddings", None)
        if callable(getter) and id(getter()) in heads:
            raise ValueError(
                "an LM head must feed a SpladePooling on every route, but one route has no "
                "SpladePooling; give that route its own Transformer.",
            )
    head_of_pooling: dict[int, nn.Module] = {}
    for entry in poolings:
        first_head = head_of_pooling.setdefault(id(entry.pooling), entry.head)
        if first_head is not entry.head:
            name = type(entry.pooling).__name__
            raise ValueError(
                f"a {name} must belong to one LM head, got several; "
                f"give each route its own {name}.",
            )


def _find_head(network: object) -> nn.Module:
    """Return the LM head (output embeddings) of a transformers model.

    Args:
        network: the model.

    Raises:
        ValueError: if it has no LM head.
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
    """Check that an LM head computes ``hidden @ weight.T + bias``.

    peft may have wrapped the head, as a module to save or with LoRA adapters.

    Args:
        head: the LM head.

    Raises:
        ValueError: if a layer's forward was replaced on the instance, if it has hooks, or if the
            layer is not supported.
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
    base_linear(head)  # raises an error if a layer is not supported


def head_operands(head: nn.Module, hidden: Tensor) -> Head:
    """Return two factors whose product is the output of an LM head, LoRA adapters included.

    The logits are ``operands.hidden @ operands.weight.T + operands.bias``. A LoRA update becomes
    additional columns of both factors: ``W h + s B A drop(h)`` is ``[W | B]`` times
    ``[h ; s A drop(h)]``, with adapter weights A and B, scaling s and dropout. So the product is
    exact, and differentiable in all parameters.

    Args:
        head: an LM head that :func:`check_head` accepts.
        hidden: the hidden states ``[..., D]``.
    """
    *wrappers, linear = _layers_of(head)  # the outermost wrapper comes first
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

    Args:
        head: the LM head.

    Raises:
        ValueError: if a layer is not supported.
    """
    layer: Any = head
    while type(layer).forward is not nn.Linear.forward:  # until the plain layer inside
        yield layer
        if _is_peft(layer, "ModulesToSaveWrapper"):
            layer = _find_active_module(layer)
        elif _is_peft(layer, "Linear"):
            _check_lora_is_plain(layer)
            layer = layer.base_layer
        else:
            raise ValueError(
                "the LM head must be a torch.nn.Linear, plain or in a LoRA or modules_to_save "
                f"wrapper of peft, got {type(layer).__module__}.{type(layer).__qualname__}; "
                "merge other adapters, and exclude the LM head from quantisation.",
            )
    yield layer


def _find_active_module(wrapper: Any) -> Any:
    """Return the module that runs in peft's ``ModulesToSaveWrapper``.

    The wrapper holds the original module and a trained copy for each adapter.

    Args:
        wrapper: the wrapper.
    """
    adapters = wrapper.active_adapters
    copies = wrapper.modules_to_save
    if wrapper.disable_adapters or not adapters or adapters[0] not in copies:
        return wrapper.original_module
    return copies[adapters[0]]


def _check_lora_is_plain(layer: Any) -> None:
    """Check that a LoRA layer of peft computes nothing but ``W h + s B A drop(h)``.

    Args:
        layer: peft's LoRA layer.

    Raises:
        ValueError: if an active adapter is a variant such as DoRA, or the weight is transposed.
    """
    all_variants = getattr(layer, "lora_variant", {})
    variants = [name for name in layer.active_adapters if name in all_variants]
    if variants or layer.fan_in_fan_out:
        raise ValueError(
            "a LoRA adapter on the LM head must be a plain one, got a variant (such as DoRA) in "
            f"{variants or layer.active_adapters}; merge it first, or leave the LM head out of "
            "target_modules.",
        )


def _with_lora(layer: Any, hidden: Tensor, base: Head) -> Head:
    """Append the active LoRA updates of a layer to the operands of its base layer.

    An adapter of rank r adds r columns to the hidden states and to the weight: with down-projection
    A, up-projection B and scaling s, ``W h + s B A drop(h)`` is ``[W | B]`` times
    ``[h ; s A drop(h)]``. Zero columns pad the rank for alignment.

    Args:
        layer: peft's LoRA layer.
        hidden: the input of the layer, ``[..., D]``.
        base: the operands of the base layer.

    Returns:
        The operands of the layer with its adapters.
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
    if len(columns) == 1:  # no active adapter
        return base
    total_rank = sum(update.size(1) for update in columns[1:])
    padding = -total_rank % _LOW_RANK_ALIGNMENT
    if padding > 0:
        features.append(hidden.new_zeros(*hidden.shape[:-1], padding))
        columns.append(base.weight.new_zeros(base.weight.size(0), padding))
    return Head(torch.cat(features, dim=-1), torch.cat(columns, dim=-1), bias)


_PEFT_MODULES = {"Linear": "peft.tuners.lora.layer", "ModulesToSaveWrapper": "peft.utils.other"}


def _is_peft(layer: nn.Module, name: str) -> bool:
    """Whether the class of a layer is the class of peft with this name.

    Names are compared, so that peft need not be installed.
    """
    layer_class = type(layer)
    return layer_class.__module__ == _PEFT_MODULES[name] and layer_class.__qualname__ == name


def _check_weight_is_local(weight: Tensor, head: nn.Linear, hidden: Tensor) -> None:
    """Raise an error if a weight is sharded, or on another device than the hidden states.

    The pooling reads the weight outside of its module's forward, and FSDP gathers shards only
    during that forward.

    Args:
        weight: the weight as it is when the pooling reads it.
        head: the LM head, whose sizes are those of the whole weight.
        hidden: the hidden states.
    """
    is_shard = weight.numel() < head.out_features * head.in_features
    if is_shard or type(weight).__name__ == "DTensor":
        raise RuntimeError(
            "the weight of the LM head must be whole when the pooling reads it, got a shard; with "
            "FSDP, shard the whole model, or the head with reshard_after_forward=False; with "
            "ZeRO-3, exclude the head.",
        )
    if weight.device != hidden.device:
        raise RuntimeError(
            "the weight of the LM head must be on the device of the hidden states "
            f"({hidden.device}), got {weight.device}; torch.nn.DataParallel replicates modules "
            "without parameters: use torchrun, or make only one GPU visible.",
        )
