"""Memory, a lock and a warning that all captures of CUDA graphs share."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterator

import torch

from tilefold._internal.garbage import garbage_collection_paused
from tilefold._internal.memory import cached_device_bytes

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
        stream: the CUDA stream of warm-ups and captures. Replays run on the caller's stream.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        # The graphs that were captured in the pool and still exist.
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Run the block on the CUDA stream of captures, in order with the current stream.

        Its work waits for earlier work of the current stream, whose later work waits for it.
        """
        current_stream = torch.cuda.current_stream()
        self.stream.wait_stream(current_stream)
        with torch.cuda.stream(self.stream):
            yield
        current_stream.wait_stream(self.stream)

    @contextlib.contextmanager
    def capturing(
        self,
        graph: torch.cuda.CUDAGraph,
        *,
        releases_cache: bool = False,
    ) -> Iterator[None]:
        """Record the work of the context into a graph instead of running it.

        Other threads may use the GPU in the meantime, and do not wait. ``torch.cuda.graph`` would
        first wait for the GPU and free torch's cached memory, so that all threads would wait, and
        would have to allocate their memory again. A server captures graphs of a new model while the
        old one answers.

        The garbage collector is paused, because it could delete another graph, which CUDA does not
        allow during a capture.

        Args:
            graph: the graph.
            releases_cache: whether to free the memory that torch caches for new tensors, which
                graphs cannot use. Pass True for large graphs. By default it is freed only if it is
                more than the free memory of the GPU.

        Raises:
            Exception: the error of the context, or that of CUDA if the work cannot be captured.
        """
        if releases_cache or _most_free_memory_is_cached(self.stream.device):
            torch.cuda.synchronize(self.stream.device)
            torch.cuda.empty_cache()
        self._replace_freed_pool()
        with garbage_collection_paused(), torch.cuda.stream(self.stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                # The stream leaves the capture. CUDA's error is only a consequence.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        self._graphs.add(graph)

    def _replace_freed_pool(self) -> None:
        """Take a new memory pool if no graph uses the pool any more.

        torch frees a pool with its last graph, and refuses to capture in it from then on.
        """
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()


def _most_free_memory_is_cached(device: torch.device) -> bool:
    """Return whether torch caches more memory of a GPU than the GPU has free."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return cached_device_bytes(device) > free_bytes


def warn_capture_failed(consequence: str, error: Exception, stacklevel: int = 3) -> None:
    """Warn that the capture of a graph failed, and what is slower because of that.

    Args:
        consequence: a sentence without its period, such as ``"BertModel trains without CUDA
            graphs"``.
        error: the error of the capture.
        stacklevel: how many calls above this function the warning is attributed to.
    """
    lines = [line for line in str(error).splitlines() if line.strip()]
    reason = " ".join(lines[:_QUOTED_LINES])
    warnings.warn(
        f"{consequence}: {type(error).__name__}: {reason}. This is slower; results do not change.",
        UserWarning,
        stacklevel=stacklevel,
    )
