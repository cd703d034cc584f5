"""Imports of sentence-transformers without its trainers and the libraries that only these need.

``import sentence_transformers`` loads all its trainers, evaluators and model classes, and thereby
``datasets``, ``pandas`` and ``sklearn``. That is a third of the time of a command that encodes one
query. The library has no lazy import of its own, and importing one of its submodules imports all
packages above it. Within :func:`lean_imports`,

- a package of sentence-transformers imports a name of its ``__init__`` when the name is first used.
  The modules are the library's own, each is imported once, and all names can be imported as usual.
- the functions and classes of :data:`_DEFERRED` are imported when they are first called.

Afterwards, all other imports are the usual ones.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.abc import InspectLoader, Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_LIBRARY = "sentence_transformers"
# Packages whose names are imported at first use.
_LAZY_PACKAGES = frozenset(
    {
        _LIBRARY,
        f"{_LIBRARY}.backend",
        f"{_LIBRARY}.base",
        f"{_LIBRARY}.cross_encoder",
        f"{_LIBRARY}.multi_vector_encoder",
        f"{_LIBRARY}.sentence_transformer",
        f"{_LIBRARY}.sparse_encoder",
        f"{_LIBRARY}.util",
    },
)


class _Deferred(NamedTuple):
    """Names of a module that are imported when they are first called.

    Attributes:
        functions: functions, which are only called.
        classes: classes, which are only called or used in ``isinstance``.
    """

    functions: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


# Modules that no encoding needs, with the names that the model classes of sentence-transformers
# and transformers import from them.
_DEFERRED = {
    "datasets": _Deferred(
        classes=(
            "Audio",
            "Dataset",
            "DatasetDict",
            "Image",
            "IterableDataset",
            "IterableDatasetDict",
            "Value",
            "Video",
        ),
    ),
    "peft": _Deferred(classes=("PeftConfig", "PeftMixedModel", "PeftModel")),
    "scipy.optimize": _Deferred(functions=("linear_sum_assignment",)),
    "sklearn": _Deferred(),
    "sklearn.metrics": _Deferred(functions=("pairwise_distances",)),
}


# Deferred modules whose real module was needed after all.
_resolved: set[str] = set()


@contextmanager
def lean_imports() -> Iterator[None]:
    """Import sentence-transformers lazily within the context.

    It has no effect on modules that were imported before. If a module uses another name of a
    deferred module than the listed ones, it gets the real one.
    """
    finder = _LeanFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in _DEFERRED:
            _remove_deferred(name)


class _LeanFinder(MetaPathFinder):
    """Finds lazy packages and deferred modules, and leaves all other modules to other finders."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of a module with a loader of this file, or None.

        Args:
            fullname: the name of the module.
            path: the folders of its parent.
            target: the module that is reloaded.
        """
        is_deferred = fullname in _DEFERRED and fullname not in _resolved
        is_lazy_package = fullname in _LAZY_PACKAGES
        if not is_deferred and not is_lazy_package:
            parent = fullname.rpartition(".")[0]
            if isinstance(sys.modules.get(parent), _DeferredModule):
                _real_module(parent)  # a submodule needs its package
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not isinstance(spec.loader, InspectLoader):
            return None
        spec.loader = _DeferredLoader() if is_deferred else _LazyPackageLoader(spec.loader)
        return spec


class _LazyPackageLoader(Loader):
    """Executes the ``__init__`` of a package, except for the imports of names that it only exports.

    Args:
        loader: the usual loader of the package.
    """

    def __init__(self, loader: InspectLoader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the usual loader creates."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the ``__init__`` of a package, without its imports of names for re-export.

        The package gets a ``__getattr__``, which imports these names at their first use.
        """
        source = self.loader.get_source(module.__name__)
        if source is None:
            self.loader.exec_module(module)
            return
        statements = ast.parse(source).body
        lazy_statements = [
            statement
            for statement in statements
            if _only_exports(statement, statements, Path(str(module.__file__)).parent)
        ]
        exports = _exports_of(lazy_statements, module.__name__)

        def import_name(name: str) -> object:
            """Import a name of the package that is used for the first time (PEP 562)."""
            if name not in exports:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            export = exports[name]
            value = getattr(import_module(export.module), export.name)
            setattr(module, name, value)
            return value

        setattr(module, "__getattr__", import_name)  # noqa: B010 - no attribute of the class
        eager_code = ast.Module(
            body=[statement for statement in statements if statement not in lazy_statements],
            type_ignores=[],
        )
        exec(compile(eager_code, str(module.__file__), "exec"), vars(module))  # noqa: S102


