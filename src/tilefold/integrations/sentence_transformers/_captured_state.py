"""The state of a model that its CUDA graphs were captured with and cannot follow."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter, methodcaller
from typing import Any

from torch import Tensor, nn

from tilefold.integrations.sentence_transformers._pooling import StockPooling, fused_forwards


class State:
    """Modules, tensors, hooks and attributes of a model, to be compared with what they are later."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        fused = fused_forwards(model)
        self.splade = bool(fused) and all(isinstance(each.pooling, StockPooling) and each.last for each in fused)
        self._vars = [vars(module) for module in self.modules]
        named = [[name for name in values if name not in _OF_EVERY_MODULE] for values in self._vars]
        self._own = [(itemgetter(*names), values) for names, values in zip(named, self._vars, strict=True) if names]
        self._values = [get(values) for get, values in self._own]
        parts = [(module._modules, module._parameters, module._buffers) for module in self.modules]
        self._parts = [part for found in parts for part in found if part]
        self._kept = list(chain.from_iterable(part.values() for part in self._parts))  # so that their ids are theirs
        self._ids = list(map(id, self._kept))
        self._sized = [*self._vars, *(part for found in parts for part in found)]
        self._sized += [hooks for module in self.modules for hooks in hooks_of(module)]
        self._sizes = list(map(len, self._sized))
        configs = {id(values["config"]): values["config"] for values in self._vars if "config" in values}
        self._configs = [(vars(each), dict(vars(each))) for each in configs.values() if hasattr(each, "__dict__")]
        self._tensors = [tensor for module in self.modules for tensor in _tensors_of(module)]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]

    def in_place(self) -> bool:
        """Whether every tensor has the memory that it had; what a graph reads may be gone else."""
        return list(map(Tensor.data_ptr, self._tensors)) == self._addresses

    def trains(self) -> bool:
        """Whether a module is in training mode."""
        return any(map(_TRAINING, self._vars))

    def holds(self) -> bool:
        """Whether modules, parameters, hooks, attributes and settings are those that they were."""
        if list(map(len, self._sized)) != self._sizes:
            return False
        if list(map(id, chain.from_iterable(map(_VALUES, self._parts)))) != self._ids:
            return False
        try:
            return (
                all(now == then for now, then in self._configs)
                and [get(values) for get, values in self._own] == self._values
            )
        except (RuntimeError, ValueError, TypeError, KeyError):  # of tensors, which compare entry by entry; or it went
            return False


_VALUES = methodcaller("values")
_TRAINING = itemgetter("training")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _tensors_of(module: nn.Module) -> list[Tensor]:
    every = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in every if tensor is not None]


def may_be_captured(model: nn.Module) -> bool:
    """Whether a replay runs all that a forward of the model runs; hooks of ours look at the model alone."""
    for module in model.modules():
        hooks = [hook for found in hooks_of(module) for hook in found.values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("tilefold.") for hook in hooks):
            return False
        if getattr(module, "_compiled_call_impl", None) is not None or "_hf_hook" in vars(module):
            return False
        if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in _tensors_of(module)):
            return False
    return True
