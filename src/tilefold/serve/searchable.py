"""An index and what belongs to it: its models, the documents, their vectors, and a second index of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tilefold._vocabulary import vocabulary_fingerprint
from tilefold.retrieval.bm25 import BM25Index
from tilefold.retrieval.collection import Document
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.feedback import Feedback, expand_sparse, feedback_documents
from tilefold.retrieval.fusion import Run, interpolate, reciprocal_rank_fusion
from tilefold.retrieval.index import SparseIndex, hits_to_run
from tilefold.retrieval.tokens import TokenStore
from tilefold.retrieval.vectors import SparseVectors
from tilefold.serve.answers import Row, strongest
from tilefold.serve.errors import ServeError, invalid
from tilefold.serve.models import Served

__all__ = ["Ranking", "Searchable"]

T = TypeVar("T")
Scores = dict[str, float]
QUERY = "query"  # the id of the one query of a request


@dataclass
class Ranking:
    """A ranking, and how it came about.

    Attributes:
        scores: document id -> score, best first.
        stages: those that ran of ``"sparse"``, ``"words"``, ``"fusion"`` and ``"late"`` -> document id -> score.
        before, after: the query's vector, as it was and as it was searched with; they differ after feedback.
    """

    scores: Scores
    stages: dict[str, Scores] = field(default_factory=dict)
    before: SparseVectors | None = None
    after: SparseVectors | None = None


@dataclass(frozen=True)
class Searchable:
    """What a service searches. Everything is of one collection; who loads it checks that (the command line does).

    Attributes:
        name: of the index in the addresses.
        index: of sparse vectors, or of words.
        encoder: makes the queries' vectors; None for an index of words.
        documents: id -> document; empty where none are shown.
        vectors: of the documents, for explanations and feedback; None without.
        words: a BM25 index to fuse with, or None.
        late: the multi-vector model that reranks, or None.
        store: its token vectors of the documents; without, the documents are encoded when they are candidates.
        query_top_k: terms kept of a query; None keeps all.
        options: of the index's search, such as Seismic's ``heap_factor``.
        dense: the model of the dense vectors of the index, which is a Qdrant collection with such, or None.
    """

    name: str
    index: SparseIndex | BM25Index
    encoder: Served | None = None
    documents: Mapping[str, Document] = field(default_factory=dict)
    vectors: SparseVectors | None = None
    words: BM25Index | None = None
    late: Served | None = None
    store: TokenStore | None = None
    query_top_k: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    dense: Served | None = None

    @property
    def features(self) -> dict[str, bool]:
        """What a search of it can be asked for."""
        explained = self.vectors is not None and self.encoder is not None
        return {
            "documents": bool(self.documents),
            "explain": explained,
            "prf": explained,
            "fusion": self.words is not None,
            "dense": self.dense is not None,
            "rerank": self.late is not None and (self.store is not None or bool(self.documents)),
        }

    @cached_property
    def rows(self) -> dict[str, int]:
        """Document id -> row of its vector."""
        return {} if self.vectors is None else {name: row for row, name in enumerate(self.vectors.ids)}

    def contents(self, names: Sequence[str]) -> list[str]:
        """What a model reads of documents.

        Raises:
            ServeError: one of them is not in the collection.
        """
        return [self._known(name, self.documents.get(name), "--data").contents or " " for name in names]

    def _row(self, name: str) -> int:
        return self._known(name, self.rows.get(name), "--vectors")

    def _known(self, name: str, found: T | None, option: str) -> T:
        if found is None:  # added to an index that can be added to
            raise ServeError("Backend", f"the index has a document {name!r} that {option} of this server lacks")
        return found

    def query_vector(self, row: Row) -> SparseVectors:
        """The vector of a query, with its heaviest terms alone if the index is searched so."""
        if self.encoder is None:
            raise ValueError("encoder: expected a model, got none; an index of words reads texts.")
        indices, weights = strongest(row, self.query_top_k, None)
        fingerprint = vocabulary_fingerprint(self.encoder.model.tokenizer)
        size = self.index.vocab_size
        return SparseVectors([QUERY], [0, len(indices)], indices, weights, size, fingerprint)  # type: ignore[arg-type]

    def search(self, vector: SparseVectors, k: int) -> Scores:
        """The `k` best documents for a query's vector."""
        if isinstance(self.index, BM25Index):
            raise ValueError("index: expected one of vectors, got one of words.")
        return hits_to_run(vector, self.index.search(vector, k, **self.options))[QUERY]

    def search_dense(self, vector: npt.NDArray[np.float32], k: int) -> Scores:
        """The `k` best documents by their dense vectors, in the collection of the index."""
        from tilefold.retrieval.index.qdrant import QdrantIndex  # noqa: PLC0415 - needs qdrant
        from tilefold.retrieval.qdrant import Queries  # noqa: PLC0415

        if not isinstance(self.index, QdrantIndex):
            raise ValueError(
                f"index: expected a Qdrant collection with dense vectors, got backend {self.index.backend!r}."
            )
        (hits,) = self.index.collection.search(Queries([QUERY], dense=vector[None]), k)
        return {hit.id: hit.score for hit in hits}

    def search_words(self, index: BM25Index, query: str, k: int) -> Scores:
        """The `k` best documents for a query's words."""
        return index.search({QUERY: query}, k)[QUERY]

    def rank(
        self, query: str, vector: SparseVectors | None, k: int, feedback: Feedback | None, fusion: Fusion | None
    ) -> Ranking:
        """The ranking before reranking: of the index, after feedback, fused with that of words."""
        if vector is None:
            if not isinstance(self.index, BM25Index):
                raise ValueError("vector: expected that of the query, got None.")
            scores = self.search_words(self.index, query, k)
            return Ranking(scores, {"words": scores})
        depth = max(k, feedback.k if feedback else 0, _RANKED if feedback and feedback.bottom else 0)
        scores, after = self.search(vector, depth), vector
        if feedback is not None and self.vectors is not None:
            run: Run = {QUERY: scores}
            wanted = self.vectors.take([self._row(name) for name in feedback_documents(run, feedback)])
            try:
                after = expand_sparse(vector, wanted, run, feedback)
            except DataError as error:  # weights that are too large for these vectors
                raise invalid(f"`prf`: {error}") from error
            scores = self.search(after, k)
        scores = dict(list(scores.items())[:k])
        ranking = Ranking(scores, {"sparse": scores}, vector, after)
        if fusion is not None and self.words is not None:
            ranking.stages["words"] = self.search_words(self.words, query, k)
            ranking.scores = ranking.stages["fusion"] = fusion.mix(scores, ranking.stages["words"], k)
        return ranking


_RANKED = 1000  # documents of a ranking whose last ones count, as in --prf


@dataclass(frozen=True)
class Fusion:
    """How two rankings become one: reciprocal ranks, or an interpolation with `weight` for that of words."""

    method: str = "rrf"
    weight: float = 0.5
    normalization: Any = "min_max"

    def mix(self, scores: Scores, words: Scores, k: int) -> Scores:
        """The `k` best of both."""
        runs: list[Run] = [{QUERY: scores}, {QUERY: words}]
        if self.method == "rrf":
            fused = reciprocal_rank_fusion(runs)
        else:
            fused = interpolate(runs, [1 - self.weight, self.weight], self.normalization, k=k)
        return dict(list(fused.get(QUERY, {}).items())[:k])
