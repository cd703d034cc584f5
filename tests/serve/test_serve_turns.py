"""What one request may ask for, and that others have their turn beside it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.running import Client, Reply, serving
from tests.serve.test_serve_sockets import JSON, head, hold, inputs_in_flight, service, wait_until
from tilefold import retrieval as r
from tilefold.serve.models import Served
from tilefold.serve.searchable import Searchable
from tilefold.serve.service import Service
from tilefold.serve.text import TextTokens

MOST = 250 * 64  # characters that the tiny model tokenizes


@pytest.mark.parametrize(
    ("path", "body", "given"),
    [
        ("/tokenize", {"inputs": "." * 1_900_000}, "16000 characters. Given: 1900000"),
        ("/tokenize", {"inputs": ["." * 8000] * 3}, "16000 characters in all. Given: 24000"),
        ("/decode", {"ids": [[7] * 8000] * 3}, "16000 token ids in all. Given: 24000"),
        ("/embed_sparse", {"inputs": [[7] * 16_001], "truncate": False}, "16000 token ids. Given: 16001"),
        ("/embed_sparse", {"inputs": ["a", "." * (MOST + 1)], "truncate": False}, "16000 characters. Given: 16001"),
        ("/similarity", {"inputs": {"source_sentence": "." * (MOST + 1), "sentences": ["a"]},
                         "parameters": {"truncate": False}}, "16000 characters. Given: 16001"),
        ("/rerank", {"query": "." * (MOST + 1), "texts": ["a"], "truncate": False}, "8000 characters. Given: 16001"),
    ],
)  # fmt: skip
def test_more_characters_than_any_model_reads_are_refused(client: Client, path: str, body: Any, given: str) -> None:
    reply = client.post(path, body)
    assert (reply.status, reply.json["error_type"]) == (422, "Validation")
    assert reply.json["error"].endswith(given)


def test_as_many_characters_are_taken(client: Client) -> None:
    assert [len(tokens) for tokens in client.post("/tokenize", {"inputs": ["." * 8000] * 2}).json] == [8002] * 2
    assert len(client.post("/decode", {"ids": [[7] * 8000] * 2}).json) == 2


def test_a_query_of_an_index_has_the_same_limit(collection: Any) -> None:
    words = Searchable("words", r.BM25Index.build(collection.contents()))
    with serving(Service([], searchable=words)) as client:
        replies = [client.post("/v1/words/search", {"query": "csv " * count}) for count in (32_000, 32_001)]
        assert [reply.status for reply in replies] == [200, 422]
        assert replies[1].json["error"].endswith("`query` must have less than 128000 characters. Given: 128004")


@pytest.mark.parametrize("direction", ["left", "right"])
def test_of_a_text_that_is_cut_nothing_beyond_the_limit_is_read(
    client: Client, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, read = TextTokens.lengths, []

    def spied(self: TextTokens, texts: list[str], *given: Any) -> list[int]:
        read.extend(texts)
        return lengths(self, texts, *given)

    monkeypatch.setattr(TextTokens, "lengths", spied)
    text = "csv files " * 100_000 + "dates " * 100_000
    body = {"truncation_direction": direction}
    whole = client.post("/embed_sparse", body | {"inputs": text})
    assert whole.status == 200
    assert read == [text[:MOST] if direction == "right" else text[-MOST:]]
    assert whole.json == client.post("/embed_sparse", body | {"inputs": read[0]}).json


class Gate:
    """Stands before a function: counts who comes, and lets nobody pass until it is opened."""

    def __init__(self, function: Any) -> None:
        self.function, self.open = function, threading.Event()
        self.came: list[tuple[Any, ...]] = []

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.came.append(given)
        self.open.wait(20)
        return self.function(*given, **named)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Gate]:
    """Before the method of ``TextTokens`` that the test names."""
    made = Gate(getattr(TextTokens, request.param))
    monkeypatch.setattr(TextTokens, request.param, lambda *given, **named: made(*given, **named))  # noqa: PLW0108
    yield made
    made.open.set()


def post_all(client: Client, path: str, bodies: list[Any]) -> tuple[list[threading.Thread], list[Reply]]:
    replies: list[Reply] = []
    threads = [threading.Thread(target=lambda body=body: replies.append(client.post(path, body))) for body in bodies]
    for thread in threads:
        thread.start()
    return threads, replies


@pytest.mark.parametrize("gate", ["tokenize"], indirect=True)
def test_tokenizing_holds_nobody_else_up(sparse: Any, gate: Gate) -> None:
    with serving(service(sparse)) as client:
        threads, replies = post_all(client, "/tokenize", [{"inputs": "csv"}] * 4)
        wait_until(lambda: len(gate.came) == 2)  # as many as there are threads for it
        assert client.post("/embed_sparse", {"inputs": "csv files"}).status == 200
        gate.open.set()
        for thread in threads:
            thread.join(20)
        assert [reply.status for reply in replies] == [200] * 4


@pytest.mark.parametrize("gate", ["lengths"], indirect=True)
def test_work_for_a_client_that_has_gone_ends_with_its_next_portion(sparse: Any, gate: Gate) -> None:
    with serving(service(sparse)) as client:
        body = json.dumps({"inputs": ["." * 9000] * 32}).encode()
        with socket.create_connection(("127.0.0.1", client.port), timeout=20) as opened:
            opened.sendall(head(JSON + f"content-length: {len(body)}\r\n") + body)
            wait_until(lambda: len(gate.came) == 1)
        wait_until(lambda: inputs_in_flight(client) == 0)
        gate.open.set()
        assert client.post("/embed_sparse", {"inputs": "csv files"}).status == 200
        assert [len(texts) for _, texts, *_ in gate.came] == [1, 1]


def test_a_single_query_is_encoded_before_the_batches_that_came_first(
    sparse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, batches = Served.encode, []

    def spied(self: Served, way: Any, inputs: list[str]) -> Any:
        batches.append(list(inputs))
        return encode(self, way, inputs)

    monkeypatch.setattr(Served, "encode", spied)
    documents = [f"csv {number}" for number in range(32)]
    with serving(service(sparse, max_batch_tokens=64)) as client:
        with hold(client, sparse, inputs=1):
            threads, _ = post_all(client, "/embed_sparse", [{"inputs": documents}] * 4)
            wait_until(lambda: "te_queue_size 128" in client.get("/metrics").raw.decode())
            more, _ = post_all(client, "/embed_sparse", [{"inputs": "dates"}])
            wait_until(lambda: "te_queue_size 129" in client.get("/metrics").raw.decode())
        for thread in threads + more:
            thread.join(20)
    assert batches.index(["dates"]) <= 2 and len(batches) > 8  # the held one, one of documents, and then the query
