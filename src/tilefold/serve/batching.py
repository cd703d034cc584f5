"""Worker threads that encode batches of inputs, and metrics for Prometheus."""

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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from tilefold.serve.bodies import ServeError

__all__ = ["Answer", "BatchWorker", "Durations", "InputLimit", "Metrics"]

_logger = logging.getLogger("tilefold.serve")
_JOIN_SECONDS = 10.0  # for the thread to end when the worker is closed
# Number of batches for which an input waits longer than the input before it in the same request.
# Long requests therefore do not hold up the first inputs of other requests.
_BATCHES_PER_POSITION = 4
# Time after a single-input request during which batches of multi-input requests are kept short.
_RECENT_SECONDS = 10.0
# Target duration of a short multi-input batch, as a multiple of the duration of a single input.
_SHORT_BATCH_RATIO = 2
# Weight of the latest batch in the moving average of the durations of single-input batches.
_SMOOTHING = 1 / 4
# Shorter measured durations are rounded up to this one, since the duration is a divisor.
_MIN_BATCH_SECONDS = 1e-6
# Largest factor by which the short limit may exceed the tokens of the batch it was learned from.
_MAX_GROWTH = 2.0

Run = Callable[[Any, list[Any]], list[Any]]
"""``run(key, payloads)`` returns one result per payload. It is called by one thread at a time."""


