"""What answers queries: an index with the model that made it, a BM25 index, or a dense model over a collection."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tilefold.cli import _common, _models

if TYPE_CHECKING:
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.fusion import Run
    from tilefold.retrieval.index import SparseIndex
    from tilefold.retrieval.provenance import Provenance
    from tilefold.retrieval.vectors import SparseVectors

MODEL_HELP = "The SparseEncoder that made --index; minilm for an index of encode --model minilm."
QUERY_TOP_K_HELP = "Sparse: keep only this many terms of a query."
QUERY_CUT_HELP = "seismic: heaviest terms of a query that choose the clusters to look into; by default the index's."
HEAP_FACTOR_HELP = "seismic: lower looks into more clusters, slower and closer to exact; by default the index's."
OTHER_MODEL_HELP = "Search with another model than the one that made the vectors, such as a query encoder of its own."


class Retriever(Protocol):
    """Answers queries from one collection."""

    @property
    def provenance(self) -> Provenance: ...

    def search(self, queries: Mapping[str, str], k: int) -> Run:
        """The `k` best documents for each query."""


@dataclass(frozen=True)
class SparseRetriever:
    """An index of sparse vectors, and the model (or the words of BM25) that encodes queries for it."""

    index: SparseIndex
    encoder: Any
    query_top_k: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    words: BM25Index | None = None

    @property
    def provenance(self) -> Provenance:
        return self.index.provenance

    def encode(self, queries: Mapping[str, str]) -> SparseVectors:
        """The queries' vectors."""
        from tilefold.retrieval.encoding import encode_queries

        if self.words is not None:
            return self.words.query_vectors(queries)
        return encode_queries(self.encoder, queries, top_k=self.query_top_k)

    def search_vectors(self, vectors: SparseVectors, k: int) -> Run:
        """The `k` best documents for queries that are encoded."""
        from tilefold.retrieval.index import hits_to_run

        return hits_to_run(vectors, self.index.search(vectors, k, **self.options))

    def search(self, queries: Mapping[str, str], k: int) -> Run:
        return self.search_vectors(self.encode(queries), k)


@dataclass(frozen=True)
class DenseRetriever:
    """A dense model that encodes the whole collection for its answers."""

    model: Any
    texts: Mapping[str, str]
    provenance: Provenance

    @cached_property
    def vectors(self) -> Any:
        """The documents' vectors, encoded once."""
        from tilefold.retrieval.dense import encode_dense

        with _common.progress_bar("encoding") as update:
            return encode_dense(
                self.model, self.texts, kind="document", progress=lambda done, total: update(done, total, "")
            )

    def encode(self, queries: Mapping[str, str]) -> Any:
        """The queries' vectors."""
        from tilefold.retrieval.dense import encode_dense

        return encode_dense(self.model, queries, kind="query")

    def search_vectors(self, vectors: Any, names: Sequence[str], k: int) -> Run:
        """The `k` best documents for queries that are encoded."""
        from tilefold.retrieval.dense import rank_by_similarity

        return rank_by_similarity(self.model, self.vectors, vectors.to(self.vectors), list(self.texts), names, k)

    def search(self, queries: Mapping[str, str], k: int) -> Run:
        return self.search_vectors(self.encode(queries), list(queries), k)


@dataclass(frozen=True)
class IndexOptions:
    """How an index is searched: the options of search and evaluate that go with --index."""

    query_top_k: int | None = None
    query_cut: int | None = None
    heap_factor: float | None = None
    other_model: bool = False

    def given(self) -> dict[str, Any]:
        """Option -> value, of those that were given."""
        values = {f"--{name.replace('_', '-')}": value for name, value in asdict(self).items()}
        return {option: value for option, value in values.items() if value not in (None, False)}


