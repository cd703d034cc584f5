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
        model_type: the name of the model's class, for errors.
        index: the index.
        model: the model that encodes queries; None if queries are passed as vectors.
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
        """Return the model that encodes queries, or raise ``ArgumentError`` if there is none."""
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
        """Find the `k` best documents of the index for each query.

        Args:
            vectors: vectors of the queries, as the index takes them.
            query_ids: ids of the queries. They are ignored if `vectors` have ids themselves.
            k: number of documents per query.
            where: filter of the documents' metadata.
            options: options of the index's search, which take precedence over the retriever's.

        Returns:
            Query id -> document id -> score, best first.
        """
        search_options = {**self.options, **options}
        if where is not None:
            search_options["where"] = where
        hits = self.index.search(vectors, k, **search_options)
        # Sparse and token vectors have the ids of the queries, and a tensor has none.
        ids_in_order = getattr(vectors, "ids", query_ids)
        return {
            query_id: {hit.id: hit.score for hit in query_hits}
            for query_id, query_hits in zip(ids_in_order, hits, strict=True)
        }


@dataclass(frozen=True)
class SparseRetriever(_IndexRetriever):
    """An index of sparse vectors, and the model or BM25 index that encodes queries for it.

    Attributes:
        vectors: sparse vectors of the documents, or their folder, which is read row by row.
        query_top_k: number of heaviest terms that a query keeps; None keeps all.
        words: a BM25 index that encodes queries instead of a model.
    """

    model_type = "SparseEncoder"

    vectors: SparseVectors | Path | None = None
    query_top_k: int | None = None
    words: BM25Index | None = None

    def __post_init__(self) -> None:
        """Compare the provenance of the vectors with that of the index.

        Raises:
            ArgumentDataError: if the vectors come from another model or from other documents.
        """
        if self.vectors is None:
            return
        subject = "this"  # how the error names vectors in memory
        if isinstance(self.vectors, Path):
            subject = str(self.vectors)
            provenance = read_manifest(self.vectors).provenance
        else:
            provenance = self.vectors.provenance
        same_passages = self.provenance.passages == provenance.passages
        if same_passages and not self.provenance.differing_fields(provenance):
            return
        difference = ""
        if not same_passages:
            difference = (
                f" (passages: {provenance.passages or 'none'}, "
                f"of the index: {self.provenance.passages or 'none'})"
            )
        raise ArgumentDataError(
            "vectors",
            f"{subject} holds vectors of another model or of other documents than the "
            f"index{difference}. Pass the vectors that the index was built from, or build it "
            "again: tilefold index --vectors VECTORS",
        )

    def encode(self, queries: Mapping[str, str]) -> SparseVectors:
        """Encode queries, which map an id to a text, as sparse vectors."""
        if self.words is not None:
            return self.words.query_vectors(queries)
        from tilefold.retrieval.encoding.sparse import encode_queries

        return encode_queries(self._encoder(), queries, top_k=self.query_top_k)

    def expand(
        self,
        queries: SparseVectors,
        query_ids: Sequence[str],
        run: Run,
        feedback: Feedback,
    ) -> SparseVectors:
        """Move queries towards the top documents of a run.

        Args:
            queries: vectors of the queries.
            query_ids: not used, because the vectors have ids.
            run: query id -> document id -> score, best first.
            feedback: options of feedback.

        Returns:
            The new query vectors.
        """
        documents = self.vectors_of(feedback_documents(run, feedback))
        return expand_sparse(queries, documents, run, feedback)

    def vectors_of(
        self,
        document_ids: Iterable[str],
        *,
        skip_missing: bool = False,
    ) -> SparseVectors:
        """Read the sparse vectors of some documents, for feedback or matched terms.

        Args:
            document_ids: ids of the documents.
            skip_missing: whether to leave out documents without a vector. By default, a missing
                vector is an error.

        Returns:
            One row per document, with its id.

        Raises:
            ValueError: if the retriever has no `vectors`.
            MissingDocumentError: if a document has no vector and `skip_missing` is False.
        """
        if self.vectors is None:
            raise ArgumentError(
                "vectors",
                "expected the documents' vectors, which feedback reads, got None.",
            )
        document_ids = list(document_ids)
        if isinstance(self.vectors, Path):
            vectors = read_rows(self.vectors, document_ids)  # skips ids that the folder lacks
        else:
            row_of = self.vectors.row_of
            rows = [row_of[document] for document in document_ids if document in row_of]
            vectors = self.vectors.take(rows)
        if not skip_missing:
            ids_with_vectors = set(vectors.ids)
            for document_id in document_ids:
                if document_id not in ids_with_vectors:
                    raise MissingDocumentError("vectors", document_id)
        return vectors


