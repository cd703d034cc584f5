"""Sparse vectors, BM25 and dense vectors behind one interface: queries encoded, searched, moved by
feedback.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tilefold._internal.typing import Model, Tensor
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.metadata import Where
from tilefold.retrieval.encoding.dense import encode_dense
from tilefold.retrieval.errors import DataError, MissingDocumentError
from tilefold.retrieval.index.bm25 import BM25Index
from tilefold.retrieval.index.exact import ExactIndex
from tilefold.retrieval.search.feedback import (
    Feedback,
    expand_dense,
    expand_sparse,
    feedback_documents,
)
from tilefold.retrieval.vectors.sparse import SparseVectors
from tilefold.retrieval.vectors.sparse_files import read_manifest, read_rows

if TYPE_CHECKING:
    from tilefold.retrieval.vectors.tokens import TokenVectors

__all__ = ["DenseRetriever", "LateRetriever", "SparseRetriever", "WordsRetriever"]


@dataclass(frozen=True)
class _IndexRetriever:
    """An index of vectors, and the model that encodes queries for it."""

    made_by: ClassVar[str]  # class of the model

    index: Any
    model: Model | None = None  # None where vectors of queries are given
    options: Mapping[str, object] = field(
        default_factory=dict,
        kw_only=True,
    )  # of the search, as heap_factor

    @property
    def provenance(self) -> Provenance:
        made_by: Provenance = self.index.provenance
        return made_by

    def _encoder(self) -> Model:
        if self.model is None:
            raise ValueError(
                f"model: expected the {self.made_by} that made the index, to encode queries, got None.",
            )
        return self.model

    def search(
        self,
        vectors: Any,
        names: Sequence[str],
        k: int,
        where: Where = None,
        **options: object,
    ) -> Run:
        asked = {**self.options, **options} | ({} if where is None else {"where": where})
        hits = self.index.search(vectors, k, **asked)
        ids = getattr(vectors, "ids", names)
        return {
            name: {hit.id: hit.score for hit in row} for name, row in zip(ids, hits, strict=True)
        }


@dataclass(frozen=True)
class SparseRetriever(_IndexRetriever):
    """An index of sparse vectors, and the model (or the words of BM25) that encodes queries for it."""

    made_by = "SparseEncoder"

    vectors: SparseVectors | Path | None = None  # of the documents; a folder is read row by row
    query_top_k: int | None = None  # terms kept of a query; None keeps all
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
            said = (
                f"{where}holds vectors of another model or of other documents than the index{cut}"
            )
            raise DataError(
                f"vectors: {said}. Give its own, or build it again: tilefold index --vectors VECTORS",
            )

    def encode(self, queries: Mapping[str, str]) -> SparseVectors:
        if self.words is not None:
            return self.words.query_vectors(queries)
        from tilefold.retrieval.encoding.sparse import encode_queries

        return encode_queries(self._encoder(), queries, top_k=self.query_top_k)

    def expand(
        self,
        queries: SparseVectors,
        names: Sequence[str],
        basis: Run,
        feedback: Feedback,
    ) -> SparseVectors:
        return expand_sparse(
            queries,
            self.stored(feedback_documents(basis, feedback)),
            basis,
            feedback,
        )

    def stored(self, names: Iterable[str], *, lacking: bool = False) -> SparseVectors:
        """The vectors of documents, each of which has one unless some are `lacking` by intent."""
        if self.vectors is None:
            raise ValueError(
                "vectors: expected those of the documents, which feedback reads, got None.",
            )
        wanted = list(names)
        if isinstance(self.vectors, Path):
            found = read_rows(self.vectors, wanted)
        else:
            rows = self.vectors.row_of
            found = self.vectors.take([rows[name] for name in wanted if name in rows])
        there = set(found.ids)
        if not lacking and not there.issuperset(wanted):
            raise MissingDocumentError(
                "vectors",
                next(name for name in wanted if name not in there),
            )
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

    def search(
        self,
        vectors: Mapping[str, str],
        names: Sequence[str],
        k: int,
        where: Where = None,
    ) -> Run:
        return self.index.search(vectors, k, where=where)

    @cached_property
    def as_vectors(self) -> SparseRetriever:
        """Retriever with equal scores from vectors, which feedback can move."""
        vectors = self.index.document_vectors()
        index = ExactIndex.of_any(vectors)
        index.metadata = self.index.metadata
        return SparseRetriever(index, vectors=vectors, words=self.index)


@dataclass(frozen=True)
class DenseRetriever(_IndexRetriever):
    """An index of dense vectors, and the ``SentenceTransformer`` that encodes queries for it."""

    made_by = "SentenceTransformer"

    def encode(self, queries: Mapping[str, str]) -> Tensor:
        return encode_dense(self._encoder(), queries, kind="query")[:, : self.index.dimension]

    def expand(
        self,
        queries: Tensor,
        names: Sequence[str],
        basis: Run,
        feedback: Feedback,
    ) -> Tensor:
        found = feedback_documents(basis, feedback)
        if self.index.similarity == "cosine":
            queries = queries / queries.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return expand_dense(
            queries,
            names,
            self.index.vectors(found).to(queries.device),
            found,
            basis,
            feedback,
        )


@dataclass(frozen=True)
class LateRetriever(_IndexRetriever):
    """An index of token vectors, and the ``MultiVectorEncoder`` that encodes queries for it."""

    made_by = "MultiVectorEncoder"

    def encode(self, queries: Mapping[str, str]) -> TokenVectors:
        from tilefold.retrieval.encoding.pending_shards import encode_in_memory
        from tilefold.retrieval.encoding.tokens import TokenEncoding, TokenJob

        encoding = TokenEncoding("query", batch_size=32)
        job = TokenJob(encoding, self._encoder(), self.index.dimension, queries)
        return encode_in_memory(job, "texts")

    def search(
        self,
        vectors: Any,
        names: Sequence[str],
        k: int,
        where: Where = None,
        **options: object,
    ) -> Run:
        mean = getattr(self.model, "similarity_fn_name", None) == "meanmaxsim"
        return super().search(
            vectors,
            names,
            k,
            where,
            reduction="mean" if mean else "sum",
            **options,
        )

    def expand(
        self,
        queries: TokenVectors,
        names: Sequence[str],
        basis: Run,
        feedback: Feedback,
    ) -> TokenVectors:
        raise ValueError(
            "feedback: expected None, an index of token vectors has no feedback. Search without.",
        )
