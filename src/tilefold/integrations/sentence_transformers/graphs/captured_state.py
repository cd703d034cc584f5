"""Comparison of a model with its state at the capture of its CUDA graphs.

A replay reads the weights from their addresses at the capture and runs no Python code. So it sees
weights that are changed in place, but no other change of the model.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from itertools import chain
from operator import is_, itemgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from tilefold.integrations.sentence_transformers._pooling import StockPooling, fused_forwards

_training_of = itemgetter("training")
_ATTRIBUTES_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class _DictionarySizes:
    """Sizes of dictionaries, to detect entries that are added or removed later."""

    def __init__(self, dictionaries: Sequence[Sized]) -> None:
        # Most dictionaries are empty, and any() over these is faster than comparing their sizes.
        self._empty = [dictionary for dictionary in dictionaries if not dictionary]
        self._filled = [dictionary for dictionary in dictionaries if dictionary]
        self._filled_sizes = list(map(len, self._filled))

    def are_unchanged(self) -> bool:
        """Whether every dictionary has its recorded size."""
        return not any(self._empty) and list(map(len, self._filled)) == self._filled_sizes


class ModelStructure:
    """Modules, parameters, buffers and hooks of a model, to detect later changes of them.

    The comparison runs before every training step and for every encoded query. Therefore it reads
    the modules' dictionaries, and its loops run in C.

    Attributes:
        modules: the model and all modules in it.
        tensors: all parameters and buffers. One that several modules share occurs several times.
    """

    def __init__(self, model: nn.Module) -> None:
        """Record the current structure of a model.

        Args:
            model: the model.
        """
        self.modules = list(model.modules())
        self.tensors = [tensor for module in self.modules for tensor in _tensors_of(module)]
        self._attributes = [vars(module) for module in self.modules]
        self._hooks = [hooks for module in self.modules for hooks in hooks_of(module)]
        members: list[dict[str, Any]] = []
        for module in self.modules:
            members += [module._modules, module._parameters, module._buffers]
        self._sizes = _DictionarySizes([*members, *self._hooks])
        # The views show the members that the modules have later. The list keeps the recorded ones.
        self._member_views = [dictionary.values() for dictionary in members if dictionary]
        self._recorded_members = list(chain.from_iterable(self._member_views))

    def has_same_members(self) -> bool:
        """Whether the model has the recorded members and the recorded number of hooks.

        Members are modules, parameters and buffers. They are compared by identity.
        """
        return self._sizes.are_unchanged() and all(
            map(is_, chain.from_iterable(self._member_views), self._recorded_members)
        )

    def has_hooks_or_checkpointing(self) -> bool:
        """Whether a module has hooks, or recomputes activations in its backward pass."""
        return any(self._hooks) or any(
            attributes.get("gradient_checkpointing") for attributes in self._attributes
        )

    def training_modes(self) -> list[bool]:
        """Return whether each module is in training mode."""
        return list(map(_training_of, self._attributes))


class _AttributeReader(NamedTuple):
    """Reads the attributes of a module that ``nn.Module`` itself does not define.

    Attributes:
        read: returns the values of these attributes from a dictionary.
        attributes: the dictionary, ``vars`` of the module.
    """

    read: itemgetter[Any]
    attributes: dict[str, Any]


class _ConfigRecord(NamedTuple):
    """Settings of a configuration.

    Attributes:
        current: ``vars`` of the configuration, which shows later changes.
        recorded: a copy of it.
    """

    current: dict[str, Any]
    recorded: dict[str, Any]


class ModelState(ModelStructure):
    """Structure, attributes, configurations and memory addresses of a model.

    A graph must be captured again when any of them differs from the state at its capture.

    Attributes:
        ends_in_splade: whether the last modules are SpladePooling modules of sentence-transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        """Record the current state of a model.

        Args:
            model: the model. It must have run a forward pass, because some modules set attributes
                in the first one.
        """
        super().__init__(model)
        forwards = fused_forwards(model)
        self.ends_in_splade = bool(forwards) and all(
            isinstance(forward.pooling, StockPooling) and forward.is_last for forward in forwards
        )
        self._attribute_counts = _DictionarySizes(self._attributes)
        self._attribute_readers = self._make_attribute_readers()
        self._recorded_attributes = self._read_attributes()
        self._configs = self._record_configs()
        self._recorded_addresses = [tensor.data_ptr() for tensor in self.tensors]

    def _make_attribute_readers(self) -> list[_AttributeReader]:
        """Return a reader for each module that has attributes of its own."""
        readers = []
        for attributes in self._attributes:
            names = [name for name in attributes if name not in _ATTRIBUTES_OF_EVERY_MODULE]
            if names:
                readers.append(_AttributeReader(itemgetter(*names), attributes))
        return readers

    def _read_attributes(self) -> list[Any]:
        """Return the current values of the attributes of all modules.

        Raises:
            KeyError: if an attribute was removed.
        """
        return [read(attributes) for read, attributes in self._attribute_readers]

    def _record_configs(self) -> list[_ConfigRecord]:
        """Record each configuration once, since modules often share one."""
        configs = {
            id(attributes["config"]): attributes["config"]
            for attributes in self._attributes
            if "config" in attributes
        }
        return [
            _ConfigRecord(current=vars(config), recorded=dict(vars(config)))
            for config in configs.values()
            if hasattr(config, "__dict__")
        ]

    def has_same_memory(self) -> bool:
        """Whether every tensor still has its recorded address.

        Otherwise a replay could read memory that was freed.
        """
        return list(map(Tensor.data_ptr, self.tensors)) == self._recorded_addresses

    def is_unchanged(self) -> bool:
        """Whether the structure, the attributes and the configurations equal the recorded ones.

        The addresses of tensors are not compared; :meth:`has_same_memory` does that.
        """
        if not self.has_same_members() or not self._attribute_counts.are_unchanged():
            return False
        try:
            have_same_settings = all(config.current == config.recorded for config in self._configs)
            return have_same_settings and self._read_attributes() == self._recorded_attributes
        except (RuntimeError, ValueError, TypeError, KeyError):
            # An attribute was removed, or a tensor or an array was replaced by another one, whose
            # comparison gives no bool.
            return False


def hooks_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the dictionaries of a module's forward and backward hooks."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def _tensors_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module, without those of its submodules."""
    members = (*module._parameters.values(), *module._buffers.values())
    return [member for member in members if member is not None]


def can_be_captured(model: nn.Module) -> bool:
    """Whether a CUDA graph can replay a forward pass of a model with the same results.

    A replay runs no Python code. Hooks, compiled modules, offloaded parameters and sharded
    parameters depend on Python code in every pass. Hooks of tilefold are allowed, since they only
    read the model.

    Args:
        model: the model.
    """
    for module in model.modules():
        if _has_foreign_hooks(module):
            return False
        if getattr(module, "_compiled_call_impl", None) is not None:
            return False
        if "_hf_hook" in vars(module):  # Hugging Face's accelerate offloads the module
            return False
        # Sharded tensors have classes of their own, such as DTensor.
        if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in _tensors_of(module)):
            return False
    return True


def _has_foreign_hooks(module: nn.Module) -> bool:
    """Whether a module has a hook that tilefold has not registered."""
    for hooks in hooks_of(module):
        for hook in hooks.values():
            module_name = str(getattr(hook, "__module__", ""))
            if not module_name.startswith("tilefold."):
                return True
    return False
