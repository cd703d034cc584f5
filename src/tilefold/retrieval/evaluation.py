"""Evaluate runs with ir-measures; TREC run files; sparsity figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tilefold.retrieval.fusion import Run
from tilefold.retrieval.vectors import SparseVectors

DEFAULT_MEASURES = ("nDCG@10", "R@100", "RR@10")


def evaluate(
    run: Run, qrels: Mapping[str, Mapping[str, int]], measures: Sequence[str] = DEFAULT_MEASURES
) -> dict[str, float]:
    raise NotImplementedError


def evaluate_per_query(
    run: Run, qrels: Mapping[str, Mapping[str, int]], measures: Sequence[str] = DEFAULT_MEASURES
) -> dict[str, dict[str, float]]:
    """``{query id: {measure: value}}``."""
    raise NotImplementedError


def write_trec_run(run: Run, path: str | Path, tag: str = "tilefold") -> None:
    raise NotImplementedError


def read_trec_run(path: str | Path) -> Run:
    raise NotImplementedError


def active_terms(vectors: SparseVectors) -> float:
    raise NotImplementedError


def flops(queries: SparseVectors, documents: SparseVectors) -> float:
    raise NotImplementedError
