"""uvicorn with what it lacks: limits of connections, that answer, and of the time and the size of a
request's head.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import math
import re
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tilefold.serve.bodies import ServeError
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

_BACKLOG = 512
_ACCEPTED = 8  # connections that asyncio takes in one of its turns; the first can be refused two turns later
_SPARE_FILES = 256  # of the process beside connections; a quarter of them where it may have few
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SAY_AGAIN_SECONDS = 60.0
_logger = logging.getLogger("tilefold.serve")
_clients = logging.getLogger(
    "tilefold.serve.clients",
)  # what is wrong with them would fill the log of a server
_LINGER_SECONDS = 1.0  # for a refused client to read why
_LINGERING = 256  # of them at once
_HEAD_BYTES = 1 << 16  # of a head, or of what stands between two parts of a body
_UPGRADE = re.compile(rb"(?<=\n)upgrade(?=[ \t]*:)", re.IGNORECASE)


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 on llhttp, with what that leaves to others: too large heads, no or several
    hosts.
    """

    in_body = False
    _since = 0  # bytes that came since a head, or a part of a body, was whole

    def data_received(self, data: bytes) -> None:
        self._since += len(data)
        if (
            not self.in_body
        ):  # a wish for another protocol, at which it would take the body for that
            head, end, rest = data.partition(b"\r\n\r\n")
            data = _UPGRADE.sub(b"-pgrade", head) + end + rest
        super().data_received(data)
        if self._since > _HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Too large a head.")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_body:  # a trailer is no header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        hosts = sum(name == b"host" for name, _ in self.headers)
        alone = hosts == 1 or (hosts == 0 and self.parser.get_http_version() != "1.1")
        if not alone or self.parser.should_upgrade():
            raise ValueError("expected one header Host, and no other protocol")  # which is a 400
        self.in_body, self._since = True, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._since = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.in_body, self._since = False, 0
        super().on_message_complete()


def bind(host: str, port: int) -> socket.socket:
    """A socket for `host` and `port` (0: any free one), which does not listen yet; an ``OSError``
    if it is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    opened = socket.socket(
        family,
        socket.SOCK_STREAM,
        socket.IPPROTO_TCP,
    )  # or asyncio leaves Nagle on
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host, port))
    except OSError:
        opened.close()
        raise
    return opened


class Server(uvicorn.Server):
    """uvicorn without a log of requests, on our protocol and with our limits.

    On the first SIGTERM it takes requests for another ``grace_seconds``, in which health checks get
    a 503 and every answer closes its connection: a load balancer sends requests until it has
    noticed. SIGINT and a second signal end this time.

    Args:
        app: application that answers requests.
        service: service of the application, whose limits are kept.
        ready: function that is called once the server answers.
    """

    def __init__(self, app: Any, service: Service, ready: Callable[[], None] | None = None) -> None:
        limits = service.limits
        self._ready = ready
        self._service = service
        self._grace_ends = -math.inf  # time.monotonic() at which the grace period is over
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(service),
                ws="none",
                log_config=None,
                access_log=False,  # queries are nobody's business
                proxy_headers=False,  # nobody asks who sent a request
                server_header=False,
                backlog=_ACCEPTED,
                timeout_keep_alive=max(1, round(limits.keep_alive_seconds)),
                timeout_graceful_shutdown=max(1, round(limits.shutdown_seconds)),
            ),
        )
        service.alone = lambda: len(self.server_state.tasks) == 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_files_are_scarce())
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)  # more may wait than are taken at once
        if self.started and self._ready is not None:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop: after the grace period for the first signal if it is SIGTERM, else now."""
        if sig == signal.SIGTERM and not self.should_exit:
            self._grace_ends = time.monotonic() + self._service.limits.grace_seconds
        else:
            self._grace_ends = -math.inf
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop, which uvicorn asks ten times a second."""
        if not await super().on_tick(counter):
            return False
        if time.monotonic() >= self._grace_ends:
            return True
        if not self._service.draining:
            self._drain()
        return False

    def _drain(self) -> None:
        """Let health checks fail, and every answer close its connection."""
        self._service.draining = True
        for connection in self.server_state.connections:
            connection.close_after_answers()  # type: ignore[union-attr]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End after the requests in work. The signal has then been obeyed, and is not raised again."""
        await super().shutdown(sockets)
        getattr(self, "_captured_signals", []).clear()


