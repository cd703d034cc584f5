"""BM25 over bm25s."""

from __future__ import annotations

from collections.abc import Mapping

from tilefold.retrieval.fusion import Run


class BM25Index:
    @classmethod
    def build(cls, documents: Mapping[str, str]) -> BM25Index:
        raise NotImplementedError

    def search(self, queries: Mapping[str, str], k: int) -> Run:
        raise NotImplementedError
