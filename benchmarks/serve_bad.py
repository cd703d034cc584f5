"""Bad and slow clients for `serve_soak`, on the loopback address, and the answers they may get."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from benchmarks.serve_clients import HOST, request

PATH = "/embed_sparse"
# seconds after which a missing answer is lost
PATIENCE = 60.0
# idle connections that are opened at a time
WAVE = 2000
# the server closes a connection without the head of a request after this time
HEAD_SECONDS = 10.0
# a client that reads nothing waits so long; the server closes its connection after 30
UNREAD_SECONDS = 35.0
WAIT_PARTS = 10
# words of a text for /tokenize, and requests whose answers of half a MB each are not read
UNREAD_WORDS = 8_000
UNREAD_ANSWERS = 20
# what happened, and how often; names that begin with "LOST" are failures
Seen = Counter[str]


def head(rest: str, kind: str = "application/json", path: str = PATH) -> bytes:
    """Return the head of a POST, after which the connection is closed.

    Args:
        rest: further lines of the head.
        kind: content type.
        path: the path of the route.
    """
    lines = [
        f"POST {path} HTTP/1.1",
        f"host: {HOST}",
        "connection: close",
        f"content-type: {kind}",
        rest,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def sized(body: bytes, kind: str = "application/json", path: str = PATH) -> bytes:
    """Return a POST with its length."""
    return head(f"content-length: {len(body)}", kind, path) + body


# bytes that are sent, and the codes that may come back; 0 is a closed connection
BAD: dict[str, tuple[bytes, set[int]]] = {
    "declared too large": (head("content-length: 90000000"), {413}),
    "too large": (sized(b'{"inputs": "' + b"x" * 3_000_000 + b'"}'), {413}),
    "no JSON": (sized(b'{"inputs": '), {400}),
    "empty": (sized(b""), {400}),
    "deep lists": (sized(b'{"inputs":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), {400}),
    "deep objects": (sized(b'{"a":' * 50_000 + b"1" + b"}" * 50_000), {400}),
    "Latin-1": (sized('{"inputs": "ä"}'.encode("latin-1")), {400}),
    "UTF-16": (sized('{"inputs": "ä"}'.encode("utf-16")), {400}),
    "half a character": (sized(b'{"inputs": "\\ud800"}'), {400}),
    "another content type": (sized(b'{"inputs": "a"}', "text/plain"), {415}),
    "another charset": (sized(b'{"inputs": "a"}', "application/json; charset=latin-1"), {415}),
    "wrong fields": (sized(b'{"inputs": {"a": 1}, "truncate": 3}'), {422}),
    "too many": (sized(json.dumps({"inputs": ["a"] * 400}).encode()), {422}),
    "no such route": (sized(b"{}", path="/%2e%2e/nowhere"), {404}),
    "no HTTP": (b"\x00\x01\x02\x03\r\n\r\n", {400, 0}),
}
SLOW: dict[str, tuple[bytes, set[int]]] = {
    "chunked without end": (
        head("transfer-encoding: chunked") + b"10000\r\n" + b"x" * 65536,
        {413, 408},
    ),
    "half a head": (b"POST /embed", {0}),
    "half a body": (sized(b'{"inputs": "a"}')[:-5], {408, 0}),
}


async def bad(port: int, until: float, seen: Seen) -> None:
    """Send each kind of bad input in turn, about twenty a second.

    Args:
        port: the port of the server.
        until: the time at which to end.
        seen: the counter of the answers.
    """
    while time.monotonic() < until:
        for name, (data, codes) in BAD.items():
            _count(seen, name, await send(port, data), codes)
            await asyncio.sleep(0.05)
        await leave(port)
        seen["left while waiting"] += 1


async def slow(name: str, port: int, until: float, seen: Seen) -> None:
    """Run one kind of slow client repeatedly. The last one ends after `until`."""
    data, codes = SLOW[name]
    while time.monotonic() < until:
        _count(seen, name, await send(port, data), codes)


async def drip(port: int, until: float, seen: Seen) -> None:
    """Send bodies byte by byte, one each half second."""
    while time.monotonic() < until:
        code = await send(port, head("content-length: 1000"), drips=True)
        _count(seen, "byte by byte", code, {408})


def _count(seen: Seen, name: str, code: int, codes: set[int]) -> None:
    """Count an answer as expected or as lost.

    429 is always expected, since there may be too many connections.

    Args:
        seen: the counts, which change.
        name: name of the kind of request.
        code: status of the answer.
        codes: expected statuses.
    """
    is_expected = code in codes or code == 429
    seen[f"{name}: as expected" if is_expected else f"LOST: {name} got {code}"] += 1


async def send(port: int, data: bytes, drips: bool = False) -> int:
    """Send bytes on a connection, and return the code of the answer.

    Args:
        port: the port of the server.
        data: the bytes.
        drips: whether a byte follows each half second.

    Returns:
        The code, 0 for a connection that was closed without one, or -1 for none in time.
    """
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return 0
    dripping = asyncio.ensure_future(_drip(writer) if drips else asyncio.sleep(0))
    try:
        writer.write(data)
        status_line = await asyncio.wait_for(reader.readline(), PATIENCE)
        return int(status_line.split(b" ")[1]) if status_line.startswith(b"HTTP") else 0
    except asyncio.TimeoutError:
        return -1
    except OSError:
        return 0
    finally:
        dripping.cancel()
        writer.close()


async def _drip(writer: asyncio.StreamWriter) -> None:
    """Write a byte each half second, until the connection closes."""
    while not writer.is_closing():
        writer.write(b"[")
        await asyncio.sleep(0.5)


async def leave(port: int) -> None:
    """Send inputs, and close the connection while they wait."""
    try:
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(request(PATH, {"inputs": ["left"] * 16}))
        await asyncio.sleep(0.01)
        writer.transport.abort()
    except OSError:
        return


async def unread(port: int, until: float, seen: Seen, wait: float = UNREAD_SECONDS) -> None:
    """Request megabytes and read nothing of them. The server must close the connection.

    Args:
        port: the port of the server.
        until: the time at which to end.
        seen: the counter of the outcomes.
        wait: the seconds in which nothing is read.
    """
    last_request = sized(json.dumps({"inputs": "a " * UNREAD_WORDS}).encode(), path="/tokenize")
    first_requests = last_request.replace(b"connection: close\r\n", b"") * (UNREAD_ANSWERS - 1)
    while time.monotonic() < until:
        was_kept = await _answers_are_kept(port, first_requests + last_request, wait)
        seen["LOST: unread answers were kept" if was_kept else "unread: as expected"] += 1


async def _answers_are_kept(port: int, data: bytes, wait: float) -> bool:
    """Send requests, read nothing for some seconds, and return whether all answers arrive then.

    A connection that stays open without an end counts as well.

    Args:
        port: port of the server.
        data: the requests.
        wait: seconds without reading.
    """
    loop = asyncio.get_running_loop()
    received = b""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, (HOST, port))
            await loop.sock_sendall(connection, data)
            # On a busy machine the first answer may take long.
            await _wait_until_readable(connection)
            # If both processes stand still, one part passes at once. The server has the others.
            for _ in range(WAIT_PARTS):
                await asyncio.sleep(wait / WAIT_PARTS)
            while True:
                part = await asyncio.wait_for(loop.sock_recv(connection, 1 << 20), PATIENCE)
                if not part:
                    break
                received += part
        # This comes before OSError, its base class from Python 3.11 on.
        except asyncio.TimeoutError:
            return True
        except OSError:
            return False
    n_answers = received.count(b"HTTP/1.1 200 ")
    return n_answers == UNREAD_ANSWERS and received.endswith(b"}]]")


async def _wait_until_readable(connection: socket.socket) -> None:
    """Wait until something can be read, without reading it."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(connection, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(connection)


