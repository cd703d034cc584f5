"""Functions that run in background threads, of which a caller waits only for the one it needs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from typing import NamedTuple

THREAD_NAME = "tilefold-build"
# Most threads that compile kernels. A quarter of a compilation is Python, of which one thread runs
# at a time. More threads would wait for each other, and hold up the thread that needs a kernel.
MAX_THREADS = 4


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Task(NamedTuple):
    """A function that waits for a thread.

    Attributes:
        key: identifies what the function computes. One task of a key waits or runs at a time.
        function: the function.
        future: finished when the function is. It has no result.
    """

    key: Hashable
    function: Callable[[], object]
    future: Future[None]


class BackgroundTasks:
    """Runs functions in a few threads, in the order in which they were started.

    Threads exist only while functions wait for them, so that none is left at the end of a process.
    The process then waits for functions that run, and drops the others.

    Args:
        max_threads: largest number of threads.
    """

    def __init__(self, max_threads: int) -> None:
        """Prepare to run functions; no thread is started yet.

        Args:
            max_threads: the largest number of threads.
        """
        self._max_threads = max_threads
        self._forget_all()
        # A forked process has no threads, which would finish what the futures wait for.
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_all)

    def _forget_all(self) -> None:
        """Forget all tasks and threads."""
        self._lock = threading.Lock()
        self._waiting: deque[_Task] = deque()
        self._futures: dict[Hashable, Future[None]] = {}  # of tasks that wait or run
        self._n_threads = 0

    def start(self, key: Hashable, function: Callable[[], object]) -> None:
        """Run a function in a thread, unless one with this key waits or runs already.

        Its result and its errors are dropped, so the function must store its result itself. Code
        that needs the result and finds none calls the function again, which raises the error there.

        Args:
            key: identifies what the function computes, such as a kernel.
            function: the function. It may run in any thread.
        """
        with self._lock:
            is_ending = not threading.main_thread().is_alive()
            if is_ending or key in self._futures:
                return
            future: Future[None] = Future()
            self._futures[key] = future
            self._waiting.append(_Task(key, function, future))
            if self._n_threads >= self._max_threads:
                return
            self._n_threads += 1
        threading.Thread(target=self._work, name=THREAD_NAME).start()

    def wait_for(self, key: Hashable) -> None:
        """Wait until the function with this key has finished, if it runs.

        A function that still waits for a thread is dropped: the caller runs it faster itself.
        """
        with self._lock:
            future = self._futures.get(key)
            if future is None:
                return
            if future.cancel():
                del self._futures[key]
                return
        wait([future])

    def _work(self) -> None:
        """Run waiting functions until there are none, or the process ends."""
        while True:
            with self._lock:
                if not threading.main_thread().is_alive():
                    self._drop_waiting()
                if not self._waiting:
                    self._n_threads -= 1
                    return
                key, function, future = self._waiting.popleft()
                if not future.set_running_or_notify_cancel():
                    continue
            with contextlib.suppress(Exception):  # a caller that needs the result gets the error
                function()
            with self._lock:
                del self._futures[key]
            future.set_result(None)

    def _drop_waiting(self) -> None:
        """Drop all functions that wait for a thread. The caller holds the lock."""
        for task in self._waiting:
            if task.future.cancel():
                del self._futures[task.key]
        self._waiting.clear()


KERNEL_BUILDS = BackgroundTasks(min(MAX_THREADS, usable_cores()))
