"""uvicorn server with limits on connections, on request heads and on slow clients."""

from __future__ import annotations

import asyncio
import errno
import functools
import gc
import logging
import math
import re
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tilefold.serve.bodies import ServeError
from tilefold.serve.service import Service
from tilefold.serve.settings import Limits

_BACKLOG = 512
# Connections that asyncio accepts in one iteration of its loop. A connection over the limit is
# refused up to two iterations later.
_ACCEPTED = 8
# Files that the process may open besides connections; a quarter of its limit where that is low.
_SPARE_FILES = 256
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WARNING_INTERVAL_SECONDS = 60.0
_LINGER_SECONDS = 1.0  # for a refused client to read the reason
_MAX_LINGERING = 256  # refused connections that linger at once
_MAX_HEAD_BYTES = 1 << 16  # of a head, or of what separates two parts of a chunked body
_UPGRADE = re.compile(rb"(?<=\n)upgrade(?=[ \t]*:)", re.IGNORECASE)

_logger = logging.getLogger("tilefold.serve")
# Errors of clients have a logger of their own: they would fill the log of a server.
_client_logger = logging.getLogger("tilefold.serve.clients")


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, with checks of the head that it leaves to others.

    Heads that are too large, and requests with no or several ``Host`` headers, get status 400.
    Requests for another protocol are read as plain HTTP.
    """

    in_body = False
    _bytes_since_progress = 0  # bytes since the last complete head or part of a body

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a connection, and refuse a head that is too large.

        A header ``Upgrade`` is renamed first. The parser would otherwise end HTTP after this head,
        and take the body for data of the other protocol.
        """
        self._bytes_since_progress += len(data)
        if not self.in_body:
            head, separator, body = data.partition(b"\r\n\r\n")  # an empty line ends the head
            data = _UPGRADE.sub(b"-pgrade", head) + separator + body
        super().data_received(data)
        if self._bytes_since_progress > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Too large a head.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record a header; trailers after a body are ignored."""
        if not self.in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the head of a request: it has one ``Host``, and names no other protocol.

        Requests of HTTP/1.0 may have no ``Host``.

        Raises:
            ValueError: for a bad head; the parser answers it with status 400.
        """
        n_hosts = sum(name == b"host" for name, _ in self.headers)
        may_lack_host = self.parser.get_http_version() != "1.1"
        valid_host = n_hosts == 1 or (n_hosts == 0 and may_lack_host)
        if not valid_host or self.parser.should_upgrade():
            raise ValueError("expected one header Host, and no other protocol")
        self.in_body = True
        self._bytes_since_progress = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Record a part of a body."""
        self._bytes_since_progress = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect the head of the next request."""
        self.in_body = False
        self._bytes_since_progress = 0
        super().on_message_complete()


class _ConnectionLimits:
    """Limits of a service and the state that its connections share.

    Args:
        service: service whose limits apply.

    Attributes:
        lingering: refused connections that stay open for their clients to read the reason.
        max_lingering: largest size of ``lingering``.
        refusal: response with status 429 for a connection over the limit.
    """

    def __init__(self, service: Service) -> None:
        """Take the limits of a service, and write the response for connections over the limit.

        Args:
            service: service whose limits apply.
        """
        self.service = service
        self.limits = service.limits
        self.lingering: set[asyncio.Protocol] = set()
        self.max_lingering = _max_lingering()
        body = ServeError("Overloaded", "too many connections").body()
        head = (
            "HTTP/1.1 429 Too Many Requests\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "retry-after: 1\r\n"
            "connection: close\r\n"
            "\r\n"
        )
        self.refusal = head.encode() + body


