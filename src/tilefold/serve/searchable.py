"""Index of a server with its models, documents and vectors, and explanations of its hits."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
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
from tilefold.retrieval.index.opening import gpus_of
from tilefold.retrieval.index.query_graphs import SEARCHES_BEFORE_CAPTURE
from tilefold.retrieval.index.segments import Segments
from tilefold.retrieval.search.searcher import (
    Ranking,
    Searcher,
    SearchRequest,
    matched_terms,
)
from tilefold.retrieval.vectors.sparse_files import SparseVectors
from tilefold.retrieval.vectors.tokens import TokenStore, TokenVectors
from tilefold.serve.bodies import keep_largest
from tilefold.serve.document_log import LoggedDocuments
from tilefold.serve.models import Served, TextTokens

Options = Mapping[str, Any]
Explanation = dict[str, object]
QUERY = "query"  # id of the query in rankings and vectors: a request has only one
_PROBE_TEXT = "a"  # short text that every model can encode
_PROBE_HITS = 10  # as many as a request asks for by default
_MAX_MARKED_CHARACTERS = 4000  # number of characters of a text in which terms are marked
_MAX_EXPLAINED_TERMS = 512  # largest number of terms of a query that an explanation lists


@dataclass(frozen=True, eq=False)
class Searchable:
    """An index to serve, with its models, documents and vectors.

    It is not checked that `encoder` has encoded the documents of the index.

    Attributes:
        name: name of the index in URLs.
        index: the index.
        encoder: model that encodes queries; ``None`` for a BM25 index.
        documents: id -> document; empty if the server shows no documents.
        vectors: vectors of the documents, for explanations and feedback.
        words: BM25 index, for fusion.
        late: multi-vector model, for reranking.
        store: token vectors of the documents, for reranking; ``None`` encodes the texts of
            candidates.
        query_top_k: number of largest weights that a query keeps; ``None`` keeps all.
        options: options of the search in the index, such as Seismic's ``heap_factor``.
        dense: model of the dense vectors of a Qdrant collection.
        generation: id of the generation of the index folder; ``None`` for an index in memory.

    Raises:
        DataError: if a part was made from other documents than the index, or by another model.
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
    generation: str | None = None

    def __post_init__(self) -> None:
        # Created by the thread that loads the index, because a check may encode.
        _ = self.searcher

    @cached_property
    def searcher(self) -> Searcher:
        """The searcher of the index, which ranks documents and reranks the best.

        The service encodes the queries of searches. The searcher gets the models to compare their
        precision with that of the documents' vectors, and to explain late-interaction scores.
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
            # Leaves out the check that the models encoded the documents, which the caller makes.
            other_model=True,
        )

    @property
    def models(self) -> list[Served]:
        """The models that encode queries or candidates."""
        models = (self.encoder, self.late, self.dense)
        return [model for model in models if model is not None]

    @property
    def features(self) -> dict[str, bool]:
        """Name of each feature of a search -> whether this index supports it.

        ``explain`` means the terms of a sparse index that match, or the tokens of an index of token
        vectors. ``images`` means that documents are page images, which the server shows. ``prf`` is
        feedback, which reads the vectors of documents. ``where`` means filters by metadata.
        """
        has_sparse_vectors = self.vectors is not None and self.encoder is not None
        can_read_candidates = self.store is not None or bool(self.documents)
        return {
            "documents": bool(self.documents),
            "explain": has_sparse_vectors or self.explains_tokens,
            "images": self.has_images,
            "prf": has_sparse_vectors or self.index.backend == DENSE,
            "fusion": self.words is not None,
            "dense": self.dense is not None,
            "rerank": self.late is not None and can_read_candidates,
            "passages": self.searcher.passages is not None,
            "where": self.index.metadata is not None or self.index.backend == "qdrant",
        }

    @property
    def explains_tokens(self) -> bool:
        """Whether the server shows which tokens of a hit match the query.

        It does for late interaction, unless similar token vectors were merged: a merged vector
        belongs to several tokens.
        """
        if self.encoder is None or not self.documents:
            return False
        index: Any = self.index
        parts = index.parts if isinstance(index, Segments) else [index]
        return all(
            isinstance(part, LateIndex) and part.options["pool_factor"] == 1 for part in parts
        )

    @cached_property
    def has_images(self) -> bool:
        """Whether a document is a page image."""
        return any(document.page is not None for document in self._possible_pages)

    @cached_property
    def has_only_images(self) -> bool:
        """Whether all documents are page images, apart from texts that were put over HTTP.

        Without documents, the index says whether page images were encoded.
        """
        if not self.documents:
            return self.index.provenance.dpi is not None
        pages = self._possible_pages
        return bool(pages) and all(document.page is not None for document in pages)

    @property
    def _possible_pages(self) -> Collection[Document]:
        """Documents of the collection, if page images may be among them."""
        documents = self.documents
        if isinstance(documents, LoggedDocuments):  # documents that were put over HTTP are texts
            documents = documents.base
        if not isinstance(documents, dict):  # documents that are read one by one are texts
            return ()
        return documents.values()

    def encode_probe(self) -> Any:
        """Encode a word as a query, for a first search that no client has asked for.

        No other thread may use the model at the same time.

        Returns:
            The encoded word, for :meth:`search_probe`; ``None`` for a BM25 index.
        """
        if self.encoder is None:
            return None
        key = self.encoder.batch_key("query", prompt_name=None)
        return self.encoder.encode(key, [_PROBE_TEXT])[0]

    def search_probe(self, encoded_word: Any) -> None:
        """Search for a word, so that no request waits for the initialisation of the index.

        The first search copies the index to the GPU that searches it. On a GPU, the word is
        searched for until a CUDA graph of the search was captured.

        Args:
            encoded_word: the word as :meth:`encode_probe` has encoded it.
        """
        vector = None if encoded_word is None else self.query_vector(encoded_word)
        search = functools.partial(
            self.searcher.rank,
            {QUERY: _PROBE_TEXT},
            SearchRequest(_PROBE_HITS),
            vector,
        )
        search()
        if gpus_of(self.index):
            for _ in range(SEARCHES_BEFORE_CAPTURE):
                search()

    def query_vector(self, row: Any) -> SparseVectors | TokenVectors | torch.Tensor:
        """Convert an encoded query to the form in which the index searches with it.

        Args:
            row: the query as the service has encoded it: a :class:`tilefold.serve.bodies.Row` of a
                sparse model, a tensor of token vectors ``[Lq, D]``, or a dense vector ``[D]``.

        Returns:
            Vectors of one query. Of a sparse query, the :attr:`query_top_k` largest weights.

        Raises:
            ValueError: if the index is a BM25 index, which has no vectors.
        """
        if self.encoder is None:
            raise ArgumentError(
                "encoder",
                "expected a model, got None; a BM25 index reads texts.",
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
            ``terms`` with the largest weights, ``terms_in_all`` (the number of all terms), and
            ``marks`` (the positions of the terms in the text). A term is ``expanded`` if it is not
            a token of the text, and ``feedback`` if feedback added it. Empty for an index without
            sparse vectors.
        """
        if self.encoder is None or self.explains_tokens:
            return {}
        tokenizer = self.encoder.tokenizer
        marked_query = query[:_MAX_MARKED_CHARACTERS]
        query_tokens = tokenizer.token_ids(marked_query)
        terms_before_feedback, _ = ranking.vectors_before_feedback.row(0)
        original_terms = set(terms_before_feedback.tolist())
        terms, weights = ranking.vectors.row(0)
        weight_of_term = dict(zip(terms.tolist(), weights.tolist(), strict=True))
        by_weight = sorted(weight_of_term, key=lambda term: (-weight_of_term[term], term))
        listed_terms = [term for term in by_weight if term not in tokenizer.special_ids]
        listed_terms = listed_terms[:_MAX_EXPLAINED_TERMS]
        explained_terms = [
            {
                "id": term,
                "term": tokenizer.term_name(term),
                "weight": weight_of_term[term],
                "expanded": term not in query_tokens,
                "feedback": term not in original_terms,
            }
            for term in listed_terms
        ]
        return {
            "terms": explained_terms,
            "terms_in_all": len(weight_of_term),
            "marks": _term_positions(tokenizer, marked_query, set(listed_terms)),
        }

    def document_and_passage(
        self,
        ranking: Ranking,
        hit_id: str,
    ) -> tuple[Document | None, Passage | None]:
        """Return the document of a hit, and the passage by which it was ranked.

        Args:
            ranking: the ranking with the hit.
            hit_id: id of a document, or of a passage if passages are ranked.

        Returns:
            The document, or ``None`` if the server does not have it. The passage, or ``None`` if
            whole documents are ranked.
        """
        passage_id = ranking.passage(QUERY, hit_id)
        passage = None if passage_id is None else Passage.of(passage_id)
        document_id = hit_id if passage is None else passage.document
        return self.documents.get(document_id), passage

    def explain_document(self, ranking: Ranking, hit_id: str) -> Explanation:
        """Explain a hit by the stages of its ranking and the terms that it shares with the query.

        Args:
            ranking: the ranking with the hit.
            hit_id: id of a document, or of a passage if passages are ranked.

        Returns:
            Rank and score in each stage, the shared terms with their contributions to the sparse
            score, and the positions of these terms in the title and the text.
        """
        explanation: Explanation = {"stages": _ranks_and_scores(ranking, hit_id), "terms": []}
        if self.vectors is None or self.encoder is None:
            return explanation
        # An index of passages has vectors of passages: that of the hit's best passage explains it.
        passage_of_hit = ranking.passages.get("sparse", {}).get(QUERY, {})
        vector_id = passage_of_hit.get(hit_id, hit_id)
        row = self.vectors.row_of.get(vector_id)
        if row is None:
            return explanation
        tokenizer = self.encoder.tokenizer
        matched = matched_terms(
            ranking.vectors.row(0),
            self.vectors.row(row),
            without=tokenizer.special_ids,
        )
        document, passage = self.document_and_passage(ranking, hit_id)
        ranked_text = ""
        document_tokens = None
        if document is not None:
            ranked_text = document.text
            if passage is not None:
                ranked_text = ranked_text[passage.start : passage.stop]
            contents = Document(hit_id, document.title, ranked_text).contents
            document_tokens = tokenizer.token_ids(contents[:_MAX_MARKED_CHARACTERS])
        sparse_score = ranking.stages["sparse"][QUERY].get(hit_id)
        explanation["terms"] = [
            _explain_term(tokenizer, term, contribution, sparse_score, document_tokens)
            for term, contribution in matched
        ]
        if document is not None:
            terms = {term for term, _ in matched}
            marked_text = ranked_text[:_MAX_MARKED_CHARACTERS]
            explanation["marks"] = {
                "title": _term_positions(tokenizer, document.title, terms),
                "text": _term_positions(tokenizer, marked_text, terms),
            }
        return explanation


