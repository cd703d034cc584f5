"""Collections by name, and the one that is made of Python's own documentation."""

from __future__ import annotations

import ast
import hashlib
import inspect
import logging
import os
import platform
import re
import sys
import sysconfig
import textwrap
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Literal

from tilefold._internal.arguments import check_instance
from tilefold._internal.files import InUseError
from tilefold.retrieval.data.collection import (
    BEIR_LAYOUT,
    Collection,
    Document,
    documents_table,
    load_beir,
)
from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.data.lazy_documents import open_lazy_documents
from tilefold.retrieval.data.tables import USUAL_FIELDS
from tilefold.retrieval.errors import DataError

__all__ = ["BUILDER_VERSION", "build_pydocs", "cache_key", "default_cache_dir", "load_collection"]

BUILDER_VERSION = 1
MIN_WORDS = 8
MIN_QUERY_WORDS, MAX_QUERY_WORDS = 4, 40
TEST_QUERIES = 400

_SKIP = "__phello__ __pycache__ dist-packages ensurepip idlelib lib-dynload lib2to3 site-packages test tests turtledemo"
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

_logger = logging.getLogger(__name__)


def default_cache_dir() -> Path:
    """``$TILEFOLD_CACHE_DIR``, else ``$XDG_CACHE_HOME/tilefold``, else ``~/.cache/tilefold``."""
    if chosen := os.environ.get("TILEFOLD_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tilefold"


def load_collection(
    name_or_path: str | Path,
    cache_dir: str | Path | None = None,
    *,
    unknown: Literal["error", "drop"] = "error",
    documents_only: bool = False,
    splits: Sequence[str] | None = None,
    stored: int | None = None,
    fields: DocumentFields = USUAL_FIELDS,
) -> Collection:
    """The built-in collection ``"pydocs"``, or what :func:`tilefold.retrieval.load_beir` reads at a
    path.

    ``pydocs`` is built once for each Python installation and kept as a BEIR folder under
    `cache_dir` (:func:`default_cache_dir` when None). A damaged or unwritable cache costs only the
    time to build again.

    Documents in a file of at least `stored` bytes, of JSON lines or lines of an id, a tab and a
    text, stay there and are read one by one: ``documents`` is a mapping that cannot be changed, and
    raises a ``DataError`` once the file has changed. Where their lines begin is kept in the cache.
    `fields` names the fields of documents, where they are not the usual ones.
    """
    check_instance("name_or_path", name_or_path, (str, Path), "'pydocs', or a path")
    check_instance("fields", fields, DocumentFields, "DocumentFields(text=...)")
    cache = default_cache_dir() if cache_dir is None else Path(cache_dir)

    def load(path: Path) -> Collection:
        file, documents = documents_table(path), None
        if stored is not None and file.is_file() and file.stat().st_size >= stored:
            documents = open_lazy_documents(file, cache, fields)
        return load_beir(
            path,
            unknown,
            documents_only=documents_only,
            splits=splits,
            documents=documents,
            fields=fields,
        )

    if str(name_or_path) == "pydocs":
        if fields != USUAL_FIELDS:
            raise ValueError(
                f"fields: expected none with the built-in collection pydocs, got {fields.names}.",
            )
        return _cached_pydocs(cache / "pydocs" / cache_key(), load)
    path = Path(name_or_path)
    if not path.exists():
        wanted = "expected 'pydocs', or the path of a BEIR folder or of documents"
        raise FileNotFoundError(f"{name_or_path}: no such file or folder, {wanted}. {BEIR_LAYOUT}")
    return load(path)


def _cached_pydocs(folder: Path, load: Callable[[Path], Collection]) -> Collection:
    if folder.is_dir():
        try:
            return replace(load(folder), name="pydocs")
        except (DataError, OSError) as error:
            _logger.warning("cached pydocs is damaged and is built again: %s", error)
    collection = build_pydocs()
    try:
        collection.save_beir(folder, overwrite=True)  # what is there is damaged
    except (OSError, InUseError) as error:
        _logger.warning("pydocs could not be cached: %s", error)
    return collection


def cache_key() -> str:
    """A key of the installed standard library and of this builder: equal keys give equal
    collections.
    """
    digest = hashlib.sha256(
        f"{sysconfig.get_paths()['stdlib']}\n{sys.version}".encode(),
    ).hexdigest()[:8]
    return f"{platform.python_implementation().lower()}-{platform.python_version()}-{digest}-v{BUILDER_VERSION}"


def build_pydocs() -> Collection:
    """Build the collection in a few seconds; the same every time for one Python installation.

    Its splits are ``train`` and ``test`` (400 queries, or a quarter of them all when there are
    fewer than 1,600). A summary line that opens several docstrings is no query. A Python without
    library sources is a ``RuntimeError``.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for name, text in (*_from_sources(root), *_from_c_modules()):
        key = _normal(text)
        if name not in texts and key not in seen and len(text.split()) >= MIN_WORDS:
            texts[name] = text
            seen.add(key)
    if not (queries := _held_out(texts)):
        raise RuntimeError(
            f"pydocs: no documented Python sources under {root}. Use another Python, or a BEIR folder.",
        )
    documents = {
        key: Document(key, key, _split(text)[1] if key in queries else text)
        for key, text in texts.items()
    }
    ranked = sorted(queries, key=lambda name: hashlib.sha256(name.encode()).digest())
    chosen = set(ranked[: min(TEST_QUERIES, len(ranked) // 4)])
    qrels: dict[str, dict[str, dict[str, int]]] = {"train": {}, "test": {}}
    for name in queries:
        qrels["test" if name in chosen else "train"][f"q-{name}"] = {name: 1}
    return Collection(
        "pydocs",
        documents,
        {f"q-{name}": text for name, text in queries.items()},
        qrels,
    )


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
    return (
        (summary.strip(), textwrap.dedent(rest).strip("\n"))
        if rest.startswith("\n")
        else (summary.strip(), "")
    )


def _is_query(summary: str) -> bool:
    signature = "->" in summary or re.match(r"[\w.]+\s?\(", summary) is not None
    return not signature and MIN_QUERY_WORDS <= len(summary.split()) <= MAX_QUERY_WORDS


def _normal(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.casefold()))


def _from_sources(root: Path) -> Iterator[tuple[str, str]]:
    """Dotted name and docstring of everything in the sources under `root`, public modules first."""
    files, skipped = [], set(_SKIP.split())
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
    if text := ast.get_docstring(node):
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
    return (
        "\n".join(line.rstrip() for line in text.strip().splitlines())
        .encode("utf-8", "replace")
        .decode("utf-8")
    )
