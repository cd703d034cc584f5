"""Worker threads that encode batches limited by tokens, and metrics for Prometheus."""

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
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Gauge, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from tilefold.serve.bodies import ServeError

__all__ = ["Answer", "BatchWorker", "InputLimit", "Metrics"]

_logger = logging.getLogger("tilefold.serve")
_JOIN_SECONDS = 10.0
# Batches by which each further input of a request waits longer, so that long requests do not hold
# up the first inputs of other requests.
_BATCHES_PER_POSITION = 4
# Time after a single-input request during which batches of multi-input requests are kept short.
_RECENT_SECONDS = 10.0
# Target duration of a short multi-input batch, in durations of a single-input batch.
_SHORT_BATCH_RATIO = 2
# Weight of the newest single-input batch in the mean duration.
_SMOOTHING = 1 / 4
# Shortest duration of a batch that is believed, since it is a divisor.
_MIN_BATCH_SECONDS = 1e-6
# Largest factor by which a batch suggests more tokens than its own.
_MAX_GROWTH = 2.0

Run = Callable[[Any, list[Any]], list[Any]]
"""``run(key, payloads)`` returns one result per payload; only the worker thread calls it."""


@dataclass(frozen=True)
class Answer:
    """Result of one input.

    Attributes:
        value: row of the input, or the result of a function.
        queue: seconds in the queue.
        inference: seconds in the model.
    """

    value: Any
    queue: float
    inference: float


@dataclass(eq=False)
class _QueueEntry:
    """Input that waits for a batch.

    Attributes:
        key: inputs with equal keys may share a batch.
        payload: the input.
        tokens: number of tokens; 0 for a function.
        future: receives the answer.
        priority: entries with lower numbers are encoded first.
        queued: ``time.perf_counter()`` at the start of the wait.
    """

    key: Hashable
    payload: Any
    tokens: int
    future: asyncio.Future[Answer]
    priority: int
    queued: float = field(default_factory=time.perf_counter)


class _Outcome(NamedTuple):
    """An entry with its answer, or with its error.

    Attributes:
        entry: the input.
        answer: None if there is an error.
        error: None if there is an answer.
    """

    entry: _QueueEntry
    answer: Answer | None
    error: BaseException | None


class _Result(NamedTuple):
    """An entry with the value that its batch returned for it, or with its error.

    Attributes:
        entry: the input.
        value: row of the input, or the result of a function.
        error: None if the batch succeeded.
    """

    entry: _QueueEntry
    value: Any
    error: BaseException | None


