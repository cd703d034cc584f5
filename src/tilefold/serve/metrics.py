"""Counters, gauges and histograms for Prometheus, under the names of text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

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
    "tilefold_search_count": ("Searches that were answered", []),
}
_HISTOGRAMS = {
    f"te_{name}_{part}": (f"{text} {whose}", _SECONDS) for name, whose in _OF.items() for part, text in _PARTS.items()
} | {
    "te_request_input_length": ("Tokens of an input", tuple(2.0**power for power in range(20))),
    "te_batch_next_size": ("Inputs of a batch", tuple(2.0**power for power in range(13))),
    "te_batch_next_tokens": ("Tokens of a batch, padding included", tuple(2.0**power for power in range(21))),
    "tilefold_search_duration": ("Seconds in the index", _SECONDS),
}
_GAUGES = {
    "te_queue_size": "Inputs that wait for a batch",
    "tilefold_inputs_in_flight": "Inputs in work or waiting; at max_concurrent_requests further ones get a 429",
}


class Metrics:
    """The metrics of one service; safe to use from several threads."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._counters = {name: Counter(name, text, labels, registry=self._registry)
                          for name, (text, labels) in _COUNTERS.items()}  # fmt: skip
        self._histograms = {name: Histogram(name, text, buckets=bounds, registry=self._registry)
                            for name, (text, bounds) in _HISTOGRAMS.items()}  # fmt: skip

    def count(self, name: str, by: float = 1, **labels: str) -> None:
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(by)

    def observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def durations(self, name: str, total: float, tokenization: float, queue: float, inference: float) -> None:
        """Add the seconds of a request or an input, and of its parts, to the histograms of `name`."""
        parts = {"": total, "tokenization_": tokenization, "queue_": queue, "inference_": inference}
        for part, seconds in parts.items():
            self.observe(f"{name}_{part}duration", seconds)

    def gauge(self, name: str, value: Callable[[], float]) -> None:
        """Say what gives the value of a gauge when it is asked for."""
        Gauge(name, _GAUGES[name], registry=self._registry).set_function(value)

    def render(self) -> bytes:
        """All metrics as Prometheus reads them, without the suffix and the times that its library adds to counters."""
        lines = generate_latest(self._registry).splitlines(keepends=True)
        return b"".join(line.replace(b"_total", b"", 1) for line in lines if b"_created" not in line)
