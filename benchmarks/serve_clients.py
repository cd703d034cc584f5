"""Clients of a server on the loopback address, for `serve_load.py` and `serve_soak.py`: bounded in
time and number.
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
START_SECONDS = 180


@dataclass
class Measured:
    """What some clients saw: seconds of each answer with 200, and how many had another code."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    wall: float = 0.0

    @property
    def rate(self) -> float:
        """Answers with 200 per second."""
        return len(self.seconds) / self.wall if self.wall else 0.0

    def quantile(self, share: float) -> float:
        """Milliseconds that a share of the answers stays within."""
        ordered = sorted(self.seconds)
        return (
            1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]
            if ordered
            else float("nan")
        )


def request(path: str, body: Any) -> bytes:
    """A POST of JSON on a connection that stays."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The code and the body of one answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = re.search(rb"content-length: (\d+)", head)
    return int(head.split(b" ", 2)[1]), await reader.readexactly(int(length[1]) if length else 0)


class _Client(asyncio.Protocol):
    """A connection that sends a request, waits for its answer, and sends the next, for less than
    streams would cost.
    """

    def __init__(
        self,
        requests: Sequence[bytes],
        first: int,
        until: float,
        found: Measured,
    ) -> None:
        self._requests, self._number, self._until, self._found = requests, first, until, found
        self._got, self._size = (
            bytearray(),
            0,
        )  # of the answer, and how long it will be, once that is known
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._requests[self._number % len(self._requests)])
        self._number += 1

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._size and (end := self._got.find(b"\r\n\r\n")) > 0:
            length = re.search(rb"content-length: (\d+)", self._got[:end].lower())
            self._size = end + 4 + (int(length[1]) if length else 0)
        if not 0 < self._size <= len(self._got):
            return
        now, refused = time.perf_counter(), self._got[9:12] != b"200"
        if refused:
            self._found.refused += 1
        else:
            self._found.seconds.append(now - self._sent)
        self._got.clear()
        self._size = 0
        if now >= self._until:
            self.ended.set_result(None)
            self._transport.close()
        elif refused:
            asyncio.get_running_loop().call_later(0.05, self._send)
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(exc or ConnectionError("the server closed a connection"))


async def load(
    port: int,
    path: str,
    bodies: Sequence[Any],
    clients: int,
    seconds: float,
) -> Measured:
    """`clients` connections that each send a request, wait for its answer, and send the next, for
    some seconds.

    Raises:
        ValueError: more than an hour, or more than 1,000 clients.
    """
    if not 0 < seconds <= LONGEST_SECONDS or not 0 < clients <= 1000:
        raise ValueError(
            f"clients, seconds: expected at most 1,000 and {LONGEST_SECONDS}, got {clients} and "
            f"{seconds}.",
        )
    found, began, connected = Measured(), time.perf_counter(), list[_Client]()
    requests, loop = [request(path, body) for body in bodies], asyncio.get_running_loop()
    for number in range(clients):
        made = functools.partial(_Client, requests, 7919 * number, began + seconds, found)
        connected.append((await loop.create_connection(made, HOST, port))[1])
    await asyncio.gather(*(client.ended for client in connected))
    found.wall = time.perf_counter() - began
    return found


@contextmanager
def server(command: Sequence[str], log: Path) -> Iterator[tuple[int, int]]:
    """The port and the process of a server that says ``http://127.0.0.1:PORT`` when it is ready;
    ended at the end.
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
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        found = re.search(rf"http://{re.escape(HOST)}:(\d+)", log.read_text(errors="replace"))
        if found:
            return int(found[1])
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")
