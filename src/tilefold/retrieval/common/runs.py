"""The type of runs."""

from __future__ import annotations

__all__ = ["Run"]

# Query id -> document id -> score; the documents of a query are ordered, best first.
Run = dict[str, dict[str, float]]
