"""Packages whose names are imported at first use, and the versions of those that are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: dict[str, Any],
    modules: Mapping[str, str],
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """``__all__``, ``__getattr__`` and ``__dir__`` of a package with these ``globals()``.

    `modules` is a module below the package -> the public names that it has; one with its own name
    is exported itself.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}
    own = package["__name__"]

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(
                f"module {own!r} has no attribute {name!r}; public names: {', '.join(listed())}.",
            )
        home = import_module(f"{own}.{homes[name]}")
        package[name] = value = home if homes[name] == name else getattr(home, name)
        return value

    def listed() -> list[str]:
        return sorted(package["__all__"])

    return list(homes), load, listed


def package_version(name: str) -> str:
    """The installed version of a distribution, or ``""``; nothing is imported."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
