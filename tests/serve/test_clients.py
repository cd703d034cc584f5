"""The clients for LangChain, LlamaIndex and Haystack with the real libraries (``make
test-clients``), and their source.

Their vectors come from a model in process or from a server, with the same result.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.inside import ServerError, SparseSource
from tests.refusals import refused
from tests.sequences import LabelledSeries
from tests.serve.running import Client, serving
from tilefold.integrations.sentence_transformers import encode_sparse
from tilefold.retrieval.data.collection import Collection
from tilefold.serve.models import Served
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

NO_NUMBERS = "expected whole numbers and finite weights"
TEXTS = ["read csv files", "write json text", "dates", "queues of threads"]


def url(client: Client, path: str = "") -> str:
    return f"http://127.0.0.1:{client.port}{path}"


@pytest.fixture(scope="module")
def server(two_sided: Any) -> Iterator[Client]:
    limits = Limits(max_client_batch_size=2, max_concurrent_requests=2)
    with serving(
        Service([Served(two_sided, "sparse", "two-sided")], limits),
        api_key="sesam",
    ) as client:
        yield client


@pytest.mark.parametrize("side", ["query", "document"])
def test_model_and_server_give_the_vectors_of_the_side(
    two_sided: Any,
    server: Client,
    side: Any,
) -> None:
    expected = encode_sparse(two_sided, TEXTS, task=side).to_dense()
    for source in (
        SparseSource(two_sided, batch_size=2),
        SparseSource(url=url(server), api_key="sesam", batch_size=2),
        SparseSource(url=f"{url(server)}/{side}/", api_key="sesam", batch_size=2, sides=False),
    ):
        actual = source.encode(TEXTS, side)
        assert len(actual) == len(TEXTS)
        for row, (indices, weights) in enumerate(actual):
            assert indices == expected[row].nonzero().flatten().tolist()
            assert weights == pytest.approx(expected[row][indices].tolist(), rel=2e-2)
    cut = SparseSource(url=url(server), api_key="sesam", top_k=3).encode(TEXTS[:1], side)
    assert len(cut[0][0]) == 3
    assert SparseSource(two_sided).encode([], side) == []
    refused(TypeError, r"pass \['a'\]", SparseSource(two_sided).encode, "a", side)
    labelled = LabelledSeries(TEXTS, range(len(TEXTS))[::-1])
    assert SparseSource(two_sided).encode(labelled, side) == SparseSource(two_sided).encode(
        TEXTS, side
    )


def test_a_model_is_loaded_from_its_folder_at_first_use(
    masked_lm: str,
    tmp_path: Any,
    sparse: Any,
) -> None:
    sparse.save_pretrained(str(tmp_path / "model"))
    source = SparseSource(str(tmp_path / "model"))
    assert source._loaded_model is None
    ((indices, weights),) = source.encode(TEXTS[:1], "document")
    assert len(indices) == len(weights) > 3
    assert source._loaded_model is not None


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("hi", "answered 200 and no JSON"),
        ("[1]", "expected sparse vectors in the answer"),
        ("[]", "expected 1 vectors in the answer of the server, got 0"),
        ('[{"indices":[1],"values":[1,2]}]', NO_NUMBERS),
        ('[[{"index":1,"value":NaN}]]', NO_NUMBERS),
        ('[[{"index":"a","value":1}]]', NO_NUMBERS),
    ],
)
def test_answers_that_are_none_are_refused(body: str, told: str) -> None:
    refused(ServerError, told, SparseSource(url=page_of(reply(body))).encode, ["a"], "query")


def test_errors_of_a_server_are_told_with_its_reason_and_the_time_waited(server: Client) -> None:
    for path, key, texts, message in (
        ("", "wrong", 1, "answered 401: expected a valid key"),
        ("", "sesam", 3, "answered 422: batch size 3 > maximum allowed batch size 2"),
        ("/nowhere", "sesam", 1, "answered 404: there is no such route"),
    ):
        refused(
            ServerError,
            message,
            SparseSource(url=url(server) + path, api_key=key).encode,
            ["a"] * texts,
            "query",
        )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        source = SparseSource(url=address, timeout=0.3)
        at_least_the_timeout = r"(0\.[3-9]|[1-9]\d*\.\d)"
        message = rf"gave no answer in {at_least_the_timeout} s"
        refused(ServerError, message, source.encode, ["a"], "query")
    with socket.socket() as not_listening:
        not_listening.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{not_listening.getsockname()[1]}"
        message = rf"{address} gave no answer in \d+\.\d s .*refused.*tilefold serve"
        refused(ServerError, message, SparseSource(url=address).encode, ["a"], "query")


def test_a_busy_server_is_asked_again_and_one_that_knows_nothing_of_top_k_gives_the_same_entries() -> (
    None
):
    busy, fine = reply("{}", "429 Too Many Requests"), reply('[{"indices":[1],"values":[2.5]}]')
    assert SparseSource(url=page_of(busy, busy, fine)).encode(["a"], "query") == [([1], [2.5])]
    entries = [
        {"index": index, "value": value} for index, value in ((3, 0.5), (4, 2), (7, 0.5), (9, 1.25))
    ]
    source = SparseSource(url=page_of(reply(json.dumps([entries]))), top_k=3, sides=False)
    assert source.encode(["a"], "query") == [([3, 4, 9], [0.5, 2, 1.25])]


def reply(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "model, url: expected one of them, got neither"),
        ({"model": "a", "url": "http://b"}, "got both"),
        ({"url": "localhost:8080"}, "url: expected an address such as"),
        ({"url": "file:///etc/passwd"}, "url: expected an address such as"),
        ({"url": "http://localhost:99999"}, "url: expected an address such as"),
        (
            {"url": "http://me:secret@localhost"},
            "url: expected an address without a name, a password",
        ),
        (
            {"url": "http://localhost?key=secret"},
            "url: expected an address without a name, a password",
        ),
        ({"url": "http://localhost", "api_key": "sesam\n"}, "api_key: expected printable ASCII"),
        ({"url": "http://localhost", "api_key": "s\xe9sam"}, "api_key: expected printable ASCII"),
        ({"model": "a", "top_k": 0}, "top_k: expected at least 1"),
        ({"model": "a", "batch_size": 0}, "batch_size: expected at least 1"),
        ({"model": "a", "timeout": 0}, "timeout: expected a number above 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        SparseSource(**arguments)
    assert "secret" not in str(caught.value) and "sam" not in str(caught.value)


def page_of(*answers: bytes) -> str:
    """The address of a server that gives these answers, one after the other, whatever it is asked."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listening:
            for each in answers:
                opened, _ = listening.accept()
                with opened:
                    read_request(opened)
                    opened.sendall(each)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


