"""The state of a model that its CUDA graphs were captured with and cannot follow."""

from __future__ import annotations

from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from tilefold.integrations.sentence_transformers._pooling import StockPooling, fused_forwards


class Structure:
    """Modules, tensors and hooks of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self._vars = [vars(module) for module in self.modules]
        parts: list[Any] = [
            part
            for each in self.modules
            for part in (each._modules, each._parameters, each._buffers)
        ]
        self._views = [part.values() for part in parts if part]
        self._kept = list(chain.from_iterable(self._views))
        self._hooks = [hooks for module in self.modules for hooks in hooks_of(module)]
        self._empty = [each for each in (*parts, *self._hooks) if not each]  # most of them
        self._filled = [each for each in (*parts, *self._hooks) if each]
        self._sizes = list(map(len, self._filled))
        self.tensors = [tensor for module in self.modules for tensor in _tensors_of(module)]

    def stands(self) -> bool:
        """Whether modules, parameters and buffers are those that they were, and hooks as many."""
        return (
            not any(self._empty)
            and list(map(len, self._filled)) == self._sizes
            and all(map(is_, chain.from_iterable(self._views), self._kept))
        )

    def runs_more(self) -> bool:
        """Whether a module has hooks, or computes again what it did not keep."""
        return any(self._hooks) or any(
            values.get("gradient_checkpointing") for values in self._vars
        )

    def modes(self) -> list[bool]:
        """Whether each module is in training mode."""
        return list(map(_TRAINING, self._vars))


class State(Structure):
    """Attributes besides, to be compared with what they are later."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        fused = fused_forwards(model)
        self.splade = bool(fused) and all(
            isinstance(each.pooling, StockPooling) and each.last for each in fused
        )
        named = [[name for name in values if name not in _OF_EVERY_MODULE] for values in self._vars]
        self._own = [
            (itemgetter(*names), values)
            for names, values in zip(named, self._vars, strict=True)
            if names
        ]
        self._values = [get(values) for get, values in self._own]
        self._filled += self._vars
        self._sizes = list(map(len, self._filled))
        configs = {
            id(values["config"]): values["config"] for values in self._vars if "config" in values
        }
        self._configs = [
            (vars(each), dict(vars(each))) for each in configs.values() if hasattr(each, "__dict__")
        ]
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]

    def in_place(self) -> bool:
        """Whether every tensor has the memory that it had; what a graph reads may be gone else."""
        return list(map(Tensor.data_ptr, self.tensors)) == self._addresses

    def holds(self) -> bool:
        """Whether modules, parameters, hooks, attributes and settings are those that they were."""
        if not self.stands():
            return False
        try:
            return (
                all(now == then for now, then in self._configs)
                and [get(values) for get, values in self._own] == self._values
            )
        except (
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
        ):  # of tensors, which compare entry by entry; or it went
            return False


_TRAINING = itemgetter("training")
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the dictionaries of forward and backward hooks of a module."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None]


def may_be_captured(model: nn.Module) -> bool:
    """Whether a replay runs all that a forward of the model runs; hooks of ours look at the model
    alone.
    """
    for module in model.modules():
        hooks = [hook for found in hooks_of(module) for hook in found.values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("tilefold.") for hook in hooks):
            return False
        if getattr(module, "_compiled_call_impl", None) is not None or "_hf_hook" in vars(module):
            return False
        if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in _tensors_of(module)):
            return False
    return True
