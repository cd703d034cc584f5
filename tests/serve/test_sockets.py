"""Tests of the server with clients that are slow, wrong, too many or gone, and of its shutdown."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from tests.refusals import refused
from tests.serve.running import (
    HELD_SECONDS,
    JSON_HEADER,
    PATIENT_LIMITS,
    Client,
    hold_batch,
    json_request,
    read_all,
    request_head,
    served,
    serving,
    serving_app,
    sparse_service,
)
from tests.waiting import WAIT_SECONDS, wait_until
from tilefold import retrieval as r
from tilefold.retrieval.index.qdrant.index import QdrantIndex
from tilefold.serve import server
from tilefold.serve.models import Served
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

KEY_HEADER = "authorization: Bearer sesam\r\n"
CHUNKED_HEADER = "transfer-encoding: chunked\r\n"
CLOSE_HEADER = b"connection: close\r\n"
CHUNK = b"1000\r\n" + b"x" * 4096 + b"\r\n"
HEALTH_REQUEST = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
INFO_REQUEST = b"GET /info HTTP/1.1\r\nhost: localhost\r\n\r\n"


def parse_reply(raw: bytes) -> tuple[int, Any]:
    """Return the status code and the JSON body of a reply."""
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def status_codes(raw: bytes) -> list[int]:
    """Return the status codes of replies that came one after the other."""
    return [int(code) for code in re.findall(rb"HTTP/1.1 (\d+)", raw)]


def test_a_body_whose_declared_length_is_above_the_limit_is_refused_before_it_comes(
    keyed_client: Client,
) -> None:
    head = request_head(f"{JSON_HEADER}{KEY_HEADER}content-length: 20000\r\n")
    status, answer = parse_reply(keyed_client.raw(head))
    assert status == 413
    assert answer["error"] == "the body has more than 10000 bytes"


def test_a_chunked_body_is_refused_as_soon_as_it_is_above_the_limit(keyed_client: Client) -> None:
    head = request_head(JSON_HEADER + KEY_HEADER + CHUNKED_HEADER)
    with keyed_client.connect() as connection:
        connection.sendall(head + 3 * CHUNK)  # the body does not end
        status, _ = parse_reply(read_all(connection))
    assert status == 413


def test_a_chunked_body_below_the_limit_is_answered(keyed_client: Client) -> None:
    head = request_head(JSON_HEADER + KEY_HEADER + CHUNKED_HEADER)
    chunks = (b'5\r\n{"inp\r\n', b'b\r\nuts":"csv"}\r\n', b"0\r\n\r\n")
    reply = keyed_client.raw(head, *chunks)
    status, rows = parse_reply(reply)
    assert status == 200
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("key", "expected_status"),
    [
        pytest.param("wrong", 401, id="wrong key"),
        pytest.param("sesam", 413, id="body above the limit"),
    ],
)
def test_a_client_that_still_sends_its_body_can_read_why_it_is_refused(
    keyed_client: Client,
    key: str,
    expected_status: int,
) -> None:
    keyed_client.headers = {"authorization": f"Bearer {key}", "connection": "close"}
    body = b"x" * 20_000_000
    reply = keyed_client.request("POST", "/embed_sparse", body, content_type="application/json")
    assert reply.status == expected_status
    assert reply.json["error_type"] == "Validation"


NOT_JSON = "the body is not valid JSON"
NESTED_OBJECTS = b'{"inputs": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}"


@pytest.mark.parametrize(
    ("header", "body", "expected_status", "message"),
    [
        pytest.param(JSON_HEADER, b'{"inputs": "a"', 400, NOT_JSON, id="no closing brace"),
        pytest.param(JSON_HEADER, b"[" * 100_000, 400, NOT_JSON, id="nested lists"),
        pytest.param(JSON_HEADER, NESTED_OBJECTS, 400, NOT_JSON, id="nested objects"),
        pytest.param(
            JSON_HEADER,
            '{"inputs": "ä"}'.encode("latin-1"),
            400,
            NOT_JSON,
            id="latin-1",
        ),
        pytest.param(
            JSON_HEADER,
            '{"inputs": "ä"}'.encode("utf-16"),
            400,
            NOT_JSON,
            id="utf-16",
        ),
        pytest.param(
            JSON_HEADER,
            b'{"inputs": "\\ud800"}',
            400,
            NOT_JSON,
            id="single surrogate",
        ),
        pytest.param(
            JSON_HEADER,
            b'{"inputs": "a", "threshold": NaN}',
            422,
            "`threshold`",
            id="nan",
        ),
        pytest.param(JSON_HEADER, b"", 400, NOT_JSON, id="empty"),
        pytest.param(JSON_HEADER, b"[]", 422, "`body`", id="list"),
        pytest.param(
            "",
            b'{"inputs": "a"}',
            415,
            "Content-Type: application/json",
            id="no content type",
        ),
        pytest.param(
            "content-type: text/plain\r\n",
            b'{"inputs": "a"}',
            415,
            "Content-Type: application/json",
            id="text/plain",
        ),
        pytest.param(
            "content-type: text/plain+json\r\n",
            b"{}",
            415,
            "Content-Type: application/json",
            id="text/plain+json",
        ),
        pytest.param(
            "content-type: application/json; charset=latin-1\r\n",
            b"{}",
            415,
            "in UTF-8",
            id="charset latin-1",
        ),
        pytest.param(
            JSON_HEADER + "content-encoding: gzip\r\n",
            b"{}",
            415,
            "Content-Encoding",
            id="gzip",
        ),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(
    client: Client,
    header: str,
    body: bytes,
    expected_status: int,
    message: str,
) -> None:
    head = request_head(f"{header}content-length: {len(body)}\r\n")
    status, answer = parse_reply(client.raw(head + body))
    assert status == expected_status
    assert answer["error_type"] == "Validation"
    assert message in answer["error"]


def test_a_slow_body_is_given_up_and_other_requests_are_answered_meanwhile(sparse: Any) -> None:
    service = sparse_service(sparse, **PATIENT_LIMITS | {"body_seconds": 0.5})
    with serving(service) as client, client.connect() as connection:
        connection.sendall(request_head(JSON_HEADER + "content-length: 100\r\n") + b"{")
        assert status_codes(client.raw(json_request({"inputs": "a"}))) == [200]
        status, answer = parse_reply(read_all(connection))
    assert status == 408
    assert answer["error"] == "the body took more than 0.5 s"


@pytest.mark.parametrize(
    "start_of_head",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"POST /embed_sparse HTTP/1.1\r\nhost: ", id="half a head"),
    ],
)
def test_a_connection_with_a_slow_head_is_closed(sparse: Any, start_of_head: bytes) -> None:
    service = sparse_service(sparse, **PATIENT_LIMITS | {"header_seconds": 0.5})
    with serving(service) as client, client.connect() as connection:
        connection.sendall(start_of_head)
        assert read_all(connection) == b""


def test_a_connection_with_a_slow_head_of_the_second_request_is_closed(sparse: Any) -> None:
    service = sparse_service(sparse, **PATIENT_LIMITS | {"header_seconds": 0.5})
    with serving(service) as client, client.connect() as connection:
        connection.sendall(HEALTH_REQUEST)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /hea")
        assert read_all(connection) == b""


class SlowReader:
    """Reads a reply with a pause after each 1.5 MB.

    The server checks this reader only once it has paused twice since the last check. The outcome
    then does not depend on how long the reader stands still on a busy machine.

    Attributes:
        n_pauses: number of pauses.
        n_checks: number of checks that the server has made.
    """

    def __init__(self, connection: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_pauses = 0
        self.n_checks = 0
        self._connection = connection
        self._address = connection.getsockname()
        self._n_pauses_at_check = 0
        check = server._LimitedProtocol._check_client_reads

        def check_after_reads(protocol: Any, previously_unread: int) -> None:
            if protocol.client == self._address and not self._may_be_checked():
                protocol._write_timer = protocol.loop.call_later(
                    0.05,
                    protocol._check_client_reads,
                    previously_unread,
                )
                return
            check(protocol, previously_unread)

        monkeypatch.setattr(server._LimitedProtocol, "_check_client_reads", check_after_reads)

    def _may_be_checked(self) -> bool:
        """Return whether the reader has paused twice, and count the check if it has."""
        if self.n_pauses < self._n_pauses_at_check + 2:
            return False
        self._n_pauses_at_check = self.n_pauses
        self.n_checks += 1
        return True

    def read(self, end: bytes) -> bytes:
        """Return the reply, which ends with ``end``."""
        received = b""
        while not received.endswith(end):
            part = self._connection.recv(1 << 20)
            assert part, "the answer ends early"
            received += part
            if len(received) > (self.n_pauses + 1) * 1_500_000:
                self.n_pauses += 1
                time.sleep(0.5)
        return received


def connect_with_small_buffer(client: Client) -> socket.socket:
    """Connect with a receive buffer of 4 KiB, so that the server waits for the client to read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(WAIT_SECONDS)
    connection.connect(("127.0.0.1", client.port))
    return connection


