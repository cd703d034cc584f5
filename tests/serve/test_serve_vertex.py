"""Routes of text-embeddings-inference that are made of its others, and those that no model here answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.serve.running import Client, serving
from tests.serve.test_serve_contract import similar
from tilefold.serve.answers import cosines
from tilefold.serve.models import Served
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

TEXTS = ["read csv files", "parse dates and times", "csv files"]


def test_similarity_is_the_cosine_of_the_vectors_that_the_model_makes(client: Client, sparse: Any) -> None:
    rows = sparse.encode_document(TEXTS).to_dense().float().cpu().numpy().astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    reply = client.post("/similarity", similar(*TEXTS))
    assert (reply.status, reply.json) == (200, pytest.approx((rows[1:] @ rows[0]).tolist(), abs=2e-2))
    assert int(reply.headers["x-compute-characters"]) == len("".join(TEXTS))
    same = client.post("/query/similarity", {"inputs": similar("a b", "a b")["inputs"]}).json
    assert same == pytest.approx([1.0], abs=1e-5)


def test_similarity_of_dense_rows_and_of_empty_ones() -> None:
    rows = [np.array([3, 4], np.float32), np.array([4, 3], np.float32), np.zeros(2, np.float32)]
    assert cosines(rows, "dense") == pytest.approx([24 / 25, 0.0])
    empty = (np.zeros(0, np.int32), np.zeros(0, np.float32))
    one = (np.array([2, 7], np.int32), np.array([3, 4], np.float32))
    other = (np.array([1, 7], np.int32), np.array([4, 3], np.float32))
    assert cosines([one, other, empty, one], "sparse") == pytest.approx([12 / 25, 0.0, 1.0])


def test_vertex_answers_each_instance_as_its_own_route_would(client: Client) -> None:
    ranked = {"query": "csv", "texts": TEXTS, "return_text": True}
    instances = [{"inputs": TEXTS[0], "top_k": 4}, ranked, {"inputs": TEXTS[1:]}]
    reply = client.post("/vertex", {"instances": instances, "parameters": {}})
    first, second, third = reply.json["predictions"]
    assert first == client.post("/embed_sparse", instances[0]).json
    assert [entry["index"] for entry in second] == [e["index"] for e in client.post("/rerank", ranked).json]
    assert len(third) == 2


def test_instances_that_find_no_permit_are_refused_and_give_back_those_of_the_others(sparse: Any) -> None:
    limits = Limits(max_concurrent_requests=4, max_client_batch_size=4)
    with serving(Service([Served(sparse, "sparse", "tiny")], limits)) as client:
        reply = client.post("/vertex", {"instances": [{"inputs": ["a"] * 3}, {"inputs": ["b"] * 3}]})
        assert (reply.status, reply.json["error_type"], reply.headers["retry-after"]) == (429, "Overloaded", "1")
        assert client.post("/embed_sparse", {"inputs": ["a"] * 4}).status == 200


def test_routes_of_models_that_are_not_served_answer_424_and_not_404(client: Client, late: Any) -> None:
    reply = client.post("/predict", {"inputs": "a"})
    assert (reply.status, reply.json["error_type"]) == (424, "Backend")
    assert reply.json["error"] == "model is not a classifier model"
    assert 'te_request_failure{err="model_type"}' in client.get("/metrics").raw.decode()
    with serving(Service([Served(late, "multi-vector", "colbert")])) as other:
        reply = other.post("/similarity", similar("a", "b"))
        assert (reply.status, "POST /rerank" in reply.json["error"]) == (424, True)
        assert other.post("/vertex", {"instances": [{"query": "a", "texts": ["b"]}]}).status == 200
