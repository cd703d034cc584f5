"""Encode texts with a sentence-transformers ``SparseEncoder`` into sparse vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from tilefold.retrieval.vectors import SparseVectors, VectorManifest


def encode_collection(
    model: Any,
    texts: Mapping[str, str],
    output_dir: str | Path,
    *,
    kind: Literal["document", "query"] = "document",
    batch_size: int = 32,
    shard_size: int = 1024,
    top_k: int | None = None,
    min_weight: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
    resume: bool = True,
) -> VectorManifest:
    """Encode `texts` into shards under `output_dir`; ``progress(done, total)`` is called after each shard."""
    raise NotImplementedError


def encode_queries(
    model: Any,
    queries: Mapping[str, str],
    *,
    batch_size: int = 32,
    top_k: int | None = None,
    min_weight: float = 0.0,
) -> SparseVectors:
    raise NotImplementedError
