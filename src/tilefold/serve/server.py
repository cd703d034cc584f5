"""uvicorn server with limits on connections, request heads and slow clients."""

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
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tilefold._internal.arguments import ArgumentError
from tilefold.serve.bodies import ServeError
from tilefold.serve.loading import Load, LoadingApp, Report
from tilefold.serve.settings import Limits
from tilefold.serve.threads import switch_interval

if TYPE_CHECKING:  # the service needs torch, which the server does not wait for
    from fastapi import FastAPI

    from tilefold.serve.service import Follower, Service

_BACKLOG = 512  # largest number of connections that wait to be accepted
# Largest number of connections that asyncio accepts in one iteration of its event loop.
_ACCEPTED_PER_ITERATION = 8
# Largest number of connections that are open over the limit. Such a connection is closed up to two
# iterations after the one that accepts it.
_MAX_REFUSED = 3 * _ACCEPTED_PER_ITERATION
# Number of files that the process may open besides connections, but at most this share of all.
_SPARE_FILES = 256
_SPARE_SHARE = 4
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_WARNING_INTERVAL_SECONDS = 60.0
# Interval of Python's thread switches. A request needs the GIL some twenty times. With Python's
# default of 5 ms, it would wait up to 0.1 s while another thread computes in Python.
_SWITCH_SECONDS = 0.0005
# A connection *lingers* if its response has been sent, but its client may not have read it yet. It
# is closed after this time.
_LINGER_SECONDS = 1.0
# Largest number of connections that linger at once, but at most this share of open files.
_MAX_LINGERING = 256
_LINGERING_SHARE = 8
_MAX_HEAD_BYTES = 1 << 16  # of a head, or of the bytes between two parts of a chunked body
_UPGRADE = re.compile(rb"(?<=\n)upgrade(?=[ \t]*:)", re.IGNORECASE)

