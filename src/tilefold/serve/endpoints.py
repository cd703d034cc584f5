"""HTTP routes, from a body, read with limits of size and time, to an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from tilefold.serve.bodies import ClientGoneError, ServeError, invalid
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
JSON = "application/json"
CLIENT_CLOSED = 499  # nginx's code; nobody is left to read it
_UNWATCHED_SECONDS = 0.05  # of work, after which it is looked whether the client is still there


class _Ending:
    """Within it, :meth:`end` cancels the task, which raises `error` then: no task of its own for
    every request.

    `later` is called `seconds` after it was made, if it has not ended by then; by default
    :meth:`end`.
    """

    __slots__ = ("_ended", "_error", "_task", "_timer")

    def __init__(
        self,
        error: Callable[[], Exception],
        seconds: float,
        later: Callable[[], None] | None = None,
    ) -> None:
        self._error, self._ended = error, False
        self._task: Any = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(seconds, later or self.end)

    def end(self) -> None:
        self._ended = self._task is not None and self._task.cancel()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        task = self._task
        # from 3.11 on a task counts who cancelled it: somebody else, too, if it is more than one
        if (
            kind is asyncio.CancelledError
            and self._ended
            and not (hasattr(task, "uncancel") and task.uncancel())
        ):
            raise self._error() from None


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await work, and cancel it when the client leaves.

    Args:
        request: request whose body has been read.
        work: work to await.

    Raises:
        ClientGoneError: if the client leaves.
    """
    watch: asyncio.Task[None] | None = None

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        ending.end()

    def start_watching() -> None:
        nonlocal watch
        watch = asyncio.get_running_loop().create_task(wait_for_disconnect())

    ending = _Ending(ClientGoneError, _UNWATCHED_SECONDS, start_watching)
    with ending:
        try:
            return await work
        finally:
            if watch is not None:
                watch.cancel()


def add_route(
    router: APIRouter,
    service: Service,
    path: str,
    handler: Callable[..., Awaitable[Response]],
    summary: str,
    body: type[BaseModel] | None = None,
    error_body: Callable[[ServeError], bytes] = ServeError.body,
) -> None:
    """Add a GET route, or a POST route with a validated body.

    Args:
        router: router of the route.
        service: service whose limits and metrics apply.
        path: path of the route.
        handler: answers a request; it is cancelled when the client leaves.
        summary: description of the route for OpenAPI.
        body: class of the body of a POST; ``None`` for a GET.
        error_body: returns the JSON of an error.
    """

    async def endpoint(request: Request) -> Response:
        if body is not None and not request.path_params:
            service.handlers[request.scope["path"]] = endpoint
        try:
            if body is None:
                work = handler(request)
            else:
                work = handler(await read(request, body, service.limits), request)
            return await while_connected(request, work)
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED)
        except ServeError as error:
            service.metrics.count("te_request_failure", err=error.label)
            headers = {"retry-after": "1"} if error.kind == "Overloaded" else None
            return Response(error_body(error), error.status, headers, JSON)

    openapi = None
    if body is not None:
        schema = body.model_json_schema()
        definitions = schema.pop("$defs", {})
        content = {JSON: {"schema": _inline_references(schema, definitions)}}
        openapi = {"requestBody": {"required": True, "content": content}}
    router.add_api_route(
        path,
        endpoint,
        methods=["GET" if body is None else "POST"],
        summary=summary,
        response_class=Response,
        openapi_extra=openapi,
    )


def _inline_references(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replace the references of a JSON schema by their definitions."""
    if isinstance(schema, list):
        return [_inline_references(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _inline_references(definitions[name], definitions)
    return {key: _inline_references(value, definitions) for key, value in schema.items()}


async def read(request: Request, model: type[B], limits: Limits) -> B:
    """The body of a request."""
    headers = dict(reversed(request.scope["headers"]))  # of two with one name the first one counts
    if not _is_json(headers.get(b"content-type", b"")):
        raise ServeError(
            "Validation",
            "expected a body of Content-Type: application/json in UTF-8",
            status=415,
        )
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ServeError("Validation", "expected a body without Content-Encoding", status=415)
    raw = await _read(request, headers, limits)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = _first(error)
        if first["type"] == "json_invalid":
            raise ServeError(
                "Validation",
                f"the body is not valid JSON: {first['msg']}",
                status=400,
            ) from None
        raise invalid(explained(error)) from None


def explained(error: ValidationError, place: str = "") -> str:
    """First wrong field of a body, or of the part of one at `place`, and how many more there are."""
    first = _first(error)
    where = ".".join(filter(None, [place, *map(str, first["loc"])])) or "body"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"`{where}`: {first['msg'].removeprefix('Value error, ')}{more}"


def _first(error: ValidationError) -> Any:
    return error.errors(include_url=False, include_context=False, include_input=False)[0]


@lru_cache(256)
def _is_json(content_type: bytes) -> bool:
    kind, *rest = (part.strip().lower() for part in content_type.decode("latin-1").split(";"))
    charsets = {part.partition("=")[2].strip('"') for part in rest if part.startswith("charset=")}
    json = kind == JSON or (kind.startswith("application/") and kind.endswith("+json"))
    return json and charsets <= {"utf-8", "utf8"}


async def _read(request: Request, headers: Mapping[bytes, bytes], limits: Limits) -> bytes:
    """The bytes of the body, no more of them than the limit, in no more time than there is."""

    def too_large() -> ServeError:
        return ServeError(
            "Validation",
            f"the body has more than {limits.payload_limit} bytes",
            status=413,
        )

    def too_slow() -> ServeError:
        return ServeError(
            "Validation",
            f"the body took more than {limits.body_seconds:g} s",
            status=408,
        )

    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limits.payload_limit:
        raise too_large()
    body, more = bytearray(), True
    with _Ending(too_slow, limits.body_seconds):
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limits.payload_limit:
                raise too_large()
    return bytes(body)