def test_a_client_that_does_not_read_is_given_up_and_one_that_reads_slowly_is_not(
    late: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = Limits(
        **PATIENT_LIMITS | {"body_seconds": 1.0},
        max_connections=2,
        payload_limit=10_000_000,
    )
    text = "csv " * 2_000_000
    # the answer contains the text
    content = {"query": "csv", "texts": [text], "return_text": True}
    request = json_request(content, "/rerank").replace(CLOSE_HEADER, b"", 1)
    with (
        serving(Service([Served(late, "multi-vector", "colbert")], limits)) as client,
        connect_with_small_buffer(client) as unread,
        connect_with_small_buffer(client) as slow,
    ):
        reader = SlowReader(slow, monkeypatch)
        unread.sendall(request)
        slow.sendall(request)
        reply = reader.read(end=b"}]")
        assert reader.n_pauses > 3
        assert reader.n_checks
        status, results = parse_reply(reply)
        assert status == 200
        assert results[0]["text"] == text
        # a third connection is accepted once the one that does not read was closed
        wait_until(lambda: client.get("/health").status == 200)
        assert len(read_all(unread)) < len(reply)


def test_a_client_that_reads_no_answer_to_pipelined_requests_is_given_up_in_one_line_of_the_log(
    sparse: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="tilefold.serve")
    caplog.set_level(logging.INFO, logger="tilefold.serve.clients")
    n_requests = 20
    last_request = json_request({"inputs": "a " * 8_000}, "/tokenize")
    request = last_request.replace(CLOSE_HEADER, b"")
    with (
        serving(sparse_service(sparse, **PATIENT_LIMITS | {"body_seconds": 1.0})) as client,
        connect_with_small_buffer(client) as unread,
    ):
        unread.sendall(request * (n_requests - 1) + last_request)
        wait_until(lambda: "closed a connection" in caplog.text)
        assert client.get("/health").status == 200
        answers = read_all(unread)
    assert status_codes(answers).count(200) < n_requests
    (record,) = [record for record in caplog.records if record.name.startswith("tilefold.serve")]
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert "its client read nothing for 1 s" in record.getMessage()


def send_and_reset(client: Client, request: bytes) -> None:
    """Send bytes, and end the connection by a TCP reset."""
    connection = client.connect()
    reset_on_close = struct.pack("ii", 1, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_on_close)
    connection.sendall(request)
    connection.close()


def test_connections_that_were_reset_do_not_count_towards_the_limit(sparse: Any) -> None:
    service = sparse_service(sparse, **PATIENT_LIMITS, payload_limit=10_000, max_connections=3)
    with serving(service) as client:
        request = request_head(JSON_HEADER + "content-length: 900000\r\n") + b"x" * 30_000
        for _ in range(40):
            send_and_reset(client, request)
        wait_until(lambda: client.get("/health").status == 200)


def test_connections_above_the_limit_get_429_until_others_end(sparse: Any) -> None:
    with serving(sparse_service(sparse, **PATIENT_LIMITS, max_connections=4)) as client:
        idle_connections = [client.connect() for _ in range(4)]
        for _ in range(40):
            status, answer = parse_reply(client.raw(json_request({"inputs": "a"})))
            assert status == 429
            assert answer == {"error": "too many connections", "error_type": "Overloaded"}
        for connection in idle_connections:
            connection.close()
        wait_until(lambda: client.get("/health").status == 200)


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no http\r\n\r\n",
            id="TLS",
        ),
        pytest.param(b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n", id="path that is no ASCII"),
        pytest.param(b"GET /health HTTP/1.1\r\n\r\n", id="no host"),
        pytest.param(
            request_head(JSON_HEADER + "content-length: 5\r\ncontent-length: 6\r\n") + b"12345",
            id="two lengths",
        ),
        pytest.param(request_head(JSON_HEADER + "content-length: -5\r\n"), id="negative length"),
        pytest.param(
            request_head(JSON_HEADER + CHUNKED_HEADER) + b"zz\r\n",
            id="chunk without a length",
        ),
        pytest.param(
            request_head("host: other\r\n" + JSON_HEADER + "content-length: 2\r\n") + b"{}",
            id="two hosts",
        ),
        pytest.param(
            b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 10_950,
            id="head without an end",
        ),
    ],
)
def test_bytes_that_are_no_http_get_400_and_are_not_logged(
    client: Client,
    caplog: Any,
    request_bytes: bytes,
) -> None:
    assert client.raw(request_bytes).startswith(b"HTTP/1.1 400")
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.9", "1.2", "2.0", "9.9"])
def test_other_versions_of_http_are_refused_and_not_logged(
    client: Client,
    caplog: Any,
    version: str,
) -> None:
    request = f"GET /health HTTP/{version}\r\nhost: localhost\r\n\r\n".encode()
    reply = client.raw(request * 2)  # read to the end: the connection is closed
    if not reply.startswith(b"HTTP/1.1 400"):  # from the parser, which knows some versions only
        status, answer = parse_reply(reply)
        assert status == 505
        assert answer == {
            "error": "expected HTTP/1.1 or HTTP/1.0",
            "error_type": "Validation",
        }
    assert not caplog.records


