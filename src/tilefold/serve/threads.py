"""Pool of daemon threads, for functions that may wait; how threads share the time of Python."""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import FrameType
from typing import Any, Generic, TypeVar

__all__ = ["Call", "DaemonPool", "pausing_regularly", "switch_interval"]

T = TypeVar("T")

# A thread that pauses regularly computes this long between two pauses of this length.
_BUSY_SECONDS = 0.002
_PAUSE_SECONDS = 0.01


class Call(Generic[T]):
    """A function that is to be called once in a thread, and the future of its result."""

    def __init__(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> None:
        """Prepare to call a function.

        Args:
            function: the function.
            arguments: positional arguments of the function.
        """
        self.result = Future[T]()
        self._function = function
        self._arguments = arguments

    def run(self) -> None:
        """Call the function, and store its result or error, unless the future was cancelled."""
        result, function, arguments = self.result, self._function, self._arguments
        # The traceback of an error refers to this frame and to those of the callers. They must not
        # refer to the arguments, such as an index that must be released, or to the error itself.
        del self.result, self._function, self._arguments
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(function(*arguments))
        except BaseException as error:  # raised where the result is awaited
            result.set_exception(error)
        finally:
            del result, function, arguments

    def release(self) -> None:
        """Forget the function and its arguments, because the call will not run."""
        del self.result, self._function, self._arguments


class _CallQueue:
    """Calls that wait for the threads of a pool.

    The threads refer to the queue, and not to the pool. A pool that was not closed can therefore
    be deleted.
    """

    def __init__(self) -> None:
        """Create an open queue without calls."""
        self.changed = threading.Condition()  # a call was added, or the queue was closed
        self.waiting: deque[Call[Any]] = deque()
        self.n_idle = 0  # threads that wait for a call
        self.closed = False

    def close(self) -> None:
        """Let the threads end, once no calls wait."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def drop_cancelled(self, call: Call[Any], result: Future[Any]) -> None:
        """Remove a cancelled call from the queue, and forget its arguments.

        Args:
            call: the call.
            result: the future of its result. Nothing happens if it was not cancelled.
        """
        if not result.cancelled():
            return
        with self.changed:
            if call not in self.waiting:
                return  # a thread has taken the call; it sees the cancellation and does not run it
            self.waiting.remove(call)
        call.release()

    def run_calls(self) -> None:
        """Run calls until the queue is closed; runs in a thread."""
        while self._run_next_call():
            pass

    def _run_next_call(self) -> bool:
        """Wait for a call and run it.

        Returns:
            Whether there was a call; False if the queue is closed.
        """
        with self.changed:
            self.n_idle += 1
            while not (self.waiting or self.closed):
                self.changed.wait()
            self.n_idle -= 1
            if not self.waiting:
                return False
            call = self.waiting.popleft()
        call.run()
        return True


class DaemonPool:
    """Calls functions in a limited number of daemon threads, which are kept for later calls.

    The threads end when the pool is closed or deleted. A ``ThreadPoolExecutor`` would not do: the
    process waits for its threads before it ends.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        """Create a pool without threads, which start when they are needed.

        Args:
            name: beginning of the names of the threads.
            max_threads: largest number of threads. Further calls wait in their order.
        """
        self._name = name
        self._max_threads = max_threads
        self._threads: list[threading.Thread] = []
        self._calls = _CallQueue()
        finalizer = weakref.finalize(self, self._calls.close)
        finalizer.atexit = False  # daemon threads do not block the end of the process

    def submit(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call a function in a thread.

        Args:
            function: the function.
            arguments: positional arguments of the function.

        Returns:
            The future of its result. Cancelling it drops a call that still waits for a thread.

        Raises:
            RuntimeError: if the pool is closed, or the system allows no first thread.
        """
        calls = self._calls
        call = Call(function, arguments)
        result = call.result  # read before a thread runs the call, which deletes the attribute
        with calls.changed:
            if calls.closed:
                raise RuntimeError("submit: expected an open pool, got a closed one")
            lacks_thread = len(calls.waiting) >= calls.n_idle
            if lacks_thread and len(self._threads) < self._max_threads:
                self._start_thread()
            calls.waiting.append(call)
            calls.changed.notify()
        # Without this, cancelled calls would stay in the queue while all threads are busy.
        result.add_done_callback(functools.partial(calls.drop_cancelled, call))
        return result

    def close(self, error: BaseException, seconds: float) -> bool:
        """Refuse the calls that wait, and end the threads.

        Args:
            error: the error of the calls that wait.
            seconds: how long to wait for the calls that run. Later they are abandoned.

        Returns:
            Whether all threads have ended.
        """
        calls = self._calls
        with calls.changed:
            refused = list(calls.waiting)
            calls.waiting.clear()
            calls.close()
        for call in refused:
            is_cancelled = not call.result.set_running_or_notify_cancel()
            if not is_cancelled:
                call.result.set_exception(error)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _start_thread(self) -> None:
        """Start another thread. The caller must hold the lock of the queue.

        If the system allows no more threads, calls wait for the threads that exist.

        Raises:
            RuntimeError: if the system allows no more threads, and the pool has none.
        """
        thread = threading.Thread(
            target=self._calls.run_calls,
            name=f"{self._name}_{len(self._threads)}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            return
        self._threads.append(thread)


@contextmanager
def pausing_regularly() -> Iterator[None]:
    """Let this thread pause for 10 ms after each 2 ms of its Python code, within the context.

    Loading a model takes a fraction of a second of Python code. Without pauses, the requests of
    this time wait for the GIL at each of their steps, since Python's threads have no priorities.
    With pauses, loading takes several times as long, and a request waits for one or two short
    stretches of it. A single call of compiled code that holds the GIL cannot be interrupted.

    Python calls a thread's profile function at each call and return, which is when the thread can
    pause. A thread that is being profiled does not pause.
    """
    if sys.getprofile() is not None:
        yield
        return
    last_pause = time.perf_counter()

    def pause_if_due(_frame: FrameType, _event: str, _argument: object) -> None:
        """Pause if this thread has computed for long enough."""
        nonlocal last_pause
        if time.perf_counter() - last_pause > _BUSY_SECONDS:
            time.sleep(_PAUSE_SECONDS)
            last_pause = time.perf_counter()

    sys.setprofile(pause_if_due)
    try:
        yield
    finally:
        sys.setprofile(None)


# The intervals of all contexts that are open, and Python's interval without them.
_open_intervals: list[float] = []
_interval_of_python = 0.0
_intervals_lock = threading.Lock()


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Limit how long a thread may compute in Python before another one runs, within the context.

    The limit (``sys.setswitchinterval``) applies to all threads of the process. Of several open
    contexts, the shortest time applies.

    Args:
        seconds: the time; Python's default is 0.005.
    """
    global _interval_of_python  # noqa: PLW0603 - it belongs to the process
    with _intervals_lock:
        if not _open_intervals:
            _interval_of_python = sys.getswitchinterval()
        _open_intervals.append(seconds)
        sys.setswitchinterval(min(_open_intervals))
    try:
        yield
    finally:
        with _intervals_lock:
            _open_intervals.remove(seconds)
            sys.setswitchinterval(min(_open_intervals, default=_interval_of_python))
