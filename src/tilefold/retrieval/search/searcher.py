"""Search over one collection: retrieval, feedback, fusion, reranking and explanation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tilefold._internal.arguments import (
    ArgumentError,
    check_choice,
    check_encoder,
    check_instance,
    check_k,
    check_mapping,
)
from tilefold._internal.sentence_transformers import check_release_of
from tilefold._internal.typing import Model
from tilefold._internal.vocabulary import term_names_of
from tilefold.retrieval.common.files import Json
from tilefold.retrieval.common.identical_ids import (
    SearchWithoutIdenticalIds,
    queries_with_identical_ids,
    without_identical_ids,
)
from tilefold.retrieval.common.provenance import (
    Provenance,
    model_fingerprint,
    warn_of_query_precision,
)
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.collection import Document, documents_by_id
from tilefold.retrieval.data.metadata import Filter, Where
from tilefold.retrieval.data.passages import Passage, document_of
from tilefold.retrieval.errors import ArgumentDataError
from tilefold.retrieval.index import DENSE, LATE, SparseIndex
from tilefold.retrieval.index.bm25 import BM25Index
from tilefold.retrieval.search.feedback import Feedback, Interpolation
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

# Candidates per query of a search that is reranked.
RERANK_DEPTH = 100
# Documents per query of a ranking that is interpolated around feedback, or whose last documents
# count as not relevant.
FULL_DEPTH = 1000

# Stages of a ranking, as keys of `Ranking.stages` and `Ranking.passages`.
_WORDS_STAGE = "words"
_LATE_STAGE = "late"
_FUSION_STAGE = "fusion"
_SECOND_STAGE = "second"
_RETRIEVER_STAGES: dict[type, str] = {
    SparseRetriever: "sparse",
    WordsRetriever: _WORDS_STAGE,
    DenseRetriever: "dense",
    LateRetriever: "tokens",
}

# Id of the only query of `Searcher.search`.
_QUERY = "query"

# Description, for errors, of the backends whose indexes hold no sparse vectors.
_WITHOUT_SPARSE_VECTORS = {
    BM25Index.backend: "a BM25 index",
    DENSE: "a dense index",
    LATE: "an index of token vectors",
}


def check_model(
    provenance: Provenance,
    model: Model,
    name: str = "this",
    index: str = "the index",
) -> bool:
    """Return whether a model is known to have made the vectors of an index.

    Args:
        provenance: of the index.
        model: encodes queries for the index.
        name: name of the model, for the error.
        index: description of the index, for the error.

    Returns:
        False if the index does not record a model.

    Raises:
        DataError: if the index records another model.
    """
    if provenance.model_fingerprint is None:
        return False
    if provenance.differing_fields(Provenance(model_fingerprint(model))):
        remedy = (
            f"Give that one, make the index again (tilefold encode --model {name}), "
            "or allow it (--other-model)."
        )
        raise ArgumentDataError(
            "model",
            f"{name} is not the model that made {index} (its weights or settings differ). {remedy}",
        )
    return True


@dataclass(frozen=True)
class SearchRequest:
    """Options of a search.

    Attributes:
        k: documents per query.
        feedback: moves each query towards the documents that it retrieved, and searches again;
            None does not.
        interpolation: mixes the second ranking in before feedback, after it, or both; goes with
            `feedback`.
        fusion: fuses the second ranking with that of the index.
        reranking: orders the best candidates by late interaction.
        by: for an index of passages, ``"document"`` ranks documents by their best passage (MaxP),
            and ``"passage"`` ranks passages. An index of documents allows ``"document"`` only.
        where: restricts every ranking to documents whose metadata match: that of the index, the
            second one, and the one after feedback.
        ignore_identical_ids: leave the document with the query's id out of every ranking, and of
            what feedback reads. For queries that are documents of the collection.

    Raises:
        ValueError: for a `k` below 1, or an interpolation without feedback.
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
            raise ArgumentError(
                "interpolation",
                "expected feedback beside it, got None; without, take fusion.",
            )

    def _check_types(self) -> None:
        """Raise ``TypeError`` for options of another type, such as ``feedback="rocchio"``."""
        option_types = {"feedback": Feedback, "interpolation": Interpolation, "fusion": Fusion}
        if self.reranking is not None:
            from tilefold.retrieval.search.reranking import Reranking  # needs torch

            option_types["reranking"] = Reranking
        for name, option_type in option_types.items():
            option = getattr(self, name)
            if option is not None:
                check_instance(name, option, option_type, f"{option_type.__name__}(...)")

    @property
    def candidates(self) -> int:
        """Documents per query before reranking."""
        if self.reranking is None:
            return self.k
        return max(self.k, self.reranking.depth or RERANK_DEPTH)

    @property
    def retrieval_depth(self) -> int:
        """Documents per query of the rankings that feedback reads and interpolation mixes."""
        if self.feedback is None:
            return self.candidates
        depth = max(self.candidates, self.feedback.k)
        if self.interpolation is not None or self.feedback.bottom:
            depth = max(depth, FULL_DEPTH)
        return depth


