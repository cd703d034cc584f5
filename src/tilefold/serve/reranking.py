"""``/rerank`` and ``/score`` by late interaction, in the forms of text-embeddings-inference, Cohere, Jina and vLLM."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

import torch

from tilefold.ops import maxsim
from tilefold.serve import bodies
from tilefold.serve.answers import plain
from tilefold.serve.errors import ServeError, invalid
from tilefold.serve.service import Asked, Outcome, Service

__all__ = ["late_scores", "rerank", "score"]


def late_scores(query: torch.Tensor, documents: Sequence[torch.Tensor], raw: bool, averaged: bool) -> list[float]:
    """MaxSim of a query ``[Lq, D]`` with documents ``[Ld, D]``; a tensor that comes twice has one score.

    Args:
        raw: the sum over query tokens; else their mean, which lies in [-1, 1] for vectors of length 1.
        averaged: the model compares by the mean, so that there is no sum.
    """
    distinct = {id(row): row for row in documents}  # of texts that are equal: where a row stands may change its sum
    lengths = [0, *(row.size(0) for row in distinct.values())]
    with torch.no_grad():
        scores = maxsim(
            query[None],
            torch.cat(list(distinct.values())),
            cu_seqlens_d=torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32),
            reduction="sum" if raw and not averaged else "mean",
        )
    by_row = dict(zip(distinct, scores[0].tolist(), strict=True))
    return [by_row[id(row)] for row in documents]


async def _scored(
    service: Service, queries: list[str], texts: list[str], body: bodies.Rerank | bodies.Score
) -> tuple[list[float], Outcome]:
    """The score of the one query with every text, or of each query with the text at its place."""
    model = service.model("multi-vector")
    direction = body.truncation_direction
    how = Asked("query", None, body.truncate, direction, counted=None)
    asked = await service.encode("multi-vector", queries, how)
    outcome = await service.encode("multi-vector", texts, replace(how, side="document", counted="predict"))
    outcome.characters += asked.characters * len(texts) // len(queries)  # of pairs, as text-embeddings-inference counts
    outcome.tokens += asked.tokens
    outcome.started = asked.started
    averaged = model.model.similarity_fn_name == "meanmaxsim"
    pairs = [(asked.rows[0], outcome.rows)] if len(queries) == 1 else [
        (query, [row]) for query, row in zip(asked.rows, outcome.rows, strict=True)
    ]  # fmt: skip
    parts = await service.on_device(
        model, lambda: [late_scores(query, rows, body.raw_scores, averaged) for query, rows in pairs]
    )
    return [value for part in parts for value in part], outcome


async def rerank(service: Service, body: bodies.Rerank) -> tuple[bytes, Outcome]:
    """The answer to ``texts`` is a list of indices and scores, that to ``documents`` an object with ``results``."""
    if (body.texts is None) == (body.documents is None):
        raise invalid("`texts` or `documents`: expected one of them")
    texts: list[str] = body.texts if body.texts is not None else body.documents or []
    with service.permit(texts, "documents" if body.texts is None else "texts"):
        scores, outcome = await _scored(service, [body.query], texts, body)
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
    if body.documents is None:
        shown = [{"text": text} if body.return_text else {} for text in texts]
        return plain([{"index": at, "score": scores[at]} | shown[at] for at in order]), outcome
    results = [
        {"index": at, "relevance_score": scores[at]}
        | ({"document": {"text": texts[at]}} if body.return_documents else {})
        for at in order[: body.top_n]
    ]
    usage = {"prompt_tokens": outcome.tokens, "total_tokens": outcome.tokens}
    name = service.model("multi-vector").name
    return plain({"id": f"rerank-{uuid.uuid4().hex}", "model": name, "usage": usage, "results": results}), outcome


async def score(service: Service, body: bodies.Score) -> tuple[bytes, Outcome]:
    """Scores in the order of the request, as vLLM answers."""
    queries = next((given for given in (body.queries, body.text_1, body.data_1) if given is not None), None)
    texts = next((given for given in (body.documents, body.items, body.text_2, body.data_2) if given is not None), None)
    if queries is None or texts is None:
        raise invalid("expected `queries` and `documents` (or `text_1` and `text_2`)")
    if len(queries) not in (1, len(texts)):
        raise invalid(f"`queries`: expected 1 or as many as documents ({len(texts)}), got {len(queries)}")
    if not queries:
        raise ServeError("Empty", "`queries` cannot be empty")
    with service.permit(texts, "documents"):
        scores, outcome = await _scored(service, queries, texts, body)
    data = [{"index": at, "object": "score", "score": value} for at, value in enumerate(scores)]
    usage = {"prompt_tokens": outcome.tokens, "total_tokens": outcome.tokens}
    name = service.model("multi-vector").name
    answer = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "model": name, "data": data, "usage": usage}
    return plain(answer), outcome
