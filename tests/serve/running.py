"""A real server on the loopback address, and requests over real sockets."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import programs
from tests.processes import environment
from tilefold.serve.app import create_app
from tilefold.serve.server import Server, bind
from tilefold.serve.service import Service


@dataclass(frozen=True)
class Reply:
    """An answer: its code, its headers in lower case, and its body."""

    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)


@dataclass
class Client:
    """Requests to one server."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, {**self.headers, **named})
            reply = connection.getresponse()
            return Reply(
                reply.status,
                {name.lower(): value for name, value in reply.getheaders()},
                reply.read(),
            )
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
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def raw(self, *parts: bytes) -> bytes:
        """What a server says to bytes until it closes the connection."""
        with self.connect() as opened:
            for part in parts:
                opened.sendall(part)
            return read_all(opened)


def read_all(opened: socket.socket) -> bytes:
    found = b""
    while part := opened.recv(65536):
        found += part
    return found


@contextmanager
def serving(service: Service, api_key: str | None = None, **options: Any) -> Iterator[Client]:
    """The service on a free port of the loopback address, in a thread; `options` are those of
    :func:`create_app`.
    """
    app = create_app(service, api_key, **options)
    opened, ready = bind("127.0.0.1", 0), threading.Event()
    server = Server(app, service, ready.set)
    thread = threading.Thread(target=server.run, args=([opened],))
    thread.start()
    try:
        assert ready.wait(30), "the server did not start"
        yield Client(opened.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        opened.close()
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def served(*options: str | Path) -> Iterator[tuple[Any, Client, str]]:
    """A process of ``tilefold serve`` with these options, its client, and the line that says where
    it answers.
    """
    command = ("-m", "tilefold.cli", "serve", "--port", "0", *options)
    with programs.start(
        *command,
        env=environment(OMP_NUM_THREADS="1"),
        stderr=programs.PIPE,
    ) as process:
        try:
            line = next(line for line in process.stderr if "http://" in line)
            yield process, Client(int(re.search(r":(\d+); Ctrl-C ends", line)[1])), line
        finally:
            process.kill()
