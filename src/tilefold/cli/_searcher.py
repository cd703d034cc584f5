"""What search loads once, and how it answers a query."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.cli import _common, _feedback, _rerank, _retrievers, _scores

if TYPE_CHECKING:
    from tilefold.cli._retrievers import SparseRetriever
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.collection import Document
    from tilefold.retrieval.vectors import SparseVectors

RERANK_DEPTH = 100
Scores = dict[str, float]


@dataclass(frozen=True)
class SearchPaths:
    """What a search reads, and how many terms it keeps of a query."""

    model: str | None
    index: Path
    data: str | None
    vectors: Path | None
    query_top_k: int | None = None


class Searcher:
    """Answers queries with what is loaded once: the documents, the retriever and the reranker.

    Raises:
        CommandError, UsageError: paths that do not belong together.
    """

    def __init__(
        self,
        paths: SearchPaths,
        retriever: SparseRetriever | BM25Index,
        k: int,
        reranking: _rerank.RerankOptions | None,
        feedback: _feedback.FeedbackOptions | None = None,
    ) -> None:
        self.paths, self.retriever, self.k = paths, retriever, k
        self.depth = (reranking.depth or max(k, RERANK_DEPTH)) if reranking else k
        collection = None
        if paths.data:
            collection, texts = _common.open_documents(paths.data)
            _scores.check_texts(f"--index {paths.index}", retriever.provenance, collection, texts)
        self.documents: Mapping[str, Document] = collection.documents if collection else {}
        self._check_vectors()
        self.feedback = None if feedback is None else _feedback.with_options(feedback, retriever, paths.vectors)
        self.reranker = _rerank.load_reranker(reranking, collection, retriever.provenance) if reranking else None

    def answer(self, query: str) -> list[dict[str, Any]]:
        """The `k` best documents: rank, id, score, title (or text), and the terms that they share with the query."""
        queries = {"query": query}
        first, own, asked, encoded = self._first(queries)
        if self.documents and first and not any(name in self.documents for name in first):
            raise _common.CommandError(
                f"--data: none of the documents found is in {self.paths.data} (the first is {next(iter(first))!r}); "
                f"give the collection that the index {self.paths.index} was made from."
            )
        found = first
        if self.reranker is not None and first:
            found = self.reranker(queries, {"query": first})["query"]
        ranks = {name: rank for rank, name in enumerate(first, start=1)}
        shown = dict(list(found.items())[: self.k])
        matched = self._matched(asked, encoded, {name: own[name] for name in shown if name in own})
        hits = []
        for rank, (name, score) in enumerate(shown.items(), start=1):
            document = self.documents.get(name)
            title = (document.title or document.text) if document else ""
            hit = {"rank": rank, "id": name, "score": score, "title": title, "terms": matched.get(name, [])}
            if self.reranker is not None:
                hit["first"] = {"rank": ranks[name], "score": first[name]}
            hits.append(hit)
        return hits

    def _first(self, queries: dict[str, str]) -> tuple[Scores, Scores, SparseVectors | None, SparseVectors | None]:
        """The ranking before reranking, the scores to explain, and the vectors of the query: its own, and as searched.

        They differ where feedback changed the query, and where its ranking was interpolated with another one.
        """
        if self.feedback is not None:
            answers = self.feedback.answers(queries, self.depth)
            ranked = dict(list(answers.run["query"].items())[: self.depth])
            return ranked, answers.own["query"], answers.before, answers.after
        if isinstance(self.retriever, _retrievers.SparseRetriever):
            encoded = self.retriever.encode(queries)
            first = self.retriever.search_vectors(encoded, self.depth)["query"]
            return first, first, encoded, encoded
        first = self.retriever.search(queries, self.depth)["query"]
        return first, first, None, None

    def _check_vectors(self) -> None:
        index, vectors = self.paths.index, self.paths.vectors
        if vectors is None:
            return
        if not isinstance(self.retriever, _retrievers.SparseRetriever):
            raise _common.UsageError(f"--vectors: {index} is a BM25 index, which has none: leave it out.")
        _retrievers.check_vectors(vectors, self.retriever)

    def _matched(
        self, asked: SparseVectors | None, encoded: SparseVectors | None, scores: Scores
    ) -> dict[str, list[dict[str, Any]]]:
        """The terms that each document shares with the query as searched, where --vectors holds its vector."""
        from tilefold.retrieval.vectors import read_rows

        retriever = self.retriever
        if self.paths.vectors is None or encoded is None or asked is None:
            return {}
        if not isinstance(retriever, _retrievers.SparseRetriever):
            return {}
        stored = read_rows(self.paths.vectors, scores)
        tokenizer = retriever.encoder.tokenizer
        own = None if asked is encoded else set(asked.row(0)[0].tolist())
        return {name: _terms(encoded, stored, row, tokenizer, scores[name], own) for row, name in enumerate(stored.ids)}


def _terms(
    encoded: SparseVectors, stored: SparseVectors, row: int, tokenizer: Any, score: float, own: set[int] | None
) -> list[dict[str, Any]]:
    """Query terms that the document contains, by their part of the score, largest first; without special tokens.

    After feedback `own` are the terms that the query had before it, and each says whether feedback added it.
    """
    from tilefold.retrieval.matched_terms import matched_terms

    found = matched_terms(encoded.row(0), stored.row(row), tokenizer.all_special_ids)
    tokens = tokenizer.convert_ids_to_tokens([term for term, _ in found])
    return [
        {"term": token, "contribution": part, "share": part / score}
        | ({} if own is None else {"feedback": term not in own})
        for token, (term, part) in zip(tokens, found, strict=True)
    ]
