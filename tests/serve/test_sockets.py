"""What a server does with clients that are slow, wrong, too many, or gone, and what remains where
it is killed.
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refused
from tests.serve.running import Client, Reply, read_all, served, serving
from tilefold import retrieval as r
from tilefold.retrieval.index.qdrant.index import QdrantIndex
from tilefold.serve import server
from tilefold.serve.models import Served
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

JSON = "content-type: application/json\r\n"


def head(rest: str, path: str = "/embed_sparse") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{rest}\r\n".encode()


def posted(content: Any, path: str = "/embed_sparse") -> bytes:
    body = json.dumps(content).encode()
    return head(JSON + f"content-length: {len(body)}\r\n", path) + body


def parsed(raw: bytes) -> tuple[int, Any]:
    first, _, body = raw.partition(b"\r\n\r\n")
    return int(first.split()[1]), json.loads(body)


def inputs_in_flight(client: Client) -> float:
    lines = client.get("/metrics").raw.decode().splitlines()
    return float(
        next(line for line in lines if line.startswith("tilefold_inputs_in_flight ")).split()[1],
    )


def service(sparse: Any, **limits: Any) -> Service:
    return Service([Served(sparse, "sparse", "/no/such/folder/tiny")], Limits(**limits))


def test_bodies_above_the_limit_are_refused_while_they_stream_and_to_clients_that_still_send(
    sparse: Any,
) -> None:
    chunked = JSON + "authorization: Bearer sesam\r\ntransfer-encoding: chunked\r\n"
    with serving(service(sparse, payload_limit=10_000), api_key="sesam") as client:
        asked = head(
            JSON + "authorization: Bearer sesam\r\ncontent-length: 20000\r\n",
        )  # and none of it is sent
        status, answer = parsed(client.raw(asked))
        assert (status, answer["error"]) == (413, "the body has more than 10000 bytes")
        with client.connect() as opened:
            opened.sendall(head(chunked) + 3 * (b"1000\r\n" + b"x" * 4096 + b"\r\n"))  # and no end
            assert parsed(read_all(opened))[0] == 413
        status, answer = parsed(
            client.raw(head(chunked), b'5\r\n{"inp\r\n', b'b\r\nuts":"csv"}\r\n', b"0\r\n\r\n"),
        )
        assert (status, len(answer)) == (200, 1)
        for key, status in (("wrong", 401), ("sesam", 413)):
            client.headers = {"authorization": f"Bearer {key}", "connection": "close"}
            reply = client.request(
                "POST",
                "/embed_sparse",
                b"x" * 20_000_000,
                content_type="application/json",
            )
            assert (reply.status, reply.json["error_type"]) == (status, "Validation")


@pytest.mark.parametrize(
    ("header", "body", "status", "message"),
    [
        (JSON, b'{"inputs": "a"', 400, "the body is not valid JSON"),
        (JSON, b"[" * 100_000, 400, "the body is not valid JSON"),
        (
            JSON,
            b'{"inputs": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
            400,
            "the body is not valid JSON",
        ),
        (JSON, '{"inputs": "ä"}'.encode("latin-1"), 400, "the body is not valid JSON"),
        (JSON, '{"inputs": "ä"}'.encode("utf-16"), 400, "the body is not valid JSON"),
        (JSON, b'{"inputs": "\\ud800"}', 400, "the body is not valid JSON"),
        (JSON, b'{"inputs": "a", "threshold": NaN}', 422, "`threshold`"),
        (JSON, b"", 400, "the body is not valid JSON"),
        (JSON, b"[]", 422, "`body`"),
        ("", b'{"inputs": "a"}', 415, "Content-Type: application/json"),
        ("content-type: text/plain\r\n", b'{"inputs": "a"}', 415, "Content-Type: application/json"),
        ("content-type: text/plain+json\r\n", b"{}", 415, "Content-Type: application/json"),
        ("content-type: application/json; charset=latin-1\r\n", b"{}", 415, "in UTF-8"),
        (JSON + "content-encoding: gzip\r\n", b"{}", 415, "Content-Encoding"),
    ],
)
def test_a_body_that_is_none_is_answered(
    client: Client,
    header: str,
    body: bytes,
    status: int,
    message: str,
) -> None:
    code, answer = parsed(client.raw(head(f"{header}content-length: {len(body)}\r\n") + body))
    assert (code, answer["error_type"]) == (status, "Validation")
    assert message in answer["error"]


def test_a_slow_body_and_a_slow_head_are_given_up_and_others_are_served_meanwhile(
    sparse: Any,
) -> None:
    with serving(
        service(sparse, body_seconds=0.5, header_seconds=0.5, keep_alive_seconds=1),
    ) as client:
        with client.connect() as opened:
            opened.sendall(head(JSON + "content-length: 100\r\n") + b"{")
            assert client.post("/embed_sparse", {"inputs": "a"}).status == 200
            status, answer = parsed(read_all(opened))
            assert (status, answer["error"]) == (408, "the body took more than 0.5 s")
        for started in (b"", b"POST /embed_sparse HTTP/1.1\r\nhost: "):
            with client.connect() as opened:
                opened.sendall(started)
                began = time.monotonic()
                assert read_all(opened) == b""  # closed, byte by byte or not
                assert time.monotonic() - began < 5
        with client.connect() as opened:  # the second request is slow
            opened.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert opened.recv(65536).startswith(b"HTTP/1.1 200")
            opened.sendall(b"GET /hea")
            assert read_all(opened) == b""


def test_a_client_that_reads_nothing_of_its_answer_is_given_up_and_a_slow_one_is_not(
    late: Any,
) -> None:
    limits = Limits(
        body_seconds=1,
        keep_alive_seconds=1,
        max_connections=2,
        payload_limit=10_000_000,
    )
    text = "csv " * 2_000_000
    asked = posted(
        {"query": "csv", "texts": [text], "return_text": True},
        "/rerank",
    )  # and all of it comes back
    running = Service([Served(late, "multi-vector", "colbert")], limits)
    with (
        serving(running) as client,
        narrow_connection(client) as unread,
        narrow_connection(client) as slow,
    ):
        for opened in (unread, slow):
            opened.sendall(asked.replace(b"connection: close\r\n", b"", 1))
        found, pauses = b"", 0
        while not found.endswith(b"}]"):
            found += slow.recv(1 << 20) or pytest.fail("the answer ends early")
            if len(found) > (pauses + 1) * 1_500_000:
                pauses += 1
                time.sleep(0.5)
        assert pauses > 3 and (parsed(found)[0], parsed(found)[1][0]["text"]) == (200, text)
        assert (
            client.get("/health").status == 200
        )  # the place of the one that does not read is free again
        assert len(read_all(unread)) < len(found)  # and is no answer, by its length


def narrow_connection(client: Client) -> socket.socket:
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    opened.settimeout(20)
    opened.connect(("127.0.0.1", client.port))
    return opened


def test_connections_above_the_limit_are_told_so_and_those_that_were_reset_are_closed_at_once(
    sparse: Any,
) -> None:
    with serving(
        service(sparse, payload_limit=10_000, max_connections=3, header_seconds=1),
    ) as client:
        for _ in range(40):
            opened = client.connect()
            opened.setsockopt(
                socket.SOL_SOCKET,
                socket.SO_LINGER,
                struct.pack("ii", 1, 0),
            )  # close() resets
            opened.sendall(head(JSON + "content-length: 900000\r\n") + b"x" * 30_000)
            opened.close()
        wait_until(
            lambda: client.get("/health").status == 200,
        )  # 429 while lost connections hold their places
    with serving(service(sparse, max_connections=4)) as client:
        idle = [client.connect() for _ in range(4)]
        for _ in range(40):
            status, answer = parsed(client.raw(posted({"inputs": "a"})))
            assert (status, answer) == (
                429,
                {"error": "too many connections", "error_type": "Overloaded"},
            )
        for opened in idle:
            opened.close()
        wait_until(lambda: client.get("/health").status == 200)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no http\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",  # without Host
        head(JSON + "content-length: 5\r\ncontent-length: 6\r\n") + b"12345",
        head(JSON + "content-length: -5\r\n"),
        head(JSON + "transfer-encoding: chunked\r\n") + b"zz\r\n",
        head("host: other\r\n" + JSON + "content-length: 2\r\n") + b"{}",
        b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 10_950,  # and no end
        *(
            f"GET /health HTTP/{version}\r\nhost: localhost\r\n\r\n".encode() * 2
            for version in (0.9, 1.2, 2.0, 9.9)
        ),
    ],
)
def test_bytes_that_are_no_http_are_refused_and_fill_no_log(
    client: Client,
    caplog: Any,
    sent: bytes,
) -> None:
    found = client.raw(sent)  # read to the end: the connection is closed
    if (
        sent.startswith(b"GET /health HTTP/")
        and b"1.1" not in sent
        and not found.startswith(b"HTTP/1.1 400")
    ):
        assert parsed(found) == (
            505,
            {"error": "expected HTTP/1.1 or HTTP/1.0", "error_type": "Validation"},
        )
        assert client.raw(b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
    else:
        assert found.startswith(b"HTTP/1.1 400")
    assert not caplog.records


def test_a_body_that_nobody_reads_does_not_become_the_next_request(client: Client) -> None:
    after = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    smuggled = b"GET /info HTTP/1.1\r\nhost: a\r\n\r\n"
    for first, status in (
        (b"GET /health", b"200"),
        (b"POST /nowhere", b"404"),
        (b"POST /embed_sparse", b"415"),
    ):
        asked = (
            first
            + f" HTTP/1.1\r\nhost: a\r\ncontent-length: {len(smuggled)}\r\n\r\n".encode()
            + smuggled
        )
        found = client.raw(asked, after)
        assert (
            re.findall(rb"HTTP/1.1 (\d+)", found) == [status, b"200"] and b"model_id" not in found
        )


def test_trailers_are_no_headers_and_requests_for_another_protocol_are_plain_http(
    sparse: Any,
) -> None:
    chunked = JSON + "transfer-encoding: chunked\r\nx-wait: 1\r\n"
    with serving(service(sparse), api_key="sesam") as client:
        asked = head(chunked) + b'f\r\n{"inputs": "a"}\r\n0\r\nauthorization: Bearer sesam\r\n\r\n'
        assert parsed(client.raw(asked))[0] == 401
    upgrade = (
        JSON
        + "connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
    )
    with serving(service(sparse)) as client, client.connect() as opened:
        for _ in range(2):  # as Java's client asks, on one connection
            opened.sendall(
                posted({"inputs": "a"}).replace(
                    b"connection: close\r\n" + JSON.encode(),
                    upgrade.encode(),
                ),
            )
            assert opened.recv(1 << 20).startswith(b"HTTP/1.1 200")


def test_an_endless_body_after_an_early_answer_is_cut_off(sparse: Any) -> None:
    asked = head(JSON + "transfer-encoding: chunked\r\n").replace(b"connection: close\r\n", b"")
    with (
        serving(service(sparse, header_seconds=0.5), api_key="sesam") as client,
        client.connect() as opened,
    ):
        opened.sendall(asked)
        began = time.monotonic()
        with pytest.raises(OSError, match=r"reset|[Bb]roken|aborted"):
            while time.monotonic() - began < 10:
                opened.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                time.sleep(0.01)
        assert time.monotonic() - began < 8


def test_an_answer_does_not_wait_until_its_head_has_come(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, found = server.Protocol.connection_made, []

    def spied(self: Any, transport: Any) -> None:
        found.append(
            transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
        )
        made(self, transport)

    monkeypatch.setattr(server.Protocol, "connection_made", spied)
    assert client.get("/health").status == 200
    assert found and all(found)  # else its body follows 40 ms after its head


def test_head_is_get_without_the_body(client: Client) -> None:
    for path in ("/health", "/", "/info"):
        reply, whole = client.request("HEAD", path), client.get(path)
        assert (reply.status, reply.raw) == (200, b"")
        assert reply.headers["content-length"] == str(len(whole.raw))
    assert client.request("HEAD", "/embed_sparse").status == 405


def test_inputs_above_the_limit_get_429_at_once_and_those_of_a_client_that_has_gone_are_dropped(
    sparse: Any,
) -> None:
    with serving(service(sparse, max_concurrent_requests=4, max_client_batch_size=4)) as client:
        assert client.post("/embed_sparse", {"inputs": ["a"] * 4}).status == 200
        with hold(client, sparse, inputs=4) as held:
            began = time.monotonic()
            reply = client.post("/embed_sparse", {"inputs": "one more"})
            assert (reply.status, reply.json) == (
                429,
                {"error": "Model is overloaded", "error_type": "Overloaded"},
            )
            assert reply.headers["retry-after"] == "1"
            assert time.monotonic() - began < 1
            assert client.get("/health").status == 200
        assert held.result().status == 200
        with hold(client, sparse, inputs=1):
            opened = client.connect()
            opened.sendall(posted({"inputs": [f"gone {number}" for number in range(3)]}))
            wait_until(lambda: inputs_in_flight(client) == 4)
            wait_until(
                lambda: "te_queue_size 3.0" in client.get("/metrics").raw.decode(),
            )  # their tokens are counted
            opened.close()
            wait_until(lambda: inputs_in_flight(client) == 1)
        wait_until(lambda: "tilefold_dropped_count 3.0" in client.get("/metrics").raw.decode())
        metrics = client.get("/metrics").raw.decode()
        assert "te_embed_count 12.0" in metrics and "te_embed_success 9.0" in metrics


def test_a_key_is_asked_for_everywhere_but_where_probes_and_browsers_carry_none(
    sparse: Any,
) -> None:
    with serving(service(sparse), api_key="sesam") as client:
        described = (
            "/docs",
            "/openapi.json",
            "/api-doc/openapi.json",
            "/",
            "/page.js",
            "/page.css",
        )
        for path in ("/health", "/ping", "/metrics", *described):
            assert client.get(path).status == 200
            assert client.post(path, {}).status == 401
        for path in ("/info", "/query/info", "/query/metrics", "/v1/indexes", "/nowhere"):
            reply = client.get(path)
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
        for key in (
            "Bearer wrong",
            "Bearer ",
            "Basic sesam",
            "sesam",
            "Bearer sesam2",
            "Bearer s\xe9sam",
        ):
            client.headers = {"authorization": key}
            assert client.post("/embed_sparse", {"inputs": "a"}).status == 401
        client.headers = {"authorization": "Bearer sesam"}
        assert client.post("/embed_sparse", {"inputs": "a"}).status == 200
        assert client.get("/info").json["model_id"] == "tiny"


def test_errors_that_nobody_expected_have_no_trace_in_the_answer(
    sparse: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running = service(sparse)
    monkeypatch.setattr(running.metrics, "render", lambda: open("/home/somebody/secret"))  # noqa: PTH123, SIM115
    with serving(running) as client:
        reply = client.get("/metrics")
        told = {"error": "internal error; the log says why", "error_type": "Backend"}
        assert (reply.status, reply.json) == (500, told)


def test_a_stopped_server_answers_what_it_had_begun_and_its_service_may_be_served_again(
    sparse: Any,
) -> None:
    again = service(sparse)
    for _ in range(2):
        with ExitStack() as stack:
            with serving(again) as client:
                assert client.get("/health").status == 200
                held = stack.enter_context(hold(client, sparse, inputs=2, seconds=1))
            # leaving the block asked the server to stop, and waited for its thread
            assert (held.result().status, len(held.result().json)) == (200, 2)
        refused(OSError, "refused", client.get, "/health")


@contextmanager
def hold(client: Client, model: Any, inputs: int, seconds: float = 20) -> Iterator[Future[Reply]]:
    """A request whose batch stays in the model until the block is left, or for some seconds."""
    free, inside = threading.Event(), threading.Event()

    def wait(module: Any, args: Any) -> None:
        inside.set()
        free.wait(seconds)

    hook = model[0].register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.post, "/embed_sparse", {"inputs": ["held"] * inputs})
        try:
            assert inside.wait(20)
            yield asked
        finally:
            hook.remove()
            free.set()


def wait_until(true: Any, seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not become true"
        time.sleep(0.02)


QUERIES = ["csv files", "dates and times", "threads", "write json text"]
SECONDS = 60  # for an answer, and for the process to start and to end


def ask(client: Client, query: str) -> bytes:
    """All that comes back until the connection ends."""
    raw = b""
    with suppress(ConnectionError), client.connect() as opened:
        opened.sendall(posted({"query": query, "hits": 5}, "/v1/papers/search"))
        while part := opened.recv(65536):
            raw += part
    return raw


def ranking(raw: bytes) -> dict[str, float] | None:
    """The ranking in an answer, empty where none was given, None where it is not whole."""
    first, _, body = raw.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", first)
    if raw and (length is None or len(body) != int(length[1])):
        return None
    assert not raw or first.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")), raw
    return {
        entry["docid"]: entry["score"] for entry in json.loads(body or "{}").get("candidates", [])
    }


def digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


GRACE_SECONDS = 3.0


def keep_alive_get(opened: socket.socket, path: str) -> tuple[int, bool]:
    """Code of an answer on a connection that should stay open, and whether the answer closes it."""
    opened.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
    answer = HTTPResponse(opened)
    answer.begin()
    answer.read()
    return answer.status, answer.headers.get("connection") == "close"


def test_after_sigterm_requests_are_answered_while_health_checks_fail(masked_lm: str) -> None:
    options = ("--model", masked_lm, "--grace-seconds", str(GRACE_SECONDS))
    with served(*options) as (process, client, _), client.connect() as kept:
        assert client.get("/health").status == 200
        assert keep_alive_get(kept, "/info") == (200, False)
        process.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        wait_until(lambda: client.get("/health").status == 503, GRACE_SECONDS)
        assert keep_alive_get(kept, "/info") == (200, True)
        assert kept.recv(1) == b""
        while time.monotonic() < signalled + GRACE_SECONDS - 1:
            answer = client.post("/embed_sparse", {"inputs": "csv files"})
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert client.get("/health").status == client.get("/").status == 503
            time.sleep(0.02)
        assert process.wait(SECONDS) == 0
        assert time.monotonic() - signalled >= GRACE_SECONDS
        refused(OSError, "refused", client.get, "/health")


@pytest.mark.parametrize(
    "signals",
    [
        pytest.param([signal.SIGINT], id="SIGINT"),
        pytest.param([signal.SIGTERM, signal.SIGTERM], id="second SIGTERM"),
    ],
)
def test_the_grace_period_is_skipped(masked_lm: str, signals: list[signal.Signals]) -> None:
    with served("--model", masked_lm, "--grace-seconds", "600") as (process, client, _):
        process.send_signal(signals[0])
        if len(signals) > 1:
            wait_until(lambda: client.get("/health").status == 503)
            process.send_signal(signals[1])
        assert process.wait(SECONDS) == 0


def test_while_a_server_drains_requests_sent_together_are_all_answered(sparse: Any) -> None:
    draining = service(sparse)
    with serving(draining) as client:
        draining.draining = True
        one = b"GET /info HTTP/1.1\r\nhost: localhost\r\n\r\n"
        answers = client.raw(one * 3)  # until the server closes the connection
        assert answers.count(b"HTTP/1.1 200") == 3
        assert answers.count(b"connection: close") == 1


@pytest.mark.parametrize("backend", ["qdrant", "exact"])
def test_killed_servers_start_again(
    backend: str,
    vectors: r.SparseVectors,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    index, expected = tmp_path / "papers", None
    built = r.build_index(vectors, backend, **({"folder": index} if backend == "qdrant" else {}))
    built.save(index)
    if isinstance(built, QdrantIndex):
        built.collection.close()
    before, queries = digests(index), QUERIES * 100
    for sent in (signal.SIGKILL, signal.SIGTERM):
        with (
            served(
                "--model",
                masked_lm,
                "--index",
                index,
                "--grace-seconds",
                "0",
            ) as (process, client, _),
            ThreadPoolExecutor(6) as pool,
        ):
            alone: Any = {query: ranking(ask(client, query)) for query in QUERIES}
            assert alone == (expected or alone) and {len(scores) for scores in alone.values()} == {
                5,
            }
            expected = alone
            asked = [pool.submit(ask, client, query) for query in queries]
            wait_until(lambda asked=asked: sum(each.done() for each in asked) >= 5, SECONDS)
            process.send_signal(sent)
            assert process.wait(SECONDS) == (0 if sent is signal.SIGTERM else -sent)
        for query, each in zip(queries, asked, strict=True):
            found = ranking(each.result())
            assert not found or found == pytest.approx(expected[query], rel=2e-2)
            assert found is not None or sent is signal.SIGKILL
        assert not all(ranking(each.result()) for each in asked)  # it ended among them
        assert backend == "qdrant" or digests(index) == before  # whose files are those of Qdrant