_logger = logging.getLogger("tilefold.serve")
# Errors of clients have a separate logger, so that they do not fill the log of a server.
_client_logger = logging.getLogger("tilefold.serve.clients")


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, with additional checks of request heads.

    Heads that are too large, and requests with no or several ``Host`` headers, get status 400.
    Requests for another protocol are read as plain HTTP.
    """

    in_body = False  # whether a head is complete, and its body is not
    # Received bytes since the last complete head, part of a body or end of a body. Too many of them
    # mean that the head is too large.
    _unparsed_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse received bytes of a connection, and refuse a head that is too large.

        First, a header ``Upgrade`` is renamed to ``-pgrade``, so that the parser ignores it.
        Otherwise the parser would stop after the head, and treat the body as data of another
        protocol.
        """
        self._unparsed_bytes += len(data)
        if not self.in_body:
            head, separator, body = data.partition(b"\r\n\r\n")  # an empty line ends the head
            data = _UPGRADE.sub(b"-pgrade", head) + separator + body
        super().data_received(data)
        if self._unparsed_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Request head too large.")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Record a header; trailers after a body are ignored."""
        if not self.in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Check the headers of a request, after which its body follows.

        A request must have exactly one header ``Host``; with HTTP/1.0 it may also have none. It
        must not ask for an upgrade to another protocol.

        Raises:
            ValueError: if the headers are not valid; uvicorn answers with status 400.
        """
        n_hosts = sum(name == b"host" for name, _ in self.headers)
        may_lack_host = self.parser.get_http_version() != "1.1"
        has_valid_host = n_hosts == 1 or (n_hosts == 0 and may_lack_host)
        if not has_valid_host or self.parser.should_upgrade():
            raise ValueError("expected one header Host, and no protocol upgrade")
        self.in_body = True  # until on_message_complete()
        self._unparsed_bytes = 0  # the limit on the size of a head starts again
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Record a part of a body."""
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect the head of the next request."""
        self.in_body = False
        self._unparsed_bytes = 0
        super().on_message_complete()


class _ConnectionLimits:
    """Limits of a service, and state that its connections share.

    Attributes:
        limits: limits of the service.
        service: the service; ``None`` until it is loaded.
        lingering: connections that stay open for a second, so that their clients can read a
            response that was sent before they had sent their request.
        max_lingering: largest number of lingering connections.
        refusal: response with status 429 for a connection over the limit.
    """

    def __init__(self, limits: Limits) -> None:
        """Prepare the shared state, and the response for connections over the limit.

        Args:
            limits: limits of the service.
        """
        self.limits = limits
        self.service: Service | None = None
        self.lingering: set[asyncio.Protocol] = set()
        self.max_lingering = _max_lingering(_file_limit())
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

    @property
    def draining(self) -> bool:
        """Whether the service will end soon, so that responses close their connections."""
        return self.service is not None and self.service.draining


class _LimitedProtocol(Protocol):
    """Protocol that limits the number of connections, slow heads, and clients that do not read."""

    def __init__(self, shared: _ConnectionLimits, *arguments: Any, **options: Any) -> None:
        """Create the protocol of a connection.

        Args:
            shared: limits and state of all connections of the server.
            arguments: arguments of uvicorn's protocol.
            options: keyword arguments of uvicorn's protocol.
        """
        super().__init__(*arguments, **options)
        self.logger = _client_logger
        self._shared = shared
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        # Requests without a complete response, in their order; several if they are pipelined.
        self._open_cycles: deque[RequestResponseCycle] = deque()
        self._close_at_once: Callable[[], None]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the first request head, or refuse a connection over the limit.

        Args:
            transport: transport of the connection. It is wrapped, so that uvicorn sends the head
                and body of a response together, and closes the connection with
                :meth:`_close_or_linger`.
        """
        # With a limit of 0, asyncio calls pause_writing() as soon as the client leaves any bytes
        # unread, so that the timeout for clients that do not read can start.
        transport.set_write_buffer_limits(0)
        self._close_at_once = transport.close
        buffering_transport: Any = _HeadBufferingTransport(
            transport,
            close=self._close_or_linger,
            is_response_started=self._is_response_started,
        )
        super().connection_made(buffering_transport)
        if len(self.connections) > self._shared.limits.max_connections:
            self.connections.discard(self)  # a refused connection does not count
            transport.write(self._shared.refusal)
            self._linger()
        else:
            self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and limit how long a client may take to send a request head.

        Bytes of a connection that is being closed are discarded.
        """
        if self in self._shared.lingering or self.transport.is_closing():
            return
        if self._head_timer is None and self._is_idle():
            self._start_head_timer()
        super().data_received(data)
        if self._head_timer is not None and not self._is_idle():
            self._head_timer.cancel()
            self._head_timer = None

    def on_headers_complete(self) -> None:
        """Begin to answer a request.

        If the server drains, that is, will end soon, the request is the last of its connection.
        """
        previous_cycle = self.cycle  # uvicorn's name for a request and its response
        super().on_headers_complete()
        self._open_cycles.append(self.cycle)
        if self._shared.draining:
            if previous_cycle is not None and not previous_cycle.response_started:
                # The new request is pipelined: the connection must stay open for its response.
                previous_cycle.keep_alive = True
            self.close_after_responses()

    def close_after_responses(self) -> None:
        """Close the connection after the response to the last request that was received."""
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        """Send the head of a response without a body, and go on with the next request."""
        self.transport.end_response()  # type: ignore[attr-defined]
        self._open_cycles.popleft()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Start to watch whether the client reads its response."""
        super().pause_writing()
        self._start_write_timer(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Stop watching a client that has read everything."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers of a closed connection, and abort its unfinished responses."""
        self._shared.lingering.discard(self)
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        # uvicorn does this for the last request only. An earlier, pipelined one may still be
        # answered, and would write to the closed connection.
        for cycle in self._open_cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def _close_or_linger(self) -> None:
        """Close the connection, with a delay if the client still sends a body."""
        self.transport.flush()  # type: ignore[attr-defined]
        if self.in_body and not self.transport.is_closing():
            self._linger()
        else:
            self._close_at_once()

    def _linger(self) -> None:
        """Close the sending side, ignore what the client sends, and close a second later.

        If a connection is closed while its client sends, it is reset, and the client may lose the
        response. The connection is closed at once if too many others wait in this way.
        """
        shared = self._shared
        if self in shared.lingering:
            return
        if len(shared.lingering) >= shared.max_lingering:
            self._close_at_once()
            return
        try:
            self.transport.write_eof()
        except OSError:  # the client reset the connection; nothing else would close it
            self._close_at_once()
            return
        shared.lingering.add(self)
        self.transport.resume_reading()  # uvicorn may have paused it during a large body
        self.loop.call_later(_LINGER_SECONDS, self._close_at_once)

    def _is_idle(self) -> bool:
        """Return whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _is_response_started(self) -> bool:
        """Return whether a request is being answered whose response has a head.

        uvicorn starts a response right before it writes the head.
        """
        return bool(self._open_cycles) and self._open_cycles[0].response_started

    def _start_head_timer(self) -> None:
        """Start the timeout until which a request head must be complete."""
        seconds = self._shared.limits.header_seconds
        self._head_timer = self.loop.call_later(seconds, self._close_slow_head)

    def _close_slow_head(self) -> None:
        """Close a connection whose head took too long."""
        self._head_timer = None
        if self._is_idle() and not self.transport.is_closing():
            self.transport.close()

    def _start_write_timer(self, unread_bytes: int) -> None:
        """Check after ``body_seconds`` whether the client has read some of the unread bytes."""
        seconds = self._shared.limits.body_seconds
        self._write_timer = self.loop.call_later(seconds, self._check_client_reads, unread_bytes)

    def _check_client_reads(self, previously_unread: int) -> None:
        """Abort the connection if its client has read nothing since the last check.

        Otherwise check again after ``body_seconds``.

        Args:
            previously_unread: number of unsent bytes of the response at the last check.
        """
        unread = self.transport.get_write_buffer_size()
        if unread < previously_unread:
            self._start_write_timer(unread)
            return
        _logger.info(
            "closed a connection: its client read nothing for %g s, and %d bytes of its response "
            "are left",
            self._shared.limits.body_seconds,
            unread,
        )
        self.transport.abort()


class _HeadBufferingTransport:
    """Wrapper of a transport that sends the head of a response together with its body.

    Attributes:
        close: function that is called in place of the transport's ``close``.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        close: Callable[[], None],
        is_response_started: Callable[[], bool],
    ) -> None:
        """Wrap a transport.

        Args:
            transport: transport of a connection.
            close: function that is called in place of the transport's ``close``.
            is_response_started: function that returns whether the request that is being answered
                has a response. The first bytes that are written then are its head.
        """
        self._transport = transport
        self.close = close
        self._is_response_started = is_response_started
        self._is_head_written = False  # whether write() had the head of the started response
        self._unsent_head = b""

    def __getattr__(self, name: str) -> Any:
        """Return another attribute of the wrapped transport."""
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Hold back the head of a response, or send a body together with the head before it.

        uvicorn writes the two separately, which would send two packets. What is written while no
        response is started is sent at once, such as the status 100 that asks for a body.

        Args:
            data: a head, or a part of a body.
        """
        if self._is_response_started() and not self._is_head_written:
            self._is_head_written = True
            self._unsent_head = data
        elif self._unsent_head:
            head = self._unsent_head
            self._unsent_head = b""
            self._transport.writelines([head, data])
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Send a head that has no body."""
        if self._unsent_head:
            self.write(b"")

    def end_response(self) -> None:
        """Send a head that has no body, and expect the head of the next response."""
        self.flush()
        self._is_head_written = False


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket that does not listen yet.

    Args:
        host: host name or address.
        port: port; 0 chooses a free one.

    Raises:
        OSError: if the port is in use.
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

    After the first SIGTERM it *drains*: it accepts requests for ``grace_seconds``, because a load
    balancer sends requests until it notices that health checks get status 503. Every response then
    closes its connection. A SIGINT or a second signal ends the grace period. A server whose service
    has not been loaded stops without one.
    """

    def __init__(
        self,
        app: Any,
        service: Service | None,
        ready: Callable[[], None] | None = None,
        *,
        limits: Limits | None = None,
        listening: Callable[[], None] | None = None,
    ) -> None:
        """Configure uvicorn for a service.

        Args:
            app: ASGI application of the service.
            service: service whose limits apply; ``None`` if it is still to be loaded, and
                :meth:`attach` will be called.
            ready: function that is called once the service accepts requests.
            limits: limits until a service is attached; ``None`` uses the defaults.
            listening: function that is called once the server listens.
        """
        if service is not None:
            limits = service.limits
        elif limits is None:
            limits = Limits()
        self._ready: Callable[[], None] | None = None
        self._listening = listening
        self._connection_limits = _ConnectionLimits(limits)
        self._grace_ends = -math.inf  # time.monotonic() at the end of the grace period
        if _client_logger.level == logging.NOTSET:  # the user has not chosen a level
            _client_logger.setLevel(logging.ERROR)
        protocol: Any = functools.partial(_LimitedProtocol, self._connection_limits)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                log_config=None,
                access_log=False,  # queries are private
                proxy_headers=False,  # addresses of clients are not used
                server_header=False,
                backlog=_ACCEPTED_PER_ITERATION,  # asyncio accepts as many as its backlog
                timeout_keep_alive=max(1, round(limits.keep_alive_seconds)),
                timeout_graceful_shutdown=max(1, round(limits.shutdown_seconds)),
            ),
        )
        if service is not None:
            self.attach(service, ready)

    @property
    def n_connections(self) -> int:
        """Number of open connections."""
        return len(self.server_state.connections)

    def attach(self, service: Service, ready: Callable[[], None] | None = None) -> None:
        """Apply the limits of a loaded service, and let it ask whether there are other requests.

        Args:
            service: service of the application. Its ``is_only_request`` is set.
            ready: function that is called once the service accepts requests.
        """
        self._ready = ready
        service.is_only_request = lambda: len(self.server_state.tasks) == 1  # a task per request
        self._connection_limits.limits = service.limits
        self._connection_limits.service = service
        if service.follower is not None:
            self._reload_on_hangup(service.follower)

    def _reload_on_hangup(self, follower: Follower) -> None:
        """Let the index be opened again when the process gets a SIGHUP.

        Windows has no such signal, and only the main thread can handle signals.

        Args:
            follower: opens the generations of the index.
        """
        hangup = getattr(signal, "SIGHUP", None)
        if hangup is None or threading.current_thread() is not threading.main_thread():
            return

        def reload(sig: int, frame: FrameType | None) -> None:
            follower.request_reload()

        signal.signal(hangup, reload)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on sockets that are bound to their ports."""
        asyncio.get_running_loop().set_exception_handler(_FileLimitHandler())
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)  # more connections may wait than are accepted at once
        if self._listening is not None:
            self._listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop after the grace period at a first SIGTERM, and at once at any other signal."""
        service = self._connection_limits.service
        if sig == signal.SIGTERM and not self.should_exit and service is not None:
            self._grace_ends = time.monotonic() + service.limits.grace_seconds
        else:
            self._grace_ends = -math.inf
        super().handle_exit(sig, frame)

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop.

        uvicorn calls this ten times per second. After a signal, the server drains until the end of
        the grace period, and then stops.

        Args:
            counter: number of calls, which uvicorn needs.
        """
        service = self._connection_limits.service
        if service is not None:
            self._report_ready_once()
        signal_received = await super().on_tick(counter)
        if not signal_received:
            return False
        if service is None or time.monotonic() >= self._grace_ends:
            return True
        if not service.draining:
            self._drain(service)
        return False

    def _report_ready_once(self) -> None:
        """Report, in an iteration of uvicorn's main loop, that the server is ready.

        ``startup`` would be too early: a signal that arrives before the main loop stops the server
        without a grace period.
        """
        if self._ready is not None:
            self._ready()
            self._ready = None

    def _drain(self, service: Service) -> None:
        """Let health checks fail, and close each connection after its responses."""
        service.draining = True
        for connection in self.server_state.connections:
            connection.close_after_responses()  # type: ignore[union-attr]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop once the running requests have ended."""
        await super().shutdown(sockets)
        # The signals have been handled. Otherwise uvicorn would raise them again.
        getattr(self, "_captured_signals", []).clear()


