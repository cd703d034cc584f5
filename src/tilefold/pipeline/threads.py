"""Background threads with bounded queues: prefetching of items and execution of jobs in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# How often a thread that waits for a full or empty queue checks whether it should stop.
_POLL_SECONDS = 0.1
_END = object()


class Prefetcher(Generic[T]):
    """Iterates over items that a background thread computes in advance.

    An exception of the iterable is raised in the consumer, after the items before it. Leaving the
    context stops the thread at its next item and waits for it, so that no work continues after the
    consumer has failed.
    """

    def __init__(
        self,
        items: Iterable[T | None],
        depth: int,
        name: str = "tilefold-prefetcher",
        stop: threading.Event | None = None,
    ) -> None:
        """Start a thread that fills a queue with the items.

        Args:
            items: the iterable that the thread consumes. It may yield ``None`` while no item is
                ready, so that the thread can check whether to stop. A ``None`` is not queued.
            depth: largest number of items in the queue.
            name: name of the thread.
            stop: event that ends the thread; ``None`` creates one. Chained prefetchers share an
                event, so that they end together.
        """
        self._queue: queue.Queue[Any] = queue.Queue(depth)
        self._stop = threading.Event() if stop is None else stop
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._fill_queue,
            args=(items,),
            name=name,
            daemon=True,
        )
        self._thread.start()

    def _fill_queue(self, items: Iterable[T | None]) -> None:
        """Put the items and then the end marker into the queue, until the thread should stop."""
        try:
            for item in items:
                if self._stop.is_set():
                    return
                if item is not None and not self._put(item):
                    return
        except BaseException as error:  # the consumer raises it, whatever it is
            self._error = error
        self._put(_END)

    def _put(self, item: Any) -> bool:
        """Put an item into the queue; return False if the thread should stop instead."""
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

    def __iter__(self) -> Iterator[T]:
        """Yield the items of the thread, and raise its error at the end if it has one."""
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

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class BackgroundWorker:
    """Runs submitted functions one after another in a background thread.

    If a job raises, later jobs are dropped, and the next :meth:`submit` or :meth:`drain` raises its
    error. Leaving the context runs all submitted jobs and waits for them, even after an error in
    the body of the ``with`` statement.
    """

    def __init__(self, depth: int, name: str = "tilefold-worker") -> None:
        """Start a thread that runs the jobs of a queue.

        Args:
            depth: largest number of jobs in the queue. :meth:`submit` blocks while it is full.
            name: name of the thread.
        """
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(depth)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_jobs, name=name, daemon=True)
        self._thread.start()

    def _run_jobs(self) -> None:
        """Run the jobs of the queue in the worker's thread, until ``None`` is taken from it.

        After the first error, the remaining jobs are taken from the queue without running, so that
        :meth:`submit` never blocks for ever.
        """
        while True:
            job = self._queue.get()
            try:
                if job is None:
                    return
                if self._error is None:
                    job()
            except BaseException as error:
                self._error = error
            finally:
                self._queue.task_done()

    def _raise_job_error(self) -> None:
        """Raise the error of the first job that failed, if any."""
        if self._error is not None:
            raise self._error

    def submit(self, job: Callable[[], None]) -> None:
        """Append a job to the queue, waiting while it is full.

        Raises:
            BaseException: the error of an earlier job.
        """
        self._raise_job_error()
        self._queue.put(job)

    def drain(self) -> None:
        """Wait until all submitted jobs have run.

        Raises:
            BaseException: the error of a job.
        """
        self._queue.join()
        self._raise_job_error()

    def __enter__(self) -> BackgroundWorker:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if error_type is None:
            self._raise_job_error()