class _LimitedProtocol(Protocol):
    """Protocol that limits the number of connections, slow heads, and clients that do not read.

    Args:
        shared: limits and state of all connections of the server.
        arguments: arguments of uvicorn's protocol.
        options: keyword arguments of uvicorn's protocol.
    """

    def __init__(self, shared: _ConnectionLimits, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = _client_logger
        self._shared = shared
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        # Requests whose answers are not complete, in their order: several if they are pipelined.
        self._open_cycles: deque[RequestResponseCycle] = deque()
        self._close_transport: Callable[[], None]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timer of the first head, or refuse a connection over the limit.

        Args:
            transport: transport of the connection. uvicorn gets one that sends head and body of an
                answer together.
        """
        # With a limit of 0, asyncio calls pause_writing for any bytes that the client has not read.
        transport.set_write_buffer_limits(0)
        self._close_transport = transport.close
        buffering_transport: Any = _HeadBufferingTransport(transport, self._close)
        super().connection_made(buffering_transport)
        if len(self.connections) > self._shared.limits.max_connections:
            self.connections.discard(self)
            transport.write(self._shared.refusal)
            self._linger()
        else:
            self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Parse bytes, and limit the time of a head from its first byte to its last."""
        if self in self._shared.lingering or self.transport.is_closing():
            return
        if self._head_timer is None and self._is_idle():
            self._start_head_timer()
        super().data_received(data)
        if self._head_timer is not None and not self._is_idle():
            self._head_timer.cancel()
            self._head_timer = None

    def on_headers_complete(self) -> None:
        """Begin to answer a request, as the last one of its connection if the server drains."""
        previous = self.cycle
        super().on_headers_complete()
        self._open_cycles.append(self.cycle)
        if self._shared.service.draining:
            if previous is not None and not previous.response_started:
                # This request is pipelined: the connection stays open for its answer.
                previous.keep_alive = True
            self.close_after_answers()

    def close_after_answers(self) -> None:
        """Close the connection after the answer to the last request that was received."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """Send the head of an answer without a body."""
        self.transport.flush()  # type: ignore[attr-defined]
        self._open_cycles.popleft()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start to watch whether the client reads its answer."""
        super().pause_writing()
        self._start_write_timer(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop watching a client that has read everything."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of a closed connection, and the answers to its requests."""
        self._shared.lingering.discard(self)
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        # uvicorn does this for the last request only. The one that is being answered may be an
        # earlier one, which would write to the closed connection.
        for cycle in self._open_cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def _close(self) -> None:
        """Close the connection, later if the client still sends a body.

        Closing while data arrives resets the connection, and the client would lose the answer.
        """
        self.transport.flush()  # type: ignore[attr-defined]
        if self.in_body and not self.transport.is_closing():
            self._linger()
        else:
            self._close_transport()

    def _linger(self) -> None:
        """Send the end of the answer, ignore what the client sends, and close a second later.

        A connection that is closed while its client sends is reset, and the client may lose the
        answer. The connection is closed at once if too many others linger.
        """
        shared = self._shared
        if self in shared.lingering:
            return
        if len(shared.lingering) >= shared.max_lingering:
            self._close_transport()
            return
        try:
            self.transport.write_eof()
        except OSError:  # the client reset the connection, which nothing else would close
            self._close_transport()
            return
        shared.lingering.add(self)
        self.transport.resume_reading()
        self.loop.call_later(_LINGER_SECONDS, self._close_transport)

    def _is_idle(self) -> bool:
        """Return whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _start_head_timer(self) -> None:
        """Limit the time until a head is complete."""
        seconds = self._shared.limits.header_seconds
        self._head_timer = self.loop.call_later(seconds, self._close_slow_head)

    def _close_slow_head(self) -> None:
        """Close a connection whose head took too long."""
        self._head_timer = None
        if self._is_idle() and not self.transport.is_closing():
            self.transport.close()

    def _start_write_timer(self, unread_bytes: int) -> None:
        """Check after some seconds whether the client has read some of ``unread_bytes``."""
        seconds = self._shared.limits.body_seconds
        self._write_timer = self.loop.call_later(seconds, self._check_client_reads, unread_bytes)

    def _check_client_reads(self, previously_unread: int) -> None:
        """Abort the connection if its client has read nothing of its answer since the last check.

        Args:
            previously_unread: bytes of the answer that were not sent at the last check.
        """
        unread = self.transport.get_write_buffer_size()
        if unread < previously_unread:
            self._start_write_timer(unread)
            return
        _logger.info(
            "closed a connection: its client read nothing for %g s, and %d bytes of its answer "
            "are left",
            self._shared.limits.body_seconds,
            unread,
        )
        self.transport.abort()


class _HeadBufferingTransport:
    """Transport that sends the head of an answer together with its body.

    Args:
        transport: transport that sends.
        close: function that replaces ``transport.close``.
    """

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self.close = close
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Hold back the head of an answer, or send a body together with the head before it.

        uvicorn writes the two separately, which would send two packets.

        Args:
            data: a head, which begins with the version of HTTP, or a part of a body.
        """
        is_informational = data.startswith(b"HTTP/1.1 1")  # such as 100, which has no body
        if data.startswith(b"HTTP/1.1 ") and not is_informational:
            self._head += data
        elif self._head:
            head = self._head
            self._head = b""
            self._transport.writelines([head, data])
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send a head that has no body."""
        if self._head:
            self.write(b"")


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet.

    Args:
        host: name or address to bind.
        port: port to bind; 0 takes any free one.

    Raises:
        OSError: if the port is taken.
    """
    # asyncio disables Nagle's algorithm only for sockets whose protocol is IPPROTO_TCP.
    bound = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET,
        socket.SOCK_STREAM,
        socket.IPPROTO_TCP,
    )
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


class Server(uvicorn.Server):
    """uvicorn server without a log of requests, with the limits of a service.

    After the first SIGTERM it accepts requests for ``grace_seconds``, because a load balancer sends
    requests until it has noticed. During this time health checks get status 503, and every answer
    closes its connection. SIGINT and a second signal end the grace period.

    Args:
        app: application that answers requests.
        service: service of the application, whose limits apply.
        ready: function that is called once the server answers.
    """

    def __init__(self, app: Any, service: Service, ready: Callable[[], None] | None = None) -> None:
        """Configure uvicorn for a service.

        Args:
            app: application that answers requests.
            service: service of the application. It learns from the server whether a request is the
                only one.
            ready: function that is called once the server answers.
        """
        limits = service.limits
        self._ready = ready
        self._service = service
        # time.monotonic() at the end of the grace period; in the past while there is none
        self._grace_ends = -math.inf
        if _client_logger.level == logging.NOTSET:
            _client_logger.setLevel(logging.ERROR)
        protocol: Any = functools.partial(_LimitedProtocol, _ConnectionLimits(service))
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                log_config=None,
                access_log=False,  # queries are private
                proxy_headers=False,  # addresses of clients are not used
                server_header=False,
                backlog=_ACCEPTED,
                timeout_keep_alive=max(1, round(limits.keep_alive_seconds)),
                timeout_graceful_shutdown=max(1, round(limits.shutdown_seconds)),
            ),
        )
        service.is_only_request = lambda: len(self.server_state.tasks) == 1

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on bound sockets."""
        asyncio.get_running_loop().set_exception_handler(_FileLimitHandler())
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)  # more connections may wait than are accepted at once

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop: after the grace period on a first SIGTERM, else immediately."""
        if sig == signal.SIGTERM and not self.should_exit:
            self._grace_ends = time.monotonic() + self._service.limits.grace_seconds
        else:
            self._grace_ends = -math.inf
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop; uvicorn calls this ten times a second.

        The first call reports that the server is ready. After a signal, the server stops at the end
        of the grace period, and drains until then.

        Args:
            counter: number of calls, for uvicorn.
        """
        # Readiness is not reported at the end of `startup`: if a signal arrives before uvicorn's
        # main loop, it stops without a grace period.
        if self._ready is not None:
            self._ready()
            self._ready = None
        if not await super().on_tick(counter):
            return False
        if time.monotonic() >= self._grace_ends:
            return True
        if not self._service.draining:
            self._drain()
        return False

    def _drain(self) -> None:
        """Let health checks fail, and close each connection after its answers."""
        self._service.draining = True
        for connection in self.server_state.connections:
            connection.close_after_answers()  # type: ignore[union-attr]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop after the running requests."""
        await super().shutdown(sockets)
        # uvicorn would raise the signals again, which have been handled.
        getattr(self, "_captured_signals", []).clear()


