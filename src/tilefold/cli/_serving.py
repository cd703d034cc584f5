"""What ``tilefold serve`` loads: models, an index, and what belongs to it."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.cli import _common, _models, _rerank, _retrievers, _scores

if TYPE_CHECKING:
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.tokens import TokenStore
    from tilefold.serve.models import Served
    from tilefold.serve.searchable import Searchable

_NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class ServedPaths:
    """The options of ``tilefold serve`` that name what is loaded."""

    model: str | None
    index: Path | None
    data: str | None
    vectors: Path | None
    bm25: Path | None
    tokens: str | None
    tokens_model: str | None
    name: str | None

    @property
    def index_name(self) -> str:
        """The name of the index in addresses."""
        return self.name or (self.index.resolve().name if self.index else "")


def check(paths: ServedPaths) -> None:
    """Refuse, before any work, nothing to serve, and a name that is no part of an address.

    Raises:
        UsageError: naming the option.
    """
    if paths.index is None:
        if paths.model is None and paths.tokens is None:
            raise _common.UsageError("--model: expected a model, or --index with an index; got neither.")
    elif not _NAME.fullmatch(paths.index_name):
        raise _common.UsageError(
            f"--name: expected letters, digits, dots and dashes, got {paths.index_name!r}; it is part of addresses."
        )


def load(paths: ServedPaths, asked: Mapping[str, Any]) -> tuple[list[Served], Searchable | None]:
    """The models, each loaded once, and the index with what belongs to it.

    Raises:
        UsageError, CommandError: paths that do not belong together.
    """
    from tilefold.serve.models import Served

    if paths.index is not None:
        return _with_index(paths, asked)
    served = []
    if paths.model is not None:
        model, kind = _models.load_model(paths.model, kinds=("sparse", "multi-vector", "dense"))
        served.append(Served(model, kind, paths.model))  # type: ignore[arg-type]
    if paths.tokens is not None:
        served.append(_late(paths, texts=True)[0])  # its model is of use alone
    if len({each.kind for each in served}) < len(served):
        raise _common.UsageError("--tokens: --model is a multi-vector model itself, which reranks: leave one out.")
    return served, None


def _with_index(paths: ServedPaths, asked: Mapping[str, Any]) -> tuple[list[Served], Searchable]:
    from tilefold.retrieval.vectors import read_vectors
    from tilefold.serve.models import Served
    from tilefold.serve.searchable import Searchable

    texts = None
    if paths.data is not None:
        data = paths.data
        texts = lambda: _common.load_data(data, documents_only=True).contents()  # noqa: E731 - the argument of a call
    index, encoder, options = _retrievers.load_index(asked, texts)
    parts: dict[str, Any] = {"query_top_k": asked["query_top_k"], "options": options}
    if paths.data is not None:
        collection, digest = _common.open_documents(paths.data)
        _scores.check_texts(f"--index {paths.index}", index.provenance, collection, digest)
        parts["documents"] = collection.documents
    if encoder is None:
        _common.refuse(("vectors", "bm25"), f"does nothing here: {paths.index} is a BM25 index")
    else:
        parts["encoder"] = Served(encoder, "sparse", str(paths.model))
        parts["vectors"] = None if paths.vectors is None else read_vectors(paths.vectors)
    if paths.tokens is not None:
        parts["late"], parts["store"] = _late(paths, texts=paths.data is not None)
    parts["words"] = None if paths.bm25 is None else _words(paths.bm25)
    names = {"vectors": f"--vectors: {paths.vectors}", "second": f"--bm25: {paths.bm25}", "tokens": "--tokens"}
    with _common.as_options(**names, model="--tokens-model"):
        searchable = Searchable(paths.index_name, index, **parts)
    return [model for model in (searchable.encoder, searchable.late) if model is not None], searchable


def _words(path: Path) -> BM25Index:
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.retrievers import open_index

    index = open_index(path)
    if not isinstance(index, BM25Index):
        raise _common.UsageError(f"--bm25: {path} is an index of vectors; make one with tilefold index --backend bm25.")
    return index


def _late(paths: ServedPaths, texts: bool) -> tuple[Served, TokenStore | None]:
    """The multi-vector model of --tokens, and its token vectors if those are what is there."""
    from tilefold.serve.models import Served

    model, store = _rerank.load_late(str(paths.tokens), paths.tokens_model, texts, "--tokens")
    name = paths.tokens if store is None else paths.tokens_model or store.manifest.model_source
    return Served(model, "multi-vector", str(name)), store
