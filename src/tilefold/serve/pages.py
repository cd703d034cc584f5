"""Two pages that load nothing from elsewhere: the one at ``/``, of three files, and ``/docs``, without a script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response

from tilefold.serve import answers
from tilefold.serve.endpoints import JSON, add_route
from tilefold.serve.errors import ServeError
from tilefold.serve.models import SIDES
from tilefold.serve.service import Service

__all__ = ["PAGE_PATHS", "add_reference", "page_router"]

_FOLDER = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
OPENAPI_PATHS = ("/openapi.json", "/api-doc/openapi.json")  # FastAPI's, and that of text-embeddings-inference
PAGE_PATHS = frozenset({*_FILES, "/docs", *OPENAPI_PATHS})
_NO_OTHERS = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_REFERENCE_POLICY = f"default-src 'none'; style-src 'self'; {_NO_OTHERS}"
_MOUNTED = tuple(f"/{side}/" for side in SIDES)
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    f"img-src data:; {_NO_OTHERS}",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def page_router(service: Service) -> APIRouter:
    """The page, its style and its script. While the service is not healthy, they are a 503, for probes of ``/``."""
    router = APIRouter()
    contents = {path: (_FOLDER / name).read_bytes() for path, (name, _) in _FILES.items()}

    async def answer(request: Request) -> Response:
        if not service.healthy:
            raise ServeError("Unhealthy", "unhealthy")
        path = request.scope["route"].path
        return Response(contents[path], media_type=_FILES[path][1], headers=_HEADERS)

    for path in _FILES:
        add_route(router, service, path, answer, "The page" if path == "/" else "A part of the page")
    return router


def add_reference(app: FastAPI) -> None:
    """Add the page of the routes, made from their OpenAPI description, and a second address of that."""

    async def page(request: Request) -> Response:
        headers = {"content-security-policy": _REFERENCE_POLICY}
        return Response("".join(_reference(app.openapi())), media_type="text/html", headers=headers)

    async def described(request: Request) -> Response:
        return Response(answers.plain(app.openapi()), media_type=JSON)

    app.add_api_route("/docs", page, include_in_schema=False, response_class=Response)
    app.add_api_route(OPENAPI_PATHS[1], described, include_in_schema=False, response_class=Response)


def _reference(schema: Mapping[str, Any]) -> Iterator[str]:
    info = schema["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f'<link rel="stylesheet" href="page.css"><main><h1>{title}</h1><p>{escape(info["description"])}</p>'
    yield f'<p>Routes of models exist under {" and ".join(_MOUNTED)} too. <a href="openapi.json">openapi.json</a></p>'
    for path, methods in schema["paths"].items():
        for method, route in methods.items() if not path.startswith(_MOUNTED) else ():
            yield f"<h2>{escape(method.upper())} <code>{escape(path)}</code></h2><p>{escape(route['summary'])}</p>"
            body = route.get("requestBody", {"content": {JSON: {"schema": {}}}})["content"][JSON]["schema"]
            fields = (escape(_field(name, field)) for name, field in body.get("properties", {}).items())
            yield f"<p><code>{'<br>'.join(fields)}</code></p>"
    yield "</main></html>"


def _field(name: str, field: Mapping[str, Any]) -> str:
    return f"{name}: {_kind(field)}" + (f" = {json.dumps(field['default'])}" if "default" in field else "")


def _kind(field: Mapping[str, Any]) -> str:
    """Type of a field in words."""
    several = field.get("anyOf") or field.get("oneOf")
    if several:
        return " | ".join(map(_kind, several))
    if "enum" in field:
        return " | ".join(map(json.dumps, field["enum"]))
    if field.get("type") == "array":
        return f"list of ({_kind(field.get('items', {}))})"
    return str(field.get("type", "any"))
