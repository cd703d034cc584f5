"""A real server on the loopback address, and requests over real sockets."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import programs
from tests.processes import environment
from tests.waiting import WAIT_SECONDS
from tilefold.serve.app import create_app
from tilefold.serve.models import Served
from tilefold.serve.server import Server, bind
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

JSON_HEADER = "content-type: application/json\r\n"
# Longer than any wait of a test: what is held or limited by it, and happens after this time only,
# makes the test fail.
HELD_SECONDS = 2 * WAIT_SECONDS
# Limits of a server that gives up no client before a test ends. The test shortens the limit that it
# is about, so that a client that stands still on a busy machine meets no other limit.
PATIENT_LIMITS = {
    "header_seconds": HELD_SECONDS,
    "body_seconds": HELD_SECONDS,
    "keep_alive_seconds": HELD_SECONDS,
}


@dataclass(frozen=True)
class Reply:
    """A reply of a server: status code, headers with names in lower case, and body."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


@dataclass
class Client:
    """Client of a server on the loopback address."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        """Send a request; underscores in the names of headers become hyphens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        try:
            request_headers = dict(self.headers)
            for name, value in headers.items():
                request_headers[name.replace("_", "-")] = value
            connection.request(method, path, body, request_headers)
            response = connection.getresponse()
            reply_headers = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, reply_headers, response.read())
        finally:
            connection.close()

    def get(self, path: str) -> Reply:
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> Reply:
        return self.request(
            "POST",
            path,
            json.dumps(body).encode(),
            content_type="application/json",
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_SECONDS)

    def raw(self, *parts: bytes) -> bytes:
        """Send bytes, and return what the server sends until it closes the connection."""
        with self.connect() as connection:
            for part in parts:
                connection.sendall(part)
            return read_all(connection)

    def metrics_text(self) -> str:
        """Return the metrics of the server in Prometheus' text format."""
        return self.get("/metrics").raw.decode()

    def metric(self, name: str) -> float:
        """Return the value of a metric that has no labels."""
        for line in self.metrics_text().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise KeyError(name)


def read_all(connection: socket.socket) -> bytes:
    """Return the bytes that come until the other side closes the connection."""
    received = b""
    while True:
        part = connection.recv(65536)
        if not part:
            return received
        received += part


def request_head(headers: str, path: str = "/embed_sparse") -> bytes:
    """Return the head of a POST with these header lines, which closes its connection."""
    lines = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n"
    return lines.encode()


def json_request(content: Any, path: str = "/embed_sparse") -> bytes:
    """Return the bytes of a POST with a JSON body."""
    body = json.dumps(content).encode()
    return request_head(f"{JSON_HEADER}content-length: {len(body)}\r\n", path) + body


def sparse_service(model: Any, **limits: Any) -> Service:
    """Return a service of one sparse model with the given fields of ``Limits``."""
    return Service([Served(model, "sparse", "/no/such/folder/tiny")], Limits(**limits))


@contextmanager
def hold_batch(
    client: Client,
    model: Any,
    n_inputs: int,
    seconds: float = HELD_SECONDS,
    path: str = "/embed_sparse",
) -> Iterator[Future[Reply]]:
    """Keep the batch of one request in the model until the block is left.

    Args:
        client: client of the server that serves ``model``.
        model: model whose forward pass waits.
        n_inputs: number of texts of the request.
        seconds: longest time that the forward pass waits.
        path: the route of the request.

    Yields:
        The reply to the request, as a future.
    """
    released = threading.Event()
    entered = threading.Event()

    def wait_for_release(module: Any, args: Any) -> None:
        entered.set()
        released.wait(seconds)

    hook = model[0].register_forward_pre_hook(wait_for_release)
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(client.post, path, {"inputs": ["held"] * n_inputs})
        try:
            assert entered.wait(WAIT_SECONDS)
            yield reply
        finally:
            hook.remove()
            released.set()


@contextmanager
def serving(service: Service, api_key: str | None = None, **options: Any) -> Iterator[Client]:
    """Serve a service on a free port of the loopback address, in a thread.

    Args:
        service: service to run.
        api_key: key that requests must carry.
        options: further arguments of :func:`create_app`.

    Yields:
        A client of the server.
    """
    with serving_app(create_app(service, api_key, **options), service) as client:
        yield client


@contextmanager
def serving_app(app: Any, service: Service) -> Iterator[Client]:
    """Serve an application on a free port of the loopback address, in a thread.

    Args:
        app: ASGI application.
        service: service whose limits apply.

    Yields:
        A client of the server.
    """
    listener = bind("127.0.0.1", 0)
    ready = threading.Event()
    server = Server(app, service, ready.set)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        assert ready.wait(WAIT_SECONDS), "the server did not start"
        yield Client(listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        listener.close()
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def served(*options: str | Path) -> Iterator[tuple[Any, Client, str]]:
    """Run ``tilefold serve`` with these options as a process.

    Yields:
        The process, a client of its server, and the line that names the server's address.
    """
    command = ("-m", "tilefold.cli", "serve", "--port", "0", *options)
    with programs.start(
        *command,
        env=environment(OMP_NUM_THREADS="1"),
        stderr=programs.PIPE,
    ) as process:
        try:
            log = []
            for line in process.stderr:
                log.append(line)
                if "http://" in line:
                    break
            else:
                raise AssertionError("the server ended before it was ready:\n" + "".join(log))
            address_line = log[-1]
            port = int(re.search(r":(\d+); Ctrl-C ends", address_line)[1])
            yield process, Client(port), address_line
        finally:
            process.kill()
