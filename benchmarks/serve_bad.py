"""Bad and slow clients for `serve_soak.py`: what they send, and what they may get for it. Loopback
address only.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from benchmarks.serve_clients import HOST, request

PATH = "/embed_sparse"
PATIENCE = 60.0
WAVE = 2000
HEAD_SECONDS = 10.0  # that the server gives a connection for the head of a request
UNREAD_SECONDS = 35.0  # it gives a client up that has read nothing for 30
UNREAD_WORDS = 8_000  # in a text for /tokenize; models that read 64 tokens take so many
UNREAD_ANSWERS = 20  # of half a MB each
Seen = Counter[str]


def head(rest: str, kind: str = "application/json", path: str = PATH) -> bytes:
    """The head of a POST on a connection of its own."""
    fixed = f"POST {path} HTTP/1.1\r\nhost: {HOST}\r\nconnection: close\r\ncontent-type: {kind}\r\n"
    return f"{fixed}{rest}\r\n\r\n".encode()


def sized(body: bytes, kind: str = "application/json", path: str = PATH) -> bytes:
    """A POST with its length."""
    return head(f"content-length: {len(body)}", kind, path) + body


# what is sent, and the codes that may come back; 0 is a closed connection
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
    """Each kind of bad input in turn, some twenty a second."""
    while time.monotonic() < until:
        for name, (sent, codes) in BAD.items():
            _count(seen, name, await send(port, sent), codes)
            await asyncio.sleep(0.05)
        await leave(port)
        seen["left while waiting"] += 1


async def slow(name: str, port: int, until: float, seen: Seen) -> None:
    """One kind of slow client, over and over; the last one ends after `until`."""
    sent, codes = SLOW[name]
    while time.monotonic() < until:
        _count(seen, name, await send(port, sent), codes)


async def drip(port: int, until: float, seen: Seen) -> None:
    """A body of which a byte comes each half second."""
    while time.monotonic() < until:
        _count(
            seen,
            "byte by byte",
            await send(port, head("content-length: 1000"), drips=True),
            {408},
        )


def _count(seen: Seen, name: str, code: int, codes: set[int]) -> None:
    expected = code in codes or code == 429  # of too many connections
    seen[f"{name}: as expected" if expected else f"LOST: {name} got {code}"] += 1


async def send(port: int, sent: bytes, drips: bool = False) -> int:
    """The code that comes back, 0 for a connection that was closed without one."""
    try:
        reader, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return 0
    dripping = asyncio.ensure_future(_drip(writer) if drips else asyncio.sleep(0))
    try:
        writer.write(sent)
        first = await asyncio.wait_for(reader.readline(), PATIENCE)
        return int(first.split(b" ")[1]) if first.startswith(b"HTTP") else 0
    except (OSError, asyncio.TimeoutError) as error:
        return -1 if isinstance(error, asyncio.TimeoutError) else 0
    finally:
        dripping.cancel()
        writer.close()


async def _drip(writer: asyncio.StreamWriter) -> None:
    while not writer.is_closing():
        writer.write(b"[")
        await asyncio.sleep(0.5)


async def leave(port: int) -> None:
    """A client that goes while its inputs wait."""
    try:
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(request(PATH, {"inputs": ["left"] * 16}))
        await asyncio.sleep(0.01)
        writer.transport.abort()
    except OSError:
        return


async def unread(port: int, until: float, seen: Seen, wait: float = UNREAD_SECONDS) -> None:
    """A client that asks for megabytes and reads nothing of them: it must be given up."""
    last = sized(json.dumps({"inputs": "a " * UNREAD_WORDS}).encode(), path="/tokenize")
    asked = last.replace(b"connection: close\r\n", b"") * (UNREAD_ANSWERS - 1) + last
    while time.monotonic() < until:
        whole = await _unread(port, asked, wait)
        seen["LOST: unread answers were kept" if whole else "unread: as expected"] += 1


async def _unread(port: int, sent: bytes, wait: float) -> bool:
    """Whether all answers are there after `wait` seconds in which nothing was read."""
    loop, found = asyncio.get_running_loop(), b""
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.setblocking(False)
        try:
            await loop.sock_connect(opened, (HOST, port))
            await loop.sock_sendall(opened, sent)
            await _readable(opened)  # on a busy machine the answer may take long
            await asyncio.sleep(wait)
            while part := await asyncio.wait_for(loop.sock_recv(opened, 1 << 20), PATIENCE):
                found += part
        except OSError:
            return False
        except asyncio.TimeoutError:
            return True  # open still
    return found.count(b"HTTP/1.1 200 ") == UNREAD_ANSWERS and found.endswith(b"}]]")


async def _readable(opened: socket.socket) -> None:
    loop, there = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(opened, there.set)
    try:
        await there.wait()
    finally:
        loop.remove_reader(opened)


async def flood(port: int, connections: int, seen: Seen, seconds: float = 0.0) -> None:
    """Idle connections in waves, spread over some seconds; those that are above the limit must be
    told so.
    """
    starts = range(0, connections, WAVE)
    for start in starts:
        await asyncio.sleep(seconds / (len(starts) + 1))
        wave = [_idle(port) for _ in range(min(WAVE, connections - start))]
        seen.update(await asyncio.gather(*wave))


async def _idle(port: int) -> str:
    began = time.monotonic()
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(HOST, port), PATIENCE)
        try:
            first = await asyncio.wait_for(reader.readline(), 1.0)
            if (
                not first and time.monotonic() - began >= HEAD_SECONDS
            ):  # this process was not asked for so long
                return "idle connection: kept until its time was over"
            code = first.split(b" ")[1].decode() if first else "closed"
            return (
                "idle connection: refused with 429"
                if code == "429"
                else f"LOST: idle connection: {code}"
            )
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
) -> list[Callable[[], Awaitable[None]]]:
    """All of them."""
    each: list[Callable[[], Awaitable[None]]] = [
        lambda name=name: slow(name, port, until, seen)  # type: ignore[misc]
        for name in SLOW
    ]
    each += [
        lambda: bad(port, until, seen),
        lambda: drip(port, until, seen),
        lambda: unread(port, until, seen),
    ]
    return [*each, lambda: flood(port, connections, seen, until - time.monotonic())]
