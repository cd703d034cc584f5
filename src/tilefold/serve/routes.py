"""HTTP routes that encode and rerank texts, compatible with several public APIs.

They are text-embeddings-inference 1.9, OpenAI, Cohere, vLLM, Google Vertex AI and SageMaker.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from tilefold._version import __version__
from tilefold.ops import maxsim
from tilefold.serve import bodies
from tilefold.serve.bodies import (
    ImageData,
    ServeError,
    empty_input_error,
    invalid_input_error,
    wrong_model_error,
)
from tilefold.serve.endpoints import JSON, add_route, describe_error
from tilefold.serve.models import Kind, Side, TextTokens
from tilefold.serve.service import EncodeOptions, Outcome, Service, gather_or_cancel

Handler = Callable[[Any, Request], Awaitable[Response]]
"""Function that answers a request with a validated body."""
Serialize = Callable[[list[Any]], list[bytes]]
"""Function that serializes each row to JSON."""
Reduction = Literal["sum", "mean"]
# The limits of the service that ``/info`` reports.
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
        handler: function that answers a request with a validated body.
        summary: summary of the route, for the OpenAPI description.
    """

    body: type[bodies.Body]
    handler: Handler
    summary: str

    @property
    def takes_forms(self) -> bool:
        """Whether the body may be a form, whose files are images."""
        return self.body in (bodies.EmbedAll, bodies.Rerank)


