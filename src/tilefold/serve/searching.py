"""Search routes: Anserini's REST form, and a POST with fusion, feedback and reranking."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field

from tilefold._internal.arguments import ArgumentError
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.collection import Document
from tilefold.retrieval.data.metadata import Filter
from tilefold.retrieval.data.passages import document_of
from tilefold.retrieval.errors import MissingDocumentError
from tilefold.retrieval.search.feedback import Feedback
from tilefold.retrieval.search.fusion import Fusion, Normalization
from tilefold.retrieval.search.reranking import Reranking
from tilefold.retrieval.search.searcher import RERANK_DEPTH, Ranking, SearchRequest
from tilefold.retrieval.vectors.sparse_files import SparseVectors
from tilefold.retrieval.vectors.tokens import TokenVectors
from tilefold.serve.bodies import Body, ServeError, invalid, to_json
from tilefold.serve.endpoints import JSON, add_route
from tilefold.serve.searchable import QUERY, Explanation, Searchable
from tilefold.serve.service import EncodeOptions, Service

# Largest weight of a part of a query after feedback. Only proportions of weights matter.
MAX_WEIGHT = 1000.0
_UNREACHABLE = "the index is on a server that does not answer; the log says why"
# Field of a body -> options with which the server must have been started.
_REQUIRED_OPTIONS = {
    "explain": "--vectors, and an index of vectors",
    "prf": "--vectors, and an index of vectors, or one of dense vectors",
    "fusion": "--bm25, and an index of vectors",
    "rerank": "--tokens (and --data, if that is a model)",
}
T = TypeVar("T")
_QueryVector: TypeAlias = SparseVectors | TokenVectors | torch.Tensor | None
"""Vector of a query that an index searches with; ``None`` for an index of words."""


class _Strict(Body):
    """Body whose types are not converted, without unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class FusionBody(_Strict):
    """Options of fusion with the index of words.

    ``weight`` and ``normalization`` apply to interpolation only.
    """

    method: Literal["rrf", "interpolation"] = Fusion.method
    weight: float = Field(default=Fusion.weight, ge=0, le=1)
    normalization: Normalization = Fusion.normalization


class FeedbackBody(_Strict):
    """Options of feedback, as of ``tilefold search --prf``."""

    method: Literal["average", "rocchio"] = Feedback.method
    depth: int | None = Field(default=Feedback.depth, ge=1, le=100)
    alpha: float | None = Field(default=Feedback.alpha, ge=0, le=MAX_WEIGHT)
    beta: float | None = Field(default=Feedback.beta, ge=0, le=MAX_WEIGHT)
    gamma: float = Field(default=Feedback.gamma, ge=0, le=MAX_WEIGHT)
    bottom: int = Field(default=Feedback.bottom, ge=0, le=100)
    top_terms: int | None = Field(default=Feedback.top_terms, ge=1)
    equal_lengths: bool | None = Feedback.equal_lengths


class RerankBody(_Strict):
    """Options of reranking, as of ``tilefold search --rerank``.

    The highest ``depth`` documents are reranked. ``weight`` is that of MaxSim in an interpolation
    with the first scores.
    """

    depth: int = Field(default=RERANK_DEPTH, ge=1)
    weight: float | None = Field(default=None, ge=0, le=1)


class SearchBody(_Strict):
    """Body of a search; ``true`` selects the defaults of fusion, feedback and reranking."""

    query: str
    hits: int = Field(default=10, ge=1)
    parse: bool = True
    by: Literal["document", "passage"] = "document"
    where: dict[str, Any] | None = None
    where_not: dict[str, Any] | None = None
    fusion: FusionBody | bool = False
    prf: FeedbackBody | bool = False
    rerank: RerankBody | bool = False
    explain: bool = False
    columns: bool = False


def search_router(service: Service) -> APIRouter:
    """Create the search routes of a service; without an index, only ``/v1/indexes``."""
    if service.searchable is not None:
        return _SearchRoutes(service, service.searchable).router()
    router = APIRouter(prefix="/v1")

    async def no_indexes(request: Request) -> Response:
        return Response(to_json({"indexes": []}), media_type=JSON)

    add_route(router, service, "/indexes", no_indexes, "This server has no index")
    return router


