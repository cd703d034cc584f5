"""Haystack: our components, and its own ones for TEI against our server, unchanged (``make test-clients``)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("haystack", reason="haystack-ai is not installed; make test-clients brings it")

from haystack import Document, Pipeline
from haystack.utils import Secret

from tests.serve.running import Client, serving
from tilefold.integrations.haystack import TilefoldSparseDocumentEmbedder, TilefoldSparseTextEmbedder
from tilefold.retrieval.collection import Collection
from tilefold.serve.models import Served
from tilefold.serve.service import Service


def url(client: Client, path: str = "") -> str:
    return f"http://127.0.0.1:{client.port}{path}"


def test_pipelines_over_a_url_store_and_find_in_qdrant_and_survive_a_file(
    client: Client, collection: Collection
) -> None:
    pytest.importorskip("haystack_integrations.document_stores.qdrant")
    from haystack_integrations.components.retrievers.qdrant import QdrantSparseEmbeddingRetriever
    from haystack_integrations.document_stores.qdrant import QdrantDocumentStore

    store = QdrantDocumentStore(":memory:", use_sparse_embeddings=True, embedding_dim=2)
    documents = [Document(content=each.contents, meta={"id": each.id}) for each in collection.documents.values()]
    embedded = TilefoldSparseDocumentEmbedder(url=url(client), batch_size=8).run([*documents, Document(content=None)])
    assert embedded["documents"][-1].sparse_embedding is None
    store.write_documents(embedded["documents"][:-1])
    pipeline = Pipeline()
    pipeline.add_component("text", TilefoldSparseTextEmbedder(url=url(client)))
    pipeline.add_component("retriever", QdrantSparseEmbeddingRetriever(document_store=store))
    pipeline.connect("text.sparse_embedding", "retriever.query_sparse_embedding")
    found = pipeline.run({"text": {"text": "csv files"}})["retriever"]["documents"]
    query = TilefoldSparseTextEmbedder(url=url(client)).run("csv files")["sparse_embedding"]
    weights = dict(zip(query.indices, query.values, strict=True))
    for document in found[:3]:
        row = next(each for each in embedded["documents"] if each.id == document.id).sparse_embedding
        score = sum(weights.get(i, 0) * v for i, v in zip(row.indices, row.values, strict=True))
        assert document.score == pytest.approx(score, rel=1e-2)
    alone = Pipeline()
    alone.add_component(
        "text", TilefoldSparseTextEmbedder(url=url(client), api_key=Secret.from_env_var("NO_SUCH", strict=False))
    )
    again = Pipeline.loads(alone.dumps(), allowed_modules=["tilefold.integrations.haystack"])
    assert again.run({"text": {"text": "csv files"}})["text"]["sparse_embedding"].indices == query.indices


def test_a_model_in_process_gives_the_vectors_of_its_server(client: Client, sparse: Any) -> None:
    here = TilefoldSparseTextEmbedder(sparse)
    there = TilefoldSparseTextEmbedder(url=url(client))
    one, other = (each.run("csv files")["sparse_embedding"] for each in (here, there))
    assert one.indices == other.indices
    assert one.values == pytest.approx(other.values, rel=2e-2)
    with pytest.raises(ValueError, match="expected a folder or a name to store the pipeline"):
        here.to_dict()


def test_haystack_s_own_components_for_tei_run_against_our_server_unchanged(two_sided: Any, late: Any) -> None:
    pytest.importorskip("haystack_integrations.components.embedders.huggingface_api")
    from haystack_integrations.components.embedders import huggingface_api as tei
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    models = [Served(two_sided, "sparse", "two-sided"), Served(late, "multi-vector", "colbert")]
    with serving(Service(models), api_key="sesam") as client:
        token = Secret.from_token("sesam")
        locked = Client(client.port, {"authorization": "Bearer sesam"})
        text = tei.HuggingFaceTEISparseTextEmbedder(api_base_url=url(client, "/query"), token=token)
        found = text.run("read csv files")["sparse_embedding"]
        served = locked.post("/query/embed_sparse", {"inputs": "read csv files"}).json[0]
        assert found.indices == [entry["index"] for entry in served]
        assert found.values == pytest.approx([entry["value"] for entry in served])
        several = tei.HuggingFaceTEISparseDocumentEmbedder(api_base_url=url(client, "/document"), token=token)
        documents = [Document(content="read csv files"), Document(content="dates")]
        rows = locked.post("/document/embed_sparse", {"inputs": ["read csv files", "dates"]}).json
        for document, row in zip(several.run(documents)["documents"], rows, strict=True):
            assert document.sparse_embedding.indices == [entry["index"] for entry in row]
        ranker = HuggingFaceTEIRanker(url=url(client), token=token, top_k=2)
        ranked = ranker.run(query="read csv", documents=documents)["documents"]
        expected = locked.post("/rerank", {"query": "read csv", "texts": [each.content for each in documents]}).json
        assert [each.score for each in ranked] == pytest.approx([entry["score"] for entry in expected], rel=1e-3)
