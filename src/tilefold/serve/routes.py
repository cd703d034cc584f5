"""The routes of text-embeddings-inference 1.9, OpenAI, Cohere, vLLM, Google Vertex and SageMaker,
for one side.
"""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
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
from tilefold.serve.endpoints import JSON, add_route, explained
from tilefold.serve.models import Kind, Side, TextTokens
from tilefold.serve.service import Asked, Outcome, Service, all_of

Work = Callable[[Any, Request], Awaitable[Response]]
Write = Callable[[list[Any]], list[bytes]]
_SHOWN = (
    "max_concurrent_requests",
    "max_batch_tokens",
    "max_client_batch_size",
    "auto_truncate",
    "tokenization_workers",
)


class Routes:
    """The routes for inputs of one `side`, unless their request names the other with
    ``prompt_name``.
    """

    def __init__(self, service: Service, side: Side) -> None:
        self.service, self.side = service, side
        by_kind: dict[Kind, tuple[type[bodies.Body], Work]] = {
            "sparse": (bodies.EmbedSparse, self.embed_sparse),
            "multi-vector": (bodies.Rerank, self.rerank),
            "dense": (bodies.Embed, self.embed),
        }
        # a body for the first model, and what answers it
        self._main = next(
            (main for kind, main in by_kind.items() if kind in service.models),
            by_kind["dense"],
        )

    def router(self) -> APIRouter:
        router, rerank = APIRouter(), (bodies.Rerank, self.rerank)
        openai = (bodies.OpenAIEmbeddings, self.openai, "Dense vectors, as OpenAI answers")
        posts: dict[str, tuple[type[bodies.Body], Work, str]] = {
            "/embed_sparse": (bodies.EmbedSparse, self.embed_sparse, "Sparse vectors"),
            "/embed_all": (bodies.EmbedAll, self.embed_all, "A vector for each token"),
            "/embed": (bodies.Embed, self.embed, "Dense vectors"),
            "/rerank": (*rerank, "Texts or documents, ranked by late interaction"),
            "/v1/rerank": (*rerank, "As /rerank"),
            "/v2/rerank": (*rerank, "As /rerank"),
            "/score": (bodies.Score, self.score, "Scores of pairs by late interaction"),
            "/similarity": (
                bodies.Similarity,
                self.similarity,
                "Cosine similarity of a sentence with others",
            ),
            "/predict": (bodies.Predict, self.predict, "Classes, for which there is no model here"),
            "/vertex": (
                bodies.Vertex,
                self.vertex,
                "Several bodies at once, as Google Vertex AI asks",
            ),
            "/tokenize": (bodies.Tokenize, self.tokenize, "Tokens of texts"),
            "/decode": (bodies.Decode, self.decode, "Texts of token ids"),
            "/": (
                *self._main,
                "What the first model makes, as SageMaker and the Inference API ask for it",
            ),
            "/invocations": (*self._main, "What the first model makes, as SageMaker asks for it"),
            "/v1/embeddings": openai,
            "/embeddings": openai,
        }
        for path, (body, work, summary) in posts.items():
            failed = ServeError.openai_body if body is bodies.OpenAIEmbeddings else ServeError.body
            add_route(router, self.service, path, work, summary, body, failed)
        add_route(router, self.service, "/info", self.info, "The model, and the limits")
        add_route(router, self.service, "/metrics", self.metrics, "For Prometheus")
        for path in ("/health", "/ping"):
            add_route(router, self.service, path, self.health, "200 or 503")
        return router

    def _asked(self, body: bodies.Encoded, normalize: bool = True) -> Asked:
        return Asked(
            self.side,
            body.prompt_name,
            body.truncate,
            body.truncation_direction,
            normalize,
        )

    async def _encoded(
        self,
        kind: Kind,
        inputs: list[Any],
        asked: Asked,
        name: str = "inputs",
    ) -> Outcome:
        """Rows of texts, and of token ids as they are; a prompt of the request goes before the text
        of ids.
        """
        service = self.service
        model = service.model(kind)
        service.metrics.count("te_request_count", method=_method(inputs))
        with service.permit(inputs, name):
            if not all(isinstance(each, str) for each in inputs):
                way = model.way(asked.side, asked.prompt_name)
                prompted = asked.prompt_name is not None and model.prompt(way) != ""
                inputs = await service.off_loop(_resolved, model.text, inputs, prompted)
            return await service.encode(kind, inputs, asked)

    def _answer(
        self,
        content: bytes,
        outcome: Outcome,
        kind: Kind,
        method: str = "batch",
    ) -> Response:
        """The response, noted in the metrics."""
        self.service.record(outcome, method)
        answer = Response(content, media_type=JSON)
        answer.raw_headers += outcome.headers(self.service.model(kind).device)
        return answer

    async def _written(
        self,
        rows: list[Any],
        write: Write,
        size: Callable[[Any], int] = len,
    ) -> bytes:
        """JSON list of the rows; many are written by a helper thread."""
        return bodies.listed(await self.service.helped(rows, write, size))

    async def _vectors(
        self,
        kind: Kind,
        body: bodies.EmbedAll,
        write: Write,
        size: Callable[[Any], int] = len,
        normalize: bool = True,
    ) -> Response:
        outcome = await self._encoded(kind, body.inputs, self._asked(body, normalize))
        return self._answer(
            await self._written(outcome.rows, write, size),
            outcome,
            kind,
            _method(body.inputs),
        )

    async def embed_sparse(self, body: bodies.EmbedSparse, request: Request) -> Response:
        write = partial(
            bodies.sparse_rows,
            body=body,
            token=self.service.model("sparse").text.token,
        )
        return await self._vectors("sparse", body, write, lambda row: len(row[0]))

    async def embed_all(self, body: bodies.EmbedAll, request: Request) -> Response:
        return await self._vectors("multi-vector", body, bodies.matrices, lambda row: row.numel())

    async def embed(self, body: bodies.Embed, request: Request) -> Response:
        self._check_dense()

        def write(rows: Sequence[bodies.Vector]) -> list[bytes]:
            return bodies.vectors([_shaped(row, body.dimensions, body.normalize) for row in rows])

        return await self._vectors("dense", body, write, normalize=body.normalize)

    async def openai(self, body: bodies.OpenAIEmbeddings, request: Request) -> Response:
        self._check_dense()
        outcome = await self._encoded("dense", body.input, Asked(self.side), "input")
        rows = [_shaped(row, body.dimensions, True) for row in outcome.rows]
        write = partial(_openai_entries, body.encoding_format == "base64")
        entries = await self._written(list(enumerate(rows)), write, lambda each: len(each[1]))
        rest = bodies.plain({"model": self.service.model("dense").name, "usage": _usage(outcome)})
        content = b'{"object":"list","data":' + entries + b"," + rest[1:]
        return self._answer(content, outcome, "dense", _method(body.input))

    def _check_dense(self) -> None:
        if "dense" not in self.service.models and "sparse" in self.service.models:
            raise wrong_model(
                "the model makes sparse vectors: POST /embed_sparse with inputs, or serve a dense model",
            )
        self.service.model("dense")

    async def rerank(self, body: bodies.Rerank, request: Request) -> Response:
        """A list of indices and scores for ``texts``, an object with ``results`` for ``documents``;
        best first.
        """
        self.service.metrics.count("te_request_count", method="batch")
        if (body.texts is None) == (body.documents is None):
            raise invalid("`texts` or `documents`: expected one of them")
        texts: list[str] = body.texts if body.texts is not None else body.documents or []
        scores, outcome = await self._scored(
            [body.query],
            texts,
            body,
            "documents" if body.texts is None else "texts",
        )
        order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
        if body.documents is None:
            shown = [{"text": text} if body.return_text else {} for text in texts]
            found: Any = [{"index": at, "score": scores[at]} | shown[at] for at in order]
            return self._answer(bodies.plain(found), outcome, "multi-vector")
        results = [
            {"index": at, "relevance_score": scores[at]}
            | ({"document": {"text": texts[at]}} if body.return_documents else {})
            for at in order[: body.top_n]
        ]
        name = self.service.model("multi-vector").name
        found = {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": name,
            "usage": _usage(outcome),
            "results": results,
        }
        return self._answer(bodies.plain(found), outcome, "multi-vector")

    async def score(self, body: bodies.Score, request: Request) -> Response:
        """Scores in the order of the request, as vLLM answers."""
        self.service.metrics.count("te_request_count", method="batch")
        queries, texts = body.queries, body.documents
        if queries is None or texts is None:
            raise invalid("expected `queries` and `documents` (or `text_1` and `text_2`)")
        if len(queries) not in (1, len(texts)):
            raise invalid(
                f"`queries`: expected 1 or as many as documents ({len(texts)}), got {len(queries)}",
            )
        if not queries:
            raise ServeError("Empty", "`queries` cannot be empty")
        scores, outcome = await self._scored(queries, texts, body, "documents")
        found = {
            "id": f"score-{uuid.uuid4().hex}",
            "object": "list",
            "model": self.service.model("multi-vector").name,
            "data": [
                {"index": at, "object": "score", "score": value} for at, value in enumerate(scores)
            ],
            "usage": _usage(outcome),
        }
        return self._answer(bodies.plain(found), outcome, "multi-vector")

    async def _scored(
        self,
        queries: list[str],
        texts: list[str],
        body: bodies.Rerank | bodies.Score,
        name: str,
    ) -> tuple[list[float], Outcome]:
        """The score of the one query with every text, or of each query with the text at its place."""
        service = self.service
        with service.permit(texts, name):
            model = service.model("multi-vector")
            how = Asked("query", None, body.truncate, body.truncation_direction, counted=None)
            asked = await service.encode("multi-vector", queries, how)
            outcome = await service.encode(
                "multi-vector",
                texts,
                replace(how, side="document", counted="predict"),
            )
            # of pairs, as text-embeddings-inference counts
            outcome.characters += asked.characters * len(texts) // len(queries)
            outcome.tokens += asked.tokens
            outcome.started = asked.started
            pairs = [(asked.rows[0], outcome.rows)]
            if len(queries) > 1:
                pairs = [
                    (query, [row]) for query, row in zip(asked.rows, outcome.rows, strict=True)
                ]
            # a model that compares by the mean has no sum
            raw = body.raw_scores and model.model.similarity_fn_name != "meanmaxsim"
            parts = await service.on_device(
                model,
                lambda: [_late_scores(query, rows, raw) for query, rows in pairs],
            )
            return [value for part in parts for value in part], outcome

    async def similarity(self, body: bodies.Similarity, request: Request) -> Response:
        given, kinds = body.inputs, self.service.models.keys() & {"sparse", "dense"}
        if not kinds:
            raise wrong_model(
                "the model makes a vector of each token: POST /rerank, or serve a sparse or dense one",
            )
        kind: Kind = "sparse" if "sparse" in kinds else "dense"
        if not given.sentences:
            raise ServeError("Empty", "`inputs.sentences` cannot be empty")
        asked = self._asked(body.parameters or bodies.Encoded())
        outcome = await self._encoded(kind, [given.source_sentence, *given.sentences], asked)
        content = await self.service.off_loop(
            lambda: bodies.plain(bodies.cosines(outcome.rows, kind)),
        )
        return self._answer(content, outcome, kind)

    async def predict(self, body: bodies.Predict, request: Request) -> Response:
        raise wrong_model("model is not a classifier model")

    async def vertex(self, body: bodies.Vertex, request: Request) -> Response:
        """``{"predictions": [...]}``: the answer to each instance. The first error is that of all."""
        if not body.instances:
            raise ServeError("Empty", "`instances` cannot be empty")
        self.service.check_batch(body.instances)
        checked: list[tuple[bodies.Body, Work]] = []
        for at, instance in enumerate(body.instances):
            ranked = isinstance(instance, dict) and {"query", "texts"} <= instance.keys()
            body_of, work = (bodies.Rerank, self.rerank) if ranked else self._main
            try:
                checked.append((body_of.model_validate(instance), work))
            except ValidationError as error:
                raise invalid(explained(error, f"instances.{at}")) from None
        found = await all_of([asyncio.ensure_future(work(each, request)) for each, work in checked])
        content = bodies.listed([bytes(answer.body) for answer in found])
        return Response(b'{"predictions":' + content + b"}", media_type=JSON)

    async def tokenize(self, body: bodies.Tokenize, request: Request) -> Response:
        model, texts = self.service.first_model, body.inputs
        with self.service.permit(texts):
            if not all(texts):
                raise empty("inputs")
            self.service.check_size(texts, model, self.side)
            prompt = (
                ""
                if body.prompt_name is None
                else model.prompt(model.way(self.side, body.prompt_name))
            )

            def write(texts: list[str]) -> list[bytes]:
                found = model.text.tokenize(
                    texts,
                    body.add_special_tokens,
                    prompt,
                    in_bytes=body.offsets == "bytes",
                )
                return list(map(bodies.plain, found))

            found = await self.service.in_portions(texts, write, tokenizes=True)
        return Response(bodies.listed(found), media_type=JSON)

    async def decode(self, body: bodies.Decode, request: Request) -> Response:
        service, model = self.service, self.service.first_model
        with service.permit(body.ids, "ids"):
            service.check_size(body.ids, model, self.side, "ids")

            def write(ids: list[list[int]]) -> list[bytes]:
                return [
                    bodies.plain(model.text.decode(each, body.skip_special_tokens)) for each in ids
                ]

            found = await service.in_portions(body.ids, write, tokenizes=True)
        return Response(bodies.listed(found), media_type=JSON)

    async def info(self, request: Request) -> Response:
        model = self.service.first_model
        answer = {
            "model_id": model.name,
            "model_sha": None,
            "model_dtype": model.dtype,
            "served_model_name": model.name,
            "model_type": model.type,
            "max_input_length": model.limit(self.side),
            "max_batch_requests": None,
            **{name: getattr(self.service.limits, name) for name in _SHOWN},
            "version": __version__,
            "sha": None,
            "docker_label": None,
            "models": {each.kind: each.name for each in self.service.models.values()},
            "precision": {each.kind: each.precision for each in self.service.models.values()},
            "side": self.side,
        }
        return Response(bodies.plain(answer), media_type=JSON)

    async def metrics(self, request: Request) -> Response:
        return Response(self.service.metrics.render(), media_type="text/plain; version=0.0.4")

    async def health(self, request: Request) -> Response:
        if self.service.healthy:
            return Response()
        error = ServeError("Unhealthy", "unhealthy")
        return Response(error.body(), error.status, media_type=JSON)


