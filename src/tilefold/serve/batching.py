"""Batches by tokens: one worker thread per device, the inputs that wait for it, in turns; and what
Prometheus reads.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from tilefold.serve.bodies import ServeError

__all__ = ["Answer", "Lane", "Metrics", "Permits"]

_logger = logging.getLogger("tilefold.serve")
_JOIN_SECONDS = 10.0
_PATIENCE = 4  # batches; the next input of a request waits as if it had come so much later
_LATELY_SECONDS = 10.0  # so long after a request of one input, others are kept short for the next
_TIMES = 2  # as long as a batch of such requests may a batch of others take

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
    rank: int
    queued: float = field(default_factory=time.perf_counter)


_Done = tuple[_Entry, Answer | None, BaseException | None]


class Permits:
    """Limit of inputs in work or waiting at once. Used on the event loop only."""

    def __init__(self, total: int) -> None:
        self.total, self.taken = total, 0

    @contextmanager
    def take(self, wanted: int) -> Iterator[None]:
        """Hold one permit per input, all at once or none."""
        if self.taken + wanted > self.total:
            raise ServeError("Overloaded", "Model is overloaded")
        self.taken += wanted
        try:
            yield
        finally:
            self.taken -= wanted


class _Shares:
    """Limit of tokens in a batch of requests of several inputs, so that requests of one input need
    not wait long.

    All that a batch can hold, or so many, while others send requests of one input, that it takes
    `_TIMES` as long.
    """

    def __init__(self, limit: int) -> None:
        self._limit = self._share = limit
        self._single_seconds: float | None = None
        self._single_came = -_LATELY_SECONDS

    def came(self) -> None:
        self._single_came = time.monotonic()

    def limit(self, several: bool) -> int:
        """Tokens of the next batch, of requests of one or of several inputs."""
        return (
            self._share
            if several and time.monotonic() - self._single_came < _LATELY_SECONDS
            else self._limit
        )

    def learn(self, several: bool, tokens: int, seconds: float) -> None:
        if not several:
            known = self._single_seconds
            self._single_seconds = seconds if known is None else known + (seconds - known) / 4
        elif self._single_seconds is not None:
            ratio = _TIMES * self._single_seconds / max(seconds, 1e-6)
            fitting = max(1, int(tokens * min(ratio, 2.0)))
            self._share = min(
                self._limit,
                max(self._share, fitting) if ratio >= 1 else min(self._share, fitting),
            )


class Lane:
    """A worker thread that runs batches of inputs of one kind.

    A batch is whatever had queued while the last one ran, no timer: from the first input on, those
    of the same key, while ``longest * inputs`` stays within `max_batch_tokens`. Requests of one
    input have batches of their own, in turn with batches of the others, which are kept short
    meanwhile (:class:`_Shares`); among these, every request has its first inputs encoded before
    another one's later ones. Inputs whose future was cancelled are dropped. A batch that fails is
    halved until the input that fails is alone, so that the others are not lost.
    """

    def __init__(self, name: str, run: Run, max_batch_tokens: int, metrics: Metrics) -> None:
        self._run, self._metrics = run, metrics
        self._waiting: tuple[list[_Entry], list[_Entry]] = (
            [],
            [],
        )  # of requests of one input, and of several
        self._several, self._begun, self._shares = True, 0, _Shares(max_batch_tokens)
        self._ready, self._turn = (
            threading.Condition(),
            threading.Lock(),
        )  # of who runs, taken together with a batch
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=f"tilefold-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def submit(
        self,
        key: Hashable,
        payload: Any,
        tokens: int,
        place: int = 0,
        several: bool = False,
        at_once: bool = False,
    ) -> asyncio.Future[Answer]:
        """Queue one input; call it on the event loop. Cancelling the future drops the input if it
        still waits.

        `at_once` runs it here if the worker has nothing: what takes a millisecond need not wait for
        a thread to wake.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        with self._ready:
            if self._closed:
                raise ServeError("Unhealthy", "the service is closing")
            entry = _Entry(key, payload, tokens, future, self._begun + _PATIENCE * place)
            if not several:
                self._shares.came()
            here = at_once and not len(self) and self._turn.acquire(blocking=False)
            if not here:
                insort(self._waiting[several], entry, key=lambda each: each.rank)
                self._ready.notify()
        if here:
            done = self._done([entry], several)
            self._turn.release()
            _settle_all(done)
        future.add_done_callback(lambda future: self._drop(entry) if future.cancelled() else None)
        return future

    def _drop(self, entry: _Entry) -> None:
        """Forget an input whose client has gone, so that such inputs cannot pile up behind a long
        batch.
        """
        with self._ready:
            for waiting in self._waiting:
                if entry in waiting:
                    waiting.remove(entry)
                    self._metrics.count("tilefold_dropped_count")

    def close(self) -> None:
        """Refuse what waits, and end the worker after the batch that it runs."""
        with self._ready:
            self._closed = True
            left = [entry for waiting in self._waiting for entry in waiting]
            self._waiting = ([], [])
            self._ready.notify_all()
        self._settle(
            [(entry, None, ServeError("Unhealthy", "the service is closing")) for entry in left],
        )
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        while batch := self._next():
            done = self._done(batch, self._several)
            self._turn.release()
            self._settle(done)

    def _done(self, batch: list[_Entry], several: bool) -> list[_Done]:
        """The answers to a batch, or what failed."""
        self._metrics.observe("te_batch_next_size", len(batch))
        tokens = len(batch) * max(entry.tokens for entry in batch)
        self._metrics.observe("te_batch_next_tokens", tokens)
        started = time.perf_counter()
        done = self._attempt(batch)
        ended = time.perf_counter()
        if tokens:  # calls have none
            self._shares.learn(several, tokens, ended - started)
        return [
            (entry, Answer(value, started - entry.queued, ended - started), error)
            for entry, value, error in done
        ]

    def _next(self) -> list[_Entry]:
        """The next batch; an empty one at the end."""
        with self._ready:
            while not self._closed:
                for several in (not self._several, self._several):
                    if batch := self._take(several):
                        self._turn.acquire()  # under the condition, so that nobody runs another one before it
                        self._several, self._begun = several, self._begun + 1
                        return batch
                self._ready.wait()
        return []

    def _take(self, several: bool) -> list[_Entry]:
        batch: list[_Entry] = []
        left: list[_Entry] = []
        longest, full, limit = 0, False, self._shares.limit(several)
        for entry in self._waiting[several]:
            if entry.future.cancelled():
                self._metrics.count("tilefold_dropped_count")
            elif batch and (full or entry.key != batch[0].key):
                left.append(entry)
            elif batch and max(longest, entry.tokens) * (len(batch) + 1) > limit:
                full = True
                left.append(entry)
            else:
                batch.append(entry)
                longest = max(longest, entry.tokens)
        self._waiting[several][:] = left
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
            return [
                (
                    batch[0],
                    None,
                    ServeError("Backend", "inference failed for this input; the log says why"),
                ),
            ]

    def _settle(self, done: list[_Done]) -> None:
        for loop in {entry.future.get_loop() for entry, _, _ in done}:
            mine = [each for each in done if each[0].future.get_loop() is loop]
            try:
                loop.call_soon_threadsafe(_settle_all, mine)
            except RuntimeError:  # the loop has closed, and with it everybody who waited
                _logger.debug("%d answers came after the end of the event loop", len(mine))


