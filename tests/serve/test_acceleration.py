"""Accelerated dense models are served with the vectors of the stock model, and ready at once."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from tests.integrations.eager_graphs import EagerGraph
from tests.serve.running import Client, serving
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.integrations.sentence_transformers.graphs.encoding import EncodingGraphs
from tilefold.serve.models import BatchKey, Served
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

TEXTS = ["csv", "read and write files of rows", "sum", "random numbers, and their seeds"]


@pytest.fixture(scope="module")
def stock(masked_lm: str) -> Any:
    """A stock dense model: means of tokens, normalised, with a prompt for queries."""
    transformer = Transformer(masked_lm)
    pooling = Pooling(transformer.get_embedding_dimension())
    modules = [transformer, pooling, Normalize()]
    return SentenceTransformer(modules=modules, prompts={"query": "find "}, device="cpu").eval()


@pytest.fixture(scope="module")
def accelerated(stock: Any) -> Any:
    """An accelerated copy, which encodes few texts by graphs that run eagerly."""
    model = copy.deepcopy(stock)
    accelerate(model)
    model.encoding_graphs = EncodingGraphs(model, EagerGraph)
    return model


@pytest.fixture(scope="module")
def dense_client(accelerated: Any) -> Iterator[Client]:
    """A server of the accelerated model."""
    with serving(Service([Served(accelerated, "dense", "mean")])) as client:
        yield client


def assert_near(vectors: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.array(vectors), expected, rtol=0, atol=1e-5)


def test_served_vectors_equal_those_of_the_stock_model(dense_client: Client, stock: Any) -> None:
    assert_near(dense_client.post("/embed", {"inputs": TEXTS}).json, stock.encode(TEXTS))
    queries = dense_client.post("/query/embed", {"inputs": TEXTS}).json
    assert_near(queries, stock.encode_query(TEXTS))
    truncated = dense_client.post("/embed", {"inputs": TEXTS, "dimensions": 8}).json
    assert_near(truncated, stock.encode(TEXTS, truncate_dim=8, normalize_embeddings=True))


def test_served_vectors_of_token_ids_equal_those_of_their_text(
    dense_client: Client,
    stock: Any,
) -> None:
    ids = stock.tokenizer(TEXTS)["input_ids"]
    assert_near(dense_client.post("/embed", {"inputs": ids}).json, stock.encode(TEXTS))


def test_raw_vectors_do_not_drop_the_graphs(
    dense_client: Client,
    stock: Any,
    accelerated: Any,
) -> None:
    body = {"inputs": TEXTS[:1]}
    (vector,) = dense_client.post("/embed", body).json
    captures_before = EagerGraph.n_captures
    (raw_vector,) = dense_client.post("/embed", {**body, "normalize": False}).json
    assert dense_client.post("/embed", body).json == [vector]
    assert EagerGraph.n_captures == captures_before
    expected = stock.encode(TEXTS[0], output_value=None)["token_embeddings"].mean(0)
    assert_near(raw_vector, expected)
    assert np.linalg.norm(raw_vector) > 1.01


def test_raw_vectors_are_encoded_by_the_worker_even_of_a_quick_text(
    stock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(stock, "dense", "mean")
    encode = served.encode
    thread_names: list[str] = []

    def record_and_encode(key: BatchKey, texts: list[str]) -> Any:
        thread_names.append(threading.current_thread().name)
        return encode(key, texts)

    monkeypatch.setattr(Served, "is_quick", lambda served, tokens: True)
    monkeypatch.setattr(served, "encode", record_and_encode)
    with serving(Service([served])) as client:
        client.post("/embed", {"inputs": "cats"})
        client.post("/embed", {"inputs": "cats", "normalize": False})
    ran_in_worker = [name == f"tilefold-{served.device}" for name in thread_names]
    assert ran_in_worker == [False, True]


def test_served_token_vectors_equal_those_of_the_stock_model(late: Any) -> None:
    model = copy.deepcopy(late)
    accelerate(model)
    model.encoding_graphs = EncodingGraphs(model, EagerGraph)
    with serving(Service([Served(model, "multi-vector", "late")])) as client:
        token_vectors = client.post("/embed_all", {"inputs": TEXTS}).json
        acceleration = client.get("/info").json["acceleration"]["multi-vector"]
    expected = late.encode_document(TEXTS)
    for vectors, expected_vectors in zip(token_vectors, expected, strict=True):
        assert_near(vectors, expected_vectors)
    assert acceleration["packed"]
    assert acceleration["graphs"] > 0


def test_info_says_whether_models_are_accelerated(
    dense_client: Client,
    accelerated: Any,
    stock: Any,
) -> None:
    dense_client.post("/embed", {"inputs": TEXTS[:1]})
    n_graphs = len(accelerated.encoding_graphs.graphs)
    assert n_graphs > 0
    info = dense_client.get("/info").json
    assert info["acceleration"] == {"dense": {"packed": True, "graphs": n_graphs}}
    assert Served(stock, "dense", "mean").acceleration is None


def test_graphs_of_short_queries_are_captured_before_the_service_is_ready(stock: Any) -> None:
    model = copy.deepcopy(stock)
    accelerate(model)
    model.encoding_graphs = EncodingGraphs(model, EagerGraph)
    served = Served(model, "dense", "mean")
    Service([served]).warm_up()
    captures_before = EagerGraph.n_captures
    for n_texts in (1, 2, 4):
        for n_words in (1, 8, 40):
            served.encode(BatchKey(served, "query"), ["row " * n_words] * n_texts)
    assert EagerGraph.n_captures == captures_before
    assert served.is_quick(12)


@pytest.mark.parametrize(
    ("max_batch_tokens", "expected"),
    [
        pytest.param(16_384, [(1, 1), (1, 16), (1, 64), (4, 16), (4, 64)], id="default"),
        pytest.param(64, [(1, 1), (1, 16), (1, 64), (4, 16)], id="small batches"),
    ],
)
def test_queries_of_usual_lengths_are_encoded_before_the_service_is_ready(
    max_batch_tokens: int,
    expected: list[tuple[int, int]],
    stock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[tuple[int, int]] = []
    encode = Served.encode

    def record_and_encode(served: Served, key: BatchKey, texts: list[str]) -> Any:
        if key.side == "query":
            encoded.append((len(texts), len(texts[0].split())))
        return encode(served, key, texts)

    monkeypatch.setattr(Served, "encode", record_and_encode)
    limits = Limits(max_batch_tokens=max_batch_tokens)
    Service([Served(stock, "dense", "mean")], limits).warm_up()
    assert encoded == [(1, 1), *expected]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_model_that_fails_for_long_texts_is_served(
    device: str,
    stock: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail_for_long_texts(served: Served, key: BatchKey, texts: list[str]) -> list[Any]:
        if len(texts[0].split()) > 32:
            raise IndexError("index out of range")
        return texts

    monkeypatch.setattr(Served, "encode", fail_for_long_texts)
    monkeypatch.setattr(Served, "device", device)
    with caplog.at_level("WARNING", "tilefold.serve"):
        Service([Served(stock, "dense", "mean")]).warm_up()
    sides = ["query"] if device == "cpu" else ["query", "document"]
    assert [message.split(" texts")[0] for message in caplog.messages] == [
        f"mean: the first {side}" for side in sides
    ]
    assert "(IndexError: index out of range)" in caplog.text


def test_a_model_that_encodes_no_word_after_a_failure_is_not_served(
    stock: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    n_calls = 0

    def fail_from_second_call_on(served: Served, key: BatchKey, texts: list[str]) -> list[Any]:
        nonlocal n_calls
        n_calls += 1
        if n_calls > 1:
            raise RuntimeError("device-side assert")
        return texts

    monkeypatch.setattr(Served, "encode", fail_from_second_call_on)
    with pytest.raises(RuntimeError, match="device-side assert"):
        Service([Served(stock, "dense", "mean")]).warm_up()
