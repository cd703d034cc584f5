"""Options that name what is searched: an index with its model, encoded documents, or a dense model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold._typing import Model
from tilefold.cli import _common, _models

if TYPE_CHECKING:
    from sentence_transformers import SparseEncoder

    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.index import SparseIndex
    from tilefold.retrieval.provenance import Provenance
    from tilefold.retrieval.searcher import Searcher

MODEL_HELP = "The SparseEncoder that made --index; minilm for an index of encode --model minilm."
DENSE_LENGTH = Annotated[int | None, typer.Option(help="Dense: tokens read of a text; by default the model's.")]
QUERY_TOP_K = Annotated[int | None, typer.Option(help="Sparse: keep only this many terms of a query.")]
QUERY_CUT = Annotated[
    int | None,
    typer.Option(
        help="seismic: heaviest terms of a query that choose the clusters to look into; by default the index's."
    ),
]
HEAP_FACTOR = Annotated[
    float | None,
    typer.Option(help="seismic: lower looks into more clusters, slower and closer to exact; by default the index's."),
]
OTHER_MODEL = Annotated[
    bool,
    typer.Option(
        "--other-model",
        help="Search with another model than the one that made the vectors, such as a query encoder of its own.",
    ),
]
Texts = Callable[[], Mapping[str, str]]


def load_index(
    asked: Mapping[str, Any], texts: Texts | None
) -> tuple[SparseIndex | BM25Index, SparseEncoder | None, dict[str, Any]]:
    """Load the index of --index or --vectors, the model of --model (BM25 has none), and options of the search.

    Args:
        asked: values of the options ``index`` or ``vectors``, ``model``, ``query_top_k``, ``query_cut``,
            ``heap_factor`` and ``other_model``.
        texts: gives the documents of --data, from which the untrained start is made again where it is not in the cache.
    """
    index, path = _opened(asked)
    options = _common.known({name: asked[name] for name in ("query_cut", "heap_factor")})
    if index.backend != "seismic":
        _common.refuse(options, f"is for seismic indexes, and {path} is searched as {index.backend}")
    if index.backend == "bm25":
        useless = [name for name in ("model", "query_top_k", "other_model") if asked[name]]
        _common.refuse(useless, f"does nothing here: {path} is a BM25 index, which reads words")
        return index, None, {}
    model, made_by = asked["model"], index.provenance
    if model is None:
        raise _common.UsageError(f"--index: {path} holds vectors; name the model that made them with --model.")
    if model == _models.PACKAGED:
        encoder = _untrained(path, made_by.texts_sha256, texts)
    else:
        encoder = _models.load_encoder(model)
    _check_model(made_by, encoder, str(model), path, asked["other_model"])
    return index, encoder, options


def open_searcher(
    asked: Mapping[str, Any], texts: Texts | None, load: Callable[[Provenance], dict[str, Any]]
) -> Searcher:
    """A searcher of what :func:`load_index` loads, with the parts that `load` then loads for its provenance."""
    from tilefold.retrieval.searcher import Searcher

    index, encoder, options = load_index(asked, texts)
    parts = load(index.provenance)
    if encoder is not None and asked.get("prf") is not None and parts.get("vectors") is None:
        raise _common.UsageError("--prf reads the vectors of the documents found: give them with --vectors.")
    names = {"vectors": "--vectors", "second": f"--prf-with: {asked.get('prf_with')}", "tokens": "--rerank"}
    with _common.as_options(**names, model="--rerank-model"):
        return Searcher(index, encoder, query_top_k=asked["query_top_k"], options=options, other_model=True, **parts)


def _opened(asked: Mapping[str, Any]) -> tuple[SparseIndex | BM25Index, Path]:
    """The index at --index, or an exact one of the vectors at --vectors, and its path."""
    from tilefold.retrieval import build_index
    from tilefold.retrieval.retrievers import open_index

    path: Path | None = asked.get("index")
    if path is not None:
        return open_index(path), path
    return build_index(read_documents(asked["vectors"]), "exact"), asked["vectors"]


def read_documents(path: Path) -> Any:
    """The encoded documents that --vectors names."""
    from tilefold.retrieval import read_manifest, read_vectors

    if (kind := read_manifest(path).kind) != "document":
        raise _common.UsageError(f"--vectors: {path} holds {kind} vectors; encode documents without --queries.")
    return read_vectors(path)


def _untrained(path: Path, texts_sha256: str | None, texts: Texts | None) -> Any:
    if texts_sha256 is None:
        raise _common.UsageError(
            f"--model: {_models.PACKAGED} is the untrained start for the documents of an index, and {path} does not "
            "say which those are: give the folder of the model that made it."
        )
    return _models.load_untrained(texts_sha256, texts, f"the documents of {path}")


def _check_model(made_by: Provenance, encoder: Model, name: str, path: Path, other_model: bool) -> None:
    from tilefold.retrieval.retrievers import check_model

    try:
        if not check_model(made_by, encoder, name, f"the index {path}"):
            _common.note(
                f"--index: {path} does not say which model made it, so that {name} could not be compared with it"
            )
    except ValueError as error:
        if not other_model:
            raise _common.CommandError(f"--{error}") from error
        _common.note(f"--model: {name} is not the model that made the index {path}")


def open_dense(asked: Mapping[str, Any], texts: Mapping[str, str], texts_sha256: str | None, **parts: Any) -> Searcher:
    """The dense model at --model over `texts` with their fingerprint, encoded, and `parts` of a searcher."""
    from tilefold.retrieval.retrievers import DenseRetriever
    from tilefold.retrieval.searcher import Searcher

    _common.refuse(["prf_terms"], "is for sparse queries, and this model is dense")
    model = _models.load_dense(asked["model"])
    if asked["max_length"] is not None:
        model.max_seq_length = asked["max_length"]
    with _common.progress_bar("encoding") as update:
        dense = DenseRetriever(model, texts, texts_sha256, update)
        with _common.as_options(vectors="--vectors", second=f"--prf-with: {asked.get('prf_with')}"):
            searcher = Searcher(dense, **parts)
        _ = dense.vectors
    return searcher
