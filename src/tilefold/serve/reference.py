"""The routes as a page at ``/docs``, made from their OpenAPI description: no script, and nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI, Request, Response

from tilefold.serve import answers
from tilefold.serve.endpoints import JSON
from tilefold.serve.models import SIDES

__all__ = ["REFERENCE_PATHS", "add_reference"]

OPENAPI_PATHS = ("/openapi.json", "/api-doc/openapi.json")  # FastAPI's, and that of text-embeddings-inference
REFERENCE_PATHS = frozenset({"/docs", *OPENAPI_PATHS})
_POLICY = "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_MOUNTED = tuple(f"/{side}/" for side in SIDES)


def add_reference(app: FastAPI) -> None:
    """Add the page, and the addresses of its JSON that FastAPI lacks."""

    async def page(request: Request) -> Response:
        content = "".join(_page(app.openapi()))
        return Response(content, media_type="text/html", headers={"content-security-policy": _POLICY})

    async def described(request: Request) -> Response:
        return Response(answers.plain(app.openapi()), media_type=JSON)

    app.add_api_route("/docs", page, include_in_schema=False, response_class=Response)
    app.add_api_route(OPENAPI_PATHS[1], described, include_in_schema=False, response_class=Response)


def _page(schema: Mapping[str, Any]) -> Iterator[str]:
    info = schema["info"]
    title = escape(f"{info['title']} {info['version']}")
    yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
    yield f'<link rel="stylesheet" href="page.css"><main><h1>{title}</h1><p>{escape(info["description"])}</p>'
    yield f'<p>Routes of models exist under {" and ".join(_MOUNTED)} too. <a href="openapi.json">openapi.json</a></p>'
    for path, methods in schema["paths"].items():
        for method, route in methods.items() if not path.startswith(_MOUNTED) else ():
            yield f"<h2>{escape(method.upper())} <code>{escape(path)}</code></h2><p>{escape(route['summary'])}</p>"
            body = route.get("requestBody", {"content": {JSON: {"schema": {}}}})["content"][JSON]["schema"]
            fields = (f"{name}: {_kind(field)}{_default(field)}" for name, field in body.get("properties", {}).items())
            yield f"<p><code>{'<br>'.join(map(escape, fields))}</code></p>"
    yield "</main></html>"


def _default(field: Mapping[str, Any]) -> str:
    return f" = {json.dumps(field['default'])}" if "default" in field else ""


def _kind(field: Mapping[str, Any]) -> str:
    """The type of a field in words."""
    several = field.get("anyOf") or field.get("oneOf")
    if several:
        return " | ".join(map(_kind, several))
    if "enum" in field:
        return " | ".join(map(json.dumps, field["enum"]))
    if field.get("type") == "array":
        return f"list of ({_kind(field.get('items', {}))})"
    return str(field.get("type", "any"))
