"""Import of a package's names at first use, and versions of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: dict[str, Any],
    modules: Mapping[str, str],
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Create ``__all__``, ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: ``globals()`` of the package.
        modules: module of the package -> its public names, separated by blanks. A name that equals
            that of its module exports the module itself.

    Returns:
        The public names, a function that imports one of them, and a function that lists them.
    """
    module_by_name = {name: module for module, names in modules.items() for name in names.split()}
    package_name = package["__name__"]

    def load(name: str) -> Any:
        """Import a public name, and store it in the package, so that it is imported once."""
        if name not in module_by_name:
            raise AttributeError(
                f"module {package_name!r} has no attribute {name!r}; public names: "
                f"{', '.join(public_names())}.",
            )
        module = import_module(f"{package_name}.{module_by_name[name]}")
        value = module if module_by_name[name] == name else getattr(module, name)
        package[name] = value
        return value

    def public_names() -> list[str]:
        return sorted(package["__all__"])

    return list(module_by_name), load, public_names


def package_version(name: str) -> str:
    """Return the installed version of a distribution, or ``""``.

    The distribution is not imported.
    """
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
