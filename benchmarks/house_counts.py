"""Count what a maintainer has to carry: lines, long argument lists, ``Any``, suppressions, private names, copies.

    python -m benchmarks.house_counts
    python -m benchmarks.house_counts --ref d430b8e --ref HEAD --output benchmarks/results/house/counts.csv

Without ``--ref`` the working tree is counted, otherwise what git archives of each commit. The rules:

* lines and files: of Python, blank lines and comments included;
* functions with more than eight parameters: ``*args`` and ``**kwargs`` are none; kernels have a ``jit`` decorator;
* ``Any``: the word as a name in the code of ``src/tilefold/ops``, imports included;
* suppressions: comments in ``src`` with ``type: ignore`` or ``noqa``;
* private names: uses in ``src`` of a name with a leading underscore below the modules ``torch`` and ``triton``, however
  they are imported as; of ``super(torch.<class>, ...)``, which skips what that class does; and of the attributes of
  Triton's launchers and compiled kernels that ``LAUNCHER_INTERNALS`` lists;
* copies: runs of lines of which every six in a row stand earlier in the same folder too, but for white space;
  imports, docstrings, comments, blank lines and lines that begin with a bracket do not count, a signature ends a run;
* launch machinery: lines of the modules in ``LAUNCH_MODULES``, whole, under their names before and after; and with the
  launchers of all kernels (``_triton/launch*.py``, ``plans.py``), between which and the machinery code may move.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from tilefold._files import atomic_file

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks")
MAX_PARAMETERS = 8
MIN_COPIED = 6
LAUNCHER_INTERNALS = {
    "CudaLauncher",
    "do_not_specialize",
    "global_scratch_size",
    "launch_cooperative_grid",
    "launch_pdl",
    "make_tensordesc_arg",
    "packed_metadata",
    "pre_run_hooks",
    "profile_scratch_size",
    "tensordesc_meta",
}
# modules whose subject is remembering and repeating launches, today and before
LAUNCH_MODULES = (
    "_shared/call_cache.py",
    "_shared/internals.py",
    "_shared/operator.py",
    "_shared/plan.py",
    "_shared/_triton/context.py",
    "_shared/_triton/direct.py",
    "_shared/_triton/launch.py",
    "_shared/_triton/launches.py",
    "_shared/_triton/program.py",
    "_shared/_triton/step.py",
    "lsr_head/_calls.py",
    "lsr_head/_plans.py",
    "lsr_head/_triton/steps.py",
    "maxsim/_calls.py",
    "maxsim/_plans.py",
    "maxsim/_triton/direct.py",
    "maxsim/_triton/plan.py",
    "maxsim/_triton/replay.py",
    "maxsim/_triton/replay_gradients.py",
    "entmax_attention/_calls.py",
    "entmax_attention/_plans.py",
    "entmax_attention/_triton/steps.py",
)

Counts = dict[tuple[str, str], int]  # by measure and place
MEASURES = (
    "files",
    "lines",
    "functions with more than 8 parameters",
    "Any",
    "type: ignore",
    "noqa",
    "copies of 6 lines or more",
    "copied lines",
    "files of launch machinery",
    "lines of launch machinery",
    "files with private names",
    "private names",
)


@dataclass(frozen=True)
class Source:
    """A Python file: where it is below the tree, its text and its syntax."""

    name: str
    text: str
    tree: ast.Module


@dataclass
class Copy:
    """A run of lines: of which file, their numbers, and where they stood before."""

    name: str
    lines: set[int]
    earlier: str
    earlier_line: int

    def __str__(self) -> str:
        return f"{self.name}:{min(self.lines)}-{max(self.lines)} = {self.earlier}:{self.earlier_line}"


def main(argv: Sequence[str]) -> int:
    """Count every commit, print the table, write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ref", action="append", default=[], help="a commit; repeat for several; else the working tree"
    )
    parser.add_argument("--places", action="store_true", help="show where they are in the working tree, and no counts")
    parser.add_argument("--output", type=Path, help="CSV file to write, replaced")
    options = parser.parse_args(argv)
    if options.places:
        show_places(ROOT)
        return 0
    found: dict[str, Counts] = {}
    try:
        for ref in options.ref:
            with tempfile.TemporaryDirectory() as folder:
                name = unpack(ref, Path(folder))
                found[name] = count(Path(folder))
    except subprocess.CalledProcessError as error:
        print(f"Error: --ref {ref}: git: {error.stderr.decode().strip()}", file=sys.stderr)
        return 2
    if not options.ref:
        found["working tree"] = count(ROOT)
    show(found)
    if options.output is not None:
        write(options.output, found)
    return 0