def run(
    app: Any,
    service: Service,
    opened: socket.socket,
    ready: Callable[[], None] | None = None,
) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM.

    After SIGTERM, requests are taken for another ``grace_seconds``; requests in work then have
    ``shutdown_seconds``.
    """
    service.limits = _allow_files(service.limits)
    gc.collect()
    gc.freeze()  # models and modules, to look through which takes .3 s, in which nobody is answered
    try:
        Server(app, service, ready).run([opened])
    finally:
        gc.unfreeze()


def _allow_files(limits: Limits) -> Limits:
    """The limits, with as many connections as this process may have beside its other files."""
    soft, hard = _open_files()
    wanted = 2 * limits.max_connections + _SPARE_FILES
    if soft < wanted:
        import resource  # not on Windows, which has no such limit

        soft = max(soft, min(wanted, hard))
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (int(soft), resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
        )
    if soft >= wanted:
        return limits
    taken = len(list(Path("/dev/fd").iterdir()))
    left = soft - taken - min(_SPARE_FILES, soft // 4) - _refused_at_once() - 3 * _ACCEPTED
    if (most := max(1, int(left))) >= limits.max_connections:
        return limits
    _logger.warning(
        "max_connections: %d instead of %d, since this process may have %d files open (ulimit -n), and has %d",
        most,
        limits.max_connections,
        int(soft),
        taken,
    )
    return replace(limits, max_connections=most)


def _open_files() -> tuple[float, float]:
    """Limit of this process's open files, and the one to which it may raise that."""
    try:
        import resource  # not on Windows
    except ImportError:
        return math.inf, math.inf
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return math.inf if soft == unlimited else soft, math.inf if hard == unlimited else hard


def _refused_at_once() -> int:
    """Connections that stay open a little for their clients to read why they are closed."""
    return int(min(_LINGERING, _open_files()[0] // 8))


def _files_are_scarce() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Handler of errors of an event loop; says once a minute that a connection found no file, and
    waits for one.
    """
    said = -math.inf

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal said
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _OUT_OF_FILES:
            loop.default_exception_handler(context)
        elif loop.time() - said > _SAY_AGAIN_SECONDS:
            said = loop.time()
            _logger.warning("connections wait: %s (ulimit -n); said once a minute", error.strerror)

    return handle


def _protocol(service: Service) -> type[asyncio.Protocol]:
    """uvicorn's HTTP/1.1 with the limits of a service: of connections, of slow heads, and of
    clients that read nothing.
    """
    limits = service.limits
    refusal = ServeError("Overloaded", "too many connections").body()
    head = f"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\ncontent-length: {len(refusal)}\r\n"
    refused = f"{head}retry-after: 1\r\nconnection: close\r\n\r\n".encode() + refusal

    lingering: set[asyncio.Protocol] = set()
    most_lingering = _refused_at_once()
    if _clients.level == logging.NOTSET:
        _clients.setLevel(logging.ERROR)

    class Limited(Protocol):
        _head: asyncio.TimerHandle | None = None
        _reader: asyncio.TimerHandle | None = None

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.logger = _clients

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            transport.set_write_buffer_limits(
                0,
            )  # pause_writing says that something waits for the client
            self._really_close = transport.close
            super().connection_made(_Transport(transport, self._close))  # type: ignore[arg-type]
            if len(self.connections) > limits.max_connections:
                self.connections.discard(self)
                transport.write(refused)
                self._linger()
            else:
                self._head = self.loop.call_later(limits.header_seconds, self._too_slow)

        def _close(self) -> None:
            """Close, but not while the client still sends a body: that would take the answer back."""
            self.transport.flush()  # type: ignore[attr-defined]
            if self.in_body and not self.transport.is_closing():
                self._linger()
            else:
                self._really_close()

        def _linger(self) -> None:
            if self in lingering:
                return
            if len(lingering) >= most_lingering:
                self._really_close()
                return
            try:
                self.transport.write_eof()
            except (
                OSError
            ):  # the client has left: its connection was reset, and would never be closed
                self._really_close()
                return
            lingering.add(self)
            self.transport.resume_reading()
            self.loop.call_later(_LINGER_SECONDS, self._really_close)

        def data_received(self, data: bytes) -> None:
            if self in lingering or self.transport.is_closing():
                return
            if self._head is None and self._idle():
                self._head = self.loop.call_later(limits.header_seconds, self._too_slow)
            super().data_received(data)
            if self._head is not None and not self._idle():
                self._head.cancel()
                self._head = None

        def on_headers_complete(self) -> None:
            before = self.cycle
            super().on_headers_complete()
            if service.draining:
                if before is not None and not before.response_started:
                    before.keep_alive = True  # this request came before the answer to that one
                self.close_after_answers()

        def close_after_answers(self) -> None:
            """Let the answer to the last request that came say that the connection is closed."""
            if self.cycle is not None and not self.cycle.response_started:
                self.cycle.keep_alive = False

        def on_response_complete(self) -> None:
            self.transport.flush()  # type: ignore[attr-defined]
            super().on_response_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._reader is not None:
                self._reader.cancel()

        def _watch(self, before: int) -> None:
            self._reader = self.loop.call_later(limits.body_seconds, self._unread, before)

        def _unread(self, before: int) -> None:
            """Give a client up that has read nothing of its answer, which is kept in memory for it."""
            if (left := self.transport.get_write_buffer_size()) < before:
                self._watch(left)
            else:
                self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            lingering.discard(self)
            for timer in (self._head, self._reader):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def _idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _too_slow(self) -> None:
            self._head = None
            if self._idle() and not self.transport.is_closing():
                self.transport.close()

    return Limited


class _Transport:
    """A transport whose ``close`` is another function, and that sends the head of an answer
    together with its body.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self.close, self._head = transport, close, b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and not data.startswith(
            b"HTTP/1.1 1",
        ):  # of 100 and the like there is no more
            self._head += data
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines([head, data])
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send a head that has no body."""
        if self._head:
            self.write(b"")
