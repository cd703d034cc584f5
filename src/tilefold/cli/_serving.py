"""Models and an index for ``tilefold serve``, loaded and checked against each other."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.cli import _common, _models, _rerank, _retrievers, _scores

if TYPE_CHECKING:
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.collection import Collection
    from tilefold.retrieval.provenance import Provenance
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


def check(paths: ServedPaths, options: _retrievers.IndexOptions) -> None:
    """Refuse, before any work, options that do not go together.

    Raises:
        UsageError: naming the option.
    """
    if paths.index is None:
        if paths.model is None and paths.tokens is None:
            raise _common.UsageError("--model: expected a model, or --index with an index; got neither.")
        alone = {"--data": paths.data, "--vectors": paths.vectors, "--bm25": paths.bm25, "--name": paths.name}
        for option, value in (alone | options.given()).items():
            _common.refuse(option, value, "goes with --index")
    elif not _NAME.fullmatch(paths.index_name):
        raise _common.UsageError(
            f"--name: expected letters, digits, dots and dashes, got {paths.index_name!r}; it is part of addresses."
        )
    if paths.model is None and paths.tokens is None:
        useless = ("default_side", "max_batch_tokens", "auto_truncate")
        _common.refuse_useless(useless, "for an index of words alone, without a model")
    if paths.tokens is None:
        _common.refuse("--tokens-model", paths.tokens_model, "goes with --tokens")


def load(paths: ServedPaths, options: _retrievers.IndexOptions) -> tuple[list[Served], Searchable | None]:
    """The models, each loaded once, and the index with what belongs to it.

    Raises:
        UsageError, CommandError: paths that do not belong together.
    """
    from tilefold.serve.models import Served

    if paths.index is None:
        served = []
        if paths.model is not None:
            model, kind = _models.load_model(paths.model, kinds=("sparse", "multi-vector", "dense"))
            served.append(Served(model, kind, paths.model))  # type: ignore[arg-type]
        if paths.tokens is not None:
            reranker = _reranker(paths, None, None)
            served.append(Served(reranker.model, "multi-vector", _source(paths, reranker)))
        _check_kinds(served)
        return served, None
    return _with_index(paths, paths.index, options)


def _with_index(paths: ServedPaths, index: Path, options: _retrievers.IndexOptions) -> tuple[list[Served], Searchable]:
    from tilefold.retrieval.vectors import read_vectors
    from tilefold.serve.models import Served
    from tilefold.serve.searchable import Searchable

    texts = None
    if paths.data is not None:
        data = paths.data
        texts = lambda: _common.load_data(data, documents_only=True).contents()  # noqa: E731 - the argument of a call
    retriever = _retrievers.open_index(index, paths.model, options, texts)
    collection = None
    if paths.data is not None:
        collection, digest = _common.open_documents(paths.data)
        _scores.check_texts(f"--index {index}", retriever.provenance, collection, digest)
    served, encoder, vectors, search = [], None, None, {}
    if isinstance(retriever, _retrievers.SparseRetriever):
        encoder = Served(retriever.encoder, "sparse", str(paths.model))
        served.append(encoder)
        search = dict(retriever.options)
        if paths.vectors is not None:
            _retrievers.check_vectors(paths.vectors, retriever)
            vectors = read_vectors(paths.vectors)
    else:
        for option, value in (("--vectors", paths.vectors), ("--bm25", paths.bm25)):
            _common.refuse(option, value, f"does nothing here: {index} is a BM25 index")
    late, store = None, None
    if paths.tokens is not None:
        reranker = _reranker(paths, collection, retriever.provenance)
        late, store = Served(reranker.model, "multi-vector", _source(paths, reranker)), reranker.store
        served.append(late)
    found: Any = retriever.index if isinstance(retriever, _retrievers.SparseRetriever) else retriever
    return served, Searchable(
        paths.index_name,
        found,
        encoder,
        collection.documents if collection else {},
        vectors,
        None if paths.bm25 is None else _words(paths.bm25, retriever.provenance),
        late,
        store,
        options.query_top_k,
        search,
    )


def _words(path: Path, made_of: Provenance) -> BM25Index:
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.index.protocol import read_description

    if read_description(path)["backend"] != BM25Index.backend:
        raise _common.UsageError(f"--bm25: {path} is an index of vectors; make one with tilefold index --backend bm25.")
    index = BM25Index.load(path)
    if "texts_sha256" in made_of.differs(index.provenance):
        raise _common.CommandError(f"--bm25: {path} was made from other documents than --index.")
    return index


def _reranker(paths: ServedPaths, collection: Collection | None, made_of: Provenance | None) -> _rerank.Reranker:
    options = _rerank.RerankOptions(str(paths.tokens), paths.tokens_model, None, "keep", None)
    if collection is None and not (Path(options.rerank) / "manifest.json").is_file():  # its model is of use alone
        _common.refuse("--tokens-model", paths.tokens_model, "goes with token vectors in --tokens, which is a model")
        return _rerank.Reranker(options, _models.load_multi_vector(options.rerank, "--tokens"), None, {})
    try:
        return _rerank.load_reranker(options, collection, made_of)
    except _common.CommandError as error:  # in the words of search
        raise type(error)(str(error).replace("--rerank", "--tokens")) from error


def _source(paths: ServedPaths, reranker: _rerank.Reranker) -> str:
    """Name of the multi-vector model."""
    if reranker.store is None:
        return str(paths.tokens)
    return str(paths.tokens_model or reranker.store.manifest.model_source)


def _check_kinds(served: list[Served]) -> None:
    if len({each.kind for each in served}) < len(served):
        raise _common.UsageError("--tokens: --model is a multi-vector model itself, which reranks: leave one out.")
