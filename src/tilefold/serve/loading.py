"""ASGI application that answers 503 while it loads another application in a thread."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from tilefold.serve.batching import Metrics
from tilefold.serve.bodies import to_json

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["Load", "LoadingApp", "Report"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Report = Callable[[str], None]
"""Function that is called with the next stage of loading, such as ``"loading the model"``."""
Load = Callable[[Report], "FastAPI"]
"""Function that loads models and indexes, and returns their application."""

_RETRY_SECONDS = 1  # after which clients should ask again
_JSON_TYPE = b"application/json"
_METRICS_TYPE = b"text/plain; version=0.0.4"
_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]

_logger = logging.getLogger("tilefold.serve")


class LoadingApp:
    """ASGI application that answers 503 until it has loaded the application that replaces it.

    Loading begins when the server has started, in a thread, so that the server listens and handles
    signals from the start. Until it ends, ``/live`` answers 200, ``/metrics`` has
    ``tilefold_ready 0``, and all other routes answer 503 with the stage of loading and its seconds.
    From then on, the loaded application answers every request.

    Attributes:
        error: the error with which loading failed; ``None`` before and otherwise.
    """

    def __init__(
        self,
        load: Load,
        on_loaded: Callable[[FastAPI], None] | None = None,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Prepare to load; the thread starts with the server.

        Args:
            load: function that returns the loaded application. It is called once, in a thread, with
                a function to which it reports each stage.
            on_loaded: function that is called with the loaded application before it answers.
            on_failure: function that is called with the error if loading fails, and should stop the
                server. By default the error is logged, and the process gets a SIGTERM.
        """
        self.error: BaseException | None = None
        self._load = load
        self._on_loaded = on_loaded
        self._on_failure = _log_and_terminate if on_failure is None else on_failure
        self._result: FastAPI | None = None  # what the thread has loaded
        self._app: FastAPI | None = None  # the same, once it answers requests
        self._stage = "loading the libraries"
        self._start = time.monotonic()
        self._metrics = Metrics()
        self._metrics.gauge("tilefold_ready", lambda: 0.0)

    @property
    def is_loaded(self) -> bool:
        """Whether the loaded application answers requests."""
        return self._app is not None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or handle the start and end of the server."""
        if scope["type"] == "lifespan":
            await self._run_lifespan(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        else:
            await self._answer_while_loading(scope, send)

    async def _answer_while_loading(self, scope: Message, send: Send) -> None:
        """Answer a request before the application is loaded.

        The body of the request is not read.

        Args:
            scope: ASGI scope with the method and path of the request.
            send: ASGI function that sends the head and body of the response.
        """
        is_read = scope["method"] in ("GET", "HEAD")
        if is_read and scope["path"] == "/live":
            status = 200
            body = b""
            headers = []
        elif is_read and scope["path"] == "/metrics":
            status = 200
            body = self._metrics.render()
            headers = [(b"content-type", _METRICS_TYPE)]
        else:
            status = 503
            body = self._error_body()
            headers = [
                (b"content-type", _JSON_TYPE),
                (b"retry-after", b"%d" % _RETRY_SECONDS),
            ]
        headers.append((b"content-length", b"%d" % len(body)))
        start = {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, *_HEADERS],
        }
        await send(start)
        await send({"type": "http.response.body", "body": body})

    def _error_body(self) -> bytes:
        """Return the JSON of a response with status 503."""
        seconds = round(time.monotonic() - self._start, 1)
        content = {
            "error": f"the server is not ready, {seconds} s after its start: {self._stage}",
            "error_type": "Unhealthy",
            "stage": self._stage,
            "seconds": seconds,
        }
        return to_json(content)

    async def _run_lifespan(self, receive: Receive, send: Send) -> None:
        """Load the application once the server has started, and run it until the server stops.

        The start is confirmed at once, so that the server listens while the application loads.

        Args:
            receive: ASGI function that returns the start and the stop of the server.
            send: ASGI function that confirms them.
        """
        await receive()  # the message that the server starts
        await send({"type": "lifespan.startup.complete"})
        stop = asyncio.ensure_future(receive())  # the message that the server stops
        try:
            await self._load_and_answer_until(stop)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.error = error
            self._on_failure(error)
        await stop
        await send({"type": "lifespan.shutdown.complete"})

    async def _load_and_answer_until(self, stop: asyncio.Future[Message]) -> None:
        """Load the application, and let it answer requests until the server stops.

        If the server stops before the application is loaded, nobody waits for the loading thread.

        Args:
            stop: future that is done when the server stops.
        """
        loading_ended = asyncio.ensure_future(self._start_thread().wait())
        events: set[asyncio.Future[Any]] = {loading_ended, stop}
        await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
        loading_ended.cancel()
        if self.error is not None:
            raise self.error
        if self._result is None:  # the server stops
            return
        app = self._result
        async with app.router.lifespan_context(app):
            if self._on_loaded is not None:
                self._on_loaded(app)
            self._app = app
            await stop

    def _start_thread(self) -> asyncio.Event:
        """Start the thread that loads, and return an event that is set at its end.

        It is a daemon thread, so that it does not block the end of the process.
        """
        loop = asyncio.get_running_loop()
        finished = asyncio.Event()

        def report(stage: str) -> None:
            self._stage = stage

        def load() -> None:
            try:
                self._result = self._load(report)
            except BaseException as error:  # raised on the event loop
                self.error = error
            with suppress(RuntimeError):  # the event loop has closed
                loop.call_soon_threadsafe(finished.set)

        thread = threading.Thread(
            target=copy_context().run,
            args=(load,),
            name="tilefold-loader",
            daemon=True,
        )
        thread.start()
        return finished


def _log_and_terminate(error: BaseException) -> None:
    """Log an error of loading, and send SIGTERM to this process."""
    _logger.error("the server could not be loaded: %s", type(error).__name__, exc_info=error)
    signal.raise_signal(signal.SIGTERM)
