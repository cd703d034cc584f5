"""Replacements of functions in other libraries, or of methods of one model, that can be undone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from tilefold.ops.implementations import switched_off


class Replacement:
    """A callable that replaces a method on one instance.

    It is no module, so that the state dict of the instance does not change.

    Args:
        owner: the instance.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner


def replacements(model: nn.Module) -> Iterator[tuple[nn.Module, str, Replacement]]:
    """Yield the replaced methods of a model and its submodules.

    A replaced method is an attribute of the instance that hides the method of its class.

    Args:
        model: the model.

    Yields:
        The module with the replaced method, the method's name, and the replacement.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Replacement):
                yield module, name, value


class _Target(NamedTuple):
    """A function that is replaced in a module of a library.

    Attributes:
        module: name of the module.
        name: name of the function in it, such as ``"function"`` or ``"Class.method"``.
    """

    module: str
    name: str


class Acceleration:
    """Replacements of functions in one library: either all of them are in force, or none.

    As a context manager, it restores the library's own functions at the end.

    Args:
        library: name of the library, for error messages.
        requirement: oldest supported release as a requirement of pip, for error messages.
        modules_by_name: modules of the library in which a function is replaced, by its name, which
            may be ``"Class.method"``.
    """

    def __init__(
        self,
        library: str,
        requirement: str,
        modules_by_name: Mapping[str, Sequence[str]],
    ) -> None:
        """Record which functions of a library can be replaced; nothing is imported yet.

        Args:
            library: name of the library, for error messages.
            requirement: oldest supported release as a requirement of pip, for error messages.
            modules_by_name: modules of the library in which a function is replaced, by its name,
                which may be ``"Class.method"``.
        """
        self.library = library
        self.requirement = requirement
        self._targets = [
            _Target(module, name) for name, modules in modules_by_name.items() for module in modules
        ]
        # The library's own functions, one for each target; empty if none is replaced.
        self._stock: list[object] = []

    def apply(self, functions: Mapping[str, Callable[..., object]]) -> Acceleration:
        """Replace the library's functions until :meth:`restore`.

        With ``TILEFOLD_DISABLE=1`` in the environment, the library's own functions are restored
        instead.

        Args:
            functions: replacements by the names of the functions.

        Raises:
            ImportError: without the library.
            RuntimeError: if a release of the library lacks one of the names.
        """
        if switched_off():
            self.restore()
            return self
        try:
            owners = [self._owner(target) for target in self._targets]
        except ImportError as error:
            raise ImportError(
                f"accelerate() changes {self.library}, which cannot be imported; "
                f'pip install "{self.requirement}".',
            ) from error
        if not self._stock:  # a second call must not record replacements as the library's own
            self._stock = [getattr(owner, attribute) for owner, attribute in owners]
        for (owner, attribute), target in zip(owners, self._targets, strict=True):
            setattr(owner, attribute, functions[target.name])
        return self

    def is_accelerated(self) -> bool:
        """Return whether the library's functions are replaced."""
        return bool(self._stock)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"Acceleration({self.library}, active={self.is_accelerated()})"

    def restore(self) -> None:
        """Bring the library's own functions back, if they were replaced."""
        if not self._stock:
            return
        for target, function in zip(self._targets, self._stock, strict=True):
            owner, attribute = self._owner(target)
            setattr(owner, attribute, function)
        self._stock = []

    def _owner(self, target: _Target) -> tuple[object, str]:
        """Return the object that holds a target's function, and the name of the function in it.

        For ``"Class.method"`` the object is the class, else the module.

        Args:
            target: the function.

        Raises:
            ImportError: if the module cannot be imported.
            RuntimeError: if it has no such function.
        """
        *class_names, attribute = target.name.split(".")
        module: object = import_module(target.module)
        try:
            owner = functools.reduce(getattr, class_names, module)
            getattr(owner, attribute)  # raises an error if the function is missing
        except AttributeError as error:
            raise RuntimeError(
                f"{self.library} must have {target.module}.{target.name}, got a version without "
                "it; call the functions themselves.",
            ) from error
        return owner, attribute