def test_http_1_0_is_answered(client: Client) -> None:
    reply = client.raw(b"GET /health HTTP/1.0\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("request_line", "expected_status"),
    [
        pytest.param("GET /health", 200, id="route without a body"),
        pytest.param("POST /nowhere", 404, id="unknown route"),
        pytest.param("POST /embed_sparse", 415, id="no content type"),
    ],
)
def test_an_unread_body_does_not_become_the_next_request(
    client: Client,
    request_line: str,
    expected_status: int,
) -> None:
    body = b"GET /info HTTP/1.1\r\nhost: a\r\n\r\n"
    head = f"{request_line} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
    next_request = b"GET /health HTTP/1.1\r\nhost: a\r\n" + CLOSE_HEADER + b"\r\n"
    replies = client.raw(head.encode() + body, next_request)
    assert status_codes(replies) == [expected_status, 200]
    assert b"model_id" not in replies


def test_trailers_are_not_read_as_headers(keyed_client: Client) -> None:
    head = request_head(JSON_HEADER + CHUNKED_HEADER + "x-wait: 1\r\n")
    body = b'f\r\n{"inputs": "a"}\r\n0\r\n'
    trailers = b"authorization: Bearer sesam\r\n\r\n"
    status, _ = parse_reply(keyed_client.raw(head + body + trailers))
    assert status == 401