class _Export(NamedTuple):
    """Where a package imports a name from.

    Attributes:
        module: the absolute name of the module.
        name: the name in that module.
    """

    module: str
    name: str


def _only_exports(statement: ast.stmt, statements: list[ast.stmt], folder: Path) -> bool:
    """Return whether a statement only re-exports names of the library.

    The package does not use these names itself, so that they can be imported at their first use. A
    name that is also the name of a submodule is imported at once, because importing the submodule
    would replace the name.

    Args:
        statement: a statement of the package.
        statements: all statements of the package.
        folder: the folder of the package.
    """
    if not isinstance(statement, ast.ImportFrom):
        return False
    is_of_library = statement.level > 0 or str(statement.module).partition(".")[0] == _LIBRARY
    if not is_of_library:
        return False
    used_names = {
        node.id for other in statements for node in ast.walk(other) if isinstance(node, ast.Name)
    }
    for alias in statement.names:
        name = alias.asname or alias.name
        is_submodule = (folder / name).is_dir() or (folder / f"{name}.py").is_file()
        if name == "*" or name in used_names or is_submodule:
            return False
    return True


def _exports_of(statements: Sequence[ast.stmt], package: str) -> dict[str, _Export]:
    """Return each name that statements of a package import -> where it is imported from.

    Args:
        statements: statements ``from module import name``.
        package: the name of the package.
    """
    exports = {}
    for statement in statements:
        if isinstance(statement, ast.ImportFrom):
            relative_name = "." * statement.level + (statement.module or "")
            module = resolve_name(relative_name, package)
            for alias in statement.names:
                exports[alias.asname or alias.name] = _Export(module, alias.name)
    return exports


class _DeferredLoader(Loader):
    """Creates deferred modules."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module whose real module is imported when it is needed."""
        return _DeferredModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Define the release and the deferred functions and classes of a module."""
        deferred = _DEFERRED[module.__name__]
        with suppress(PackageNotFoundError):
            setattr(module, "__version__", version(module.__name__))  # noqa: B010 - no attribute
        for name in deferred.functions:
            setattr(module, name, _deferred_function(module.__name__, name))
        for name in deferred.classes:
            setattr(module, name, _DeferredClass(name, (), {"__module__": module.__name__}))


class _DeferredModule(ModuleType):
    """Stands for a module until another name than its deferred ones is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(_real_module(self.__name__), name)


def _deferred_function(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports a function when it is called, and calls it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_real_module(module), name)(*args, **kwargs)

    call.__name__ = name
    call.__qualname__ = name
    call.__module__ = module
    return call


class _DeferredClass(type):
    """A class that imports the class of its module and name when it is called.

    Before that module is imported, no object is an instance of its classes.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        module = sys.modules.get(cls.__module__)
        if module is None or isinstance(module, _DeferredModule):
            return False
        real_class = getattr(module, cls.__name__, None)
        return real_class is not None and isinstance(instance, real_class)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._real_class()(*args, **kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        return getattr(cls._real_class(), name)

    def _real_class(cls) -> Any:
        return getattr(_real_module(cls.__module__), cls.__name__)


def _real_module(name: str) -> ModuleType:
    """Import a real module in place of its stand-in, which imports names at their first call.

    Args:
        name: the name of the module. Its parents may have stand-ins, too.
    """
    parts = name.split(".")
    for n_parts in range(1, len(parts) + 1):
        prefix = ".".join(parts[:n_parts])
        _remove_deferred(prefix)
        _resolved.add(prefix)
    return import_module(name)


def _remove_deferred(name: str) -> None:
    """Forget the stand-in for a module, so that the next import gets the real module.

    Nothing happens if the module under this name is already the real one.
    """
    module = sys.modules.get(name)
    if not isinstance(module, _DeferredModule):
        return
    del sys.modules[name]
    parent, _, child = name.rpartition(".")
    if parent in sys.modules and vars(sys.modules[parent]).get(child) is module:
        delattr(sys.modules[parent], child)