def show(found: dict[str, Counts]) -> None:
    """Print one column per commit."""
    labels = {key: "  ".join(key) for key in _keys(found)}
    width = max(map(len, labels.values()))
    print(" " * width, *(f"{name:>13}" for name in found))
    for key, label in labels.items():
        print(f"{label:{width}}", *(f"{counts.get(key, 0):13,}" for counts in found.values()))


def write(path: Path, found: dict[str, Counts]) -> None:
    """Write one column per commit."""
    with atomic_file(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("measure", "place", *found))
        writer.writerows((*key, *(counts.get(key, 0) for counts in found.values())) for key in _keys(found))


def _keys(found: dict[str, Counts]) -> list[tuple[str, str]]:
    keys = {key for counts in found.values() for key in counts}
    return sorted(keys, key=lambda key: (MEASURES.index(key[0]), key[1]))


def unpack(ref: str, folder: Path) -> str:
    """Write the folders of a commit that are counted; the commit's short name."""
    short = _git("rev-parse", "--short=9", f"{ref}^{{commit}}").decode().strip()
    there = _git("ls-tree", "--name-only", short).decode().splitlines()
    archive = _git("archive", short, *(name for name in FOLDERS if name in there))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    return short


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=True).stdout  # noqa: S603, S607


def count(root: Path) -> Counts:
    """All counts of the tree below ``root``, by measure and place."""
    sources = {folder: list(_read(root, folder)) for folder in FOLDERS}
    package, ops = sources["src"], [s for s in sources["src"] if s.name.startswith("src/tilefold/ops/")]
    counts: Counts = {}
    for folder, files in sources.items():
        counts["files", folder] = len(files)
        counts["lines", folder] = sum(len(source.text.splitlines()) for source in files)
        copied = copies(files)
        counts["copies of 6 lines or more", folder] = len(copied)
        counts["copied lines", folder] = sum(len(copy.lines) for copy in copied)
    long = [_is_kernel(function) for source in package for function in _long_functions(source.tree)]
    counts["functions with more than 8 parameters", "src, kernels"] = sum(long)
    counts["functions with more than 8 parameters", "src, other"] = len(long) - sum(long)
    counts["Any", "src/tilefold/ops"] = sum(_tokens(s, tokenize.NAME, r"Any$") for s in ops)
    counts["type: ignore", "src"] = sum(_tokens(s, tokenize.COMMENT, r"#\s*type:\s*ignore") for s in package)
    counts["noqa", "src"] = sum(_tokens(s, tokenize.COMMENT, r".*noqa") for s in package)
    machinery = [s for s in ops if s.name.removeprefix("src/tilefold/ops/") in LAUNCH_MODULES]
    launchers = [s for s in ops if s in machinery or re.search(r"/(_triton/launch\w*|plans)\.py$", s.name)]
    for place, modules in (("src/tilefold/ops", machinery), ("src/tilefold/ops, with launchers", launchers)):
        counts["files of launch machinery", place] = len(modules)
        counts["lines of launch machinery", place] = sum(len(s.text.splitlines()) for s in modules)
    private = {source.name: sum(private_names(source.tree).values()) for source in package}
    counts |= {("private names", name): uses for name, uses in private.items() if uses}
    counts["files with private names", "src"] = sum(uses > 0 for uses in private.values())
    return counts


