"""A search from queries to ranked documents: retrieval, feedback, fusion, reranking and an explanation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilefold._typing import Model
from tilefold.retrieval._checks import check_k
from tilefold.retrieval._files import Json
from tilefold.retrieval._sparse import Row, SparseVectors
from tilefold.retrieval.bm25 import BM25Index
from tilefold.retrieval.collection import Document
from tilefold.retrieval.dense import encode_dense, rank_by_similarity
from tilefold.retrieval.errors import DataError, MissingDocumentError
from tilefold.retrieval.feedback import (
    Feedback,
    Interpolation,
    expand_dense,
    expand_sparse,
    feedback_documents,
    with_feedback,
)
from tilefold.retrieval.fusion import Fusion, Run
from tilefold.retrieval.index import SparseIndex, build_index, hits_to_run, load_index
from tilefold.retrieval.index.protocol import read_description
from tilefold.retrieval.provenance import Provenance
from tilefold.retrieval.vectors import read_manifest, read_rows

if TYPE_CHECKING:
    import torch

    from tilefold.retrieval.reranking import Reranking
    from tilefold.retrieval.tokens import TokenStore, TokenVectors

__all__ = ["DenseRetriever", "Ranking", "SearchRequest", "Searcher", "SparseRetriever", "WordsRetriever"]
__all__ += ["check_model", "matched_terms", "open_index"]

RERANK_DEPTH = 100  # candidates of a search that is reranked
WHOLE = 1000  # documents of a ranking that is interpolated around feedback, or whose last ones count


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
        if self.provenance.differs(stored.provenance):
            where = f"{self.vectors} " if isinstance(self.vectors, Path) else ""
            said = f"{where}holds vectors of another model or of other documents than the index"
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

    def search(self, vectors: SparseVectors, names: Sequence[str], k: int) -> Run:
        return hits_to_run(vectors, self.index.search(vectors, k, **self.options))

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

    def search(self, vectors: Mapping[str, str], names: Sequence[str], k: int) -> Run:
        return self.index.search(vectors, k)

    @cached_property
    def as_vectors(self) -> SparseRetriever:
        """Retriever with equal scores from vectors, which feedback can move."""
        vectors = self.index.document_vectors()
        return SparseRetriever(build_index(vectors, "exact"), vectors=vectors, words=self.index)


@dataclass(frozen=True)
class DenseRetriever:
    """A ``SentenceTransformer`` that encodes a whole collection once, when it is first searched."""

    model: Model
    texts: Mapping[str, str]  # document id -> contents
    texts_sha256: str | None = None  # their fingerprint, if known
    progress: Callable[[int, int], None] | None = None  # called with (documents encoded, documents)

    @cached_property
    def provenance(self) -> Provenance:
        from tilefold.retrieval.encoding import model_fingerprint

        return Provenance(model_fingerprint(self.model), self.texts_sha256)

    @cached_property
    def vectors(self) -> torch.Tensor:
        """The documents' vectors ``[N, D]``."""
        return encode_dense(self.model, self.texts, kind="document", progress=self.progress)

    def encode(self, queries: Mapping[str, str]) -> torch.Tensor:
        return encode_dense(self.model, queries, kind="query")

    def search(self, vectors: torch.Tensor, names: Sequence[str], k: int) -> Run:
        return rank_by_similarity(self.model, self.vectors, vectors.to(self.vectors), list(self.texts), names, k)

    def expand(self, queries: torch.Tensor, names: Sequence[str], basis: Run, feedback: Feedback) -> torch.Tensor:
        return expand_dense(queries, names, self.vectors, list(self.texts), basis, feedback)


def open_index(path: str | Path) -> SparseIndex | BM25Index:
    """The saved index of any backend, BM25 included; errors as of :func:`tilefold.retrieval.load_index`."""
    return BM25Index.load(path) if read_description(path)["backend"] == BM25Index.backend else load_index(path)


