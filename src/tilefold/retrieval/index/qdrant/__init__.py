"""Collections of sparse, dense and token vectors in Qdrant, in this process or on a server."""

from __future__ import annotations

from tilefold._internal.lazy import lazy_exports

_NAMES = {
    "documents": "Documents Queries",
    "engine": "Filter Layout",
    "collection": "QdrantCollection",
    "index": "QdrantIndex",
    "server": "UnreachableError",
}
__all__, __getattr__, __dir__ = lazy_exports(globals(), _NAMES)