def test_a_request_to_upgrade_to_http_2_is_answered_by_http_1(sparse: Any) -> None:
    # Java's client sends these headers
    upgrade_headers = (
        b"connection: upgrade, http2-settings\r\n"
        b"upgrade: h2c\r\n"
        b"http2-settings: AAMAAABkAAQAAP__\r\n"
    )
    request = json_request({"inputs": "a"}).replace(CLOSE_HEADER, upgrade_headers)
    with serving(sparse_service(sparse)) as client, client.connect() as connection:
        for _ in range(2):
            connection.sendall(request)
            assert connection.recv(1 << 20).startswith(b"HTTP/1.1 200")


def test_an_endless_body_after_an_early_answer_is_cut_off(sparse: Any) -> None:
    head = request_head(JSON_HEADER + CHUNKED_HEADER).replace(CLOSE_HEADER, b"")
    service = sparse_service(sparse, **PATIENT_LIMITS | {"header_seconds": 0.5})
    with serving(service, api_key="sesam") as client, client.connect() as connection:
        connection.sendall(head)
        deadline = time.monotonic() + WAIT_SECONDS
        with pytest.raises(OSError, match=r"reset|[Bb]roken|aborted"):
            while time.monotonic() < deadline:
                connection.sendall(CHUNK)
                time.sleep(0.01)


