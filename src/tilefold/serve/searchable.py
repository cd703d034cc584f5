"""Index of a server with its models, documents and vectors, and explanations of its hits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tilefold._internal.arguments import ArgumentError
from tilefold._internal.vocabulary import vocabulary_fingerprint
from tilefold.retrieval.data.collection import Document
from tilefold.retrieval.data.metadata import Where
from tilefold.retrieval.data.passages import Passage
from tilefold.retrieval.index import DENSE, SparseIndex
from tilefold.retrieval.index.bm25 import BM25Index
from tilefold.retrieval.index.dense import DenseIndex
from tilefold.retrieval.index.late import LateIndex
from tilefold.retrieval.search.searcher import Ranking, Searcher, matched_terms
from tilefold.retrieval.vectors.sparse_files import SparseVectors
from tilefold.retrieval.vectors.tokens import TokenStore, TokenVectors
from tilefold.serve.bodies import keep_largest
from tilefold.serve.models import Served, TextTokens

Options = Mapping[str, Any]
Explanation = dict[str, object]
QUERY = "query"  # the id of the only query of a request
_MAX_MARKED_CHARACTERS = 4000  # characters of a text in which terms are marked
_MAX_EXPLAINED_TERMS = 512  # terms of a query that an explanation lists


@dataclass(frozen=True)
class Searchable:
    """An index to serve with its models, documents and vectors.

    Whether `encoder` made the index is not checked.

    Attributes:
        name: name of the index in addresses.
        index: the index.
        encoder: model that encodes queries; ``None`` for an index of words.
        documents: documents by id; empty if the server shows none.
        vectors: vectors of the documents, for explanations and feedback.
        words: index of words, for fusion.
        late: multi-vector model that reranks.
        store: its token vectors of the documents; ``None`` encodes the texts of candidates.
        query_top_k: number of heaviest terms that a query keeps; ``None`` keeps all.
        options: options of the search in the index, such as Seismic's ``heap_factor``.
        dense: model of the dense vectors of a Qdrant collection.

    Raises:
        DataError: for parts that were made from other documents than the index, or by another
            model.
    """

    name: str
    index: SparseIndex | BM25Index | DenseIndex | LateIndex
    encoder: Served | None = None
    documents: Mapping[str, Document] = field(default_factory=dict)
    vectors: SparseVectors | None = None
    words: BM25Index | None = None
    late: Served | None = None
    store: TokenStore | None = None
    query_top_k: int | None = None
    options: Options = field(default_factory=dict)
    dense: Served | None = None

    def __post_init__(self) -> None:
        # Created by the thread that loads the index, because a check may encode.
        _ = self.searcher

    @cached_property
    def searcher(self) -> Searcher:
        """Searcher that ranks and reranks; the service encodes its queries.

        The searcher has the models too, because it compares their precisions with the vectors'. It
        does not check that they made the index (``other_model``), which is the caller's part.
        """
        return Searcher(
            self.index,
            None if self.encoder is None else self.encoder.model,
            documents=self.documents,
            vectors=self.vectors,
            second=self.words,
            late=None if self.late is None else self.late.model,
            tokens=self.store,
            options=self.options,
            other_model=True,
        )

    @property
    def features(self) -> dict[str, bool]:
        """Whether a search offers each feature, by its name.

        ``prf`` is feedback, which reads the vectors of documents. ``where`` is filters by metadata.
        """
        has_sparse_vectors = self.vectors is not None and self.encoder is not None
        has_candidates = self.store is not None or bool(self.documents)
        return {
            "documents": bool(self.documents),
            "explain": has_sparse_vectors,
            "prf": has_sparse_vectors or self.index.backend == DENSE,
            "fusion": self.words is not None,
            "dense": self.dense is not None,
            "rerank": self.late is not None and has_candidates,
            "passages": self.searcher.passages is not None,
            "where": self.index.metadata is not None or self.index.backend == "qdrant",
        }

    def query_vector(self, row: Any) -> SparseVectors | TokenVectors | torch.Tensor:
        """Return the vector of a query, as the index searches with it.

        Args:
            row: encoded query: a sparse row, token vectors ``[Lq, D]``, or a dense vector ``[D]``.
                The heaviest :attr:`query_top_k` terms of a sparse row are kept.

        Raises:
            ValueError: for an index of words.
        """
        if self.encoder is None:
            raise ArgumentError(
                "encoder", "expected a model, got None; an index of words reads texts."
            )
        if self.encoder.kind == "dense":
            return torch.from_numpy(row[None])
        if self.encoder.kind == "multi-vector":
            offsets = torch.tensor([0, len(row)])
            return TokenVectors([QUERY], offsets, row.float())
        query = keep_largest(row, self.query_top_k, threshold=None)
        return SparseVectors(
            [QUERY],
            np.array([0, len(query.indices)]),
            query.indices,
            query.weights,
            self.index.vocab_size,
            vocabulary_fingerprint(self.encoder.model.tokenizer),
        )

    def search_dense(
        self,
        vector: npt.NDArray[np.float32],
        k: int,
        where: Where = None,
    ) -> dict[str, float]:
        """Search the dense vectors of a Qdrant collection with one query.

        Args:
            vector: dense vector of the query, ``[D]``.
            k: largest number of hits.
            where: condition on the metadata of documents; ``None`` searches all.

        Returns:
            Id of each hit -> its score, highest first.
        """
        from tilefold.retrieval.index.qdrant import Queries
        from tilefold.retrieval.index.qdrant.index import QdrantIndex  # needs qdrant

        if not isinstance(self.index, QdrantIndex):
            raise ArgumentError(
                "index",
                f"expected a Qdrant collection with dense vectors, got {self.index.backend!r}.",
            )
        (hits,) = self.index.collection.search(Queries([QUERY], dense=vector[None]), k, where=where)
        return {hit.id: hit.score for hit in hits}

    def explain_query(self, ranking: Ranking, query: str) -> Explanation:
        """Explain the sparse vector of a query after feedback.

        Args:
            ranking: the ranking of the query.
            query: text of the query.

        Returns:
            The heaviest terms with their weights, the number of all terms, and the marks of the
            terms in the text. A term is ``expanded`` if it is no token of the text, and of
            ``feedback`` if the vector did not have it before. Empty for an index of words.
        """
        if self.encoder is None:
            return {}
        text = self.encoder.text  # the tokenizer
        marked_query = query[:_MAX_MARKED_CHARACTERS]
        query_tokens = text.token_ids(marked_query)
        terms_before_feedback, _ = ranking.before.row(0)
        original_terms = set(terms_before_feedback.tolist())
        terms, weights = ranking.after.row(0)
        weight_of_term = dict(zip(terms.tolist(), weights.tolist(), strict=True))
        by_weight = sorted(weight_of_term, key=lambda term: (-weight_of_term[term], term))
        listed_terms = [term for term in by_weight if term not in text.special_ids]
        listed_terms = listed_terms[:_MAX_EXPLAINED_TERMS]
        explained_terms = [
            {
                "id": term,
                "term": text.token(term),
                "weight": weight_of_term[term],
                "expanded": term not in query_tokens,
                "feedback": term not in original_terms,
            }
            for term in listed_terms
        ]
        return {
            "terms": explained_terms,
            "terms_in_all": len(weight_of_term),
            "marks": _marks(text, marked_query, set(listed_terms)),
        }

    def document_and_passage(
        self,
        ranking: Ranking,
        hit_id: str,
    ) -> tuple[Document | None, Passage | None]:
        """Return the document of a hit, and the passage that it was ranked by.

        Args:
            ranking: the ranking with the hit.
            hit_id: id of the hit: of a document, or of a passage if passages are ranked.

        Returns:
            The document, or ``None`` if the server does not show it. The passage, or ``None`` if
            whole documents are ranked.
        """
        passage_id = ranking.passage(QUERY, hit_id)
        passage = None if passage_id is None else Passage.of(passage_id)
        document_id = hit_id if passage is None else passage.document
        return self.documents.get(document_id), passage

    def explain_document(self, ranking: Ranking, name: str) -> Explanation:
        """Explain a hit by the stages of its ranking and the terms that it shares with the query.

        Args:
            ranking: the ranking with the hit.
            name: id of the document.

        Returns:
            Rank and score in each stage, the shared terms with their contributions to the sparse
            score, and the marks of these terms in title and text.
        """
        stages = {}
        for stage, run in ranking.stages.items():
            scores = run[QUERY]
            if name in scores:
                stages[stage] = {"rank": list(scores).index(name) + 1, "score": scores[name]}
        explanation: Explanation = {"stages": stages, "terms": []}
        if self.vectors is None or self.encoder is None:
            return explanation
        vector_id = ranking.passages.get("sparse", {}).get(QUERY, {}).get(name, name)
        row = self.vectors.row_of.get(vector_id)
        if row is None:
            return explanation
        tokens = self.encoder.text
        matched = matched_terms(ranking.after.row(0), self.vectors.row(row), tokens.special_ids)
        document, passage = self.document_and_passage(ranking, name)
        shown_text = ""
        document_tokens = None
        if document is not None:
            shown_text = document.text
            if passage is not None:
                shown_text = shown_text[passage.start : passage.stop]
            contents = Document(name, document.title, shown_text).contents
            document_tokens = tokens.token_ids(contents[:_MAX_MARKED_CHARACTERS])
        sparse_score = ranking.stages["sparse"][QUERY].get(name)
        explanation["terms"] = [
            _explain_term(tokens, term, contribution, sparse_score, document_tokens)
            for term, contribution in matched
        ]
        if document is not None:
            terms = {term for term, _ in matched}
            explanation["marks"] = {
                "title": _marks(tokens, document.title, terms),
                "text": _marks(tokens, shown_text[:_MAX_MARKED_CHARACTERS], terms),
            }
        return explanation


def _explain_term(
    tokens: TextTokens,
    term: int,
    contribution: float,
    sparse_score: float | None,
    document_tokens: set[int] | None,
) -> Explanation:
    """Explain a term that a document shares with the query.

    The explanation has the term's ``contribution`` to the sparse score, its ``share`` of that score
    if there is one, and whether the model ``expanded`` the text by it: the text does not have it.

    Args:
        tokens: tokenizer of the model.
        term: id of the term.
        contribution: its part of the sparse score.
        sparse_score: sparse score of the document; ``None`` if it has none in this ranking.
        document_tokens: tokens of the document's text; ``None`` if the server does not show it.
    """
    explanation: Explanation = {
        "id": term,
        "term": tokens.token(term),
        "contribution": contribution,
    }
    if sparse_score is not None:
        explanation["share"] = contribution / sparse_score
    if document_tokens is not None:
        explanation["expanded"] = term not in document_tokens
    return explanation


def _marks(text: TextTokens, content: str, terms: set[int]) -> list[list[int]]:
    """Return the positions of terms in a text, for a page to mark them.

    Args:
        text: tokenizer of the model.
        content: the text.
        terms: ids of the terms.

    Returns:
        ``[start, stop, term]`` for each token that is one of the terms, in code points.
    """
    if not content:
        return []
    (tokens,) = text.tokenize([content], add_special_tokens=False)
    return [
        [token["start"], token["stop"], token["id"]] for token in tokens if token["id"] in terms
    ]
