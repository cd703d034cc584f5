"""Sparse vectors, BM25 and dense vectors behind one interface: queries encoded, searched, moved by feedback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold._typing import Model
from tilefold.retrieval._sparse import SparseVectors
from tilefold.retrieval.bm25 import BM25Index
from tilefold.retrieval.dense import encode_dense, rank_by_similarity
from tilefold.retrieval.errors import DataError, MissingDocumentError
from tilefold.retrieval.feedback import Feedback, expand_dense, expand_sparse, feedback_documents
from tilefold.retrieval.fusion import Run
from tilefold.retrieval.index import SparseIndex, hits_to_run
from tilefold.retrieval.index.exact import ExactIndex
from tilefold.retrieval.metadata import Where
from tilefold.retrieval.passages import PassageTexts
from tilefold.retrieval.provenance import Provenance
from tilefold.retrieval.vectors import read_manifest, read_rows

if TYPE_CHECKING:
    import torch

    from tilefold.retrieval.index.dense import DenseIndex
    from tilefold.retrieval.index.late import LateIndex
    from tilefold.retrieval.tokens import TokenVectors

__all__ = ["DenseIndexRetriever", "DenseRetriever", "LateRetriever", "SparseRetriever", "WordsRetriever"]


@dataclass(frozen=True)
class SparseRetriever:
    """An index of sparse vectors, and the model (or the words of BM25) that encodes queries for it."""

    index: SparseIndex
    model: Model | None = None  # a SparseEncoder; None where vectors of queries are given
    vectors: SparseVectors | Path | None = None  # of the documents; a folder is read row by row
    query_top_k: int | None = None  # terms kept of a query; None keeps all
    options: Mapping[str, object] = field(default_factory=dict)  # of the search, such as Seismic's heap_factor
    words: BM25Index | None = None  # encodes queries instead of a model

    def __post_init__(self) -> None:
        if self.vectors is None:
            return
        stored = read_manifest(self.vectors) if isinstance(self.vectors, Path) else self.vectors
        mine, other = self.provenance, stored.provenance
        if mine.differs(other) or mine.passages != other.passages:
            told = f" (passages {other.passages or 'of none'}, those of the index {mine.passages or 'of none'})"
            cut = "" if mine.passages == other.passages else told
            where = f"{self.vectors} " if isinstance(self.vectors, Path) else ""
            said = f"{where}holds vectors of another model or of other documents than the index{cut}"
            raise DataError(f"vectors: {said}. Give its own, or build it again: tilefold index --vectors VECTORS")

    @property
    def provenance(self) -> Provenance:
        return self.index.provenance

    def encode(self, queries: Mapping[str, str]) -> SparseVectors:
        if self.words is not None:
            return self.words.query_vectors(queries)
        if self.model is None:
            raise ValueError("model: expected the SparseEncoder that made the index, to encode queries, got None.")
        from tilefold.retrieval.encoding import encode_queries

        return encode_queries(self.model, queries, top_k=self.query_top_k)

    def search(self, vectors: SparseVectors, names: Sequence[str], k: int, where: Where = None) -> Run:
        options: Any = self.options if where is None else {**self.options, "where": where}
        return hits_to_run(vectors, self.index.search(vectors, k, **options))

    def expand(self, queries: SparseVectors, names: Sequence[str], basis: Run, feedback: Feedback) -> SparseVectors:
        return expand_sparse(queries, self.stored(feedback_documents(basis, feedback)), basis, feedback)

    @cached_property
    def _rows(self) -> dict[str, int]:
        ids = self.vectors.ids if isinstance(self.vectors, SparseVectors) else []
        return {name: row for row, name in enumerate(ids)}

    def stored(self, names: Iterable[str], *, lacking: bool = False) -> SparseVectors:
        """The vectors of documents, each of which has one unless some are `lacking` by intent."""
        if self.vectors is None:
            raise ValueError("vectors: expected those of the documents, which feedback reads, got None.")
        wanted = list(names)
        if isinstance(self.vectors, Path):
            found = read_rows(self.vectors, wanted)
        else:
            found = self.vectors.take([self._rows[name] for name in wanted if name in self._rows])
        there = set(found.ids)
        if not lacking and not there.issuperset(wanted):
            raise MissingDocumentError("vectors", next(name for name in wanted if name not in there))
        return found


@dataclass(frozen=True)
class WordsRetriever:
    """A BM25 index; with feedback, an exact index of its vectors."""

    index: BM25Index

    @property
    def provenance(self) -> Provenance:
        return self.index.provenance

    def encode(self, queries: Mapping[str, str]) -> Mapping[str, str]:
        return queries

    def search(self, vectors: Mapping[str, str], names: Sequence[str], k: int, where: Where = None) -> Run:
        return self.index.search(vectors, k, where=where)

    @cached_property
    def as_vectors(self) -> SparseRetriever:
        """Retriever with equal scores from vectors, which feedback can move."""
        vectors = self.index.document_vectors()
        index = ExactIndex.build(vectors)
        index.metadata = self.index.metadata
        return SparseRetriever(index, vectors=vectors, words=self.index)


@dataclass(frozen=True)
class DenseRetriever:
    """A ``SentenceTransformer`` that encodes a whole collection once, when it is first searched."""

    model: Model
    texts: Mapping[str, str]  # document id -> contents, or passages
    texts_sha256: str | None = None  # their fingerprint, if known
    progress: Callable[[int, int], None] | None = None  # called with (documents encoded, documents)

    @cached_property
    def provenance(self) -> Provenance:
        from tilefold.retrieval.encoding import model_fingerprint

        cut = self.texts.provenance if isinstance(self.texts, PassageTexts) else Provenance(None, self.texts_sha256)
        return replace(cut, model_fingerprint=model_fingerprint(self.model))

    @cached_property
    def vectors(self) -> torch.Tensor:
        """The documents' vectors ``[N, D]``."""
        return encode_dense(self.model, self.texts, kind="document", progress=self.progress)

    def encode(self, queries: Mapping[str, str]) -> torch.Tensor:
        return encode_dense(self.model, queries, kind="query")

    def search(self, vectors: torch.Tensor, names: Sequence[str], k: int, where: Where = None) -> Run:
        if where is not None:
            raise ValueError("where: expected None, a dense model over texts keeps no metadata; index its vectors.")
        return rank_by_similarity(self.model, self.vectors, vectors.to(self.vectors), list(self.texts), names, k)

    def expand(self, queries: torch.Tensor, names: Sequence[str], basis: Run, feedback: Feedback) -> torch.Tensor:
        return expand_dense(queries, names, self.vectors, list(self.texts), basis, feedback)


