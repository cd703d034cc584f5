"""Routes of text-embeddings-inference that are made of its others, and those that no model here answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.serve.running import Client, serving
from tilefold.serve.answers import cosines
from tilefold.serve.models import Served
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

TEXTS = ["read csv files", "parse dates and times", "csv files"]


def similarity(source: str, sentences: list[str], **parameters: Any) -> dict[str, Any]:
    return {"inputs": {"source_sentence": source, "sentences": sentences}, "parameters": parameters}


def test_similarity_is_the_cosine_of_the_vectors_that_the_model_makes(client: Client, sparse: Any) -> None:
    rows = sparse.encode_document(TEXTS).to_dense().float().cpu().numpy().astype(np.float64)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    reply = client.post("/similarity", similarity(TEXTS[0], TEXTS[1:]))
    assert (reply.status, reply.json) == (200, pytest.approx((rows[1:] @ rows[0]).tolist(), abs=2e-2))
    assert int(reply.headers["x-compute-characters"]) == len("".join(TEXTS))
    same = client.post("/query/similarity", {"inputs": similarity("a b", ["a b"])["inputs"]}).json
    assert same == pytest.approx([1.0], abs=1e-5)


def test_similarity_of_dense_rows_and_of_empty_ones() -> None:
    rows = [np.array([3, 4], np.float32), np.array([4, 3], np.float32), np.zeros(2, np.float32)]
    assert cosines(rows, "dense") == pytest.approx([24 / 25, 0.0])
    empty = (np.zeros(0, np.int32), np.zeros(0, np.float32))
    one = (np.array([2, 7], np.int32), np.array([3, 4], np.float32))
    other = (np.array([1, 7], np.int32), np.array([4, 3], np.float32))
    assert cosines([one, other, empty, one], "sparse") == pytest.approx([12 / 25, 0.0, 1.0])


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        (similarity("a", []), 400, "Empty", "`inputs.sentences` cannot be empty"),
        (similarity("a", ["b"] * 32), 422, "Validation", "batch size 33 > maximum allowed batch size 32"),
        (similarity("", ["b"]), 400, "Empty", "`inputs` cannot be empty"),
        (similarity("a", ["b"], prompt_name="no"), 422, "Validation", "`prompt_name` expected one of"),
        (similarity("a" * 20_000, ["b"], truncate=False), 422, "Validation", "must have less than"),
        ({"inputs": ["a", "b"]}, 422, "Validation", "`inputs`: "),
        ({"inputs": {"source_sentence": "a"}}, 422, "Validation", "`inputs.sentences`: Field required"),
    ],
)
def test_wrong_bodies_of_similarity_are_told(client: Client, body: Any, status: int, kind: str, message: str) -> None:
    reply = client.post("/similarity", body)
    assert (reply.status, reply.json["error_type"]) == (status, kind)
    assert message in reply.json["error"]


def test_vertex_answers_each_instance_as_its_own_route_would(client: Client) -> None:
    ranked = {"query": "csv", "texts": TEXTS, "return_text": True}
    instances = [{"inputs": TEXTS[0], "top_k": 4}, ranked, {"inputs": TEXTS[1:]}]
    reply = client.post("/vertex", {"instances": instances, "parameters": {}})
    first, second, third = reply.json["predictions"]
    assert first == client.post("/embed_sparse", instances[0]).json
    assert [entry["index"] for entry in second] == [e["index"] for e in client.post("/rerank", ranked).json]
    assert len(third) == 2


@pytest.mark.parametrize(
    ("instances", "status", "kind", "message"),
    [
        ([], 400, "Empty", "`instances` cannot be empty"),
        ([{"inputs": "a"}] * 33, 422, "Validation", "batch size 33 > maximum allowed batch size 32"),
        ([{"inputs": "a"}, {"input": "b"}], 422, "Validation", "`instances.1.inputs`: Field required"),
        ([3], 422, "Validation", "`instances.0`: "),
        ([{"inputs": "a"}, {"inputs": ""}], 400, "Empty", "`inputs` cannot be empty"),
        ([{"query": "a", "texts": []}], 400, "Empty", "`texts` cannot be empty"),
    ],
)
def test_wrong_instances_are_told(client: Client, instances: Any, status: int, kind: str, message: str) -> None:
    reply = client.post("/vertex", {"instances": instances})
    assert (reply.status, reply.json["error_type"]) == (status, kind)
    assert message in reply.json["error"]


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
        reply = other.post("/similarity", similarity("a", ["b"]))
        assert (reply.status, "POST /rerank" in reply.json["error"]) == (424, True)
        assert other.post("/vertex", {"instances": [{"query": "a", "texts": ["b"]}]}).status == 200