def _ranks_and_scores(ranking: Ranking, hit_id: str) -> dict[str, dict[str, float]]:
    """Return stage -> rank and score of a hit, for the stages of a ranking that contain the hit.

    Args:
        ranking: the ranking.
        hit_id: id of a document, or of a passage if passages are ranked.
    """
    stages: dict[str, dict[str, float]] = {}
    for stage, run in ranking.stages.items():
        scores = run[QUERY]
        if hit_id in scores:
            stages[stage] = {"rank": list(scores).index(hit_id) + 1, "score": scores[hit_id]}
    return stages


def _explain_term(
    tokenizer: TextTokens,
    term: int,
    contribution: float,
    sparse_score: float | None,
    document_tokens: set[int] | None,
) -> Explanation:
    """Explain a term that a document shares with the query.

    Args:
        tokenizer: tokenizer of the model.
        term: id of the term.
        contribution: the term's contribution to the sparse score.
        sparse_score: sparse score of the document; ``None`` if the ranking is not sparse.
        document_tokens: tokens of the document's text; ``None`` if the server does not have it.

    Returns:
        The explanation. It says whether the term is an expansion, that is, not in the text.
    """
    explanation: Explanation = {
        "id": term,
        "term": tokenizer.term_name(term),
        "contribution": contribution,
    }
    if sparse_score is not None:
        explanation["share"] = contribution / sparse_score
    if document_tokens is not None:
        explanation["expanded"] = term not in document_tokens
    return explanation


def _term_positions(tokenizer: TextTokens, text: str, terms: set[int]) -> list[list[int]]:
    """Return the positions of terms in a text, which the search page highlights.

    Args:
        tokenizer: tokenizer of the model.
        text: the text.
        terms: ids of the terms.

    Returns:
        ``[start, stop, term]`` for each token that is one of the terms. Start and stop count code
        points.
    """
    if not text:
        return []
    (tokens,) = tokenizer.tokenize([text], add_special_tokens=False)
    return [
        [token["start"], token["stop"], token["id"]] for token in tokens if token["id"] in terms
    ]
