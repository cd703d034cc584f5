"""Routes of text-embeddings-inference that are made of its others: ``/similarity`` and Google Vertex's ``/vertex``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from fastapi import Response
from pydantic import BaseModel, ValidationError

from tilefold.serve import bodies
from tilefold.serve.errors import ServeError, invalid, wrong_model
from tilefold.serve.models import Kind
from tilefold.serve.service import Service

__all__ = ["cosines", "parts_of", "similarity_kind", "together"]

Work = Callable[[Any], Awaitable[Response]]
Part = tuple[BaseModel, Work]
Form = tuple[type[BaseModel], Work]


def similarity_kind(service: Service) -> Kind:
    """The kind of the model whose vectors are compared.

    Raises:
        ServeError: there is none that makes one vector of a text.
    """
    kinds: tuple[Kind, ...] = ("sparse", "dense")
    found = next((kind for kind in kinds if kind in service.models), None)
    if found is None:
        raise wrong_model(
            "the model makes a vector of each token: POST /rerank, or serve a SparseEncoder or SentenceTransformer"
        )
    return found


def cosines(rows: Sequence[Any], kind: Kind) -> list[float]:
    """Cosine similarity of the first row with each of the others; that of an empty vector is 0."""
    dots = _sparse_dots(rows) if kind == "sparse" else np.stack(rows[1:]).astype(np.float64) @ rows[0]
    lengths = [float(np.linalg.norm((row[1] if kind == "sparse" else row).astype(np.float64))) for row in rows]
    scales = [lengths[0] * length for length in lengths[1:]]
    return [float(dot / scale) if scale > 0 else 0.0 for dot, scale in zip(dots, scales, strict=True)]


def _sparse_dots(rows: Sequence[Any]) -> list[float]:
    (first, weights), *others = rows
    found = []
    for indices, values in others:
        _, mine, its = np.intersect1d(first, indices, assume_unique=True, return_indices=True)
        found.append(float(weights[mine].astype(np.float64) @ values[its]))
    return found


def parts_of(instances: Sequence[Any], reranks: Form, others: Form, limit: int) -> list[Part]:
    """The bodies of the instances, checked, each with what answers it.

    Args:
        reranks, others: kind of body and what answers it, for instances with a query and texts, and for all others.
        limit: the most instances.

    Raises:
        ServeError: none, too many, or one of another form.
    """
    if not instances:
        raise ServeError("Empty", "`instances` cannot be empty")
    if len(instances) > limit:
        message = f"batch size {len(instances)} > maximum allowed batch size {limit}"
        raise ServeError("Validation", message, label="batch_size")
    found: list[Part] = []
    for at, instance in enumerate(instances):
        ranked = isinstance(instance, dict) and {"query", "texts"} <= instance.keys()
        body, work = reranks if ranked else others
        try:
            found.append((body.model_validate(instance), work))
        except ValidationError as error:
            raise invalid(bodies.explained(error, f"instances.{at}")) from None
    return found


async def together(parts: Sequence[Part]) -> bytes:
    """``{"predictions": [...]}``, the answers in their order. The first error is that of all."""
    tasks = [asyncio.ensure_future(work(body)) for body, work in parts]
    try:
        answers = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return b'{"predictions":[' + b",".join(bytes(answer.body) for answer in answers) + b"]}"
