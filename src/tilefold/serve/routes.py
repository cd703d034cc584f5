"""HTTP routes that encode and rerank texts, compatible with several public APIs.

They are text-embeddings-inference 1.9, OpenAI, Cohere, vLLM, Google Vertex AI and SageMaker.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from tilefold._version import __version__
from tilefold.ops import maxsim
from tilefold.serve import bodies
from tilefold.serve.bodies import ServeError, empty, invalid, wrong_model
from tilefold.serve.endpoints import JSON, add_route, describe_error
from tilefold.serve.models import Kind, Side, TextTokens
from tilefold.serve.service import EncodeOptions, Outcome, Service, all_of

Handler = Callable[[Any, Request], Awaitable[Response]]
"""Function that answers a request with a validated body."""
Serialize = Callable[[list[Any]], list[bytes]]
"""Function that returns the JSON of each row."""
# Limits of the service that ``/info`` reports.
_LIMITS_IN_INFO = (
    "max_concurrent_requests",
    "max_batch_tokens",
    "max_client_batch_size",
    "auto_truncate",
    "tokenization_workers",
)


@dataclass(frozen=True)
class _PostRoute:
    """Route that answers a POST.

    Attributes:
        body: type of the body.
        handler: answers a request with a validated body.
        summary: of the route, for the OpenAPI description.
    """

    body: type[bodies.Body]
    handler: Handler
    summary: str


class Routes:
    """Routes for inputs of one side.

    A request may name the other side with ``prompt_name``.

    Args:
        service: service that encodes.
        side: side of the inputs.
    """

    def __init__(self, service: Service, side: Side) -> None:
        self.service = service
        self.side = side
        self._main = self._main_handler()

    def _main_handler(self) -> tuple[type[bodies.Body], Handler]:
        """Return the body and the handler of ``/``, which depend on the models."""
        if "sparse" in self.service.models:
            return bodies.EmbedSparse, self.embed_sparse
        if "multi-vector" in self.service.models:
            return bodies.Rerank, self.rerank
        return bodies.Embed, self.embed

    def router(self) -> APIRouter:
        """Create the router with all routes."""
        router = APIRouter()
        for path, route in self._post_routes().items():
            error_body = ServeError.body
            if route.body is bodies.OpenAIEmbeddings:
                error_body = ServeError.openai_body
            add_route(
                router,
                self.service,
                path,
                route.handler,
                route.summary,
                route.body,
                error_body,
            )
        add_route(router, self.service, "/info", self.info, "The model, and the limits")
        add_route(router, self.service, "/metrics", self.metrics, "For Prometheus")
        for path in ("/health", "/ping"):
            add_route(router, self.service, path, self.health, "200 or 503")
        return router

    def _post_routes(self) -> dict[str, _PostRoute]:
        """Return the routes that answer a POST, by path."""
        main_body, main_handler = self._main
        main_summary = "What the first model makes, as SageMaker"
        openai = _PostRoute(
            bodies.OpenAIEmbeddings,
            self.openai,
            "Dense vectors, as OpenAI answers",
        )
        return {
            "/embed_sparse": _PostRoute(bodies.EmbedSparse, self.embed_sparse, "Sparse vectors"),
            "/embed_all": _PostRoute(bodies.EmbedAll, self.embed_all, "A vector for each token"),
            "/embed": _PostRoute(bodies.Embed, self.embed, "Dense vectors"),
            "/rerank": _PostRoute(
                bodies.Rerank,
                self.rerank,
                "Texts or documents, ranked by late interaction",
            ),
            "/v1/rerank": _PostRoute(bodies.Rerank, self.rerank, "As /rerank"),
            "/v2/rerank": _PostRoute(bodies.Rerank, self.rerank, "As /rerank"),
            "/score": _PostRoute(
                bodies.Score,
                self.score,
                "Scores of pairs by late interaction",
            ),
            "/similarity": _PostRoute(
                bodies.Similarity,
                self.similarity,
                "Cosine similarity of a sentence with others",
            ),
            "/predict": _PostRoute(
                bodies.Predict,
                self.predict,
                "Classes, for which there is no model here",
            ),
            "/vertex": _PostRoute(
                bodies.Vertex,
                self.vertex,
                "Several bodies at once, as Google Vertex AI asks",
            ),
            "/tokenize": _PostRoute(bodies.Tokenize, self.tokenize, "Tokens of texts"),
            "/decode": _PostRoute(bodies.Decode, self.decode, "Texts of token ids"),
            "/": _PostRoute(
                main_body,
                main_handler,
                f"{main_summary} and the Inference API ask for it",
            ),
            "/invocations": _PostRoute(main_body, main_handler, f"{main_summary} asks for it"),
            "/v1/embeddings": openai,
            "/embeddings": openai,
        }

    def _options(self, body: bodies.Encoded, normalize: bool = True) -> EncodeOptions:
        """Return the encoding that a body asks for."""
        return EncodeOptions(
            self.side,
            body.prompt_name,
            body.truncate,
            body.truncation_direction,
            normalize,
        )

    async def _encode(
        self,
        kind: Kind,
        inputs: list[Any],
        options: EncodeOptions,
        name: str = "inputs",
    ) -> Outcome:
        """Encode texts and lists of token ids.

        Token ids are encoded without a prompt and special tokens. If the request names a prompt,
        their text is encoded with it instead.

        Args:
            kind: kind of the model.
            inputs: texts or lists of token ids.
            options: how they are encoded.
            name: field of the request, for error messages.

        Returns:
            One row per input, with counts and durations.

        Raises:
            ServeError: for no or too many inputs, bad token ids, or an unknown prompt.
        """
        service = self.service
        model = service.model(kind)
        service.metrics.count("te_request_count", method=_method(inputs))
        with service.acquire_inputs(inputs, name):
            if not all(isinstance(item, str) for item in inputs):
                key = model.batch_key(options.side, options.prompt_name)
                has_prompt = options.prompt_name is not None and model.prompt(key) != ""
                inputs = await service.run_in_helper(
                    _resolve_token_ids,
                    model.text,
                    inputs,
                    has_prompt,
                )
            return await service.encode(kind, inputs, options)

    def _answer(
        self,
        content: bytes,
        outcome: Outcome,
        kind: Kind,
        method: str = "batch",
    ) -> Response:
        """Create the response of an outcome, and count the request in the metrics.

        Args:
            content: JSON of the answer.
            outcome: counts and durations, for the response's headers and the metrics.
            kind: kind of the model that encoded.
            method: ``"single"`` or ``"batch"``, a label of the metrics.
        """
        self.service.record(outcome, method)
        response = Response(content, media_type=JSON)
        response.raw_headers += outcome.headers(self.service.model(kind).device)
        return response

    async def _serialize(
        self,
        rows: list[Any],
        serialize: Serialize,
        size: Callable[[Any], int] = len,
    ) -> bytes:
        """Return the JSON list of rows; a helper thread writes large ones."""
        return bodies.json_list(await self.service.map_items(rows, serialize, size))

    async def _vectors(
        self,
        kind: Kind,
        body: bodies.EmbedAll,
        serialize: Serialize,
        size: Callable[[Any], int] = len,
        normalize: bool = True,
    ) -> Response:
        """Answer with one vector or matrix per input.

        Args:
            kind: kind of the model.
            body: inputs and options.
            serialize: returns the JSON of each row.
            size: how many numbers a row has.
            normalize: whether a dense model normalises its vectors.
        """
        outcome = await self._encode(kind, body.inputs, self._options(body, normalize))
        content = await self._serialize(outcome.rows, serialize, size)
        return self._answer(content, outcome, kind, _method(body.inputs))

    async def embed_sparse(self, body: bodies.EmbedSparse, request: Request) -> Response:
        """Answer with sparse vectors."""
        serialize = partial(
            bodies.sparse_rows,
            body=body,
            token=self.service.model("sparse").text.token,
        )
        return await self._vectors("sparse", body, serialize, lambda row: len(row[0]))

    async def embed_all(self, body: bodies.EmbedAll, request: Request) -> Response:
        """Answer with a vector for each token."""
        return await self._vectors("multi-vector", body, bodies.matrices, lambda row: row.numel())

    async def embed(self, body: bodies.Embed, request: Request) -> Response:
        """Answer with dense vectors."""
        self._check_dense()

        def serialize(rows: Sequence[bodies.Vector]) -> list[bytes]:
            return bodies.vectors(
                [_shorten(row, body.dimensions, body.normalize) for row in rows],
            )

        return await self._vectors("dense", body, serialize, normalize=body.normalize)

    async def openai(self, body: bodies.OpenAIEmbeddings, request: Request) -> Response:
        """Answer with dense vectors in the form of OpenAI.

        The vectors are the large part of the answer. They are written by helper threads, and joined
        with the JSON of the small fields, ``model`` and ``usage``.
        """
        self._check_dense()
        outcome = await self._encode("dense", body.input, EncodeOptions(self.side), "input")
        rows = [_shorten(row, body.dimensions, normalize=True) for row in outcome.rows]
        serialize = partial(_openai_entries, body.encoding_format == "base64")
        entries = await self._serialize(
            list(enumerate(rows)),
            serialize,
            lambda position_and_row: len(position_and_row[1]),
        )
        model_name = self.service.model("dense").name
        small_fields = bodies.plain({"model": model_name, "usage": _usage(outcome)})
        # The object of the small fields goes on after `data`, without its opening brace.
        content = b'{"object":"list","data":' + entries + b"," + small_fields.removeprefix(b"{")
        return self._answer(content, outcome, "dense", _method(body.input))

    def _check_dense(self) -> None:
        """Raise ``ServeError`` unless there is a dense model."""
        if "dense" not in self.service.models and "sparse" in self.service.models:
            raise wrong_model(
                "the model makes sparse vectors: POST /embed_sparse with inputs, or serve a dense "
                "model",
            )
        self.service.model("dense")

    async def rerank(self, body: bodies.Rerank, request: Request) -> Response:
        """Rank texts by their score with a query.

        The answer has the form of the API that the body belongs to, with the highest score first.
        A body with ``texts`` gets a list of positions and scores, as in text-embeddings-inference.
        A body with ``documents`` gets an object with ``results``, as in Cohere's API.
        """
        self.service.metrics.count("te_request_count", method="batch")
        if (body.texts is None) == (body.documents is None):
            raise invalid("`texts` or `documents`: expected one of them")
        texts = body.documents or []
        name = "documents"
        if body.texts is not None:
            texts = body.texts
            name = "texts"
        scores, outcome = await self._score_texts([body.query], texts, body, name)
        # Positions of the texts, highest score first. Equal scores stay in the request's order.
        order = sorted(range(len(scores)), key=lambda position: (-scores[position], position))
        content: Any
        if body.documents is None:
            content = _ranked_texts(texts, scores, order, body.return_text)
        else:
            content = {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": self.service.model("multi-vector").name,
                "usage": _usage(outcome),
                "results": _ranked_documents(
                    texts,
                    scores,
                    order[: body.top_n],
                    body.return_documents,
                ),
            }
        return self._answer(bodies.plain(content), outcome, "multi-vector")

    async def score(self, body: bodies.Score, request: Request) -> Response:
        """Answer with scores in the order of the request, in the form of vLLM.

        One query is scored with all documents. Several queries are scored with one document each,
        that at the same position.
        """
        self.service.metrics.count("te_request_count", method="batch")
        queries = body.queries
        texts = body.documents
        if queries is None or texts is None:
            raise invalid("expected `queries` and `documents` (or `text_1` and `text_2`)")
        if len(queries) not in (1, len(texts)):
            raise invalid(
                f"`queries`: expected 1 or as many as documents ({len(texts)}), got {len(queries)}",
            )
        if not queries:
            raise ServeError("Empty", "`queries` cannot be empty")
        scores, outcome = await self._score_texts(queries, texts, body, "documents")
        content = {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "model": self.service.model("multi-vector").name,
            "data": [
                {"index": position, "object": "score", "score": value}
                for position, value in enumerate(scores)
            ],
            "usage": _usage(outcome),
        }
        return self._answer(bodies.plain(content), outcome, "multi-vector")

    async def _score_texts(
        self,
        queries: list[str],
        texts: list[str],
        body: bodies.Rerank | bodies.Score,
        name: str,
    ) -> tuple[list[float], Outcome]:
        """Score one query with every text, or each query with the text at the same position.

        Args:
            queries: one query, or as many as texts.
            texts: documents.
            body: options of the request.
            name: field of the texts, for error messages.

        Returns:
            One score per text, and the outcome of encoding.
        """
        service = self.service
        with service.acquire_inputs(texts, name):
            model = service.model("multi-vector")
            query_options = EncodeOptions(
                "query",
                None,
                body.truncate,
                body.truncation_direction,
                counted=None,
            )
            document_options = replace(query_options, side="document", counted="predict")
            query_outcome = await service.encode("multi-vector", queries, query_options)
            outcome = await service.encode("multi-vector", texts, document_options)
            # Characters of pairs, as text-embeddings-inference counts: a single query belongs to
            # every pair.
            outcome.characters += query_outcome.characters * len(texts) // len(queries)
            outcome.tokens += query_outcome.tokens
            outcome.started = query_outcome.started
            # One query with all texts, or each query with its text.
            groups = [(query_outcome.rows[0], outcome.rows)]
            if len(queries) > 1:
                groups = [
                    (query, [document])
                    for query, document in zip(query_outcome.rows, outcome.rows, strict=True)
                ]
            # A model that compares by the mean has no sum.
            sum_scores = body.raw_scores and model.model.similarity_fn_name != "meanmaxsim"

            def score_groups() -> list[list[float]]:
                return [_late_scores(query, documents, sum_scores) for query, documents in groups]

            scores_by_group = await service.run_on_device(model, score_groups)
            return list(itertools.chain.from_iterable(scores_by_group)), outcome

    async def similarity(self, body: bodies.Similarity, request: Request) -> Response:
        """Answer with the cosine similarities of a sentence with others."""
        kind: Kind
        if "sparse" in self.service.models:
            kind = "sparse"
        elif "dense" in self.service.models:
            kind = "dense"
        else:
            raise wrong_model(
                "the model makes a vector of each token: POST /rerank, or serve a sparse or dense "
                "one",
            )
        sentences = body.inputs.sentences
        if not sentences:
            raise ServeError("Empty", "`inputs.sentences` cannot be empty")
        options = self._options(body.parameters or bodies.Encoded())
        outcome = await self._encode(kind, [body.inputs.source_sentence, *sentences], options)
        content = await self.service.run_in_helper(
            lambda: bodies.plain(bodies.cosines(outcome.rows, kind)),
        )
        return self._answer(content, outcome, kind)

    async def predict(self, body: bodies.Predict, request: Request) -> Response:
        """Refuse a request for classes."""
        raise wrong_model("model is not a classifier model")

    async def vertex(self, body: bodies.Vertex, request: Request) -> Response:
        """Answer several bodies at once: ``{"predictions": [...]}`` with an answer to each.

        A body with ``query`` and ``texts`` is reranked. Any other body is answered as by the route
        ``/``. The first error is the answer to the whole request.
        """
        if not body.instances:
            raise ServeError("Empty", "`instances` cannot be empty")
        self.service.check_batch_size(body.instances)
        requests: list[tuple[bodies.Body, Handler]] = []
        for position, instance in enumerate(body.instances):
            is_reranking = isinstance(instance, dict) and {"query", "texts"} <= instance.keys()
            body_type, handler = self._main
            if is_reranking:
                body_type = bodies.Rerank
                handler = self.rerank
            try:
                requests.append((body_type.model_validate(instance), handler))
            except ValidationError as error:
                raise invalid(describe_error(error, f"instances.{position}")) from None
        tasks = [
            asyncio.ensure_future(handler(instance, request)) for instance, handler in requests
        ]
        responses = await all_of(tasks)
        content = bodies.json_list([bytes(response.body) for response in responses])
        return Response(b'{"predictions":' + content + b"}", media_type=JSON)

    async def tokenize(self, body: bodies.Tokenize, request: Request) -> Response:
        """Answer with the tokens of texts.

        A prompt is added only if the request names one. Tokens are computed and written as JSON in
        helper threads, portion by portion, so that a long request does not delay others.
        """
        service = self.service
        model = service.first_model
        texts = body.inputs
        with service.acquire_inputs(texts):
            if not all(texts):
                raise empty("inputs")
            service.check_size(texts, model, self.side)
            prompt = ""
            if body.prompt_name is not None:
                prompt = model.prompt(model.batch_key(self.side, body.prompt_name))

            def serialize(texts: list[str]) -> list[bytes]:
                tokens = model.text.tokenize(
                    texts,
                    body.add_special_tokens,
                    prompt,
                    in_bytes=body.offsets == "bytes",
                )
                return list(map(bodies.plain, tokens))

            rows = await service.map_in_portions(texts, serialize, tokenizes=True)
        return Response(bodies.json_list(rows), media_type=JSON)

    async def decode(self, body: bodies.Decode, request: Request) -> Response:
        """Answer with the text of each list of token ids.

        Texts are computed in helper threads, portion by portion, so that a long request does not
        delay others.
        """
        service = self.service
        model = service.first_model
        with service.acquire_inputs(body.ids, "ids"):
            service.check_size(body.ids, model, self.side, "ids")

            def serialize(id_lists: list[list[int]]) -> list[bytes]:
                return [
                    bodies.plain(model.text.decode(ids, body.skip_special_tokens))
                    for ids in id_lists
                ]

            rows = await service.map_in_portions(body.ids, serialize, tokenizes=True)
        return Response(bodies.json_list(rows), media_type=JSON)

    async def info(self, request: Request) -> Response:
        """Answer with the first model and the limits, in the form of text-embeddings-inference."""
        first_model = self.service.first_model
        models = self.service.models.values()
        limits = {name: getattr(self.service.limits, name) for name in _LIMITS_IN_INFO}
        content = {
            "model_id": first_model.name,
            "model_sha": None,
            "model_dtype": first_model.dtype,
            "served_model_name": first_model.name,
            "model_type": first_model.type,
            "max_input_length": first_model.limit(self.side),
            "max_batch_requests": None,
            **limits,
            "version": __version__,
            "sha": None,
            "docker_label": None,
            "models": {model.kind: model.name for model in models},
            "precision": {model.kind: model.precision for model in models},
            "side": self.side,
        }
        return Response(bodies.plain(content), media_type=JSON)

    async def metrics(self, request: Request) -> Response:
        """Answer with the metrics in Prometheus's text format."""
        return Response(self.service.metrics.render(), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        """Answer with status 200 if the service is healthy, else with 503."""
        if self.service.healthy:
            return Response()
        error = ServeError("Unhealthy", "unhealthy")
        return Response(error.body(), error.status, media_type=JSON)


def _ranked_texts(
    texts: Sequence[str],
    scores: Sequence[float],
    order: Sequence[int],
    return_text: bool,
) -> list[dict[str, Any]]:
    """Return ranked texts in the form of text-embeddings-inference.

    Each entry is ``{"index": position in the request, "score": score}``, with ``"text"`` on demand.

    Args:
        texts: texts in the order of the request.
        scores: one score per text.
        order: positions of texts, highest score first.
        return_text: whether entries contain the text.
    """
    ranked = []
    for position in order:
        entry: dict[str, Any] = {"index": position, "score": scores[position]}
        if return_text:
            entry["text"] = texts[position]
        ranked.append(entry)
    return ranked


def _ranked_documents(
    texts: Sequence[str],
    scores: Sequence[float],
    order: Sequence[int],
    return_documents: bool,
) -> list[dict[str, Any]]:
    """Return ranked documents in the form of Cohere.

    Each entry is ``{"index": position in the request, "relevance_score": score}``, with
    ``"document"`` on demand.

    Args:
        texts: texts in the order of the request.
        scores: one score per text.
        order: positions of texts, highest score first.
        return_documents: whether entries contain the document.
    """
    ranked = []
    for position in order:
        entry: dict[str, Any] = {"index": position, "relevance_score": scores[position]}
        if return_documents:
            entry["document"] = {"text": texts[position]}
        ranked.append(entry)
    return ranked


def _late_scores(
    query: torch.Tensor,
    documents: Sequence[torch.Tensor],
    sum_scores: bool,
) -> list[float]:
    """Score documents with a query by MaxSim.

    For each token vector of the query, MaxSim takes the largest inner product with a token vector
    of the document. The score is the sum or the mean of these maxima.

    Args:
        query: token vectors, ``[Lq, D]``.
        documents: token vectors of each document, ``[Ld, D]``.
        sum_scores: add the maxima over query tokens, instead of taking their mean.

    Returns:
        One score per document, in their order.
    """
    # Equal texts share one tensor, which is scored once. Scored twice, the same document could get
    # two scores, because the rounding of a sum may depend on the position in the batch.
    distinct = {id(document): document for document in documents}
    lengths = [document.size(0) for document in distinct.values()]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    with torch.no_grad():
        scores = maxsim(
            query[None],
            torch.cat(list(distinct.values())),
            cu_seqlens_d=offsets,
            reduction="sum" if sum_scores else "mean",
        )
    score_of_row = dict(zip(distinct, scores[0].tolist(), strict=True))
    return [score_of_row[id(document)] for document in documents]


def _resolve_token_ids(
    text: TextTokens,
    inputs: list[Any],
    has_prompt: bool,
) -> list[str | tuple[int, ...]]:
    """Replace each list of token ids by what the model encodes: its text or a tuple of its ids.

    A prompt is text, and can only be put before a text. Token ids are therefore decoded if there is
    a prompt. Otherwise the model reads the ids themselves.

    A large request takes long, so the caller runs this function in a helper thread.

    Args:
        text: tokenizer of the model.
        inputs: texts, which are returned unchanged, or lists of token ids.
        has_prompt: whether the model puts a prompt before each input.

    Returns:
        One text or one tuple of token ids per input, in their order.

    Raises:
        ServeError: for an id that no token of the model has.
    """
    resolved: list[str | tuple[int, ...]] = []
    for item in inputs:
        if isinstance(item, str):
            resolved.append(item)
        elif has_prompt:
            # The tokenizer adds special tokens such as [CLS] again, together with the prompt.
            resolved.append(text.decode(item, skip_special=True))
        else:
            text.check_ids(item)
            resolved.append(tuple(item))
    return resolved


def _openai_entries(in_base64: bool, rows: list[tuple[int, Any]]) -> list[bytes]:
    """Return the JSON objects of dense vectors for the list ``data`` of an OpenAI answer.

    Args:
        in_base64: write a vector as a base64 string of its fp32 numbers in little-endian order,
            instead of a list of numbers.
        rows: position of each input in the request, and its vector ``[D]``.

    Returns:
        One JSON object per vector, as bytes.
    """
    entries = []
    for position, row in rows:
        if in_base64:
            vector = b'"' + base64.b64encode(row.astype("<f4").tobytes()) + b'"'
        else:
            vector = bodies.vectors([row])[0]
        entries.append(
            b'{"object":"embedding","embedding":%b,"index":%d}' % (vector, position),
        )
    return entries


def _usage(outcome: Outcome) -> dict[str, int]:
    """Return the token counts of OpenAI and Cohere."""
    return {"prompt_tokens": outcome.tokens, "total_tokens": outcome.tokens}


def _method(inputs: Any) -> str:
    """Return the metrics' label of a request with one input or with a list."""
    return "single" if isinstance(inputs, bodies.Single) else "batch"


def _shorten(row: Any, dimensions: int | None, normalize: bool) -> Any:
    """Keep the first dimensions of a dense vector, and scale it to length 1.

    Args:
        row: vector, ``[D]``.
        dimensions: number of dimensions to keep; ``None`` keeps all.
        normalize: whether to scale it.

    Raises:
        ServeError: if the vector has fewer dimensions.
    """
    if dimensions is not None and dimensions > len(row):
        raise invalid(f"`dimensions` expected at most {len(row)}, got {dimensions}")
    shortened = row[:dimensions]
    length = float(np.linalg.norm(shortened))
    return shortened / length if normalize and length > 0 else shortened