@dataclass(frozen=True)
class DenseIndexRetriever:
    """An index of dense vectors, and the ``SentenceTransformer`` that encodes queries for it."""

    index: DenseIndex
    model: Model | None = None  # None where vectors of queries are given

    @property
    def provenance(self) -> Provenance:
        return self.index.provenance

    def encode(self, queries: Mapping[str, str]) -> torch.Tensor:
        if self.model is None:
            raise ValueError("model: expected the SentenceTransformer that made the index, got None.")
        return encode_dense(self.model, queries, kind="query")[:, : self.index.dimension]

    def search(self, vectors: torch.Tensor, names: Sequence[str], k: int, where: Where = None) -> Run:
        hits = self.index.search(vectors, k, where=where)
        return {name: {hit.id: hit.score for hit in row} for name, row in zip(names, hits, strict=True)}

    def expand(self, queries: torch.Tensor, names: Sequence[str], basis: Run, feedback: Feedback) -> torch.Tensor:
        found = feedback_documents(basis, feedback)
        if self.index.similarity == "cosine":
            queries = queries / queries.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return expand_dense(queries, names, self.index.vectors(found).to(queries.device), found, basis, feedback)


@dataclass(frozen=True)
class LateRetriever:
    """An index of token vectors, and the ``MultiVectorEncoder`` that encodes queries for it."""

    index: LateIndex
    model: Model | None = None  # None where vectors of queries are given
    options: Mapping[str, object] = field(default_factory=dict)  # of the search, such as ``candidates``

    @property
    def provenance(self) -> Provenance:
        return self.index.provenance

    def encode(self, queries: Mapping[str, str]) -> TokenVectors:
        if self.model is None:
            raise ValueError("model: expected the MultiVectorEncoder that made the index, got None.")
        from tilefold.retrieval.token_encoding import encode_texts

        return encode_texts(self.model, queries, kind="query")

    def search(self, vectors: TokenVectors, names: Sequence[str], k: int, where: Where = None) -> Run:
        mean = getattr(self.model, "similarity_fn_name", None) == "meanmaxsim"
        options: Any = {**self.options, "where": where}
        hits = self.index.search(vectors, k, reduction="mean" if mean else "sum", **options)
        found = {name: {hit.id: hit.score for hit in row} for name, row in zip(vectors.ids, hits, strict=True)}
        return {name: found.get(name, {}) for name in names}

    def expand(self, queries: TokenVectors, names: Sequence[str], basis: Run, feedback: Feedback) -> TokenVectors:
        raise ValueError("feedback: expected None, an index of token vectors has no feedback. Search without.")
