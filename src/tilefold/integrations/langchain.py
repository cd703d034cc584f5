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
    """``langchain_qdrant.SparseEmbeddings`` of any ``SparseEncoder``.

    Queries and documents take their own routes through the model.

    Args:
        model: as in :class:`tilefold.integrations._sparse_source.SparseSource`.
        url: as there.
        **options: other arguments, as there.
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