class InputLimit:
    """Limit of inputs that are encoded or wait at once. Used on the event loop only.

    Args:
        total: largest number of inputs.

    Attributes:
        in_use: current number of inputs.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.in_use = 0

    @contextmanager
    def acquire(self, n_inputs: int) -> Iterator[None]:
        """Hold a permit for each input, all at once or none.

        Raises:
            ServeError: if not all of them fit.
        """
        if self.in_use + n_inputs > self.total:
            raise ServeError("Overloaded", "Model is overloaded")
        self.in_use += n_inputs
        try:
            yield
        finally:
            self.in_use -= n_inputs


class _TokenBudget:
    """Token limit of a batch, reduced for multi-input requests while single inputs arrive.

    A single-input request waits for the batch that is running. So batches of multi-input requests
    are limited to about ``_SHORT_BATCH_RATIO`` times the duration of a single-input batch, if a
    single-input request arrived lately. Otherwise the full limit applies.

    Args:
        limit: largest number of tokens of any batch.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._short_limit = limit
        self._single_seconds: float | None = None
        self._last_single = -_RECENT_SECONDS

    def note_single_input(self) -> None:
        """Record that a single-input request has arrived."""
        self._last_single = time.monotonic()

    def limit(self, multi_input: bool) -> int:
        """Return the token limit of the next batch of single-input or multi-input requests."""
        recent = time.monotonic() - self._last_single < _RECENT_SECONDS
        return self._short_limit if multi_input and recent else self._limit

    def note_batch(self, multi_input: bool, tokens: int, seconds: float) -> None:
        """Learn from the duration of a batch.

        A batch of single inputs updates their mean duration. A batch of multi-input requests
        updates the short limit, which applies to such batches while single inputs arrive. Its
        target duration is a multiple of the single inputs' mean. From the batch follows the number
        of tokens that take that long. The limit falls to it after a batch that took longer than
        the target, and rises to it after a batch that took less, at most to twice the batch.

        Args:
            multi_input: whether the batch is of multi-input requests.
            tokens: tokens of the batch, padding included.
            seconds: duration of the batch.
        """
        if not multi_input:
            self._note_single_batch(seconds)
        elif self._single_seconds is not None:
            target_seconds = _SHORT_BATCH_RATIO * self._single_seconds
            ratio = target_seconds / max(seconds, _MIN_BATCH_SECONDS)
            fitting_tokens = max(1, int(tokens * min(ratio, _MAX_GROWTH)))
            if ratio >= 1:
                short_limit = max(self._short_limit, fitting_tokens)
            else:
                short_limit = min(self._short_limit, fitting_tokens)
            self._short_limit = min(self._limit, short_limit)

    def _note_single_batch(self, seconds: float) -> None:
        """Update the exponential moving average of the duration of single-input batches."""
        if self._single_seconds is None:
            self._single_seconds = seconds
        else:
            self._single_seconds += (seconds - self._single_seconds) * _SMOOTHING


