"""``tilefold.integrations.langchain`` with the real langchain-qdrant and its store (``make test-clients``)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("langchain_qdrant", reason="langchain-qdrant is not installed; make test-clients brings it")

from langchain_core.documents import Document
from langchain_qdrant import QdrantVectorStore, RetrievalMode, SparseEmbeddings

from tests.serve.running import Client
from tilefold.integrations.langchain import TilefoldSparseEmbeddings
from tilefold.retrieval.collection import Collection


@pytest.mark.parametrize("over", ["model", "url"])
def test_a_qdrant_store_ranks_by_the_dot_product_of_our_vectors(
    client: Client, sparse: Any, collection: Collection, over: str
) -> None:
    places = {"model": sparse} if over == "model" else {"url": f"http://127.0.0.1:{client.port}"}
    embeddings = TilefoldSparseEmbeddings(**places, top_k=64)
    assert isinstance(embeddings, SparseEmbeddings)
    documents = [Document(each.contents, metadata={"id": each.id}) for each in collection.documents.values()]
    store = QdrantVectorStore.from_documents(
        documents, None, location=":memory:", collection_name="t", sparse_embedding=embeddings,
        retrieval_mode=RetrievalMode.SPARSE,
    )  # fmt: skip
    found = store.similarity_search_with_score("csv files", k=16)
    query = embeddings.embed_query("csv files")
    weights = dict(zip(query.indices, query.values, strict=True))
    vectors = embeddings.embed_documents([each.page_content for each in documents])
    scores = {
        document.metadata["id"]: sum(weights.get(i, 0) * v for i, v in zip(row.indices, row.values, strict=True))
        for document, row in zip(documents, vectors, strict=True)
    }
    assert {document.metadata["id"]: score for document, score in found} == pytest.approx(scores, rel=1e-2)
    assert asyncio.run(embeddings.aembed_query("csv files")).indices == query.indices
