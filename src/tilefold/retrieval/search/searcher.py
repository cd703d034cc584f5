"""Search over one collection: retrieval, feedback, fusion, reranking and explanation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
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
from tilefold._internal.precision import inference_precision
from tilefold._internal.sentence_transformers import check_release_of
from tilefold._internal.typing import Model, Tensor
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
from tilefold.retrieval.data.documents import Content
from tilefold.retrieval.data.metadata import Filter, Where
from tilefold.retrieval.data.pages import DEFAULT_DPI
from tilefold.retrieval.data.passages import Passage, document_of
from tilefold.retrieval.errors import ArgumentDataError, MissingDocumentError
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
    from PIL.Image import Image

    from tilefold.retrieval.index.dense import DenseIndex
    from tilefold.retrieval.index.late import LateIndex
    from tilefold.retrieval.search.reranking import Reranking
    from tilefold.retrieval.search.token_matches import ExplainedQuery, Explanation
    from tilefold.retrieval.vectors.tokens import TokenStore, TokenVectors

__all__ = ["Ranking", "SearchRequest", "Searcher", "check_model", "matched_terms"]

# Candidates per query of a search that is reranked.
RERANK_DEPTH = 100
# Documents per query of a ranking that is interpolated around feedback, or whose last documents
# count as not relevant.
FULL_DEPTH = 1000

# Names of the stages of a ranking: keys of `Ranking.stages` and `Ranking.passages`. The run of the
# second index is shown as "words", which is also the name of the run of a BM25 index.
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

# Id that `Searcher.search` gives to its only query.
_QUERY = "query"

# Descriptions, for errors, of the indexes that hold no sparse vectors, by backend.
_INDEXES_WITHOUT_SPARSE_VECTORS = {
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
    """Check that a model is the one that made the vectors of an index.

    Args:
        provenance: the provenance of the index.
        model: the model that encodes the queries.
        name: the name of the model, for the error.
        index: a description of the index, for the error.

    Returns:
        Whether the index records its model. If it does not, nothing is checked.

    Raises:
        ArgumentDataError: if the index records another model.
    """
    if provenance.model_fingerprint is None:
        return False
    if provenance.differing_fields(Provenance(model_fingerprint(model))):
        remedy = (
            "Use the model that made the index, rebuild the index "
            f"(tilefold encode --model {name}), or allow another model (--other-model)."
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
        k: number of documents per query.
        feedback: options of pseudo-relevance feedback, which moves each query towards the
            documents that it retrieved and searches again; None searches once.
        interpolation: how the run of the second index is mixed in before feedback, after it, or
            both. It needs `feedback`.
        fusion: how the run of the second index is fused with that of the index; None does not.
        reranking: options of reranking the best candidates by late interaction; None does not.
        by: what is ranked. ``"document"`` ranks documents, in an index of passages by their best
            passage (MaxP). ``"passage"`` ranks the passages of an index of passages.
        where: filter of the documents' metadata, which applies to both indexes and to the search
            after feedback.
        ignore_identical_ids: whether to leave the document with the query's id out of every
            ranking and out of what feedback reads. For queries that are documents of the
            collection.
        explain: whether to add to each result which token of the document matched each token of
            the query. It needs late interaction, of the index or of `reranking`.

    Raises:
        ValueError: if `k` is below 1, or if there is an interpolation without feedback.

    Examples:
        >>> from tilefold.retrieval import Feedback
        >>> request = SearchRequest(k=5, feedback=Feedback("rocchio"))
        >>> SearchRequest(k=0)
        Traceback (most recent call last):
            ...
        tilefold._internal.arguments.ArgumentError: k: expected an integer of at least 1, got 0.
    """

    k: int = 10
    feedback: Feedback | None = None
    interpolation: Interpolation | None = None
    fusion: Fusion | None = None
    reranking: Reranking | None = None
    by: Literal["document", "passage"] = "document"
    where: Where = None
    ignore_identical_ids: bool = False
    explain: bool = False

    def __post_init__(self) -> None:
        """Raise an error if an option has a wrong type, is out of range, or needs another one."""
        check_k(self.k)
        self._check_types()
        Filter.of(self.where)
        check_choice("by", self.by, ("document", "passage"))
        if self.interpolation is not None and self.feedback is None:
            raise ArgumentError(
                "interpolation",
                "expected feedback with an interpolation, got None; use fusion instead.",
            )

    def _check_types(self) -> None:
        """Raise ``TypeError`` if an option has a wrong type, such as ``feedback="rocchio"``."""
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
        """Number of documents per query before reranking."""
        if self.reranking is None:
            return self.k
        return max(self.k, self.reranking.depth or RERANK_DEPTH)

    @property
    def retrieval_depth(self) -> int:
        """Number of documents per query of the runs that feedback reads and interpolation mixes."""
        if self.feedback is None:
            return self.candidates
        depth = max(self.candidates, self.feedback.k)
        if self.interpolation is not None or self.feedback.bottom:
            depth = max(depth, FULL_DEPTH)
        return depth