@dataclass(frozen=True)
class WordsRetriever:
    """A BM25 index, which takes queries as texts.

    :attr:`as_vectors` is the same retriever for query vectors, which feedback needs.
    """

    index: BM25Index

    @property
    def provenance(self) -> Provenance:
        return self.index.provenance

    def encode(self, queries: Mapping[str, str]) -> Mapping[str, str]:
        """Return the texts themselves, because a BM25 index is searched with texts."""
        return queries

    def search(
        self,
        vectors: Mapping[str, str],
        query_ids: Sequence[str],
        k: int,
        where: Where = None,
    ) -> Run:
        """Find the `k` best documents of the index for each query.

        Args:
            vectors: query id -> text.
            query_ids: not used, because `vectors` has ids.
            k: number of documents per query.
            where: filter of the documents' metadata.

        Returns:
            Query id -> document id -> score, best first.
        """
        return self.index.search(vectors, k, where=where)

    @cached_property
    def as_vectors(self) -> SparseRetriever:
        """A retriever with the same scores whose queries are vectors, which feedback can move."""
        vectors = self.index.document_vectors()
        index = ExactIndex.build_unchecked(vectors)
        index.metadata = self.index.metadata
        return SparseRetriever(index, vectors=vectors, words=self.index)


@dataclass(frozen=True)
class DenseRetriever(_IndexRetriever):
    """An index of dense vectors, and the ``SentenceTransformer`` that encodes queries for it."""

    model_type = "SentenceTransformer"

    def encode(self, queries: Mapping[str, str]) -> Tensor:
        """Encode queries, which map an id to a text, with the dimension of the index."""
        return encode_dense(self._encoder(), queries, kind="query")[:, : self.index.dimension]

    def expand(
        self,
        queries: Tensor,
        query_ids: Sequence[str],
        run: Run,
        feedback: Feedback,
    ) -> Tensor:
        """Move queries towards the top documents of a run.

        Args:
            queries: query vectors ``[Q, D]``.
            query_ids: ids of the rows of `queries`.
            run: query id -> document id -> score, best first.
            feedback: options of feedback.

        Returns:
            The new query vectors ``[Q, D]``.
        """
        document_ids = feedback_documents(run, feedback)
        if self.index.similarity == "cosine":
            # The vectors of the index have unit length, and so must the queries that are added to
            # them. The clamp keeps a query of zeros.
            lengths = queries.norm(dim=1, keepdim=True).clamp_min(_SHORTEST_VECTOR)
            queries = queries / lengths
        return expand_dense(
            queries,
            query_ids,
            self.index.vectors(document_ids).to(queries.device),
            document_ids,
            run,
            feedback,
        )


@dataclass(frozen=True)
class LateRetriever(_IndexRetriever):
    """An index of token vectors, and the ``MultiVectorEncoder`` that encodes queries for it."""

    model_type = "MultiVectorEncoder"

    def encode(self, queries: Mapping[str, str]) -> TokenVectors:
        """Encode queries, which map an id to a text, as one vector per token."""
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

        A model with the similarity "meanmaxsim" takes the mean over the tokens of a query, and any
        other model the sum. The arguments and the result are those of the other retrievers.
        """
        uses_mean = getattr(self.model, "similarity_fn_name", None) == "meanmaxsim"
        return super().search(
            vectors,
            query_ids,
            k,
            where,
            reduction="mean" if uses_mean else "sum",
            **options,
        )

    def expand(
        self,
        queries: TokenVectors,
        query_ids: Sequence[str],
        run: Run,
        feedback: Feedback,
    ) -> TokenVectors:
        """Raise ``ArgumentError``, because feedback is not defined for token vectors.

        The arguments are those of the other retrievers' ``expand``.
        """
        raise ArgumentError(
            "feedback",
            "must be left out for an index of token vectors, which does not support feedback.",
        )
