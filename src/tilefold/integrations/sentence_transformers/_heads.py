"""Finds the LM head of a model, and its matrix, adapters included."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tilefold.modules.fused_pooling import Head

_LOW_RANK_ALIGNMENT = 8  # extra columns are padded to this, so that rows of the weight stay aligned


def find_head(network: Any) -> nn.Module:
    """The output embeddings of a transformers model.

    Raises:
        ValueError: if it has none, with what to load instead.
    """
    getter = getattr(network, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if isinstance(head, nn.Module):
        return head
    raise ValueError(
        f"model must have an LM head before its SpladePooling, got {type(network).__name__} without output "
        'embeddings; load it with Transformer(..., transformer_task="fill-mask") (or "text-generation") and the '
        'backend "torch".'
    )


def check_head(head: nn.Module) -> None:
    """Raise an error for a head whose output is not ``hidden @ weight.T + bias``.

    Raises:
        ValueError: for quantised layers, unsupported adapters, hooks and replaced forwards.
    """
    layers = [head, *_layers_inside(head)]
    for layer in layers:
        if "forward" in vars(layer):
            raise ValueError(
                f"the LM head must run the forward of its class, got a {type(layer).__name__} whose forward was "
                "replaced on the instance (device_map and offloading do this); load the model without device_map."
            )
        if layer._forward_hooks or layer._forward_pre_hooks:
            raise ValueError(
                f"the LM head must have no hooks, got a {type(layer).__name__} with forward hooks, which would see "
                "hidden states in place of logits; remove them first."
            )
    for _ in layers_of(head):
        pass


def head_operands(head: nn.Module, hidden: Tensor) -> Head:
    """Write ``head(hidden)`` as one product ``hidden' @ weight'.T + bias'``, differentiable in every part.

    A LoRA update stays exact, dropout included: ``W h + s B A drop(h)`` is ``[W | B]`` times ``[h ; s A drop(h)]``.

    Args:
        head: ``nn.Linear``, or PEFT's LoRA or ``modules_to_save`` wrapper of one.
        hidden: ``[..., D]``.

    Raises:
        ValueError: for a layer or adapter kind that is not supported.
        RuntimeError: for a weight that is not complete here (sharded or replicated by a wrapper around the model).
    """
    *wrappers, linear = layers_of(head)
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
    *_, linear = layers_of(head)
    return linear


def layers_of(head: nn.Module) -> Iterator[Any]:
    """The layers that run in a head, from the outermost to its ``nn.Linear``.

    Raises:
        ValueError: for a layer or adapter kind that is not supported.
    """
    layer: Any = head
    while type(layer).forward is not nn.Linear.forward:
        yield layer
        if _is_peft(layer, "ModulesToSaveWrapper"):
            layer = _saved_module(layer)
        elif _is_peft(layer, "Linear"):
            variants = [name for name in layer.active_adapters if name in getattr(layer, "lora_variant", {})]
            if variants or layer.fan_in_fan_out:
                raise ValueError(
                    f"a LoRA adapter on the LM head must be a plain one, got a variant (DoRA or alike) in "
                    f"{variants or layer.active_adapters}; merge it first, or leave the LM head out of target_modules."
                )
            layer = layer.base_layer
        else:
            raise ValueError(
                f"the LM head must be a torch.nn.Linear, plain or in a LoRA or modules_to_save wrapper of peft, got "
                f"{type(layer).__module__}.{type(layer).__qualname__}; keep the LM head out of quantisation, and merge "
                "other adapters into it first."
            )
    yield layer


def _with_lora(layer: Any, hidden: Tensor, base: Head) -> Head:
    features, columns, bias = [hidden], [base.weight], base.bias
    for name in layer.active_adapters:
        if name not in layer.lora_A:
            continue
        down, up, scaling = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
        low_rank = down(layer.lora_dropout[name](hidden.to(down.weight.dtype))) * scaling  # [..., r]
        features.append(low_rank.to(hidden.dtype))
        columns.append(up.weight.to(base.weight.dtype))
        if up.bias is not None:
            shift = (up.bias * scaling).to(base.weight.dtype)
            bias = shift if bias is None else bias + shift
    if padding := -sum(column.size(1) for column in columns[1:]) % _LOW_RANK_ALIGNMENT:
        features.append(hidden.new_zeros(*hidden.shape[:-1], padding))
        columns.append(base.weight.new_zeros(base.weight.size(0), padding))
    if len(columns) == 1:
        return base
    return Head(torch.cat(features, dim=-1), torch.cat(columns, dim=-1), bias)


def _saved_module(wrapper: Any) -> nn.Module:
    """The module that PEFT's ``ModulesToSaveWrapper`` currently runs."""
    active = wrapper.active_adapters
    if wrapper.disable_adapters or not active or active[0] not in wrapper.modules_to_save:
        module: nn.Module = wrapper.original_module
    else:
        module = wrapper.modules_to_save[active[0]]
    return module


def _layers_inside(head: Any) -> list[nn.Module]:
    if _is_peft(head, "ModulesToSaveWrapper"):
        return [head.original_module, *head.modules_to_save.values()]
    return [head.base_layer] if _is_peft(head, "Linear") else []


def _is_peft(layer: nn.Module, name: str) -> bool:
    """Whether ``layer`` is PEFT's class ``name``; compared by name, so that peft need not be installed."""
    home = {"Linear": "peft.tuners.lora.layer", "ModulesToSaveWrapper": "peft.utils.other"}[name]
    return type(layer).__module__ == home and type(layer).__qualname__ == name


def _check_whole(weight: Any, head: Any, hidden: Tensor) -> None:
    """Raise an error for a sharded weight or one on another device: it is read outside of its module's forward."""
    if type(weight).__name__ == "DTensor" or weight.numel() < head.out_features * head.in_features:
        raise RuntimeError(
            "the weight of the LM head must be whole when the pooling reads it, got a shard of it; apply FSDP to the "
            "whole SparseEncoder, and to the LM head by itself only with reshard_after_forward=False (ZeRO-3: exclude "
            "it from sharding)."
        )
    if weight.device != hidden.device:
        raise RuntimeError(
            f"the weight of the LM head must be on the device of the hidden states ({hidden.device}), got "
            f"{weight.device}; torch.nn.DataParallel replicates modules without their parameters: start the training "
            "with torchrun (DistributedDataParallel), or show it one GPU (CUDA_VISIBLE_DEVICES=0)."
        )
