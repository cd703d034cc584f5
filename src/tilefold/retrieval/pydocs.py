"""``pydocs``: a retrieval collection from the documentation of the installed Python."""

from __future__ import annotations

import ast
import hashlib
import inspect
import platform
import re
import sys
import sysconfig
import textwrap
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tilefold.retrieval.collection import Collection, Document

__all__ = ["BUILDER_VERSION", "build_pydocs", "cache_key"]

BUILDER_VERSION = 1
MIN_WORDS = 8
MIN_QUERY_WORDS, MAX_QUERY_WORDS = 4, 40
TEST_QUERIES = 400

_SKIPPED = (
    "__phello__ __pycache__ dist-packages ensurepip idlelib lib-dynload lib2to3 site-packages test tests turtledemo"
)
# Modules written in C, some with the public module that re-exports them.
_C_MODULES = (
    "builtins sys posix:os _io:io _thread _asyncio:asyncio _bisect:bisect _bz2:bz2 _codecs:codecs "
    "_collections:collections _contextvars:contextvars _csv:csv _ctypes:ctypes _datetime:datetime _decimal:decimal "
    "_elementtree:xml.etree.ElementTree _functools:functools _hashlib:hashlib _heapq:heapq _json:json _lzma:lzma "
    "_operator:operator _pickle:pickle _queue:queue _random:random _signal:signal _socket:socket _sqlite3:sqlite3 "
    "_sre:re _ssl:ssl _statistics:statistics _struct:struct _tracemalloc:tracemalloc _weakref:weakref "
    "_zoneinfo:zoneinfo array atexit binascii cmath errno faulthandler fcntl gc grp itertools marshal math mmap pwd "
    "pyexpat:xml.parsers.expat resource select syslog termios time unicodedata zlib"
)
# Pure-Python twins of C modules, under the name that users know.
_TWINS = {"_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io"}
_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def cache_key() -> str:
    """A key of the installed standard library and of this builder: equal keys give equal collections."""
    where = f"{sysconfig.get_paths()['stdlib']}\n{sys.version}"
    digest = hashlib.sha256(where.encode()).hexdigest()[:8]
    return f"{platform.python_implementation().lower()}-{platform.python_version()}-{digest}-v{BUILDER_VERSION}"


def build_pydocs() -> Collection:
    """Build the collection in a few seconds; the same every time for one Python installation.

    Its splits are ``train`` and ``test`` (400 queries, or a quarter of them all when there are fewer than 1,600). A
    summary line that opens several docstrings is no query. A Python without library sources is a ``RuntimeError``.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for name, text in (*_from_sources(root), *_from_c_modules()):
        key = _normal(text)
        if name not in texts and key not in seen and len(text.split()) >= MIN_WORDS:
            texts[name] = text
            seen.add(key)
    queries = _held_out(texts)
    if not queries:
        raise RuntimeError(f"pydocs: no documented Python sources under {root}. Use another Python, or a BEIR folder.")
    documents = {
        name: Document(name, name, _split(text)[1] if name in queries else text) for name, text in texts.items()
    }
    ranked = sorted(queries, key=lambda name: hashlib.sha256(name.encode()).digest())
    chosen = set(ranked[: min(TEST_QUERIES, len(ranked) // 4)])
    qrels: dict[str, dict[str, dict[str, int]]] = {"train": {}, "test": {}}
    for name in queries:
        qrels["test" if name in chosen else "train"][f"q-{name}"] = {name: 1}
    return Collection("pydocs", documents, {f"q-{name}": text for name, text in queries.items()}, qrels)


def _held_out(texts: dict[str, str]) -> dict[str, str]:
    """Document name -> summary line, where the line can serve as the query of that document alone."""
    parts = {name: _split(text) for name, text in texts.items()}
    openings = Counter(_normal(summary) for summary, _ in parts.values())
    bodies = Counter(_normal(body) for _, body in parts.values())
    bodies.update(_normal(text) for text in texts.values())
    return {
        name: summary.rstrip(".").rstrip()
        for name, (summary, body) in parts.items()
        if _is_query(summary)
        and len(body.split()) >= MIN_WORDS
        and openings[_normal(summary)] == 1
        and bodies[_normal(body)] == 1
    }


def _split(text: str) -> tuple[str, str]:
    """Summary line and body; without an empty line after the first there is no body."""
    summary, _, rest = text.partition("\n")
    return (summary.strip(), textwrap.dedent(rest).strip("\n")) if rest.startswith("\n") else (summary.strip(), "")


def _is_query(summary: str) -> bool:
    signature = "->" in summary or re.match(r"[\w.]+\s?\(", summary) is not None
    return not signature and MIN_QUERY_WORDS <= len(summary.split()) <= MAX_QUERY_WORDS


def _normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _from_sources(root: Path) -> Iterator[tuple[str, str]]:
    """Dotted name and docstring of everything in the sources under `root`, public modules first."""
    files, skipped = [], set(_SKIPPED.split())
    for file in root.rglob("*.py"):
        parts = file.relative_to(root).with_suffix("").parts
        if not skipped.intersection(parts) and not parts[0].startswith("config-"):
            parts = parts[:-1] if parts[-1] == "__init__" else parts
            name = ".".join((_TWINS.get(parts[0], parts[0]), *parts[1:])) if parts else ""
            files.append((any(part.startswith("_") for part in parts), name, file))
    for _, name, file in sorted(files):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(file.read_bytes())
            except (SyntaxError, ValueError):  # fixtures of lib2to3 and the like
                continue
        yield from _from_tree(tree, name)


def _from_tree(node: _Definition, name: str) -> Iterator[tuple[str, str]]:
    text = ast.get_docstring(node)
    if text:
        yield name, _tidy(text)
    pending: list[ast.AST] = list(reversed(node.body))
    while pending:
        child = pending.pop()
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _from_tree(child, f"{name}.{child.name}")
        elif isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            pending.extend(reversed(list(ast.iter_child_nodes(child))))


def _from_c_modules() -> Iterator[tuple[str, str]]:
    for entry in _C_MODULES.split():
        name, _, public = entry.partition(":")
        public = public or name
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = import_module(name)
        except ImportError:  # not built on this platform
            continue
        if getattr(module, "__file__", None) and str(module.__file__).endswith(".py"):
            continue
        yield from _documented(module, public)
        for attribute, value in sorted(vars(module).items()):
            if isinstance(value, type) and value.__module__ in (name, public):
                path = f"{public}.{attribute}"
                yield from _documented(value, path)
                for member, inner in sorted(vars(value).items()):
                    if not isinstance(inner, types.WrapperDescriptorType):
                        yield from _documented(inner, f"{path}.{member}")
            elif isinstance(value, types.BuiltinFunctionType):
                yield from _documented(value, f"{public}.{attribute}")


def _documented(value: object, name: str) -> Iterator[tuple[str, str]]:
    constant = not (callable(value) or inspect.ismodule(value) or inspect.isdatadescriptor(value))
    text = None if constant else getattr(value, "__doc__", None)
    if isinstance(text, str) and text.strip():
        yield name, _tidy(inspect.cleandoc(text))


def _tidy(text: str) -> str:
    """Without trailing blanks, and without characters that UTF-8 cannot encode."""
    lines = (line.rstrip() for line in text.strip().splitlines())
    return "\n".join(lines).encode("utf-8", "replace").decode("utf-8")
