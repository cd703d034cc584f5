"""Sparse embeddings for LlamaIndex, of a model in this process or of a server.

Needs the package ``llama-index-core``, which is imported with this module.
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
    """LlamaIndex's ``BaseSparseEmbedding`` of any ``SparseEncoder``; queries and documents take
    their own routes.

    ``QdrantVectorStore(enable_hybrid=True, sparse_doc_fn=e.document_vectors,
    sparse_query_fn=e.query_vectors)`` stores and searches its vectors.

    Arguments are those of :class:`tilefold.integrations._sparse_source.SparseSource`.
    """

    _source: SparseSource = PrivateAttr()

    def __init__(self, model: Model | None = None, url: str | None = None, **options: Any) -> None:
        source = SparseSource(model, url, **options)
        name = model if isinstance(model, str) else url or type(model).__name__
        super().__init__(model_name=name, embed_batch_size=source.batch_size)
        self._source = source

    @classmethod
    def class_name(cls) -> str:
        """The name under which LlamaIndex knows it."""
        return "TilefoldSparseEmbedding"

    def document_vectors(self, texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
        """Indices and weights of documents, as ``QdrantVectorStore`` takes them."""
        return self._columns(texts, "document")

    def query_vectors(self, texts: list[str]) -> tuple[list[list[int]], list[list[float]]]:
        """Indices and weights of queries."""
        return self._columns(texts, "query")

    def _columns(self, texts: list[str], side: Side) -> tuple[list[list[int]], list[list[float]]]:
        rows = self._source.encode(texts, side)
        return [ids for ids, _ in rows], [weights for _, weights in rows]

    def _rows(self, texts: list[str], side: Side) -> list[dict[int, float]]:
        return [
            dict(zip(ids, weights, strict=True))
            for ids, weights in self._source.encode(texts, side)
        ]

    def _get_query_embedding(self, query: str) -> dict[int, float]:
        return self._rows([query], "query")[0]

    def _get_text_embedding(self, text: str) -> dict[int, float]:
        return self._rows([text], "document")[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[dict[int, float]]:
        return self._rows(texts, "document")

    async def _aget_query_embedding(self, query: str) -> dict[int, float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> dict[int, float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[dict[int, float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
