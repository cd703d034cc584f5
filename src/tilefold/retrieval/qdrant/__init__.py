"""Collections of sparse, dense and token vectors in Qdrant: embedded in this process, or on a server."""

from __future__ import annotations

from tilefold._lazy import lazy_exports

_HOME = {
    "Documents": "documents",
    "Filter": "engine",
    "Layout": "engine",
    "QdrantCollection": "collection",
    "Queries": "documents",
    "UnreachableError": "server",
}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_exports(globals(), _HOME)
