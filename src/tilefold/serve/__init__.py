"""An HTTP service for sparse, multi-vector and dense models and their indexes; see
``docs/serve.md``.
"""

from __future__ import annotations

from tilefold._internal.lazy import lazy_exports

_NAMES = {
    "settings": "Limits",
    "searchable": "Searchable",
    "models": "Served",
    "service": "Service",
    "app": "create_app",
    "loading": "LoadingApp",
    "server": "bind load_and_run run",
}
__all__, __getattr__, __dir__ = lazy_exports(globals(), _NAMES)