def open_index(
    path: Path, model: str | None, options: IndexOptions, texts: Callable[[], Mapping[str, str]] | None = None
) -> SparseRetriever | BM25Index:
    """The index at `path` with the model that --model names; BM25 has none.

    `texts` gives the documents of --data, from which the untrained start is made again where it is not in the cache.

    Raises:
        UsageError: a model where none is wanted or none where one is, or an option that the backend does not have.
        CommandError: the model is not the one that made the index.
    """
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.index import load_index
    from tilefold.retrieval.index.protocol import read_description

    backend = read_description(path)["backend"]
    given = options.given()
    for option in ("--query-cut", "--heap-factor"):
        if backend != "seismic":
            _common.refuse(option, given.get(option), f"is for seismic indexes, and {path} is of backend {backend}")
    if backend == BM25Index.backend:
        for option, value in (given | {"--model": model}).items():
            _common.refuse(option, value, f"does nothing here: {path} is a BM25 index, which reads words")
        return BM25Index.load(path)
    if model is None:
        raise _common.UsageError(f"--index: {path} holds vectors; name the model that made them with --model.")
    return _sparse(path, load_index(path), model, options, texts)


def open_vectors(
    path: Path, model: str | None, options: IndexOptions, texts: Callable[[], Mapping[str, str]]
) -> SparseRetriever:
    """Exact search of the encoded documents at `path` with the model that --model names; as :func:`open_index`."""
    from tilefold.retrieval import build_index, read_manifest, read_vectors

    for option in ("--query-cut", "--heap-factor"):
        _common.refuse(option, options.given().get(option), "is for seismic indexes, and vectors are searched exactly")
    if model is None:
        raise _common.UsageError(f"--vectors: name the model that made {path} with --model.")
    if (kind := read_manifest(path).kind) != "document":
        raise _common.UsageError(f"--vectors: {path} holds {kind} vectors; encode documents without --queries.")
    return _sparse(path, build_index(read_vectors(path), "exact"), model, options, texts)


def _sparse(
    path: Path, index: SparseIndex, model: str, options: IndexOptions, texts: Callable[[], Mapping[str, str]] | None
) -> SparseRetriever:
    """The index with its model, once the two are known to belong together."""
    if model == _models.PACKAGED:
        encoder = _untrained(path, index.provenance.texts_sha256, texts)
    else:
        encoder = _models.load_encoder(model)
    _check_model(path, index.provenance, model, encoder, options.other_model)
    search = {"query_cut": options.query_cut, "heap_factor": options.heap_factor}
    return SparseRetriever(
        index, encoder, options.query_top_k, {name: value for name, value in search.items() if value is not None}
    )


def _untrained(path: Path, texts_sha256: str | None, texts: Callable[[], Mapping[str, str]] | None) -> Any:
    if texts_sha256 is None:
        raise _common.UsageError(
            f"--model: {_models.PACKAGED} is the untrained start for the documents of an index, and {path} does not "
            "say which those are: give the folder of the model that made it."
        )
    return _models.load_untrained(texts_sha256, texts, f"the documents of {path}")


def _check_model(path: Path, made_by: Provenance, name: str, encoder: Any, other_model: bool) -> None:
    from tilefold.retrieval.encoding import model_fingerprint
    from tilefold.retrieval.provenance import Provenance

    if made_by.model_fingerprint is None:
        _common.note(f"--index: {path} does not say which model made it, so that {name} could not be compared with it")
        return
    if not made_by.differs(Provenance(model_fingerprint(encoder))):
        return
    if not other_model:
        raise _common.CommandError(
            f"--model: {name} is not the model that made the index {path} (its weights or settings differ). Give that "
            f"one, or make the index again: tilefold encode --model {name}, then tilefold index."
        )
    _common.note(f"--model: {name} is not the model that made the index {path}")


def check_vectors(vectors: Path, retriever: SparseRetriever) -> None:
    """Refuse --vectors that an index was not built from."""
    from tilefold.retrieval.vectors import read_manifest

    if retriever.provenance.differs(read_manifest(vectors).provenance):
        raise _common.CommandError(
            f"--vectors: {vectors} holds vectors of another model or of other documents than the index. "
            f"Give those that it was built from, or build it again: tilefold index --vectors {vectors}"
        )


def load_dense(model: str, texts: Mapping[str, str], made_of: Provenance, max_length: int | None) -> DenseRetriever:
    """The dense model that --model names, over `texts` with their fingerprint."""
    from tilefold.retrieval.encoding import model_fingerprint
    from tilefold.retrieval.provenance import Provenance

    encoder = _models.load_dense(model)
    if max_length is not None:
        encoder.max_seq_length = max_length
    return DenseRetriever(encoder, texts, Provenance(model_fingerprint(encoder), made_of.texts_sha256))