class BatchWorker:
    """Worker thread that runs batches of inputs on one device.

    A batch consists of the inputs that were queued while the last batch ran; there is no timer. It
    starts with the first waiting input, and takes inputs of the same key while
    ``longest * inputs`` is at most ``max_batch_tokens``.

    Single-input requests have batches of their own, which alternate with batches of multi-input
    requests (:class:`_TokenBudget` keeps these short). Among multi-input requests, first inputs are
    encoded before later inputs. Inputs whose future was cancelled are dropped. A batch that fails
    is halved until the failing input is alone, so that the other inputs are not lost.

    Args:
        name: name of the thread.
        run: function that encodes a batch.
        max_batch_tokens: largest number of tokens of a batch, padding included.
        metrics: metrics that count batches.
    """

    def __init__(self, name: str, run: Run, max_batch_tokens: int, metrics: Metrics) -> None:
        """Create the worker; :meth:`start` starts its thread.

        Args:
            name: name of the thread.
            run: function of a key and payloads that returns one result per payload.
            max_batch_tokens: largest number of tokens of a batch, padding included.
            metrics: metrics that count batches.
        """
        self._run = run
        self._metrics = metrics
        # Whether requests have several inputs -> their entries, in the order of their priorities.
        self._waiting: dict[bool, list[_QueueEntry]] = {False: [], True: []}
        self._last_multi_input = True
        self._n_batches = 0
        self._budget = _TokenBudget(max_batch_tokens)
        self._ready = threading.Condition()
        self._running = threading.Lock()  # held while a batch runs; acquired under the condition
        self._closed = False
        self._thread = threading.Thread(
            target=self._work,
            name=f"tilefold-{name}",
            daemon=True,
        )

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the worker accepts inputs."""
        return self._thread.is_alive() and not self._closed

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._waiting.values())

    def submit(
        self,
        key: Hashable,
        payload: Any,
        tokens: int,
        position: int = 0,
        multi_input: bool = False,
        at_once: bool = False,
    ) -> asyncio.Future[Answer]:
        """Queue one input; call this on the event loop.

        Args:
            key: inputs with equal keys may share a batch.
            payload: the input.
            tokens: number of tokens of the input.
            position: position of the input in its request.
            multi_input: whether the request has several inputs.
            at_once: run the input in this thread if the worker is idle: an input that takes a
                millisecond need not wait until a thread wakes.

        Returns:
            A future of the answer. Cancelling it drops an input that still waits.

        Raises:
            ServeError: if the worker is closed.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        with self._ready:
            if self._closed:
                raise ServeError("Unhealthy", "the service is closing")
            priority = self._n_batches + _BATCHES_PER_POSITION * position
            entry = _QueueEntry(key, payload, tokens, future, priority)
            if not multi_input:
                self._budget.note_single_input()
            may_run = at_once and not len(self)
            run_in_this_thread = may_run and self._running.acquire(blocking=False)
            if not run_in_this_thread:
                insort(self._waiting[multi_input], entry, key=lambda waiting: waiting.priority)
                self._ready.notify()
        if run_in_this_thread:
            outcomes = self._run_batch([entry], multi_input)
            self._running.release()
            _resolve_futures(outcomes)

        def drop_if_cancelled(future: asyncio.Future[Answer]) -> None:
            if future.cancelled():
                self._drop(entry)

        future.add_done_callback(drop_if_cancelled)
        return future

    def _drop(self, entry: _QueueEntry) -> None:
        """Remove the input of a client that has gone.

        Such inputs would accumulate during a long batch.
        """
        with self._ready:
            for entries in self._waiting.values():
                if entry in entries:
                    entries.remove(entry)
                    self._metrics.count("tilefold_dropped_count")

    def close(self) -> None:
        """Refuse the waiting inputs, and end the thread after its current batch."""
        with self._ready:
            self._closed = True
            refused = [*self._waiting[False], *self._waiting[True]]
            self._waiting = {False: [], True: []}
            self._ready.notify_all()
        error = ServeError("Unhealthy", "the service is closing")
        self._send([_Outcome(entry, None, error) for entry in refused])
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        """Run batches until the worker is closed."""
        while batch := self._next_batch():
            outcomes = self._run_batch(batch, self._last_multi_input)
            self._running.release()
            self._send(outcomes)

    def _run_batch(self, batch: list[_QueueEntry], multi_input: bool) -> list[_Outcome]:
        """Run a batch, and record its size and duration.

        Args:
            batch: entries of one key.
            multi_input: whether they are inputs of multi-input requests.

        Returns:
            An answer or an error for each entry, in their order.
        """
        self._metrics.observe("te_batch_next_size", len(batch))
        padded_tokens = len(batch) * max(entry.tokens for entry in batch)
        self._metrics.observe("te_batch_next_tokens", padded_tokens)
        started = time.perf_counter()
        results = self._run_halving(batch)
        inference = time.perf_counter() - started
        # A payload may also be a function to run on the device. It has no tokens to learn from.
        if padded_tokens:
            self._budget.note_batch(multi_input, padded_tokens, inference)
        outcomes = []
        for entry, value, error in results:
            answer = None
            if error is None:
                answer = Answer(value, queue=started - entry.queued, inference=inference)
            outcomes.append(_Outcome(entry, answer, error))
        return outcomes

    def _next_batch(self) -> list[_QueueEntry]:
        """Wait for the next batch; an empty one means that the worker is closed.

        Single-input and multi-input requests alternate, if entries of both kinds wait.
        """
        with self._ready:
            while not self._closed:
                for multi_input in (not self._last_multi_input, self._last_multi_input):
                    batch = self._take_batch(multi_input)
                    if batch:
                        # The lock is acquired while the condition is held. Otherwise `submit`
                        # could run another input on the device before this batch.
                        self._running.acquire()
                        self._last_multi_input = multi_input
                        self._n_batches += 1
                        return batch
                self._ready.wait()
        return []

    def _take_batch(self, multi_input: bool) -> list[_QueueEntry]:
        """Remove the entries of the next batch from a queue, and return them.

        The batch begins with the first entry. Later entries of the same key join it in their order,
        until one of them would exceed the token limit. The other entries stay in the queue.

        The caller holds the condition.

        Args:
            multi_input: queue of multi-input requests, or that of single inputs.
        """
        batch: list[_QueueEntry] = []
        remaining: list[_QueueEntry] = []
        longest = 0
        full = False
        limit = self._budget.limit(multi_input)
        for entry in self._waiting[multi_input]:
            if entry.future.cancelled():
                self._metrics.count("tilefold_dropped_count")
            elif batch and (full or entry.key != batch[0].key):
                remaining.append(entry)
            elif batch and max(longest, entry.tokens) * (len(batch) + 1) > limit:
                # All texts of a batch are padded to the longest.
                full = True
                remaining.append(entry)
            else:
                batch.append(entry)
                longest = max(longest, entry.tokens)
        self._waiting[multi_input][:] = remaining
        return batch

    def _run_halving(self, batch: list[_QueueEntry]) -> list[_Result]:
        """Run a batch; if it fails, run its halves, down to the single entry that fails.

        Returns:
            A value or an error for each entry, in their order.
        """
        try:
            values = self._run(batch[0].key, [entry.payload for entry in batch])
            return [_Result(entry, value, None) for entry, value in zip(batch, values, strict=True)]
        except BaseException as error:
            # A panic of the tokenizer is no `Exception`. It must not end the thread either.
            if len(batch) > 1:
                middle = len(batch) // 2
                return self._run_halving(batch[:middle]) + self._run_halving(batch[middle:])
            if isinstance(error, ServeError):
                return [_Result(batch[0], None, error)]
            _logger.error("inference failed: %s", type(error).__name__, exc_info=error)
            public_error = ServeError(
                "Backend",
                "inference failed for this input; the log says why",
            )
            return [_Result(batch[0], None, public_error)]

    def _send(self, outcomes: list[_Outcome]) -> None:
        """Resolve the futures of outcomes on their event loops.

        A future may only be resolved in the thread of its loop, and this is the worker's thread.
        """
        for loop in {outcome.entry.future.get_loop() for outcome in outcomes}:
            outcomes_of_loop = [
                outcome for outcome in outcomes if outcome.entry.future.get_loop() is loop
            ]
            try:
                loop.call_soon_threadsafe(_resolve_futures, outcomes_of_loop)
            except RuntimeError:  # the loop has closed, so nobody waits
                _logger.debug(
                    "%d answers came after the end of the event loop",
                    len(outcomes_of_loop),
                )


