"""The ASGI application: routes at three mount points, pages, keys, and responses to errors."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import ipaddress
import json
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import asynccontextmanager, closing
from html import escape
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tilefold._internal.arguments import ArgumentError
from tilefold._version import __version__
from tilefold.serve.admin import ADMIN_PATHS, admin_router
from tilefold.serve.bodies import ServeError, to_json
from tilefold.serve.endpoints import JSON, add_route
from tilefold.serve.models import SIDES
from tilefold.serve.routes import Routes
from tilefold.serve.searching import search_router
from tilefold.serve.service import Service, truncation_counts
from tilefold.serve.settings import check_origins

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Endpoint = Callable[[Request], Awaitable[Response]]
_FOLDER = Path(__file__).parent / "page"
# Path of the search page and its parts -> file in _FOLDER, and media type.
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_FASTAPI_SCHEMA_PATH = "/openapi.json"
_TEI_SCHEMA_PATH = "/api-doc/openapi.json"  # of text-embeddings-inference
OPENAPI_PATHS = (_FASTAPI_SCHEMA_PATH, _TEI_SCHEMA_PATH)
_COMMON_POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_DOCS_POLICY = f"default-src 'none'; style-src 'self'; {_COMMON_POLICY}"
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    f"img-src data: blob:; {_COMMON_POLICY}"
)
_SIDE_PREFIXES = tuple(f"/{side}/" for side in SIDES)
_OPENAI_PATHS = frozenset(
    f"{prefix}{path}"
    for prefix in ("", *(f"/{side}" for side in SIDES))
    for path in ("/v1/embeddings", "/embeddings")
)
_PAGE_HEADERS = {
    "content-security-policy": _PAGE_POLICY,
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
# Paths that need no key: health checks and metrics, whose clients send none, the search page, which
# asks for the key, and descriptions of the routes.
OPEN_PATHS = frozenset(
    {"/health", "/ping", "/live", "/metrics", "/docs", *_FILES, *OPENAPI_PATHS},
)
_HTTP_VERSIONS = ("1.1", "1.0")
_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]


def create_app(
    service: Service,
    api_key: str | None = None,
    *,
    admin_key: str | None = None,
    local: bool = False,
    origins: Sequence[str] = (),
) -> FastAPI:
    """Create the application of a service. The service starts and ends with the application.

    The routes of text-embeddings-inference exist three times: below ``/query`` they encode texts as
    queries, below ``/document`` as documents, and without a prefix as the service's default.

    Args:
        service: service that answers requests.
        api_key: key that requests must have as ``Authorization: Bearer KEY``, except health checks,
            metrics, the page and the description of the routes.
        admin_key: key that requests must have to change what is served, such as ``/admin/reload``;
            ``None`` refuses them all. The other key is no substitute.
        local: whether to refuse requests whose header Host is another machine's domain name. A
            server without a key on the loopback address needs this check: a page of another site
            could otherwise reach the server by a domain name of that site.
        origins: sites whose pages may read responses in a browser (CORS), such as
            ``https://example.org``. ``*`` means all sites.

    Raises:
        ValueError: if a key is empty, or an origin is invalid.
    """
    check_origins(origins)
    _check_key("api_key", api_key)
    _check_key("admin_key", admin_key)
    app = _App(
        title="tilefold",
        description=(
            "Sparse and late-interaction retrieval; compatible with text-embeddings-inference 1.9."
        ),
        version=__version__,
        lifespan=functools.partial(_lifespan, service),
        openapi_url=_FASTAPI_SCHEMA_PATH,
        docs_url=None,  # FastAPI's page loads scripts from other sites
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    routers = [
        ("", _page_router(service)),
        ("", Routes(service, service.default_side).router()),
        ("", search_router(service)),
        ("", admin_router(service)),
        *((f"/{side}", Routes(service, side).router()) for side in SIDES),
    ]
    endpoints: dict[str, Endpoint] = {}
    for prefix, router in routers:
        app.include_router(router, prefix=prefix)
        endpoints.update(_post_endpoints(prefix, router))
    _add_docs(app)
    app.add_exception_handler(HTTPException, _http_error_response)
    app.add_exception_handler(Exception, _internal_error_response)
    app.outer = _Guard(
        functools.partial(FastAPI.__call__, app),
        endpoints,
        service,
        api_key,
        admin_key,
        origins,
        local=local,
    )
    if origins:
        # Outside the guard, because the preflight requests of browsers have no key.
        app.outer = CORSMiddleware(
            app.outer,
            allow_origins=list(origins),
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["x-truncated-inputs"],
        )
    return app


def _check_key(name: str, key: str | None) -> None:
    """Raise ``ValueError`` if a key is empty; None means no key.

    Args:
        name: the argument with the key, for the error.
        key: the key.
    """
    if key is not None and not key.strip():
        raise ArgumentError(
            name,
            "expected some text, got an empty one; leave it out for a server without a key.",
        )


@asynccontextmanager
async def _lifespan(service: Service, _: FastAPI) -> AsyncIterator[None]:
    """Start a service with the tasks of its index, and end them with the application.

    Args:
        service: the service, which may follow an index folder and write documents into it.
    """
    service.start()
    tasks = [task for task in (service.follower, service.writer) if task is not None]
    with closing(service):
        for task in tasks:
            task.start()
        try:
            yield
        finally:
            for task in tasks:
                await task.stop()


def _post_endpoints(prefix: str, router: APIRouter) -> dict[str, Endpoint]:
    """Return path -> the function that answers a POST, for the routes with a fixed path.

    Args:
        prefix: prefix of the router's paths.
        router: router of the routes.
    """
    return {
        prefix + route.path: route.endpoint
        for route in router.routes
        if isinstance(route, APIRoute) and route.methods == {"POST"} and not route.param_convertors
    }


class _App(FastAPI):
    """FastAPI application with middleware around all of FastAPI.

    Attributes:
        outer: middleware that every HTTP request passes first.
    """

    outer: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or handle the start and end of the server."""
        if scope["type"] == "http":
            await self.outer(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


async def _http_error_response(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown route or method in the format of other errors.

    Args:
        request: the request, whose path decides on the format.
        error: the error of FastAPI, with a status.
    """
    status = getattr(error, "status_code", 500)
    message_of_status = {
        404: "there is no such route; GET /docs lists all routes",
        405: "the route does not take this method",
    }
    message = message_of_status.get(status, "the request failed")
    headers = getattr(error, "headers", None)
    error_of_route = ServeError("Validation", message, status=status)
    return _error_response(error_of_route, request.scope, headers)


async def _internal_error_response(request: Request, error: Exception) -> Response:
    """Answer a request whose handler raised an unexpected error, without details of the error."""
    internal_error = ServeError("Backend", "internal error; the log says why", status=500)
    return _error_response(internal_error, request.scope)


def _error_response(
    error: ServeError,
    scope: Scope,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Create the JSON response of an error, in OpenAI's format if the path is OpenAI's.

    Args:
        error: the error.
        scope: ASGI scope of the request.
        headers: headers of the response.
    """
    content = error.openai_body() if _route_path(scope) in _OPENAI_PATHS else error.body()
    return Response(content, error.status, headers, JSON)


class _Guard:
    """ASGI middleware that checks keys, and answers unexpected errors without details."""

    def __init__(
        self,
        app: Any,
        endpoints: Mapping[str, Endpoint],
        service: Service,
        api_key: str | None,
        admin_key: str | None,
        origins: Sequence[str],
        *,
        local: bool,
    ) -> None:
        """Wrap an application.

        Args:
            app: the FastAPI application.
            endpoints: path -> function that answers a POST. These are called directly, because
                FastAPI's routing takes longer than encoding a short text.
            service: service of the application.
            api_key: key that requests must have; ``None`` for no key.
            admin_key: key that requests to :data:`ADMIN_PATHS` must have; ``None`` refuses them.
            origins: sites whose pages may send forms; ``"*"`` for all sites.
            local: whether the header ``Host`` must name this machine.
        """
        self._fastapi_app = app
        self._endpoints = endpoints
        self._service = service
        self._must_name_this_machine = local
        self._origins = frozenset(origin.encode() for origin in origins)
        self._key = None if api_key is None else _digest(api_key.encode())
        self._admin_key = None if admin_key is None else _digest(admin_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it to its route.

        If the route fails, the response has status 500. Headers are added to every response:
        :data:`_HEADERS`, and the number of truncated inputs if inputs were encoded.

        Args:
            scope: ASGI scope with the method, path and headers of the request.
            receive: ASGI function that returns the parts of the body.
            send: ASGI function that sends the head and body of the response.
        """
        if scope["method"] == "HEAD":
            # It is answered like GET. uvicorn leaves out the body, since its own scope has HEAD.
            scope = {**scope, "method": "GET"}
        response_started = False
        # The service appends to this list, through the context variable, while it encodes.
        counts: list[int] = []
        truncation_counts.set(counts)

        async def send_with_headers(message: Message) -> None:
            """Send a message, with common headers at the start of a response."""
            nonlocal response_started
            if message["type"] == "http.response.start":
                response_started = True
                headers = list(message.get("headers", []))
                if counts:
                    headers.append((b"x-truncated-inputs", b"%d" % sum(counts)))
                message["headers"] = [*headers, *_HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            error_of_request, headers_of_error = refusal
            response = _error_response(error_of_request, scope, headers_of_error)
            await response(scope, receive, send_with_headers)
            return
        try:
            await self._answer(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            # The server is stopping, and the time for running requests is over.
            if not response_started:
                closing = ServeError("Unhealthy", "the service is closing")
                response = _error_response(closing, scope)
                await response(scope, receive, send_with_headers)
        except Exception as error:
            # The client only learns that the request failed. The reason is in the log.
            self._service.log_failure(error)
            self._service.metrics.count("te_request_failure", err="internal")
            if not response_started:
                response = await _internal_error_response(Request(scope), error)
                await response(scope, receive, send_with_headers)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: a POST with a known path directly, all others by FastAPI's routing.

        FastAPI's routing takes longer than encoding a short text.

        Args:
            scope: ASGI scope with the method, path and headers of the request.
            receive: ASGI function that returns the parts of the body.
            send: ASGI function that sends the head and body of the response.
        """
        endpoint = None
        if scope["method"] == "POST":
            endpoint = self._endpoints.get(_route_path(scope))
        if endpoint is None:
            await self._fastapi_app(scope, receive, send)
            return
        response = await endpoint(Request(scope, receive))
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[ServeError, dict[str, str]] | None:
        """Return why a request is refused, or ``None`` if it is accepted.

        A request is refused if its HTTP version is not supported, its key is missing or wrong, its
        header Host names another machine, or it is a form of a page of another site.

        Returns:
            The error, and the headers that HTTP requires in the response.
        """
        if scope["http_version"] not in _HTTP_VERSIONS:
            error = ServeError("Validation", "expected HTTP/1.1 or HTTP/1.0", status=505)
            return error, {"connection": "close"}
        if _route_path(scope) in ADMIN_PATHS and self._admin_key is None:
            error = ServeError(
                "Validation",
                "this server takes no changes: start it with --admin-key-file",
                status=403,
            )
            return error, {}
        if not self._has_access(scope):
            error = ServeError(
                "Validation",
                "expected a valid key in the header Authorization: Bearer KEY",
                status=401,
            )
            return error, {"www-authenticate": "Bearer"}
        if self._must_name_this_machine and not _is_local(_header(scope["headers"], b"host")):
            error = ServeError(
                "Validation",
                "the header Host must name this machine, such as localhost; start the server with "
                "a key to use other names",
                status=421,
            )
            return error, {}
        if self._is_form_of_another_site(scope):
            error = ServeError(
                "Validation",
                "a page of another site has sent this form; start the server with "
                "--cors-allow-origin to allow the site",
                status=403,
            )
            return error, {}
        return None

    def _is_form_of_another_site(self, scope: Scope) -> bool:
        """Return whether a page of a site that is not allowed has sent a form.

        Browsers ask for permission before such a page sends JSON, but not before it sends a form.
        They name the site in the header ``Origin``, which other clients do not send.
        """
        headers = scope["headers"]
        origin = _header(headers, b"origin")
        content_type = _header(headers, b"content-type").strip().lower()
        if not origin or not content_type.startswith(b"multipart/"):
            return False
        if origin in self._origins or b"*" in self._origins:
            return False
        if _header(headers, b"sec-fetch-site") == b"same-origin":  # a proxy may change the Host
            return False
        _, _, host_of_origin = origin.partition(b"://")
        return host_of_origin != _header(headers, b"host")

    def _has_access(self, scope: Scope) -> bool:
        """Return whether a request has the key, or does not need it."""
        path = _route_path(scope)
        expected_key = self._admin_key if path in ADMIN_PATHS else self._key
        if expected_key is None or (scope["method"] == "GET" and path in OPEN_PATHS):
            return True
        scheme, _, key = _header(scope["headers"], b"authorization").partition(b" ")
        # Digests have equal lengths, so that the time of the comparison does not depend on the key.
        is_equal = hmac.compare_digest(_digest(key.strip()), expected_key)
        return is_equal and scheme.lower() == b"bearer"


def _route_path(scope: Scope) -> str:
    """Return the path by which Starlette routes a request.

    It is the path without the prefix below which the application is mounted, or which a proxy adds.
    The key that a request needs depends on its route, so that it is looked up by this path.

    Args:
        scope: ASGI scope with the ``path``, and the prefix as ``root_path``.
    """
    path: str = scope["path"]
    prefix = scope.get("root_path", "")
    return path.removeprefix(prefix) if path.startswith(f"{prefix}/") else path


def _digest(key: bytes) -> bytes:
    """Return the SHA-256 digest of a key."""
    return hashlib.sha256(key).digest()


def _header(headers: list[tuple[bytes, bytes]], name: bytes) -> bytes:
    """Return the value of the first header with a name, or empty bytes."""
    for header_name, value in headers:
        if header_name == name:
            return value
    return b""


@functools.lru_cache(256)
def _is_local(host: bytes) -> bool:
    """Return whether a header ``Host`` is an IP address, or a name that only means this machine.

    This protects a server on the loopback address from pages of other sites (DNS rebinding). Such a
    site can let its own domain name resolve to this machine, but the browser then sends that name.
    A client that sends no name is not a browser.

    Args:
        host: value of the header, with or without a port.
    """
    name = host.decode("latin-1").strip().lower()
    if name.startswith("["):  # an IPv6 address
        name = name[1:].partition("]")[0]
    else:
        name = name.partition(":")[0].removesuffix(".")
    # Other names without a dot are refused: the client's network decides what they resolve to.
    if name in ("", "localhost", socket.gethostname().lower()) or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _page_router(service: Service) -> APIRouter:
    """Create the routes of the search page: its HTML, style and script.

    They answer 503 while the service is unhealthy, since some health checks request ``/``.
    """
    router = APIRouter()
    files = {
        path: ((_FOLDER / name).read_bytes(), media_type)
        for path, (name, media_type) in _FILES.items()
    }

    async def answer(request: Request) -> Response:
        if not service.healthy:
            raise ServeError("Unhealthy", "unhealthy")
        content, media_type = files[request.scope["route"].path]
        return Response(content, media_type=media_type, headers=_PAGE_HEADERS)

    for path in _FILES:
        add_route(
            router,
            service,
            path,
            answer,
            "The page" if path == "/" else "A part of the page",
        )
    return router


def _add_docs(app: FastAPI) -> None:
    """Add the page ``/docs``, and the OpenAPI schema at the path of text-embeddings-inference.

    FastAPI serves the schema at another path. Clients of text-embeddings-inference do not know it.
    """

    async def docs(request: Request) -> Response:
        html = "".join(_docs_html(app.openapi()))
        headers = {"content-security-policy": _DOCS_POLICY}
        return Response(html, media_type="text/html", headers=headers)

    async def openapi(request: Request) -> Response:
        return Response(to_json(app.openapi()), media_type=JSON)

    app.add_api_route("/docs", docs, include_in_schema=False, response_class=Response)
    app.add_api_route(_TEI_SCHEMA_PATH, openapi, include_in_schema=False, response_class=Response)


def _docs_html(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of the HTML page that lists the routes and the fields of their bodies.

    Args:
        schema: OpenAPI schema of the application.
    """
    info = schema["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f'<link rel="stylesheet" href="page.css"><main><h1>{title}</h1>'
    yield f"<p>{escape(info['description'])}</p>"
    yield f"<p>Routes of models exist under {' and '.join(_SIDE_PREFIXES)} too. "
    yield '<a href="openapi.json">openapi.json</a></p>'
    for path, methods in schema["paths"].items():
        if path.startswith(_SIDE_PREFIXES):  # the same routes as those without the prefix
            continue
        for method, route in methods.items():
            yield f"<h2>{escape(method.upper())} <code>{escape(path)}</code></h2>"
            yield f"<p>{escape(route['summary'])}</p>"
            if "requestBody" in route:
                body_schema = route["requestBody"]["content"][JSON]["schema"]
                fields = body_schema.get("properties", {})
                descriptions = [escape(_describe_field(name, fields[name])) for name in fields]
                yield f"<p><code>{'<br>'.join(descriptions)}</code></p>"
    yield "</main></html>"


def _describe_field(name: str, schema: Mapping[str, Any]) -> str:
    """Describe the name, type and default of a field, such as ``top_k: integer = 10``."""
    description = f"{name}: {_describe_type(schema)}"
    if "default" in schema:
        description += f" = {json.dumps(schema['default'])}"
    return description


def _describe_type(schema: Mapping[str, Any]) -> str:
    """Describe the type of a JSON schema, such as ``list of (string)``."""
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        return " | ".join(map(_describe_type, alternatives))
    if "enum" in schema:
        return " | ".join(map(json.dumps, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of ({_describe_type(schema.get('items', {}))})"
    return str(schema.get("type", "any"))
