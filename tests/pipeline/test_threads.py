"""Threads ahead of the device and behind it: order, errors, and an end to everything."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tilefold.pipeline.ahead import Ahead, Behind


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("tilefold-")]


def test_items_come_in_order_and_no_further_ahead_than_asked() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(20):
            made.append(number)
            yield number

    with Ahead(items(), 3) as ahead:
        time.sleep(0.2)
        assert len(made) <= 5, "three wait, one is in the thread's hands"
        assert list(ahead) == list(range(20))
    assert not ours()


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("two")

    got: list[int] = []
    with Ahead(items(), 3) as ahead, pytest.raises(KeyError, match="two"):
        for item in ahead:
            got.append(item)
    assert got == [1] and not ours()


def test_leaving_early_ends_the_thread_that_waits_for_room() -> None:
    with Ahead(iter(range(10**9)), 1) as ahead:
        assert next(iter(ahead)) == 0
    assert not ours()
    with pytest.raises(KeyboardInterrupt), Ahead(iter(range(10**9)), 1):
        raise KeyboardInterrupt
    assert not ours()


def test_jobs_run_in_order_and_what_was_submitted_survives_an_error_elsewhere() -> None:
    done: list[int] = []
    with pytest.raises(ZeroDivisionError), Behind(2) as behind:
        for number in range(5):
            behind.submit(lambda n=number: done.append(n))  # type: ignore[misc]
        raise ZeroDivisionError
    assert done == [0, 1, 2, 3, 4] and not ours()


def test_an_error_of_a_job_is_raised_once_it_is_known_and_later_jobs_do_not_run() -> None:
    done: list[int] = []
    with pytest.raises(OSError, match="full"), Behind(2) as behind:
        behind.submit(lambda: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            behind.drain()
        behind.submit(lambda: done.append(1))
    assert not done and not ours()
    with pytest.raises(OSError, match="full"), Behind(2) as behind:
        behind.submit(lambda: (_ for _ in ()).throw(OSError("full")))
    assert not ours()