def _late_scores(query: torch.Tensor, documents: Sequence[torch.Tensor], raw: bool) -> list[float]:
    """MaxSim of a query ``[Lq, D]`` with documents ``[Ld, D]``: the sum over query tokens if `raw`,
    else their mean.
    """
    distinct = {
        id(row): row for row in documents
    }  # of texts that are equal: where a row stands may change its sum
    lengths = torch.tensor([0, *(row.size(0) for row in distinct.values())], dtype=torch.int32)
    offsets = lengths.cumsum(0, dtype=torch.int32)
    with torch.no_grad():
        rows = torch.cat(list(distinct.values()))
        scores = maxsim(query[None], rows, cu_seqlens_d=offsets, reduction="sum" if raw else "mean")
    by_row = dict(zip(distinct, scores[0].tolist(), strict=True))
    return [by_row[id(row)] for row in documents]


# work of helper threads, where a body of 2 MB keeps nobody else waiting
def _resolved(text: TextTokens, inputs: list[Any], prompted: bool) -> list[Any]:
    read = (
        (lambda ids: text.decode(ids, True)) if prompted else (lambda ids: tuple(text.known(ids)))
    )
    return [each if isinstance(each, str) else read(each) for each in inputs]


def _openai_entries(in_base64: bool, rows: list[tuple[int, Any]]) -> list[bytes]:
    coded = [
        b'"' + base64.b64encode(row.astype("<f4").tobytes()) + b'"'
        if in_base64
        else bodies.vectors([row])[0]
        for _, row in rows
    ]
    entry = b'{"object":"embedding","embedding":%b,"index":%d}'
    return [entry % (vector, at) for (at, _), vector in zip(rows, coded, strict=True)]


def _usage(outcome: Outcome) -> dict[str, int]:
    return {"prompt_tokens": outcome.tokens, "total_tokens": outcome.tokens}


def _method(inputs: Any) -> str:
    return "single" if isinstance(inputs, bodies.Single) else "batch"


def _shaped(row: Any, dimensions: int | None, normalize: bool) -> Any:
    """A dense vector, cut to its first dimensions and then of length 1, if asked for."""
    if dimensions is not None and dimensions > len(row):
        raise invalid(f"`dimensions` expected at most {len(row)}, got {dimensions}")
    cut = row[:dimensions]
    length = float(np.linalg.norm(cut))
    return cut / length if normalize and length > 0 else cut
