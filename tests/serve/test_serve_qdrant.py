"""An index in Qdrant behind the service: many requests at once, and a server that goes away."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.retrieval.qdrant_over_http import OverHttp
from tests.serve.running import serving
from tilefold import retrieval as r
from tilefold.retrieval.collection import Collection
from tilefold.retrieval.index.qdrant import QdrantIndex
from tilefold.retrieval.qdrant import Documents, Layout, QdrantCollection
from tilefold.serve import service
from tilefold.serve.models import Served
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

PATH = "/v1/papers/search?query=csv+files&hits=3"


@contextmanager
def away(sparse: Any, vectors: r.SparseVectors, limits: Limits | None = None, **options: Any) -> Iterator[Any]:
    """A client of a service whose index is on a Qdrant server, and that server."""
    http = OverHttp()
    r.build_index(vectors, "qdrant", url=http.url, collection="papers")
    model, index = Served(sparse, "sparse", "tiny"), QdrantIndex(QdrantCollection.server(http.url, "papers", **options))
    with serving(Service([model], limits, searchable=Searchable("papers", index, model))) as client:
        yield client, http
    http.stop()


def found(reply: Any) -> dict[str, float]:
    return {entry["docid"]: entry["score"] for entry in reply.json["candidates"]}


def test_an_embedded_index_answers_requests_that_come_together(sparse: Any, vectors: r.SparseVectors) -> None:
    queries = r.encode_queries(sparse, {"q": "csv files"})
    wanted = {hit.id: hit.score for hit in r.build_index(vectors).search(queries, 3)[0]}
    index = r.build_index(vectors, "qdrant")
    model = Served(sparse, "sparse", "tiny")
    with serving(Service([model], searchable=Searchable("papers", index, model))) as client:
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(client.get, [PATH] * 24))
        assert [reply.status for reply in replies] == [200] * 24
        assert all(found(reply) == pytest.approx(wanted, rel=1e-4) for reply in replies)
        assert client.get("/v1/indexes").json["indexes"][0]["documents"] == len(vectors)


def test_a_server_that_went_away_is_a_503_and_others_are_answered(sparse: Any, vectors: r.SparseVectors) -> None:
    with away(sparse, vectors, patience=3) as (client, http):
        assert client.get(PATH).status == 200
        http.fault = lambda method, path: 503
        began = time.monotonic()
        with ThreadPoolExecutor(16) as pool:
            paths = [PATH] * 12 + ["/v1/indexes"]  # more than there are threads for them
            searches = [pool.submit(client.get, path) for path in paths]
            time.sleep(0.5)
            assert client.post("/embed_sparse", {"inputs": "csv"}).status == 200
            assert not any(search.done() for search in searches)
        assert time.monotonic() - began < 6
        for search in searches:
            reply = search.result()
            assert (reply.status, reply.json["error_type"]) == (503, "Unhealthy")
            assert "does not answer" in reply.json["error"] and "127.0.0.1" not in reply.json["error"]
        http.fault = None
        assert client.get(PATH).status == 200


def test_the_service_ends_although_a_server_is_silent(sparse: Any, vectors: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(service, "_LEAVE_SECONDS", 0.3)
    asked, never = threading.Event(), threading.Event()

    def silent(method: str, path: str) -> None:
        asked.set()
        never.wait(20)

    with ThreadPoolExecutor(1) as pool:
        with away(sparse, vectors, Limits(shutdown_seconds=0.5)) as (client, http):
            http.fault = silent
            search = pool.submit(client.get, PATH)
            assert asked.wait(10)
            began = time.monotonic()
        assert time.monotonic() - began < 4  # and not the 50 s that a search may take
        left = [thread for thread in threading.enumerate() if thread.name.startswith("tilefold-searcher")]
        assert len(left) == 1 and all(thread.daemon for thread in left)  # the process need not wait for it either
        assert (search.result().status, search.result().json["error"]) == (503, "the service is closing")
        assert not [record for record in caplog.records if record.exc_info]
    never.set()


def test_a_document_of_the_index_alone_is_named(sparse: Any, late: Any, collection: Collection, vectors: Any) -> None:
    index: Any = r.build_index(vectors, "qdrant")
    models = Served(sparse, "sparse", "tiny"), Served(late, "multi-vector", "colbert")
    found = Searchable("papers", index, models[0], collection.documents, vectors, late=models[1])
    with serving(Service(list(models), searchable=found)) as client:
        terms, weights = vectors.row(0)
        added = {"added": dict(zip(terms.tolist(), (2 * weights).tolist(), strict=True))}
        rows = r.SparseVectors.from_rows(added, vectors.vocab_size, vectors.fingerprint)
        index.collection.upsert(Documents(["added"], rows))
        for name, option in (("prf", "--vectors"), ("rerank", "--data")):
            reply = client.post("/v1/papers/search", {"query": "csv files", name: True})
            assert (reply.status, reply.json["error_type"]) == (424, "Backend")
            assert "'added'" in reply.json["error"] and option in reply.json["error"]
        assert client.post("/v1/papers/search", {"query": "csv files", "explain": True}).status == 200


def test_dense_vectors_of_a_collection_are_a_column(sparse: Any, collection: Collection, vectors: Any) -> None:
    from sentence_transformers import SentenceTransformer

    from tilefold.recipes.backbone import minilm_path

    minilm = SentenceTransformer(str(minilm_path()), device="cpu", local_files_only=True)
    expected = r.dense_run(minilm, collection.contents(), {"q": "csv files"}, 3)["q"]
    embedded = minilm.encode(list(collection.contents().values()))
    layout = Layout(vectors.vocab_size, vectors.fingerprint, dense=embedded.shape[1])
    models = Served(sparse, "sparse", "tiny"), Served(minilm, "dense", "minilm")
    with tempfile.TemporaryDirectory() as folder, QdrantCollection.embedded(folder, layout) as opened:
        opened.upsert(Documents(vectors.ids, vectors, embedded))
        found = Searchable("papers", QdrantIndex(opened), models[0], dense=models[1])
        with serving(Service(list(models), searchable=found)) as client:
            answer = client.post("/v1/papers/search", {"query": "csv files", "hits": 3, "columns": True}).json
            assert client.get("/v1/indexes").json["indexes"][0]["features"]["dense"] is True
    assert set(answer["columns"]) == {"sparse", "dense"}
    assert {entry["docid"]: entry["score"] for entry in answer["columns"]["dense"]} == pytest.approx(expected, abs=1e-4)
