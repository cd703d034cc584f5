"""Where the clients of other libraries get their vectors: a model in process, or a server, with the same result."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.refusals import refused
from tests.serve.running import Client, serving
from tilefold.integrations._sparse_source import ServerError, SparseSource
from tilefold.integrations.sentence_transformers import encode_sparse
from tilefold.serve.models import Served
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

NO_NUMBERS = "expected whole numbers and finite weights"
TEXTS = ["read csv files", "write json text", "dates", "queues of threads"]


@pytest.fixture(scope="module")
def server(two_sided: Any) -> Iterator[Client]:
    limits = Limits(max_client_batch_size=2, max_concurrent_requests=2)
    with serving(Service([Served(two_sided, "sparse", "two-sided")], limits), api_key="sesam") as client:
        yield client


def url(client: Client) -> str:
    return f"http://127.0.0.1:{client.port}"


@pytest.mark.parametrize("side", ["query", "document"])
def test_model_and_server_give_the_vectors_of_the_side(two_sided: Any, server: Client, side: Any) -> None:
    expected = encode_sparse(two_sided, TEXTS, task=side).to_dense()
    for source in (
        SparseSource(two_sided, batch_size=2),
        SparseSource(url=url(server), api_key="sesam", batch_size=2),
        SparseSource(url=f"{url(server)}/{side}/", api_key="sesam", batch_size=2, sides=False),
    ):
        found = source.encode(TEXTS, side)
        assert len(found) == len(TEXTS)
        for row, (indices, weights) in enumerate(found):
            assert indices == expected[row].nonzero().flatten().tolist()
            assert weights == pytest.approx(expected[row][indices].tolist(), rel=2e-2)
    cut = SparseSource(url=url(server), api_key="sesam", top_k=3).encode(TEXTS[:1], side)
    assert len(cut[0][0]) == 3
    assert SparseSource(two_sided).encode([], side) == []
    refused(TypeError, r"pass \[text\]", SparseSource(two_sided).encode, "a", side)


def test_a_model_is_loaded_from_its_folder_at_first_use(masked_lm: str, tmp_path: Any, sparse: Any) -> None:
    sparse.save_pretrained(str(tmp_path / "model"))
    source = SparseSource(str(tmp_path / "model"))
    assert isinstance(source.model, str)
    ((indices, weights),) = source.encode(TEXTS[:1], "document")
    assert (len(indices) == len(weights) > 3, isinstance(source.model, str)) == (True, False)


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
    for path, key, texts, told in (
        ("", "wrong", 1, "answered 401: expected a valid key"),
        ("", "sesam", 3, "answered 422: batch size 3 > maximum allowed batch size 2"),
        ("/nowhere", "sesam", 1, "answered 404: there is no such route"),
    ):
        refused(ServerError, told, SparseSource(url=url(server) + path, api_key=key).encode, ["a"] * texts, "query")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        source = SparseSource(url=address, timeout=0.3)
        refused(ServerError, r"gave no answer in 0\.[3-9] s", source.encode, ["a"], "query")
    told = rf"{address} gave no answer in 0\.\d s .*refused.*tilefold serve"
    refused(ServerError, told, SparseSource(url=address).encode, ["a"], "query")


def test_a_busy_server_is_asked_again_and_one_that_knows_nothing_of_top_k_gives_the_same_entries() -> None:
    busy, fine = reply("{}", "429 Too Many Requests"), reply('[{"indices":[1],"values":[2.5]}]')
    assert SparseSource(url=page_of(busy, busy, fine)).encode(["a"], "query") == [([1], [2.5])]
    entries = [{"index": index, "value": value} for index, value in ((3, 0.5), (4, 2), (7, 0.5), (9, 1.25))]
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
        ({"url": "http://me:secret@localhost"}, "url: expected an address without a name, a password"),
        ({"url": "http://localhost?key=secret"}, "url: expected an address without a name, a password"),
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
                    opened.recv(65536)
                    opened.sendall(each)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"