def _settle_all(done: list[_Done]) -> None:
    for entry, value, error in done:
        if entry.future.done():  # the client has gone
            continue
        if error is not None:
            entry.future.set_exception(error)
        elif value is not None:
            entry.future.set_result(value)


_SECONDS = tuple(1e-5 * 1.5**power for power in range(1, 36))  # 15 microseconds to 15 seconds
_PARTS = {
    "duration": "Seconds",
    "tokenization_duration": "Seconds of tokenization",
    "queue_duration": "Seconds in the queue",
    "inference_duration": "Seconds in the model",
}
_OF = {
    "request": "of a request, where its inputs differ their mean",
    "embed": "of an input that was encoded",
    "predict": "of a text that was scored with a query",
}
_COUNTERS = {
    "te_request_count": ("Requests, by method: one input (single) or a list (batch)", ["method"]),
    "te_request_success": ("Requests that were answered", ["method"]),
    "te_request_failure": ("Requests that were refused or failed, by error", ["err"]),
    "te_embed_count": ("Inputs to encode", []),
    "te_embed_success": ("Inputs that were encoded", []),
    "te_predict_count": ("Texts to score with a query", []),
    "te_predict_success": ("Texts that were scored with a query", []),
    "tilefold_dropped_count": ("Inputs whose client had gone before they were encoded", []),
    "tilefold_cached_count": ("Queries whose answer was kept from before (--cached-queries)", []),
    "tilefold_search_count": ("Searches that were answered", []),
}
_HISTOGRAMS = {
    f"te_{name}_{part}": (f"{text} {whose}", _SECONDS)
    for name, whose in _OF.items()
    for part, text in _PARTS.items()
} | {
    "te_request_input_length": ("Tokens of an input", tuple(2.0**power for power in range(20))),
    "te_batch_next_size": ("Inputs of a batch", tuple(2.0**power for power in range(13))),
    "te_batch_next_tokens": (
        "Tokens of a batch, padding included",
        tuple(2.0**power for power in range(21)),
    ),
    "tilefold_search_duration": ("Seconds in the index", _SECONDS),
}
_GAUGES = {
    "te_queue_size": "Inputs that wait for a batch",
    "tilefold_inputs_in_flight": "Inputs in work or waiting; at max_concurrent_requests further ones get a 429",
}


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.total = (*bounds, math.inf), 0.0
        self.counts = [0] * len(self.bounds)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """The metrics of one service; safe to use from several threads.

    What prometheus_client counts with looks through the bounds for each value; here it only
    collects and writes.
    """

    def __init__(self) -> None:
        self._registry, self._lock = CollectorRegistry(), threading.Lock()
        self._counts: dict[str, dict[tuple[str, ...], float]]
        self._counts = {
            name: {} if labels else {(): 0.0} for name, (_, labels) in _COUNTERS.items()
        }
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._durations = {
            f"te_{name}": [self._histograms[f"te_{name}_{part}"] for part in _PARTS] for name in _OF
        }
        self._registry.register(self)

    def count(self, name: str, by: float = 1, **labels: str) -> None:
        counts, key = self._counts[name], tuple(labels.values())
        with self._lock:
            counts[key] = counts.get(key, 0.0) + by

    def observe(self, name: str, *values: float) -> None:
        with self._lock:
            for value in values:
                self._histograms[name].observe(value)

    def durations(self, name: str, *seconds: float) -> None:
        """Add the seconds of a request or an input, and of its parts in the order of ``_PARTS``, to
        those of `name`.
        """
        with self._lock:
            for histogram, value in zip(self._durations[name], seconds, strict=True):
                histogram.observe(value)

    def gauge(self, name: str, value: Callable[[], float]) -> None:
        """Say what gives the value of a gauge when it is asked for."""
        Gauge(name, _GAUGES[name], registry=self._registry).set_function(value)

    def collect(self) -> Iterator[Metric]:
        """The counters and the histograms, as a registry asks for them."""
        with self._lock:
            counts = {name: dict(found) for name, found in self._counts.items()}
            histograms = {
                name: (list(each.counts), each.total) for name, each in self._histograms.items()
            }
        for name, (text, labels) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for key, value in counts[name].items():
                counter.add_metric(key, value)
            yield counter
        for name, (each, total) in histograms.items():
            bounds = map(floatToGoString, self._histograms[name].bounds)
            buckets = list(zip(bounds, itertools.accumulate(each), strict=True))
            yield HistogramMetricFamily(name, _HISTOGRAMS[name][0], buckets, total)

    def render(self) -> bytes:
        """All metrics as Prometheus reads them, without the suffix that its library adds to
        counters.
        """
        lines = generate_latest(self._registry).splitlines(keepends=True)
        return b"".join(line.replace(b"_total", b"", 1) for line in lines)