def run(
    app: Any,
    service: Service,
    bound: socket.socket,
    ready: Callable[[], None] | None = None,
) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM.

    After SIGTERM, requests are accepted for ``grace_seconds``. Running requests then have
    ``shutdown_seconds`` to end.

    Args:
        app: application that answers requests.
        service: service of the application.
        bound: socket of :func:`bind`.
        ready: function that is called once the server answers.
    """
    service.limits = _limit_to_open_files(service.limits)
    gc.collect()
    gc.freeze()  # a collection of models and modules takes 0.3 s, in which no request is answered
    try:
        Server(app, service, ready).run([bound])
    finally:
        gc.unfreeze()


def _limit_to_open_files(limits: Limits) -> Limits:
    """Lower ``max_connections`` to the number of files that this process may open.

    Each connection is an open file. The process's limit of open files is raised first where the
    system allows it.

    Args:
        limits: limits of the service.

    Returns:
        The same limits, or ones with fewer connections, which a warning says.
    """
    soft, hard = _file_limits()
    # Twice as many, because files of indexes and refused connections are open, too.
    sufficient = 2 * limits.max_connections + _SPARE_FILES
    if soft < sufficient:
        import resource  # not on Windows, which has no such limit

        soft = max(soft, min(sufficient, hard))
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), hard_limit))
    if soft >= sufficient:
        return limits
    n_open = len(list(Path("/dev/fd").iterdir()))
    n_spare = min(_SPARE_FILES, soft // 4)
    # A refused connection is closed up to two iterations of the event loop later, and each of the
    # three iterations accepts a group of connections.
    n_refused = 3 * _ACCEPTED
    available = soft - n_open - n_spare - _max_lingering() - n_refused
    max_connections = max(1, int(available))
    if max_connections >= limits.max_connections:
        return limits
    _logger.warning(
        "max_connections: %d instead of %d, since this process may have %d files open (ulimit -n), "
        "and has %d",
        max_connections,
        limits.max_connections,
        int(soft),
        n_open,
    )
    return replace(limits, max_connections=max_connections)


def _file_limits() -> tuple[float, float]:
    """Return the soft and the hard limit of files that this process may open.

    The soft limit applies, and may be raised up to the hard one. Infinity means no limit.
    """
    try:
        import resource  # not on Windows
    except ImportError:
        return math.inf, math.inf
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return (
        math.inf if soft == unlimited else soft,
        math.inf if hard == unlimited else hard,
    )


def _max_lingering() -> int:
    """Return how many refused connections may stay open for their clients to read the reason."""
    soft, _ = _file_limits()
    return int(min(_MAX_LINGERING, soft // 8))


class _FileLimitHandler:
    """Exception handler of an event loop for connections that found no free file.

    It warns once a minute. asyncio accepts the connections once files are free.
    """

    def __init__(self) -> None:
        self._last_warning = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error of the event loop."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _OUT_OF_FILES:
            loop.default_exception_handler(context)
        elif loop.time() - self._last_warning > _WARNING_INTERVAL_SECONDS:
            self._last_warning = loop.time()
            _logger.warning("connections wait: %s (ulimit -n); said once a minute", error.strerror)