def _resolve_futures(outcomes: list[_Outcome]) -> None:
    """Set the answers and errors of futures; runs on their event loop."""
    for entry, answer, error in outcomes:
        if entry.future.done():  # the client has gone
            continue
        if error is not None:
            entry.future.set_exception(error)
        elif answer is not None:
            entry.future.set_result(answer)


# Upper bounds of histograms: of durations from 15 microseconds to 15 seconds, and powers of two.
_SECONDS = tuple(1e-5 * 1.5**power for power in range(1, 36))
_INPUTS_IN_BATCH = tuple(2.0**power for power in range(13))
_TOKENS_OF_INPUT = tuple(2.0**power for power in range(20))
_TOKENS_IN_BATCH = tuple(2.0**power for power in range(21))
# Durations of a request or an input, by the last part of the name of a metric, with its help.
_DURATIONS = {
    "duration": "Seconds",
    "tokenization_duration": "Seconds of tokenization",
    "queue_duration": "Seconds in the queue",
    "inference_duration": "Seconds in the model",
}
# Whose durations are measured, by the middle part of the name.
_DURATION_SUBJECTS = {
    "request": "of a request, where its inputs differ their mean",
    "embed": "of an input that was encoded",
    "predict": "of a text that was scored with a query",
}
# Counter -> its help, and the names of its labels.
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
# Histogram -> its help, and the upper bounds of its buckets.
_HISTOGRAMS = {
    f"te_{name}_{part}": (f"{text} {subject}", _SECONDS)
    for name, subject in _DURATION_SUBJECTS.items()
    for part, text in _DURATIONS.items()
} | {
    "te_request_input_length": ("Tokens of an input", _TOKENS_OF_INPUT),
    "te_batch_next_size": ("Inputs of a batch", _INPUTS_IN_BATCH),
    "te_batch_next_tokens": ("Tokens of a batch, padding included", _TOKENS_IN_BATCH),
    "tilefold_search_duration": ("Seconds in the index", _SECONDS),
}
# Gauge -> its help.
_GAUGES = {
    "te_queue_size": "Inputs that wait for a batch",
    "tilefold_inputs_in_flight": (
        "Inputs in work or waiting; at max_concurrent_requests further ones get a 429"
    ),
}