def _read(root: Path, folder: str) -> Iterator[Source]:
    for path in sorted((root / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield Source(path.relative_to(root).as_posix(), text, ast.parse(text))


def _tokens(source: Source, kind: int, pattern: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(source.text).readline)
    return sum(token.type == kind and re.match(pattern, token.string) is not None for token in tokens)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def _long_functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for function in _functions(tree):
        arguments = function.args
        if len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) > MAX_PARAMETERS:
            yield function


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(re.search(r"\bjit\b", ast.unparse(decorator)) for decorator in function.decorator_list)


def show_places(root: Path) -> None:
    """Print where the copies, the long argument lists and the private names of ``src`` are."""
    sources = list(_read(root, "src"))
    for copy in copies(sources):
        print(f"copy: {copy}")
    for source in sources:
        for function in _long_functions(source.tree):
            if not _is_kernel(function):
                print(f"more than {MAX_PARAMETERS} parameters: {source.name}:{function.lineno} {function.name}")
        for name, uses in private_names(source.tree).items():
            print(f"private: {source.name} {name} ({uses})")


def private_names(tree: ast.Module) -> Counter[str]:
    """Uses of what torch and Triton do not promise, by name."""
    aliases: dict[str, str] = {}
    found: Counter[str] = Counter()
    for node in ast.walk(tree):
        for name, path, imported in _imports(node):
            aliases[name] = path
            found[imported] += _is_private(imported)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            path = _path(node, aliases) if id(node) not in inner else ""
            found[path] += _is_private(path)
            found[node.attr] += node.attr in LAUNCHER_INTERNALS
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found[node.value] += node.value in LAUNCHER_INTERNALS
        elif isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Name) and node.func.id == "super":
            found["super"] += _path(node.args[0], aliases).startswith("torch.")
    return +found


def _imports(node: ast.AST) -> Iterator[tuple[str, str, str]]:
    """The names that an import of torch or Triton binds, what each stands for, and what was imported."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            top = alias.name.partition(".")[0]
            if top in ("torch", "triton"):
                yield alias.asname or top, alias.name if alias.asname else top, alias.name
    elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("torch", "triton"):
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            yield alias.asname or alias.name, path, path


def _path(node: ast.AST, aliases: dict[str, str]) -> str:
    """The dotted path of a name or an attribute below torch or Triton, else nothing."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in aliases:
        return ""
    return ".".join([aliases[node.id], *reversed(parts)])


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in path.split("."))


def copies(sources: Sequence[Source]) -> list[Copy]:
    """Runs of lines that stand earlier too."""
    first: dict[tuple[str, ...], Copy] = {}
    found: list[Copy] = []
    for source in sources:
        for segment in _segments(source):
            last: Copy | None = None
            for start in range(len(segment) - MIN_COPIED + 1):
                numbers, window = zip(*segment[start : start + MIN_COPIED], strict=True)
                here = Copy(source.name, set(numbers), "", 0)
                there = first.setdefault(window, here)
                if there.name == here.name and there.lines & here.lines:  # itself, or lines that overlap
                    continue
                if last is None or not last.lines & here.lines:
                    last = Copy(source.name, set(), there.name, min(there.lines))
                    found.append(last)
                last.lines |= here.lines
    return found


def _segments(source: Source) -> Iterator[list[tuple[int, str]]]:
    """The lines that can be copies, with their numbers and white space folded, cut at every signature."""
    passed_over: set[int] = set()
    signatures: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or _is_docstring(node):
            passed_over |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for function in _functions(source.tree):
        signatures |= set(range(function.lineno, max(function.body[0].lineno, function.lineno + 1)))
    segment: list[tuple[int, str]] = []
    for number, line in enumerate(source.text.splitlines(), start=1):
        if number in signatures:
            yield segment
            segment = []
        elif number not in passed_over and re.match(r"\s*[^\s#()\[\]{},:]", line):
            segment.append((number, " ".join(line.split())))
    yield segment


def _is_docstring(node: ast.AST) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
