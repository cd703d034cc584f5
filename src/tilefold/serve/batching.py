"""Batches by tokens: one worker thread per device, and the inputs that wait for it, first come, first served."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tilefold.serve.errors import ServeError
from tilefold.serve.metrics import Metrics

__all__ = ["Answer", "Lane", "Permits"]

_logger = logging.getLogger("tilefold.serve")
_JOIN_SECONDS = 10.0

Run = Callable[[Any, list[Any]], list[Any]]
"""``run(key, payloads)`` gives one result per payload; it is called in the worker thread only."""


@dataclass(frozen=True)
class Answer:
    """The result of one input, and its seconds in the queue and in the model."""

    value: Any
    queue: float
    inference: float


@dataclass(eq=False)
class _Entry:
    key: Hashable
    payload: Any
    tokens: int
    future: asyncio.Future[Answer]
    loop: asyncio.AbstractEventLoop
    queued: float = field(default_factory=time.perf_counter)

    def settle(self, value: Answer | None, error: BaseException | None) -> None:
        """Give the result to the event loop's side."""
        if self.future.done():  # the client has gone
            return
        if error is not None:
            self.future.set_exception(error)
        elif value is not None:
            self.future.set_result(value)


class Permits:
    """As many inputs as may be in work or waiting at once. Used on the event loop only."""

    def __init__(self, total: int) -> None:
        self.total, self.taken = total, 0

    @contextmanager
    def take(self, wanted: int) -> Iterator[None]:
        """Hold one permit per input, all at once or none.

        Raises:
            ServeError: Overloaded; nothing is queued beyond the limit.
        """
        if self.taken + wanted > self.total:
            raise ServeError("Overloaded", "Model is overloaded")
        self.taken += wanted
        try:
            yield
        finally:
            self.taken -= wanted


class Lane:
    """A worker thread that runs batches of inputs of one kind.

    A batch is whatever had queued while the last one ran, no timer: from the oldest input on, those of the same key,
    while ``longest * inputs`` stays within `max_batch_tokens`. Inputs whose future was cancelled are dropped. A batch
    that fails is halved until the input that fails is alone, so that the others are not lost.

    Args:
        name: of the thread.
        run: see :data:`Run`.
        max_batch_tokens: of a batch; a single longer input is a batch of its own.
        metrics: sizes of batches are noted there.
    """

    def __init__(self, name: str, run: Run, max_batch_tokens: int, metrics: Metrics) -> None:
        self._run, self._limit, self._metrics = run, max_batch_tokens, metrics
        self._waiting: deque[_Entry] = deque()
        self._ready = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"tilefold-{name}", daemon=True)

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the worker takes inputs."""
        return self._thread.is_alive() and not self._closed

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, key: Hashable, payload: Any, tokens: int) -> asyncio.Future[Answer]:
        """Queue one input; call it on the event loop. Cancelling the future drops the input if it still waits.

        Raises:
            ServeError: Unhealthy, the service is closing.
        """
        loop = asyncio.get_running_loop()
        entry = _Entry(key, payload, tokens, loop.create_future(), loop)
        with self._ready:
            if self._closed:
                raise ServeError("Unhealthy", "the service is closing")
            self._waiting.append(entry)
            self._ready.notify()
        entry.future.add_done_callback(lambda future: self._drop(entry) if future.cancelled() else None)
        return entry.future

    def _drop(self, entry: _Entry) -> None:
        """Forget an input whose client has gone, so that such inputs cannot pile up behind a long batch."""
        with self._ready:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._metrics.count("tilefold_dropped_count")

    def close(self) -> None:
        """Refuse what waits, and end the worker after the batch that it runs."""
        with self._ready:
            self._closed = True
            left, self._waiting = list(self._waiting), deque()
            self._ready.notify_all()
        self._settle([(entry, None, ServeError("Unhealthy", "the service is closing")) for entry in left])
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        while batch := self._next():
            self._metrics.observe("te_batch_next_size", len(batch))
            self._metrics.observe("te_batch_next_tokens", len(batch) * max(entry.tokens for entry in batch))
            started = time.perf_counter()
            done = self._attempt(batch)
            ended = time.perf_counter()
            self._settle([
                (entry, Answer(value, started - entry.queued, ended - started), error) for entry, value, error in done
            ])  # fmt: skip

    def _next(self) -> list[_Entry]:
        """The next batch; an empty one at the end."""
        with self._ready:
            while not self._closed:
                batch = self._take()
                if batch:
                    return batch
                self._ready.wait()
        return []

    def _take(self) -> list[_Entry]:
        batch: list[_Entry] = []
        left: deque[_Entry] = deque()
        longest, full = 0, False
        for entry in self._waiting:
            if entry.future.cancelled():
                self._metrics.count("tilefold_dropped_count")
            elif batch and (full or entry.key != batch[0].key):
                left.append(entry)
            elif batch and max(longest, entry.tokens) * (len(batch) + 1) > self._limit:
                full = True
                left.append(entry)
            else:
                batch.append(entry)
                longest = max(longest, entry.tokens)
        self._waiting = left
        return batch

    def _attempt(self, batch: list[_Entry]) -> list[tuple[_Entry, Any, BaseException | None]]:
        try:
            values = self._run(batch[0].key, [entry.payload for entry in batch])
            return [(entry, value, None) for entry, value in zip(batch, values, strict=True)]
        except BaseException as error:  # whatever a model raises, a panic of the tokenizer too, must not end the thread
            if len(batch) > 1:
                middle = len(batch) // 2
                return self._attempt(batch[:middle]) + self._attempt(batch[middle:])
            if isinstance(error, ServeError):
                return [(batch[0], None, error)]
            _logger.error("inference failed: %s", type(error).__name__, exc_info=error)
            return [(batch[0], None, ServeError("Backend", "inference failed for this input; the log says why"))]

    def _settle(self, done: list[tuple[_Entry, Answer | None, BaseException | None]]) -> None:
        for loop in {entry.loop for entry, _, _ in done}:
            mine = [each for each in done if each[0].loop is loop]
            try:
                loop.call_soon_threadsafe(_settle_all, mine)
            except RuntimeError:  # the loop has closed, and with it everybody who waited
                _logger.debug("%d answers came after the end of the event loop", len(mine))


def _settle_all(done: list[tuple[_Entry, Answer | None, BaseException | None]]) -> None:
    for entry, value, error in done:
        entry.settle(value, error)
