"""A throttle pauses work so that it takes its share of the time, and no more."""

from __future__ import annotations

import time

import pytest

from tilefold.retrieval.encoding import throttle
from tilefold.retrieval.encoding.throttle import Throttle


class Clock:
    """Clocks of the wall and of the CPU, which only the test and pauses advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n_cores: int) -> None:
        self.wall = 0.0
        self.cpu = 0.0
        self.slept = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.wall)
        monkeypatch.setattr(time, "process_time", lambda: self.cpu)
        monkeypatch.setattr(time, "sleep", self.sleep)
        monkeypatch.setattr(throttle, "share_of_cores", lambda count: n_cores)

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.wall += seconds

    def work(self, wall: float, cpu: float) -> None:
        self.wall += wall
        self.cpu += cpu


@pytest.mark.parametrize(
    ("share", "n_cores", "cpu", "slept"),
    [
        pytest.param(0.5, 2, 2.0, 1.0, id="half of two cores, both busy"),
        pytest.param(0.5, 2, 1.0, 0.0, id="half of two cores, one busy"),
        pytest.param(0.25, 4, 4.0, 3.0, id="a quarter of four cores"),
        pytest.param(1.0, 2, 2.0, 0.0, id="the whole machine"),
    ],
)
def test_cpu_time_is_limited_to_its_share(
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    n_cores: int,
    cpu: float,
    slept: float,
) -> None:
    clock = Clock(monkeypatch, n_cores)
    limit = Throttle(share)
    for _ in range(3):
        clock.work(wall=1.0, cpu=cpu)
        limit.pause()
    assert clock.slept == pytest.approx(3 * slept)
    assert clock.cpu <= share * n_cores * clock.wall + 1e-9


def test_idle_time_gives_no_credit_for_a_later_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, n_cores=1)
    limit = Throttle(0.5)
    clock.work(wall=100.0, cpu=0.0)
    limit.pause()
    clock.work(wall=1.0, cpu=1.0)
    limit.pause()
    assert clock.slept == pytest.approx(1.0)


def test_the_time_of_a_gpu_is_limited_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, n_cores=8)
    limit = Throttle(0.25, on_gpu=True)
    clock.work(wall=1.0, cpu=0.1)
    limit.pause()
    assert clock.slept == pytest.approx(3.0)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="share: expected a number above 0 and up to 1"):
        Throttle(share)
