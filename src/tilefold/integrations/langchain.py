"""Sparse embeddings for LangChain's Qdrant store, with a model in this process or through a server.

This module imports the package ``langchain-qdrant``.
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
    """``langchain_qdrant.SparseEmbeddings`` of any ``SparseEncoder``.

    Queries and documents take different routes through the model.

    Args:
        model: a ``SparseEncoder``, or the folder or Hugging Face name of one.
        url: the address of ``tilefold serve``, instead of a model.
        **options: other arguments of :class:`tilefold.integrations._sparse_source.SparseSource`.
    """

    def __init__(self, model: Model | None = None, url: str | None = None, **options: Any) -> None:
        self._source = SparseSource(model, url, **options)

    def embed_documents(self, texts: list[str]) -> list[SparseVector]:
        """Return the vectors of documents."""
        vectors = self._source.encode(texts, "document")
        return [SparseVector(indices=indices, values=weights) for indices, weights in vectors]

    def embed_query(self, text: str) -> SparseVector:
        """Return the vector of a query."""
        ((indices, weights),) = self._source.encode([text], "query")
        return SparseVector(indices=indices, values=weights)
