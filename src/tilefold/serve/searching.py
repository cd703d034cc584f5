"""Search routes: Anserini's REST API, and a POST with fusion, feedback and reranking."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar
from urllib.parse import quote

import torch
from fastapi import APIRouter, Request, Response
from pydantic import Field

from tilefold._internal.arguments import ArgumentError
from tilefold.retrieval.common.runs import Run
from tilefold.retrieval.data.collection import Document
from tilefold.retrieval.data.metadata import Filter
from tilefold.retrieval.data.pages import Page
from tilefold.retrieval.data.passages import document_of
from tilefold.retrieval.encoding.scored_tokens import query_tokens
from tilefold.retrieval.errors import ArgumentDataError, DataError, MissingDocumentError
from tilefold.retrieval.search.feedback import Feedback
from tilefold.retrieval.search.fusion import Fusion, Normalization
from tilefold.retrieval.search.reranking import Reranking
from tilefold.retrieval.search.searcher import RERANK_DEPTH, Ranking, SearchRequest
from tilefold.retrieval.vectors.sparse_files import SparseVectors
from tilefold.retrieval.vectors.tokens import TokenVectors
from tilefold.serve.bodies import Body, ServeError, StrictBody, invalid_input_error, to_json
from tilefold.serve.endpoints import JSON, add_route
from tilefold.serve.images import ImageInput, jpeg_of
from tilefold.serve.models import Served
from tilefold.serve.searchable import QUERY, Explanation, Searchable
from tilefold.serve.service import EncodeOptions, Service

if TYPE_CHECKING:
    from PIL.Image import Image

    from tilefold.retrieval.search.token_matches import Explanation as TokenExplanation

# Pages that a search decodes and encodes before it decodes the next ones.
PAGES_AT_ONCE = 8
# Largest width of an image that is shown, in pixels.
MAX_IMAGE_WIDTH = 4000
# Largest position of a token of a query; longer queries are refused before.
MAX_TOKEN_POSITION = 100_000
# Largest weight of a part of the query in feedback. Only the proportions of weights matter.
MAX_WEIGHT = 1000.0
# Field of a body -> options with which the server must be started to support it.
_REQUIRED_OPTIONS = {
    "explain": (
        "--vectors and an index of sparse vectors, or --data and one of token vectors that was "
        "built without --pool-factor"
    ),
    "prf": "--vectors, and an index of vectors, or one of dense vectors",
    "fusion": "--bm25, and an index of vectors",
    "rerank": "--tokens (and --data, if that is a model)",
}
T = TypeVar("T")
_QueryVector: TypeAlias = SparseVectors | TokenVectors | torch.Tensor | None
"""Vector of a query with which an index searches; ``None`` for a BM25 index."""


class _Stopwatch:
    """Durations of consecutive stages.

    Attributes:
        seconds: stage -> its duration.
    """

    def __init__(self) -> None:
        """Start the first stage."""
        self.seconds: dict[str, float] = {}
        self._stage_started = time.perf_counter()

    def end_stage(self, stage: str) -> None:
        """Record the duration of a stage, and start the next one."""
        now = time.perf_counter()
        self.seconds[stage] = now - self._stage_started
        self._stage_started = now


@dataclass(frozen=True)
class _TokenMatches:
    """Tokens of a query, and the tokens of documents that they match.

    Attributes:
        tokens: for each token of the query, the ``token`` and whether it is ``content``, that is,
            spells a word.
        matches: id of a hit -> one record per token of the query.
        error: why there are no matches; ``None`` if there are.
    """

    tokens: list[dict[str, Any]] = field(default_factory=list)
    matches: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    error: str | None = None


class FusionBody(StrictBody):
    """Options of fusion with the BM25 index.

    ``weight`` and ``normalization`` apply to interpolation only.
    """

    method: Literal["rrf", "interpolation"] = Fusion.method
    weight: float = Field(default=Fusion.weight, ge=0, le=1)
    normalization: Normalization = Fusion.normalization


class FeedbackBody(StrictBody):
    """Options of feedback, like those of ``tilefold search --prf``."""

    method: Literal["average", "rocchio"] = Feedback.method
    depth: int | None = Field(default=Feedback.depth, ge=1, le=100)
    alpha: float | None = Field(default=Feedback.alpha, ge=0, le=MAX_WEIGHT)
    beta: float | None = Field(default=Feedback.beta, ge=0, le=MAX_WEIGHT)
    gamma: float = Field(default=Feedback.gamma, ge=0, le=MAX_WEIGHT)
    bottom: int = Field(default=Feedback.bottom, ge=0, le=100)
    top_terms: int | None = Field(default=Feedback.top_terms, ge=1)
    equal_lengths: bool | None = Feedback.equal_lengths


class RerankBody(StrictBody):
    """Options of reranking, like those of ``tilefold search --rerank``.

    The best ``depth`` documents are reranked. ``weight`` is the weight of MaxSim in an
    interpolation with the first scores.
    """

    depth: int = Field(default=RERANK_DEPTH, ge=1)
    weight: float | None = Field(default=None, ge=0, le=1)


class SearchBody(StrictBody):
    """Body of a search. ``true`` selects the defaults of fusion, feedback or reranking."""

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
    """Create the search routes of a service. Without an index, there is only ``/v1/indexes``."""
    if service.searchable is not None:
        return _SearchRoutes(service).router()
    router = APIRouter(prefix="/v1")

    async def no_indexes(request: Request) -> Response:
        _check_parameters(request, [])
        return Response(to_json({"indexes": []}), media_type=JSON)

    add_route(router, service, "/indexes", no_indexes, "This server has no index")
    return router


def _check_parameters(request: Request, accepted: Sequence[str]) -> None:
    """Raise ``ServeError`` with status 422 for an unknown query parameter of a GET request.

    Args:
        request: the request.
        accepted: names of the parameters of the route.
    """
    for name in request.query_params:
        if name in accepted:
            continue
        if not accepted:
            raise invalid_input_error(f"unknown query parameter '{name}', expected none")
        message = f"unknown query parameter '{name}', expected one of {', '.join(accepted)}"
        if name in SearchBody.model_fields:
            message += f"; the body of a POST to this path takes `{name}`"
        raise invalid_input_error(message)


class _IndexReader:
    """Runs functions that read an index in threads; the index may be on a server."""

    def __init__(self, service: Service) -> None:
        """Create a reader that uses the search threads of a service."""
        self._service = service
        self._last_failure = 0.0  # time.monotonic() when the index's server did not answer

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a function that reads the index in a thread.

        When a request finds that the server of the index does not answer, all requests that wait
        for a thread at that time fail, too. Otherwise each of them would wait for another time-out.

        Args:
            function: function that reads the index.
            arguments: positional arguments of the function.

        Raises:
            ServeError: if the index is on a server that does not answer.
        """
        arrived = time.monotonic()

        def run() -> T:
            """Call the function, unless the server of the index failed in the meantime."""
            if self._last_failure > arrived:  # while this request waited for a thread
                raise _unreachable_error()
            try:
                return function(*arguments)
            # Qdrant's client raises a PermissionError if the server refuses the key.
            except (ConnectionError, PermissionError) as error:
                self._last_failure = time.monotonic()
                self._service.log_failure(error)
                raise _unreachable_error() from error

        return await self._service.run_search(run)


