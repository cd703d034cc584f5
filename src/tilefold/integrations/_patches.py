"""Replaces functions in other libraries' modules, or methods of one model, on request, and restores
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import nn

from tilefold.ops.implementations import switched_off


class Replacement:
    """Replaces a method on one instance, its owner; not a module, so the state dict does not
    change.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner


def replacements(model: nn.Module) -> Iterator[tuple[nn.Module, str, Replacement]]:
    """Every replaced method in a model, its own first: the module that it is on, and its name."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Replacement):
                yield module, name, value


class Acceleration:
    """Replacements in one library, all of them or none; a context that restores its own functions
    at the end.

    `library` and `requirement` (the oldest release, as for pip) are for error messages; `places`
    are modules by the name that is replaced in them, which may be ``"Class.method"``. :meth:`apply`
    raises an ImportError without the library, and a RuntimeError for a version without these names.
    """

    def __init__(self, library: str, requirement: str, places: Mapping[str, Sequence[str]]) -> None:
        self.library, self.requirement = library, requirement
        self.places = [(module, name) for name, modules in places.items() for module in modules]
        self._stock: list[object] = []

    def apply(self, functions: Mapping[str, Callable[..., object]]) -> Acceleration:
        """Put the function of its name in each place; :meth:`restore` brings back what was there at
        first.

        Under ``TILEFOLD_DISABLE=1`` the library's own functions stay, or come back.
        """
        if switched_off():
            self.restore()
            return self
        try:
            owners = [self._owner(module, name) for module, name in self.places]
        except ImportError as error:
            remedy = f'pip install "{self.requirement}".'
            raise ImportError(
                f"accelerate() changes {self.library}, which cannot be imported; {remedy}",
            ) from error
        self._stock = self._stock or [getattr(owner, name) for owner, name in owners]
        for (owner, name), (_, place) in zip(owners, self.places, strict=True):
            setattr(owner, name, functions[place])
        return self

    def is_accelerated(self) -> bool:
        """Whether the library uses the functions of the module that made this."""
        return bool(self._stock)

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"Acceleration({self.library}, active={self.is_accelerated()})"

    def restore(self) -> None:
        """Bring the library's own functions back; does nothing if none was replaced."""
        for (module, name), function in zip(self.places, self._stock, strict=False):
            setattr(*self._owner(module, name), function)
        self._stock = []

    def _owner(self, module: str, name: str) -> tuple[object, str]:
        owner: object = import_module(module)
        *classes, last = name.split(".")
        try:
            owner = functools.reduce(getattr, classes, owner)
            getattr(owner, last)
        except AttributeError as error:
            got = "a version without it; call the functions themselves."
            raise RuntimeError(f"{self.library} must have {module}.{name}, got {got}") from error
        return owner, last
