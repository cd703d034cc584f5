"""Retrievers: one interface for the types of indexes.

Each retriever encodes queries, searches its index with them, and moves them by feedback.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.typing import Model, Tensor
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.metadata import Where
from tilefold.retrieval.encoding.dense import encode_dense
from tilefold.retrieval.errors import ArgumentDataError, MissingDocumentError
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

# Shorter vectors are divided by this length, as torch.nn.functional.normalize does.
_SHORTEST_VECTOR = 1e-12


@dataclass(frozen=True)
class _IndexRetriever:
    """An index of vectors, and the model that encodes queries for it.

    Attributes:
        model_type: name of the class of the model.
        index: the index.
        model: the model; None if queries are passed as vectors.
        options: options of the index's search, such as ``heap_factor``.
    """

    model_type: ClassVar[str]

    index: Any
    model: Model | None = None
    options: Mapping[str, object] = field(default_factory=dict, kw_only=True)

    @property
    def provenance(self) -> Provenance:
        provenance: Provenance = self.index.provenance
        return provenance

    def _encoder(self) -> Model:
        if self.model is None:
            raise ArgumentError(
                "model",
                f"expected the {self.model_type} that made the index, to encode queries, got None.",
            )
        return self.model

    def search(
        self,
        vectors: Any,
        query_ids: Sequence[str],
        k: int,
        where: Where = None,
        **options: object,
    ) -> Run:
        """Search the `k` best documents of the index for each query.

        Args:
            vectors: vectors of the queries, in the type of the index.
            query_ids: ids of the queries, for vectors that do not carry ids.
            k: documents per query.
            where: filter of the documents' metadata.
            options: options of the index's search, which take precedence over the retriever's.
        """
        search_options = {**self.options, **options}
        if where is not None:
            search_options["where"] = where
        hits = self.index.search(vectors, k, **search_options)
        ids = getattr(vectors, "ids", query_ids)
        return {
            query_id: {hit.id: hit.score for hit in query_hits}
            for query_id, query_hits in zip(ids, hits, strict=True)
        }


@dataclass(frozen=True)
class SparseRetriever(_IndexRetriever):
    """An index of sparse vectors, and the model or BM25 index that encodes queries for it.

    Attributes:
        vectors: sparse vectors of the documents, or their folder, which is read row by row.
        query_top_k: heaviest terms kept of a query; None keeps all.
        words: BM25 index that encodes queries instead of a model.
    """

    model_type = "SparseEncoder"

    vectors: SparseVectors | Path | None = None
    query_top_k: int | None = None
    words: BM25Index | None = None

    def __post_init__(self) -> None:
        """Compare the vectors with the index, by the provenance that both record.

        Raises:
            DataError: for vectors of another model or of other documents than those of the index.
        """
        if self.vectors is None:
            return
        folder = ""  # path of the vectors for the error; empty for vectors in memory
        if isinstance(self.vectors, Path):
            folder = f"{self.vectors} "
            provenance = read_manifest(self.vectors).provenance
        else:
            provenance = self.vectors.provenance
        same_passages = self.provenance.passages == provenance.passages
        if same_passages and not self.provenance.differing_fields(provenance):
            return
        passages = ""
        if not same_passages:
            passages = (
                f" (passages {provenance.passages or 'of none'}, "
                f"those of the index {self.provenance.passages or 'of none'})"
            )
        raise ArgumentDataError(
            "vectors",
            f"{folder}holds vectors of another model or of other documents than the "
            f"index{passages}. Give its own, or build it again: tilefold index --vectors VECTORS",
        )

    def encode(self, queries: Mapping[str, str]) -> SparseVectors:
        """Encode queries, id -> text."""
        if self.words is not None:
            return self.words.query_vectors(queries)
        from tilefold.retrieval.encoding.sparse import encode_queries

        return encode_queries(self._encoder(), queries, top_k=self.query_top_k)

    def expand(
        self,
        queries: SparseVectors,
        query_ids: Sequence[str],
        basis: Run,
        feedback: Feedback,
    ) -> SparseVectors:
        """Move queries towards the first documents of the run `basis`."""
        documents = self.vectors_of(feedback_documents(basis, feedback))
        return expand_sparse(queries, documents, basis, feedback)

    def vectors_of(self, names: Iterable[str], *, skip_missing: bool = False) -> SparseVectors:
        """Read the stored vectors of some documents.

        Args:
            names: ids of the documents.
            skip_missing: leave out documents that have no vector. By default they are an error.

        Returns:
            One row per document, with its id.

        Raises:
            ValueError: if the retriever has no `vectors`.
            MissingDocumentError: for the first document without a vector, unless `skip_missing`.
        """
        if self.vectors is None:
            raise ArgumentError(
                "vectors",
                "expected those of the documents, which feedback reads, got None.",
            )
        names = list(names)
        if isinstance(self.vectors, Path):
            vectors = read_rows(self.vectors, names)  # skips ids that the folder lacks
        else:
            row_of = self.vectors.row_of
            vectors = self.vectors.take([row_of[name] for name in names if name in row_of])
        if not skip_missing:
            ids_with_vectors = set(vectors.ids)
            for name in names:
                if name not in ids_with_vectors:
                    raise MissingDocumentError("vectors", name)
        return vectors


@dataclass(frozen=True)
class WordsRetriever:
    """A BM25 index, which takes queries as texts.

    Feedback needs vectors: see :attr:`as_vectors`.
    """

    index: BM25Index

    @property
    def provenance(self) -> Provenance:
        return self.index.provenance

    def encode(self, queries: Mapping[str, str]) -> Mapping[str, str]:
        """Return the texts, which a BM25 index searches with."""
        return queries

    def search(
        self,
        vectors: Mapping[str, str],
        query_ids: Sequence[str],
        k: int,
        where: Where = None,
    ) -> Run:
        """Search the `k` best documents of the index for each query, id -> text."""
        return self.index.search(vectors, k, where=where)

    @cached_property
    def as_vectors(self) -> SparseRetriever:
        """Retriever that gives the same scores, but from vectors, which feedback can move."""
        vectors = self.index.document_vectors()
        index = ExactIndex.of_any(vectors)
        index.metadata = self.index.metadata
        return SparseRetriever(index, vectors=vectors, words=self.index)


@dataclass(frozen=True)
class DenseRetriever(_IndexRetriever):
    """An index of dense vectors, and the ``SentenceTransformer`` that encodes queries for it."""

    model_type = "SentenceTransformer"

    def encode(self, queries: Mapping[str, str]) -> Tensor:
        """Encode queries, id -> text, truncated to the dimension of the index."""
        return encode_dense(self._encoder(), queries, kind="query")[:, : self.index.dimension]

    def expand(
        self,
        queries: Tensor,
        query_ids: Sequence[str],
        basis: Run,
        feedback: Feedback,
    ) -> Tensor:
        """Move queries towards the first documents of a run.

        Args:
            queries: ``[Q, D]``.
            query_ids: ids of the rows of `queries`.
            basis: the run whose first documents count as relevant.
            feedback: options.

        Returns:
            New queries, ``[Q, D]``.
        """
        document_ids = feedback_documents(basis, feedback)
        if self.index.similarity == "cosine":
            # The index holds normalized vectors. A query of zeros stays one.
            lengths = queries.norm(dim=1, keepdim=True).clamp_min(_SHORTEST_VECTOR)
            queries = queries / lengths
        return expand_dense(
            queries,
            query_ids,
            self.index.vectors(document_ids).to(queries.device),
            document_ids,
            basis,
            feedback,
        )


@dataclass(frozen=True)
class LateRetriever(_IndexRetriever):
    """An index of token vectors, and the ``MultiVectorEncoder`` that encodes queries for it."""

    model_type = "MultiVectorEncoder"

    def encode(self, queries: Mapping[str, str]) -> TokenVectors:
        """Encode queries, id -> text, as one vector per token."""
        from tilefold.retrieval.encoding.pending_shards import encode_in_memory
        from tilefold.retrieval.encoding.tokens import TokenEncoding, TokenJob

        encoding = TokenEncoding("query", batch_size=32)
        job = TokenJob(encoding, self._encoder(), self.index.dimension, queries)
        return encode_in_memory(job, "texts")

    def search(
        self,
        vectors: Any,
        query_ids: Sequence[str],
        k: int,
        where: Where = None,
        **options: object,
    ) -> Run:
        """Search with the reduction over query tokens that the model was trained with.

        The reduction is the mean for a model with "meanmaxsim", and else the sum. The arguments
        are those of the other retrievers' ``search``.
        """
        takes_mean = getattr(self.model, "similarity_fn_name", None) == "meanmaxsim"
        return super().search(
            vectors,
            query_ids,
            k,
            where,
            reduction="mean" if takes_mean else "sum",
            **options,
        )

    def expand(
        self,
        queries: TokenVectors,
        query_ids: Sequence[str],
        basis: Run,
        feedback: Feedback,
    ) -> TokenVectors:
        """Raise ``ValueError``: feedback is not defined for token vectors."""
        raise ArgumentError(
            "feedback",
            "expected None, an index of token vectors has no feedback. Search without.",
        )
