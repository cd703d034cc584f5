"""The page at ``/``: three files, which a browser may load nothing beside."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request, Response

from tilefold.serve.endpoints import add_get
from tilefold.serve.errors import ServeError
from tilefold.serve.service import Service

__all__ = ["PAGE_PATHS", "page_router"]

_FOLDER = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
PAGE_PATHS = frozenset(_FILES)
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


def page_router(service: Service) -> APIRouter:
    """The page, its style and its script. While the service is not healthy, they are a 503, for probes of ``/``."""
    router = APIRouter()
    for path, (name, kind) in _FILES.items():
        _add(router, path, (_FOLDER / name).read_bytes(), kind, service)
    return router


def _add(router: APIRouter, path: str, content: bytes, kind: str, service: Service) -> None:
    async def answer(request: Request) -> Response:
        if not service.healthy:
            raise ServeError("Unhealthy", "unhealthy")
        return Response(content, media_type=kind, headers=_HEADERS)

    add_get(router, path, answer, service, "The page" if path == "/" else "A part of the page")