@dataclass(frozen=True)
class Answer:
    """Result of one input.

    Attributes:
        value: the encoded row of the input, or the result of a function.
        queue: seconds in the queue.
        inference: seconds of the input's batch in the model.
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
        future: the future of the answer.
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
    """A queue entry with its answer or error.

    Attributes:
        entry: the queue entry.
        result: the answer, or the error.
    """

    entry: _QueueEntry
    result: Answer | ServeError


class InputLimit:
    """Limit on the inputs that are encoded or wait, or on their size. Used on the event loop only.

    Attributes:
        total: largest number of inputs, or the largest size.
        in_use: current number of inputs, or their size.
    """

    def __init__(self, total: int) -> None:
        """Create a limit of `total` inputs."""
        self.total = total
        self.in_use = 0

    @contextmanager
    def acquire(self, n_inputs: int) -> Iterator[None]:
        """Count several inputs as in use while the context is open, either all of them or none.

        Raises:
            ServeError: if more inputs than the limit would be in use.
        """
        if self.in_use + n_inputs > self.total:
            raise ServeError("Overloaded", "Model is overloaded")
        self.in_use += n_inputs
        try:
            yield
        finally:
            self.in_use -= n_inputs


class _TokenBudget:
    """Token limit of batches, which is lower for multi-input requests while single inputs arrive.

    A single-input request waits until the running batch has finished. If such a request arrived in
    the last ``_RECENT_SECONDS``, batches of multi-input requests are therefore limited to the
    *short limit*: the number of tokens that should take ``_SHORT_BATCH_RATIO`` times as long as a
    single-input batch. It is learned from the durations of batches.
    """

    def __init__(self, limit: int) -> None:
        """Start with the same limit for all batches.

        Args:
            limit: largest number of tokens of any batch.
        """
        self._limit = limit
        self._short_limit = limit
        self._single_seconds: float | None = None  # average duration of a single-input batch
        self._last_single = -_RECENT_SECONDS  # time.monotonic() of the last single-input request

    def record_single_input(self) -> None:
        """Record that a single-input request has arrived."""
        self._last_single = time.monotonic()

    def limit(self, multi_input: bool) -> int:
        """Return the token limit of the next batch of single-input or multi-input requests."""
        recent = time.monotonic() - self._last_single < _RECENT_SECONDS
        return self._short_limit if multi_input and recent else self._limit

    def learn_from_single_batch(self, seconds: float) -> None:
        """Update the exponential moving average of the duration of single-input batches."""
        if self._single_seconds is None:
            self._single_seconds = seconds
        else:
            self._single_seconds += (seconds - self._single_seconds) * _SMOOTHING

    def learn_from_multi_batch(self, tokens: int, seconds: float) -> None:
        """Update the short limit from the duration of a batch of multi-input requests.

        A batch that was too slow lowers the limit, and a fast one raises it, to at most
        ``_MAX_GROWTH`` times the tokens of that batch.

        Args:
            tokens: number of tokens of the batch, padding included.
            seconds: duration of the batch.
        """
        if self._single_seconds is None:  # the target duration is not known yet
            return
        target_seconds = _SHORT_BATCH_RATIO * self._single_seconds
        # By this factor the batch could have been longer, if its duration grew with its tokens.
        possible_growth = target_seconds / max(seconds, _MIN_BATCH_SECONDS)
        target_tokens = max(1, int(tokens * min(possible_growth, _MAX_GROWTH)))
        if possible_growth >= 1:
            short_limit = max(self._short_limit, target_tokens)
        else:
            short_limit = min(self._short_limit, target_tokens)
        self._short_limit = min(self._limit, short_limit)


class BatchWorker:
    """Worker thread that runs batches of inputs on one device.

    A batch consists of inputs that were queued while the previous batch ran; there is no timer. It
    starts with the first waiting input, and takes more inputs with the same key while
    ``longest * inputs`` is at most ``max_batch_tokens``.

    Batches of single-input requests alternate with batches of multi-input requests, which
    :class:`_TokenBudget` keeps short. Among multi-input requests, first inputs are encoded before
    later inputs. Inputs whose future was cancelled are dropped. A batch that fails is halved until
    the failing input is isolated, so that the other inputs are not lost.
    """

    def __init__(self, name: str, run: Run, max_batch_tokens: int, metrics: Metrics) -> None:
        """Create the worker; :meth:`start` starts its thread.

        Args:
            name: name of the thread.
            run: function that takes a key and a list of payloads, and returns a result for each.
            max_batch_tokens: largest number of tokens of a batch, padding included.
            metrics: metrics of the service, which count the batches.
        """
        self._run = run
        self._metrics = metrics
        # Waiting inputs in the order of their priorities.
        self._single_queue: list[_QueueEntry] = []
        self._multi_queue: list[_QueueEntry] = []
        self._last_batch_was_multi = True
        self._n_batches = 0
        self._budget = _TokenBudget(max_batch_tokens)
        self._ready = threading.Condition()  # guards the queues
        # Held while a batch runs on the device. A thread acquires it while it holds `_ready`, so
        # that no other batch can start before its own.
        self._device_lock = threading.Lock()
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
        """Return the number of inputs that wait."""
        return len(self._single_queue) + len(self._multi_queue)

    def _queue(self, multi_input: bool) -> list[_QueueEntry]:
        """Return the queue of multi-input requests, or the queue of single-input requests."""
        return self._multi_queue if multi_input else self._single_queue

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
            at_once: whether to run the input in this thread if the worker is idle, since waking the
                worker's thread takes longer than a very short input.

        Returns:
            A future of the answer. Cancelling it drops the input if it still waits.

        Raises:
            ServeError: if the worker is closed.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        with self._ready:
            if self._closed:
                raise ServeError("Unhealthy", "the service is closing")
            # Lower numbers run first. Later inputs of a request give way to the requests that
            # arrive during the next batches.
            priority = self._n_batches + _BATCHES_PER_POSITION * position
            entry = _QueueEntry(key, payload, tokens, future, priority)
            if not multi_input:
                self._budget.record_single_input()
            may_run = at_once and not len(self)
            run_in_this_thread = may_run and self._device_lock.acquire(blocking=False)
            if not run_in_this_thread:
                insort(self._queue(multi_input), entry, key=lambda waiting: waiting.priority)
                self._ready.notify()
        if run_in_this_thread:
            outcomes = self._run_batch([entry], multi_input)
            self._device_lock.release()
            _resolve_futures(outcomes)

        def drop_if_cancelled(future: asyncio.Future[Answer]) -> None:
            if future.cancelled():
                self._drop(entry)

        future.add_done_callback(drop_if_cancelled)
        return future

    def _drop(self, entry: _QueueEntry) -> None:
        """Remove the input of a client that has disconnected from its queue.

        Otherwise such inputs would accumulate during a long batch.
        """
        with self._ready:
            for queue in (self._single_queue, self._multi_queue):
                if entry in queue:
                    queue.remove(entry)
                    self._metrics.count("tilefold_dropped_count")

    def close(self) -> None:
        """Refuse the waiting inputs, and end the thread after its current batch."""
        with self._ready:
            self._closed = True
            refused = [*self._single_queue, *self._multi_queue]
            self._single_queue.clear()
            self._multi_queue.clear()
            self._ready.notify_all()
        error = ServeError("Unhealthy", "the service is closing")
        _resolve_on_loops([_Outcome(entry, error) for entry in refused])
        if self._thread.is_alive():
            self._thread.join(_JOIN_SECONDS)

    def _work(self) -> None:
        """Run batches until the worker is closed."""
        while self._run_next_batch():
            pass

    def _run_next_batch(self) -> bool:
        """Wait for a batch and run it.

        No reference to the batch remains, so that a model or an index that it used can be released.

        Returns:
            Whether there was a batch; False if the worker is closed.
        """
        batch = self._next_batch()
        if not batch:
            return False
        outcomes = self._run_batch(batch, self._last_batch_was_multi)
        self._device_lock.release()
        _resolve_on_loops(outcomes)
        return True

    def _run_batch(self, batch: list[_QueueEntry], multi_input: bool) -> list[_Outcome]:
        """Run a batch, and record its size and duration.

        Args:
            batch: entries with the same key.
            multi_input: whether they are inputs of multi-input requests.

        Returns:
            The answer or error of each entry.
        """
        padded_tokens = len(batch) * max(entry.tokens for entry in batch)
        self._metrics.observe("te_batch_next_size", len(batch))
        self._metrics.observe("te_batch_next_tokens", padded_tokens)
        started = time.perf_counter()
        results = self._run_or_halve(batch)
        inference = time.perf_counter() - started
        is_function = padded_tokens == 0  # the duration of a function says nothing about tokens
        if not is_function and multi_input:
            self._budget.learn_from_multi_batch(padded_tokens, inference)
        elif not is_function:
            self._budget.learn_from_single_batch(inference)
        outcomes = []
        for entry, result in zip(batch, results, strict=True):
            if isinstance(result, ServeError):
                outcomes.append(_Outcome(entry, result))
            else:
                answer = Answer(result, queue=started - entry.queued, inference=inference)
                outcomes.append(_Outcome(entry, answer))
        return outcomes

    def _next_batch(self) -> list[_QueueEntry]:
        """Wait for the next batch, and lock the device for it.

        Single-input and multi-input requests alternate if inputs of both kinds wait.

        Returns:
            The entries of the batch, after which the caller releases the device's lock. An empty
            list means that the worker is closed; the device is then not locked.
        """
        with self._ready:
            while not self._closed:
                preferred_kind = not self._last_batch_was_multi
                for multi_input in (preferred_kind, not preferred_kind):
                    batch = self._take_batch(multi_input)
                    if batch:
                        self._device_lock.acquire()
                        self._last_batch_was_multi = multi_input
                        self._n_batches += 1
                        return batch
                self._ready.wait()
        return []

    def _take_batch(self, multi_input: bool) -> list[_QueueEntry]:
        """Remove the entries of the next batch from a queue, and return them.

        The batch begins with the first entry. Later entries with the same key join it in their
        order, until one of them would exceed the token limit. Cancelled entries are dropped, and
        all others stay in the queue. The caller must hold ``self._ready``.

        Args:
            multi_input: whether to use the queue of multi-input requests.
        """
        batch: list[_QueueEntry] = []
        remaining: list[_QueueEntry] = []
        longest = 0
        full = False
        limit = self._budget.limit(multi_input)
        queue = self._queue(multi_input)
        for entry in queue:
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
        queue[:] = remaining
        return batch

    def _run_or_halve(self, batch: list[_QueueEntry]) -> list[Any]:
        """Run a batch; if it fails, run its halves, until the entries that fail are isolated.

        Returns:
            For each entry its result, or a ``ServeError``.
        """
        try:
            results = self._run(batch[0].key, [entry.payload for entry in batch])
            if len(results) != len(batch):
                raise RuntimeError(f"expected {len(batch)} results, got {len(results)}.")
            return results
        except BaseException as error:
            # A panic of the tokenizer is not an `Exception`, and must not end the thread either.
            if len(batch) > 1:
                middle = len(batch) // 2
                return self._run_or_halve(batch[:middle]) + self._run_or_halve(batch[middle:])
            if isinstance(error, ServeError):
                return [error]
            _logger.error("inference failed: %s", type(error).__name__, exc_info=error)
            return [ServeError("Backend", "inference failed for this input; the log says why")]


def _resolve_on_loops(outcomes: list[_Outcome]) -> None:
    """Resolve futures from the worker's thread.

    A future may only be resolved in the thread of its event loop, so that each loop is asked to do
    it.
    """
    for loop in {outcome.entry.future.get_loop() for outcome in outcomes}:
        outcomes_of_loop = [
            outcome for outcome in outcomes if outcome.entry.future.get_loop() is loop
        ]
        try:
            loop.call_soon_threadsafe(_resolve_futures, outcomes_of_loop)
        except RuntimeError:  # the loop has closed, so no request waits
            _logger.debug("%d answers came after the event loop's end", len(outcomes_of_loop))


def _resolve_futures(outcomes: list[_Outcome]) -> None:
    """Set the answers and errors of futures; must be called on their event loop."""
    for entry, result in outcomes:
        if entry.future.done():  # cancelled, because the client has disconnected
            continue
        if isinstance(result, Answer):
            entry.future.set_result(result)
        else:
            entry.future.set_exception(result)


class Durations(NamedTuple):
    """Durations of a request or an input in seconds.

    Attributes:
        total: the whole duration.
        tokenization: the time of tokenization.
        queue: the time in the queue; the mean over the inputs of a request.
        inference: the time in the model; the mean over the inputs of a request.
    """

    total: float
    tokenization: float
    queue: float
    inference: float


# Upper bounds of histograms: of durations from 15 microseconds to 15 seconds, and powers of two.
_SECONDS = tuple(1e-5 * 1.5**power for power in range(1, 36))
_INPUTS_IN_BATCH = tuple(2.0**power for power in range(13))
_TOKENS_OF_INPUT = tuple(2.0**power for power in range(20))
_TOKENS_IN_BATCH = tuple(2.0**power for power in range(21))
# Last part of a metric's name -> its help, in the order of the fields of Durations.
_DURATIONS = {
    "duration": "Seconds",
    "tokenization_duration": "Seconds of tokenization",
    "queue_duration": "Seconds in the queue",
    "inference_duration": "Seconds in the model",
}
# Middle part of a metric's name -> what is measured.
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
    "tilefold_index_reload_count": ("Generations of the index that took over", []),
    "tilefold_index_refused_count": ("Generations of the index that were refused", []),
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
    "tilefold_index_generation": "1 for the generation of the index that answers new requests",
    "tilefold_index_open_generations": (
        "Generations of the index in memory; more than one while requests of an old one run"
    ),
    "tilefold_pending_documents": "Documents that were accepted and are not in the index yet",
    "tilefold_ready": "1 if the server is ready for requests; 0 while it loads, or is going to end",
}


class _Histogram:
    """Counts of values by upper bound, and the sum of the values."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """Create an empty histogram.

        Args:
            bounds: ascending upper bounds of the buckets; infinity is added.
        """
        self.bounds = (*bounds, math.inf)
        self.total = 0.0
        self.counts = [0] * len(self.bounds)

    def observe(self, value: float) -> None:
        """Add a value to the histogram."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class _LabelCollector:
    """Gauge with the value 1, whose label changes; for prometheus_client."""

    def __init__(self, name: str, label: str, value: Callable[[], str]) -> None:
        """Create a gauge.

        Args:
            name: name of the gauge.
            label: name of its label.
            value: function that returns the current value of the label.
        """
        self._name = name
        self._label = label
        self._value = value

    def collect(self) -> Iterator[Metric]:
        """Yield the gauge with the current value of its label."""
        gauge = GaugeMetricFamily(self._name, _GAUGES[self._name], labels=[self._label])
        gauge.add_metric([self._value()], 1.0)
        yield gauge


