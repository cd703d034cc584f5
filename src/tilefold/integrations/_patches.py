"""Replaces functions in other libraries' modules on request, and restores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


class Acceleration:
    """Replacements in one library, all of them or none; a context that restores its own functions at the end.

    Args:
        library: the package's name, for error messages.
        requirement: the oldest supported release, as a pip requirement.
        places: modules by the name that they have, which may be that of a class and its method, ``"Class.method"``.
    """

    def __init__(self, library: str, requirement: str, places: Mapping[str, Sequence[str]]) -> None:
        self.library, self.requirement = library, requirement
        self.places = [(module, name) for name, modules in places.items() for module in modules]
        self._stock: list[object] = []

    @property
    def active(self) -> bool:
        """Whether the replacements are in place."""
        return bool(self._stock)

    def apply(self, functions: Mapping[str, Callable[..., Any]]) -> Acceleration:
        """Put the function of its name in each place; :meth:`restore` brings back what was there at first."""
        try:
            owners = [self._owner(module, name) for module, name in self.places]
        except ImportError as error:
            raise ImportError(
                f'accelerate() changes {self.library}, which cannot be imported; pip install "{self.requirement}".'
            ) from error
        stock = [getattr(owner, name) for owner, name in owners]
        if not self._stock:
            self._stock = stock
        for (owner, name), (_, place) in zip(owners, self.places, strict=True):
            setattr(owner, name, functions[place])
        return self

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        return f"Acceleration({self.library}, active={self.active})"

    def restore(self) -> None:
        """Bring the library's own functions back; does nothing if none was replaced."""
        for (module, name), function in zip(self.places, self._stock, strict=False):
            setattr(*self._owner(module, name), function)
        self._stock = []

    def _owner(self, module: str, name: str) -> tuple[object, str]:
        owner: object = import_module(module)
        *classes, last = name.split(".")
        for part in [*classes, last]:
            if not hasattr(owner, part):
                raise RuntimeError(
                    f"{self.library} must have {module}.{name}, got a version without it; use the functions themselves "
                    "where you call the scores."
                )
            if part is not last:
                owner = getattr(owner, part)
        return owner, last
