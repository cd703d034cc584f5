"""An HTTP service for sparse, multi-vector and dense models and their indexes; see ``docs/serve.md``."""

from __future__ import annotations

from tilefold._lazy import lazy_exports

_HOME = {
    "Limits": "settings",
    "Searchable": "searchable",
    "Served": "models",
    "Service": "service",
    "create_app": "app",
    "bind": "server",
    "run": "server",
}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_exports(globals(), _HOME)