class _SearchRoutes:
    """Routes that search the index of a service.

    Each request is answered from one generation of the index, even if another one takes over before
    the request ends.
    """

    def __init__(self, service: Service) -> None:
        """Prepare the routes.

        Args:
            service: service with an index, which encodes queries.
        """
        self.service = service
        self._reader = _IndexReader(service)

    @property
    def searchable(self) -> Searchable:
        """The generation of the index that answers new requests."""
        searchable = self.service.searchable
        if searchable is None:  # the routes exist only for a service with an index
            raise ServeError("Backend", "this server has no index")
        return searchable

    def router(self) -> APIRouter:
        """Create the router with the routes for searches, documents and ``/v1/indexes``."""
        router = APIRouter(prefix="/v1")
        add = functools.partial(add_route, router, self.service)
        add("/indexes", self.indexes, "The index, and what it can be asked for")
        add("/{index}/search", self.get_search, "Ranked documents, as Anserini answers")
        add("/{index}/doc/{docid:path}", self.get_document, "A document, as Anserini answers")
        add("/{index}/image/{docid:path}", self.get_image, "A page image, or its heat map")
        summary = "Ranked documents, with fusion, feedback, reranking and explanations"
        add("/{index}/search", self.post_search, summary, SearchBody)
        return router

    async def indexes(self, request: Request) -> Response:
        """Answer with a description of the index."""
        _check_parameters(request, [])
        searchable = self.searchable
        index = searchable.index
        description = {
            "name": searchable.name,
            "backend": index.backend,
            "generation": searchable.generation,
            "documents": await self._reader.run(lambda: index.n_documents),
            "features": searchable.features,
        }
        return Response(to_json({"indexes": [description]}), media_type=JSON)

    async def get_search(self, request: Request) -> Response:
        """Answer a search in Anserini's format.

        The URL has the parameters ``query``, ``hits`` (the number of documents), and ``parse``
        (whether documents are objects, instead of strings with their JSON).
        """
        self._check_index(request)
        _check_parameters(request, ["query", "hits", "parse"])
        query = request.query_params.get("query", "")
        hits = request.query_params.get("hits", "10")
        parse = request.query_params.get("parse", "true").lower()
        if not query.strip():
            raise ServeError("Empty", "Parameter 'query' is required")
        # Numbers with 10 digits or more exceed any limit, and may be too long to convert.
        is_short_number = hits.isascii() and hits.isdigit() and len(hits) < 10
        if not is_short_number or int(hits) == 0:
            raise ServeError(
                "Validation",
                "Parameter 'hits' must be a positive integer",
                status=400,
            )
        if parse not in ("true", "false"):
            raise ServeError("Validation", "Parameter 'parse' must be true or false", status=400)
        body = SearchBody(query=query, hits=int(hits), parse=parse == "true")
        # Anserini's format has no durations.
        return await self._search().answer(body, with_durations=False)

    async def post_search(self, body: SearchBody, request: Request) -> Response:
        """Answer a search with fusion, feedback, reranking or explanations."""
        self._check_index(request)
        if not body.query.strip():
            raise ServeError("Empty", "`query` cannot be empty")
        return await self._search().answer(body, with_durations=True)

    async def get_document(self, request: Request) -> Response:
        """Answer with the document of an id, in Anserini's format."""
        self._check_index(request)
        _check_parameters(request, [])
        document_id = request.path_params["docid"]
        searchable = self.searchable
        if not searchable.documents:
            raise ServeError(
                "Validation",
                "this server shows no documents: start it with --data",
                status=404,
            )
        document = await self.service.run_in_thread(searchable.documents.get, document_id)
        if document is None:
            raise ServeError("Validation", f"there is no document {document_id!r}", status=404)
        answer = {
            "api": "v1",
            "index": searchable.name,
            "docid": document_id,
            "doc": _document_json(document, parse=True),
        }
        return Response(to_json(answer), media_type=JSON)

    async def get_image(self, request: Request) -> Response:
        """Answer with the image of a page of the collection as JPEG.

        The URL may have the parameters ``width`` (the largest width in pixels), ``query`` (a text,
        for the heat map of the page) and ``token`` (the position of a token of the query; without
        it, the heat map is that of all words of the query).
        """
        self._check_index(request)
        _check_parameters(request, ["width", "query", "token"])
        width = _integer_parameter(request, "width", smallest=1, largest=MAX_IMAGE_WIDTH)
        token_position = _integer_parameter(
            request,
            "token",
            smallest=0,
            largest=MAX_TOKEN_POSITION,
        )
        query = request.query_params.get("query", "")
        if token_position is not None and not query.strip():
            raise invalid_input_error("`token` requires `query`")
        search = self._search()
        with self.service.input_limit.acquire(1):
            content = await search.page_image(
                request.path_params["docid"],
                width or MAX_IMAGE_WIDTH,
                query,
                token_position,
            )
        return Response(content, media_type="image/jpeg")

    def _check_index(self, request: Request) -> None:
        """Raise ``ServeError`` if the URL of a request names another index."""
        if request.path_params["index"] != self.searchable.name:
            raise ServeError(
                "Validation",
                f"the index of this server is {self.searchable.name!r}",
                status=404,
            )

    def _search(self) -> _Search:
        """Create the search of a request, in the current generation of the index."""
        return _Search(self.service, self.searchable, self._reader)


