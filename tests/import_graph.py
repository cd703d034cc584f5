"""Which module of the package imports which, read from the sources: at the top, in functions and for type checkers."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "tilefold"

Graph = Mapping[str, frozenset[str]]


@functools.cache
def sources() -> dict[str, Path]:
    """Module name -> file; a package has the name of its folder."""
    found: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def import_graph() -> Graph:
    """Module -> modules of the package that it imports. A package that is imported on the way to one is left out."""
    files = sources()
    return {module: frozenset(_imports(path, files)) - {module} for module, path in files.items()}


def _imports(path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module in files:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in files else node.module


def circles(graph: Graph) -> list[list[str]]:
    """The largest sets of modules that reach one another."""
    reached = {module: _reachable(module, graph) for module in graph}
    found = {frozenset(m for m in reached[module] if module in reached[m]) for module in graph}
    return sorted(sorted(circle) for circle in found if circle)


def _reachable(module: str, graph: Graph) -> set[str]:
    seen: set[str] = set()
    left = list(graph[module])
    while left:
        found = left.pop()
        if found not in seen:
            seen.add(found)
            left += graph[found]
    return seen
