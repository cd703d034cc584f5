"""A plan's launches get the tensors that its names stand for, and once repeated the addresses of the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="launches need triton")

from tilefold.ops._shared._triton import program
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, View

CPU = torch.device("cpu")
SETTING = Setting((9, 0), 132, False, True, frozenset())


class Recorder:
    """Stands for a step: launches nothing, notes addresses, and can be bound after its second call."""

    made: list[Recorder]

    def __init__(self, kernel: Any, *_: Any) -> None:
        self.name, self.calls, self.bound_calls = kernel, list[list[int | None]](), 0
        Recorder.made.append(self)

    def __call__(self, same: bool, *tensors: Any) -> None:
        self.calls.append([None if x is None else x.data_ptr() for x in tensors])

    @property
    def bound_at(self) -> Any:
        return None if len(self.calls) < 2 else self._launch

    def _launch(self, addresses: Any) -> None:
        self.bound_calls += 1
        self.calls.append(list(addresses))


class Kernel(str):
    """A name that is its own ``__name__``."""

    __slots__ = ()

    @property
    def __name__(self) -> str:
        return str(self)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    Recorder.made = []
    monkeypatch.setattr(program, "Step", Recorder)
    monkeypatch.setattr(program, "hooked", lambda: False)
    return Recorder.made


def launch(name: str, tensors: str) -> Launch:
    return Launch(Kernel(name), (1, 1, 1), tensors, (), {})


@pytest.mark.parametrize("scratch", [True, False])
def test_addresses_of_repeated_launches_are_those_of_the_tensors(steps: list[Recorder], scratch: bool) -> None:
    buffers: dict[str, Any] = {"nothing": None, "table": View("y", torch.int32)}
    rows = 5 if scratch else 0
    buffers |= {"first": Buffer((rows,), torch.int64), "second": Buffer((3 * rows,), torch.float32)}
    one, two = "second a table nothing absent z", "y first b table second"
    made = program.Program(
        Plan((launch("one", one), launch("two", two)), buffers, {"y": 7}), ("a", "absent", "b"),
        {"y": Buffer((4,), torch.float32), "z": None, "w": Buffer((2, 2), torch.float16)}, CPU, SETTING,
    )  # fmt: skip
    for turn in range(5):
        a, b = torch.ones(3 + turn), torch.ones(2)
        y, z, w = made(a, None, b)
        assert z is None and y is not None and w is not None and w.shape == (2, 2) and y.tolist() == [7] * 4
        seen_one, seen_two = (dict(zip(names.split(), step.calls[-1], strict=True))
                              for names, step in zip((one, two), steps, strict=True))  # fmt: skip
        assert (seen_one["a"], seen_two["b"]) == (a.data_ptr(), b.data_ptr())
        assert seen_two["y"] == seen_one["table"] == seen_two["table"] == y.data_ptr()
        assert seen_one["nothing"] is seen_one["absent"] is seen_one["z"] is None
        assert seen_one["second"] == seen_two["second"]
        first, second = seen_two["first"], seen_two["second"]
        if scratch:
            assert first is not None and second is not None
            assert second - first >= 8 * rows and first % 16 == second % 16 == 0
    assert [step.bound_calls for step in steps] == [3, 3]


def test_results_have_the_strides_that_are_asked_for_and_one_that_is_not_made_is_none(steps: list[Recorder]) -> None:
    plan = Plan((launch("one", "a y z"),), {"z": None})
    turned = torch.empty(3, 2, dtype=torch.float16).T
    results = {"y": Buffer.like(turned), "z": Buffer((4,), torch.float32)}
    made = program.Program(plan, ("a",), results, CPU, SETTING)
    for _ in range(4):
        y, z = made(torch.ones(3))
        assert z is None and y is not None and (y.shape, y.stride(), y.dtype) == ((2, 3), (1, 2), torch.float16)
        assert steps[0].calls[-1][1:] == [y.data_ptr(), None]
    assert steps[0].bound_calls == 2


def test_tensors_of_another_alignment_never_get_bound_launches(steps: list[Recorder]) -> None:
    plan = Plan((launch("one", "a y"),))
    made = program.Program(plan, ("a",), {"y": Buffer((4,), torch.float32)}, CPU, SETTING._replace(aligned=False))
    for _ in range(4):
        made(torch.ones(3))
    assert steps[0].bound_calls == 0 and len(steps[0].calls) == 4
