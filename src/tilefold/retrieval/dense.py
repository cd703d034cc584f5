"""Zero-shot dense baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilefold.retrieval.fusion import Run


def dense_run(model: Any, documents: Mapping[str, str], queries: Mapping[str, str], k: int) -> Run:
    raise NotImplementedError
