"""Replaces functions in other libraries' modules on request, and restores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import TracebackType
from typing import Any


class Handle:
    """The result of ``accelerate``: ignore it, or use it as a context manager that calls :meth:`restore` at its end."""

    def restore(self) -> None:
        """Undo the acceleration."""
        raise NotImplementedError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


class Acceleration(Handle):
    """Replacements in one library, all of them or none; a context that restores its own functions at the end.

    Args:
        library: the package's name, for error messages.
        requirement: the oldest supported release, as a pip requirement.
        places: ``(module, name)`` of each, where ``name`` may be a class and its method, ``"Class.method"``.
    """

    def __init__(self, library: str, requirement: str, places: Sequence[tuple[str, str]]) -> None:
        self.library, self.requirement = library, requirement
        self.places = tuple(places)
        self._stock: list[Any] = []

    @property
    def active(self) -> bool:
        """Whether the replacements are in place."""
        return bool(self._stock)

    def apply(self, functions: Mapping[str, Callable[..., Any]]) -> Acceleration:
        """Put the function of its name in each place; :meth:`restore` brings back what was there before the first call.

        Raises:
            ImportError: if the library is not installed.
            RuntimeError: if it does not have the names.
        """
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

    def __repr__(self) -> str:
        return f"Acceleration({self.library}, active={self.active})"

    def restore(self) -> None:
        """Bring the library's own functions back; does nothing if none was replaced."""
        if not self._stock:
            return
        for (module, name), function in zip(self.places, self._stock, strict=True):
            setattr(*self._owner(module, name), function)
        self._stock = []

    def _owner(self, module: str, name: str) -> tuple[Any, str]:
        owner: Any = import_module(module)
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
