"""Pages of the reference of the Python API.

Sources are read and not imported, so that the site is built without torch. mkdocstrings renders the
docstrings; these pages say which names are public, and group them.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parents[2] / "src"
FOLDER = "reference/python"
ROLE = re.compile(r":(func|class|meth|mod|attr|data):`~?")
# What follows the first sentence of a docstring.
END_OF_SENTENCE = re.compile(r"(?<=[\w)`\]])(?<!et al)\.(?=\s|$)|\n\n")


@dataclass(frozen=True)
class Group:
    """Public names under one heading of a page.

    Attributes:
        title: the heading.
        package: the module from which the names are imported.
        homes: the modules below `package` that define the names; empty for all names of `package`.
    """

    title: str
    package: str
    homes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """A page of the reference.

    Attributes:
        title: the title of the page.
        purpose: one sentence on what the names are for.
        groups: its groups of names.
    """

    title: str
    purpose: str
    groups: tuple[Group, ...]


PAGES = {
    "operators": Page(
        "Operators",
        "Fused operators, which never write their largest matrix to memory.",
        (
            Group("Heads of learned sparse models", "tilefold.ops", ("lsr_head",)),
            Group("Token weights", "tilefold.ops", ("token_scatter",)),
            Group("Late interaction", "tilefold.ops", ("maxsim",)),
            Group("Entmax", "tilefold.ops", ("entmax", "entmax_attention")),
            Group("Search in sparse vectors", "tilefold.ops.sparse_search"),
        ),
    ),
    "nn": Page(
        "Operators as modules",
        "The operators as torch modules with parameters.",
        (
            Group("Modules", "tilefold.nn"),
            Group("Vocabulary-parallel heads", "tilefold.nn.parallel"),
        ),
    ),
    "losses": Page(
        "Losses",
        "Losses and regularizers of learned sparse retrieval.",
        (
            Group("Losses of rankings", "tilefold.losses", ("ranking",)),
            Group("Regularizers", "tilefold.losses", ("regularizers",)),
            Group("Functions", "tilefold.losses", ("functional",)),
        ),
    ),
    "modules": Page(
        "Modules of SparseEncoder",
        "Modules for a `SparseEncoder` that sentence-transformers lacks.",
        (Group("Modules", "tilefold.modules"),),
    ),
    "integrations": Page(
        "Integrations",
        "Functions that make models and trainers of other libraries use the operators.",
        (
            Group("sentence-transformers", "tilefold.integrations.sentence_transformers"),
            Group("transformers", "tilefold.integrations.transformers"),
            Group("PyLate", "tilefold.integrations.pylate"),
            Group("colpali-engine", "tilefold.integrations.colpali"),
            Group("LangChain", "tilefold.integrations.langchain"),
            Group("LlamaIndex", "tilefold.integrations.llama_index"),
            Group("Haystack", "tilefold.integrations.haystack"),
        ),
    ),
    "recipes": Page(
        "Recipes",
        "Training of published systems, with a typed configuration for each.",
        (
            Group("Training", "tilefold.recipes", ("catalogue", "_run", "_settings")),
            Group("Recipes", "tilefold.recipes", ("lsr", "colbert")),
            Group("Encoders of sparse recipes", "tilefold.recipes", ("encoders",)),
            Group("The packaged model", "tilefold.recipes", ("backbone",)),
            Group("ONNX", "tilefold.recipes", ("onnx_export",)),
        ),
    ),
    "retrieval": Page(
        "Retrieval",
        "Collections, vectors, indexes, search, evaluation and training data.",
        (
            Group("Collections", "tilefold.retrieval", ("data",)),
            Group("Encoding", "tilefold.retrieval", ("encoding",)),
            Group("Vectors on disk", "tilefold.retrieval", ("vectors",)),
            Group("Indexes", "tilefold.retrieval", ("index",)),
            Group("Qdrant", "tilefold.retrieval.index.qdrant"),
            Group("Search", "tilefold.retrieval", ("search",)),
            Group("Evaluation", "tilefold.retrieval", ("evaluation", "common")),
            Group("Negatives and teachers", "tilefold.retrieval", ("training_data",)),
        ),
    ),
    "serve": Page(
        "Serving",
        "The HTTP service behind `tilefold serve`.",
        (Group("The HTTP service", "tilefold.serve"),),
    ),
    "pipeline": Page(
        "Encoding pipeline",
        "Parts of the encoding pipeline, for code that extends it.",
        (
            Group("Truncated texts", "tilefold.pipeline.truncation"),
            Group("Packed tokens", "tilefold.pipeline.ragged"),
            Group("Threads", "tilefold.pipeline.threads"),
        ),
    ),
    "distributed": Page(
        "Process groups",
        "Process groups of training and encoding, for code that extends them.",
        (
            Group("Ranks", "tilefold.distributed.ranks"),
            Group("Rows of all ranks", "tilefold.distributed.process_group"),
            Group("State that ranks share", "tilefold.distributed.world"),
            Group("Errors", "tilefold.distributed.errors"),
        ),
    ),
    "testing": Page(
        "Testing",
        "Error budgets for tests of your own.",
        (Group("Error budgets", "tilefold.testing"),),
    ),
}


def api_pages() -> dict[str, str]:
    """Return path -> Markdown of the pages of the API."""
    return {f"{FOLDER}/{name}.md": _page(page) for name, page in PAGES.items()}


def _page(page: Page) -> str:
    """Return the Markdown of a page: its names with their first sentences, then each docstring."""
    lines = [f"# {page.title}", "", page.purpose, ""]
    for group in page.groups:
        lines += [f"Import the names of [{group.title}](#{_anchor(group)}) from `{group.package}`:"]
        lines += ["", "| name | purpose |", "|---|---|"]
        for path in names_of(group):
            name = path.rpartition(".")[2]
            lines.append(f"| [`{name}`][{path}] | {summary(path)} |")
        lines.append("")
    for group in page.groups:
        lines += [f"## {group.title} {{ #{_anchor(group)} }}", ""]
        for path in names_of(group):
            lines += [f"::: {path}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def _anchor(group: Group) -> str:
    """Return the anchor of the heading of a group."""
    return group.title.lower().replace(" ", "-")


def names_of(group: Group) -> list[str]:
    """Return the full paths of the names of a group, in the order of their package."""
    prefixes = tuple(f"{group.package}.{home}." for home in group.homes)
    return [
        path for path in public_names(group.package) if not prefixes or path.startswith(prefixes)
    ]


def public_names(module: str) -> list[str]:
    """Return the full paths of the public names of a module, where they are defined.

    The names are those of a table of the module (``PACKAGE_OF`` for the operators, or ``_NAMES``),
    of ``__all__``, or else of its imports ``name as name`` and of its functions and classes without
    an underscore.
    """
    path = _file_of(module)
    if module == "tilefold.ops":
        package_of = _literals(SOURCES / "tilefold" / "_internal" / "public.py")["PACKAGE_OF"]
        return [f"{module}.{package}.{name}" for name, package in sorted(package_of.items())]
    literals = _literals(path)
    names: list[str] = []
    for home, exported in literals.get("_NAMES", {}).items():
        names += [f"{module}.{home}.{name}" for name in exported.split()]
    exported = literals.get("__all__")
    if exported is None:
        exported = [alias.name for _, alias in _imports(module) if alias.asname == alias.name]
    names += [f"{_home_of(module, name)}.{name}" for name in exported]
    return names or [f"{module}.{name}" for name in _definitions(path) if not name.startswith("_")]


def summary(path: str) -> str:
    """Return the first sentence of the docstring of a function or class, for a cell of a table.

    It is empty for a constant.

    Args:
        path: the full path of the name, which a module defines or imports.
    """
    module, _, name = path.rpartition(".")
    node = _definitions(_file_of(_home_of(module, name))).get(name)
    docstring = ast.get_docstring(node) if node is not None else None
    sentence = END_OF_SENTENCE.split(ROLE.sub("`", docstring or ""), maxsplit=1)[0]
    return " ".join(sentence.replace("``", "`").replace("|", "\\|").split())


def write_sources(folder: Path) -> None:
    """Copy the package without Sphinx's roles in docstrings, which mkdocs does not know."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(SOURCES.rglob("*.py")):
        copy = folder / path.relative_to(SOURCES)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(ROLE.sub("`", path.read_text(encoding="utf-8")), encoding="utf-8")


def _home_of(module: str, name: str) -> str:
    """Return the module that defines a name which another module exports."""
    for imported_from, alias in _imports(module):
        if (alias.asname or alias.name) == name and imported_from.startswith("tilefold."):
            return _home_of(imported_from, alias.name)
    return module


def _imports(module: str) -> Iterator[tuple[str, ast.alias]]:
    """Yield the names that a module imports, each with the module that it comes from."""
    for node in ast.walk(_tree(_file_of(module))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield node.module, alias


def _file_of(module: str) -> Path:
    """Return the source file of a module."""
    path = SOURCES.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _tree(path: Path) -> ast.Module:
    """Return the syntax tree of a source file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def _definitions(path: Path) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Return the functions and classes that a source file defines, by name."""
    return {
        node.name: node
        for node in _tree(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }


def _literals(path: Path) -> dict[str, Any]:
    """Return the literal values that the top level of a module assigns, by their names."""
    literals: dict[str, Any] = {}
    for node in _tree(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with suppress(ValueError):
                literals[node.targets[0].id] = ast.literal_eval(node.value)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            literals[node.target.id] = ast.literal_eval(node.value)
    return literals
