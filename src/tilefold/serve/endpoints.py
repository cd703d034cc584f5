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
_UNWATCHED_SECONDS = 0.05  # seconds of work before a request watches whether its client leaves


class _Cancellation:
    """Context in which :meth:`cancel` ends the current task with an error.

    A timer calls a function unless the context ends before. Unlike ``asyncio.timeout``, another
    event than the time can cancel the task.

    Args:
        error: creates the error that the context raises after :meth:`cancel`.
        seconds: time until `on_timeout` is called.
        on_timeout: function that the timer calls; by default :meth:`cancel`.
    """

    __slots__ = ("_error", "_is_cancelled", "_task", "_timer")

    def __init__(
        self,
        error: Callable[[], Exception],
        seconds: float,
        on_timeout: Callable[[], None] | None = None,
    ) -> None:
        """Start the timer of the current task.

        Args:
            error: creates the error that the context raises after :meth:`cancel`.
            seconds: time until `on_timeout` is called.
            on_timeout: function that the timer calls; ``None`` is :meth:`cancel`.
        """
        self._error = error
        self._is_cancelled = False
        self._task: Any = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(seconds, on_timeout or self.cancel)

    def cancel(self) -> None:
        """Cancel the task; the context then raises the error."""
        self._is_cancelled = self._task is not None and self._task.cancel()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if kind is not asyncio.CancelledError or not self._is_cancelled:
            return
        # From Python 3.11 on, a task counts its cancellations. If another one remains, such as that
        # of the server's end, the task stays cancelled.
        n_other_cancellations = self._task.uncancel() if hasattr(self._task, "uncancel") else 0
        if not n_other_cancellations:
            raise self._error() from None


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await work, and cancel it when the client leaves.

    Watching the client takes a task of its own. It starts after 50 ms, so that short requests do
    not pay for it.

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
        cancellation.cancel()

    def start_watching() -> None:
        nonlocal watch
        watch = asyncio.get_running_loop().create_task(wait_for_disconnect())

    cancellation = _Cancellation(ClientGoneError, _UNWATCHED_SECONDS, start_watching)
    with cancellation:
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
        """Read the body, call the handler, and answer its errors.

        A POST route with a fixed path registers itself in ``service.handlers``. Later requests of
        the path are then answered without FastAPI's routing.
        """
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
    """Read and validate the body of a request.

    Args:
        request: request whose body has not been read.
        model: class of the body.
        limits: limits of the size of a body and of the time in which it must arrive.

    Raises:
        ServeError: for a body that is too large or too slow, of another content type, or invalid.
        ClientGoneError: if the client leaves.
    """
    # The first of several headers with one name counts: reversed, it is the last to be set.
    headers = dict(reversed(request.scope["headers"]))
    if not _is_json(headers.get(b"content-type", b"")):
        raise ServeError(
            "Validation",
            "expected a body of Content-Type: application/json in UTF-8",
            status=415,
        )
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ServeError("Validation", "expected a body without Content-Encoding", status=415)
    raw = await _read_bytes(request, headers, limits)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first_error = _first_error(error)
        if first_error["type"] == "json_invalid":
            raise ServeError(
                "Validation",
                f"the body is not valid JSON: {first_error['msg']}",
                status=400,
            ) from None
        raise invalid(describe_error(error)) from None


def describe_error(error: ValidationError, prefix: str = "") -> str:
    """Return the first error of a body in words, and the number of further errors.

    Args:
        error: errors of a body, or of a part of one.
        prefix: field of the part; empty for a whole body.
    """
    first_error = _first_error(error)
    fields = [str(field) for field in first_error["loc"]]  # the path of the wrong value
    if prefix:
        fields.insert(0, prefix)
    n_further = error.error_count() - 1
    further = f" (and {n_further} more)" if n_further else ""
    message = first_error["msg"].removeprefix("Value error, ")
    return f"`{'.'.join(fields) or 'body'}`: {message}{further}"


def _first_error(error: ValidationError) -> Any:
    """Return the first error of a body, as pydantic describes it, without the wrong value."""
    return error.errors(include_url=False, include_context=False, include_input=False)[0]


@lru_cache(256)
def _is_json(content_type: bytes) -> bool:
    """Return whether a header ``Content-Type`` names JSON, in UTF-8 if it names an encoding.

    Types such as ``application/problem+json`` are JSON, too.

    Args:
        content_type: value of the header, such as ``b"application/json; charset=utf-8"``.
    """
    parts = [part.strip().lower() for part in content_type.decode("latin-1").split(";")]
    media_type, *parameters = parts
    is_json = media_type == JSON or (
        media_type.startswith("application/") and media_type.endswith("+json")
    )
    charsets = {
        parameter.partition("=")[2].strip('"')
        for parameter in parameters
        if parameter.startswith("charset=")
    }
    return is_json and charsets <= {"utf-8", "utf8"}


async def _read_bytes(request: Request, headers: Mapping[bytes, bytes], limits: Limits) -> bytes:
    """Read the bytes of a body, and stop at the limit of its size or of the time.

    A body whose header ``Content-Length`` exceeds the limit is refused before it is read.

    Args:
        request: request whose body has not been read.
        headers: headers of the request, in lower case.
        limits: ``payload_limit`` in bytes, and ``body_seconds`` in which the body must arrive.

    Raises:
        ServeError: for a body that is too large or too slow.
        ClientGoneError: if the client leaves.
    """

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

    declared_length = headers.get(b"content-length", b"")
    if declared_length.isdigit() and int(declared_length) > limits.payload_limit:
        raise too_large()
    body = bytearray()
    is_complete = False
    with _Cancellation(too_slow, limits.body_seconds):
        while not is_complete:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            is_complete = not message.get("more_body", False)
            if len(body) > limits.payload_limit:
                raise too_large()
    return bytes(body)