def test_connections_send_without_the_delay_of_nagle_s_algorithm(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection_made = server.Protocol.connection_made
    no_delay: list[int] = []

    def record_and_connect(protocol: Any, transport: Any) -> None:
        connection = transport.get_extra_info("socket")
        no_delay.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        connection_made(protocol, transport)

    monkeypatch.setattr(server.Protocol, "connection_made", record_and_connect)
    assert client.get("/health").status == 200
    assert no_delay
    assert all(no_delay)  # with the delay, the body comes 40 ms after the head


def test_head_and_body_of_a_response_come_in_one_packet(client: Client) -> None:
    with client.connect() as connection:
        for _ in range(2):
            connection.sendall(INFO_REQUEST)
            head, _, body = connection.recv(1 << 16).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert f"content-length: {len(body)}".encode() in head


def test_a_part_of_a_body_that_reads_like_a_head_is_sent_at_once(sparse: Any) -> None:
    body_part = b"HTTP/1.1 200 OK\r\n"
    n_parts = 3
    part_received = threading.Semaphore(0)

    def wait_between_parts() -> Iterator[bytes]:
        for _ in range(n_parts):
            yield body_part
            part_received.acquire(timeout=HELD_SECONDS)

    app = FastAPI()
    content_length = {"content-length": str(n_parts * len(body_part))}  # otherwise it is chunked

    @app.get("/parts")
    def stream() -> StreamingResponse:
        return StreamingResponse(wait_between_parts(), headers=content_length)

    with serving_app(app, sparse_service(sparse)) as client, client.connect() as connection:
        connection.sendall(b"GET /parts HTTP/1.1\r\nhost: localhost\r\n\r\n")
        response = HTTPResponse(connection)
        response.begin()
        for _ in range(n_parts):
            assert response.read(len(body_part)) == body_part
            part_received.release()


@pytest.mark.parametrize("path", ["/health", "/", "/info"])
def test_head_is_get_without_the_body(client: Client, path: str) -> None:
    head_reply = client.request("HEAD", path)
    get_reply = client.get(path)
    assert head_reply.status == 200
    assert head_reply.raw == b""
    assert head_reply.headers["content-length"] == str(len(get_reply.raw))


def test_head_of_a_post_route_is_refused(client: Client) -> None:
    assert client.request("HEAD", "/embed_sparse").status == 405


def overload_limits() -> dict[str, int]:
    """Return limits of four inputs at a time."""
    return {"max_concurrent_requests": 4, "max_client_batch_size": 4}


def test_inputs_above_the_limit_get_429_while_the_others_are_encoded(sparse: Any) -> None:
    with serving(sparse_service(sparse, **overload_limits())) as client:
        assert client.post("/embed_sparse", {"inputs": ["a"] * 4}).status == 200
        with hold_batch(client, sparse, n_inputs=4) as held_reply:
            reply = client.post("/embed_sparse", {"inputs": "one more"})
            assert not held_reply.done()
            assert reply.status == 429
            assert reply.json == {"error": "Model is overloaded", "error_type": "Overloaded"}
            assert reply.headers["retry-after"] == "1"
            assert client.get("/health").status == 200
        assert held_reply.result().status == 200


def test_waiting_inputs_of_a_client_that_disconnected_are_dropped(sparse: Any) -> None:
    with serving(sparse_service(sparse, **overload_limits())) as client:
        with hold_batch(client, sparse, n_inputs=1):
            connection = client.connect()
            texts = [f"dropped {number}" for number in range(3)]
            connection.sendall(json_request({"inputs": texts}))
            wait_until(lambda: client.metric("tilefold_inputs_in_flight") == 4)
            # once their tokens are counted, the inputs are in the queue
            wait_until(lambda: client.metric("te_queue_size") == 3)
            connection.close()
            wait_until(lambda: client.metric("tilefold_inputs_in_flight") == 1)
        wait_until(lambda: client.metric("tilefold_dropped_count") == 3)
        assert client.metric("te_embed_count") == 4
        assert client.metric("te_embed_success") == 1


# browsers and probes request these without a key
OPEN_PATHS = (
    "/health",
    "/ping",
    "/live",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/api-doc/openapi.json",
    "/",
    "/page.js",
    "/page.css",
)


@pytest.mark.parametrize("path", OPEN_PATHS)
def test_pages_and_probes_need_no_key(keyed_client: Client, path: str) -> None:
    assert keyed_client.get(path).status == 200
    assert keyed_client.post(path, {}).status == 401


@pytest.mark.parametrize(
    "path",
    ["/info", "/query/info", "/query/metrics", "/v1/indexes", "/nowhere"],
)
def test_other_paths_need_a_key(keyed_client: Client, path: str) -> None:
    reply = keyed_client.get(path)
    assert reply.status == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    keyed_client.headers = {"authorization": "Bearer sesam"}
    assert keyed_client.get(path).status != 401


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/query/v1/embeddings"])
def test_the_openai_routes_answer_a_missing_key_and_a_wrong_method_in_their_form_of_errors(
    keyed_client: Client,
    path: str,
) -> None:
    without_key = keyed_client.post(path, {"input": "a"})
    assert without_key.status == 401
    assert without_key.json == {
        "message": "expected a valid key in the header Authorization: Bearer KEY",
        "code": 401,
        "type": "Validation",
    }
    keyed_client.headers = {"authorization": "Bearer sesam"}
    wrong_method = keyed_client.get(path)
    assert wrong_method.status == 405
    assert wrong_method.json["code"] == 405


def test_a_request_with_the_key_is_answered(keyed_client: Client) -> None:
    keyed_client.headers = {"authorization": "Bearer sesam"}
    assert keyed_client.post("/embed_sparse", {"inputs": "a"}).status == 200
    assert keyed_client.get("/info").json["model_id"] == "tiny"


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer wrong",
        "Bearer ",
        "Basic sesam",
        "sesam",
        "Bearer sesam2",
        pytest.param("Bearer s\xe9sam", id="no ASCII"),
    ],
)
def test_a_wrong_key_is_refused(keyed_client: Client, authorization: str) -> None:
    keyed_client.headers = {"authorization": authorization}
    assert keyed_client.post("/embed_sparse", {"inputs": "a"}).status == 401


