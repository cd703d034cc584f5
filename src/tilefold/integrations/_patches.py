"""Replacements of functions in other libraries, or of methods of one model, that can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from tilefold.ops.implementations import switched_off


class Replacement:
    """A callable that replaces a method on one instance.

    It is not an ``nn.Module``, so that the state dict of the instance does not change.

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
        module: the name of the module.
        name: the name of the function in the module, or ``"Class.method"``.
    """

    module: str
    name: str


class _Location(NamedTuple):
    """Where a function is stored.

    Attributes:
        owner: the module, or the class of a method.
        attribute: the name of the function in its owner.
    """

    owner: object
    attribute: str


class Acceleration:
    """Replacements of functions in one library: either all of them are active, or none.

    As a context manager, it restores the library's own functions on exit.

    Args:
        library: the name of the library, for error messages.
        requirement: the oldest supported release as a pip requirement, for error messages.
        modules_by_function: the modules that hold each function, by the name of the function or
            ``"Class.method"``.
    """

    def __init__(
        self,
        library: str,
        requirement: str,
        modules_by_function: Mapping[str, Sequence[str]],
    ) -> None:
        """Record which functions of a library can be replaced; nothing is imported yet.

        Args:
            library: the name of the library, for error messages.
            requirement: the oldest supported release as a pip requirement, for error messages.
            modules_by_function: the modules that hold each function, by the name of the function or
                ``"Class.method"``.
        """
        self.library = library
        self.requirement = requirement
        self._targets = [
            _Target(module, name)
            for name, modules in modules_by_function.items()
            for module in modules
        ]
        # The library's own functions, in the order of the targets; empty if they are not replaced.
        self._originals: list[object] = []

    def apply(self, functions: Mapping[str, Callable[..., object]]) -> Acceleration:
        """Replace the library's functions until :meth:`restore`.

        With ``TILEFOLD_DISABLE=1`` in the environment, the library's own functions are restored
        instead.

        Args:
            functions: maps the name of each function to its replacement.

        Raises:
            ImportError: if the library cannot be imported.
            RuntimeError: if this release of the library lacks one of the functions.
        """
        if switched_off():
            self.restore()
            return self
        try:
            locations = [self._locate(target) for target in self._targets]
        except ImportError as error:
            raise ImportError(
                f"accelerate() changes {self.library}, which cannot be imported; "
                f'pip install "{self.requirement}".',
            ) from error
        if not self._originals:  # a second call must not record replacements as originals
            self._originals = [getattr(owner, attribute) for owner, attribute in locations]
        for (owner, attribute), target in zip(locations, self._targets, strict=True):
            setattr(owner, attribute, functions[target.name])
        return self

    def is_accelerated(self) -> bool:
        """Whether the library's functions are replaced."""
        return bool(self._originals)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"Acceleration({self.library}, active={self.is_accelerated()})"

    def restore(self) -> None:
        """Restore the library's own functions, if they were replaced."""
        if not self._originals:
            return
        for target, function in zip(self._targets, self._originals, strict=True):
            owner, attribute = self._locate(target)
            setattr(owner, attribute, function)
        self._originals = []

    def _locate(self, target: _Target) -> _Location:
        """Return where a function is stored: in its module, or in the class of a method.

        Args:
            target: the function.

        Raises:
            ImportError: if the module cannot be imported.
            RuntimeError: if there is no such function.
        """
        *class_names, attribute = target.name.split(".")
        owner: object = import_module(target.module)
        try:
            for class_name in class_names:
                owner = getattr(owner, class_name)
            getattr(owner, attribute)  # raises AttributeError if the function is missing
        except AttributeError as error:
            raise RuntimeError(
                f"{self.library} must have {target.module}.{target.name}, got a version without "
                "it; call tilefold's functions directly instead.",
            ) from error
        return _Location(owner, attribute)
