"""``/v1/{index}/search`` and ``/v1/{index}/doc``: Anserini's REST form, and a POST that can do
more.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from fastapi import APIRouter, Request, Response
from pydantic import ConfigDict, Field

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
from tilefold.serve.bodies import Body, ServeError, invalid, plain
from tilefold.serve.endpoints import JSON, add_route
from tilefold.serve.searchable import QUERY, Explanation, Searchable
from tilefold.serve.service import EncodeOptions, Service

MOST_WEIGHT = (
    1000.0  # of the parts of a query after feedback, whose proportions alone order documents
)
_AWAY = "the index is on a server that does not answer; the log says why"
_NEEDS = {
    "explain": "--vectors, and an index of vectors",
    "prf": "--vectors, and an index of vectors, or one of dense vectors",
    "fusion": "--bm25, and an index of vectors",
    "rerank": "--tokens (and --data, if that is a model)",
}
T = TypeVar("T")
_Vector: TypeAlias = (
    SparseVectors | TokenVectors | torch.Tensor | None
)  # of the query, as the index takes it


class _Strict(Body):
    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)


class FusionBody(_Strict):
    """Fusion with the index of words; ``weight`` and ``normalization`` are of an interpolation."""

    method: Literal["rrf", "interpolation"] = Fusion.method
    weight: float = Field(default=Fusion.weight, ge=0, le=1)
    normalization: Normalization = Fusion.normalization


class FeedbackBody(_Strict):
    """Feedback, as ``tilefold search --prf``."""

    method: Literal["average", "rocchio"] = Feedback.method
    depth: int | None = Field(default=Feedback.depth, ge=1, le=100)
    alpha: float | None = Field(default=Feedback.alpha, ge=0, le=MOST_WEIGHT)
    beta: float | None = Field(default=Feedback.beta, ge=0, le=MOST_WEIGHT)
    gamma: float = Field(default=Feedback.gamma, ge=0, le=MOST_WEIGHT)
    bottom: int = Field(default=Feedback.bottom, ge=0, le=100)
    top_terms: int | None = Field(default=Feedback.top_terms, ge=1)
    equal_lengths: bool | None = Feedback.equal_lengths


class RerankBody(_Strict):
    """Reranking, as ``tilefold search --rerank``: of the best `depth`, with `weight` for MaxSim
    beside first scores.
    """

    depth: int = Field(default=RERANK_DEPTH, ge=1)
    weight: float | None = Field(default=None, ge=0, le=1)


class SearchBody(_Strict):
    """A search; ``true`` stands for the defaults of fusion, feedback and reranking."""

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
    """The routes of the index of a service; without one, ``/v1/indexes`` says so."""
    if service.searchable is not None:
        return _SearchRoutes(service, service.searchable).router()
    router = APIRouter(prefix="/v1")

    async def none(request: Request) -> Response:
        return Response(plain({"indexes": []}), media_type=JSON)

    add_route(router, service, "/indexes", none, "This server has no index")
    return router


class _SearchRoutes:
    def __init__(self, service: Service, searchable: Searchable) -> None:
        self.service, self.searchable = service, searchable
        self._away = 0.0  # when the server of the index last failed to answer

    def router(self) -> APIRouter:
        router = APIRouter(prefix="/v1")
        add = functools.partial(add_route, router, self.service)
        add("/indexes", self.indexes, "The index, and what it can be asked for")
        add("/{index}/search", self.get_search, "Ranked documents, as Anserini answers")
        add("/{index}/doc/{docid:path}", self.get_document, "A document, as Anserini answers")
        more = "Ranked documents, with fusion, feedback, reranking and explanations"
        add("/{index}/search", self.post_search, more, SearchBody)
        return router

    async def indexes(self, request: Request) -> Response:
        index, found = self.searchable.index, self.searchable
        count = await self._asked(lambda: index.n_documents)
        described = {
            "name": found.name,
            "backend": index.backend,
            "documents": count,
            "features": found.features,
        }
        return Response(plain({"indexes": [described]}), media_type=JSON)

    async def get_search(self, request: Request) -> Response:
        self._check_index(request)
        query, hits = request.query_params.get("query", ""), request.query_params.get("hits", "10")
        parse = request.query_params.get("parse", "true").lower()
        if not query.strip():
            raise ServeError("Empty", "Parameter 'query' is required")
        if not (hits.isascii() and hits.isdigit() and len(hits) < 10 and int(hits) > 0):
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
        self._check_index(request)
        if not body.query.strip():
            raise ServeError("Empty", "`query` cannot be empty")
        return await self._answer(body, request)

    async def get_document(self, request: Request) -> Response:
        self._check_index(request)
        name = request.path_params["docid"]
        if not self.searchable.documents:
            raise ServeError(
                "Validation",
                "this server shows no documents: start it with --data",
                status=404,
            )
        if (
            document := await self.service.run_in_helper(self.searchable.documents.get, name)
        ) is None:
            raise ServeError("Validation", f"there is no document {name!r}", status=404)
        answer = {
            "api": "v1",
            "index": self.searchable.name,
            "docid": name,
            "doc": _shown(document, True),
        }
        return Response(plain(answer), media_type=JSON)

    def _check_index(self, request: Request) -> None:
        if request.path_params["index"] != self.searchable.name:
            raise ServeError(
                "Validation",
                f"the index of this server is {self.searchable.name!r}",
                status=404,
            )

    def _check(self, body: SearchBody, reranking: Reranking | None) -> None:
        """Refuse what the index was not started with."""
        most = self.service.limits.max_hits
        for name, value in (
            ("hits", body.hits),
            ("rerank.depth", None if reranking is None else reranking.depth),
        ):
            if value is not None and value > most:
                raise invalid(f"`{name}` expected at most {most}, got {value}")
        features = self.searchable.features
        if body.by == "passage" and not features["passages"]:
            raise invalid(
                "`by` expected 'document', the index is of whole documents; got 'passage'",
            )
        for name, needed in _NEEDS.items():
            if getattr(body, name) is not False and not features[name]:
                raise invalid(f"`{name}`: this server was started without what it needs: {needed}")

    async def _answer(self, body: SearchBody, request: Request) -> Response:
        feedback = _record(Feedback, FeedbackBody, body.prf, "prf")
        fusion = _record(Fusion, FusionBody, body.fusion, "fusion")
        reranking = _record(Reranking, RerankBody, body.rerank, "rerank")
        asked = SearchRequest(body.hits, feedback, None, fusion, reranking, body.by, _filter(body))
        self._check(body, reranking)
        try:
            return await self._searched(body, asked, brief=request.method == "GET")
        except MissingDocumentError as error:  # added to an index that can be added to
            option = {"vectors": "--vectors", "documents": "--data"}[error.argument]
            message = (
                f"the index has a document {error.document!r} that {option} of this server lacks"
            )
            raise ServeError("Backend", message) from error

    async def _searched(self, body: SearchBody, request: SearchRequest, brief: bool) -> Response:
        service, times = self.service, dict[str, float]()
        service.check_size([body.query], self.searchable.encoder, "query", "query")
        with service.input_limit.acquire(1):
            started, vector = time.perf_counter(), None

            def lap(name: str) -> None:
                times[name] = time.perf_counter() - started - sum(times.values())

            if self.searchable.encoder is not None:
                outcome = await service.encode(
                    self.searchable.encoder.kind,
                    [body.query],
                    EncodeOptions("query"),
                )
                vector = self.searchable.query_vector(outcome.rows[0])
            lap("encode")
            ranking = await self._rank(body.query, vector, request)
            lap("search")
            if request.reranking is not None and ranking.run[QUERY]:
                ranking = await self._rerank(request.reranking, body.query, ranking)
                lap("rerank")
            columns: dict[str, Run] = {}
            if body.columns:
                columns = await self._columns(body, request, vector)
                lap("columns")
            content = await service.run_in_helper(
                self._rendered, body, ranking, columns, times, brief
            )
        service.metrics.count("tilefold_search_count")
        service.metrics.observe("tilefold_search_duration", times["search"])
        return Response(content, media_type=JSON)

    async def _rank(self, text: str, vector: _Vector, request: SearchRequest) -> Ranking:
        try:
            return await self._asked(self.searchable.searcher.rank, {QUERY: text}, request, vector)
        except MissingDocumentError:
            raise
        except ValueError as error:
            message = str(error)
            of_feedback = request.feedback is not None and not message.startswith("where")
            raise invalid(f"`prf`: {message}" if of_feedback else message) from error

    async def _asked(self, work: Callable[..., T], *args: Any) -> T:
        """Ask the index, in a thread: it may be on a server, which may be away."""
        came, away = time.monotonic(), ServeError("Unhealthy", _AWAY)

        def ask() -> T:
            if self._away > came:  # it failed another request while this one waited for a thread
                raise away
            try:
                return work(*args)
            except (ConnectionError, PermissionError) as error:
                self._away = time.monotonic()
                self.service.log_failure(error)
                raise away from error

        return await self.service.run_search(ask)

    @property
    def _encodable(self) -> int:
        """The most candidates that a search may encode, which itself has a permit."""
        return self.service.input_limit.total - 1

    async def _rerank(self, reranking: Reranking, text: str, ranking: Ranking) -> Ranking:
        """The ranking with its best candidates in the order of MaxSim, or of both scores."""
        service, found = self.service, self.searchable
        asked = await service.encode("multi-vector", [text], EncodeOptions("query"))
        size, candidates = asked.rows[0].size(1), None
        query = TokenVectors.pack([QUERY], asked.rows, size, "fp32")
        if found.store is None:
            if min(len(ranking.run[QUERY]), reranking.depth or RERANK_DEPTH) > self._encodable:
                raise invalid(
                    f"`rerank.depth` expected at most {self._encodable}, got {reranking.depth}",
                )
            wanted = await service.run_in_helper(found.searcher.rerank_texts, ranking, reranking)
            names, texts = list(wanted), [text or " " for text in wanted.values()]
            with service.input_limit.acquire(len(texts)):
                encoded = await service.encode(
                    "multi-vector",
                    texts,
                    EncodeOptions("document", truncate=True),
                )
            candidates = TokenVectors.pack(names, encoded.rows, size, "fp32")
        work = functools.partial(
            found.searcher.rerank,
            {QUERY: text},
            ranking,
            reranking,
            query,
            candidates,
        )
        return await service.run_on_device(service.model("multi-vector"), work)

    async def _columns(
        self,
        body: SearchBody,
        request: SearchRequest,
        vector: _Vector,
    ) -> dict[str, Run]:
        """The ranking of each method alone; that of late interaction is of the candidates of the
        index.
        """
        found, depth = self.searchable, max(body.hits, RERANK_DEPTH)
        late = depth if found.store is not None else min(depth, self._encodable)
        alone = SearchRequest(depth, request.feedback, by=body.by, where=request.where)
        ranking = await self._rank(body.query, vector, alone)
        columns = dict(ranking.stages)
        if found.words is not None:
            columns["words"] = await self._asked(
                found.searcher.second_run,
                {QUERY: body.query},
                depth,
                request,
            )
        if found.dense is not None:
            outcome = await self.service.encode("dense", [body.query], EncodeOptions("query"))
            columns["dense"] = {
                QUERY: await self._asked(found.search_dense, outcome.rows[0], depth, request.where),
            }
        if found.features["rerank"] and ranking.run[QUERY] and late:
            columns["late"] = (await self._rerank(Reranking(late), body.query, ranking)).stages[
                "late"
            ]
        return columns

    def _rendered(
        self,
        body: SearchBody,
        ranking: Ranking,
        columns: dict[str, Run],
        times: dict[str, float],
        brief: bool,
    ) -> bytes:
        """The answer, in a helper thread: documents are read from their file."""
        found, query = self.searchable, Explanation(text=body.query)
        candidates = []
        for rank, (name, score) in enumerate(
            list(ranking.run[QUERY].items())[: body.hits],
            start=1,
        ):
            document, passage = found.owner(ranking, name)
            docid = passage.document if passage else name
            entry = {
                "docid": docid,
                "score": score,
                "rank": rank,
                "doc": _shown(document, body.parse),
            }
            entry |= {"passage": passage.shown(document)} if passage else {}
            candidates.append(
                entry
                | ({"explanation": found.explain_document(ranking, name)} if body.explain else {}),
            )
        if body.explain:
            query |= found.explain_query(ranking, body.query)
        answer: Explanation = {
            "api": "v1",
            "index": found.name,
            "query": query,
            "candidates": candidates,
        }
        if columns:
            answer["columns"] = {
                name: self._column(run[QUERY], body.hits, body.by) for name, run in columns.items()
            }
        if not brief:
            answer["milliseconds"] = {name: round(1000 * value, 3) for name, value in times.items()}
        return plain(answer)

    def _column(self, scores: dict[str, float], hits: int, by: str) -> list[dict[str, Any]]:
        best, documents = list(scores.items())[:hits], self.searchable.documents
        owner = document_of if by == "passage" else str
        named = [(owner(name), score, documents.get(owner(name))) for name, score in best]
        return [
            {
                "docid": name,
                "score": score,
                "rank": rank,
                "title": document.title if document else "",
            }
            for rank, (name, score, document) in enumerate(named, start=1)
        ]


def _filter(body: SearchBody) -> Filter | None:
    if body.where is None and body.where_not is None:
        return None
    try:
        return Filter(body.where or {}, body.where_not or {})
    except ValueError as error:
        raise invalid(str(error)) from error


def _shown(document: Document | None, parse: bool) -> Any:
    """A document as an object, or as the text of its JSON."""
    if document is None:
        return None
    fields = {"id": document.id, "title": document.title, "text": document.text}
    return fields if parse else json.dumps(fields, ensure_ascii=False)


def _record(
    kind: Callable[..., T],
    default: Callable[[], Body],
    given: Body | bool,
    name: str,
) -> T | None:
    if given is False:
        return None
    try:
        return kind(**(default() if given is True else given).model_dump())
    except ValueError as error:
        raise invalid(f"`{name}`: {error}") from error
