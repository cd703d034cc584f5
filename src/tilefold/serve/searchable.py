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
from tilefold.serve.bodies import strongest
from tilefold.serve.models import Served, TextTokens

Options = Mapping[str, Any]
Explanation = dict[str, object]
QUERY = "query"  # the id of the one query of a request
_MARKED = 4000  # characters of a text in which terms are marked
_TERMS = 512  # of a query's vector that are shown


@dataclass(frozen=True)
class Searchable:
    """An index to serve, with what belongs to it.

    Raises:
        DataError: parts of other documents than the index, or by another model; that `encoder` made
            the index is not checked.
    """

    name: str  # in the addresses
    index: SparseIndex | BM25Index | DenseIndex | LateIndex
    encoder: Served | None = None  # makes the queries' vectors; none for an index of words
    documents: Mapping[str, Document] = field(
        default_factory=dict,
    )  # by id; empty where none are shown
    vectors: SparseVectors | None = None  # of the documents, for explanations and feedback
    words: BM25Index | None = None  # to fuse with
    late: Served | None = None  # the multi-vector model that reranks
    store: TokenStore | None = None  # its vectors of the documents; without, candidates are encoded
    query_top_k: int | None = None  # terms kept of a query
    options: Options = field(
        default_factory=dict,
    )  # of the index's search, such as Seismic's ``heap_factor``
    dense: Served | None = (
        None  # the model of the dense vectors of the index, a Qdrant collection with such
    )

    def __post_init__(self) -> None:
        _ = self.searcher  # made by the thread that loads: a check may encode

    @cached_property
    def searcher(self) -> Searcher:
        """Ranks and reranks the vectors of queries, which the service encodes.

        The searcher has the models too: it compares their precisions with those of the vectors.
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
        """Features that a search of it offers."""
        explained = self.vectors is not None and self.encoder is not None
        return {
            "documents": bool(self.documents),
            "explain": explained,
            "prf": explained or self.index.backend == DENSE,
            "fusion": self.words is not None,
            "dense": self.dense is not None,
            "rerank": self.late is not None and (self.store is not None or bool(self.documents)),
            "passages": self.searcher.passages is not None,
            "where": self.index.metadata is not None or self.index.backend == "qdrant",
        }

    def query_vector(self, row: Any) -> SparseVectors | TokenVectors | torch.Tensor:
        """The vector of a query, of a sparse one its heaviest terms alone if the index is searched
        so.
        """
        if self.encoder is None:
            raise ArgumentError(
                "encoder", "expected a model, got None; an index of words reads texts."
            )
        if self.encoder.kind == "dense":
            return torch.from_numpy(row[None])
        if self.encoder.kind == "multi-vector":
            return TokenVectors([QUERY], torch.tensor([0, len(row)]), row.float())
        indices, weights, _ = strongest(row, self.query_top_k, None)
        fingerprint = vocabulary_fingerprint(self.encoder.model.tokenizer)
        return SparseVectors(
            [QUERY],
            np.array([0, len(indices)]),
            indices,
            weights,
            self.index.vocab_size,
            fingerprint,
        )

    def search_dense(
        self,
        vector: npt.NDArray[np.float32],
        k: int,
        where: Where = None,
    ) -> dict[str, float]:
        """Search the dense vectors of a Qdrant collection, and return the scores of ``k`` hits."""
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
        """The terms of the query as searched, heaviest first, and where they stand in its text."""
        if self.encoder is None:
            return {}
        text, query = self.encoder.text, query[:_MARKED]
        own, before = text.words(query), set(ranking.before.row(0)[0].tolist())
        weights = dict(zip(*(part.tolist() for part in ranking.after.row(0)), strict=True))
        ordered = sorted(weights, key=lambda term: (-weights[term], term))
        shown = [term for term in ordered if term not in text.special_ids][:_TERMS]
        terms = [
            {
                "id": term,
                "term": text.token(term),
                "weight": weights[term],
                "expanded": term not in own,  # among its tokens
                "feedback": term not in before,  # in its vector
            }
            for term in shown
        ]
        return {
            "terms": terms,
            "terms_in_all": len(weights),
            "marks": _marks(text, query, set(shown)),
        }

    def owner(self, ranking: Ranking, name: str) -> tuple[Document | None, Passage | None]:
        """The document of a result, and the passage that it was ranked by."""
        found = ranking.passage(QUERY, name)
        passage = None if found is None else Passage.of(found)
        return self.documents.get(passage.document if passage else name), passage

    def explain_document(self, ranking: Ranking, name: str) -> Explanation:
        """The rank and score of a document in every stage, and the terms that it shares with the
        query as searched.
        """
        stages = {
            stage: {"rank": list(run[QUERY]).index(name) + 1, "score": run[QUERY][name]}
            for stage, run in ranking.stages.items()
            if name in run[QUERY]
        }
        found: Explanation = {"stages": stages}
        part = ranking.passages.get("sparse", {}).get(QUERY, {}).get(name, name)
        if (
            self.vectors is None
            or self.encoder is None
            or (row := self.vectors.row_of.get(part)) is None
        ):
            return found | {"terms": []}
        text, (document, passage) = self.encoder.text, self.owner(ranking, name)
        shown = document.text if document else ""
        shown = shown[passage.start : passage.stop] if passage else shown
        matched = matched_terms(ranking.after.row(0), self.vectors.row(row), text.special_ids)
        own = (
            text.words(Document(name, document.title, shown).contents[:_MARKED])
            if document
            else None
        )
        score = ranking.stages["sparse"][QUERY].get(name)
        found["terms"] = [
            {"id": term, "term": text.token(term), "contribution": part}
            | ({} if score is None else {"share": part / score})  # of the sparse score
            | ({} if own is None else {"expanded": term not in own})
            for term, part in matched
        ]
        if document:
            terms = {term for term, _ in matched}
            read = {"title": document.title, "text": shown[:_MARKED]}
            found["marks"] = {name: _marks(text, part, terms) for name, part in read.items()}
        return found


def _marks(text: TextTokens, content: str, terms: set[int]) -> list[list[int]]:
    """First and last character (in code points) and id of the tokens that are among `terms`."""
    if not content:
        return []
    (tokens,) = text.tokenize([content], False)
    return [
        [token["start"], token["stop"], token["id"]] for token in tokens if token["id"] in terms
    ]
