"""Sparse embeddings for LangChain's Qdrant store, of a model in this process or of a server.

Needs the package ``langchain-qdrant``, which is imported with this module.
"""

from __future__ import annotations

from typing import Any

from tilefold._internal.typing import Model
from tilefold.integrations._sparse_source import ServerError, SparseSource

try:
    from langchain_qdrant import SparseEmbeddings, SparseVector
except ImportError as missing:
    raise ImportError(
        f"{__name__} needs langchain-qdrant: pip install langchain-qdrant",
    ) from missing

__all__ = ["ServerError", "TilefoldSparseEmbeddings"]


class TilefoldSparseEmbeddings(SparseEmbeddings):
    """``langchain_qdrant.SparseEmbeddings`` of any ``SparseEncoder``; queries and documents take
    their own routes.

    Arguments are those of :class:`tilefold.integrations._sparse_source.SparseSource`.
    """

    def __init__(self, model: Model | None = None, url: str | None = None, **options: Any) -> None:
        self._source = SparseSource(model, url, **options)

    def embed_documents(self, texts: list[str]) -> list[SparseVector]:
        """The vectors of documents."""
        return [
            SparseVector(indices=ids, values=weights)
            for ids, weights in self._source.encode(texts, "document")
        ]

    def embed_query(self, text: str) -> SparseVector:
        """The vector of a query."""
        ((ids, weights),) = self._source.encode([text], "query")
        return SparseVector(indices=ids, values=weights)
