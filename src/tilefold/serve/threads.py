"""Work of threads: portions in which requests take turns, and threads that may be left behind when the service ends."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

__all__ = ["PORTION", "Leavable", "portions"]

PORTION = 16_384  # characters, tokens or numbers that a thread works on before others have their turn
T = TypeVar("T")
_Job = tuple["Future[Any]", Callable[[], Any]]


def portions(items: Sequence[T], size: Callable[[Any], int] = len) -> Iterator[list[T]]:
    """Items in their order, as many at a time as have the size of a portion together, and at least one."""
    portion: list[T] = []
    total = 0
    for item in items:
        total += size(item)
        if portion and total > PORTION:
            yield portion
            portion, total = [], size(item)
        portion.append(item)
    if portion:
        yield portion


class Leavable(Executor):
    """A pool of daemon threads, whose work ends with the process; the standard one makes the process wait for it.

    Args:
        threads: of them.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``fn(*args, **kwargs)`` in a thread that is free, first come, first served.

        Raises:
            RuntimeError: the pool is closed.
        """
        if self._closed.is_set():
            raise RuntimeError("the pool is closed.")
        future: Future[Any] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            if self._closed.is_set():
                future.set_exception(RuntimeError("the pool is closed."))
                continue
            try:
                value = call()
            except BaseException as error:  # belongs to whoever waits
                future.set_exception(error)
            else:
                future.set_result(value)

    def leave(self, seconds: float) -> bool:
        """Begin nothing more, and wait so long for what runs; whether all threads have ended."""
        self._closed.set()
        for _ in self._threads:
            self._jobs.put(None)
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
