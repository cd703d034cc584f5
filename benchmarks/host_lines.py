"""Lines of the operators that get a checked call to its launches: plans, the common machinery,
configurations.

    python -m benchmarks.host_lines

Kernels, references, tiled paths, public functions, checks of arguments and records of a problem are
left out, and so are the tables of configurations with what is said of their fields, and the
functions of ``internals.py`` that stand for kernels of torch's own; all else below
``src/tilefold/ops`` counts, with comments and blank lines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

OPS = Path(__file__).parents[1] / "src" / "tilefold" / "ops"
# mathematics and checks
SHARED = (
    "activation",
    "checks",
    "entmax",
    "entmax_root",
    "onednn",
    "philox",
    "winners",
    "__init__",
)
PLANS = ("plans", "configs")
KERNELS_OF_TORCH = {
    "copy_each",
    "efficient_attention_varlen",
    "flash_attention_varlen",
    "has_int8_products",
    "has_onednn_linear",
    "int8_products",
    "onednn_linear",
    "onednn_packed",
}


def counted(path: Path) -> bool:
    """Whether a file is on the way from a checked call to a launch."""
    parts = path.relative_to(OPS).parts
    if parts[0] == "_shared":
        return path.stem not in SHARED
    return path.stem in PLANS


def left_out(source: str) -> Iterator[int]:
    """Numbers of the lines of kernels, of functions that stand for one of torch's, and of tables."""
    lines = source.splitlines()
    for node in ast.parse(source).body:
        first = node.lineno
        if isinstance(node, ast.FunctionDef):
            jit = any("jit" in ast.unparse(each) for each in node.decorator_list)
            if not jit and node.name not in KERNELS_OF_TORCH:
                continue
            first = min([first, *(each.lineno for each in node.decorator_list)])
        elif isinstance(node, ast.Assign) and any(map(is_row, ast.walk(node))):
            while lines[first - 2].startswith("#"):
                first -= 1
        else:
            continue
        yield from range(first, (node.end_lineno or 0) + 1)


def is_row(node: ast.AST) -> bool:
    """Whether this is a row of a table."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Row"


def host_lines(path: Path) -> int:
    """Lines that count."""
    source = path.read_text(encoding="utf-8")
    return len(source.splitlines()) - len(set(left_out(source)))


def main() -> None:
    """Print every file with its lines, and the sum."""
    lines = {path: host_lines(path) for path in sorted(OPS.rglob("*.py")) if counted(path)}
    for path, count in sorted(lines.items(), key=lambda item: -item[1]):
        print(f"{count:6d}  {path.relative_to(OPS)}")
    print(f"{sum(lines.values()):6d}  in all")


if __name__ == "__main__":
    main()
