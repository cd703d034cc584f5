"""Sparse embeddings for LlamaIndex, with a model in this process or through a server.

This module imports the package ``llama-index-core``.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tilefold._internal.typing import Model
from tilefold.integrations._sparse_source import ServerError, Side, SparseSource

try:
    from llama_index.core.base.embeddings.base_sparse import BaseSparseEmbedding
    from llama_index.core.bridge.pydantic import PrivateAttr
except ImportError as missing:
    raise ImportError(
        f"{__name__} needs llama-index-core: pip install llama-index-core",
    ) from missing

__all__ = ["ServerError", "TilefoldSparseEmbedding"]


class TilefoldSparseEmbedding(BaseSparseEmbedding):
    """LlamaIndex's ``BaseSparseEmbedding`` of any ``SparseEncoder``.

    Queries and documents take different routes through the model.
    ``QdrantVectorStore(enable_hybrid=True, sparse_doc_fn=e.document_vectors,
    sparse_query_fn=e.query_vectors)`` stores and searches the vectors of an embedding ``e``.

    Args:
        model: a ``SparseEncoder``, or the folder or Hugging Face name of one.
        url: the address of ``tilefold serve``, instead of a model.
        **options: other arguments of :class:`tilefold.integrations._sparse_source.SparseSource`.
    """

    _source: SparseSource = PrivateAttr()

    def __init__(self, model: Model | None = None, url: str | None = None, **options: Any) -> None:
        source = SparseSource(model, url, **options)
        name = model if isinstance(model, str) else url or type(model).__name__
        super().__init__(model_name=name, embed_batch_size=source.batch_size)
        self._source = source

    @classmethod
    def class_name(cls) -> str:
        """Return the name of the class in LlamaIndex's files."""
        return "TilefoldSparseEmbedding"

    def document_vectors(self, texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
        """Return the indices and weights of documents, as ``QdrantVectorStore`` expects them."""
        return self._indices_and_weights(texts, "document")

    def query_vectors(self, texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
        """Return the indices and weights of queries, as ``QdrantVectorStore`` expects them."""
        return self._indices_and_weights(texts, "query")

    def _indices_and_weights(
        self,
        texts: list[str],
        side: Side,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return the vectors of texts as LlamaIndex expects them.

        Args:
            texts: the texts.
            side: whether they are queries or documents.

        Returns:
            The indices of the terms of each text, and their weights.
        """
        vectors = self._source.encode(texts, side)
        return [indices for indices, _ in vectors], [weights for _, weights in vectors]

    def _weights_by_index(self, texts: list[str], side: Side) -> list[dict[int, float]]:
        """Return a dictionary for each text, as LlamaIndex represents sparse vectors."""
        return [
            dict(zip(indices, weights, strict=True))
            for indices, weights in self._source.encode(texts, side)
        ]

    def _get_query_embedding(self, query: str) -> dict[int, float]:
        return self._weights_by_index([query], "query")[0]

    def _get_text_embedding(self, text: str) -> dict[int, float]:
        return self._weights_by_index([text], "document")[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[dict[int, float]]:
        return self._weights_by_index(texts, "document")

    async def _aget_query_embedding(self, query: str) -> dict[int, float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> dict[int, float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[dict[int, float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
