"""The routes of text-embeddings-inference, for one side."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import ValidationError

from tilefold._version import __version__
from tilefold.serve import answers, bodies, reranking
from tilefold.serve.endpoints import JSON, Work, add_get, add_post
from tilefold.serve.errors import ServeError, empty, invalid, wrong_model
from tilefold.serve.models import Kind, Side
from tilefold.serve.service import Asked, Outcome, Service
from tilefold.serve.text import TextTokens

__all__ = ["Routes"]


class Routes:
    """The routes of text-embeddings-inference 1.9 for inputs of one side.

    Args:
        service: answers.
        side: of inputs whose request names no other with ``prompt_name``.
    """

    def __init__(self, service: Service, side: Side) -> None:
        self.service, self.side = service, side

    def router(self) -> APIRouter:
        """All of them."""
        router, main, rerank = APIRouter(), self._main(), (bodies.Rerank, self.rerank)
        posts: dict[str, tuple[type[bodies.Body], Work, str]] = {
            "/embed_sparse": (bodies.EmbedSparse, self.embed_sparse, "Sparse vectors"),
            "/embed_all": (bodies.EmbedAll, self.embed_all, "A vector for each token"),
            "/embed": (bodies.Embed, self.embed, "Dense vectors"),
            "/rerank": (*rerank, "Texts or documents, ranked by late interaction"),
            "/v1/rerank": (*rerank, "As /rerank"),
            "/v2/rerank": (*rerank, "As /rerank"),
            "/score": (bodies.Score, self.score, "Scores of pairs by late interaction"),
            "/similarity": (bodies.Similarity, self.similarity, "Cosine similarity of a sentence with others"),
            "/predict": (bodies.Predict, self.predict, "Classes, for which there is no model here"),
            "/vertex": (bodies.Vertex, self.vertex, "Several bodies at once, as Google Vertex AI asks"),
            "/tokenize": (bodies.Tokenize, self.tokenize, "Tokens of texts"),
            "/decode": (bodies.Decode, self.decode, "Texts of token ids"),
            "/": (*main, "What the first model makes, as SageMaker and the Inference API ask for it"),
            "/invocations": (*main, "What the first model makes, as SageMaker asks for it"),
        }
        for path in ("/v1/embeddings", "/embeddings"):
            posts[path] = (bodies.OpenAIEmbeddings, self.openai, "Dense vectors, as OpenAI answers")
        for path, (body, work, summary) in posts.items():
            failed = ServeError.openai_body if body is bodies.OpenAIEmbeddings else ServeError.body
            add_post(router, path, body, work, self.service, summary, failed)
        for path, answer, summary in (
            ("/info", self.info, "The model, and the limits"),
            ("/metrics", self.metrics, "For Prometheus"),
            ("/health", self.health, "200 or 503"),
            ("/ping", self.health, "200 or 503"),
        ):
            add_get(router, path, answer, self.service, summary)
        return router

    def _main(self) -> tuple[type[bodies.Body], Work]:
        """Form of a body of the first model, and what answers it."""
        by_kind: dict[Kind, tuple[type[bodies.Body], Work]] = {
            "sparse": (bodies.EmbedSparse, self.embed_sparse),
            "multi-vector": (bodies.Rerank, self.rerank),
            "dense": (bodies.Embed, self.embed),
        }
        return next((forms for kind, forms in by_kind.items() if kind in self.service.models), by_kind["dense"])

    def asked(self, body: Any) -> Asked:
        """Encoding that a body asks for."""
        return Asked(self.side, body.prompt_name, body.truncate, body.truncation_direction)

    async def _encoded(self, kind: Kind, inputs: list[Any], asked: Asked, name: str = "inputs") -> Outcome:
        """Rows of texts, and of token ids as they are; a prompt of the request goes before the text of ids."""
        service = self.service
        model = service.model(kind)
        service.metrics.count("te_request_count", method=_method(inputs))
        with service.permit(inputs, name):
            if not all(isinstance(each, str) for each in inputs):
                way = model.way(asked.side, asked.prompt_name)
                prompted = asked.prompt_name is not None and model.prompt(way) != ""
                inputs = await service.off_loop(_resolved, model.text, inputs, prompted)
            return await service.encode(kind, inputs, asked)

    def answer(self, content: bytes, outcome: Outcome, kind: Kind, method: str) -> Response:
        """The response, noted in the metrics."""
        self.service.record(outcome, method)
        return Response(content, media_type=JSON, headers=outcome.headers(self.service.model(kind).device))

    async def _written(
        self, rows: list[Any], write: Callable[[list[Any]], list[bytes]], size: Callable[[Any], int] = len
    ) -> bytes:
        """JSON list of the rows, which a helper thread writes."""
        return answers.listed(await self.service.in_portions(rows, write, self.service.off_loop, size))

    async def _embedded(
        self,
        kind: Kind,
        body: bodies.EmbedAll,
        write: Callable[[list[Any]], list[bytes]],
        size: Callable[[Any], int] = len,
        shape: Callable[[Any], Any] = lambda row: row,
        asked: Asked | None = None,
    ) -> Response:
        outcome = await self._encoded(kind, body.inputs, asked or self.asked(body))
        content = await self._written([shape(row) for row in outcome.rows], write, size)
        return self.answer(content, outcome, kind, _method(body.inputs))

    async def embed_sparse(self, body: bodies.EmbedSparse, request: Request) -> Response:
        """``[[{"index", "value"}]]``, a list per input."""
        write = partial(answers.sparse_rows, body=body, text=self.service.model("sparse").text)
        return await self._embedded("sparse", body, write, lambda row: len(row[0]))

    async def embed_all(self, body: bodies.EmbedAll, request: Request) -> Response:
        """``[[[float]]]``: the token vectors of each input that take part in scores."""
        return await self._embedded("multi-vector", body, answers.matrices, lambda row: row.numel())

    async def embed(self, body: bodies.Embed, request: Request) -> Response:
        """``[[float]]``."""
        self._refuse_dense()
        shape = partial(_shaped, dimensions=body.dimensions, normalize=body.normalize)
        asked = replace(self.asked(body), normalize=body.normalize)
        return await self._embedded("dense", body, answers.vectors, shape=shape, asked=asked)

    async def openai(self, body: bodies.OpenAIEmbeddings, request: Request) -> Response:
        """``{"object": "list", "data": [{"embedding"}]}``."""
        self._refuse_dense()
        outcome = await self._encoded("dense", body.input, Asked(self.side), "input")
        rows = [_shaped(row, body.dimensions, True) for row in outcome.rows]
        write = partial(_openai_entries, body.encoding_format == "base64")
        entries = await self._written(list(enumerate(rows)), write, lambda each: len(each[1]))
        usage = {"prompt_tokens": outcome.tokens, "total_tokens": outcome.tokens}
        rest = answers.plain({"model": self.service.model("dense").name, "usage": usage})
        content = b'{"object":"list","data":' + entries + b"," + rest[1:]
        return self.answer(content, outcome, "dense", _method(body.input))

    def _refuse_dense(self) -> None:
        if "dense" not in self.service.models and "sparse" in self.service.models:
            raise wrong_model("the model makes sparse vectors: POST /embed_sparse with inputs, or serve a dense model")
        self.service.model("dense")

    async def rerank(self, body: bodies.Rerank, request: Request) -> Response:
        """Best first; see :mod:`tilefold.serve.reranking`."""
        self.service.metrics.count("te_request_count", method="batch")
        return self.answer(*await reranking.rerank(self.service, body), "multi-vector", "batch")

    async def score(self, body: bodies.Score, request: Request) -> Response:
        """In the order of the request."""
        self.service.metrics.count("te_request_count", method="batch")
        return self.answer(*await reranking.score(self.service, body), "multi-vector", "batch")

    async def similarity(self, body: bodies.Similarity, request: Request) -> Response:
        """``[float]``: cosines of the vectors, sparse or dense."""
        given, kinds = body.inputs, self.service.models.keys() & {"sparse", "dense"}
        if not kinds:
            raise wrong_model(
                "the model makes a vector of each token: POST /rerank, or serve a SparseEncoder or SentenceTransformer"
            )
        kind: Kind = "sparse" if "sparse" in kinds else "dense"
        if not given.sentences:
            raise ServeError("Empty", "`inputs.sentences` cannot be empty")
        asked = self.asked(body.parameters or bodies.Encoded())
        outcome = await self._encoded(kind, [given.source_sentence, *given.sentences], asked)
        content = await self.service.off_loop(lambda: answers.plain(answers.cosines(outcome.rows, kind)))
        return self.answer(content, outcome, kind, "batch")

    async def predict(self, body: bodies.Predict, request: Request) -> Response:
        """No answer: 424, as of text-embeddings-inference with a model that embeds."""
        raise wrong_model("model is not a classifier model")

    async def vertex(self, body: bodies.Vertex, request: Request) -> Response:
        """``{"predictions": [...]}``: the answer to each instance. The first error is that of all."""
        if not body.instances:
            raise ServeError("Empty", "`instances` cannot be empty")
        self.service.check_batch(body.instances)
        checked: list[tuple[bodies.Body, Work]] = []
        for at, instance in enumerate(body.instances):
            ranked = isinstance(instance, dict) and {"query", "texts"} <= instance.keys()
            form, work = (bodies.Rerank, self.rerank) if ranked else self._main()
            try:
                checked.append((form.model_validate(instance), work))
            except ValidationError as error:
                raise invalid(bodies.explained(error, f"instances.{at}")) from None
        found = await _all([work(each, request) for each, work in checked])
        content = answers.listed([bytes(answer.body) for answer in found])
        return Response(b'{"predictions":' + content + b"}", media_type=JSON)

    async def tokenize(self, body: bodies.Tokenize, request: Request) -> Response:
        """``[[{"id", "text", "special", "start", "stop"}]]``."""
        model, texts = self.service.first_model, body.inputs
        with self.service.permit(texts):
            if not all(texts):
                raise empty("inputs")
            self.service.check_size(texts, model, self.side)
            prompt = "" if body.prompt_name is None else model.prompt(model.way(self.side, body.prompt_name))
            write = partial(_tokens, model.text, body, prompt)
            found = await self.service.in_portions(texts, write, self.service.in_tokenizer)
        return Response(answers.listed(found), media_type=JSON)

    async def decode(self, body: bodies.Decode, request: Request) -> Response:
        """``[text]``."""
        service, model = self.service, self.service.first_model
        with service.permit(body.ids, "ids"):
            service.check_size(body.ids, model, self.side, "ids")
            write = partial(_texts, model.text, body.skip_special_tokens)
            found = await service.in_portions(body.ids, write, service.in_tokenizer)
        return Response(answers.listed(found), media_type=JSON)

    async def info(self, request: Request) -> Response:
        """The first model, and the limits."""
        limits, model = self.service.limits, self.service.first_model
        shown = ("max_concurrent_requests", "max_batch_tokens", "max_client_batch_size", "auto_truncate")
        answer = {
            "model_id": model.name,
            "model_sha": None,
            "model_dtype": model.dtype,
            "served_model_name": model.name,
            "model_type": model.type,
            "max_input_length": model.limit(self.side),
            "max_batch_requests": None,
            **{name: getattr(limits, name) for name in (*shown, "tokenization_workers")},
            "version": __version__,
            "sha": None,
            "docker_label": None,
            "models": {each.kind: each.name for each in self.service.models.values()},
            "side": self.side,
        }
        return Response(answers.plain(answer), media_type=JSON)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus."""
        return Response(self.service.metrics.render(), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        """Empty with 200, or 503."""
        if self.service.healthy:
            return Response()
        error = ServeError("Unhealthy", "unhealthy")
        return Response(error.body(), error.status, media_type=JSON)


async def _all(parts: Sequence[Awaitable[Response]]) -> list[Response]:
    """The results in their order; where one fails, the others end before its error is raised."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


# work of helper threads, where a body of 2 MB keeps nobody else waiting
def _resolved(text: TextTokens, inputs: list[Any], prompted: bool) -> list[Any]:
    read = (lambda ids: text.decode(ids, True)) if prompted else (lambda ids: tuple(text.known(ids)))
    return [each if isinstance(each, str) else read(each) for each in inputs]


def _texts(text: TextTokens, skip_special: bool, ids: list[list[int]]) -> list[bytes]:
    return [answers.plain(text.decode(each, skip_special)) for each in ids]


def _tokens(text: TextTokens, body: bodies.Tokenize, prompt: str, texts: list[str]) -> list[bytes]:
    in_bytes = body.offsets == "bytes"
    return [answers.plain(each) for each in text.tokenize(texts, body.add_special_tokens, prompt, in_bytes=in_bytes)]


def _openai_entries(in_base64: bool, rows: list[tuple[int, Any]]) -> list[bytes]:
    coded = [
        b'"' + base64.b64encode(row.astype("<f4").tobytes()) + b'"' if in_base64 else answers.vectors([row])[0]
        for _, row in rows
    ]
    entry = b'{"object":"embedding","embedding":%b,"index":%d}'
    return [entry % (vector, at) for (at, _), vector in zip(rows, coded, strict=True)]


def _method(inputs: Any) -> str:
    return "single" if isinstance(inputs, bodies.Single) else "batch"


def _shaped(row: Any, dimensions: int | None, normalize: bool) -> Any:
    """A dense vector, cut to its first dimensions and then of length 1, if asked for."""
    if dimensions is not None and dimensions > len(row):
        raise invalid(f"`dimensions` expected at most {len(row)}, got {dimensions}")
    cut = row[:dimensions]
    length = float(np.linalg.norm(cut))
    return cut / length if normalize and length > 0 else cut
