"""Threads ahead of the device and behind it: order, errors, and an end to everything; batches cut
by tokens.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

from tests.refusals import refused
from tilefold.pipeline.ragged import TokenIds, batches_by_tokens, offsets_of
from tilefold.pipeline.threads import BackgroundWorker, Prefetcher
from tilefold.pipeline.truncation import counting_truncation

EARLIER_THREADS: frozenset[threading.Thread] = frozenset()


@pytest.fixture(autouse=True)
def earlier_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the threads of other tests, such as those of servers and of trainers that collate."""
    monkeypatch.setattr(f"{__name__}.EARLIER_THREADS", frozenset(threading.enumerate()))


def pipeline_threads() -> list[threading.Thread]:
    """The running threads of pipelines that this test has started."""
    return [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("tilefold-") and thread not in EARLIER_THREADS
    ]


def test_items_come_in_order_and_no_further_ahead_than_asked() -> None:
    made: list[int] = []

    def items() -> Iterator[int]:
        for number in range(20):
            made.append(number)
            yield number

    with Prefetcher(items(), 3) as ahead:
        time.sleep(0.2)
        assert len(made) <= 5, "three wait, one is in the thread's hands"
        assert list(ahead) == list(range(20))
    assert not pipeline_threads()


def test_an_error_comes_after_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise KeyError("two")

    got: list[int] = []
    with Prefetcher(items(), 3) as ahead, pytest.raises(KeyError, match="two"):
        for item in ahead:
            got.append(item)
    assert got == [1] and not pipeline_threads()


def test_leaving_early_ends_the_thread_that_waits_for_room_or_for_an_item() -> None:
    for rest in (iter(range(1, 10**9)), itertools.repeat(None)):
        stop = threading.Event()
        with (
            Prefetcher(itertools.chain([None, 0], rest), 1, stop=stop) as first,
            Prefetcher(first, 1, stop=stop) as second,
        ):
            assert next(iter(second)) == 0
        assert not pipeline_threads()
    with pytest.raises(KeyboardInterrupt), Prefetcher(iter(range(10**9)), 1):
        raise KeyboardInterrupt
    assert not pipeline_threads()


def test_jobs_run_in_order_and_what_was_submitted_survives_an_error_elsewhere() -> None:
    done: list[int] = []
    with pytest.raises(ZeroDivisionError), BackgroundWorker(2) as behind:
        for number in range(5):
            behind.submit(lambda n=number: done.append(n))  # type: ignore[misc]
        raise ZeroDivisionError
    assert done == [0, 1, 2, 3, 4] and not pipeline_threads()


def test_an_error_of_a_job_is_raised_once_it_is_known_and_later_jobs_do_not_run() -> None:
    done: list[int] = []
    with pytest.raises(OSError, match="full"), BackgroundWorker(2) as behind:
        behind.submit(lambda: (_ for _ in ()).throw(OSError("full")))
        refused(OSError, "full", behind.drain)
        behind.submit(lambda: done.append(1))
    assert not done and not pipeline_threads()
    with pytest.raises(OSError, match="full"), BackgroundWorker(2) as behind:
        behind.submit(lambda: (_ for _ in ()).throw(OSError("full")))
    assert not pipeline_threads()


def packed(lists: list[list[int]]) -> TokenIds:
    flat = np.array([token for row in lists for token in row], np.int64)
    return TokenIds(flat, flat + 1, offsets_of(np.array([len(row) for row in lists], np.int64)))


def rows(ids: TokenIds) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids.ids, ids.offsets[1:-1])] if len(ids) else []


@given(st.lists(st.lists(st.integers(1, 9), max_size=5), min_size=1, max_size=8), st.randoms())
def test_texts_are_taken_in_any_order(lists: list[list[int]], random: object) -> None:
    order = list(range(len(lists)))
    random.shuffle(order)  # type: ignore[attr-defined]
    taken = packed(lists).take(np.array(order, np.int64))
    assert rows(taken) == [lists[i] for i in order]
    assert (taken.positions == taken.ids + 1).all() and taken.lengths.tolist() == [
        len(lists[i]) for i in order
    ]


@given(
    st.lists(st.integers(0, 40), max_size=60),
    st.integers(1, 100),
    st.none() | st.integers(1, 7),
)
def test_every_text_is_in_one_batch_within_its_limits(
    lengths: list[int],
    budget: int,
    most: int | None,
) -> None:
    sizes = np.array(lengths, np.int64)
    batches = list(batches_by_tokens(sizes, budget, most))
    assert sorted(np.concatenate([*batches, np.zeros(0, np.int64)]).tolist()) == list(
        range(len(lengths)),
    )
    for batch in batches:
        held = sizes[batch]
        assert len(batch) == 1 or int(held.sum()) <= budget
        assert most is None or len(batch) <= most
        assert (np.diff(held) <= 0).all()


def test_texts_that_a_tokenizer_without_rust_cuts_are_counted_however_it_is_called() -> None:
    tokenizer, long = ByT5Tokenizer(), "many bytes" * 3
    cut: dict[str, Any] = {"truncation": True, "max_length": 10}
    with counting_truncation() as actual:
        tokenizer([long, "a"], **cut)
        tokenizer(long, **cut, return_tensors="pt")
        tokenizer(["a", long], None, None, **cut, return_attention_mask=False)
        tokenizer([long], truncation="do_not_truncate")
    assert [(call.n_texts, list(call.truncated)) for call in actual.calls] == [
        (2, [0]),
        (1, [0]),
        (2, [1]),
        (1, []),
    ]


def test_batches_are_nearly_equal() -> None:
    assert [len(batch) for batch in batches_by_tokens(np.full(100, 10, np.int64), 400)] == [
        34,
        34,
        32,
    ]
