"""Capture of CUDA graphs: memory that graphs share, a cache of graphs, and settings of torch.

It serves the graphs of encoding and those of training steps.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, TypeVar

import torch

from tilefold._internal.garbage import garbage_collection_paused
from tilefold.ops.implementations import tf32_allowed

Key = TypeVar("Key", bound=Hashable)
Graph = TypeVar("Graph")

# Runs of a function before its first capture. Libraries initialise themselves and kernels are
# compiled in these runs, because neither may happen during a capture.
WARM_UP_RUNS = 2
# Held during a warm-up and a capture. Concurrent captures would record the same random generator.
capture_lock = threading.Lock()
# Number of lines of an error message that a warning quotes.
_QUOTED_LINES = 2


class GraphMemory:
    """Memory pool and CUDA stream in which several graphs are captured.

    The graphs share all memory except for their inputs and outputs, so only one of them may run at
    a time.

    Attributes:
        pool: the handle of the memory pool.
        stream: the CUDA stream of warm-ups and captures. Replays run on the caller's stream.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run on the capture stream, after earlier and before later work of the current stream."""
        current_stream = torch.cuda.current_stream()
        self.stream.wait_stream(current_stream)
        with torch.cuda.stream(self.stream):
            yield
        current_stream.wait_stream(self.stream)

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record the work of the context into a graph instead of running it.

        Other threads may use the GPU in the meantime. The garbage collector is paused, because it
        could delete another graph, which CUDA does not allow during a capture.
        """
        capture = torch.cuda.graph(
            graph,
            pool=self.pool,
            stream=self.stream,
            capture_error_mode="thread_local",
        )
        with garbage_collection_paused(), capture:
            yield


class GraphCache(OrderedDict[Key, Graph]):
    """LRU cache of captured graphs, ordered from the least to the most recently used.

    Args:
        max_graphs: the largest number of graphs that are cached.
    """

    def __init__(self, max_graphs: int) -> None:
        super().__init__()
        self.max_graphs = max_graphs

    def use(self, key: Key) -> Graph | None:
        """Return the graph of a key and mark it as the most recently used; None if it is missing.

        Raises:
            TypeError: if the key is not hashable.
        """
        graph = self.get(key)
        if graph is not None:
            self.move_to_end(key)
        return graph

    def make_space(self) -> None:
        """Drop the least recently used graph if the cache is full."""
        if len(self) >= self.max_graphs:
            self.popitem(last=False)


class NumericSettings(NamedTuple):
    """Global settings of torch that a captured graph cannot follow.

    Attributes:
        autocast: the dtype of autocast; ``None`` if it is off.
        allows_tf32: whether fp32 products may use TF32.
        deterministic: whether torch uses deterministic algorithms.
    """

    autocast: torch.dtype | None
    allows_tf32: bool
    deterministic: bool


def numeric_settings(device_type: str) -> NumericSettings:
    """Return the current settings of torch for a type of device, such as ``"cuda"``."""
    return NumericSettings(
        autocast=autocast_dtype(device_type),
        allows_tf32=tf32_allowed(torch.float32),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype of autocast on a type of device, or None if autocast is off."""
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def uncached_autocast(device_type: str) -> AbstractContextManager[object]:
    """Return a context that repeats the current autocast without its cache of converted weights.

    A captured graph would keep reading the cached copies after the weights have changed.

    Args:
        device_type: the type of the device, such as ``"cuda"``.
    """
    dtype = autocast_dtype(device_type)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype, cache_enabled=False)


def warn_capture_failed(consequence: str, error: Exception) -> None:
    """Warn that the capture of a graph failed, and what is slower because of that.

    Args:
        consequence: a sentence without its period, such as ``"BertModel trains without CUDA
            graphs"``.
        error: the error of the capture.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[:_QUOTED_LINES])
    warnings.warn(
        f"{consequence}: {type(error).__name__}: {reason}. This is slower; results do not change.",
        UserWarning,
        stacklevel=3,
    )
