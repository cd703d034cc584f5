"""Counters, gauges and histograms in the text format of Prometheus, under the names of text-embeddings-inference."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable

__all__ = ["Metrics"]

Labels = tuple[tuple[str, str], ...]
_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_SIZES = tuple(2.0**power for power in range(15))  # 1 to 16,384
_COUNTERS = {
    "te_request_count": "Requests, by method: one input (single) or several (batch)",
    "te_request_success": "Requests that were answered",
    "te_request_failure": "Requests that were refused or failed, by error",
    "te_embed_count": "Inputs that were encoded",
    "tilefold_dropped_count": "Inputs whose client had gone before they were encoded",
    "tilefold_search_count": "Searches that were answered",
}
_HISTOGRAMS = {
    "te_request_duration": ("Seconds of a request", _SECONDS),
    "te_request_tokenization_duration": ("Seconds of tokenization, mean of the request's inputs", _SECONDS),
    "te_request_queue_duration": ("Seconds in the queue, mean of the request's inputs", _SECONDS),
    "te_request_inference_duration": ("Seconds in the model, mean of the request's inputs", _SECONDS),
    "te_request_input_length": ("Tokens of an input", _SIZES),
    "te_batch_next_size": ("Inputs of a batch", _SIZES),
    "te_batch_next_tokens": ("Tokens of a batch, padding included", _SIZES),
    "tilefold_search_duration": ("Seconds in the index", _SECONDS),
}
_GAUGES = {
    "te_queue_size": "Inputs that wait for a batch",
    "tilefold_inputs_in_flight": "Inputs in work or waiting; at max_concurrent_requests further ones get a 429",
}


class Metrics:
    """The metrics of one service; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, dict[Labels, float]] = {name: {} for name in _COUNTERS}
        self._buckets = {name: [0] * (len(bounds) + 1) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._sums = dict.fromkeys(_HISTOGRAMS, 0.0)
        self._gauges: dict[str, Callable[[], float]] = {}

    def count(self, name: str, by: float = 1, **labels: str) -> None:
        """Add to a counter."""
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._counts[name][key] = self._counts[name].get(key, 0) + by

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram."""
        with self._lock:
            self._buckets[name][bisect_left(_HISTOGRAMS[name][1], value)] += 1
            self._sums[name] += value

    def gauge(self, name: str, value: Callable[[], float]) -> None:
        """Say what gives the value of a gauge when it is asked for."""
        self._gauges[name] = value

    def render(self) -> str:
        """All metrics as Prometheus reads them."""
        with self._lock:
            lines = [line for name, text in _COUNTERS.items() for line in self._counter(name, text)]
            lines += [line for name in _HISTOGRAMS for line in self._histogram(name)]
        for name, value in self._gauges.items():
            lines += [f"# HELP {name} {_GAUGES[name]}", f"# TYPE {name} gauge", f"{name} {value():g}"]
        return "\n".join(lines) + "\n"

    def _counter(self, name: str, text: str) -> list[str]:
        lines = [f"# HELP {name} {text}", f"# TYPE {name} counter"]
        for labels, value in sorted(self._counts[name].items()):
            shown = ",".join(f'{key}="{label}"' for key, label in labels)
            lines.append(f"{name}{{{shown}}} {value:.0f}" if shown else f"{name} {value:.0f}")
        return lines

    def _histogram(self, name: str) -> list[str]:
        text, bounds = _HISTOGRAMS[name]
        lines, below = [f"# HELP {name} {text}", f"# TYPE {name} histogram"], 0
        for bound, count in zip(bounds, self._buckets[name], strict=False):
            below += count
            lines.append(f'{name}_bucket{{le="{bound:g}"}} {below}')
        total = below + self._buckets[name][-1]
        return [
            *lines,
            f'{name}_bucket{{le="+Inf"}} {total}',
            f"{name}_sum {self._sums[name]:.9g}",
            f"{name}_count {total}",
        ]