class Routes:
    """Routes that encode inputs as queries, or as documents.

    A request may override the side with ``prompt_name``.

    Attributes:
        service: service that encodes.
        side: whether inputs are queries or documents.
    """

    def __init__(self, service: Service, side: Side) -> None:
        """Create the routes for one side."""
        self.service = service
        self.side = side

    def _root_route(self) -> _PostRoute:
        """Return the route of ``/``, which depends on the models."""
        summary = "What the first model makes, as SageMaker and the Inference API ask for it"
        if "sparse" in self.service.models:
            return _PostRoute(bodies.EmbedSparse, self.embed_sparse, summary)
        if "multi-vector" in self.service.models:
            return _PostRoute(bodies.Rerank, self.rerank, summary)
        return _PostRoute(bodies.Embed, self.embed, summary)

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
                takes_forms=route.takes_forms,
            )
        add_route(router, self.service, "/info", self.info, "The model, and the limits")
        add_route(router, self.service, "/metrics", self.metrics, "For Prometheus")
        for path in ("/health", "/ping"):
            add_route(router, self.service, path, self.health, "200 or 503")
        add_route(router, self.service, "/live", self.live, "200, unless a restart is needed")
        return router

    def _post_routes(self) -> dict[str, _PostRoute]:
        """Return path -> the route that answers a POST."""
        root = self._root_route()
        invocations = replace(root, summary="What the first model makes, as SageMaker asks for it")
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
            "/": root,
            "/invocations": invocations,
            "/v1/embeddings": openai,
            "/embeddings": openai,
        }

    def _encode_options(self, body: bodies.Encoded, normalize: bool = True) -> EncodeOptions:
        """Return the options with which the inputs of a body are encoded.

        Args:
            body: a body with the fields of an encoding.
            normalize: whether a dense model normalises its vectors.
        """
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
        """Encode the inputs of a request, and count the request in the metrics.

        Token ids are encoded as they are, without prompt and special tokens. If the request names a
        prompt, they are decoded, and their text is encoded with the prompt.

        Args:
            kind: kind of the model.
            inputs: texts, lists of token ids or images.
            options: how the inputs are encoded.
            name: the field with the inputs, for error messages.

        Returns:
            The encoded inputs, with counts and durations.

        Raises:
            ServeError: if there are no or too many inputs, a token id is invalid, or the prompt is
                unknown.
        """
        service = self.service
        model = service.model(kind)
        service.metrics.count("te_request_count", method=_method_label(inputs))
        with service.acquire_inputs(inputs, name):
            if any(isinstance(item, list) for item in inputs):
                key = model.batch_key(options.side, options.prompt_name)
                has_prompt = options.prompt_name is not None and model.prompt(key) != ""
                # A large request would block the event loop for long.
                inputs = await service.run_in_thread(
                    _decode_or_check_token_ids,
                    model.tokenizer,
                    inputs,
                    has_prompt,
                )
            return await service.encode_all(model, inputs, options)

    def _record_and_respond(
        self,
        content: bytes,
        outcome: Outcome,
        kind: Kind,
        method: str = "batch",
    ) -> Response:
        """Record a request in the metrics, and create its response.

        Args:
            content: JSON of the response.
            outcome: counts and durations of the request, for headers and metrics.
            kind: kind of the model that encoded the inputs.
            method: ``"single"`` or ``"batch"``, a label of the metrics.
        """
        self.service.record(outcome, method)
        response = Response(content, media_type=JSON)
        response.raw_headers += outcome.headers(self.service.model(kind).device)
        return response

    async def _embed(
        self,
        kind: Kind,
        body: bodies.EmbedAll,
        serialize: Serialize,
        size: Callable[[Any], int] = len,
        normalize: bool = True,
    ) -> Response:
        """Answer with a JSON list of encoded inputs.

        Args:
            kind: kind of the model.
            body: body of the request, with inputs and options.
            serialize: function that serializes rows to JSON.
            size: function that returns the number of values in a row.
            normalize: whether a dense model normalises its vectors.
        """
        outcome = await self._encode(kind, body.inputs, self._encode_options(body, normalize))
        row_jsons = await self.service.map_items(outcome.rows, serialize, size)
        content = bodies.json_list(row_jsons)
        return self._record_and_respond(content, outcome, kind, _method_label(body.inputs))

    async def embed_sparse(self, body: bodies.EmbedSparse, request: Request) -> Response:
        """Answer ``/embed_sparse`` with a JSON list of one sparse vector per input."""
        serialize = partial(
            bodies.sparse_vectors_json,
            body=body,
            token_of_index=self.service.model("sparse").tokenizer.term_name,
        )
        return await self._embed("sparse", body, serialize, lambda row: len(row.indices))

    async def embed_all(self, body: bodies.EmbedAll, request: Request) -> Response:
        """Answer ``/embed_all`` with a JSON list of the token vectors of each input."""
        return await self._embed(
            "multi-vector", body, bodies.token_vectors_json, lambda row: row.numel()
        )

    async def embed(self, body: bodies.Embed, request: Request) -> Response:
        """Answer ``/embed`` with a JSON list of one dense vector per input.

        Args:
            body: inputs and options. `dimensions` keeps the first entries of each vector, and
                `normalize` scales it to length 1.
            request: not used.
        """
        self._check_dense()

        def serialize(rows: Sequence[bodies.Vector]) -> list[bytes]:
            shortened = [_shorten(row, body.dimensions, body.normalize) for row in rows]
            return bodies.dense_vectors_json(shortened)

        return await self._embed("dense", body, serialize, normalize=body.normalize)

    async def openai(self, body: bodies.OpenAIEmbeddings, request: Request) -> Response:
        """Answer ``/v1/embeddings`` with dense vectors in OpenAI's format.

        Helper threads serialize the vectors, because large ones would block the event loop for
        long.
        """
        self._check_dense()
        outcome = await self._encode("dense", body.input, EncodeOptions(self.side), "input")
        rows = [_shorten(row, body.dimensions, normalize=True) for row in outcome.rows]
        serialize = (
            _dense_vectors_base64 if body.encoding_format == "base64" else bodies.dense_vectors_json
        )
        vectors = await self.service.map_items(rows, serialize)
        entries = [
            b'{"object":"embedding","embedding":%b,"index":%d}' % (vector, index)
            for index, vector in enumerate(vectors)
        ]
        content = b'{"object":"list","data":%b,"model":%b,"usage":%b}' % (
            bodies.json_list(entries),
            bodies.to_json(self.service.model("dense").name),
            bodies.to_json(_count_usage(outcome)),
        )
        return self._record_and_respond(content, outcome, "dense", _method_label(body.input))

    def _check_dense(self) -> None:
        """Raise ``ServeError`` if the service has no dense model."""
        if "dense" not in self.service.models and "sparse" in self.service.models:
            raise wrong_model_error(
                "the model makes sparse vectors: POST /embed_sparse with inputs, or serve a dense "
                "model",
            )
        self.service.model("dense")

    async def rerank(self, body: bodies.Rerank, request: Request) -> Response:
        """Rank texts by their score with a query, highest score first.

        A body with ``texts`` is answered in text-embeddings-inference's format, and a body with
        ``documents`` in Cohere's.
        """
        self.service.metrics.count("te_request_count", method="batch")
        if body.texts is not None and body.documents is None:
            return await self._rerank_texts(body, body.texts)
        if body.documents is not None and body.texts is None:
            return await self._rerank_documents(body, body.documents)
        raise invalid_input_error("`texts` or `documents`: expected one of them")

    async def _rerank_texts(self, body: bodies.Rerank, texts: list[str]) -> Response:
        """Rank texts by their score with the query, in text-embeddings-inference's format.

        Args:
            body: body of the request.
            texts: the texts to rank.
        """
        scores, outcome = await self._score_texts([body.query], texts, body, "texts")
        ranked = _ranked_texts(texts, scores, _positions_by_score(scores), body.return_text)
        return self._record_and_respond(bodies.to_json(ranked), outcome, "multi-vector")

    async def _rerank_documents(
        self,
        body: bodies.Rerank,
        documents: list[str | ImageData],
    ) -> Response:
        """Rank documents by their score with the query, in Cohere's format.

        Args:
            body: body of the request.
            documents: the texts and images to rank.
        """
        scores, outcome = await self._score_texts([body.query], documents, body, "documents")
        ranking = _positions_by_score(scores)[: body.top_n]
        content = {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": self.service.model("multi-vector").name,
            "usage": _count_usage(outcome),
            "results": _ranked_documents(documents, scores, ranking, body.return_documents),
        }
        return self._record_and_respond(bodies.to_json(content), outcome, "multi-vector")

    async def score(self, body: bodies.Score, request: Request) -> Response:
        """Answer with scores in the order of the request, in vLLM's response format.

        One query is scored with all documents. If there are several queries, each is scored with
        the document at the same position.
        """
        self.service.metrics.count("te_request_count", method="batch")
        queries = body.queries
        texts = body.documents
        if queries is None or texts is None:
            raise invalid_input_error(
                "expected `queries` and `documents` (or `text_1` and `text_2`)"
            )
        if len(queries) not in (1, len(texts)):
            raise invalid_input_error(
                f"`queries`: expected 1 or as many as documents ({len(texts)}), got {len(queries)}",
            )
        if not queries:
            raise ServeError("Empty", "`queries` cannot be empty")
        scores, outcome = await self._score_texts(queries, texts, body, name="documents")
        content = {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "model": self.service.model("multi-vector").name,
            "data": [
                {"index": position, "object": "score", "score": value}
                for position, value in enumerate(scores)
            ],
            "usage": _count_usage(outcome),
        }
        return self._record_and_respond(bodies.to_json(content), outcome, "multi-vector")

    async def _score_texts(
        self,
        queries: list[str],
        texts: Sequence[str | ImageData],
        body: bodies.Rerank | bodies.Score,
        name: str,
    ) -> tuple[list[float], Outcome]:
        """Score one query with every text, or each query with the text at the same position.

        Args:
            queries: one query, or a query for each text.
            texts: the documents, texts or page images.
            body: body of the request, with the options of truncation and scores.
            name: field of the texts, for error messages.

        Returns:
            The score of each text, and the outcome of encoding.
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
            query_outcome = await service.encode(model, queries, query_options)
            outcome = await service.encode_all(model, texts, document_options)
            # text-embeddings-inference counts the characters of pairs of a query and a text, so
            # that a single query is counted for every text.
            outcome.characters += query_outcome.characters * len(texts) // len(queries)
            outcome.tokens += query_outcome.tokens
            outcome.started = query_outcome.started
            # `raw_scores` asks for MaxSim's sum over the tokens of the query, instead of the mean.
            # A model whose similarity is the mean has no other score.
            has_sum = model.model.similarity_fn_name != "meanmaxsim"
            reduction: Reduction = "sum" if body.raw_scores and has_sum else "mean"
            query_rows = query_outcome.rows
            document_rows = outcome.rows

            def compute_scores() -> list[float]:
                if len(query_rows) == 1:
                    return _maxsim_scores(query_rows[0], document_rows, reduction)
                scores: list[float] = []
                for query, document in zip(query_rows, document_rows, strict=True):
                    scores += _maxsim_scores(query, [document], reduction)
                return scores

            return await service.run_on_device(model, compute_scores), outcome

    async def similarity(self, body: bodies.Similarity, request: Request) -> Response:
        """Answer ``/similarity`` with the cosines of a sentence and each of the other sentences."""
        models = self.service.models
        if "sparse" not in models and "dense" not in models:  # a multi-vector model only
            raise wrong_model_error(
                "the model makes a vector of each token: POST /rerank, or serve a sparse or dense "
                "one",
            )
        kind: Kind = "sparse" if "sparse" in models else "dense"
        cosines: Callable[..., list[float]] = bodies.dense_cosines
        if kind == "sparse":
            cosines = bodies.sparse_cosines
        sentences = body.inputs.sentences
        if not sentences:
            raise ServeError("Empty", "`inputs.sentences` cannot be empty")
        options = self._encode_options(body.parameters or bodies.Encoded())
        outcome = await self._encode(kind, [body.inputs.source_sentence, *sentences], options)
        source, *others = outcome.rows
        similarities = await self.service.run_in_thread(cosines, source, others)
        return self._record_and_respond(bodies.to_json(similarities), outcome, kind)

    async def predict(self, body: bodies.Predict, request: Request) -> Response:
        """Refuse a request to ``/predict``, which asks for the class of a text."""
        raise wrong_model_error("model is not a classifier model")

    async def vertex(self, body: bodies.Vertex, request: Request) -> Response:
        """Answer a request of Google Vertex AI, whose ``instances`` are bodies of other routes.

        An instance with ``query`` and ``texts`` is answered like a request to ``/rerank``, and any
        other instance like one to ``/``. The response ``{"predictions": [...]}`` has one answer per
        instance. If an instance fails, the response is its error.
        """
        if not body.instances:
            raise ServeError("Empty", "`instances` cannot be empty")
        self.service.check_batch_size(body.instances)
        requests: list[tuple[Handler, bodies.Body]] = []
        for position, instance in enumerate(body.instances):
            route = self._root_route()
            if isinstance(instance, dict) and {"query", "texts"} <= instance.keys():
                route = replace(route, body=bodies.Rerank, handler=self.rerank)
            try:
                requests.append((route.handler, route.body.model_validate(instance)))
            except ValidationError as error:
                raise invalid_input_error(describe_error(error, f"instances.{position}")) from None
        tasks = [
            asyncio.ensure_future(handler(instance, request)) for handler, instance in requests
        ]
        responses = await gather_or_cancel(tasks)
        content = bodies.json_list([bytes(response.body) for response in responses])
        return Response(b'{"predictions":' + content + b"}", media_type=JSON)

    async def tokenize(self, body: bodies.Tokenize, request: Request) -> Response:
        """Answer with the tokens of texts.

        A prompt is added only if the request names one. Worker threads tokenize a few texts at a
        time, so that a long request does not delay others.
        """
        service = self.service
        model = service.first_model
        texts = body.inputs
        with service.acquire_inputs(texts):
            if not all(texts):
                raise empty_input_error("inputs")
            service.check_size(texts, model, self.side)
            prompt = ""
            if body.prompt_name is not None:
                key = model.batch_key(self.side, body.prompt_name)
                prompt = model.prompt(key)

            def serialize(texts: list[str]) -> list[bytes]:
                tokens = model.tokenizer.tokenize(
                    texts,
                    body.add_special_tokens,
                    prompt,
                    in_bytes=body.offsets == "bytes",
                )
                return list(map(bodies.to_json, tokens))

            rows = await service.map_in_portions(texts, serialize, pool="tokenizers")
        return Response(bodies.json_list(rows), media_type=JSON)

    async def decode(self, body: bodies.Decode, request: Request) -> Response:
        """Answer with the text of each list of token ids.

        Worker threads decode a few lists at a time, so that a long request does not delay others.
        """
        service = self.service
        model = service.first_model
        with service.acquire_inputs(body.ids, "ids"):
            service.check_size(body.ids, model, self.side, "ids")

            def serialize(id_lists: list[list[int]]) -> list[bytes]:
                return [
                    bodies.to_json(model.tokenizer.decode(ids, body.skip_special_tokens))
                    for ids in id_lists
                ]

            rows = await service.map_in_portions(body.ids, serialize, pool="tokenizers")
        return Response(bodies.json_list(rows), media_type=JSON)

    async def info(self, request: Request) -> Response:
        """Answer with the first model and the limits, in text-embeddings-inference's format."""
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
            "invariant": {model.kind: model.invariant for model in models},
            "acceleration": {model.kind: model.acceleration for model in models},
            "side": self.side,
        }
        if self.service.searchable is not None:
            content["search_precision"] = self.service.searchable.searcher.precisions
        if self.service.follower is not None:
            content["index"] = self.service.follower.info()
        return Response(bodies.to_json(content), media_type=JSON)

    async def metrics(self, request: Request) -> Response:
        """Answer with the metrics in Prometheus's text format."""
        return Response(self.service.metrics.render(), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        """Answer with status 200 if the service is healthy, and 503 otherwise."""
        if self.service.healthy:
            return Response()
        error = ServeError("Unhealthy", "unhealthy")
        return Response(error.body(), error.status, media_type=JSON)

    async def live(self, request: Request) -> Response:
        """Answer with status 503 if only a restart makes the service work again, else with 200."""
        if self.service.live:
            return Response()
        error = ServeError("Unhealthy", "a worker thread has ended")
        return Response(error.body(), error.status, media_type=JSON)


def _positions_by_score(scores: Sequence[float]) -> list[int]:
    """Return the positions of scores, highest score first; ties keep the order of positions."""
    return sorted(range(len(scores)), key=lambda position: -scores[position])


def _ranked_texts(
    texts: Sequence[str],
    scores: Sequence[float],
    ranking: Sequence[int],
    return_text: bool,
) -> list[dict[str, Any]]:
    """Describe ranked texts in text-embeddings-inference's response format.

    An entry is ``{"index": position, "score": score}``, with ``"text"`` if `return_text`.

    Args:
        texts: the texts of the request.
        scores: the score of each text.
        ranking: positions of the texts, highest score first.
        return_text: whether entries contain the text.
    """
    ranked = []
    for position in ranking:
        entry: dict[str, Any] = {"index": position, "score": scores[position]}
        if return_text:
            entry["text"] = texts[position]
        ranked.append(entry)
    return ranked


def _ranked_documents(
    documents: Sequence[str | ImageData],
    scores: Sequence[float],
    ranking: Sequence[int],
    return_documents: bool,
) -> list[dict[str, Any]]:
    """Describe ranked documents in Cohere's response format.

    An entry is ``{"index": position, "relevance_score": score}``, with ``"document"`` if
    `return_documents` and the document is a text. Images are not sent back.

    Args:
        documents: the texts and images of the request's documents.
        scores: the score of each document.
        ranking: positions of the documents, highest score first.
        return_documents: whether entries contain the document.
    """
    ranked = []
    for position in ranking:
        entry: dict[str, Any] = {"index": position, "relevance_score": scores[position]}
        document = documents[position]
        if return_documents and isinstance(document, str):
            entry["document"] = {"text": document}
        ranked.append(entry)
    return ranked


def _maxsim_scores(
    query: torch.Tensor,
    documents: Sequence[torch.Tensor],
    reduction: Reduction,
) -> list[float]:
    """Score documents against a query by MaxSim.

    For each token vector of the query, MaxSim takes the largest inner product with a token vector
    of the document. The score is the sum or the mean of these maxima.

    Args:
        query: token vectors of the query, ``[Lq, D]``.
        documents: token vectors of each document, ``[Ld, D]``.
        reduction: whether the maxima are added or averaged.

    Returns:
        The score of each document.
    """
    # The service encodes equal texts once, so that they are the same tensor object, which is scored
    # once. Scored twice, the same document could get two different scores, because rounding may
    # depend on the position in the batch.
    distinct = {id(document): document for document in documents}
    lengths = [document.size(0) for document in distinct.values()]
    offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    with torch.no_grad():
        scores = maxsim(
            query[None],
            torch.cat(list(distinct.values())),
            cu_seqlens_d=offsets,
            reduction=reduction,
        )
    score_of_tensor = dict(zip(distinct, scores[0].tolist(), strict=True))
    return [score_of_tensor[id(document)] for document in documents]


def _decode_or_check_token_ids(
    tokenizer: TextTokens,
    inputs: list[Any],
    has_prompt: bool,
) -> list[Any]:
    """Prepare lists of token ids to be encoded: as texts if there is a prompt, else as tuples.

    A prompt can only be put before a text. A tuple can be the key of a dictionary, as equal inputs
    are encoded once.

    Args:
        tokenizer: the model's tokenizer.
        inputs: texts and images, which are returned unchanged, or lists of token ids.
        has_prompt: whether the model puts a prompt before each input.

    Returns:
        A text, an image or a tuple of token ids for each input.

    Raises:
        ServeError: if no token of the model has one of the ids.
    """
    encodable: list[Any] = []
    for item in inputs:
        if not isinstance(item, list):
            encodable.append(item)
        elif has_prompt:
            # The tokenizer adds special tokens such as [CLS] again, together with the prompt.
            encodable.append(tokenizer.decode(item, skip_special_tokens=True))
        else:
            tokenizer.check_ids(item)
            encodable.append(tuple(item))
    return encodable


def _dense_vectors_base64(rows: Sequence[bodies.Vector]) -> list[bytes]:
    """Serialize dense vectors ``[D]`` to JSON strings: base64 of little-endian fp32 numbers."""
    return [b'"%b"' % base64.b64encode(row.astype("<f4").tobytes()) for row in rows]


def _count_usage(outcome: Outcome) -> dict[str, int]:
    """Return the token counts in the format of the field ``usage`` of OpenAI and Cohere."""
    return {"prompt_tokens": outcome.tokens, "total_tokens": outcome.tokens}


def _method_label(inputs: Any) -> str:
    """Return ``"single"`` for a request with one input, and ``"batch"`` for one with a list.

    It is the label ``method`` of text-embeddings-inference's metrics.
    """
    return "single" if isinstance(inputs, bodies.Single) else "batch"


def _shorten(row: Any, dimensions: int | None, normalize: bool) -> Any:
    """Keep the first dimensions of a dense vector, and scale it to length 1.

    Args:
        row: the vector, ``[D]``.
        dimensions: number of dimensions to keep; ``None`` keeps all.
        normalize: whether to scale the vector. Otherwise it is only shortened.

    Raises:
        ServeError: if the vector has fewer dimensions.
    """
    if dimensions is not None and dimensions > len(row):
        raise invalid_input_error(f"`dimensions` expected at most {len(row)}, got {dimensions}")
    shortened = row[:dimensions]
    length = float(np.linalg.norm(shortened))
    return shortened / length if normalize and length > 0 else shortened
