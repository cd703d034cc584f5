"""The threads of searches are daemon threads, which are used again and end with their pool."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from tests.waiting import WAIT_SECONDS, wait_until
from tilefold.serve.threads import DaemonPool, pausing_regularly, switch_interval

ERROR = RuntimeError("closing")


@pytest.fixture
def pool() -> Iterator[DaemonPool]:
    """A pool of at most two threads."""
    pool = DaemonPool("tested", 2)
    yield pool
    pool.close(ERROR, WAIT_SECONDS)


def test_one_thread_is_used_again_for_calls_one_after_another(pool: DaemonPool) -> None:
    threads = set()
    for _ in range(20):
        threads.add(pool.submit(threading.current_thread).result(WAIT_SECONDS))
        wait_until(lambda: pool._calls.n_idle == 1)  # the thread waits for its next call
    assert len(threads) == 1
    assert all(thread.daemon for thread in threads)


def test_calls_at_the_same_time_have_threads_of_their_own_up_to_the_limit(
    pool: DaemonPool,
) -> None:
    barrier = threading.Barrier(2)
    pairs = [pool.submit(barrier.wait, WAIT_SECONDS) for _ in range(2)]
    assert sorted(pair.result(WAIT_SECONDS) for pair in pairs) == [0, 1]
    released = threading.Event()
    blocked = [pool.submit(released.wait, WAIT_SECONDS) for _ in range(2)]
    waiting = pool.submit(threading.current_thread)
    assert not waiting.done()
    released.set()
    assert waiting.result(WAIT_SECONDS).name in ("tested_0", "tested_1")
    assert all(call.result(WAIT_SECONDS) for call in blocked)


def test_a_cancelled_call_that_waits_for_a_thread_does_not_run(pool: DaemonPool) -> None:
    released = threading.Event()
    blocked = [pool.submit(released.wait, WAIT_SECONDS) for _ in range(2)]
    names: list[str] = []
    assert pool.submit(names.append, "cancelled").cancel()
    released.set()
    assert all(call.result(WAIT_SECONDS) for call in blocked)
    pool.submit(names.append, "run").result(WAIT_SECONDS)
    assert names == ["run"]


def test_cancelled_calls_do_not_add_up_while_all_threads_are_busy(pool: DaemonPool) -> None:
    released = threading.Event()
    blocked = [pool.submit(released.wait, WAIT_SECONDS) for _ in range(2)]
    index = Index()
    reference = weakref.ref(index)
    result = pool.submit(index.search, False)
    gc.disable()
    try:
        assert result.cancel()
        del index
        assert reference() is None
    finally:
        gc.enable()
        released.set()
    assert all(call.result(WAIT_SECONDS) for call in blocked)
    assert pool.submit(divmod, 7, 2).result(WAIT_SECONDS) == (3, 1)


def test_calls_wait_for_the_threads_that_there_are_if_the_system_allows_no_more(
    pool: DaemonPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        pool.submit(divmod, 7, 2)
    monkeypatch.setattr(threading.Thread, "start", start)
    released = threading.Event()
    blocked = pool.submit(released.wait, WAIT_SECONDS)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    waiting = pool.submit(divmod, 7, 2)
    released.set()
    assert waiting.result(WAIT_SECONDS) == (3, 1)
    assert blocked.result(WAIT_SECONDS)
    assert pool.close(ERROR, WAIT_SECONDS)


def test_an_error_is_raised_where_the_result_is_awaited(pool: DaemonPool) -> None:
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(WAIT_SECONDS)
    assert pool.submit(divmod, 7, 2).result(WAIT_SECONDS) == (3, 1)


class Index:
    """Stands for an index that a search reads."""

    def search(self, fails: bool) -> int:
        if fails:
            raise KeyError("fails")
        return 1


@pytest.mark.parametrize("fails", [False, True], ids=["result", "error"])
def test_a_finished_call_keeps_nothing_in_memory(fails: bool) -> None:
    pool = DaemonPool("tested", 1)
    index = Index()
    reference = weakref.ref(index)
    result = pool.submit(index.search, fails)
    has_failed = result.exception(WAIT_SECONDS) is not None
    assert has_failed == fails
    assert pool.close(ERROR, WAIT_SECONDS)
    gc.disable()
    try:
        del index, result
        assert reference() is None
    finally:
        gc.enable()


def test_the_threads_of_a_pool_that_was_deleted_end_after_the_calls_that_wait() -> None:
    pool = DaemonPool("tested", 1)
    released = threading.Event()
    thread = pool.submit(threading.current_thread).result(WAIT_SECONDS)
    blocked = pool.submit(released.wait, WAIT_SECONDS)
    waiting = pool.submit(divmod, 7, 2)
    del pool
    released.set()
    assert blocked.result(WAIT_SECONDS)
    assert waiting.result(WAIT_SECONDS) == (3, 1)
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()


def test_closing_refuses_waiting_calls_and_abandons_those_that_run() -> None:
    pool = DaemonPool("tested", 1)
    started = threading.Event()
    released = threading.Event()

    def block() -> bool:
        started.set()
        return released.wait(WAIT_SECONDS)

    running = pool.submit(block)
    waiting = pool.submit(len, ())
    assert started.wait(WAIT_SECONDS)
    assert not pool.close(ERROR, 0.05)
    assert waiting.exception(WAIT_SECONDS) is ERROR
    released.set()
    assert running.result(WAIT_SECONDS)
    assert pool.close(ERROR, WAIT_SECONDS)
    with pytest.raises(RuntimeError, match="expected an open pool"):
        pool.submit(len, ())


def test_the_shortest_switch_interval_of_all_open_contexts_applies() -> None:
    before = sys.getswitchinterval()
    long, short = switch_interval(before / 4), switch_interval(before / 8)
    with long:
        short.__enter__()
        assert sys.getswitchinterval() == pytest.approx(before / 8)
    # The outer context ended first, as those of two indexes that are opened at the same time.
    assert sys.getswitchinterval() == pytest.approx(before / 8)
    short.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(before)


def _call_for(seconds: float) -> int:
    """Call a function of Python for some time of this thread, and return the number of calls."""
    n_calls = 0
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        n_calls += 1
    return n_calls


def test_a_thread_pauses_regularly_within_the_context() -> None:
    started = time.perf_counter()
    with pausing_regularly():
        assert _call_for(0.1) > 0
    seconds = time.perf_counter() - started
    assert seconds > 0.1 + 20 * 0.01  # up to 50 pauses of 10 ms
    assert sys.getprofile() is None


def test_a_thread_that_is_profiled_does_not_pause() -> None:
    events = []

    def record(*arguments: object) -> None:
        events.append(arguments)

    sys.setprofile(record)
    try:
        with pausing_regularly():
            assert sys.getprofile() is record
        assert sys.getprofile() is record
    finally:
        sys.setprofile(None)
    assert events


def test_a_thread_does_not_pause_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), pausing_regularly():
        1 / 0  # noqa: B018 - the error is what is tested
    assert sys.getprofile() is None
