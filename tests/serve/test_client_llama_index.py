"""``tilefold.integrations.llama_index`` with the real llama-index and its Qdrant store (``make test-clients``)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("llama_index.core", reason="llama-index-core is not installed; make test-clients brings it")

from llama_index.core.base.embeddings.base_sparse import BaseSparseEmbedding

from tests.serve.running import Client
from tilefold.integrations.llama_index import TilefoldSparseEmbedding
from tilefold.retrieval.collection import Collection

TEXTS = ["read csv files", "write json text", "dates"]


@pytest.mark.parametrize("over", ["model", "url"])
def test_embeddings_are_dicts_of_the_model_s_terms(client: Client, sparse: Any, over: str) -> None:
    places = {"model": sparse} if over == "model" else {"url": f"http://127.0.0.1:{client.port}"}
    embedding = TilefoldSparseEmbedding(**places, batch_size=2)
    assert isinstance(embedding, BaseSparseEmbedding)
    served = client.post("/embed_sparse", {"inputs": TEXTS}).json
    for texts in (embedding.get_text_embedding_batch(TEXTS), asyncio.run(embedding.aget_text_embedding_batch(TEXTS))):
        for found, row in zip(texts, served, strict=True):
            assert found == pytest.approx({entry["index"]: entry["value"] for entry in row}, rel=2e-2)
    query = embedding.get_query_embedding("csv")
    assert asyncio.run(embedding.aget_query_embedding("csv")) == pytest.approx(query, rel=2e-2)
    assert embedding.similarity(query, query) == pytest.approx(1.0)
    assert "api_key" not in str(embedding.model_dump())


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
def test_a_hybrid_qdrant_store_finds_by_our_vectors(client: Client, sparse: Any, collection: Collection) -> None:
    pytest.importorskip("llama_index.vector_stores.qdrant")
    from llama_index.core.schema import MetadataMode, TextNode
    from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode
    from llama_index.vector_stores.qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient

    embedding = TilefoldSparseEmbedding(url=f"http://127.0.0.1:{client.port}")
    store = QdrantVectorStore(
        "t", QdrantClient(":memory:"), enable_hybrid=True, sparse_doc_fn=embedding.document_vectors,
        sparse_query_fn=embedding.query_vectors,
    )  # fmt: skip
    nodes = [
        TextNode(text=each.contents, embedding=[1.0, 0.0], metadata={"id": each.id})
        for each in collection.documents.values()
    ]
    store.add(nodes)
    asked = VectorStoreQuery(
        query_embedding=[1.0, 0.0], query_str="csv files", sparse_top_k=3, mode=VectorStoreQueryMode.SPARSE
    )
    found = store.query(asked)
    query = embedding.get_query_embedding("csv files")
    texts = {node.metadata["id"]: node.get_content(MetadataMode.EMBED) for node in nodes}  # what the store encodes
    rows = dict(zip(texts, embedding.get_text_embedding_batch(list(texts.values())), strict=True))
    scores = {name: sum(query.get(i, 0) * v for i, v in row.items()) for name, row in rows.items()}
    best = sorted(scores.values(), reverse=True)[:3]
    assert sorted(found.similarities, reverse=True) == pytest.approx(best, rel=1e-2)