@dataclass(frozen=True)
class _StageRun:
    """Result of searching one index.

    Attributes:
        stage: name of the ranking.
        run: query id -> document id -> score, best first.
        best_passages: passages that the documents were ranked by; None if none were searched.
        ignored_identical_ids: queries whose document of the same id was left out.
    """

    stage: str
    run: Run
    best_passages: BestPassages | None = None
    ignored_identical_ids: set[str] = field(default_factory=set)


@dataclass
class Ranking:
    """Ranked documents or passages of queries, and the intermediate results that led to them.

    Attributes:
        run: query id -> id of a document, or of a :class:`tilefold.retrieval.Passage` -> score,
            best first.
        stages: name of a stage, such as "sparse", "words", "tokens", "fusion" or "late" -> its run.
        before: vectors of the queries before feedback.
        after: vectors of the queries after feedback; `before` itself if there was none.
        candidates: the run before reranking; None if there was none.
        by: "document" or "passage", what is ranked.
        passages: name of a stage -> best passages of the documents that it retrieved.
        ignored_identical_ids: queries whose document of the same id was left out.
    """

    run: Run
    stages: dict[str, Run] = field(default_factory=dict)
    before: Any = None
    after: Any = None
    candidates: Run | None = None
    by: str = "document"
    passages: dict[str, BestPassages] = field(default_factory=dict)
    ignored_identical_ids: set[str] = field(default_factory=set)

    def passage(self, query: str, name: str) -> str | None:
        """Return the id of the passage that a result was ranked by, if there is one.

        The passage chosen by late interaction comes before that of the index, and that of the
        second ranking comes last.
        """
        if self.by == "passage":
            return name
        for stage in (_LATE_STAGE, *_RETRIEVER_STAGES.values(), _SECOND_STAGE):
            passage_of = self.passages.get(stage, {}).get(query, {})
            if name in passage_of:
                return passage_of[name]
        return None

    @property
    def best_passages(self) -> BestPassages:
        """Query id -> result -> the passage that it was ranked by, for results that have one."""
        best: BestPassages = {}
        for query, scores in self.run.items():
            best[query] = {}
            for name in scores:
                passage = self.passage(query, name)
                if passage:
                    best[query][name] = passage
        return best

    def _record(self, stage_run: _StageRun) -> Run:
        """Add the passages and ignored queries of a search to the ranking, and return its run."""
        self.ignored_identical_ids |= stage_run.ignored_identical_ids
        if stage_run.best_passages is not None:
            recorded = self.passages.setdefault(stage_run.stage, {})
            for query, passage_of in stage_run.best_passages.items():
                recorded.setdefault(query, {}).update(passage_of)
        return stage_run.run