class Metrics:
    """Metrics of a service; safe to use from several threads.

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
        self._registry.register(self)

    def count(self, name: str, increment: float = 1, **labels: str) -> None:
        """Increase a counter.

        Args:
            name: name of the counter.
            increment: number by which it is increased.
            labels: values of the counter's labels, in the order of ``_COUNTERS``.
        """
        counts = self._counts[name]
        label_values = tuple(labels.values())
        with self._lock:
            counts[label_values] = counts.get(label_values, 0.0) + increment

    def observe(self, name: str, *values: float) -> None:
        """Add values to the histogram with this name."""
        with self._lock:
            for value in values:
                self._histograms[name].observe(value)

    def observe_durations(self, subject: str, durations: Durations) -> None:
        """Add the durations of a request or an input to their histograms.

        Args:
            subject: a key of ``_DURATION_SUBJECTS``, such as ``"request"``.
            durations: the durations.
        """
        with self._lock:
            for part, seconds in zip(_DURATIONS, durations, strict=True):
                self._histograms[f"te_{subject}_{part}"].observe(seconds)

    def gauge(self, name: str, value: Callable[[], float]) -> None:
        """Register a gauge with a function that returns its current value."""
        Gauge(name, _GAUGES[name], registry=self._registry).set_function(value)

    def label(self, name: str, label: str, value: Callable[[], str]) -> None:
        """Register a gauge that is 1, and whose label has the current value of a function.

        Args:
            name: name of the gauge.
            label: name of the label.
            value: function that returns the value of the label.
        """
        self._registry.register(_LabelCollector(name, label, value))

    def collect(self) -> Iterator[Metric]:
        """Yield the counters and histograms for prometheus_client.

        The registry of that library calls this method for each request of ``/metrics``. Values are
        copied first, so that other threads wait for the copy only.
        """
        with self._lock:
            counts = {name: dict(by_label) for name, by_label in self._counts.items()}
            histograms = {
                name: (list(histogram.counts), histogram.total)
                for name, histogram in self._histograms.items()
            }
        for name, (help_text, labels) in _COUNTERS.items():
            counter = CounterMetricFamily(name, help_text, labels=labels)
            for label_values, value in counts[name].items():
                counter.add_metric(label_values, value)
            yield counter
        for name, (bucket_counts, total) in histograms.items():
            bounds = map(floatToGoString, self._histograms[name].bounds)
            # Prometheus expects cumulative counts: the number of values up to each bound.
            buckets = list(zip(bounds, itertools.accumulate(bucket_counts), strict=True))
            help_text, _ = _HISTOGRAMS[name]
            yield HistogramMetricFamily(name, help_text, buckets, total)

    def render(self) -> bytes:
        """Return all metrics in Prometheus's text format.

        The suffix ``_total`` that prometheus_client adds to counters is removed.
        """
        lines = generate_latest(self._registry).splitlines(keepends=True)
        return b"".join(line.replace(b"_total", b"", 1) for line in lines)