def check_model(made_by: Provenance, model: Model, name: str = "this", index: str = "the index") -> bool:
    """Whether a ``SparseEncoder`` is known to have made an index; a ``DataError`` where another one did."""
    from tilefold.retrieval.encoding import model_fingerprint

    if made_by.model_fingerprint is None:
        return False
    if made_by.differs(Provenance(model_fingerprint(model))):
        remedy = f"Give that one, or make the index again: tilefold encode --model {name}, then tilefold index."
        raise DataError(f"model: {name} is not the model that made {index} (its weights or settings differ). {remedy}")
    return True


_STAGES = {SparseRetriever: "sparse", WordsRetriever: "words", DenseRetriever: "dense"}


@dataclass(frozen=True)
class SearchRequest:
    """Options of a search; a ``ValueError`` for a `k` below 1, or an interpolation without feedback.

    Attributes:
        k: documents per query.
        feedback: moves each query towards the documents that it found, and searches again; None does not.
        interpolation: mixes the second ranking in before feedback, after it, or both; goes with `feedback`.
        fusion: fuses the second ranking with that of the index.
        reranking: orders the best candidates by late interaction.
    """

    k: int = 10
    feedback: Feedback | None = None
    interpolation: Interpolation | None = None
    fusion: Fusion | None = None
    reranking: Reranking | None = None

    def __post_init__(self) -> None:
        check_k(self.k)
        if self.interpolation is not None and self.feedback is None:
            raise ValueError("interpolation: expected feedback beside it, got None; without, take fusion.")

    @property
    def candidates(self) -> int:
        """Documents per query before reranking."""
        return self.k if self.reranking is None else max(self.k, self.reranking.depth or RERANK_DEPTH)


@dataclass
class Ranking:
    """Ranked documents of some queries, and how they came about."""

    run: Run  # best first
    stages: dict[str, Run] = field(default_factory=dict)  # "sparse", "words", "dense", "fusion", "late" -> its ranking
    before: Any = None  # vectors of the queries, as they were, and as they were searched with after feedback
    after: Any = None
    candidates: Run | None = None  # that were reranked


