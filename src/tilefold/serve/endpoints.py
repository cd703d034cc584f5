"""Parts that all POST routes share, from a body to an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from tilefold.serve.bodies import read
from tilefold.serve.errors import ClientGoneError, ServeError
from tilefold.serve.service import Service

__all__ = ["JSON", "add_get", "add_post", "while_connected"]

T = TypeVar("T")
JSON = "application/json"
CLIENT_CLOSED = 499  # nginx's code; nobody is left to read it
Work = Callable[[Any, Request], Awaitable[Response]]


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves; the body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def add_post(
    router: APIRouter,
    path: str,
    body: type[BaseModel],
    work: Work,
    service: Service,
    summary: str,
    failed: Callable[[ServeError], bytes] = ServeError.body,
) -> None:
    """A POST route whose body is checked, whose work ends when the client leaves, and whose errors are JSON."""

    async def endpoint(request: Request) -> Response:
        async def answer() -> Response:
            asked = await read(request, body, service.limits)
            return await while_connected(request, work(asked, request))

        return await _answered(answer(), service, failed)

    schema = body.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    router.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        summary=summary,
        response_class=Response,
        openapi_extra={"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}},
    )


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    """A JSON schema with the parts that it refers to in their places."""
    if isinstance(schema, list):
        return [_inlined(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {key: _inlined(value, parts) for key, value in schema.items()}


def add_get(
    router: APIRouter, path: str, work: Callable[[Request], Awaitable[Response]], service: Service, summary: str
) -> None:
    """A GET route whose work ends when the client leaves, and whose errors are JSON."""

    async def endpoint(request: Request) -> Response:
        return await _answered(while_connected(request, work(request)), service, ServeError.body)

    router.add_api_route(path, endpoint, methods=["GET"], summary=summary, response_class=Response)


async def _answered(answer: Awaitable[Response], service: Service, failed: Callable[[ServeError], bytes]) -> Response:
    try:
        return await answer
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED)
    except ServeError as error:
        service.metrics.count("te_request_failure", err=error.label)
        headers = {"retry-after": "1"} if error.kind == "Overloaded" else None
        return Response(failed(error), error.status, headers, JSON)
