"""CUDA graphs of searches with one query, which launch a whole search by one call.

A search of one query among a million documents keeps a GPU busy for less time than Python and torch
need to launch it. A graph is launched by one call.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tilefold._internal.cuda_graphs import (
    WARM_UP_RUNS,
    GraphMemory,
    capture_lock,
    warn_capture_failed,
)

# Graphs of an index. Each holds the scores of all documents, and serves one thread at a time.
MAX_GRAPHS = 4
# Searches of a kind before a graph of them is captured, which takes longer than some searches.
SEARCHES_BEFORE_CAPTURE = 4

GraphT = TypeVar("GraphT")


class QueryGraph:
    """CUDA graph of a function of fixed buffers, and the buffers of its results.

    One thread may use it at a time, and waits for the results before another one does.

    Attributes:
        inputs: buffers that the function reads. The caller writes them before a replay.
        device_results: results on the device, which the next replay overwrites.
        host_results: copies in pinned memory of the results that the CPU reads.
    """

    def __init__(
        self,
        device: torch.device,
        inputs: Sequence[Tensor],
        function: Callable[[], Sequence[Tensor]],
        n_device_only: int = 0,
    ) -> None:
        """Capture a function and the copies of its results to the CPU.

        Args:
            device: the GPU.
            inputs: buffers that the function reads.
            function: launches the search, and returns results on the device.
            n_device_only: number of results, counted from the first, that stay on the GPU.
        """
        self.inputs = inputs
        self._device = device
        # The graph reads and writes the buffers of the function, which must not be freed.
        self._function = function
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):
            memory = GraphMemory()
            # The first calls compile or load kernels, which a capture may not do.
            with memory.warming_up():
                for _ in range(WARM_UP_RUNS):
                    results = function()
            self.host_results = [
                torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
                for result in results[n_device_only:]
            ]
            with memory.capturing(self._graph):
                self.device_results = list(function())
                copied_results = self.device_results[n_device_only:]
                for host_result, result in zip(self.host_results, copied_results, strict=True):
                    host_result.copy_(result, non_blocking=True)

    def launch(self) -> None:
        """Launch the search on the current stream."""
        self._graph.replay()

    def wait(self) -> None:
        """Wait until all work of the current stream has finished."""
        torch.cuda.current_stream(self._device).synchronize()


class GraphPool(Generic[GraphT]):
    """Graphs of an index by kind of search, each used by one thread at a time.

    A search that gets no graph is launched step by step, with the same results. These are the
    first searches of a kind, and searches that begin while all graphs are in use.

    Args:
        device: the device of the index. Only GPUs have graphs.
        is_enabled: whether graphs are captured on a GPU.
    """

    def __init__(self, device: torch.device, *, is_enabled: bool = True) -> None:
        self._is_enabled = is_enabled and device.type == "cuda"
        self._lock = threading.Lock()
        self._idle: defaultdict[Hashable, list[GraphT]] = defaultdict(list)
        self._n_searches: Counter[Hashable] = Counter()
        self._n_graphs = 0

    def take(self, kind: Hashable, capture: Callable[[], GraphT]) -> GraphT | None:
        """Take a CUDA graph for one search. No other search gets it until it is given back.

        Args:
            kind: key of the searches that one graph can replay, such as their shapes.
            capture: function that captures a graph for this kind of search.

        Returns:
            An idle graph, or a new one after enough searches of this kind; ``None`` otherwise.
        """
        if not self._is_enabled:
            return None
        with self._lock:
            idle = self._idle[kind]
            if idle:
                return idle.pop()
            self._n_searches[kind] += 1
            is_due = self._n_searches[kind] > SEARCHES_BEFORE_CAPTURE
            if not is_due or self._n_graphs >= MAX_GRAPHS:
                return None
            self._n_graphs += 1
        try:
            with capture_lock, torch.inference_mode(False), torch.no_grad():
                return capture()
        except Exception as error:  # too little memory, or kernels that cannot be built
            self._is_enabled = False
            warn_capture_failed(
                "single queries are searched without CUDA graphs, which could not be captured",
                error,
                stacklevel=6,
            )
            return None

    def give_back(self, kind: Hashable, graph: GraphT) -> None:
        """Let other searches use a graph whose results have been read.

        After an error of the GPU it is not given back, since its buffers may still be in use.
        """
        with self._lock:
            self._idle[kind].append(graph)