@dataclass(frozen=True)
class _Search:
    """Search of one request in one generation (committed state) of an index.

    The memory of the generation is freed when no request refers to it any more.

    Attributes:
        service: service that encodes queries.
        searchable: index with its models and documents.
        reader: runs functions that read the index.
    """

    service: Service
    searchable: Searchable
    reader: _IndexReader

    async def page_image(
        self,
        document_id: str,
        width: int,
        query: str = "",
        token_position: int | None = None,
    ) -> bytes:
        """Return a page as JPEG, with a heat map of the places that match a query if there is one.

        Args:
            document_id: id of the page.
            width: largest width in pixels.
            query: text of the query; empty for the page without a heat map.
            token_position: position of the token of the query whose matches are drawn; ``None``
                draws those of all words of the query.
        """
        service = self.service
        image = await service.run_in_thread(
            self._read_page,
            document_id,
            pool="tokenizers",
        )
        if query.strip():
            explanation = await self._explain_page(query, document_id, image)
            n_query_tokens = len(explanation.matches)
            if token_position is not None and token_position >= n_query_tokens:
                raise invalid_input_error(
                    f"`token` expected a position below {n_query_tokens}, the tokens of the query; "
                    f"got {token_position}",
                )
            image = await service.run_in_thread(explanation.draw, image, token_position)
        return await service.run_in_thread(jpeg_of, image, width)

    def _read_page(self, document_id: str) -> Image:
        """Decode or render a page of the collection; runs in a helper thread.

        Args:
            document_id: id of the document.

        Raises:
            ServeError: if there is no such document, it is a text, or its file cannot be read.
        """
        document = self.searchable.documents.get(document_id)
        if document is None:
            raise ServeError("Validation", f"there is no document {document_id!r}", status=404)
        if document.page is None:
            raise ServeError(
                "Validation",
                f"the document {document_id!r} is a text, and has no image",
                status=404,
            )
        try:
            return document.page.image(
                self.searchable.searcher.page_dpi(),
                self.service.limits.max_image_pixels,
            )
        except DataError as error:  # its message has the path of the file, which stays in the log
            self.service.log_failure(error)
            message = f"the page {document_id!r} cannot be read; the log says why"
            raise ServeError("Backend", message) from error

    async def _explain_page(
        self,
        query: str,
        document_id: str,
        image: Image,
    ) -> TokenExplanation:
        """Return which parts of a page each token of a query matches.

        Args:
            query: text of the query.
            document_id: id of the document.
            image: the page.

        Raises:
            ServeError: if the index has no token vectors, or not those of the page. The status is
                404 if the page is in the collection, and not in the index.
        """
        searchable = self.searchable
        encoder = searchable.encoder
        if encoder is None or not searchable.explains_tokens:
            raise invalid_input_error(
                "`query`: heat maps need an index of token vectors without --pool-factor"
            )
        self.service.check_size([query], encoder, "query", "query")

        def explain() -> TokenExplanation:
            explained = searchable.searcher.explain_items(query, {document_id: image})
            return explained[document_id]

        try:
            return await self._run_explanation(encoder, explain)
        except MissingDocumentError as error:
            raise ServeError(
                "Validation",
                f"the index has no document {document_id!r}",
                status=404,
            ) from error

    async def _run_explanation(self, encoder: Served, explain: Callable[[], T]) -> T:
        """Run a function that explains scores by tokens, in the batch worker of a model.

        The worker's thread is the only one that may use the model and its tokenizer.

        Args:
            encoder: the model.
            explain: the function.

        Raises:
            ServeError: if the vectors of a document are not one per token.
            MissingDocumentError: if the index does not have a document.
        """

        def run() -> T:
            try:
                return explain()
            except MissingDocumentError:
                raise
            except ArgumentDataError as error:  # its message has no path
                raise ServeError("Backend", str(error)) from error

        return await self.service.run_on_device(encoder, run)

    async def _match_tokens(self, query: str, ranking: Ranking, n_hits: int) -> _TokenMatches:
        """Return the tokens of the query, and the tokens that they match in the best hits.

        Hits that are page images are left out: their matches are drawn as heat maps, for which the
        client sends further requests. If the index does not have one vector per token of a text,
        there is an error instead of matches.

        Args:
            query: text of the query.
            ranking: the ranking.
            n_hits: number of hits that are shown.
        """
        searchable = self.searchable
        encoder = searchable.encoder
        if encoder is None:
            return _TokenMatches()

        def match() -> _TokenMatches:
            """Find the matches of hits that are texts; runs in the thread of the model."""
            tokens = query_tokens(encoder.model, query)
            # The ranking has hits of each stage by query id; only those of the index have vectors.
            stage = searchable.searcher.stage
            hits_of_index = ranking.stages[stage][QUERY]
            # Document id -> id of the passage that was scored, for an index of passages.
            passage_of_hit = ranking.passages.get(stage, {}).get(QUERY, {})
            vector_ids = {}
            for hit_id in list(ranking.run[QUERY])[:n_hits]:
                document, _ = searchable.document_and_passage(ranking, hit_id)
                is_text = document is not None and document.page is None
                if is_text and hit_id in hits_of_index:
                    vector_ids[hit_id] = passage_of_hit.get(hit_id, hit_id)
            try:
                explained = searchable.searcher.explain(query, vector_ids.values())
            except MissingDocumentError:
                raise
            except ArgumentDataError as error:
                # Pooled vectors, for example, are not one per token. The hits do not need them.
                return _TokenMatches(tokens, error=str(error))
            matches = {
                hit_id: [match.as_json() for match in explained[vector_id].matches]
                for hit_id, vector_id in vector_ids.items()
            }
            return _TokenMatches(tokens, matches)

        return await self._run_explanation(encoder, match)

    def _check_options(self, body: SearchBody, reranking: Reranking | None) -> None:
        """Refuse too many documents, and features that this server does not support.

        Args:
            body: body of the search.
            reranking: options of reranking in the body; ``None`` without reranking.

        Raises:
            ServeError: naming the field and the option of ``tilefold serve`` that it needs.
        """
        max_hits = self.service.limits.max_hits
        if body.hits > max_hits:
            raise invalid_input_error(f"`hits` expected at most {max_hits}, got {body.hits}")
        if reranking is not None and reranking.depth is not None and reranking.depth > max_hits:
            raise invalid_input_error(
                f"`rerank.depth` expected at most {max_hits}, got {reranking.depth}"
            )
        features = self.searchable.features
        if body.by == "passage" and not features["passages"]:
            raise invalid_input_error(
                "`by` expected 'document', the index is of whole documents; got 'passage'",
            )
        for name, options in _REQUIRED_OPTIONS.items():
            is_requested = getattr(body, name) is not False  # true, or an object with options
            if is_requested and not features[name]:
                raise invalid_input_error(
                    f"`{name}`: this server was started without what it needs: {options}"
                )

    async def answer(self, body: SearchBody, *, with_durations: bool) -> Response:
        """Parse and check the options of a search, and answer it.

        Args:
            body: body of a POST, or the same fields from the query parameters of a GET.
            with_durations: whether the response has the duration of each stage.

        Raises:
            ServeError: if options are invalid, or the server lacks the text or vector of a
                document.
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
            where=_parse_filter(body),
        )
        self._check_options(body, reranking)
        try:
            return await self._search(body, search, with_durations)
        except MissingDocumentError as error:  # the document was added to the index later
            option = "--vectors" if error.arguments == ("vectors",) else "--data"
            message = (
                f"the index has a document {error.document!r} that {option} of this server lacks"
            )
            raise ServeError("Backend", message) from error

    async def _search(
        self,
        body: SearchBody,
        request: SearchRequest,
        with_durations: bool,
    ) -> Response:
        """Encode a query, search, rerank, and create the response.

        Args:
            body: the validated JSON of the request.
            request: options of the search, which were parsed from the body.
            with_durations: whether the response has the duration of each stage.
        """
        service = self.service
        service.check_size([body.query], self.searchable.encoder, "query", "query")
        with service.input_limit.acquire(1):
            stopwatch = _Stopwatch()
            vector = None
            if self.searchable.encoder is not None:
                outcome = await service.encode(
                    self.searchable.encoder,
                    [body.query],
                    EncodeOptions("query"),
                )
                vector = self.searchable.query_vector(outcome.rows[0])
            stopwatch.end_stage("encode")
            ranking = await self._rank(body.query, vector, request)
            stopwatch.end_stage("search")
            if request.reranking is not None and ranking.run[QUERY]:
                ranking = await self._rerank(request.reranking, body.query, ranking)
                stopwatch.end_stage("rerank")
            runs_by_method: dict[str, Run] = {}
            if body.columns:  # the page shows the ranking of each method in a column
                runs_by_method = await self._rank_by_each_method(body, request, vector)
                stopwatch.end_stage("columns")
            token_matches = _TokenMatches()
            if body.explain and self.searchable.explains_tokens:
                token_matches = await self._match_tokens(body.query, ranking, body.hits)
                stopwatch.end_stage("explain")
            content = await service.run_in_thread(
                self._response_json,
                body,
                ranking,
                runs_by_method,
                token_matches,
                stopwatch.seconds if with_durations else None,
            )
        service.metrics.count("tilefold_search_count")
        service.metrics.observe("tilefold_search_duration", stopwatch.seconds["search"])
        return Response(content, media_type=JSON)

    async def _rank(self, text: str, vector: _QueryVector, request: SearchRequest) -> Ranking:
        """Rank documents for a query.

        Args:
            text: text of the query.
            vector: vector of the query; ``None`` for a BM25 index.
            request: options of the search.

        Raises:
            ServeError: if the options of feedback or of a filter do not fit the index.
            MissingDocumentError: if the server lacks the text or vector of a document.
        """
        try:
            return await self.reader.run(
                self.searchable.searcher.rank,
                {QUERY: text},
                request,
                vector,
            )
        except MissingDocumentError:  # a ValueError that the client did not cause
            raise
        except ValueError as error:
            # The other options were checked before; only a filter or feedback can fail here.
            is_about_filter = isinstance(error, ArgumentError) and error.arguments == ("where",)
            if request.feedback is not None and not is_about_filter:
                raise invalid_input_error(f"`prf`: {error}") from error
            raise invalid_input_error(str(error)) from error

    @property
    def _max_encoded_candidates(self) -> int:
        """Largest number of candidates that a search may encode for reranking.

        It is one less than the limit on inputs, because the query is an input, too.
        """
        return self.service.input_limit.total - 1

    @property
    def _reranking_model(self) -> Served:
        """The multi-vector model of the index, or of the service."""
        late = self.searchable.late
        return self.service.model("multi-vector") if late is None else late

    async def _rerank(self, reranking: Reranking, text: str, ranking: Ranking) -> Ranking:
        """Rerank the best candidates of a ranking by MaxSim.

        If the options have a weight, the new score is the weighted sum of MaxSim and the score of
        the index. Token vectors of the candidates are read from the store, or computed from their
        texts if there is no store.

        Args:
            reranking: options with the number of candidates and the weight of MaxSim.
            text: text of the query.
            ranking: the ranking of the index.
        """
        service = self.service
        searchable = self.searchable
        model = self._reranking_model
        outcome = await service.encode(model, [text], EncodeOptions("query"))
        (query_vectors,) = outcome.rows
        dimension = query_vectors.size(1)
        packed_query = TokenVectors.pack([QUERY], [query_vectors], dimension, "fp32")
        candidates = None  # the searcher reads them from the store
        if searchable.store is None:
            candidates = await self._encode_candidates(reranking, ranking, dimension)

        def rerank() -> Ranking:
            return searchable.searcher.rerank(
                {QUERY: text},
                ranking,
                reranking,
                packed_query,
                candidates,
            )

        return await service.run_on_device(model, rerank)

    async def _encode_candidates(
        self,
        reranking: Reranking,
        ranking: Ranking,
        dimension: int,
    ) -> TokenVectors:
        """Encode the texts and the pages of the candidates that will be reranked.

        Args:
            reranking: options with the number of candidates.
            ranking: the ranking of the index.
            dimension: dimension D of a token vector.

        Raises:
            ServeError: if there are more candidates than the service encodes at once.
        """
        service = self.service
        n_hits = len(ranking.run[QUERY])
        n_candidates = min(n_hits, reranking.depth or RERANK_DEPTH)
        if n_candidates > self._max_encoded_candidates:
            raise invalid_input_error(
                f"`rerank.depth` expected at most {self._max_encoded_candidates}, got "
                f"{reranking.depth}",
            )
        content_of_id = await service.run_in_thread(
            self.searchable.searcher.rerank_texts,
            ranking,
            reranking,
        )
        page_ids: list[str] = []
        texts: dict[str, str] = {}
        for document_id, content in content_of_id.items():
            if isinstance(content, Page):
                page_ids.append(document_id)
            else:
                # The service refuses empty texts, but encodes a space.
                texts[document_id] = content or " "
        vectors: dict[str, torch.Tensor] = {}
        with service.input_limit.acquire(len(content_of_id)):
            if texts:
                outcome = await service.encode(
                    self._reranking_model,
                    list(texts.values()),
                    EncodeOptions("document", truncate=True),
                )
                vectors.update(zip(texts, outcome.rows, strict=True))
            for start in range(0, len(page_ids), PAGES_AT_ONCE):
                chunk = page_ids[start : start + PAGES_AT_ONCE]
                vectors.update(zip(chunk, await self._encode_pages(chunk), strict=True))
        rows = [vectors[document_id] for document_id in content_of_id]
        return TokenVectors.pack(list(content_of_id), rows, dimension, "fp32")

    async def _encode_pages(self, document_ids: Sequence[str]) -> list[torch.Tensor]:
        """Decode and encode a few pages.

        A decoded page takes much memory. Only a few searches may hold decoded pages at a time
        (``decoded_pages``), and others wait here.

        Args:
            document_ids: ids of the pages.

        Returns:
            Token vectors of each page.
        """
        service = self.service
        async with service.decoded_pages:
            images: list[ImageInput] = []
            for document_id in document_ids:
                image = await service.run_in_thread(
                    self._read_page,
                    document_id,
                    pool="tokenizers",
                )
                images.append(ImageInput(image, document_id.encode()))
            outcome = await service.encode_images(
                self._reranking_model,
                images,
                EncodeOptions("document", truncate=True),
            )
        rows: list[torch.Tensor] = outcome.rows
        return rows

    async def _rank_by_each_method(
        self,
        body: SearchBody,
        request: SearchRequest,
        vector: _QueryVector,
    ) -> dict[str, Run]:
        """Rank documents by each method of this server separately, to compare the methods.

        The methods are the search of the index (named by its kind, such as ``"sparse"``), the BM25
        index (``"words"``), the dense vectors (``"dense"``), and reranking the candidates of the
        index by MaxSim (``"late"``).

        Args:
            body: the validated JSON of the request.
            request: options of the search, which were parsed from the body.
            vector: vector of the query; ``None`` for a BM25 index.

        Returns:
            Name of each method -> its run.
        """
        searchable = self.searchable
        depth = max(body.hits, RERANK_DEPTH)
        search = SearchRequest(depth, request.feedback, by=body.by, where=request.where)
        ranking = await self._rank(body.query, vector, search)
        runs_by_method = dict(ranking.stages)
        if searchable.words is not None:
            runs_by_method["words"] = await self.reader.run(
                searchable.searcher.second_run,
                {QUERY: body.query},
                depth,
                request,
            )
        if searchable.dense is not None:
            outcome = await self.service.encode(
                searchable.dense,
                [body.query],
                EncodeOptions("query"),
            )
            scores = await self.reader.run(
                searchable.search_dense,
                outcome.rows[0],
                depth,
                request.where,
            )
            runs_by_method["dense"] = {QUERY: scores}
        late_depth = depth
        if searchable.store is None:  # no token vectors are stored
            # Candidates must be encoded first, and their number is limited.
            late_depth = min(depth, self._max_encoded_candidates)
        if searchable.features["rerank"] and ranking.run[QUERY] and late_depth:
            reranked = await self._rerank(Reranking(late_depth), body.query, ranking)
            runs_by_method["late"] = reranked.stages["late"]
        return runs_by_method

    def _response_json(
        self,
        body: SearchBody,
        ranking: Ranking,
        runs_by_method: dict[str, Run],
        token_matches: _TokenMatches,
        seconds: dict[str, float] | None,
    ) -> bytes:
        """Return the JSON of a response; runs in a helper thread, because it reads documents.

        Args:
            body: the validated JSON of the request.
            ranking: the final ranking.
            runs_by_method: the run of each method, for the page's columns; empty if the request
                does not ask for them.
            token_matches: tokens that matched, if the index explains hits by them.
            seconds: duration of each stage; ``None`` to leave them out.
        """
        query: Explanation = {"text": body.query}
        if body.explain:
            query.update(self.searchable.explain_query(ranking, body.query))
        if token_matches.tokens:
            query["tokens"] = token_matches.tokens
        if token_matches.error is not None:
            query["explanation_error"] = token_matches.error
        hits = list(ranking.run[QUERY].items())[: body.hits]
        answer: Explanation = {
            "api": "v1",
            "index": self.searchable.name,
            "query": query,
            "candidates": [
                self._describe_hit(body, ranking, token_matches, hit_id, score, rank)
                for rank, (hit_id, score) in enumerate(hits, start=1)
            ],
        }
        if runs_by_method:
            answer["columns"] = {
                method: self._top_hits(run[QUERY], body.hits, body.by)
                for method, run in runs_by_method.items()
            }
        if seconds is not None:
            answer["milliseconds"] = {
                stage: round(1000 * value, 3) for stage, value in seconds.items()
            }
        return to_json(answer)

    def _describe_hit(
        self,
        body: SearchBody,
        ranking: Ranking,
        token_matches: _TokenMatches,
        hit_id: str,
        score: float,
        rank: int,
    ) -> dict[str, Any]:
        """Describe a hit in the response: its document, score and rank, and their explanation.

        Args:
            body: the validated JSON of the request.
            ranking: the ranking.
            token_matches: tokens that matched, if the index explains hits by them.
            hit_id: id of a document, or of a passage if passages are ranked.
            score: score of the hit.
            rank: rank of the hit, from 1.
        """
        document, passage = self.searchable.document_and_passage(ranking, hit_id)
        description: dict[str, Any] = {
            "docid": passage.document if passage else hit_id,
            "score": score,
            "rank": rank,
            "doc": _document_json(document, body.parse),
        }
        if passage:
            description["passage"] = passage.shown(document)
        if document is not None and document.page is not None:
            index_name = quote(self.searchable.name, safe="")
            description["image"] = f"/v1/{index_name}/image/{quote(document.id, safe='')}"
        if body.explain:
            explanation = self.searchable.explain_document(ranking, hit_id)
            if hit_id in token_matches.matches:
                explanation["matches"] = token_matches.matches[hit_id]
            description["explanation"] = explanation
        return description

    def _top_hits(
        self,
        scores: dict[str, float],
        n_hits: int,
        by: Literal["document", "passage"],
    ) -> list[dict[str, Any]]:
        """Describe the top hits of one method for the side-by-side view of the page.

        Args:
            scores: id -> score, highest first.
            n_hits: number of hits.
            by: whether the ids are those of documents or of passages.
        """
        described_hits = []
        for rank, (hit_id, score) in enumerate(list(scores.items())[:n_hits], start=1):
            document_id = document_of(hit_id) if by == "passage" else hit_id
            document = self.searchable.documents.get(document_id)
            described_hit = {
                "docid": document_id,
                "score": score,
                "rank": rank,
                "title": document.title if document else "",
            }
            described_hits.append(described_hit)
        return described_hits


def _integer_parameter(
    request: Request,
    name: str,
    *,
    smallest: int,
    largest: int,
) -> int | None:
    """Return an integer parameter of the URL of a request; ``None`` if the URL does not have it.

    Args:
        request: the request.
        name: name of the parameter.
        smallest: smallest value that is allowed.
        largest: largest value that is allowed.

    Raises:
        ServeError: if the value is not an integer in this range.
    """
    text = request.query_params.get(name)
    if text is None:
        return None
    # Numbers with more digits exceed any limit, and may be too long to convert.
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(largest))
    if not is_number or not smallest <= int(text) <= largest:
        raise invalid_input_error(
            f"`{name}` expected an integer from {smallest} to {largest}, got {text!r}"
        )
    return int(text)


def _unreachable_error() -> ServeError:
    """Create the error for a search in an index whose server does not answer."""
    return ServeError(
        "Unhealthy", "the index is on a server that does not answer; the log says why"
    )


def _parse_filter(body: SearchBody) -> Filter | None:
    """Create the filter of a search by metadata; ``None`` if its body has no conditions."""
    if body.where is None and body.where_not is None:
        return None
    try:
        return Filter(body.where or {}, body.where_not or {})
    except ValueError as error:
        raise invalid_input_error(str(error)) from error


def _document_json(document: Document | None, parse: bool) -> Any:
    """Return a document as an object if `parse`, or else as a string with its JSON."""
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
    """Create the options of feedback, fusion or reranking from a field of a body.

    Args:
        options_class: class of the options.
        body_class: class of the field's object, for the defaults.
        value: value of the field. True selects the defaults, and False disables the feature.
        name: name of the field, for error messages.

    Returns:
        The options; ``None`` if the feature is disabled.
    """
    if value is False:
        return None
    body = body_class() if value is True else value
    try:
        return options_class(**body.model_dump())
    except ValueError as error:
        raise invalid_input_error(f"`{name}`: {error}") from error