class _SearchRoutes:
    """Routes that search an index.

    Args:
        service: service that encodes queries.
        searchable: index with its models and documents.
    """

    def __init__(self, service: Service, searchable: Searchable) -> None:
        self.service = service
        self.searchable = searchable
        self._last_failure = 0.0  # time.monotonic() when the index's server did not answer

    def router(self) -> APIRouter:
        """Create the router with the routes of searches, of a document and of ``/v1/indexes``."""
        router = APIRouter(prefix="/v1")
        add = functools.partial(add_route, router, self.service)
        add("/indexes", self.indexes, "The index, and what it can be asked for")
        add("/{index}/search", self.get_search, "Ranked documents, as Anserini answers")
        add("/{index}/doc/{docid:path}", self.get_document, "A document, as Anserini answers")
        summary = "Ranked documents, with fusion, feedback, reranking and explanations"
        add("/{index}/search", self.post_search, summary, SearchBody)
        return router

    async def indexes(self, request: Request) -> Response:
        """Answer with a description of the index."""
        searchable = self.searchable
        index = searchable.index
        description = {
            "name": searchable.name,
            "backend": index.backend,
            "documents": await self._query_index(lambda: index.n_documents),
            "features": searchable.features,
        }
        return Response(to_json({"indexes": [description]}), media_type=JSON)

    async def get_search(self, request: Request) -> Response:
        """Answer a search in the form of Anserini.

        Parameters are read from the address: ``query``, ``hits`` (the number of documents), and
        ``parse`` (documents as objects, instead of their JSON as text).
        """
        self._check_index(request)
        query = request.query_params.get("query", "")
        hits = request.query_params.get("hits", "10")
        parse = request.query_params.get("parse", "true").lower()
        if not query.strip():
            raise ServeError("Empty", "Parameter 'query' is required")
        # Numbers of 10 digits and more are over any limit, and may be too long to convert.
        is_short_number = hits.isascii() and hits.isdigit() and len(hits) < 10
        if not is_short_number or int(hits) == 0:
            raise ServeError(
                "Validation",
                "Parameter 'hits' must be a positive integer",
                status=400,
            )
        if parse not in ("true", "false"):
            raise ServeError("Validation", "Parameter 'parse' must be true or false", status=400)
        return await self._answer(
            SearchBody(query=query, hits=int(hits), parse=parse == "true"),
            request,
        )

    async def post_search(self, body: SearchBody, request: Request) -> Response:
        """Answer a search with options."""
        self._check_index(request)
        if not body.query.strip():
            raise ServeError("Empty", "`query` cannot be empty")
        return await self._answer(body, request)

    async def get_document(self, request: Request) -> Response:
        """Answer with one document by its id, in the form of Anserini."""
        self._check_index(request)
        document_id = request.path_params["docid"]
        if not self.searchable.documents:
            raise ServeError(
                "Validation",
                "this server shows no documents: start it with --data",
                status=404,
            )
        document = await self.service.run_in_helper(self.searchable.documents.get, document_id)
        if document is None:
            raise ServeError("Validation", f"there is no document {document_id!r}", status=404)
        answer = {
            "api": "v1",
            "index": self.searchable.name,
            "docid": document_id,
            "doc": _document_json(document, parse=True),
        }
        return Response(to_json(answer), media_type=JSON)

    def _check_index(self, request: Request) -> None:
        """Raise ``ServeError`` if a request names another index."""
        if request.path_params["index"] != self.searchable.name:
            raise ServeError(
                "Validation",
                f"the index of this server is {self.searchable.name!r}",
                status=404,
            )

    def _check_options(self, body: SearchBody, reranking: Reranking | None) -> None:
        """Refuse too many documents, and features that this server was not started with.

        Args:
            body: body of the search.
            reranking: options of reranking in the body; ``None`` without reranking.

        Raises:
            ServeError: with the field, and the option of the server that is missing.
        """
        max_hits = self.service.limits.max_hits
        if body.hits > max_hits:
            raise invalid(f"`hits` expected at most {max_hits}, got {body.hits}")
        if reranking is not None and reranking.depth is not None and reranking.depth > max_hits:
            raise invalid(f"`rerank.depth` expected at most {max_hits}, got {reranking.depth}")
        features = self.searchable.features
        if body.by == "passage" and not features["passages"]:
            raise invalid(
                "`by` expected 'document', the index is of whole documents; got 'passage'",
            )
        for name, options in _REQUIRED_OPTIONS.items():
            is_requested = getattr(body, name) is not False
            if is_requested and not features[name]:
                raise invalid(f"`{name}`: this server was started without what it needs: {options}")

    async def _answer(self, body: SearchBody, request: Request) -> Response:
        """Parse and check the options of a search, and answer it.

        Args:
            body: body of a POST, or the same from the address of a GET.
            request: the request.

        Raises:
            ServeError: for bad options, or for a document that the server has no text or vector of.
        """
        feedback = _parse_options(Feedback, FeedbackBody, body.prf, "prf")
        fusion = _parse_options(Fusion, FusionBody, body.fusion, "fusion")
        reranking = _parse_options(Reranking, RerankBody, body.rerank, "rerank")
        search = SearchRequest(
            body.hits,
            feedback=feedback,
            fusion=fusion,
            reranking=reranking,
            by=body.by,
            where=_filter(body),
        )
        self._check_options(body, reranking)
        try:
            return await self._search(body, search, brief=request.method == "GET")
        except MissingDocumentError as error:  # the document was added to the index later
            (argument,) = error.arguments
            option = {"vectors": "--vectors", "documents": "--data"}[argument]
            message = (
                f"the index has a document {error.document!r} that {option} of this server lacks"
            )
            raise ServeError("Backend", message) from error

    async def _search(self, body: SearchBody, request: SearchRequest, brief: bool) -> Response:
        """Encode a query, search, rerank, and write the answer.

        Args:
            body: the body.
            request: the search that it describes.
            brief: leave out durations, as Anserini does.
        """
        service = self.service
        seconds: dict[str, float] = {}  # of each stage, such as "encode"
        service.check_size([body.query], self.searchable.encoder, "query", "query")
        with service.input_limit.acquire(1):
            started = time.perf_counter()
            vector = None

            def record_time(stage: str) -> None:
                """Record the time since the end of the previous stage."""
                seconds[stage] = time.perf_counter() - started - sum(seconds.values())

            if self.searchable.encoder is not None:
                outcome = await service.encode(
                    self.searchable.encoder.kind,
                    [body.query],
                    EncodeOptions("query"),
                )
                vector = self.searchable.query_vector(outcome.rows[0])
            record_time("encode")
            ranking = await self._rank(body.query, vector, request)
            record_time("search")
            if request.reranking is not None and ranking.run[QUERY]:
                ranking = await self._rerank(request.reranking, body.query, ranking)
                record_time("rerank")
            columns: dict[str, Run] = {}
            if body.columns:
                columns = await self._columns(body, request, vector)
                record_time("columns")
            content = await service.run_in_helper(
                self._render, body, ranking, columns, seconds, brief
            )
        service.metrics.count("tilefold_search_count")
        service.metrics.observe("tilefold_search_duration", seconds["search"])
        return Response(content, media_type=JSON)

    async def _rank(self, text: str, vector: _QueryVector, request: SearchRequest) -> Ranking:
        """Rank documents for a query.

        Args:
            text: text of the query.
            vector: vector of the query; ``None`` for an index of words.
            request: options of the search.

        Raises:
            ServeError: for options of feedback or of a filter that do not fit the index.
            MissingDocumentError: for a document that the server has no text or vector of.
        """
        try:
            return await self._query_index(
                self.searchable.searcher.rank,
                {QUERY: text},
                request,
                vector,
            )
        except MissingDocumentError:  # a `ValueError`, but none of the client
            raise
        except ValueError as error:
            concerns_filter = isinstance(error, ArgumentError) and error.arguments == ("where",)
            if request.feedback is not None and not concerns_filter:
                raise invalid(f"`prf`: {error}") from error
            raise invalid(str(error)) from error

    async def _query_index(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that reads the index, in a thread.

        If the server of the index does not answer one request, requests that already wait for a
        thread fail at once. Each of them would otherwise wait for its own time-out.

        Args:
            function: function that reads the index.
            arguments: arguments of `function`.

        Raises:
            ServeError: if the index is on a server that does not answer.
        """
        arrived = time.monotonic()
        unreachable = ServeError("Unhealthy", _UNREACHABLE)

        def run() -> T:
            failed_while_waiting = self._last_failure > arrived
            if failed_while_waiting:
                raise unreachable
            try:
                return function(*arguments)
            except (ConnectionError, PermissionError) as error:
                self._last_failure = time.monotonic()
                self.service.log_failure(error)
                raise unreachable from error

        return await self.service.run_search(run)

    @property
    def _max_encoded(self) -> int:
        """Largest number of candidates that a search may encode; the search holds a permit too."""
        return self.service.input_limit.total - 1

    async def _rerank(self, reranking: Reranking, text: str, ranking: Ranking) -> Ranking:
        """Rerank the highest candidates of a ranking by MaxSim, or by both scores.

        Token vectors of the candidates are read from the store, or computed from their texts if
        there is none.

        Args:
            reranking: options: the number of candidates, and the weight of MaxSim.
            text: text of the query.
            ranking: the ranking of the index.
        """
        service = self.service
        searchable = self.searchable
        query_outcome = await service.encode("multi-vector", [text], EncodeOptions("query"))
        dimension = query_outcome.rows[0].size(1)
        query = TokenVectors.pack([QUERY], query_outcome.rows, dimension, "fp32")
        candidates = None
        if searchable.store is None:
            candidates = await self._encode_candidates(reranking, ranking, dimension)
        rerank = functools.partial(
            searchable.searcher.rerank,
            {QUERY: text},
            ranking,
            reranking,
            query,
            candidates,
        )
        return await service.run_on_device(service.model("multi-vector"), rerank)

    async def _encode_candidates(
        self,
        reranking: Reranking,
        ranking: Ranking,
        dimension: int,
    ) -> TokenVectors:
        """Encode the texts of the candidates that are reranked.

        Args:
            reranking: its depth is the number of candidates.
            ranking: the ranking of the index.
            dimension: dimension D of a token vector.

        Raises:
            ServeError: if they are more than the service encodes at once.
        """
        service = self.service
        n_candidates = min(len(ranking.run[QUERY]), reranking.depth or RERANK_DEPTH)
        if n_candidates > self._max_encoded:
            raise invalid(
                f"`rerank.depth` expected at most {self._max_encoded}, got {reranking.depth}",
            )
        text_of_id = await service.run_in_helper(
            self.searchable.searcher.rerank_texts,
            ranking,
            reranking,
        )
        # The service refuses empty texts, but encodes a space.
        texts = [text or " " for text in text_of_id.values()]
        with service.input_limit.acquire(len(texts)):
            outcome = await service.encode(
                "multi-vector",
                texts,
                EncodeOptions("document", truncate=True),
            )
        return TokenVectors.pack(list(text_of_id), outcome.rows, dimension, "fp32")

    async def _columns(
        self,
        body: SearchBody,
        request: SearchRequest,
        vector: _QueryVector,
    ) -> dict[str, Run]:
        """Rank documents by each method separately, for a page that shows them in columns.

        The methods are the index itself, the index of words, the dense vectors and late
        interaction, as far as this server has them. Late interaction reranks the candidates of the
        index.

        Args:
            body: body of the search.
            request: the search that it describes.
            vector: vector of the query; ``None`` for an index of words.

        Returns:
            Name of each method -> its run.
        """
        searchable = self.searchable
        depth = max(body.hits, RERANK_DEPTH)
        search = SearchRequest(depth, request.feedback, by=body.by, where=request.where)
        ranking = await self._rank(body.query, vector, search)
        columns = dict(ranking.stages)
        if searchable.words is not None:
            columns["words"] = await self._query_index(
                searchable.searcher.second_run,
                {QUERY: body.query},
                depth,
                request,
            )
        if searchable.dense is not None:
            outcome = await self.service.encode("dense", [body.query], EncodeOptions("query"))
            scores = await self._query_index(
                searchable.search_dense,
                outcome.rows[0],
                depth,
                request.where,
            )
            columns["dense"] = {QUERY: scores}
        late_depth = depth
        if searchable.store is None:
            # Candidates are encoded now, and their number is limited.
            late_depth = min(depth, self._max_encoded)
        if searchable.features["rerank"] and ranking.run[QUERY] and late_depth:
            reranked = await self._rerank(Reranking(late_depth), body.query, ranking)
            columns["late"] = reranked.stages["late"]
        return columns

    def _render(
        self,
        body: SearchBody,
        ranking: Ranking,
        columns: dict[str, Run],
        seconds: dict[str, float],
        brief: bool,
    ) -> bytes:
        """Return the JSON of an answer; runs in a helper thread, because it reads documents.

        Args:
            body: body of the search.
            ranking: the final ranking.
            columns: run of each method; empty if the body does not ask for them.
            seconds: duration of each stage.
            brief: leave out durations.
        """
        query: Explanation = {"text": body.query}
        if body.explain:
            query.update(self.searchable.explain_query(ranking, body.query))
        hits = list(ranking.run[QUERY].items())[: body.hits]
        answer: Explanation = {
            "api": "v1",
            "index": self.searchable.name,
            "query": query,
            "candidates": [
                self._candidate(body, ranking, result_id, score, rank)
                for rank, (result_id, score) in enumerate(hits, start=1)
            ],
        }
        if columns:
            answer["columns"] = {
                method: self._column(run[QUERY], body.hits, body.by)
                for method, run in columns.items()
            }
        if not brief:
            answer["milliseconds"] = {
                stage: round(1000 * value, 3) for stage, value in seconds.items()
            }
        return to_json(answer)

    def _candidate(
        self,
        body: SearchBody,
        ranking: Ranking,
        result_id: str,
        score: float,
        rank: int,
    ) -> dict[str, Any]:
        """Return an entry of the answer: a document with its score, and its explanation.

        Args:
            body: options of the search.
            ranking: the ranking.
            result_id: id of a document or of a passage.
            score: its score.
            rank: its rank, from 1.
        """
        document, passage = self.searchable.document_and_passage(ranking, result_id)
        candidate: dict[str, Any] = {
            "docid": passage.document if passage else result_id,
            "score": score,
            "rank": rank,
            "doc": _document_json(document, body.parse),
        }
        if passage:
            candidate["passage"] = passage.shown(document)
        if body.explain:
            candidate["explanation"] = self.searchable.explain_document(ranking, result_id)
        return candidate

    def _column(
        self,
        scores: dict[str, float],
        n_hits: int,
        by: Literal["document", "passage"],
    ) -> list[dict[str, Any]]:
        """Return the highest hits of one method, with titles.

        Args:
            scores: score of each document or passage, highest first.
            n_hits: number of hits.
            by: what the scores rank.
        """
        column = []
        for rank, (result_id, score) in enumerate(list(scores.items())[:n_hits], start=1):
            document_id = document_of(result_id) if by == "passage" else result_id
            document = self.searchable.documents.get(document_id)
            entry = {
                "docid": document_id,
                "score": score,
                "rank": rank,
                "title": document.title if document else "",
            }
            column.append(entry)
        return column


def _filter(body: SearchBody) -> Filter | None:
    """Create the filter of a search; ``None`` without one."""
    if body.where is None and body.where_not is None:
        return None
    try:
        return Filter(body.where or {}, body.where_not or {})
    except ValueError as error:
        raise invalid(str(error)) from error


def _document_json(document: Document | None, parse: bool) -> Any:
    """Return a document as an object, or as the text of its JSON."""
    if document is None:
        return None
    fields = {"id": document.id, "title": document.title, "text": document.text}
    return fields if parse else json.dumps(fields, ensure_ascii=False)


def _parse_options(
    options_class: Callable[..., T],
    body_class: Callable[[], Body],
    value: Body | bool,
    name: str,
) -> T | None:
    """Create the options of feedback, fusion or reranking.

    Args:
        options_class: class of the options.
        body_class: class of the body, for the defaults.
        value: the body's value; True selects the defaults, False disables the feature.
        name: field of the body, for error messages.
    """
    if value is False:
        return None
    body = body_class() if value is True else value
    try:
        return options_class(**body.model_dump())
    except ValueError as error:
        raise invalid(f"`{name}`: {error}") from error