def run(
    app: Any,
    service: Service,
    bound: socket.socket,
    ready: Callable[[], None] | None = None,
) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM.

    SIGINT ends the server at once. After SIGTERM, requests are accepted for ``grace_seconds``. In
    both cases running requests have ``shutdown_seconds`` to end.

    Args:
        app: ASGI application of the service.
        service: service with models and limits. Its ``max_connections`` is lowered if the process
            may not open as many files.
        bound: socket that :func:`bind` has returned.
        ready: function that is called once the server accepts requests.
    """
    service.limits = _limit_to_open_files(service.limits)
    _freeze_garbage_collector()
    try:
        with switch_interval(_SWITCH_SECONDS):
            Server(app, service, ready).run([bound])
    finally:
        gc.unfreeze()


def load_and_run(
    load: Load,
    bound: socket.socket,
    limits: Limits | None = None,
    *,
    listening: Callable[[], None] | None = None,
    ready: Callable[[Service], None] | None = None,
) -> bool:
    """Serve on a bound socket from now on, with status 503 until the application is loaded.

    The application is loaded in a thread, and then served as by :func:`run`. SIGINT and SIGTERM end
    the server at once while it loads.

    Args:
        load: function that returns the application of :func:`tilefold.serve.create_app`. It is
            called in a thread, with a function to which it may report each stage.
        bound: socket that :func:`bind` has returned.
        limits: limits of the service that `load` creates; ``None`` for the defaults. Its
            ``max_connections`` is lowered if the process may not open as many files.
        listening: function that is called once the server listens.
        ready: function that is called with the loaded service, once it accepts requests.

    Returns:
        Whether the application was loaded. If not, a signal has ended the server, and the thread of
        `load` still runs: the process should end by ``os._exit``, because a thread that imports or
        computes may crash an interpreter that is finalized.

    Raises:
        BaseException: the error of `load`, whatever it is, after the server has stopped.
        ValueError: if the service of the loaded application has other limits.
    """
    expected_limits = Limits() if limits is None else limits

    def load_and_freeze(report: Report) -> FastAPI:
        app = load(report)
        _freeze_garbage_collector()
        return app

    def attach(app: FastAPI) -> None:
        """Let the server use the service of the loaded application."""
        service: Service = app.state.service
        if service.limits != expected_limits:
            raise ArgumentError(
                "limits",
                f"expected the limits of the loaded service, {service.limits}, got "
                f"{expected_limits}. Pass the limits that `load` uses.",
            )
        service.limits = _limit_to_open_files(service.limits, server.n_connections)
        server.attach(service, None if ready is None else functools.partial(ready, service))

    def stop(error: BaseException) -> None:
        server.should_exit = True

    loading_app = LoadingApp(load_and_freeze, attach, stop)
    server = Server(
        loading_app,
        service=None,
        limits=replace(expected_limits, max_connections=_max_connections(expected_limits)),
        listening=listening,
    )
    try:
        with switch_interval(_SWITCH_SECONDS):
            server.run([bound])
    finally:
        gc.unfreeze()
    if loading_app.error is not None:
        raise loading_app.error
    return loading_app.is_loaded


def _freeze_garbage_collector() -> None:
    """Exempt all objects from garbage collection.

    A collection of all models and modules would stop the server for 0.3 s.
    """
    gc.collect()
    gc.freeze()


def _limit_to_open_files(limits: Limits, n_connections: int = 0) -> Limits:
    """Lower ``max_connections`` if this process cannot open as many files.

    Args:
        limits: limits of the service.
        n_connections: number of open connections.

    Returns:
        The same limits; or limits with fewer connections, and a warning is logged.
    """
    max_connections = _max_connections(limits, n_connections)
    if max_connections == limits.max_connections:
        return limits
    _logger.warning(
        "max_connections: %d instead of %d, since this process may have %d files open (ulimit -n), "
        "and has %d",
        max_connections,
        limits.max_connections,
        int(_file_limit()),
        _n_open_files() - n_connections,
    )
    return replace(limits, max_connections=max_connections)


def _max_connections(limits: Limits, n_connections: int = 0) -> int:
    """Return ``max_connections``, or fewer if this process cannot open as many files.

    Each connection is an open file. The limit on open files is raised first if the system allows
    it.

    Args:
        limits: limits of the service.
        n_connections: number of open connections.
    """
    # Twice as many, because the files of indexes and refused connections are open, too.
    sufficient_files = 2 * limits.max_connections + _SPARE_FILES
    if _file_limit() < sufficient_files:
        _raise_file_limit(sufficient_files)
    file_limit = _file_limit()
    if file_limit >= sufficient_files:
        return limits.max_connections
    n_other_files = _n_open_files() - n_connections
    n_available = _available_connections(int(file_limit), n_other_files)
    return min(limits.max_connections, n_available)


def _n_open_files() -> int:
    """Return the number of files and sockets that this process has open."""
    return len(list(Path("/dev/fd").iterdir()))


def _file_limit() -> float:
    """Return the number of files that this process may open; infinity if there is no limit."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return math.inf
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft_limit == resource.RLIM_INFINITY else soft_limit


