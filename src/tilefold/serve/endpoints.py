"""HTTP routes: bodies are read with limits on size and time, validated, and answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from tilefold.serve.bodies import ClientGoneError, ServeError, invalid_input_error
from tilefold.serve.forms import FORM, form_boundary, form_schema, parse_form
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
JSON = "application/json"
CLIENT_CLOSED = 499  # status of nginx for a client that has left, and will not read it
_UNWATCHED_SECONDS = 0.05  # of work, before a request watches whether its client disconnects


class _Cancellation:
    """Context in which :meth:`cancel` ends the current task with an error.

    Unlike ``asyncio.timeout``, it can cancel the task at any event.
    """

    __slots__ = ("_error", "_is_cancelled", "_task")

    def __init__(self, error: Callable[[], Exception]) -> None:
        """Prepare the context for the current task.

        Args:
            error: function that creates the error which the context raises after :meth:`cancel`.
        """
        self._error = error
        self._is_cancelled = False
        self._task: Any = asyncio.current_task()

    def cancel(self) -> None:
        """Cancel the task. The context then raises the error."""
        self._is_cancelled = self._task is not None and self._task.cancel()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Raise the error if :meth:`cancel` has cancelled the task, and nothing else has."""
        if kind is not asyncio.CancelledError or not self._is_cancelled:
            return
        # From Python 3.11 on, a task counts its cancellations. It stays cancelled if another one
        # remains, for example because the server ends.
        n_other_cancellations = self._task.uncancel() if hasattr(self._task, "uncancel") else 0
        if not n_other_cancellations:
            raise self._error() from None


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await the answer to a request, and cancel it if the client disconnects.

    Another task watches the client. That task starts after ``_UNWATCHED_SECONDS``, so that short
    requests do not pay for it.

    Args:
        request: a request whose body has been read.
        work: the awaitable that computes the answer.

    Raises:
        ClientGoneError: if the client disconnects.
    """
    cancellation = _Cancellation(ClientGoneError)
    watcher: asyncio.Task[None] | None = None

    async def watch_client() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancellation.cancel()

    def start_watching() -> None:
        nonlocal watcher
        watcher = asyncio.get_running_loop().create_task(watch_client())

    timer = asyncio.get_running_loop().call_later(_UNWATCHED_SECONDS, start_watching)
    with cancellation:
        try:
            return await work
        finally:
            timer.cancel()
            if watcher is not None:
                watcher.cancel()


def add_route(
    router: APIRouter,
    service: Service,
    path: str,
    handler: Callable[..., Awaitable[Response]],
    summary: str,
    body: type[BaseModel] | None = None,
    error_body: Callable[[ServeError], bytes] = ServeError.body,
    *,
    method: str | None = None,
    takes_forms: bool = False,
) -> None:
    """Add a route, with a validated body or without a body.

    Args:
        router: router to which the route is added.
        service: service whose limits and metrics apply.
        path: path of the route.
        handler: function that answers a request, called as ``handler(request)`` without a body and
            as ``handler(body, request)`` with one. It is cancelled if the client disconnects.
        summary: summary of the route for OpenAPI.
        body: class of the body; ``None`` reads no body.
        error_body: function that returns the JSON of an error.
        method: HTTP method; ``None`` for a POST with a body, or a GET without one.
        takes_forms: whether the body may also be a form with files.
    """

    async def endpoint(request: Request) -> Response:
        """Answer a request of this route by its handler, and turn errors into responses.

        Uses the arguments of ``add_route``: the class ``body`` of the body, or ``None``, and the
        ``handler``.
        """
        try:
            if body is None:
                handler_coroutine = handler(request)
            else:
                values = await read_body(request, body, service.limits, takes_forms=takes_forms)
                handler_coroutine = handler(values, request)
            return await while_connected(request, handler_coroutine)
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
        inline_schema = _inline_references(schema, definitions)
        content = {JSON: {"schema": inline_schema}}
        if takes_forms:
            content[FORM] = {"schema": form_schema(inline_schema)}
        openapi = {"requestBody": {"required": True, "content": content}}
    router.add_api_route(
        path,
        endpoint,
        methods=[method or ("GET" if body is None else "POST")],
        summary=summary,
        response_class=Response,
        openapi_extra=openapi,
    )


def _inline_references(schema: Any, definitions: dict[str, Any]) -> Any:
    """Replace the references in a JSON schema by the definitions that they name.

    Args:
        schema: the schema, or a part of it.
        definitions: name -> schema.
    """
    if isinstance(schema, list):
        return [_inline_references(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _inline_references(definitions[name], definitions)
    return {key: _inline_references(value, definitions) for key, value in schema.items()}


async def read_body(
    request: Request,
    model: type[B],
    limits: Limits,
    *,
    takes_forms: bool = False,
) -> B:
    """Read and validate the body of a request.

    Args:
        request: a request whose body has not been read.
        model: class of the body.
        limits: limits on the size of a body and on the time in which it must arrive.
        takes_forms: whether the body may also be a form with files.

    Raises:
        ServeError: if the body is too large or too slow, is neither JSON nor a form, or is invalid.
        ClientGoneError: if the client disconnects.
    """
    # If a header is repeated, its first value counts. A dictionary keeps the last value of a key,
    # so that it is filled in reverse order.
    headers = dict(reversed(request.scope["headers"]))
    content_type = headers.get(b"content-type", b"")
    boundary = form_boundary(content_type) if takes_forms else None
    if boundary is None and not _is_json(content_type):
        or_form = f", or {FORM} with a boundary" if takes_forms else ""
        raise ServeError(
            "Validation",
            f"expected a body of Content-Type: {JSON} in UTF-8{or_form}",
            status=415,
        )
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ServeError("Validation", "expected a body without Content-Encoding", status=415)
    raw = await _read_bytes(request, headers, limits)
    try:
        if boundary is not None:
            # A form has only texts. Without `strict`, pydantic converts them to numbers and
            # booleans where the class has such fields.
            return model.model_validate(parse_form(raw, boundary), strict=False)
        return model.model_validate_json(raw)
    except ValidationError as error:
        first_error = _first_error(error)
        if first_error["type"] == "json_invalid":
            raise ServeError(
                "Validation",
                f"the body is not valid JSON: {first_error['msg']}",
                status=400,
            ) from None
        raise invalid_input_error(describe_error(error)) from None


def describe_error(error: ValidationError, prefix: str = "") -> str:
    """Describe the first validation error of a request body, and count the others.

    Args:
        error: validation errors of the body, or of a field that was validated on its own.
        prefix: name of the field that was validated on its own; empty for the body.
    """
    first_error = _first_error(error)
    path = [str(field) for field in first_error["loc"]]  # names and positions down to the value
    if prefix:
        path.insert(0, prefix)
    n_others = error.error_count() - 1
    others = f" (and {n_others} more)" if n_others else ""
    message = first_error["msg"].removeprefix("Value error, ")
    return f"`{'.'.join(path) or 'body'}`: {message}{others}"


def _first_error(error: ValidationError) -> Any:
    """Return pydantic's description of the first validation error, without the wrong value."""
    return error.errors(include_url=False, include_context=False, include_input=False)[0]


@lru_cache(256)
def _is_json(content_type: bytes) -> bool:
    """Return whether a header ``Content-Type`` declares JSON, and no charset other than UTF-8.

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
    """Read the bytes of a body, up to a limit on its size and on the time.

    If the header ``Content-Length`` exceeds the limit, the body is refused before it is read.

    Args:
        request: a request whose body has not been read.
        headers: lower-case name -> value of the request's headers.
        limits: ``payload_limit`` in bytes, and ``body_seconds`` in which the body must arrive.

    Raises:
        ServeError: if the body is too large or too slow.
        ClientGoneError: if the client disconnects.
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
    cancellation = _Cancellation(too_slow)
    timer = asyncio.get_running_loop().call_later(limits.body_seconds, cancellation.cancel)
    with cancellation:
        try:
            while not is_complete:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                body += message.get("body", b"")
                is_complete = not message.get("more_body", False)
                if len(body) > limits.payload_limit:
                    raise too_large()
        finally:
            timer.cancel()
    return bytes(body)
