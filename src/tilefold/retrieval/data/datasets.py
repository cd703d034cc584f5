"""Loading collections by name or path, and the collection of Python's own documentation."""

from __future__ import annotations

import ast
import hashlib
import inspect
import logging
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

from tilefold._internal.arguments import ArgumentError, check_instance, path_of
from tilefold._internal.cache_folder import default_cache_dir
from tilefold._internal.files import InUseError
from tilefold.retrieval.data.collection import (
    BEIR_LAYOUT,
    Collection,
    Document,
    documents_table,
    is_page_collection,
    load_beir,
)
from tilefold.retrieval.data.fields import DocumentFields
from tilefold.retrieval.data.lazy_documents import LazyDocuments, open_lazy_documents
from tilefold.retrieval.data.pages import PageRanges
from tilefold.retrieval.data.tables import USUAL_FIELDS
from tilefold.retrieval.errors import DataError

__all__ = [
    "BUILDER_VERSION",
    "build_pydocs",
    "cache_key",
    "check_collection_exists",
    "load_collection",
]

BUILDER_VERSION = 1
MIN_WORDS = 8
MIN_QUERY_WORDS = 4
MAX_QUERY_WORDS = 40
TEST_QUERIES = 400
_QUERIES_PER_TEST_QUERY = 4  # a small collection has this many queries for each test query

