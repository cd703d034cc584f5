"""Import of a package's names at first use, and versions of installed packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: dict[str, Any],
    modules: Mapping[str, str],
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Create the ``__all__``, ``__getattr__`` and ``__dir__`` of a package with lazy imports.

    Args:
        package: ``globals()`` of the package.
        modules: name of a module of the package -> its public names, separated by spaces. A public
            name that equals the module's name exports the module itself.

    Returns:
        ``__all__``, ``__getattr__`` and ``__dir__``.
    """
    module_by_name = {name: module for module, names in modules.items() for name in names.split()}
    package_name = package["__name__"]

    def __getattr__(name: str) -> Any:  # noqa: N807 - becomes the package's function
        """Import a public name, and store it in the package, so that it is imported once."""
        if name not in module_by_name:
            raise AttributeError(
                f"module {package_name!r} has no attribute {name!r}; public names: "
                f"{', '.join(__dir__())}.",
            )
        module = import_module(f"{package_name}.{module_by_name[name]}")
        value = module if module_by_name[name] == name else getattr(module, name)
        package[name] = value
        return value

    def __dir__() -> list[str]:  # noqa: N807 - becomes the package's function
        """List the public names of the package."""
        return sorted(package["__all__"])

    return list(module_by_name), __getattr__, __dir__


def package_version(name: str) -> str:
    """Return the version of an installed distribution without importing it.

    The result is ``""`` if the distribution is not installed.
    """
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