class Searcher:
    """Answers queries over one collection with what is loaded once.

    Args:
        index: of sparse vectors, of words (BM25), or a dense model over texts.
        model: the ``SparseEncoder`` that made the index; None for another kind, or where vectors of queries are given.
        documents: id -> document, whose titles are shown, and whose texts are encoded to be reranked without `tokens`.
        vectors: of the documents, or their folder, which is read row by row: for feedback and matched terms.
        second: a BM25 index or a run of the same collection, for an interpolation around feedback, or fusion.
        late: a ``MultiVectorEncoder`` that reranks.
        tokens: token vectors of the documents by that model; without, it encodes the candidates.
        query_top_k: terms kept of a query; None keeps all.
        options: of the index's search, such as Seismic's ``heap_factor``.
        other_model: take a model that did not make the index, such as a query encoder of its own.

    Parts that were made by another model or from other documents than the index are a ``DataError``, `model` or
    `vectors` beside an index that has none a ``ValueError``.
    """

    def __init__(
        self,
        index: SparseIndex | BM25Index | DenseRetriever,
        model: Model | None = None,
        *,
        documents: Mapping[str, Document] | None = None,
        vectors: SparseVectors | str | Path | None = None,
        second: BM25Index | Run | None = None,
        late: Model | None = None,
        tokens: TokenStore | None = None,
        query_top_k: int | None = None,
        options: Mapping[str, object] | None = None,
        other_model: bool = False,
    ) -> None:
        if not hasattr(index, "search"):
            expected = "what build_index or load_index gives, or a BM25Index"
            raise TypeError(f"index: expected {expected}, got {type(index).__name__}.")
        if model is not None and not hasattr(model, "encode_query"):
            raise TypeError(f"model: expected a SparseEncoder, got {type(model).__name__}; load it first.")
        self.documents: Mapping[str, Document] = {} if documents is None else documents
        self.second = second
        self.retriever: SparseRetriever | WordsRetriever | DenseRetriever
        if isinstance(index, BM25Index | DenseRetriever):
            kind = "a BM25 index" if isinstance(index, BM25Index) else "a dense model"
            for name, value in (("model", model), ("vectors", vectors)):
                if value is not None:
                    why = f"does nothing here, it goes with an index of sparse vectors, and this is {kind}"
                    raise ValueError(f"{name}: {why}, which has none: expected None, got {value}.")
            self.retriever = WordsRetriever(index) if isinstance(index, BM25Index) else index
        else:
            if model is not None and not other_model:
                check_model(index.provenance, model)
            rows = Path(vectors) if isinstance(vectors, str) else vectors
            self.retriever = SparseRetriever(index, model, rows, query_top_k, options or {})
        self.stage = _STAGES[type(self.retriever)]
        if isinstance(second, BM25Index) and "texts_sha256" in second.provenance.differs(self.provenance):
            raise DataError("second: was made from other documents than those that are searched.")
        self.reranker = None
        if late is not None:
            from tilefold.retrieval.reranking import Reranker  # needs torch, and a search of words none

            self.reranker = Reranker(late, tokens, self.documents, self.provenance)

    @property
    def provenance(self) -> Provenance:
        """Fingerprints of the model and of the documents behind the index."""
        return self.retriever.provenance

    def search(self, query: str, request: SearchRequest | None = None) -> list[Json]:
        """The best documents for a query, each with ``rank`` (from 1), ``id``, ``score`` and ``title`` (or its text).

        Where the searcher has `vectors`, also ``terms`` that it shares with the query, largest first: ``term``,
        ``contribution`` to the sparse score, ``share`` of it and, after feedback, whether ``feedback`` added it. After
        reranking also ``first``, its ``rank`` and ``score`` before. A request that needs a part that the searcher was
        made without is a ``ValueError``, a document that `vectors`, `tokens` or `documents` lack a ``DataError``.
        """
        request = SearchRequest() if request is None else request
        if not isinstance(query, str):
            raise TypeError(f"query: expected a string, got {type(query).__name__}; rank() takes several queries.")
        if not isinstance(request, SearchRequest):
            raise TypeError(f"request: expected a SearchRequest, such as SearchRequest(k=5), got {request!r}.")
        queries = {"query": query}
        ranking = self.rank(queries, request)
        first = next(iter(ranking.run["query"]), None)
        if first is not None and self.documents and not any(name in self.documents for name in ranking.run["query"]):
            strange = f"none of the documents found is in the collection given (the first is {first!r})"
            raise DataError(f"documents: {strange}; give the one that the index was made from.")
        if request.reranking is not None:
            ranking = self.rerank(queries, ranking, request.reranking)
        shown = dict(list(ranking.run.get("query", {}).items())[: request.k])
        own = ranking.stages[self.stage]["query"]
        terms = self._terms(ranking, {name: own[name] for name in shown if name in own})
        places = {name: rank for rank, name in enumerate((ranking.candidates or {}).get("query", ()), start=1)}
        found: list[Json] = []
        for rank, (name, score) in enumerate(shown.items(), start=1):
            document = self.documents.get(name)
            title = (document.title or document.text) if document else ""
            found.append({"rank": rank, "id": name, "score": score, "title": title, "terms": terms.get(name, [])})
            if ranking.candidates is not None:
                found[-1]["first"] = {"rank": places[name], "score": ranking.candidates["query"][name]}
        return found

    def rank(self, queries: Mapping[str, str], request: SearchRequest, vectors: Any = None) -> Ranking:
        """The candidates of each query (id -> text; or `vectors`): of the index, after feedback, fused."""
        feedback, mix, depth, names = request.feedback, request.interpolation, request.candidates, list(queries)
        own: Run
        retriever: Any = self.retriever
        if feedback is not None and isinstance(retriever, WordsRetriever):
            retriever = retriever.as_vectors
        deep = depth
        if feedback is not None:
            deep = max(depth, feedback.k, WHOLE if mix is not None or feedback.bottom else 0)
        second = None if mix is None else self._second(queries, deep)
        before = after = retriever.encode(queries) if vectors is None else vectors
        run = own = retriever.search(before, names, deep)
        if feedback is not None:

            def again(basis: Run) -> Run:
                nonlocal after, own
                after = retriever.expand(before, names, basis, feedback)
                own = retriever.search(after, names, depth if mix is None else deep)
                return own

            run = with_feedback(run, again, deep, second, mix)
        ranking = Ranking(_best(run, depth), {self.stage: own if mix else _best(own, depth)}, before, after)
        if request.fusion is not None:
            ranking.stages["words"] = self._second(queries, depth)
            ranking.run = request.fusion.mix(ranking.run, ranking.stages["words"], depth)
            ranking.stages["fusion"] = ranking.run
        return ranking

    def rerank(
        self,
        queries: Mapping[str, str],
        ranking: Ranking,
        reranking: Reranking,
        encoded: TokenVectors | None = None,
        candidates: TokenVectors | None = None,
    ) -> Ranking:
        """The ranking of :meth:`rank` after late interaction; `encoded` and `candidates` as in :class:`Reranker`."""
        if self.reranker is None:
            raise ValueError("reranking: expected a searcher with a late-interaction model, got one without.")
        late, run = self.reranker(queries, ranking.run, reranking, encoded, candidates)
        stages = ranking.stages | {"late": _best(late, reranking.depth)}
        return replace(ranking, run=run, stages=stages, candidates=ranking.run)

    def _second(self, queries: Mapping[str, str], k: int) -> Run:
        if self.second is None:
            raise ValueError("second: expected a BM25 index or a run to interpolate or fuse with, got None.")
        if isinstance(self.second, BM25Index):
            return self.second.search(queries, k)
        return {query: self.second[query] for query in queries if query in self.second}

    def _terms(self, ranking: Ranking, scores: Mapping[str, float]) -> dict[str, list[Json]]:
        """The terms that each document shares with the query as searched, largest part first, without special ones."""
        retriever = self.retriever
        if not isinstance(retriever, SparseRetriever) or retriever.vectors is None or retriever.model is None:
            return {}
        tokenizer, asked = retriever.model.tokenizer, ranking.after.row(0)
        moved = ranking.before is not ranking.after
        own = set(ranking.before.row(0)[0].tolist())
        stored = retriever.stored(scores, lacking=True)
        found: dict[str, list[Json]] = {}
        for row, name in enumerate(stored.ids):
            matched = matched_terms(asked, stored.row(row), tokenizer.all_special_ids)
            tokens = tokenizer.convert_ids_to_tokens([term for term, _ in matched])
            found[name] = [
                {"term": token, "contribution": part, "share": part / scores[name]}
                | ({"feedback": term not in own} if moved else {})
                for token, (term, part) in zip(tokens, matched, strict=True)
            ]
        return found


def matched_terms(query: Row, document: Row, without: Collection[int] = ()) -> list[tuple[int, float]]:
    """``(term, query weight * document weight)`` of two rows but for some terms, largest first, equal by term."""
    asked = dict(zip(*(part.tolist() for part in query), strict=True))
    stored = dict(zip(*(part.tolist() for part in document), strict=True))
    shared = stored.keys() & (asked.keys() - set(without))
    return sorted(((term, asked[term] * stored[term]) for term in shared), key=lambda item: (-item[1], item[0]))


def _best(run: Mapping[str, Mapping[str, float]], k: int | None) -> Run:
    return {query: dict(list(scores.items())[:k]) for query, scores in run.items()}
