"""Routes that change what a server serves; they need a key of their own."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from tilefold.serve.bodies import ServeError, to_json
from tilefold.serve.endpoints import JSON, add_route
from tilefold.serve.service import Follower, Service

__all__ = ["ADMIN_PATHS", "admin_router"]

_RELOAD_PATH = "/admin/reload"
# Paths that need the admin key.
ADMIN_PATHS = frozenset({_RELOAD_PATH})


def admin_router(service: Service) -> APIRouter:
    """Create the routes that change what a service serves.

    Args:
        service: the service.
    """
    router = APIRouter()

    async def reload(request: Request) -> Response:
        searchable = await _follower_of(service).reload()
        answer = {
            "index": searchable.name,
            "generation": searchable.generation,
            "documents": searchable.index.n_documents,
        }
        return Response(to_json(answer), media_type=JSON)

    summary = "Open the current generation of the index, which takes over between two requests"
    add_route(router, service, _RELOAD_PATH, reload, summary, method="POST")
    return router


def _follower_of(service: Service) -> Follower:
    """Return the follower of a service.

    Raises:
        ServeError: if the service has no index in a folder.
    """
    if service.follower is None:
        raise ServeError(
            "Validation",
            "this server has no index folder: start it with --index",
            status=404,
        )
    return service.follower
