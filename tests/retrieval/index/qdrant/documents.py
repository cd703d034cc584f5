"""Random documents for a Qdrant collection, and comparison of hits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tilefold.retrieval import SparseVectors
from tilefold.retrieval.index.qdrant import Documents, Layout, QdrantCollection
from tilefold.retrieval.vectors.tokens import TokenVectors

MakeVectors = Callable[..., SparseVectors]
OpenCollection = Callable[..., QdrantCollection]
SPARSE_LAYOUT = Layout(500, "f" * 64)
FULL_LAYOUT = Layout(
    500,
    "f" * 64,
    dense=16,
    tokens=8,
    fields={"lang": "keyword", "year": "integer"},
)


def random_tokens(names: list[str], seed: int = 0) -> TokenVectors:
    """One to four token vectors of 8 dimensions for every name."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(1 + row % 4, 8, generator=generator) for row in range(len(names))]
    return TokenVectors.pack(names, rows, 8, "fp16")


def full_documents(vectors: SparseVectors) -> Documents:
    """Documents with everything that ``FULL_LAYOUT`` stores.

    Even rows are English and odd rows German; years run from 2000 to 2019 and start again.
    """
    dense = np.random.default_rng(1).normal(size=(len(vectors), 16)).astype(np.float32)
    payloads: dict[str, dict[str, Any]] = {}
    for row, name in enumerate(vectors.ids):
        language = "en" if row % 2 == 0 else "de"
        payloads[name] = {"lang": language, "year": 2000 + row % 20}
    return Documents(vectors.ids, vectors, dense, random_tokens(vectors.ids), payloads)


def check_same_hits(rows: list[Any], expected_rows: list[Any]) -> None:
    """Expect the same ids, and scores that differ by the rounding of sums in another order."""
    for hits, expected_hits in zip(rows, expected_rows, strict=True):
        assert [hit.id for hit in hits] == [hit.id for hit in expected_hits]
        expected_scores = [hit.score for hit in expected_hits]
        assert [hit.score for hit in hits] == pytest.approx(expected_scores, rel=5e-6)
