"""The public surface: what is exported, that it is documented, annotated, and free of banned
patterns.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import tilefold
import tilefold.ops
from tests.ops.contracts import CONTRACTS

PACKAGE = Path(tilefold.__file__).resolve().parent
FILES = sorted(PACKAGE.rglob("*.py"))
PUBLIC_FILES = [
    path for path in FILES if not any(p.startswith("_") and p != "__init__.py" for p in path.parts)
]
OPERATORS = [contract.name for contract in CONTRACTS if contract.name in tilefold.ops.__all__]
EXPORTING = (
    "tilefold.losses",
    "tilefold.ops",
    "tilefold.nn",
    "tilefold.integrations.sentence_transformers",
    "tilefold.integrations.transformers",
)


def label(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def public_definitions(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    """Module-level functions and classes, and the methods of those classes, whose name has no
    leading underscore.
    """
    results: list[tuple[str, ast.AST]] = []
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and node.name[0] != "_"
        ):
            results.append((node.name, node))
            if isinstance(node, ast.ClassDef):
                results += [
                    (f"{node.name}.{item.name}", item)
                    for item in node.body
                    if isinstance(item, ast.FunctionDef) and item.name[0] != "_"
                ]
    return results


def test_the_package_exports_exactly_what_it_lists() -> None:
    assert dir(tilefold) == sorted(tilefold.__all__)
    for name in tilefold.__all__:
        assert getattr(tilefold, name) is not None
    with pytest.raises(
        AttributeError,
        match="module 'tilefold' has no attribute 'lsr_tail'; public names",
    ):
        tilefold.lsr_tail  # noqa: B018
    assert f'__version__ = "{tilefold.__version__}"' in (PACKAGE / "_version.py").read_text(), (
        "which the build reads"
    )


def test_type_checkers_see_the_public_names_of_the_operators() -> None:
    for path in (PACKAGE / "__init__.py", PACKAGE / "ops" / "__init__.py"):
        rooms = {
            alias.asname: node.module
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.module.startswith("tilefold.ops")
            for alias in node.names
        }
        assert set(rooms) == set(tilefold.ops.__all__)
        for name, room in rooms.items():
            assert getattr(tilefold, str(name)) is getattr(importlib.import_module(room), str(name))


@pytest.mark.parametrize("name", EXPORTING)
def test_a_room_exports_exactly_what_it_lists(name: str) -> None:
    module = importlib.import_module(name)
    exported = {
        key
        for key, value in vars(module).items()
        if not key.startswith("_")
        and not inspect.ismodule(value)
        and key not in ("annotations", "TYPE_CHECKING")
    }
    listed = set(module.__all__)
    assert exported <= listed
    for key in listed:
        assert getattr(module, key) is not None


def documented_arguments(docstring: str) -> list[str]:
    """Return the arguments that a docstring explains, alone or several in one entry."""
    arguments = []
    for entry in re.findall(r"^    (\w+(?:, \w+)*): ", docstring, flags=re.MULTILINE):
        arguments += entry.split(", ")
    return arguments


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_documents_every_argument_and_what_it_raises(name: str) -> None:
    operator = getattr(tilefold, name)
    docstring = inspect.getdoc(operator) or ""
    for section in ("Returns:", "Raises:", "arXiv"):
        assert section in docstring, f"{section} is missing from the docstring of {name}"
    parameters = inspect.signature(operator).parameters
    explained = documented_arguments(docstring)
    assert set(parameters) <= set(explained)
    for parameter in parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty


@pytest.mark.parametrize("path", PUBLIC_FILES, ids=label)
def test_public_functions_and_classes_have_docstrings_and_annotations(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    problems: list[str] = []
    for name, node in public_definitions(tree):
        if ast.get_docstring(node) is None and "." not in name:
            problems.append(f"{name} has no docstring")
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            missing = [
                a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")
            ]
            problems += [f"{name}: argument {argument} has no annotation" for argument in missing]
            if node.returns is None:
                problems.append(f"{name} has no return annotation")
    assert not problems, f"{label(path)}: " + "; ".join(problems)


def test_docstrings_begin_with_what_a_thing_is_or_does() -> None:
    actual = [
        f"{label(path)}:{node.body[0].lineno}: {first}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if re.match(
            r"(What|As|Of|Those|The same)\b",
            first := (ast.get_docstring(node) or "").partition("\n")[0],
        )
    ]
    assert not actual, "begin with a noun or an imperative:\n" + "\n".join(actual)


@pytest.mark.parametrize("path", FILES, ids=label)
def test_sources_are_free_of_banned_patterns(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], (
        "assert in the package"
    )
    bare = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type is None]
    assert not bare, f"{label(path)}: bare except in lines {bare}"
    assert "import *" not in text
    assert "pickle.load" not in text