def read_request(connection: socket.socket) -> None:
    """Read a request with a JSON body to its end.

    If a connection is closed before all was read, it is reset, and its client may lose the answer.
    """
    with connection.makefile("rb") as received:
        length = 0
        while (line := received.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        received.read(length)


def places(over: str, client: Client, sparse: Any) -> dict[str, Any]:
    return {"model": sparse} if over == "model" else {"url": url(client)}


def as_dict(vector: Any) -> dict[int, float]:
    return dict(zip(vector.indices, vector.values, strict=True))


def dot(query: Mapping[int, float], row: Mapping[int, float]) -> float:
    return sum(query.get(index, 0) * value for index, value in row.items())


@pytest.mark.parametrize("over", ["model", "url"])
def test_langchain_ranks_by_our_dot_products(
    client: Client,
    sparse: Any,
    collection: Collection,
    over: str,
) -> None:
    pytest.importorskip(
        "langchain_qdrant",
        reason="langchain-qdrant is not installed; make test-clients brings it",
    )
    from langchain_core.documents import Document
    from langchain_qdrant import QdrantVectorStore, RetrievalMode, SparseEmbeddings

    from tilefold.integrations.langchain import TilefoldSparseEmbeddings

    embeddings = TilefoldSparseEmbeddings(**places(over, client, sparse), top_k=64)
    assert isinstance(embeddings, SparseEmbeddings)
    documents = [
        Document(each.contents, metadata={"id": each.id}) for each in collection.documents.values()
    ]
    store = QdrantVectorStore.from_documents(
        documents,
        None,
        location=":memory:",
        collection_name="t",
        sparse_embedding=embeddings,
        retrieval_mode=RetrievalMode.SPARSE,
    )
    actual = store.similarity_search_with_score("csv files", k=16)
    query = embeddings.embed_query("csv files")
    vectors = embeddings.embed_documents([each.page_content for each in documents])
    names = [document.metadata["id"] for document in documents]
    scores = {
        name: dot(as_dict(query), as_dict(row)) for name, row in zip(names, vectors, strict=True)
    }
    assert {document.metadata["id"]: score for document, score in actual} == pytest.approx(
        scores,
        rel=1e-2,
    )
    assert asyncio.run(embeddings.aembed_query("csv files")).indices == query.indices


@pytest.mark.parametrize("over", ["model", "url"])
def test_embeddings_of_llama_index_are_dicts_of_the_model_s_terms(
    client: Client,
    sparse: Any,
    over: str,
) -> None:
    pytest.importorskip(
        "llama_index.core",
        reason="llama-index-core is not installed; make test-clients brings it",
    )
    from llama_index.core.base.embeddings.base_sparse import BaseSparseEmbedding

    from tilefold.integrations.llama_index import TilefoldSparseEmbedding

    embedding = TilefoldSparseEmbedding(**places(over, client, sparse), batch_size=2)
    assert isinstance(embedding, BaseSparseEmbedding)
    served = client.post("/embed_sparse", {"inputs": TEXTS}).json
    for texts in (
        embedding.get_text_embedding_batch(TEXTS),
        asyncio.run(embedding.aget_text_embedding_batch(TEXTS)),
    ):
        for actual, row in zip(texts, served, strict=True):
            assert actual == pytest.approx(
                {entry["index"]: entry["value"] for entry in row},
                rel=2e-2,
            )
    query = embedding.get_query_embedding("csv")
    assert asyncio.run(embedding.aget_query_embedding("csv")) == pytest.approx(query, rel=2e-2)
    assert embedding.similarity(query, query) == pytest.approx(1.0)
    assert "api_key" not in str(embedding.model_dump())


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
def test_a_hybrid_qdrant_store_of_llama_index_finds_by_our_vectors(
    client: Client,
    collection: Collection,
) -> None:
    pytest.importorskip("llama_index.vector_stores.qdrant")
    from llama_index.core.schema import MetadataMode, TextNode
    from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode
    from llama_index.vector_stores.qdrant import QdrantVectorStore
    from qdrant_client import QdrantClient

    from tilefold.integrations.llama_index import TilefoldSparseEmbedding

    embedding = TilefoldSparseEmbedding(url=url(client))
    store = QdrantVectorStore(
        "t",
        QdrantClient(":memory:"),
        enable_hybrid=True,
        sparse_doc_fn=embedding.document_vectors,
        sparse_query_fn=embedding.query_vectors,
    )
    dense = [1.0, 0.0]
    documents = collection.documents.values()
    nodes = [
        TextNode(text=document.contents, embedding=dense, metadata={"id": document.id})
        for document in documents
    ]
    store.add(nodes)
    sparse = VectorStoreQueryMode.SPARSE
    actual = store.query(
        VectorStoreQuery(query_embedding=dense, query_str="csv files", sparse_top_k=3, mode=sparse),
    )
    texts = [node.get_content(MetadataMode.EMBED) for node in nodes]  # what the store encodes
    query = embedding.get_query_embedding("csv files")
    best = sorted(
        (dot(query, row) for row in embedding.get_text_embedding_batch(texts)),
        reverse=True,
    )[:3]
    assert sorted(actual.similarities, reverse=True) == pytest.approx(best, rel=1e-2)


def test_pipelines_of_haystack_find_and_survive_a_file(
    client: Client,
    sparse: Any,
    collection: Collection,
) -> None:
    pytest.importorskip(
        "haystack_integrations.document_stores.qdrant",
        reason="make test-clients brings it",
    )
    from haystack import Document, Pipeline
    from haystack.utils import Secret
    from haystack_integrations.components.retrievers.qdrant import QdrantSparseEmbeddingRetriever
    from haystack_integrations.document_stores.qdrant import QdrantDocumentStore

    from tilefold.integrations.haystack import (
        TilefoldSparseDocumentEmbedder,
        TilefoldSparseTextEmbedder,
    )

    store = QdrantDocumentStore(":memory:", use_sparse_embeddings=True, embedding_dim=2)
    documents = [
        Document(content=each.contents, meta={"id": each.id})
        for each in collection.documents.values()
    ]
    embedded = TilefoldSparseDocumentEmbedder(url=url(client), batch_size=8).run(
        [*documents, Document(content=None)],
    )
    assert embedded["documents"][-1].sparse_embedding is None
    store.write_documents(embedded["documents"][:-1])
    pipeline = Pipeline()
    pipeline.add_component("text", TilefoldSparseTextEmbedder(url=url(client)))
    pipeline.add_component("retriever", QdrantSparseEmbeddingRetriever(document_store=store))
    pipeline.connect("text.sparse_embedding", "retriever.query_sparse_embedding")
    actual = pipeline.run({"text": {"text": "csv files"}})["retriever"]["documents"]
    query = TilefoldSparseTextEmbedder(url=url(client)).run("csv files")["sparse_embedding"]
    rows = {each.id: each.sparse_embedding for each in embedded["documents"]}
    for document in actual[:3]:
        assert document.score == pytest.approx(
            dot(as_dict(query), as_dict(rows[document.id])),
            rel=1e-2,
        )
    alone, key = Pipeline(), Secret.from_env_var("NO_SUCH", strict=False)
    alone.add_component("text", TilefoldSparseTextEmbedder(url=url(client), api_key=key))
    again = Pipeline.loads(alone.dumps(), allowed_modules=["tilefold.integrations.haystack"])
    assert (
        again.run({"text": {"text": "csv files"}})["text"]["sparse_embedding"].indices
        == query.indices
    )
    here = TilefoldSparseTextEmbedder(sparse)
    assert as_dict(here.run("csv files")["sparse_embedding"]) == pytest.approx(
        as_dict(query),
        rel=2e-2,
    )
    refused(
        ValueError, "expected a folder or a name, which a saved pipeline can store", here.to_dict
    )


def test_haystack_s_own_components_for_tei_run_against_our_server_unchanged(
    two_sided: Any,
    late: Any,
) -> None:
    pytest.importorskip("haystack_integrations.components.embedders.huggingface_api")
    from haystack import Document
    from haystack.utils import Secret
    from haystack_integrations.components.embedders import huggingface_api as tei
    from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

    models = [Served(two_sided, "sparse", "two-sided"), Served(late, "multi-vector", "colbert")]
    with serving(Service(models), api_key="sesam") as client:
        token = Secret.from_token("sesam")
        locked = Client(client.port, {"authorization": "Bearer sesam"})
        text = tei.HuggingFaceTEISparseTextEmbedder(api_base_url=url(client, "/query"), token=token)
        (served,) = locked.post(
            "/query/embed_sparse",
            {"inputs": "read csv files", "format": "arrays"},
        ).json
        expected = dict(zip(served["indices"], served["values"], strict=True))
        assert as_dict(text.run("read csv files")["sparse_embedding"]) == pytest.approx(expected)
        several = tei.HuggingFaceTEISparseDocumentEmbedder(
            api_base_url=url(client, "/document"),
            token=token,
        )
        texts = ["read csv files", "dates"]
        documents = [Document(content=text) for text in texts]
        rows = locked.post("/document/embed_sparse", {"inputs": texts, "format": "arrays"}).json
        for document, row in zip(several.run(documents)["documents"], rows, strict=True):
            assert document.sparse_embedding.indices == row["indices"]
        ranker = HuggingFaceTEIRanker(url=url(client), token=token, top_k=2)
        ranked = ranker.run(query="read csv", documents=documents)["documents"]
        scores = [
            entry["score"]
            for entry in locked.post("/rerank", {"query": "read csv", "texts": texts}).json
        ]
        assert [each.score for each in ranked] == pytest.approx(scores, rel=1e-3)
