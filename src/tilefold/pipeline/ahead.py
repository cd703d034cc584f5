"""Threads that work ahead of the device and behind it, with bounded queues; errors come out where
the results do.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_POLL_SECONDS = (
    0.1  # how soon a thread that waits for a full or empty queue sees that it should stop
)
_END = object()


class Ahead(Generic[T]):
    """The items of an iterator, computed by a thread, at most `depth` ahead of who takes them.

    An exception of the iterator is raised by ``next`` after the items before it. Leaving the
    context stops the thread at its next item and waits for it, so that nothing runs on when the
    consumer has failed. An item that is None says that there is none yet, and is not given on.
    Threads that take from one another share what stops them.
    """

    def __init__(
        self,
        items: Iterable[T | None],
        depth: int,
        name: str = "tilefold-ahead",
        stop: threading.Event | None = None,
    ) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._stop = threading.Event() if stop is None else stop
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, args=(items,), name=name, daemon=True)
        self._thread.start()

    def _work(self, items: Iterable[T | None]) -> None:
        try:
            for item in items:
                if self._stop.is_set() or (item is not None and not self._put(item)):
                    return
        except BaseException as error:  # whatever it is belongs to the consumer
            self._error = error
        self._put(_END)

    def _put(self, item: Any) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Iterator[T]:
        while not self._stop.is_set():
            try:
                item = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if item is _END:
                break
            yield item
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Ahead[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class Behind:
    """Runs functions in order in a thread, at most `depth` of them waiting.

    When one raises, the later ones are dropped, and the error is raised by the next :meth:`submit`
    or :meth:`drain`. Leaving the context runs what was submitted, even after an error elsewhere,
    and waits for it.
    """

    def __init__(self, depth: int, name: str = "tilefold-behind") -> None:
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(depth)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                if self._error is None:
                    job()
            except BaseException as error:
                self._error = error
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after those before it; waits while the queue is full."""
        self._raise()
        self._queue.put(job)

    def drain(self) -> None:
        """Wait until everything that was submitted has run."""
        self._queue.join()
        self._raise()

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if kind is None:
            self._raise()
