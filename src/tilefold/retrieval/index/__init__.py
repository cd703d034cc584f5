"""Sparse indexes behind one protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilefold.retrieval.index.protocol import Hit, SparseIndex, hits_to_run
from tilefold.retrieval.vectors import SparseVectors

__all__ = ["BACKENDS", "Hit", "SparseIndex", "build_index", "hits_to_run", "load_index"]

BACKENDS = ("exact", "seismic")


def build_index(vectors: SparseVectors, backend: str = "exact", **options: Any) -> SparseIndex:
    raise NotImplementedError


def load_index(path: str | Path) -> SparseIndex:
    raise NotImplementedError
