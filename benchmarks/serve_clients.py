"""Clients and processes of a server on the loopback address, for `serve_load` and `serve_soak`.

Clients are bounded in time and number.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HOST = "127.0.0.1"
LONGEST_SECONDS = 3600
MOST_CLIENTS = 1000
# time that a server has to start, and to stop
START_SECONDS = 180
STOP_SECONDS = 60
# pause of a client after an answer that is not 200
REFUSED_PAUSE = 0.05
# Number of requests between the first request of a client and that of the next one. It is prime, so
# that clients do not send the same requests at the same time.
_REQUEST_STRIDE = 7919
_HEAD_END = b"\r\n\r\n"
# where the code is in an answer: "HTTP/1.1 200"
_STATUS = slice(9, 12)


@dataclass
class Measured:
    """Answers that some clients received.

    Attributes:
        seconds: the time of each answer with code 200.
        refused: the number of answers with another code.
        wall: the seconds from the first connection to the last answer.
    """

    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    wall: float = 0.0

    @property
    def rate(self) -> float:
        """Answers with 200 per second."""
        return len(self.seconds) / self.wall if self.wall else 0.0

    def quantile(self, share: float) -> float:
        """Return the milliseconds within which a share of the answers came, or NaN without any."""
        if not self.seconds:
            return float("nan")
        position = min(len(self.seconds) - 1, int(share * len(self.seconds)))
        return 1000 * sorted(self.seconds)[position]


def request(path: str, body: Any) -> bytes:
    """Return a POST of JSON on a connection that stays open.

    Args:
        path: the path.
        body: what is sent as JSON.
    """
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\n"
        f"host: {HOST}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(content)}\r\n"
        "\r\n"
    )
    return head.encode() + content


def _content_length(head: bytes) -> int:
    """Return the length of the body that the head of an answer declares, or 0."""
    length = re.search(rb"content-length: (\d+)", head.lower())
    return int(length[1]) if length else 0


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an answer, and return its code and its body."""
    head = await reader.readuntil(_HEAD_END)
    body = await reader.readexactly(_content_length(head))
    return int(head[_STATUS]), body


class _Client(asyncio.Protocol):
    """A connection that sends a request, waits for its answer, and sends the next.

    It is a protocol because streams would cost more of the CPU that the server needs.

    Args:
        requests: the requests, which are sent in turn.
        first: the number of the first request.
        until: the time after which no further request is sent.
        measured: collects the answers.
    """

    def __init__(
        self,
        requests: Sequence[bytes],
        first: int,
        until: float,
        measured: Measured,
    ) -> None:
        """Prepare a client, which begins when it is connected.

        Args:
            requests: the requests, which are sent one after another, and again from the first one.
            first: position of the first request that is sent.
            until: when the client ends, by the clock of ``time.perf_counter``.
            measured: receives the times.
        """
        self._requests = requests
        self._next_request = first
        self._until = until
        self._measured = measured
        self._received = bytearray()
        # bytes of the answer, 0 while its head is incomplete
        self._answer_size = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Send the first request."""
        self._transport = transport
        self._send()

    def _send(self) -> None:
        """Send the next request."""
        self._sent_at = time.perf_counter()
        self._transport.write(self._requests[self._next_request % len(self._requests)])
        self._next_request += 1

    def data_received(self, data: bytes) -> None:
        """Collect a part of an answer, and react if the answer is complete."""
        self._received += data
        if not self._answer_size:
            head_size = self._received.find(_HEAD_END)
            if head_size > 0:
                head = bytes(self._received[:head_size])
                self._answer_size = head_size + len(_HEAD_END) + _content_length(head)
        if self._answer_size and len(self._received) >= self._answer_size:
            self._answer_received()

    def _answer_received(self) -> None:
        """Record a complete answer, and send the next request or end."""
        now = time.perf_counter()
        was_refused = self._received[_STATUS] != b"200"
        if was_refused:
            self._measured.refused += 1
        else:
            self._measured.seconds.append(now - self._sent_at)
        self._received.clear()
        self._answer_size = 0
        if now >= self._until:
            self.ended.set_result(None)
            self._transport.close()
        elif was_refused:
            asyncio.get_running_loop().call_later(REFUSED_PAUSE, self._send)
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail if the server closed the connection."""
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the server closed a connection"))


async def load(
    port: int,
    path: str,
    bodies: Sequence[Any],
    clients: int,
    seconds: float,
) -> Measured:
    """Send requests by several clients for some seconds.

    Args:
        port: the port of the server.
        path: the path of the route.
        bodies: JSON bodies of the requests, which are sent in turn.
        clients: the number of connections. Each waits for an answer before its next request.
        seconds: the time after which no further request is sent.

    Raises:
        ValueError: if there are more than 1,000 clients, or they run for more than an hour.
    """
    if not 0 < seconds <= LONGEST_SECONDS or not 0 < clients <= MOST_CLIENTS:
        raise ValueError(
            f"clients, seconds: expected at most 1,000 and {LONGEST_SECONDS}, got {clients} and "
            f"{seconds}.",
        )
    loop = asyncio.get_running_loop()
    requests = [request(path, body) for body in bodies]
    measured = Measured()
    start = time.perf_counter()
    connected: list[_Client] = []
    for number in range(clients):
        create_client = functools.partial(
            _Client,
            requests,
            first=_REQUEST_STRIDE * number,
            until=start + seconds,
            measured=measured,
        )
        _, client = await loop.create_connection(create_client, HOST, port)
        connected.append(client)
    await asyncio.gather(*(client.ended for client in connected))
    measured.wall = time.perf_counter() - start
    return measured


@contextmanager
def server(command: Sequence[str], log: Path) -> Iterator[tuple[int, int]]:
    """Run a server while the context is open.

    Args:
        command: arguments of Python. The server must print ``http://127.0.0.1:PORT`` when it is
            ready.
        log: the file for its output.

    Yields:
        The port and the id of the process.

    Raises:
        RuntimeError: if the server does not start.
    """
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("w") as stream:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, *command],
            stderr=stream,
            stdout=stream,
            env=environment,
        )
    try:
        yield _port(process, log), process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    """Wait until a server prints its address, and return the port.

    Args:
        process: the process of the server.
        log: the file with its output.
    """
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        address = re.search(rf"http://{re.escape(HOST)}:(\d+)", log.read_text(errors="replace"))
        if address:
            return int(address[1])
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")
