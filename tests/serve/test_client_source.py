"""Where the clients of other libraries get their vectors: a model in process, or a server, with the same result."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.running import Client, serving
from tilefold.integrations._sparse_source import ServerError, SparseSource
from tilefold.integrations.sentence_transformers import encode_sparse
from tilefold.serve.models import Served
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

_NO_NUMBERS = "expected whole numbers and finite weights"
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
    with pytest.raises(TypeError, match=r"pass \[text\]"):
        SparseSource(two_sided).encode("a", side)


def test_a_model_is_loaded_from_its_folder_at_first_use(masked_lm: str, tmp_path: Any, sparse: Any) -> None:
    sparse.save_pretrained(str(tmp_path / "model"))
    source = SparseSource(str(tmp_path / "model"))
    assert isinstance(source.model, str)
    ((indices, weights),) = source.encode(TEXTS[:1], "document")
    assert (len(indices) == len(weights) > 3, isinstance(source.model, str)) == (True, False)


def test_errors_of_a_server_are_told_with_its_reason(server: Client) -> None:
    for address, key, texts, told in (
        (url(server), "wrong", 1, "answered 401: expected a valid key"),
        (url(server), "sesam", 3, "answered 422: batch size 3 > maximum allowed batch size 2"),
        (f"{url(server)}/nowhere", "sesam", 1, "answered 404: there is no such route"),
        (page_of(reply("hi")), None, 1, "answered 200 and no JSON"),
        (page_of(reply("[1]")), None, 1, "expected sparse vectors in the answer"),
        (page_of(reply("[]")), None, 1, "expected 1 vectors in the answer of the server, got 0"),
        (page_of(reply('[{"indices":[1],"values":[1,2]}]')), None, 1, _NO_NUMBERS),
        (page_of(reply('[[{"index":1,"value":NaN}]]')), None, 1, _NO_NUMBERS),
        (page_of(reply('[[{"index":"a","value":1}]]')), None, 1, _NO_NUMBERS),
    ):
        with pytest.raises(ServerError, match=told):
            SparseSource(url=address, api_key=key).encode(["a"] * texts, "query")


def test_a_server_that_is_down_or_silent_is_named_with_the_time_waited() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        down = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ServerError, match=rf"{down} gave no answer in 0\.\d s .*refused.*tilefold serve"):
        SparseSource(url=down).encode(["a"], "query")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ServerError, match=r"gave no answer in 0\.[3-9] s"):
            SparseSource(url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3).encode(["a"], "query")


def test_a_busy_server_is_asked_again() -> None:
    busy, fine = reply("{}", "429 Too Many Requests"), reply('[{"indices":[1],"values":[2.5]}]')
    assert SparseSource(url=page_of(busy, busy, fine)).encode(["a"], "query") == [([1], [2.5])]


def test_a_server_that_knows_nothing_of_top_k_gives_the_same_entries() -> None:
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
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()

    def answer() -> None:
        with listening:
            for each in answers:
                opened, _ = listening.accept()
                with opened:
                    opened.recv(65536)
                    opened.sendall(each)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"
