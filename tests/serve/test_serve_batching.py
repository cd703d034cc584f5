"""Batches by tokens, and inputs that fail in them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from tilefold.serve import batching
from tilefold.serve.batching import Lane
from tilefold.serve.errors import ServeError
from tilefold.serve.metrics import Metrics
from tilefold.serve.settings import Limits

PANIC = -99


class Panic(BaseException):
    """As ``pyo3_runtime.PanicException``, which tokenizers raises, is no ``Exception``."""


class Recorder:
    """Runs batches of numbers: doubles them, fails at negative ones, and waits until it is let go."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, list[int]]] = []
        self.go = threading.Event()

    def __call__(self, key: Any, payloads: list[int]) -> list[int]:
        self.go.wait(10)
        self.batches.append((key, payloads))
        if min(payloads) < 0:
            raise (Panic if min(payloads) == PANIC else ArithmeticError)("negative")
        return [2 * payload for payload in payloads]


def run(entries: list[tuple[str, int, int]]) -> tuple[Recorder, list[Any]]:
    """Queue (key, payload, tokens) behind a first batch, and gather what becomes of them."""
    recorder = Recorder()
    lane = Lane("test", recorder, 12, Metrics())

    async def main() -> list[Any]:
        lane.start()
        first = lane.submit("first", 0, 1)
        while len(lane):
            await asyncio.sleep(0.001)
        waiting = [lane.submit(*entry) for entry in entries]
        recorder.go.set()
        await first
        return await asyncio.gather(*waiting, return_exceptions=True)

    try:
        return recorder, asyncio.run(main())
    finally:
        lane.close()


def test_a_batch_takes_what_has_queued_while_longest_times_inputs_stays_within_the_limit() -> None:
    recorder, answers = run([("a", 1, 4), ("a", 2, 3), ("a", 3, 4), ("a", 4, 1), ("a", 5, 30), ("a", 6, 2)])
    assert [payloads for _, payloads in recorder.batches] == [[0], [1, 2, 3], [4], [5], [6]]
    assert [answer.value for answer in answers] == [2, 4, 6, 8, 10, 12]
    assert all(answer.queue > 0 and answer.inference >= 0 for answer in answers)


def test_inputs_of_another_way_wait_for_a_batch_of_their_own_in_their_order() -> None:
    recorder, _ = run([("a", 1, 2), ("b", 2, 2), ("a", 3, 2), ("b", 4, 2)])
    assert recorder.batches[1:] == [("a", [1, 3]), ("b", [2, 4])]


def queued(requests: list[list[int]], limit: int) -> list[list[int]]:
    """The batches of requests that come while another batch runs."""
    recorder = Recorder()
    lane = Lane("test", recorder, limit, Metrics())

    async def main() -> None:
        lane.start()
        first = lane.submit("a", 0, 1, 0, True)
        while len(lane):
            await asyncio.sleep(0.001)
        waiting = [
            lane.submit("a", payload, 1, place, len(request) > 1)
            for request in requests
            for place, payload in enumerate(request)
        ]
        recorder.go.set()
        await asyncio.gather(first, *waiting)

    try:
        asyncio.run(main())
        return [payloads for _, payloads in recorder.batches[1:]]
    finally:
        lane.close()


def test_requests_of_one_input_have_every_second_batch_and_no_more() -> None:
    several, singles = [10, 11, 12, 13], [[1], [2], [3]]
    assert queued([several, *singles], limit=2) == [[1, 2], [10, 11], [3], [12, 13]]


def test_each_request_has_its_first_inputs_encoded_before_the_later_ones_of_another() -> None:
    assert queued([[10, 11, 12, 13], [20, 21]], limit=2) == [[10, 20], [11, 21], [12, 13]]


def test_batches_of_long_requests_are_short_while_others_send_single_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("tilefold.serve.batching.time.monotonic", lambda: now[0])
    shares = batching._Shares(16384)
    shares.learn(True, 8000, 4.0)
    assert (shares.limit(True), shares.limit(False)) == (16384, 16384)  # nobody waits for these
    shares.came()
    shares.learn(False, 12, 0.05)
    shares.learn(True, 8000, 4.0)
    assert shares.limit(True) == 200  # 2 * 0.05 s at 2,000 tokens a second
    shares.learn(True, 200, 0.05)
    assert shares.limit(True) == 400  # each batch has a cost of its own, so that more fit
    shares.learn(True, 30, 0.05)
    assert (shares.limit(True), shares.limit(False)) == (400, 16384)  # there was no more to encode
    now[0] += 11
    assert shares.limit(True) == 16384


def test_an_input_that_fails_does_not_take_the_others_with_it() -> None:
    for bad in (-2, PANIC):
        recorder, answers = run([("a", 1, 2), ("a", bad, 2), ("a", 3, 2), ("a", 4, 2)])
        assert [getattr(answer, "value", None) for answer in answers] == [2, None, 6, 8]
        assert isinstance(answers[1], ServeError)
        assert (answers[1].kind, "negative" in answers[1].message) == ("Backend", False)
        assert [bad] in [payloads for _, payloads in recorder.batches]


def test_a_closed_lane_refuses_what_waits_and_what_comes() -> None:
    recorder = Recorder()
    lane = Lane("test", recorder, 12, Metrics())

    async def main() -> tuple[Any, Any]:
        lane.start()
        first = lane.submit("a", 1, 1)
        while len(lane):
            await asyncio.sleep(0.001)
        waiting = lane.submit("a", 2, 1)
        recorder.go.set()
        await asyncio.get_running_loop().run_in_executor(None, lane.close)
        with pytest.raises(ServeError, match="closing"):
            lane.submit("a", 3, 1)
        return await asyncio.gather(first, waiting, return_exceptions=True)

    first, waiting = asyncio.run(main())
    assert getattr(first, "value", None) == 2 or isinstance(first, ServeError)
    assert (isinstance(waiting, ServeError) and waiting.kind == "Unhealthy") or waiting.value == 4
    assert not lane.alive


def test_limits_that_make_no_sense_are_refused() -> None:
    for name in ("max_concurrent_requests", "payload_limit", "max_connections"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            Limits(**{name: 0})
    with pytest.raises(ValueError, match="body_seconds: expected a finite number above 0"):
        Limits(body_seconds=0)
    with pytest.raises(ValueError, match="at most max_concurrent_requests"):
        Limits(max_concurrent_requests=8, max_client_batch_size=9)