@dataclass(frozen=True)
class _StageRun:
    """Result of searching one index, which is a stage of a ranking.

    Attributes:
        stage: the name of the stage, such as "sparse" or "second".
        run: query id -> id of a document or passage -> score, best first.
        best_passages: query id -> document id -> the passage that the document was ranked by; None
            if no passages were searched.
        ignored_identical_ids: ids of queries for which a document with the query's own id was left
            out.
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
        vectors_before_feedback: vectors of the queries before feedback.
        vectors: vectors of the queries that were searched last; `vectors_before_feedback` itself
            if there was no feedback.
        candidates: the run before reranking; None if it was not reranked.
        by: what the ids of the run name, ``"document"`` or ``"passage"``.
        passages: name of a stage -> query id -> document id -> the document's best passage.
        ignored_identical_ids: ids of queries for which a document with the query's own id was left
            out.
    """

    run: Run
    stages: dict[str, Run] = field(default_factory=dict)
    vectors_before_feedback: Any = None
    vectors: Any = None
    candidates: Run | None = None
    by: str = "document"
    passages: dict[str, BestPassages] = field(default_factory=dict)
    ignored_identical_ids: set[str] = field(default_factory=set)

    def passage(self, query_id: str, result_id: str) -> str | None:
        """Return the id of the passage that a result was ranked by, or None if there is none.

        A passage that late interaction chose takes precedence over one of the index, and that over
        one of the second index.

        Args:
            query_id: the id of the query.
            result_id: the id of the document or passage in the run.
        """
        if self.by == "passage":
            return result_id
        for stage in (_LATE_STAGE, *_RETRIEVER_STAGES.values(), _SECOND_STAGE):
            passage_of = self.passages.get(stage, {}).get(query_id, {})
            if result_id in passage_of:
                return passage_of[result_id]
        return None

    @property
    def best_passages(self) -> BestPassages:
        """Query id -> id of a result -> the passage that it was ranked by, if there is one."""
        best: BestPassages = {}
        for query_id, scores in self.run.items():
            best[query_id] = {}
            for result_id in scores:
                passage = self.passage(query_id, result_id)
                if passage:
                    best[query_id][result_id] = passage
        return best


def _add_details(ranking: Ranking, stage_run: _StageRun) -> None:
    """Add the best passages of one search to a ranking, and the queries that ignored a document.

    Args:
        ranking: the ranking.
        stage_run: the result of the search.
    """
    ranking.ignored_identical_ids |= stage_run.ignored_identical_ids
    if stage_run.best_passages is None:
        return
    best_passages = ranking.passages.setdefault(stage_run.stage, {})
    for query_id, passage_of in stage_run.best_passages.items():
        best_passages.setdefault(query_id, {}).update(passage_of)