class Searcher:
    """Answers queries over one collection, with models and indexes that are loaded once.

    If the index or the token vectors hold passages, documents are ranked by their best passage.
    `vectors` are those of the passages of the index. `second` and `tokens` may hold other passages,
    or documents without passages.

    Args:
        index: an index of sparse, dense or token vectors, or of words (BM25).
        model: the model that made the vectors of the index; None for a BM25 index, or if queries
            are passed as vectors.
        documents: id -> document, or its text if it has no title. Results show their titles, and
            reranking without `tokens` encodes their texts.
        vectors: sparse vectors of the documents, or their folder, which is read row by row. For
            feedback and matched terms.
        second: a BM25 index or a run of the same collection, for an interpolation around feedback,
            or fusion.
        late: a ``MultiVectorEncoder`` that reranks.
        tokens: token vectors of the documents, by `late`; None encodes the candidates of a search.
        query_top_k: heaviest terms kept of a query; None keeps all.
        options: options of the index's search, such as Seismic's ``heap_factor``, or ``candidates``
            of an index of token vectors.
        other_model: allow a model that did not make the index, such as a separate query encoder.

    A model that encodes queries in another precision than the index, or than `tokens`, is a
    ``PrecisionWarning``.

    Raises:
        DataError: for parts that were made by another model or from other documents than the index.
        ValueError: for `model` or `vectors` with an index that does not use them.
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
        _check_goes_with_index(index, model, vectors)
        if model is not None and not other_model:
            check_model(index.provenance, model)
        if model is not None:
            warn_of_query_precision(
                model,
                "the index",
                index.provenance.precision,
                stacklevel=2,
            )
        search_options = options or {}
        self.retriever: SparseRetriever | WordsRetriever | DenseRetriever | LateRetriever
        if isinstance(index, BM25Index):
            self.retriever = WordsRetriever(index)
        elif index.backend == DENSE:
            self.retriever = DenseRetriever(index, model, options=search_options)
        elif index.backend == LATE:
            self.retriever = LateRetriever(index, model, options=search_options)
        else:
            self.retriever = SparseRetriever(
                index,
                model,
                Path(vectors) if isinstance(vectors, str) else vectors,
                query_top_k,
                options=search_options,
            )
        self.stage = _RETRIEVER_STAGES[type(self.retriever)]
        if isinstance(second, BM25Index):
            differences = second.provenance.differing_fields(self.provenance)
            if "texts_sha256" in differences:
                raise ArgumentDataError(
                    "second",
                    "was made from other documents than those that are searched.",
                )
        self.reranker = None
        if late is not None:
            # Imported here because it needs torch, which a search of words does without.
            from tilefold.retrieval.search.reranking import Reranker

            self.reranker = Reranker(late, tokens, self.documents, self.provenance)

    @property
    def provenance(self) -> Provenance:
        """Fingerprints of the model and of the documents of the index."""
        return self.retriever.provenance

    @property
    def passages(self) -> str | None:
        """How documents are divided into the passages of the index; None for whole documents."""
        return self.provenance.passages

    def search(self, query: str, request: SearchRequest | None = None) -> list[Json]:
        """Search the best documents for one query.

        Args:
            query: text of the query.
            request: options; None takes the defaults.

        Returns:
            One record per document, best first:

            - ``rank``, from 1, ``id``, ``score``, and ``title``, or the text if there is none.
            - ``terms`` that document and query share, if the searcher has `vectors`, largest
              contribution first: ``term``, ``contribution`` to the sparse score, ``share`` of it
              and, after feedback, whether ``feedback`` added the term.
            - ``first``, after reranking: ``rank`` and ``score`` before it.
            - ``passage``, if the document was ranked by one: ``number``, from 1, characters
              ``start`` to ``stop`` of the text, and ``text``.

        Raises:
            ValueError: if the request needs a part that the searcher does not have.
            DataError: if `vectors`, `tokens` or `documents` lack a document.
        """
        request = SearchRequest() if request is None else request
        if not isinstance(query, str):
            raise TypeError(
                f"query: expected a string, got {type(query).__name__}; "
                "rank() takes several queries.",
            )
        if not isinstance(request, SearchRequest):
            raise TypeError(
                f"request: expected a SearchRequest, such as SearchRequest(k=5), got {request!r}.",
            )
        queries = {_QUERY: query}
        ranking = self.rank(queries, request)
        self._check_documents_are_of_index(ranking)
        if request.reranking is not None:
            ranking = self.rerank(queries, ranking, request.reranking)
        return self._records(ranking, request.k)

    def _check_documents_are_of_index(self, ranking: Ranking) -> None:
        """Raise ``DataError`` if `documents` has none of the documents of a ranking."""
        names = list(ranking.run[_QUERY])
        if not names or not self.documents:
            return
        if not any(_document_id(name, ranking.by) in self.documents for name in names):
            raise ArgumentDataError(
                "documents",
                "none of the documents found is in the collection given (the first is "
                f"{names[0]!r}); give the one that the index was made from.",
            )

    def _records(self, ranking: Ranking, k: int) -> list[Json]:
        """Describe the best results of a ranking of one query as records.

        Args:
            ranking: the ranking of the query of :meth:`search`.
            k: number of records.

        Returns:
            The records that :meth:`search` describes, best first.
        """
        scores = dict(list(ranking.run.get(_QUERY, {}).items())[:k])
        stage_scores = ranking.stages[self.stage][_QUERY]
        terms = self._terms(
            ranking,
            {name: stage_scores[name] for name in scores if name in stage_scores},
        )
        candidates = {} if ranking.candidates is None else ranking.candidates[_QUERY]
        candidate_ranks = {name: rank for rank, name in enumerate(candidates, start=1)}
        records: list[Json] = []
        for rank, (name, score) in enumerate(scores.items(), start=1):
            document_id = _document_id(name, ranking.by)
            document = self.documents.get(document_id)
            record: Json = {
                "rank": rank,
                "id": document_id,
                "score": score,
                "title": (document.title or document.text) if document else "",
                "terms": terms.get(name, []),
            }
            passage = ranking.passage(_QUERY, name)
            if passage is not None:
                record["passage"] = Passage.of(passage).shown(document)
            if ranking.candidates is not None:
                record["first"] = {"rank": candidate_ranks[name], "score": candidates[name]}
            records.append(record)
        return records

    def rank(
        self,
        queries: Mapping[str, str],
        request: SearchRequest,
        vectors: Any = None,
    ) -> Ranking:
        """Rank documents for several queries: retrieve, apply feedback, then fuse; no reranking.

        Args:
            queries: id -> text.
            request: options; its `candidates` are the documents per query.
            vectors: vectors of the queries, in the type of the index; None encodes the texts.
        """
        check_mapping("queries", queries, "id -> text")
        check_instance("request", request, SearchRequest, "SearchRequest(k=10)")
        self._check_passages(request)
        ranking = Ranking(run={}, by=request.by)
        second_run = None
        if request.interpolation is not None:
            second_run = ranking._record(
                self._search_second(queries, request.retrieval_depth, request),
            )
        # Each type of retriever takes vectors of another type.
        retriever: Any = self.retriever
        if request.feedback is not None and isinstance(retriever, WordsRetriever):
            retriever = retriever.as_vectors
        ranking.before = retriever.encode(queries) if vectors is None else vectors
        ranking.after = ranking.before
        stage_run = ranking._record(
            self._search_index(
                retriever,
                ranking.before,
                list(queries),
                request.retrieval_depth,
                request,
            ),
        )
        run = stage_run
        if request.feedback is not None:
            stage_run, run = self._rank_again(
                ranking,
                retriever,
                list(queries),
                stage_run,
                second_run,
                request,
            )
        # An interpolation is explained by scores below the candidates, too.
        mixed = request.interpolation is not None
        ranking.stages[self.stage] = (
            stage_run if mixed else _truncated(stage_run, request.candidates)
        )
        ranking.run = _truncated(run, request.candidates)
        if request.fusion is not None:
            self._fuse(queries, ranking, request.fusion, request)
        return ranking

    def _search_index(
        self,
        retriever: Any,
        vectors: Any,
        query_ids: list[str],
        k: int,
        request: SearchRequest,
    ) -> _StageRun:
        """Search the index of this searcher for vectors of queries.

        Args:
            retriever: the retriever of the index.
            vectors: vectors of the queries.
            query_ids: ids of the queries.
            k: documents or passages per query.
            request: the filter, and whether documents or passages are ranked.
        """
        return _search_stage(
            self.stage,
            partial(retriever.search, vectors, query_ids, where=request.where),
            k,
            request,
            self.passages,
        )

    def _rank_again(
        self,
        ranking: Ranking,
        retriever: Any,
        query_ids: list[str],
        retrieved: Run,
        second_run: Run | None,
        request: SearchRequest,
    ) -> tuple[Run, Run]:
        """Move the queries towards the documents that they retrieved, and search again.

        Args:
            ranking: its vectors `before` are moved; `after` gets the result.
            retriever: of the index.
            query_ids: in the order of the vectors.
            retrieved: the run without feedback.
            second_run: is mixed in before or after feedback, if the request has an interpolation.
            request: has feedback.

        Returns:
            The run of the index after feedback, and the same mixed with the second run.
        """
        depth = request.retrieval_depth
        mix = request.interpolation
        basis = retrieved
        if mix is not None and second_run is not None:
            basis = mix.before_feedback(retrieved, second_run, depth)
        basis_passages = [
            ranking.passages[stage]
            for stage in (self.stage, _SECOND_STAGE)
            if stage in ranking.passages
        ]
        ranking.after = retriever.expand(
            ranking.before,
            query_ids,
            as_passages(basis, basis_passages),
            request.feedback,
        )
        stage_run = ranking._record(
            self._search_index(
                retriever,
                ranking.after,
                query_ids,
                request.candidates if mix is None else depth,
                request,
            ),
        )
        if mix is None or second_run is None:
            return stage_run, stage_run
        return stage_run, mix.after_feedback(stage_run, second_run, depth)

    def _fuse(
        self,
        queries: Mapping[str, str],
        ranking: Ranking,
        fusion: Fusion,
        request: SearchRequest,
    ) -> None:
        """Fuse a ranking with the second one, in place.

        The run of the second index and the fused run are added to the ranking's stages.

        Args:
            queries: query id -> text.
            ranking: the ranking to fuse, whose run is replaced.
            fusion: how the two runs are fused.
            request: options of the search.
        """
        words_run = ranking._record(self._search_second(queries, request.candidates, request))
        ranking.run = fusion.mix(ranking.run, words_run, request.candidates)
        ranking.stages[_WORDS_STAGE] = words_run
        ranking.stages[_FUSION_STAGE] = ranking.run

    def rank_plainly(
        self,
        queries: Mapping[str, str],
        request: SearchRequest,
        ranking: Ranking,
    ) -> Run:
        """Rank queries without feedback, to compare with a ranking that has it.

        With an interpolation, the second ranking is mixed into the run once.

        Args:
            queries: query id -> text.
            request: options of the ranking with feedback.
            ranking: the ranking with feedback, whose query vectors before feedback are used.

        Returns:
            The run, with as many documents per query as the request has candidates.
        """
        mix = request.interpolation
        depth = request.candidates
        plain_request = replace(
            request,
            k=depth if mix is None else max(depth, FULL_DEPTH),
            feedback=None,
            interpolation=None,
        )
        # Feedback turns the words of queries into vectors, which an index of words does not take.
        vectors = None if isinstance(self.retriever, WordsRetriever) else ranking.before
        run = self.rank(queries, plain_request, vectors).run
        if mix is None:
            return run
        second_run = self.second_run(queries, plain_request.k, request)
        return _truncated(mix.mix(run, second_run, plain_request.k), depth)

    def rerank(
        self,
        queries: Mapping[str, str],
        ranking: Ranking,
        reranking: Reranking,
        encoded: TokenVectors | None = None,
        candidates: TokenVectors | None = None,
    ) -> Ranking:
        """Order the results of :meth:`rank` by late interaction.

        Args:
            queries: id -> text.
            ranking: its run is the candidates.
            reranking: options.
            encoded: token vectors of the queries; None encodes their texts.
            candidates: token vectors of :meth:`rerank_texts`; None encodes them if the searcher has
                no `tokens`.
        """
        if self.reranker is None:
            raise ArgumentError(
                "reranking",
                "expected a searcher with a late-interaction model, got one without.",
            )
        if (
            ranking.by == "passage"
            and self.reranker.tokens is not None
            and self.reranker.passages != self.passages
        ):
            raise ArgumentError(
                "tokens",
                f"expected those of the passages that are searched ({self.passages}), got others.",
            )
        late_run, run, late_passages = self.reranker(
            queries,
            ranking.run,
            reranking,
            encoded,
            candidates,
            by=ranking.by,
            passages=ranking.best_passages if self.passages else None,
        )
        passages = dict(ranking.passages)
        if late_passages:
            passages[_LATE_STAGE] = late_passages
        return replace(
            ranking,
            run=run,
            stages={**ranking.stages, _LATE_STAGE: _truncated(late_run, reranking.depth)},
            candidates=ranking.run,
            passages=passages,
        )

    def rerank_texts(self, ranking: Ranking, reranking: Reranking) -> dict[str, str]:
        """Return the texts to encode as `candidates` of :meth:`rerank`.

        They are needed where the searcher has no stored token vectors.

        Args:
            ranking: the ranking to rerank.
            reranking: options, among them the number of candidates.

        Returns:
            id of a document or passage -> text; empty without a model that reranks.
        """
        if self.reranker is None:
            return {}
        return self.reranker.candidates(
            ranking.run,
            reranking,
            ranking.by,
            ranking.best_passages if self.passages else None,
        )

    def _check_passages(self, request: SearchRequest) -> None:
        """Raise ``ValueError`` if an index does not hold the passages that a request needs.

        The second index needs the passages of the first one if passages are ranked, or if feedback
        reads documents of the second ranking.
        """
        if request.by == "passage" and self.passages is None:
            raise ArgumentError(
                "by",
                "expected 'document', the index is of whole documents; got 'passage'. Cut them.",
            )
        mix = request.interpolation
        uses_second = mix is not None or request.fusion is not None
        feedback_reads_second = mix is not None and mix.place != "after"
        needs_passages = request.by == "passage" or feedback_reads_second
        if self.second is None or self.passages is None or not uses_second or not needs_passages:
            return
        second_passages = None
        if isinstance(self.second, BM25Index):
            second_passages = self.second.provenance.passages
        if second_passages != self.passages:
            reason = (
                "as passages are asked for"
                if request.by == "passage"
                else "whose best ones feedback reads"
            )
            raise ArgumentError(
                "second",
                "expected a BM25 index of the passages that are searched "
                f"({self.passages}), {reason}, got {second_passages or 'whole documents'}.",
            )

    def second_run(self, queries: Mapping[str, str], k: int, request: SearchRequest) -> Run:
        """Return the `k` best documents of the second ranking for each query.

        Args:
            queries: id -> text.
            k: documents per query. A run is not truncated.
            request: options of the search.
        """
        return self._search_second(queries, k, request).run

    def _search_second(
        self,
        queries: Mapping[str, str],
        k: int,
        request: SearchRequest,
    ) -> _StageRun:
        """Search the second ranking, see :meth:`second_run`."""
        second = self.second
        if second is None:
            raise ArgumentError(
                "second",
                "expected a BM25 index or a run to interpolate or fuse with, got None.",
            )
        if isinstance(second, BM25Index):
            return _search_stage(
                _SECOND_STAGE,
                partial(second.search, queries, where=request.where),
                k,
                request,
                second.provenance.passages,
            )
        if request.where is not None:
            raise ArgumentError(
                "second",
                "expected a BM25 index with metadata beside where, got a run, which has none.",
            )
        run = {query: second[query] for query in queries if query in second}
        if not request.ignore_identical_ids:
            return _StageRun(_SECOND_STAGE, run)
        return _StageRun(
            _SECOND_STAGE,
            without_identical_ids(run),
            ignored_identical_ids=queries_with_identical_ids(run),
        )

    def _terms(self, ranking: Ranking, scores: Mapping[str, float]) -> dict[str, list[Json]]:
        """Explain the sparse scores of documents by the terms they share with the query.

        Args:
            ranking: of the query of :meth:`search`.
            scores: document id -> sparse score.

        Returns:
            document id -> its terms, largest contribution first, without special tokens. Empty
            unless the searcher has a sparse model and vectors.
        """
        retriever = self.retriever
        if (
            not isinstance(retriever, SparseRetriever)
            or retriever.vectors is None
            or retriever.model is None
        ):
            return {}
        tokenizer = retriever.model.tokenizer
        term_name = term_names_of(tokenizer)
        query_row = ranking.after.row(0)
        # `before` and `after` are the query's vector before and after feedback.
        has_feedback = ranking.before is not ranking.after
        terms_before_feedback = set(ranking.before.row(0)[0].tolist())
        passage_of = ranking.passages.get(self.stage, {}).get(_QUERY, {})
        # In an index of passages, the vector of a document is that of its best passage.
        document_by_vector_id = {passage_of.get(name, name): name for name in scores}
        vectors = retriever.vectors_of(document_by_vector_id, skip_missing=True)
        explained: dict[str, list[Json]] = {}
        for row, vector_id in enumerate(vectors.ids):
            name = document_by_vector_id[vector_id]
            explained[name] = []
            for term, contribution in matched_terms(
                query_row,
                vectors.row(row),
                without=tokenizer.all_special_ids,
            ):
                record: Json = {
                    "term": term_name[term],
                    "contribution": contribution,
                    "share": contribution / scores[name],
                }
                if has_feedback:
                    record["feedback"] = term not in terms_before_feedback
                explained[name].append(record)
        return explained


def _check_parts(
    index: object,
    model: object,
    vectors: object,
    second: object,
    late: object,
    tokens: object,
    options: object,
) -> None:
    """Raise ``TypeError`` for an argument of a searcher that has another type, such as a path.

    The arguments are those of :class:`Searcher`. None is valid for all but `index`.
    """
    if not hasattr(index, "search"):
        raise TypeError(
            "index: expected what build_index or load_index gives, or a BM25Index, "
            f"got {type(index).__name__}.",
        )
    if model is not None and not hasattr(model, "encode_query"):
        raise TypeError(
            f"model: expected the encoder of the index, got {type(model).__name__}; load it first.",
        )
    check_release_of(model)
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


def _check_goes_with_index(
    index: SparseIndex | BM25Index | DenseIndex | LateIndex,
    model: Model | None,
    vectors: SparseVectors | str | Path | None,
) -> None:
    """Raise ``ValueError`` for a model or sparse vectors that the type of index does not use.

    Args:
        index: the index.
        model: the encoder of queries, which an index of words does not use.
        vectors: sparse vectors of the documents, which only an index of sparse vectors uses.
    """
    description = _WITHOUT_SPARSE_VECTORS.get(index.backend)
    if description is None:
        return
    unused: dict[str, object] = {"vectors": vectors}
    if index.backend == BM25Index.backend:
        unused = {"model": model, "vectors": vectors}
    for name, value in unused.items():
        if value is not None:
            raise ArgumentError(
                name,
                f"does nothing here, it goes with an index of sparse vectors, and this is "
                f"{description}, which has none: expected None, got {value}.",
            )


def _document_id(name: str, by: str) -> str:
    """Id of the document of a result, which is a document or, with ``by="passage"``, a passage."""
    return document_of(name) if by == "passage" else name


def _search_stage(
    stage: str,
    search: Callable[[int], Run],
    k: int,
    request: SearchRequest,
    passages: str | None,
) -> _StageRun:
    """Search the `k` best results of one index, as documents or as passages.

    Args:
        stage: name of the ranking.
        search: returns the `n` best entries of the index for each query, best first.
        k: results per query.
        request: whether passages are ranked, and documents with the query's id are left out.
        passages: how documents are divided into the entries of the index; None if its entries are
            whole documents.
    """
    ignored: set[str] = set()
    if request.ignore_identical_ids:
        document_of_entry = str if passages is None else document_of
        search_others = SearchWithoutIdenticalIds(search, document_of_entry)
        search = search_others
        ignored = search_others.ignored  # the searches below add to it
    if passages is None or request.by == "passage":
        return _StageRun(stage, search(k), ignored_identical_ids=ignored)
    run, best_passages = search_documents(search, k)
    return _StageRun(stage, run, best_passages, ignored)


def matched_terms(
    query: Row,
    document: Row,
    without: Collection[int] = (),
) -> list[tuple[int, float]]:
    """Terms that a query and a document share, with their contributions to the score.

    Args:
        query: terms and weights of the query.
        document: terms and weights of the document.
        without: terms to leave out.

    Returns:
        Pairs of a term and the product of its weights, largest product first. Equal products are in
        the order of terms.
    """
    query_weights = _weight_by_term(query)
    document_weights = _weight_by_term(document)
    shared = document_weights.keys() & (query_weights.keys() - set(without))
    contributions = [(term, query_weights[term] * document_weights[term]) for term in shared]
    return sorted(contributions, key=lambda item: (-item[1], item[0]))


def _weight_by_term(row: Row) -> dict[int, float]:
    terms, weights = row
    return dict(zip(terms.tolist(), weights.tolist(), strict=True))


def _truncated(run: Mapping[str, Mapping[str, float]], k: int | None) -> Run:
    """Return the first `k` results of each query; all of them if `k` is None."""
    return {query: dict(list(scores.items())[:k]) for query, scores in run.items()}
