"""What search loads once, and how it answers a query."""
# ruff: noqa: PLC0415 - heavy packages are imported when the verb runs

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold.cli import _common, _rerank, _retrievers, _scores

if TYPE_CHECKING:
    from tilefold.cli._retrievers import SparseRetriever
    from tilefold.retrieval.bm25 import BM25Index
    from tilefold.retrieval.vectors import SparseVectors

RERANK_DEPTH = 100


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
    ) -> None:
        self.paths, self.retriever, self.k = paths, retriever, k
        self.depth = (reranking.depth or max(k, RERANK_DEPTH)) if reranking else k
        collection = _common.load_data(paths.data, documents_only=True) if paths.data else None
        if collection is not None:
            texts = _scores.texts_of(collection)
            _scores.check_texts(f"--index {paths.index}", retriever.provenance, collection, texts)
        self.documents = collection.documents if collection else {}
        self._check_vectors()
        self.reranker = _rerank.load_reranker(reranking, collection, retriever.provenance) if reranking else None

    def answer(self, query: str) -> list[dict[str, Any]]:
        """The `k` best documents: rank, id, score, title (or text), and the terms that they share with the query."""
        queries = {"query": query}
        encoded = None
        if isinstance(self.retriever, _retrievers.SparseRetriever):
            encoded = self.retriever.encode(queries)
            first = self.retriever.search_vectors(encoded, self.depth)["query"]
        else:
            first = self.retriever.search(queries, self.depth)["query"]
        if self.documents and first and not first.keys() & self.documents.keys():
            raise _common.CommandError(
                f"--data: none of the documents found is in {self.paths.data} (the first is {next(iter(first))!r}); "
                f"give the collection that the index {self.paths.index} was made from."
            )
        found = first
        if self.reranker is not None and first:
            found = self.reranker(queries, {"query": first})["query"]
        ranks = {name: rank for rank, name in enumerate(first, start=1)}
        shown = dict(list(found.items())[: self.k])
        matched = self._matched(encoded, {name: first[name] for name in shown})
        hits = []
        for rank, (name, score) in enumerate(shown.items(), start=1):
            document = self.documents.get(name)
            title = (document.title or document.text) if document else ""
            hit = {"rank": rank, "id": name, "score": score, "title": title, "terms": matched.get(name, [])}
            if self.reranker is not None:
                hit["first"] = {"rank": ranks[name], "score": first[name]}
            hits.append(hit)
        return hits

    def _check_vectors(self) -> None:
        from tilefold.retrieval.vectors import read_manifest

        index, vectors = self.paths.index, self.paths.vectors
        if vectors is None:
            return
        if not isinstance(self.retriever, _retrievers.SparseRetriever):
            raise _common.UsageError(f"--vectors: {index} is a BM25 index, which has none: leave it out.")
        if self.retriever.provenance.differs(read_manifest(vectors).provenance):
            raise _common.CommandError(
                f"--vectors: {vectors} holds vectors of another model or of other documents than the index {index}. "
                f"Give those that it was built from, or build it again: tilefold index --vectors {vectors}"
            )

    def _matched(self, encoded: SparseVectors | None, scores: dict[str, float]) -> dict[str, list[dict[str, Any]]]:
        """The terms that each document shares with the query, where --vectors holds its vector."""
        from tilefold.retrieval.vectors import read_rows

        if self.paths.vectors is None or encoded is None or not isinstance(self.retriever, _retrievers.SparseRetriever):
            return {}
        stored = read_rows(self.paths.vectors, scores)
        tokenizer = self.retriever.encoder.tokenizer
        return {name: _terms(encoded, stored, row, tokenizer, scores[name]) for row, name in enumerate(stored.ids)}


def _terms(
    encoded: SparseVectors, stored: SparseVectors, row: int, tokenizer: Any, score: float
) -> list[dict[str, Any]]:
    """Query terms that the document contains, by their part of the score, largest first; without special tokens."""
    query = dict(zip(*(part.tolist() for part in encoded.row(0)), strict=True))
    document = dict(zip(*(part.tolist() for part in stored.row(row)), strict=True))
    words = document.keys() & (query.keys() - set(tokenizer.all_special_ids))
    ordered = sorted(((query[term] * document[term], term) for term in words), key=lambda item: (-item[0], item[1]))
    tokens = tokenizer.convert_ids_to_tokens([term for _, term in ordered])
    return [
        {"term": token, "contribution": part, "share": part / score}
        for token, (part, _) in zip(tokens, ordered, strict=True)
    ]
