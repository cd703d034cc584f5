"""Files that feed other engines with sparse vectors: OpenSearch (bulk) and Vespa (feed)."""

from __future__ import annotations

from tilefold._lazy import lazy_exports

_HOME = {"Exported": "_files", "export_opensearch": "opensearch", "export_vespa": "vespa"}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_exports(globals(), _HOME)