async def flood(port: int, connections: int, seen: Seen, seconds: float = 0.0) -> None:
    """Open idle connections in waves. Those above the limit must be answered with 429.

    Args:
        port: the port of the server.
        connections: the number of connections.
        seen: the counter of the outcomes.
        seconds: time over which the waves are spread.
    """
    starts = range(0, connections, WAVE)
    for start in starts:
        await asyncio.sleep(seconds / (len(starts) + 1))
        wave = [_idle(port) for _ in range(min(WAVE, connections - start))]
        seen.update(await asyncio.gather(*wave))


async def _idle(port: int) -> str:
    """Open a connection, send nothing for a second, and return what happened."""
    start = time.monotonic()
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(HOST, port), PATIENCE)
        try:
            first_line = await asyncio.wait_for(reader.readline(), 1.0)
            # this process may have had no turn for so long that the time was over
            if not first_line and time.monotonic() - start >= HEAD_SECONDS:
                return "idle connection: kept until its time was over"
            code = first_line.split(b" ")[1].decode() if first_line else "closed"
            if code == "429":
                return "idle connection: refused with 429"
            return f"LOST: idle connection: {code}"
        except asyncio.TimeoutError:
            return "idle connection: kept"
        finally:
            writer.transport.abort()
    except (OSError, asyncio.TimeoutError) as error:
        return f"LOST: idle connection: {type(error).__name__}"


def jobs(
    port: int,
    until: float,
    seen: Seen,
    connections: int,
) -> list[Coroutine[Any, Any, None]]:
    """Return all bad and slow clients, to be run together.

    Args:
        port: the port of the server.
        until: the time at which they end.
        seen: the counter of the outcomes.
        connections: the number of idle connections.
    """
    clients = [slow(name, port, until, seen) for name in SLOW]
    clients.append(bad(port, until, seen))
    clients.append(drip(port, until, seen))
    clients.append(unread(port, until, seen))
    clients.append(flood(port, connections, seen, until - time.monotonic()))
    return clients