def _raise_file_limit(n_files: int) -> None:
    """Raise the limit on open files to `n_files`, or as far as the system allows."""
    import resource

    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit != resource.RLIM_INFINITY:
        n_files = min(n_files, hard_limit)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft_limit, n_files), hard_limit))


def _available_connections(file_limit: int, n_open: int) -> int:
    """Return the number of connections, at least 1, that a limit on open files allows.

    Some files are reserved: for files that the process opens later, and for connections over the
    limit, which are open for a moment, until they are refused or their client has read the answer.

    Args:
        file_limit: largest number of open files of the process.
        n_open: number of files that are already open.
    """
    n_reserved_files = min(_SPARE_FILES, file_limit // _SPARE_SHARE)
    n_connections_over_limit = _max_lingering(file_limit) + _MAX_REFUSED
    return max(1, file_limit - n_open - n_reserved_files - n_connections_over_limit)


def _max_lingering(file_limit: float) -> int:
    """Return how many connections may stay open until their clients have read a response.

    Args:
        file_limit: largest number of open files of the process.
    """
    return int(min(_MAX_LINGERING, file_limit // _LINGERING_SHARE))


class _FileLimitHandler:
    """Exception handler of an event loop for connections that cannot be opened as files.

    It logs a warning once a minute. asyncio accepts the connections as soon as files are closed.
    """

    def __init__(self) -> None:
        """Create a handler that has not logged a warning yet."""
        self._last_warning = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle an error of the event loop: log a warning, or call the default handler."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _OUT_OF_FILES:
            loop.default_exception_handler(context)
        elif loop.time() - self._last_warning > _WARNING_INTERVAL_SECONDS:
            self._last_warning = loop.time()
            _logger.warning(
                "connections wait: %s (ulimit -n); logged once a minute", error.strerror
            )