# Files and folders of the standard library that are not modules for users.
_SKIPPED_NAMES = {
    "__phello__",
    "__pycache__",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
# Modules written in C -> the public module that re-exports their contents.
_C_MODULES = {
    "builtins": "builtins",
    "sys": "sys",
    "posix": "os",
    "_io": "io",
    "_thread": "_thread",
    "_asyncio": "asyncio",
    "_bisect": "bisect",
    "_bz2": "bz2",
    "_codecs": "codecs",
    "_collections": "collections",
    "_contextvars": "contextvars",
    "_csv": "csv",
    "_ctypes": "ctypes",
    "_datetime": "datetime",
    "_decimal": "decimal",
    "_elementtree": "xml.etree.ElementTree",
    "_functools": "functools",
    "_hashlib": "hashlib",
    "_heapq": "heapq",
    "_json": "json",
    "_lzma": "lzma",
    "_operator": "operator",
    "_pickle": "pickle",
    "_queue": "queue",
    "_random": "random",
    "_signal": "signal",
    "_socket": "socket",
    "_sqlite3": "sqlite3",
    "_sre": "re",
    "_ssl": "ssl",
    "_statistics": "statistics",
    "_struct": "struct",
    "_tracemalloc": "tracemalloc",
    "_weakref": "weakref",
    "_zoneinfo": "zoneinfo",
    "array": "array",
    "atexit": "atexit",
    "binascii": "binascii",
    "cmath": "cmath",
    "errno": "errno",
    "faulthandler": "faulthandler",
    "fcntl": "fcntl",
    "gc": "gc",
    "grp": "grp",
    "itertools": "itertools",
    "marshal": "marshal",
    "math": "math",
    "mmap": "mmap",
    "pwd": "pwd",
    "pyexpat": "xml.parsers.expat",
    "resource": "resource",
    "select": "select",
    "syslog": "syslog",
    "termios": "termios",
    "time": "time",
    "unicodedata": "unicodedata",
    "zlib": "zlib",
}
# Pure-Python version of a C module -> name of the module that users import.
_PUBLIC_NAMES = {"_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io"}
_Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

_logger = logging.getLogger(__name__)


def load_collection(
    name_or_path: str | Path,
    cache_dir: str | Path | None = None,
    *,
    unknown: Literal["error", "drop"] = "error",
    documents_only: bool = False,
    splits: Sequence[str] | None = None,
    stored: int | None = None,
    fields: DocumentFields = USUAL_FIELDS,
    page_ranges: PageRanges | None = None,
) -> Collection:
    """Load the built-in collection ``"pydocs"``, or a collection at a path.

    ``pydocs`` is built once for each Python installation and cached as a BEIR folder. If the cache
    is damaged or cannot be written, the collection is built again.

    Args:
        name_or_path: ``"pydocs"``, or a path that :func:`tilefold.retrieval.load_beir` reads.
        cache_dir: folder of the cache; by default ``$TILEFOLD_CACHE_DIR``, else
            ``$XDG_CACHE_HOME/tilefold``, else ``~/.cache/tilefold``.
        unknown: what to do with judgements of unknown queries or documents: ``"error"`` or
            ``"drop"``.
        documents_only: leave queries and judgements unread.
        splits: the splits whose judgements are read; all by default.
        stored: size in bytes from which a file of documents is not loaded into memory. Its
            documents are then read one by one when they are needed. The file must have JSON lines
            or lines ``id<tab>text``. ``documents`` is a read-only mapping, which raises a
            ``DataError`` once the file has changed. The offsets of the lines are cached. By default
            all documents are loaded into memory.
        fields: custom names of the document fields.
        page_ranges: the pages of each PDF and TIFF of a folder of page images; all by default.

    Raises:
        FileNotFoundError: if the name is unknown, or a file is missing.
        DataError: if a file is malformed.

    Examples:
        >>> collection = load_collection("bank")  # a folder in the layout of BEIR
        >>> len(collection.documents), sorted(collection.qrels)
        (8, ['test', 'train'])
    """
    check_instance("name_or_path", name_or_path, (str, Path), "'pydocs', or a path")
    check_instance("fields", fields, DocumentFields, "DocumentFields(text=...)")
    cache = default_cache_dir() if cache_dir is None else path_of("cache_dir", cache_dir)

    def load(path: Path) -> Collection:
        """Load a folder or file with the options of this call."""
        return load_beir(
            path,
            unknown,
            documents_only=documents_only,
            splits=splits,
            documents=_open_large_file(path, cache, min_bytes=stored, fields=fields),
            fields=fields,
            page_ranges=page_ranges,
            cache_dir=cache,
        )

    if str(name_or_path) == "pydocs":
        if fields != USUAL_FIELDS:
            raise ArgumentError(
                "fields",
                f"expected none with the built-in collection pydocs, got {fields.names}.",
            )
        return _load_or_build_pydocs(cache / "pydocs" / cache_key(), load)
    check_collection_exists(name_or_path)
    return load(Path(name_or_path))


def check_collection_exists(name_or_path: str | Path) -> None:
    """Raise ``FileNotFoundError`` unless a path exists or is ``"pydocs"``."""
    if str(name_or_path) != "pydocs" and not Path(name_or_path).exists():
        raise FileNotFoundError(
            f"{name_or_path}: no such file or folder, expected 'pydocs', or the path of a BEIR "
            f"folder or of documents. {BEIR_LAYOUT}",
        )


def _open_large_file(
    path: Path,
    cache: Path,
    *,
    min_bytes: int | None,
    fields: DocumentFields,
) -> LazyDocuments[Document] | None:
    """Open the documents of a collection without loading them, if their file is large.

    Args:
        path: folder or file of the collection.
        cache: folder of the cache.
        min_bytes: size from which a file is large; None loads every file into memory.
        fields: custom names of the document fields.

    Returns:
        The documents, or None if they are to be loaded into memory.
    """
    if min_bytes is None or is_page_collection(path):
        return None
    file = documents_table(path)
    if not file.is_file() or file.stat().st_size < min_bytes:
        return None
    return open_lazy_documents(file, cache, fields)


def _load_or_build_pydocs(folder: Path, load: Callable[[Path], Collection]) -> Collection:
    """Load the built-in collection ``pydocs`` from the cache, or build and cache it.

    Args:
        folder: folder of the collection in the cache.
        load: loads a BEIR folder.
    """
    if folder.is_dir():
        try:
            return replace(load(folder), name="pydocs")
        except (DataError, OSError) as error:
            _logger.warning("cached pydocs is damaged and is built again: %s", error)
    collection = build_pydocs()
    try:
        collection.save_beir(folder, overwrite=True)  # an existing folder is damaged
    except (OSError, InUseError) as error:
        _logger.warning("pydocs could not be cached: %s", error)
    return collection


def cache_key() -> str:
    """Return a key of the Python installation and this builder.

    Equal keys give equal collections.
    """
    library = f"{sysconfig.get_paths()['stdlib']}\n{sys.version}"
    digest = hashlib.sha256(library.encode()).hexdigest()[:8]
    implementation = platform.python_implementation().lower()
    return f"{implementation}-{platform.python_version()}-{digest}-v{BUILDER_VERSION}"


def build_pydocs() -> Collection:
    """Build a collection from the docstrings of Python's standard library, in a few seconds.

    A document is a docstring, with the name of its module, class or function as id and title. A
    query is the summary line of a docstring, and that docstring is its only relevant document. The
    summary line is then left out of the document. The splits are ``train`` and ``test`` (400
    queries, or a quarter of all when there are fewer than 1,600). The collection is the same every
    time for one Python installation.

    Raises:
        RuntimeError: if Python was installed without library sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = _distinct_docstrings(root)
    queries = _summary_queries(texts)
    if not queries:
        raise RuntimeError(
            f"pydocs: no documented Python sources under {root}. Use another Python, or a BEIR "
            "folder.",
        )
    documents = {}
    for name, text in texts.items():
        if name in queries:
            _, text_of_document = _split_summary(text)
        else:
            text_of_document = text
        documents[name] = Document(name, name, text_of_document)
    return Collection(
        name="pydocs",
        documents=documents,
        queries={f"q-{name}": summary for name, summary in queries.items()},
        qrels=_qrels_by_split(list(queries)),
    )


def _distinct_docstrings(root: Path) -> dict[str, str]:
    """Return the docstrings of the standard library, without short and duplicate ones.

    Args:
        root: folder of the standard library.

    Returns:
        Name of a definition -> its docstring of at least ``MIN_WORDS`` words. If several docstrings
        have the same words, the first one is kept.
    """
    texts: dict[str, str] = {}
    normalized_texts: set[str] = set()
    for name, text in (*_docstrings_of_sources(root), *_docstrings_of_c_modules()):
        normalized_text = _normalize(text)
        is_duplicate = name in texts or normalized_text in normalized_texts
        if not is_duplicate and len(text.split()) >= MIN_WORDS:
            texts[name] = text
            normalized_texts.add(normalized_text)
    return texts


def _qrels_by_split(names: list[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Divide queries into training and test queries, each with one relevant document.

    Args:
        names: ids of the documents that have a query. The query of the document ``name`` has the id
            ``q-name``.

    Returns:
        Split -> query id -> document id -> grade.
    """
    # Digests of the names give an order that looks random and is the same on every machine.
    shuffled = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    n_test = min(TEST_QUERIES, len(shuffled) // _QUERIES_PER_TEST_QUERY)
    test_names = set(shuffled[:n_test])
    qrels: dict[str, dict[str, dict[str, int]]] = {"train": {}, "test": {}}
    for name in names:
        split = "test" if name in test_names else "train"
        qrels[split][f"q-{name}"] = {name: 1}
    return qrels


def _summary_queries(texts: dict[str, str]) -> dict[str, str]:
    """Choose the summary lines of docstrings that can be queries.

    No other docstring may begin with the same words, and the rest of the docstring must be long
    enough and unique. Otherwise several documents would answer the query.

    Args:
        texts: name -> docstring.

    Returns:
        Name of a docstring -> its summary line without the full stop.
    """
    summaries_and_bodies = {name: _split_summary(text) for name, text in texts.items()}
    summary_counts = Counter(_normalize(summary) for summary, _ in summaries_and_bodies.values())
    body_counts = Counter(_normalize(body) for _, body in summaries_and_bodies.values())
    # The body of one docstring may be the entire docstring of another definition.
    body_counts.update(_normalize(text) for text in texts.values())
    return {
        name: summary.rstrip(".").rstrip()
        for name, (summary, body) in summaries_and_bodies.items()
        if _is_query(summary)
        and len(body.split()) >= MIN_WORDS
        and summary_counts[_normalize(summary)] == 1
        and body_counts[_normalize(body)] == 1
    }


def _split_summary(text: str) -> tuple[str, str]:
    """Split a docstring into its summary line and its body, which follows an empty line."""
    summary, _, body = text.partition("\n")
    if not body.startswith("\n"):
        return summary.strip(), ""
    return summary.strip(), textwrap.dedent(body).strip("\n")


def _is_query(summary: str) -> bool:
    """Whether a summary line is a sentence of suitable length, and not a function signature."""
    is_signature = "->" in summary or re.match(r"[\w.]+\s?\(", summary) is not None
    return not is_signature and MIN_QUERY_WORDS <= len(summary.split()) <= MAX_QUERY_WORDS


def _normalize(text: str) -> str:
    """Return the words of a text in lower case, to recognise duplicates."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _docstrings_of_sources(root: Path) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of all modules, classes and functions written in Python.

    Public modules come first, so that a docstring that is repeated gets a public name.

    Args:
        root: folder of the standard library.

    Yields:
        Dotted name, such as ``json.decoder.JSONDecoder``, and docstring.
    """
    modules = []  # (is_private, name, file): sorts public modules first
    for file in root.rglob("*.py"):
        parts = list(file.relative_to(root).with_suffix("").parts)
        if _SKIPPED_NAMES.intersection(parts) or parts[0].startswith("config-"):
            continue
        if parts[-1] == "__init__":
            del parts[-1]
        if not parts:
            continue
        is_private = any(part.startswith("_") for part in parts)
        parts[0] = _PUBLIC_NAMES.get(parts[0], parts[0])
        modules.append((is_private, ".".join(parts), file))
    for _, name, file in sorted(modules):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tree = ast.parse(file.read_bytes())
            except (SyntaxError, ValueError):  # some files are invalid on purpose, as test data
                continue
        yield from _docstrings_of_definition(tree, name)


def _docstrings_of_definition(node: _Definition, name: str) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of a definition and of the definitions in it, in source order.

    Args:
        node: syntax tree of a module, class or function.
        name: dotted name of the definition.
    """
    docstring = ast.get_docstring(node)
    if docstring:
        yield name, _tidy(docstring)
    for child in _definitions_in(node):
        yield from _docstrings_of_definition(child, f"{name}.{child.name}")


def _definitions_in(
    node: ast.AST,
) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the definitions directly in a node or in its if, try and with statements."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child
        elif isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _definitions_in(child)


def _docstrings_of_c_modules() -> Iterator[tuple[str, str]]:
    """Yield name and docstring of modules written in C, and of their functions and classes.

    The modules are imported, because C sources are not part of an installation.

    Yields:
        Dotted name and docstring. The contents of a private module are named after the public
        module that re-exports them.
    """
    for name, public_name in _C_MODULES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = import_module(name)
        except ImportError:  # not built on this platform
            continue
        # On some platforms the module is written in Python, and its source was read already.
        file = getattr(module, "__file__", None)
        if file and str(file).endswith(".py"):
            continue
        yield from _docstrings_of_c_module(module, name, public_name)


def _docstrings_of_c_module(
    module: types.ModuleType,
    name: str,
    public_name: str,
) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of a module written in C, and of its functions and classes.

    Args:
        module: the imported module.
        name: name of the module, such as ``_bisect``.
        public_name: name of the public module that re-exports its contents, such as ``bisect``.
    """
    yield from _docstring_of_value(module, public_name)
    for attribute, value in sorted(vars(module).items()):
        path = f"{public_name}.{attribute}"
        if isinstance(value, types.BuiltinFunctionType):
            yield from _docstring_of_value(value, path)
        elif isinstance(value, type) and value.__module__ in (name, public_name):
            # Classes that the module only imports are left out.
            yield from _docstring_of_value(value, path)
            for member_name, member in sorted(vars(value).items()):
                # Slot wrappers, such as __add__, have the same docstring in every class.
                if not isinstance(member, types.WrapperDescriptorType):
                    yield from _docstring_of_value(member, f"{path}.{member_name}")


def _docstring_of_value(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of a value, or nothing for a constant or without a docstring.

    Args:
        value: a module, class, function, attribute of a class or constant.
        name: dotted name of the value.
    """
    if not (callable(value) or inspect.ismodule(value) or inspect.isdatadescriptor(value)):
        return
    text = getattr(value, "__doc__", None)
    if isinstance(text, str) and text.strip():
        yield name, _tidy(inspect.cleandoc(text))


def _tidy(text: str) -> str:
    """Remove trailing blanks, and replace characters that UTF-8 cannot encode."""
    lines = "\n".join(line.rstrip() for line in text.strip().splitlines())
    return lines.encode("utf-8", "replace").decode("utf-8")
