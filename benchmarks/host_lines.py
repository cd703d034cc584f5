"""Lines of the operators that get a checked call to its launches: plans, the common machinery, configurations.

    python -m benchmarks.host_lines

Kernels, references, tiled paths, public functions, checks of arguments and records of a problem are left out, and
so are the rows of tables of configurations; all else below ``src/tilefold/ops`` counts, with comments and blank lines.
"""

from __future__ import annotations

import ast
from pathlib import Path

OPS = Path(__file__).parents[1] / "src" / "tilefold" / "ops"
# mathematics and checks
SHARED = ("activation", "checks", "entmax", "entmax_root", "onednn", "philox", "winners", "__init__")
PLANS = ("plans", "configs")


def counted(path: Path) -> bool:
    """Whether a file is on the way from a checked call to a launch."""
    parts = path.relative_to(OPS).parts
    if parts[0] == "_shared":
        return path.stem not in SHARED
    return path.stem in PLANS


def host_lines(path: Path) -> int:
    """Lines outside of kernels and of rows of tables."""
    source = path.read_text(encoding="utf-8")
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
            left_out |= set(range(node.decorator_list[0].lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Row":
            left_out |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(source.splitlines()) - len(left_out)


def main() -> None:
    """Print every file with its lines, and the sum."""
    lines = {path: host_lines(path) for path in sorted(OPS.rglob("*.py")) if counted(path)}
    for path, count in sorted(lines.items(), key=lambda item: -item[1]):
        print(f"{count:6d}  {path.relative_to(OPS)}")
    print(f"{sum(lines.values()):6d}  in all")


if __name__ == "__main__":
    main()