class Searcher:
    """Answers queries over one collection, with models and indexes that are loaded once.

    If the index or the token vectors hold passages, documents are ranked by their best passage.
    `vectors` must have a row for each passage of the index. `second` and `tokens` may be divided
    into different passages, or hold whole documents.

    Args:
        index: an index of sparse, dense or token vectors, or of words (BM25).
        model: the model that made the vectors of the index; None for a BM25 index, or if queries
            are passed as vectors.
        documents: id -> document, or its text if it has no title. Results show their titles, and
            reranking without `tokens` encodes their texts.
        vectors: sparse vectors of the documents, or their folder, which is read row by row. For
            feedback and matched terms.
        second: a BM25 index or a run of the same collection, to fuse with the index or to
            interpolate with it around feedback.
        late: a ``MultiVectorEncoder`` that reranks.
        tokens: token vectors of the documents by `late`; None encodes the candidates of a search.
        query_top_k: number of heaviest terms that a query keeps; None keeps all.
        options: options of the index's search, such as ``heap_factor`` for Seismic or
            ``candidates`` for an index of token vectors.
        other_model: whether to allow a model that did not make the index, such as a separate query
            encoder.

    Warns:
        PrecisionWarning: if queries are encoded in another precision than the index or `tokens`.

    Raises:
        DataError: if an argument was made by another model or from other documents than the index.
        ValueError: if `model` or `vectors` is passed with an index that does not use it.

    Examples:
        >>> from tilefold.retrieval import BM25Index, SearchRequest, load_collection
        >>> collection = load_collection("bank")
        >>> index = BM25Index.build(collection.contents())
        >>> searcher = Searcher(index, documents=collection.documents)
        >>> hits = searcher.search("lost card", SearchRequest(k=1))
        >>> hits[0]["id"], hits[0]["title"]
        ('cards', 'Lost cards')
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
        """Check that the arguments belong together, and create the retriever and the reranker."""
        _check_types(index, model, vectors, second, late, tokens, options)
        self.documents = documents_by_id("documents", {} if documents is None else documents)
        self.second = second
        _check_unused_arguments(index, model, vectors)
        if model is not None and not other_model:
            check_model(index.provenance, model)
        if model is not None:
            warn_of_query_precision(
                model,
                "the index",
                index.provenance.precision,
                stacklevel=2,
            )
        self.retriever = _create_retriever(index, model, vectors, query_top_k, options or {})
        self.stage = _RETRIEVER_STAGES[type(self.retriever)]
        if isinstance(second, BM25Index):
            _check_same_documents(second, self.provenance)
        self.reranker = None
        if late is not None:
            # Imported here because it needs torch, which a search with BM25 does not.
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

    @property
    def precisions(self) -> dict[str, str | None]:
        """Dtypes in which the compared vectors are computed, such as ``"bf16"``.

        - ``index``, ``queries``: the vectors of the index, and of the queries that are searched.
        - ``rerank_documents``, ``rerank_queries``: the token vectors that are reranked.

        A dtype that was not recorded is None. A BM25 index has no vectors. Scores differ from
        those of a search in one dtype if documents and queries have different ones.
        """
        precisions: dict[str, str | None] = {}
        if not isinstance(self.retriever, WordsRetriever):
            model = self.retriever.model
            precisions["index"] = self.provenance.precision
            precisions["queries"] = None if model is None else inference_precision(model)
        if self.reranker is not None:
            precisions |= self.reranker.precisions
        return precisions

    def search(self, query: str, request: SearchRequest | None = None) -> list[Json]:
        """Find the best documents for one query.

        Args:
            query: text of the query.
            request: options of the search; None uses the defaults.

        Returns:
            One record per document, best first:

            - ``rank``: rank of the document, from 1.
            - ``id``, ``score``: id and score of the document.
            - ``title``: its title, or its text if it has no title.
            - ``terms``: terms that the document shares with the query, largest contribution first.
              Each has the ``term``, its ``contribution`` to the sparse score, the ``share`` of the
              score that this is and, after feedback, whether ``feedback`` added it. None if the
              searcher has no `vectors`, the document is not in them, or only `second` found it.
            - ``first``: ``rank`` and ``score`` before reranking, if the request has reranking.
            - ``passage``: the passage that the document was ranked by, if there is one: its
              ``number``, from 1, its ``text``, and the characters ``start`` to ``stop`` that it
              has in the document's text.
            - ``matches``: if the request has `explain`, one record per token of the query, as
              :meth:`explain` describes them. None if the document is not in `documents`, or only
              `second` found it.

        Raises:
            ValueError: if the request needs an argument that the searcher was created without.
            DataError: if a document is missing from `vectors`, `tokens` or `documents`.
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
        if request.explain:
            self._check_can_explain(with_reranker=request.reranking is not None)
        queries = {_QUERY: query}
        ranking = self.rank(queries, request)
        self._check_documents_are_of_index(ranking)
        if request.reranking is not None:
            ranking = self.rerank(queries, ranking, request.reranking)
        records = self._create_records(ranking, request.k)
        if request.explain:
            self._add_matches(records, ranking, query)
        return records

    def _check_documents_are_of_index(self, ranking: Ranking) -> None:
        """Raise ``ArgumentDataError`` if `documents` has none of the documents of a ranking."""
        result_ids = list(ranking.run[_QUERY])
        if not result_ids or not self.documents:
            return
        if not any(_document_id(result, ranking.by) in self.documents for result in result_ids):
            raise ArgumentDataError(
                "documents",
                "none of the documents found is in the collection (the first is "
                f"{result_ids[0]!r}); pass the documents that the index was made from, and append "
                "the documents that were added to the index.",
            )

    def _create_records(self, ranking: Ranking, k: int) -> list[Json]:
        """Describe the best results of a query as records that can be written as JSON.

        Args:
            ranking: a ranking whose only query has the id ``_QUERY``.
            k: the number of records.

        Returns:
            Records with ``rank``, ``id``, ``score``, ``title`` and ``terms``, and with ``passage``
            and ``first`` (rank and score before reranking) if the result has them, best first.
        """
        scores = dict(list(ranking.run.get(_QUERY, {}).items())[:k])
        index_scores = ranking.stages[self.stage][_QUERY]  # before fusion and reranking
        terms = self._explain_by_terms(
            ranking,
            {result: index_scores[result] for result in scores if result in index_scores},
        )
        candidate_scores = {} if ranking.candidates is None else ranking.candidates[_QUERY]
        candidate_ranks = {result: rank for rank, result in enumerate(candidate_scores, start=1)}
        records: list[Json] = []
        for rank, (result_id, score) in enumerate(scores.items(), start=1):
            document_id = _document_id(result_id, ranking.by)
            document = self.documents.get(document_id)
            record: Json = {
                "rank": rank,
                "id": document_id,
                "score": score,
                "title": (document.title or document.text) if document else "",
                "terms": terms.get(result_id),
            }
            passage_id = ranking.passage(_QUERY, result_id)
            if passage_id is not None:
                record["passage"] = Passage.of(passage_id).shown(document)
            if ranking.candidates is not None:
                record["first"] = {
                    "rank": candidate_ranks[result_id],
                    "score": candidate_scores[result_id],
                }
            records.append(record)
        return records

    def explain(
        self,
        query: str,
        ids: Iterable[str],
        *,
        with_reranker: bool = False,
    ) -> dict[str, Explanation]:
        """Explain scores of late interaction: the document token that matched each query token.

        Args:
            query: text of the query.
            ids: ids of documents or, if the token vectors are those of passages, of passages.
            with_reranker: whether to explain the scores of the model that reranks, instead of the
                scores of the index.

        Returns:
            Id -> explanation.

        Raises:
            ValueError: if the searcher has no late interaction, or no documents.
            DataError: if a document is missing, or its vectors are not those of its tokens, such
                as pooled vectors.
        """
        self._check_can_explain(with_reranker=with_reranker)
        explained_query = self._encode_explained_query(query, with_reranker=with_reranker)
        explanations: dict[str, Explanation] = {}
        for vector_id in ids:  # one by one, since page images are large
            item = self.encoded_item(vector_id, with_reranker=with_reranker)
            (vectors,) = self._read_document_vectors({vector_id: item}, with_reranker=with_reranker)
            explanations[vector_id] = explained_query.explain(vector_id, item, vectors)
        return explanations

    def explain_items(
        self,
        query: str,
        items: Mapping[str, str | Image],
        *,
        with_reranker: bool = False,
    ) -> dict[str, Explanation]:
        """Explain scores of late interaction, like :meth:`explain`, of documents that were read.

        Args:
            query: text of the query.
            items: id of a document or passage -> its text or page image, as it was encoded.
            with_reranker: whether to explain the scores of the model that reranks.

        Returns:
            Id -> explanation.
        """
        self._check_can_explain(with_reranker=with_reranker)
        vectors = self._read_document_vectors(items, with_reranker=with_reranker)
        explained_query = self._encode_explained_query(query, with_reranker=with_reranker)
        return {
            vector_id: explained_query.explain(vector_id, item, document_vectors)
            for (vector_id, item), document_vectors in zip(items.items(), vectors, strict=True)
        }

    def _encode_explained_query(self, query: str, *, with_reranker: bool) -> ExplainedQuery:
        """Encode a query whose scores of late interaction are explained.

        Args:
            query: text of the query.
            with_reranker: whether the model that reranks encodes it, instead of that of the index.
        """
        from tilefold.retrieval.encoding.tokens import encode_texts
        from tilefold.retrieval.search.token_matches import ExplainedQuery

        if with_reranker:
            reranker: Any = self.reranker
            query_vectors = encode_texts(reranker.model, {_QUERY: query}, kind="query")
            return ExplainedQuery(reranker.model, query, query_vectors.rows(0))
        retriever: Any = self.retriever
        query_vectors = retriever.encode({_QUERY: query})
        return ExplainedQuery(retriever.model, query, query_vectors.rows(0))

    def _read_document_vectors(
        self,
        items: Mapping[str, str | Image],
        *,
        with_reranker: bool,
    ) -> list[Tensor]:
        """Read the token vectors by which documents were scored, or encode the documents.

        Args:
            items: id of a document or passage -> its text or page image, as it was encoded.
            with_reranker: whether the vectors are those of the model that reranks.

        Returns:
            Token vectors of each document.
        """
        if not with_reranker:
            index: Any = self.retriever.index
            vectors: list[Tensor] = index.token_vectors(items)
            return vectors
        reranker: Any = self.reranker
        if reranker.tokens is None:
            return _encode_items(reranker.model, items)
        stored = reranker.tokens.read(list(items))
        return [stored.rows(row) for row in range(len(stored))]

    def _check_can_explain(self, *, with_reranker: bool) -> None:
        """Raise ``ArgumentError`` if there is no late interaction to explain, or no documents.

        Args:
            with_reranker: whether the model that reranks is explained, instead of the index.
        """
        has_late_index = isinstance(self.retriever, LateRetriever)
        if not with_reranker and not has_late_index:
            raise ArgumentError(
                "explain",
                "expected an index of token vectors, or reranking by late interaction, got "
                f"an index of the backend {self.retriever.index.backend!r}; matched terms of a "
                "sparse index need the vectors of the documents instead.",
            )
        if not self.documents:
            raise ArgumentError(
                "explain",
                "expected the documents, whose tokens are shown, got none; give the collection "
                "with --data (documents= of Searcher in Python).",
            )

    def encoded_item(self, vector_id: str, *, with_reranker: bool = False) -> str | Image:
        """Return the text or the page image that a vector was encoded from.

        Args:
            vector_id: id of a document, or of a passage.
            with_reranker: whether the vector is one of the model that reranks.

        Raises:
            MissingDocumentError: if `documents` lacks the document.
            DataError: if the page cannot be read.
        """
        document = self.documents.get(vector_id)
        if document is not None:
            if document.page is None:
                return document.contents
            return document.page.image(self.page_dpi(with_reranker=with_reranker))
        token_passages = None if self.reranker is None else self.reranker.passages
        if self.passages is None and token_passages is None:
            raise MissingDocumentError("documents", vector_id)
        passage = Passage.of(vector_id)
        document = self.documents.get(passage.document)
        if document is None:
            raise MissingDocumentError("documents", passage.document)
        return passage.of_document(document).contents

    def page_dpi(self, *, with_reranker: bool = False) -> int:
        """Return the dots per inch at which pages of PDFs were rendered to encode them.

        Args:
            with_reranker: whether the vectors are those of the model that reranks.
        """
        provenance = self.provenance
        if with_reranker:
            tokens = None if self.reranker is None else self.reranker.tokens
            # Without stored vectors, the model encodes pages at the default number.
            provenance = Provenance() if tokens is None else tokens.manifest.provenance
        return provenance.dpi or DEFAULT_DPI

    def _add_matches(self, records: list[Json], ranking: Ranking, query: str) -> None:
        """Add the matches of query tokens to the records of a search.

        Args:
            records: records of the results, which are changed.
            ranking: the ranking whose only query has the id ``_QUERY``.
            query: text of the query.
        """
        with_reranker = ranking.candidates is not None
        stage = _LATE_STAGE if with_reranker else self.stage
        passage_of = ranking.passages.get(stage, {}).get(_QUERY, {})
        scored = ranking.stages[stage].get(_QUERY, {})
        # The records describe the first results of the run, in the same order.
        results = list(ranking.run.get(_QUERY, {}))[: len(records)]
        # Id of a result -> id of the document or passage whose token vectors were scored.
        vector_ids: dict[str, str] = {}
        for record, result_id in zip(records, results, strict=True):
            if result_id in scored and record["id"] in self.documents:
                vector_ids[result_id] = passage_of.get(result_id, result_id)
        explanations = self.explain(query, vector_ids.values(), with_reranker=with_reranker)
        for record, result_id in zip(records, results, strict=True):
            record["matches"] = None
            if result_id in vector_ids:
                matches = explanations[vector_ids[result_id]].matches
                record["matches"] = [match.as_json() for match in matches]

    def rank(
        self,
        queries: Mapping[str, str],
        request: SearchRequest,
        vectors: Any = None,
    ) -> Ranking:
        """Rank documents for several queries: retrieve, apply feedback, then fuse; no reranking.

        Args:
            queries: query id -> text.
            request: options of the search; `request.candidates` documents are ranked per query.
            vectors: vectors of the queries, as the index takes them; None encodes the texts.
        """
        check_mapping("queries", queries, "id -> text")
        check_instance("request", request, SearchRequest, "SearchRequest(k=10)")
        self._check_by(request)
        self._check_passages_of_second_index(request)
        ranking = Ranking(run={}, by=request.by)
        second_run: Run | None = None
        if request.interpolation is not None:
            second = self._search_second_index(queries, request.retrieval_depth, request)
            _add_details(ranking, second)
            second_run = second.run
        # Any, because each class of retrievers takes query vectors of another type.
        retriever: Any = self.retriever
        if request.feedback is not None and isinstance(retriever, WordsRetriever):
            retriever = retriever.as_vectors  # feedback changes query vectors, not texts
        ranking.vectors = retriever.encode(queries) if vectors is None else vectors
        ranking.vectors_before_feedback = ranking.vectors
        query_ids = list(queries)
        if second_run is None:
            self._retrieve(ranking, retriever, query_ids, request)
        else:
            self._retrieve_interpolated(ranking, retriever, query_ids, second_run, request)
        if request.fusion is not None:
            self._fuse_with_second_index(queries, ranking, request.fusion, request)
        return ranking

    def _retrieve(
        self,
        ranking: Ranking,
        retriever: Any,
        query_ids: list[str],
        request: SearchRequest,
    ) -> None:
        """Search the index, and search it again with the query vectors that feedback has changed.

        Args:
            ranking: the ranking with the query vectors, which gets the run.
            retriever: the retriever of the index.
            query_ids: ids of the queries.
            request: options of the search.
        """
        run = self._search_index(ranking, retriever, query_ids, request.retrieval_depth, request)
        if request.feedback is not None:
            self._apply_feedback(ranking, retriever, query_ids, run, request.feedback)
            run = self._search_index(ranking, retriever, query_ids, request.candidates, request)
        ranking.run = _truncate(run, request.candidates)
        ranking.stages[self.stage] = ranking.run

    def _retrieve_interpolated(
        self,
        ranking: Ranking,
        retriever: Any,
        query_ids: list[str],
        second_run: Run,
        request: SearchRequest,
    ) -> None:
        """Search the index, and add the scores of the second index before and after feedback.

        Args:
            ranking: the ranking with the query vectors, which gets the run.
            retriever: the retriever of the index.
            query_ids: ids of the queries.
            second_run: the run of the second index.
            request: options of the search, with an interpolation.
        """
        interpolation: Any = request.interpolation
        depth = request.retrieval_depth
        run = self._search_index(ranking, retriever, query_ids, depth, request)
        if request.feedback is not None:
            feedback_run = interpolation.before_feedback(run, second_run, depth)
            self._apply_feedback(ranking, retriever, query_ids, feedback_run, request.feedback)
            run = self._search_index(ranking, retriever, query_ids, depth, request)
        interpolated_run = interpolation.after_feedback(run, second_run, depth)
        ranking.run = _truncate(interpolated_run, request.candidates)
        # A result of the interpolated run may have a low rank in this index. The whole run is
        # stored, so that the result's score in this index can be reported.
        ranking.stages[self.stage] = run

    def _search_index(
        self,
        ranking: Ranking,
        retriever: Any,
        query_ids: list[str],
        k: int,
        request: SearchRequest,
    ) -> Run:
        """Search the index with the query vectors of a ranking.

        Args:
            ranking: the ranking, to which the best passages are added.
            retriever: the retriever of the index.
            query_ids: ids of the query vectors.
            k: number of documents or passages per query.
            request: options of the search.

        Returns:
            Query id -> id of a document or passage -> score, best first.
        """
        stage_run = _search_stage(
            self.stage,
            partial(retriever.search, ranking.vectors, query_ids, where=request.where),
            k,
            request,
            self.passages,
        )
        _add_details(ranking, stage_run)
        return stage_run.run

    def _apply_feedback(
        self,
        ranking: Ranking,
        retriever: Any,
        query_ids: list[str],
        feedback_run: Run,
        feedback: Feedback,
    ) -> None:
        """Move the query vectors of a ranking towards the documents of a run.

        Args:
            ranking: the ranking, whose query vectors are replaced.
            retriever: the retriever of the index.
            query_ids: ids of the query vectors.
            feedback_run: query id -> id of a document or passage -> score, best first.
            feedback: options of feedback.
        """
        # Vectors are stored by passage, so each document is replaced by its best passage.
        best_passages = [
            ranking.passages[stage]
            for stage in (self.stage, _SECOND_STAGE)
            if stage in ranking.passages
        ]
        ranking.vectors = retriever.expand(
            ranking.vectors,
            query_ids,
            as_passages(feedback_run, best_passages),
            feedback,
        )

    def _fuse_with_second_index(
        self,
        queries: Mapping[str, str],
        ranking: Ranking,
        fusion: Fusion,
        request: SearchRequest,
    ) -> None:
        """Replace the run of a ranking by its fusion with the run of the second index.

        Both runs are added to the stages of the ranking.

        Args:
            queries: query id -> text.
            ranking: the ranking, which is changed in place.
            fusion: how the two runs are fused.
            request: options of the search.
        """
        second = self._search_second_index(queries, request.candidates, request)
        _add_details(ranking, second)
        ranking.run = fusion.mix(ranking.run, second.run, request.candidates)
        ranking.stages[_WORDS_STAGE] = second.run
        ranking.stages[_FUSION_STAGE] = ranking.run

    def rank_without_feedback(
        self,
        queries: Mapping[str, str],
        request: SearchRequest,
        ranking: Ranking,
    ) -> Run:
        """Rank queries without the feedback of a request, to measure what feedback changes.

        If the request has an interpolation, the run of the index is mixed with that of the second
        index.

        Args:
            queries: query id -> text.
            request: options of the search with feedback.
            ranking: the ranking with feedback. Its query vectors before feedback are searched, so
                that the queries are not encoded again.

        Returns:
            The run, with `request.candidates` documents per query.
        """
        interpolation = request.interpolation
        depth = request.candidates
        if interpolation is not None:
            depth = max(depth, FULL_DEPTH)
        request_without_feedback = replace(request, k=depth, feedback=None, interpolation=None)
        # A BM25 index is searched with texts. Only feedback has turned them into vectors.
        searches_texts = isinstance(self.retriever, WordsRetriever)
        query_vectors = None if searches_texts else ranking.vectors_before_feedback
        run = self.rank(queries, request_without_feedback, query_vectors).run
        if interpolation is None:
            return run
        second_run = self.second_run(queries, depth, request)
        interpolated_run = interpolation.mix(run, second_run, depth)
        return _truncate(interpolated_run, request.candidates)

    def rerank(
        self,
        queries: Mapping[str, str],
        ranking: Ranking,
        reranking: Reranking,
        query_vectors: TokenVectors | None = None,
        candidate_vectors: TokenVectors | None = None,
    ) -> Ranking:
        """Order the results of :meth:`rank` by late interaction.

        Args:
            queries: query id -> text.
            ranking: the ranking whose run is reranked.
            reranking: options of the reranking.
            query_vectors: token vectors of the queries; None encodes their texts.
            candidate_vectors: token vectors of the texts that :meth:`rerank_texts` returns; None
                encodes these texts. Not used if the searcher has `tokens`.
        """
        if self.reranker is None:
            raise ArgumentError(
                "reranking",
                "expected a searcher with a late-interaction model, got one without; "
                "pass it as late.",
            )
        token_passages = self.reranker.passages
        has_tokens = self.reranker.tokens is not None
        if ranking.by == "passage" and has_tokens and token_passages != self.passages:
            raise ArgumentError(
                "tokens",
                f"expected token vectors of the index's passages ({self.passages}), got those of "
                f"{token_passages or 'whole documents'}; encode the documents with the same "
                "passages.",
            )
        reranked = self.reranker(
            queries,
            ranking.run,
            reranking,
            query_vectors,
            candidate_vectors,
            by=ranking.by,
            passages=self._retrieved_passages(ranking),
        )
        passages = dict(ranking.passages)
        if reranked.passages:
            passages[_LATE_STAGE] = reranked.passages
        late_run = _truncate(reranked.late_run, reranking.depth)
        return replace(
            ranking,
            run=reranked.run,
            stages={**ranking.stages, _LATE_STAGE: late_run},
            candidates=ranking.run,
            passages=passages,
        )

    def rerank_texts(self, ranking: Ranking, reranking: Reranking) -> dict[str, Content]:
        """Return the texts or pages of the candidates that :meth:`rerank` scores.

        They need to be encoded only if the searcher has no `tokens`.

        Args:
            ranking: the ranking to rerank.
            reranking: options of the reranking.

        Returns:
            Id of a document or passage -> text or page; empty if the searcher has no model that
            reranks.
        """
        if self.reranker is None:
            return {}
        return self.reranker.texts_to_encode(
            ranking.run,
            reranking.depth,
            ranking.by,
            self._retrieved_passages(ranking),
        )

    def _retrieved_passages(self, ranking: Ranking) -> BestPassages | None:
        """Return the passages by which a ranking retrieved its results.

        The result is None for an index of whole documents.
        """
        return ranking.best_passages if self.passages else None

    def _check_by(self, request: SearchRequest) -> None:
        """Raise ``ArgumentError`` if a request ranks passages and the index holds none."""
        if request.by == "passage" and self.passages is None:
            raise ArgumentError(
                "by",
                "expected 'document' for an index of whole documents, got 'passage'; "
                "build the index from passages.",
            )

    def _check_passages_of_second_index(self, request: SearchRequest) -> None:
        """Raise ``ArgumentError`` if the second index lacks passages of the index that it needs.

        The second index needs the same passages if passages are ranked, or if feedback reads a run
        into which the run of the second index is mixed.
        """
        interpolation = request.interpolation
        is_second_used = interpolation is not None or request.fusion is not None
        if self.second is None or self.passages is None or not is_second_used:
            return
        if request.by == "passage":
            reason = "because passages are ranked"
        elif interpolation is not None and interpolation.mixes_before_feedback:
            reason = "because feedback reads the best passages"
        else:
            return
        second_passages = None
        if isinstance(self.second, BM25Index):
            second_passages = self.second.provenance.passages
        if second_passages != self.passages:
            raise ArgumentError(
                "second",
                f"expected a BM25 index of the index's passages ({self.passages}), {reason}, "
                f"got {second_passages or 'whole documents'}.",
            )

    def second_run(self, queries: Mapping[str, str], k: int, request: SearchRequest) -> Run:
        """Return the best documents of the second index, or of the run that replaces it.

        Args:
            queries: query id -> text.
            k: number of documents per query. A run is returned as deep as it is.
            request: options of the search.
        """
        return self._search_second_index(queries, k, request).run

    def _search_second_index(
        self, queries: Mapping[str, str], k: int, request: SearchRequest
    ) -> _StageRun:
        """Search the second index, or select the queries from the run that replaces it.

        Args:
            queries: query id -> text.
            k: number of documents per query. A run is returned as deep as it is.
            request: options of the search.

        Raises:
            ArgumentError: if there is no second index, or if a run would have to be filtered.
        """
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
                "expected a BM25 index with metadata to filter by where, got a run, which has no "
                "metadata.",
            )
        run = {query: second[query] for query in queries if query in second}
        if not request.ignore_identical_ids:
            return _StageRun(_SECOND_STAGE, run)
        return _StageRun(
            _SECOND_STAGE,
            without_identical_ids(run),
            ignored_identical_ids=queries_with_identical_ids(run),
        )

    def _explain_by_terms(
        self,
        ranking: Ranking,
        scores: Mapping[str, float],
    ) -> dict[str, list[Json]]:
        """Explain the sparse scores of results by the terms that they share with the query.

        Args:
            ranking: a ranking whose only query has the id ``_QUERY``.
            scores: id of a result, which is a document or a passage -> sparse score.

        Returns:
            Id of a result -> records of its terms, largest contribution first, without special
            tokens. After feedback, ``feedback`` says whether it has added the term to the query.
            Empty if the searcher has no sparse model or no vectors.
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
        query_row = ranking.vectors.row(0)
        # Without feedback, both attributes are the same object.
        has_feedback = ranking.vectors is not ranking.vectors_before_feedback
        original_terms, _ = ranking.vectors_before_feedback.row(0)
        terms_before_feedback = set(original_terms.tolist())
        # In an index of passages, a document was scored by the vector of its best passage.
        best_passages_of_queries = ranking.passages.get(self.stage, {})
        passage_of_document = best_passages_of_queries.get(_QUERY, {})
        result_of_vector = {
            passage_of_document.get(result_id, result_id): result_id for result_id in scores
        }
        vectors = retriever.vectors_of(result_of_vector, skip_missing=True)
        terms_of_results: dict[str, list[Json]] = {}
        for row, vector_id in enumerate(vectors.ids):
            result_id = result_of_vector[vector_id]
            terms_of_results[result_id] = []
            for term, contribution in matched_terms(
                query_row,
                vectors.row(row),
                without=tokenizer.all_special_ids,
            ):
                record: Json = {
                    "term": term_name[term],
                    "contribution": contribution,
                    "share": contribution / scores[result_id],
                }
                if has_feedback:
                    record["feedback"] = term not in terms_before_feedback
                terms_of_results[result_id].append(record)
        return terms_of_results


def _check_types(
    index: object,
    model: object,
    vectors: object,
    second: object,
    late: object,
    tokens: object,
    options: object,
) -> None:
    """Raise ``TypeError`` if an argument of :class:`Searcher` has a wrong type, such as a path.

    Each argument but `index` may be None.
    """
    if not hasattr(index, "search"):
        raise TypeError(
            "index: expected an index that build_index, load_index or BM25Index.load returns, "
            f"got {type(index).__name__}.",
        )
    if model is not None and not hasattr(model, "encode_query"):
        raise TypeError(
            f"model: expected the model that made the index, got {type(model).__name__}; "
            "load it first.",
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


def _check_unused_arguments(
    index: SparseIndex | BM25Index | DenseIndex | LateIndex,
    model: Model | None,
    vectors: SparseVectors | str | Path | None,
) -> None:
    """Raise ``ArgumentError`` if a model or sparse vectors are passed that the index does not use.

    Args:
        index: the index.
        model: the model that encodes queries. A BM25 index is searched with texts.
        vectors: sparse vectors of the documents. Only an index of sparse vectors uses them.
    """
    if index.backend == BM25Index.backend and model is not None:
        raise ArgumentError(
            "model",
            f"must be left out for a BM25 index, which is searched with texts, got "
            f"{type(model).__name__}.",
        )
    description = _INDEXES_WITHOUT_SPARSE_VECTORS.get(index.backend)
    if description is not None and vectors is not None:
        raise ArgumentError(
            "vectors",
            f"must be left out for {description}, whose results are not explained by terms, got "
            f"{vectors}.",
        )


def _check_same_documents(second: BM25Index, provenance: Provenance) -> None:
    """Raise ``ArgumentDataError`` if a second index was made from other documents than the index.

    Args:
        second: the second index.
        provenance: the provenance of the index.
    """
    if "texts_sha256" in second.provenance.differing_fields(provenance):
        raise ArgumentDataError(
            "second",
            "was made from other documents than the index; build both from the same ones.",
        )


def _create_retriever(
    index: SparseIndex | BM25Index | DenseIndex | LateIndex,
    model: Model | None,
    vectors: SparseVectors | str | Path | None,
    query_top_k: int | None,
    options: Mapping[str, object],
) -> SparseRetriever | WordsRetriever | DenseRetriever | LateRetriever:
    """Create the retriever for an index, which searches it with encoded queries.

    Args:
        index: the index.
        model: the model that encodes queries.
        vectors: sparse vectors of the documents, or their folder.
        query_top_k: number of heaviest terms that a query keeps; None keeps all.
        options: options of the index's search.
    """
    if isinstance(index, BM25Index):
        return WordsRetriever(index)
    if index.backend == DENSE:
        return DenseRetriever(index, model, options=options)
    if index.backend == LATE:
        return LateRetriever(index, model, options=options)
    return SparseRetriever(
        index,
        model,
        Path(vectors) if isinstance(vectors, str) else vectors,
        query_top_k,
        options=options,
    )


def _encode_items(model: Any, items: Mapping[str, str | Image]) -> list[Tensor]:
    """Encode texts and page images one by one.

    Args:
        model: a ``MultiVectorEncoder``.
        items: id -> text or image.

    Returns:
        Token vectors of each item.
    """
    from tilefold.retrieval.encoding.pages import encode_images
    from tilefold.retrieval.encoding.tokens import encode_texts

    vectors: list[Any] = []
    for item_id, item in items.items():
        if isinstance(item, str):
            vectors.append(encode_texts(model, {item_id: item}, kind="document").rows(0))
        else:
            vectors += encode_images(model, [item])
    return vectors


def _document_id(result_id: str, by: str) -> str:
    """Return the id of the document of a result.

    Args:
        result_id: the id of a document, or of a passage with ``by="passage"``.
        by: what the id names, ``"document"`` or ``"passage"``.
    """
    return document_of(result_id) if by == "passage" else result_id


def _search_stage(
    stage: str,
    search: Callable[[int], Run],
    k: int,
    request: SearchRequest,
    passages: str | None,
) -> _StageRun:
    """Find the best documents or passages of one index for each query.

    Args:
        stage: the name of the stage.
        search: a function that maps a number n to the n best entries of the index for each query,
            best first.
        k: the number of results per query.
        request: options of the search, of which `by` and `ignore_identical_ids` are used.
        passages: how documents are divided into the entries of the index; None if its entries are
            whole documents.
    """
    ignored_queries: set[str] = set()
    if request.ignore_identical_ids:
        document_of_entry = str if passages is None else document_of
        search_others = SearchWithoutIdenticalIds(search, document_of_entry)
        search = search_others
        # Every search adds to this set.
        ignored_queries = search_others.ignored
    if passages is None or request.by == "passage":
        return _StageRun(stage, search(k), ignored_identical_ids=ignored_queries)
    run, best_passages = search_documents(search, k)
    return _StageRun(stage, run, best_passages, ignored_queries)


def matched_terms(
    query: Row,
    document: Row,
    without: Collection[int] = (),
) -> list[tuple[int, float]]:
    """Return the terms that a query and a document share, with their contributions to the score.

    Args:
        query: terms and weights of the query.
        document: terms and weights of the document.
        without: terms to leave out, such as special tokens.

    Returns:
        Pairs of a term and the product of its two weights, largest product first. Equal products
        are in ascending order of terms.
    """
    query_weights = _weight_by_term(query)
    document_weights = _weight_by_term(document)
    shared = document_weights.keys() & (query_weights.keys() - set(without))
    contributions = [(term, query_weights[term] * document_weights[term]) for term in shared]
    return sorted(contributions, key=lambda item: (-item[1], item[0]))


def _weight_by_term(row: Row) -> dict[int, float]:
    terms, weights = row
    return dict(zip(terms.tolist(), weights.tolist(), strict=True))


def _truncate(run: Mapping[str, Mapping[str, float]], k: int | None) -> Run:
    """Return the first `k` results of each query; all of them if `k` is None."""
    return {query: dict(list(scores.items())[:k]) for query, scores in run.items()}
