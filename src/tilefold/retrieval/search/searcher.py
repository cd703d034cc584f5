"""A search from queries to ranked documents: retrieval, feedback, fusion, reranking and an
explanation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tilefold._internal.arguments import (
    check_choice,
    check_encoder,
    check_instance,
    check_k,
    check_mapping,
)
from tilefold._internal.typing import Model
from tilefold._internal.vocabulary import term_names_of
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.identical_ids import (
    queries_with_identical_ids,
    search_without_identical_ids,
    without_identical_ids,
)
from tilefold.retrieval.common.provenance import Provenance, model_fingerprint
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.collection import Document, documents_by_id
from tilefold.retrieval.data.metadata import Filter, Where
from tilefold.retrieval.data.passages import Passage, document_of
from tilefold.retrieval.errors import DataError
from tilefold.retrieval.index import DENSE, LATE, SparseIndex
from tilefold.retrieval.index.bm25 import BM25Index
from tilefold.retrieval.search.feedback import Feedback, Interpolation, with_feedback
from tilefold.retrieval.search.fusion import Fusion
from tilefold.retrieval.search.passages import BestPassages, as_passages, search_documents
from tilefold.retrieval.search.retrievers import (
    DenseRetriever,
    LateRetriever,
    SparseRetriever,
    WordsRetriever,
)
from tilefold.retrieval.vectors.sparse import Row, SparseVectors

if TYPE_CHECKING:
    from tilefold.retrieval.index.dense import DenseIndex
    from tilefold.retrieval.index.late import LateIndex
    from tilefold.retrieval.search.reranking import Reranking
    from tilefold.retrieval.vectors.tokens import TokenStore, TokenVectors

__all__ = ["Ranking", "SearchRequest", "Searcher", "check_model", "matched_terms"]

RERANK_DEPTH = 100  # candidates of a search that is reranked
WHOLE = (
    1000  # documents of a ranking that is interpolated around feedback, or whose last ones count
)


def check_model(
    made_by: Provenance,
    model: Model,
    name: str = "this",
    index: str = "the index",
) -> bool:
    """Whether a model is known to have made an index of vectors; a ``DataError`` where another one
    did.
    """
    if made_by.model_fingerprint is None:
        return False
    if made_by.differs(Provenance(model_fingerprint(model))):
        remedy = f"Give that one, make the index again (tilefold encode --model {name}), or allow it (--other-model)."
        raise DataError(
            f"model: {name} is not the model that made {index} (its weights or settings differ). {remedy}",
        )
    return True


_SECOND = "second"  # stage of the second ranking's passages
_WITHOUT_VECTORS = {
    BM25Index.backend: "a BM25 index",
    DENSE: "a dense index",
    LATE: "an index of token vectors",
}
_STAGES: dict[type, str] = {SparseRetriever: "sparse", WordsRetriever: "words"}
_STAGES |= {DenseRetriever: "dense", LateRetriever: "tokens"}


@dataclass(frozen=True)
class SearchRequest:
    """Options of a search; a ``ValueError`` for a `k` below 1, or an interpolation without
    feedback.

    Attributes:
        k: documents per query.
        feedback: moves each query towards the documents that it found, and searches again; None
            does not.
        interpolation: mixes the second ranking in before feedback, after it, or both; goes with
            `feedback`.
        fusion: fuses the second ranking with that of the index.
        reranking: orders the best candidates by late interaction.
        by: of an index of passages, ``"document"`` gives documents by their best passage (MaxP),
            and ``"passage"`` the passages; an index of whole documents has none.
        where: only documents whose metadata match, in every ranking: of the index, the second one,
            after feedback.
        ignore_identical_ids: leave the document with the query's id out of every ranking, and of
            what feedback reads: for queries that are documents of the collection.
    """

    k: int = 10
    feedback: Feedback | None = None
    interpolation: Interpolation | None = None
    fusion: Fusion | None = None
    reranking: Reranking | None = None
    by: Literal["document", "passage"] = "document"
    where: Where = None
    ignore_identical_ids: bool = False

    def __post_init__(self) -> None:
        check_k(self.k)
        self._check_types()
        Filter.of(self.where)
        check_choice("by", self.by, ("document", "passage"))
        if self.interpolation is not None and self.feedback is None:
            raise ValueError(
                "interpolation: expected feedback beside it, got None; without, take fusion.",
            )

    def _check_types(self) -> None:
        """Raise ``TypeError`` for options of another type, such as ``feedback="rocchio"``."""
        kinds = {"feedback": Feedback, "interpolation": Interpolation, "fusion": Fusion}
        if self.reranking is not None:
            from tilefold.retrieval.search.reranking import Reranking  # needs torch

            kinds["reranking"] = Reranking
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value is not None:
                check_instance(name, value, kind, f"{kind.__name__}(...)")

    @property
    def candidates(self) -> int:
        """Documents per query before reranking."""
        return (
            self.k if self.reranking is None else max(self.k, self.reranking.depth or RERANK_DEPTH)
        )


@dataclass
class Ranking:
    """Ranked documents of some queries, or passages (ids as of
    :class:`tilefold.retrieval.Passage`), and how.
    """

    run: Run  # best first
    stages: dict[str, Run] = field(
        default_factory=dict,
    )  # "sparse", "words", "tokens", "fusion", "late", .. -> ranking
    before: Any = (
        None  # vectors of the queries, as they were, and as they were searched with after feedback
    )
    after: Any = None
    candidates: Run | None = None  # that were reranked
    by: str = "document"
    passages: dict[str, BestPassages] = field(
        default_factory=dict,
    )  # stage -> best passages of documents, where searched so
    ignored_identical_ids: set[str] = field(
        default_factory=set,
    )  # queries whose own document was left out

    def passage(self, query: str, name: str) -> str | None:
        """Id of the passage that a result was ranked by: by late interaction, else in the index,
        else by words.
        """
        if self.by == "passage":
            return name
        known = (
            self.passages[stage]
            for stage in ("late", *_STAGES.values(), _SECOND)
            if stage in self.passages
        )
        return next((found[query][name] for found in known if name in found.get(query, {})), None)

    @property
    def found(self) -> BestPassages:
        """Query -> result -> the passage that it was ranked by, where there is one."""
        named = (
            (query, {name: self.passage(query, name) for name in scores})
            for query, scores in self.run.items()
        )
        return {
            query: {name: passage for name, passage in of.items() if passage} for query, of in named
        }


class Searcher:
    """Answers queries over one collection with what is loaded once.

    Args:
        index: of sparse vectors, of dense or token vectors, or of words (BM25).
        model: that made the vectors of the index; None for words, or where vectors of queries are
            given.
        documents: id -> document, whose titles are shown, and whose texts are encoded to be
            reranked without `tokens`; one without a title may be given as its text.
        vectors: of the documents, or their folder, which is read row by row: for feedback and
            matched terms.
        second: a BM25 index or a run of the same collection, for an interpolation around feedback,
            or fusion.
        late: a ``MultiVectorEncoder`` that reranks.
        tokens: token vectors of the documents by that model; without, it encodes the candidates.
        query_top_k: terms kept of a query; None keeps all.
        options: of the index's search, such as Seismic's ``heap_factor``, or ``candidates`` of
            token vectors.
        other_model: take a model that did not make the index, such as a query encoder of its own.

    Where the index or the token vectors are of passages, documents are ranked by their best one.
    `vectors` are of the passages of the index; `second` and `tokens` may be of others, or of whole
    documents.

    Parts that were made by another model or from other documents than the index are a
    ``DataError``, `model` or `vectors` beside an index that has none a ``ValueError``.
    """

    def __init__(
        self,
        index: SparseIndex | BM25Index | DenseIndex | LateIndex,
        model: Model | None = None,
        *,
        documents: Mapping[str, Document] | Mapping[str, str] | None = None,
        vectors: SparseVectors | str | Path | None = None,
        second: BM25Index | Run | None = None,
        late: Model | None = None,
        tokens: TokenStore | None = None,
        query_top_k: int | None = None,
        options: Mapping[str, object] | None = None,
        other_model: bool = False,
    ) -> None:
        _check_parts(index, model, vectors, second, late, tokens, options)
        self.documents = documents_by_id("documents", {} if documents is None else documents)
        self.second = second
        self.retriever: SparseRetriever | WordsRetriever | DenseRetriever | LateRetriever
        backend = index.backend
        if kind := _WITHOUT_VECTORS.get(backend):
            for name, value in (
                ("model", None if backend in (DENSE, LATE) else model),
                ("vectors", vectors),
            ):
                if value is not None:
                    why = f"does nothing here, it goes with an index of sparse vectors, and this is {kind}"
                    raise ValueError(f"{name}: {why}, which has none: expected None, got {value}.")
        if model is not None and not other_model:
            check_model(index.provenance, model)
        if isinstance(index, BM25Index):
            self.retriever = WordsRetriever(index)
        elif backend == DENSE:
            self.retriever = DenseRetriever(index, model, options=options or {})
        elif backend == LATE:
            self.retriever = LateRetriever(index, model, options=options or {})
        else:
            rows = Path(vectors) if isinstance(vectors, str) else vectors
            self.retriever = SparseRetriever(index, model, rows, query_top_k, options=options or {})
        self.stage = _STAGES[type(self.retriever)]
        if isinstance(second, BM25Index) and "texts_sha256" in second.provenance.differs(
            self.provenance,
        ):
            raise DataError("second: was made from other documents than those that are searched.")
        self.reranker = None
        if late is not None:
            from tilefold.retrieval.search.reranking import (
                Reranker,
            )  # needs torch, and a search of words none

            self.reranker = Reranker(late, tokens, self.documents, self.provenance)

    @property
    def provenance(self) -> Provenance:
        """Fingerprints of the model and of the documents behind the index."""
        return self.retriever.provenance

    @property
    def passages(self) -> str | None:
        """Cut of the documents whose passages are searched; None for whole documents."""
        return self.provenance.passages

    def search(self, query: str, request: SearchRequest | None = None) -> list[Json]:
        """The best documents for a query, each with ``rank`` (from 1), ``id``, ``score`` and
        ``title`` (or its text).

        Where the searcher has `vectors`, also ``terms`` that it shares with the query, largest
        first: ``term``, ``contribution`` to the sparse score, ``share`` of it and, after feedback,
        whether ``feedback`` added it. After reranking also ``first``, its ``rank`` and ``score``
        before. A document that was ranked by a passage has it as ``passage``: ``number`` (from 1),
        characters ``start`` to ``stop`` of the text, and ``text``. A request that needs a part that
        the searcher was made without is a ``ValueError``, a document that `vectors`, `tokens` or
        `documents` lack a ``DataError``.
        """
        request = SearchRequest() if request is None else request
        if not isinstance(query, str):
            raise TypeError(
                f"query: expected a string, got {type(query).__name__}; rank() takes several queries.",
            )
        if not isinstance(request, SearchRequest):
            raise TypeError(
                f"request: expected a SearchRequest, such as SearchRequest(k=5), got {request!r}.",
            )
        queries = {"query": query}
        ranking = self.rank(queries, request)
        first = next(iter(ranking.run["query"]), None)
        owner = document_of if request.by == "passage" else str
        known = not self.documents or any(
            owner(name) in self.documents for name in ranking.run["query"]
        )
        if first is not None and not known:
            strange = (
                f"none of the documents found is in the collection given (the first is {first!r})"
            )
            raise DataError(f"documents: {strange}; give the one that the index was made from.")
        if request.reranking is not None:
            ranking = self.rerank(queries, ranking, request.reranking)
        shown = dict(list(ranking.run.get("query", {}).items())[: request.k])
        own = ranking.stages[self.stage]["query"]
        terms = self._terms(ranking, {name: own[name] for name in shown if name in own})
        places = {
            name: rank
            for rank, name in enumerate((ranking.candidates or {}).get("query", ()), start=1)
        }
        found: list[Json] = []
        for rank, (name, score) in enumerate(shown.items(), start=1):
            document, passage = self.documents.get(owner(name)), ranking.passage("query", name)
            title = (document.title or document.text) if document else ""
            shared = terms.get(name, [])
            found.append(
                {"rank": rank, "id": owner(name), "score": score, "title": title, "terms": shared},
            )
            if passage is not None:
                found[-1]["passage"] = Passage.of(passage).shown(document)
            if ranking.candidates is not None:
                found[-1]["first"] = {
                    "rank": places[name],
                    "score": ranking.candidates["query"][name],
                }
        return found

    def rank(
        self,
        queries: Mapping[str, str],
        request: SearchRequest,
        vectors: Any = None,
    ) -> Ranking:
        """The candidates of each query (id -> text; or `vectors`): of the index, after feedback,
        fused.
        """
        check_mapping("queries", queries, "id -> text")
        check_instance("request", request, SearchRequest, "SearchRequest(k=10)")
        feedback, mix, depth, names = (
            request.feedback,
            request.interpolation,
            request.candidates,
            list(queries),
        )
        self._check_passages(request)
        best: dict[str, BestPassages] = {}
        ignored: set[str] = set()
        own: Run
        retriever: Any = self.retriever
        if feedback is not None and isinstance(retriever, WordsRetriever):
            retriever = retriever.as_vectors
        whole = mix is not None or (feedback is not None and feedback.bottom)
        deep = depth if feedback is None else max(depth, feedback.k, WHOLE if whole else 0)
        second = None
        if mix is not None:
            second = self.second_run(queries, deep, request, best, ignored)
        before = after = retriever.encode(queries) if vectors is None else vectors

        def search(vectors: Any, k: int) -> Run:
            known = best if self.passages is not None and request.by == "document" else None

            def search_index(n: int) -> Run:
                found: Run = retriever.search(vectors, names, n, request.where)
                return found

            others = _respecting_ids(search_index, request, self.passages, ignored)
            return search_documents(others, k, self.stage, known)

        run = own = search(before, deep)
        if feedback is not None:

            def again(basis: Run) -> Run:
                nonlocal after, own
                chosen = as_passages(
                    basis,
                    [best[stage] for stage in (self.stage, _SECOND) if stage in best],
                )
                after = retriever.expand(before, names, chosen, feedback)
                own = search(after, depth if mix is None else deep)
                return own

            run = with_feedback(run, again, deep, second, mix)
        ranking = Ranking(
            _best(run, depth),
            {self.stage: own if mix else _best(own, depth)},
            before,
            after,
        )
        ranking.by, ranking.passages = request.by, best
        ranking.ignored_identical_ids = ignored
        if request.fusion is not None:
            ranking.stages["words"] = self.second_run(queries, depth, request, best, ignored)
            ranking.run = request.fusion.mix(ranking.run, ranking.stages["words"], depth)
            ranking.stages["fusion"] = ranking.run
        return ranking

    def rank_plainly(
        self,
        queries: Mapping[str, str],
        request: SearchRequest,
        ranking: Ranking,
    ) -> Run:
        """The run of the queries of `ranking` without feedback; with an interpolation, mixed once
        with the second.
        """
        mix, depth = request.interpolation, request.candidates
        plain = replace(
            request,
            k=depth if mix is None else max(depth, WHOLE),
            feedback=None,
            interpolation=None,
        )
        run = self.rank(
            queries,
            plain,
            None if isinstance(self.retriever, WordsRetriever) else ranking.before,
        ).run
        if mix is None:
            return run
        second = self.second_run(queries, plain.k, request, {})
        return _best(mix.mix(run, second, plain.k), depth)

    def rerank(
        self,
        queries: Mapping[str, str],
        ranking: Ranking,
        reranking: Reranking,
        encoded: TokenVectors | None = None,
        candidates: TokenVectors | None = None,
    ) -> Ranking:
        """The ranking of :meth:`rank` after late interaction; `encoded` and `candidates` as in
        :class:`Reranker`.
        """
        if self.reranker is None:
            raise ValueError(
                "reranking: expected a searcher with a late-interaction model, got one without.",
            )
        if (
            ranking.by == "passage"
            and self.reranker.tokens is not None
            and self.reranker.passages != self.passages
        ):
            raise ValueError(
                f"tokens: expected those of the passages that are searched ({self.passages}), got others.",
            )
        given, by, found = (
            (encoded, candidates),
            ranking.by,
            ranking.found if self.passages else None,
        )
        late, run, best = self.reranker(
            queries,
            ranking.run,
            reranking,
            *given,
            by=by,
            passages=found,
        )
        stages = ranking.stages | {"late": _best(late, reranking.depth)}
        passages = ranking.passages | ({"late": best} if best else {})
        return replace(ranking, run=run, stages=stages, candidates=ranking.run, passages=passages)

    def rerank_texts(self, ranking: Ranking, reranking: Reranking) -> dict[str, str]:
        """Id -> text to encode as `candidates` of :meth:`rerank`, where there are no token vectors."""
        if self.reranker is None:
            return {}
        return self.reranker.candidates(
            ranking.run,
            reranking,
            ranking.by,
            ranking.found if self.passages else None,
        )

    def _check_passages(self, request: SearchRequest) -> None:
        """Raise ``ValueError`` where the index, or the second one, is not of the passages that a
        request needs.
        """
        if request.by == "passage" and self.passages is None:
            raise ValueError(
                "by: expected 'document', the index is of whole documents; got 'passage'. Cut them.",
            )
        mix, second = request.interpolation, self.second
        asked = mix is not None or request.fusion is not None
        of_passages = request.by == "passage" or (mix is not None and mix.place != "after")
        if not asked or second is None or not of_passages or self.passages is None:
            return
        cut = second.provenance.passages if isinstance(second, BM25Index) else None
        if cut != self.passages:
            why = (
                "as passages are asked for"
                if request.by == "passage"
                else "whose best ones feedback reads"
            )
            wanted = f"a BM25 index of the passages that are searched ({self.passages}), {why}"
            raise ValueError(f"second: expected {wanted}, got {cut or 'whole documents'}.")

    def second_run(
        self,
        queries: Mapping[str, str],
        k: int,
        request: SearchRequest,
        best: dict[str, BestPassages],
        ignored: set[str] | None = None,
    ) -> Run:
        """The `k` best of the second ranking.

        Args:
            queries: id -> text.
            k: documents per query.
            request: of the search.
            best: gets the passages that documents were found by.
            ignored: gets the queries whose own document was left out.
        """
        ignored = set() if ignored is None else ignored
        if self.second is None:
            raise ValueError(
                "second: expected a BM25 index or a run to interpolate or fuse with, got None.",
            )
        words = self.second
        if isinstance(words, BM25Index):
            known = (
                best if words.provenance.passages is not None and request.by == "document" else None
            )

            def search_words(n: int) -> Run:
                return words.search(queries, n, where=request.where)

            others = _respecting_ids(search_words, request, words.provenance.passages, ignored)
            return search_documents(others, k, _SECOND, known)
        if request.where is not None:
            raise ValueError(
                "second: expected a BM25 index with metadata beside where, got a run, which has none.",
            )
        run = {query: words[query] for query in queries if query in words}
        if not request.ignore_identical_ids:
            return run
        ignored |= queries_with_identical_ids(run)
        return without_identical_ids(run)

    def _terms(self, ranking: Ranking, scores: Mapping[str, float]) -> dict[str, list[Json]]:
        """The terms that each document shares with the query as searched, largest part first,
        without special ones.
        """
        retriever = self.retriever
        if (
            not isinstance(retriever, SparseRetriever)
            or retriever.vectors is None
            or retriever.model is None
        ):
            return {}
        tokenizer, asked = retriever.model.tokenizer, ranking.after.row(0)
        term_name = term_names_of(tokenizer)
        moved = ranking.before is not ranking.after
        own = set(ranking.before.row(0)[0].tolist())
        passages = ranking.passages.get(self.stage, {}).get("query", {})
        names = {passages.get(name, name): name for name in scores}
        stored = retriever.stored(names, lacking=True)
        found: dict[str, list[Json]] = {}
        for row, name in enumerate(map(names.__getitem__, stored.ids)):
            matched = matched_terms(asked, stored.row(row), tokenizer.all_special_ids)
            found[name] = [
                {"term": term_name[term], "contribution": part, "share": part / scores[name]}
                | ({"feedback": term not in own} if moved else {})
                for term, part in matched
            ]
        return found


def _check_parts(
    index: object,
    model: object,
    vectors: object,
    second: object,
    late: object,
    tokens: object,
    options: object,
) -> None:
    """Raise ``TypeError`` for a part of a searcher that is of another type, such as a path."""
    if not hasattr(index, "search"):
        expected = "what build_index or load_index gives, or a BM25Index"
        raise TypeError(f"index: expected {expected}, got {type(index).__name__}.")
    if model is not None and not hasattr(model, "encode_query"):
        raise TypeError(
            f"model: expected the encoder of the index, got {type(model).__name__}; load it first.",
        )
    if second is not None and not isinstance(second, (BM25Index, Mapping)):
        raise TypeError(
            f"second: expected a BM25Index or a run, got {type(second).__name__}; pass "
            "BM25Index.load(folder) or read_trec_run(path).",
        )
    if vectors is not None:
        check_instance("vectors", vectors, (SparseVectors, str, Path), "the folder of vectors")
    if late is not None:
        check_encoder("late", late, "MultiVectorEncoder")
    if tokens is not None:
        from tilefold.retrieval.vectors.tokens import TokenStore  # needs torch

        check_instance("tokens", tokens, TokenStore, "open_tokens(folder)")
    if options is not None:
        check_mapping("options", options, "name of an option of the search -> value")


def _respecting_ids(
    search: Callable[[int], Run],
    request: SearchRequest,
    passages: str | None,
    ignored: set[str],
) -> Callable[[int], Run]:
    """The search as it is, or without the query's own document where the request says so."""
    if not request.ignore_identical_ids:
        return search
    return search_without_identical_ids(search, str if passages is None else document_of, ignored)


def matched_terms(
    query: Row,
    document: Row,
    without: Collection[int] = (),
) -> list[tuple[int, float]]:
    """``(term, query weight * document weight)`` of two rows but for some terms, largest first,
    equal by term.
    """
    asked = dict(zip(*(part.tolist() for part in query), strict=True))
    stored = dict(zip(*(part.tolist() for part in document), strict=True))
    shared = stored.keys() & (asked.keys() - set(without))
    return sorted(
        ((term, asked[term] * stored[term]) for term in shared),
        key=lambda item: (-item[1], item[0]),
    )


def _best(run: Mapping[str, Mapping[str, float]], k: int | None) -> Run:
    return {query: dict(list(scores.items())[:k]) for query, scores in run.items()}