class _Histogram:
    """Counts of values by upper bound, and their sum.

    Args:
        bounds: ascending upper bounds of the buckets; infinity is added.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = (*bounds, math.inf)
        self.total = 0.0
        self.counts = [0] * len(self.bounds)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Metrics:
    """Metrics of one service; safe to use from several threads.

    prometheus_client collects and writes them. Its own histograms are not used, because they search
    the bounds linearly for each value.
    """

    def __init__(self) -> None:
        """Create all counters and histograms, and register them for :meth:`render`."""
        self._registry = CollectorRegistry()
        self._lock = threading.Lock()
        # Counter -> values of its labels -> count. A counter without labels starts with 0.
        self._counts: dict[str, dict[tuple[str, ...], float]] = {}
        for name, (_, labels) in _COUNTERS.items():
            self._counts[name] = {} if labels else {(): 0.0}
        self._histograms = {name: _Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        # Prefix of histograms, such as te_request -> its histograms in the order of _DURATIONS.
        self._durations = {
            f"te_{name}": [self._histograms[f"te_{name}_{part}"] for part in _DURATIONS]
            for name in _DURATION_SUBJECTS
        }
        self._registry.register(self)

    def count(self, name: str, increment: float = 1, **labels: str) -> None:
        """Increase a counter."""
        counts = self._counts[name]
        label_values = tuple(labels.values())
        with self._lock:
            counts[label_values] = counts.get(label_values, 0.0) + increment

    def observe(self, name: str, *values: float) -> None:
        """Count values in a histogram."""
        with self._lock:
            for value in values:
                self._histograms[name].observe(value)

    def durations(self, name: str, *seconds: float) -> None:
        """Count the durations of a request or an input.

        Args:
            name: prefix of the histograms, such as ``"te_request"``.
            seconds: durations in the order of ``_DURATIONS``.
        """
        with self._lock:
            for histogram, value in zip(self._durations[name], seconds, strict=True):
                histogram.observe(value)

    def gauge(self, name: str, value: Callable[[], float]) -> None:
        """Set the function that returns the current value of a gauge."""
        Gauge(name, _GAUGES[name], registry=self._registry).set_function(value)

    def collect(self) -> Iterator[Metric]:
        """Yield the counters and the histograms, for a registry of prometheus_client.

        The registry calls this for each request of ``/metrics``. Values are copied first, so that
        other threads wait for the copy only.
        """
        with self._lock:
            counts = {name: dict(by_label) for name, by_label in self._counts.items()}
            histograms = {
                name: (list(histogram.counts), histogram.total)
                for name, histogram in self._histograms.items()
            }
        for name, (text, labels) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for label_values, value in counts[name].items():
                counter.add_metric(label_values, value)
            yield counter
        for name, (bucket_counts, total) in histograms.items():
            bounds = map(floatToGoString, self._histograms[name].bounds)
            # Prometheus expects how many values are at most each bound.
            buckets = list(zip(bounds, itertools.accumulate(bucket_counts), strict=True))
            text, _ = _HISTOGRAMS[name]
            yield HistogramMetricFamily(name, text, buckets, total)

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format.

        The suffix ``_total`` that prometheus_client adds to counters is removed.
        """
        lines = generate_latest(self._registry).splitlines(keepends=True)
        return b"".join(line.replace(b"_total", b"", 1) for line in lines)
