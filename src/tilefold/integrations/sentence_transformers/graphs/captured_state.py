"""Comparison of a model with its state at the capture of its CUDA graphs.

A replay reads weights from the addresses of the capture, and calls no Python. So it follows changes
of weights in place, but no other change of the model.
"""

from __future__ import annotations

from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from tilefold.integrations.sentence_transformers._pooling import StockPooling, fused_forwards

_training_of = itemgetter("training")
_ATTRIBUTES_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class ModelStructure:
    """Modules, parameters, buffers and hooks of a model.

    It is compared with the model at every step and every encoded query. Therefore attributes are
    read from the modules' dictionaries, and most loops run in C.

    Attributes:
        modules: the model and all modules in it.
        tensors: parameters and buffers; those that modules share occur several times.
    """

    def __init__(self, model: nn.Module) -> None:
        """Record the modules of a model, and the dictionaries of their members and hooks.

        Args:
            model: the model.
        """
        self.modules = list(model.modules())
        self.tensors = [tensor for module in self.modules for tensor in _tensors_of(module)]
        self._attributes = [vars(module) for module in self.modules]
        self._hooks = [hooks for module in self.modules for hooks in hooks_of(module)]
        members: list[dict[str, Any]] = []  # submodules, parameters and buffers of each module
        for module in self.modules:
            members += [module._modules, module._parameters, module._buffers]
        self._member_views = [dictionary.values() for dictionary in members if dictionary]
        self._members = list(chain.from_iterable(self._member_views))
        dictionaries: list[Any] = [*members, *self._hooks]
        # Most dictionaries are empty. Whether they still are is quicker to check than their sizes.
        self._empty = [dictionary for dictionary in dictionaries if not dictionary]
        self._filled = [dictionary for dictionary in dictionaries if dictionary]
        self._filled_sizes = list(map(len, self._filled))

    def has_same_members(self) -> bool:
        """Whether modules, parameters and buffers are the same objects, and hooks are as many."""
        return (
            not any(self._empty)
            and list(map(len, self._filled)) == self._filled_sizes
            and all(map(is_, chain.from_iterable(self._member_views), self._members))
        )

    def has_hooks_or_checkpointing(self) -> bool:
        """Whether a module has hooks, or recomputes activations in its backward pass."""
        return any(self._hooks) or any(
            attributes.get("gradient_checkpointing") for attributes in self._attributes
        )

    def training_modes(self) -> list[bool]:
        """Return whether each module is in training mode."""
        return list(map(_training_of, self._attributes))


class ModelState(ModelStructure):
    """Structure of a model with the values of attributes and configurations, and memory addresses.

    Attributes:
        splade: whether the model ends in stock SpladePooling modules.
    """

    def __init__(self, model: nn.Module) -> None:
        """Record the current state of a model.

        Args:
            model: the model, which has run a forward pass: some modules set attributes in the first
                one.
        """
        super().__init__(model)
        forwards = fused_forwards(model)
        self.splade = bool(forwards) and all(
            isinstance(forward.pooling, StockPooling) and forward.last for forward in forwards
        )
        # For each module, a function that reads its own attributes from their dictionary.
        self._readers: list[tuple[itemgetter[Any], dict[str, Any]]] = []
        for attributes in self._attributes:
            names = [name for name in attributes if name not in _ATTRIBUTES_OF_EVERY_MODULE]
            if names:
                self._readers.append((itemgetter(*names), attributes))
        self._values = [read(attributes) for read, attributes in self._readers]
        # A change of their sizes shows attributes that were added or removed.
        self._filled += self._attributes
        self._filled_sizes = list(map(len, self._filled))
        # Modules often share a configuration, so that each is recorded once.
        configs = {
            id(attributes["config"]): attributes["config"]
            for attributes in self._attributes
            if "config" in attributes
        }
        # The settings of each configuration, and a copy of them.
        self._configs = [
            (vars(config), dict(vars(config)))
            for config in configs.values()
            if hasattr(config, "__dict__")
        ]
        self._addresses = [tensor.data_ptr() for tensor in self.tensors]

    def has_same_memory(self) -> bool:
        """Whether every tensor has the address that it had.

        Otherwise a replay could read memory that was freed.
        """
        return list(map(Tensor.data_ptr, self.tensors)) == self._addresses

    def is_unchanged(self) -> bool:
        """Whether members, hooks, attributes and configurations equal the recorded ones.

        The addresses of tensors are not compared, see :meth:`has_same_memory`.
        """
        if not self.has_same_members():
            return False
        try:
            return (
                all(current == former for current, former in self._configs)
                and [read(attributes) for read, attributes in self._readers] == self._values
            )
        except (RuntimeError, ValueError, TypeError, KeyError):
            # An attribute is missing, or it is a tensor or an array, whose comparison is no bool.
            return False


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the dictionaries of forward and backward hooks of a module."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Return parameters and buffers of a module itself, not of its submodules."""
    members = (*module._parameters.values(), *module._buffers.values())
    return [member for member in members if member is not None]


def can_be_captured(model: nn.Module) -> bool:
    """Whether a forward pass of a model can be replayed as a CUDA graph without any loss.

    A replay runs no Python code. Hooks, compiled modules, offloaded and sharded parameters need it
    in every pass. Hooks of this package are allowed, since they only read the model.

    Args:
        model: the model.
    """
    for module in model.modules():
        hooks = [hook for hooks in hooks_of(module) for hook in hooks.values()]
        if any(not str(getattr(hook, "__module__", "")).startswith("tilefold.") for hook in hooks):
            return False
        if getattr(module, "_compiled_call_impl", None) is not None:
            return False
        if "_hf_hook" in vars(module):  # Hugging Face's accelerate offloads the module
            return False
        if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in _tensors_of(module)):
            return False
    return True