def test_the_answer_to_an_internal_error_does_not_contain_its_text(
    sparse: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = sparse_service(sparse)

    def fail() -> None:
        raise FileNotFoundError("/home/somebody/secret")

    monkeypatch.setattr(service.metrics, "render", fail)
    with serving(service) as client:
        reply = client.get("/metrics")
    assert reply.status == 500
    assert reply.json == {
        "error": "internal error; the log says why",
        "error_type": "Backend",
    }


def test_a_server_that_ends_answers_running_requests_and_its_service_can_be_served_again(
    sparse: Any,
) -> None:
    service = sparse_service(sparse)
    for _ in range(2):
        with ExitStack() as stack:
            with serving(service) as client:
                assert client.get("/health").status == 200
                held_batch = hold_batch(client, sparse, n_inputs=2, seconds=1)
                held_reply = stack.enter_context(held_batch)
            # the server was asked to stop while the batch was in the model, and it has ended
            assert held_reply.result().status == 200
            assert len(held_reply.result().json) == 2
        refused(OSError, "refused", client.get, "/health")


QUERIES = ["csv files", "dates and times", "threads", "write json text"]
N_ANSWERED = 20  # searches that a server answers before it is ended


def search_until_closed(client: Client, query: str) -> bytes:
    """Send a search, and return what comes until the connection ends, however it ends."""
    received = b""
    with suppress(ConnectionError), client.connect() as connection:
        connection.sendall(json_request({"query": query, "hits": 5}, "/v1/papers/search"))
        while True:
            part = connection.recv(65536)
            if not part:
                break
            received += part
    return received


def scores_of_reply(raw: bytes) -> dict[str, float] | None:
    """Return the scores in a reply by document.

    Returns:
        Scores, which are empty for an error or no reply; ``None`` for a truncated reply.
    """
    if not raw:
        return {}
    head, _, body = raw.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    if length is None or len(body) != int(length[1]):
        return None
    assert head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")), raw
    candidates = json.loads(body or "{}").get("candidates", [])
    return {candidate["docid"]: candidate["score"] for candidate in candidates}


def file_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


GRACE_SECONDS = 2.0


def keep_alive_get(connection: socket.socket, path: str) -> tuple[int, bool]:
    """Send a GET on an open connection.

    Returns:
        The status code, and whether the server closes the connection after the answer.
    """
    connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    response = HTTPResponse(connection)
    response.begin()
    response.read()
    return response.status, response.headers.get("connection") == "close"


@pytest.mark.slow
def test_after_sigterm_requests_are_answered_while_health_checks_fail(masked_lm: str) -> None:
    options = ("--model", masked_lm, "--grace-seconds", str(HELD_SECONDS))
    with served(*options) as (process, client, _), client.connect() as connection:
        assert client.get("/health").status == 200
        assert keep_alive_get(connection, "/info") == (200, False)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/health").status == 503)
        assert keep_alive_get(connection, "/info") == (200, True)
        assert connection.recv(1) == b""
        for _ in range(20):
            reply = client.post("/embed_sparse", {"inputs": "csv files"})
            assert reply.status == 200
            assert reply.headers["connection"] == "close"
            assert client.get("/health").status == 503
            assert client.get("/").status == 503


@pytest.mark.slow
def test_a_server_ends_by_itself_after_the_grace_period(masked_lm: str) -> None:
    options = ("--model", masked_lm, "--grace-seconds", str(GRACE_SECONDS))
    with served(*options) as (process, client, _):
        signal_time = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0
        assert time.monotonic() - signal_time >= GRACE_SECONDS
        refused(OSError, "refused", client.get, "/health")


def test_sigint_ends_a_server_without_a_grace_period(masked_lm: str) -> None:
    with served("--model", masked_lm, "--grace-seconds", str(HELD_SECONDS)) as (process, _, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_SECONDS) == 0


def test_a_second_sigterm_ends_the_grace_period(masked_lm: str) -> None:
    with served("--model", masked_lm, "--grace-seconds", str(HELD_SECONDS)) as (process, client, _):
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/health").status == 503)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_SECONDS) == 0


def test_pipelined_requests_to_a_draining_server_are_all_answered(sparse: Any) -> None:
    service = sparse_service(sparse)
    with serving(service) as client:
        service.draining = True
        replies = client.raw(INFO_REQUEST * 3)  # until the server closes the connection
    assert status_codes(replies) == [200, 200, 200]
    assert replies.count(b"connection: close") == 1


def save_index(vectors: r.SparseVectors, backend: str, folder: Path) -> None:
    """Build and save an index, and release the files of Qdrant's."""
    if backend == "qdrant":
        index = r.build_index(vectors, backend, folder=folder)
    else:
        index = r.build_index(vectors, backend)
    index.save(folder)
    if isinstance(index, QdrantIndex):
        index.collection.close()


def search_until_unanswered(client: Client, query: str) -> list[dict[str, float] | None]:
    """Send a search again and again; return the scores of each, the last of which is no answer."""
    scores: list[dict[str, float] | None] = []
    while not scores or scores[-1]:
        scores.append(scores_of_reply(search_until_closed(client, query)))
    return scores


def search_and_end_server(
    options: tuple[str | Path, ...],
    sent_signal: signal.Signals,
) -> tuple[dict[str, dict[str, float] | None], list[tuple[str, dict[str, float] | None]]]:
    """Send searches to a server without a pause, and a signal meanwhile, which ends it.

    Returns:
        The scores of each of ``QUERIES`` before the load, and the query and scores of each search
        of the load.
    """
    queries = QUERIES * 2
    with ThreadPoolExecutor(len(queries)) as pool, served(*options) as (process, client, _):
        expected = {query: scores_of_reply(search_until_closed(client, query)) for query in QUERIES}
        searches = [pool.submit(search_until_unanswered, client, query) for query in queries]
        wait_until(lambda: client.metric("tilefold_search_count") > len(QUERIES) + N_ANSWERED)
        process.send_signal(sent_signal)
        expected_code = 0 if sent_signal is signal.SIGTERM else -sent_signal
        assert process.wait(WAIT_SECONDS) == expected_code
        return expected, [
            (query, scores)
            for query, search in zip(queries, searches, strict=True)
            for scores in search.result(WAIT_SECONDS)
        ]


@pytest.mark.parametrize("backend", ["exact", pytest.param("qdrant", marks=pytest.mark.slow)])
def test_a_killed_server_leaves_an_index_that_is_served_again(
    backend: str,
    vectors: r.SparseVectors,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    index = tmp_path / "papers"
    save_index(vectors, backend, index)
    digests = file_digests(index)
    options = ("--model", masked_lm, "--index", index, "--grace-seconds", "0")
    scores_before_kill: Any = None
    for sent_signal in (signal.SIGKILL, signal.SIGTERM):
        expected, searches = search_and_end_server(options, sent_signal)
        assert all(scores is not None and len(scores) == 5 for scores in expected.values())
        if scores_before_kill is None:
            scores_before_kill = expected
        assert expected == scores_before_kill
        for query, scores in searches:
            if scores:
                assert scores == pytest.approx(expected[query], rel=2e-2)
            if sent_signal is signal.SIGTERM:
                assert scores is not None, "a server that ends does not truncate an answer"
        # Each thread may have lost the answer to its last search, which the server had counted.
        n_answered = sum(bool(scores) for _, scores in searches)
        assert n_answered > N_ANSWERED - 2 * len(QUERIES)
    if backend != "qdrant":  # Qdrant changes its files
        assert file_digests(index) == digests
