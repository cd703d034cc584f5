"""A plan's launches get the tensors that its names stand for, and once repeated the addresses of
the same.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="launches need triton")

from tests.ops.base import Buffer, Launch, Plan, TorchStep
from tests.ops.launching import program

CPU = torch.device("cpu")


class Recorder:
    """Stands for a step: launches nothing, notes addresses, and can be bound after its second call."""

    made: list[Recorder]

    def __init__(self, planned: Launch) -> None:
        self.name, self.calls, self.bound_calls = planned.kernel, list[list[int | None]](), 0
        self.repeatable = True
        Recorder.made.append(self)

    def __call__(self, repeats: bool, addresses: Any, dtypes: Any) -> None:
        self.calls.append(list(addresses))
        assert [dtype is None for dtype in dtypes] == [address is None for address in addresses]

    @property
    def bound(self) -> Any:
        return self._launch if self.repeatable and len(self.calls) >= 2 else None

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
    monkeypatch.setattr(program, "KernelLauncher", Recorder)
    monkeypatch.setattr(program, "has_launch_hooks", lambda: False)
    return Recorder.made


def launch(name: str, tensors: str) -> Launch:
    return Launch(Kernel(name), (1, 1, 1), tensors, (), {})


@pytest.mark.parametrize("scratch", [True, False])
def test_addresses_of_repeated_launches_are_those_of_the_tensors(
    steps: list[Recorder],
    scratch: bool,
) -> None:
    buffers: dict[str, Any] = {"nothing": None}
    rows = 5 if scratch else 0
    buffers |= {"first": Buffer((rows,), torch.int64), "second": Buffer((3 * rows,), torch.float32)}
    one, two = "second a nothing absent z", "y first b second"
    made = program.Program(
        Plan((launch("one", one), launch("two", two)), buffers, {"y": 7}),
        ("a", "absent", "b"),
        {"y": Buffer((4,), torch.float32), "z": None, "w": Buffer((2, 2), torch.float16)},
        CPU,
        True,
    )
    for turn in range(5):
        a, b = torch.ones(3 + turn), torch.ones(2)
        y, z, w = made(a, None, b)
        assert (
            z is None
            and y is not None
            and w is not None
            and w.shape == (2, 2)
            and y.tolist() == [7] * 4
        )
        seen_one, seen_two = (
            dict(zip(names.split(), step.calls[-1], strict=True))
            for names, step in zip((one, two), steps, strict=True)
        )
        assert (seen_one["a"], seen_two["b"]) == (a.data_ptr(), b.data_ptr())
        assert seen_two["y"] == y.data_ptr()
        assert seen_one["nothing"] is seen_one["absent"] is seen_one["z"] is None
        assert seen_one["second"] == seen_two["second"]
        first, second = seen_two["first"], seen_two["second"]
        if scratch:
            assert first is not None and second is not None
            assert first % 16 == second % 16 == 0 and abs(second - first) == program.PIECE_ALIGNMENT
    assert [step.bound_calls for step in steps] == [3, 3]


def test_results_have_the_strides_that_are_asked_for_and_one_that_is_not_made_is_none(
    steps: list[Recorder],
) -> None:
    plan = Plan((launch("one", "a y z"),), {"z": None})
    results = {
        "y": Buffer.like(torch.empty(3, 2, dtype=torch.float16).T),
        "z": Buffer((4,), torch.float32),
    }
    made = program.Program(plan, ("a",), results, CPU, True)
    for _ in range(4):
        y, z = made(torch.ones(3))
        assert (
            z is None
            and y is not None
            and (y.shape, y.stride(), y.dtype) == ((2, 3), (1, 2), torch.float16)
        )
        assert steps[0].calls[-1][1:] == [y.data_ptr(), None]
    assert steps[0].bound_calls == 2


@pytest.mark.parametrize("repeatable", [True, False])
def test_launches_that_cannot_be_repeated_or_of_tensors_of_another_alignment_stay_with_their_steps(
    steps: list[Recorder],
    repeatable: bool,
) -> None:
    plan = Plan((launch("one", "a y"), launch("two", "y a")))
    made = program.Program(plan, ("a",), {"y": Buffer((4,), torch.float32)}, CPU, not repeatable)
    if not repeatable:
        steps[1].repeatable = False
    for _ in range(4):
        made(torch.ones(3))
    assert [step.bound_calls for step in steps] == [2 if not repeatable else 0, 0]
    assert [len(step.calls) for step in steps] == [4, 4] and not made.bound


def test_scratch_that_nothing_reads_any_more_is_gone_before_a_later_result_is_made(
    steps: list[Recorder],
) -> None:
    big = (program.MAX_SCRATCH_BLOCK + 4) // 4
    for size, made_each in ((big, [1, 1, 2]), (5, [3, 0, 0])):
        buffers = {name: Buffer((size,), torch.float32) for name in ("lists", "own")}
        plan = Plan(
            (launch("one", "a lists"), launch("two", "lists dx"), launch("three", "own dw")),
            buffers,
        )
        results = {"dx": Buffer((3,), torch.float32), "dw": Buffer((4,), torch.float32)}
        made = program.Program(plan, ("a",), results, CPU, True)
        one, two, three = steps[-3:]
        for _ in range(4):
            dx, dw = made(torch.ones(2))
            assert dx is not None and dw is not None and dx.shape == (3,) and dw.shape == (4,)
            assert one.calls[-1][1] == two.calls[-1][0] and three.calls[-1][1] == dw.data_ptr()
        assert [step.bound_calls for step in (one, two, three)] == [2, 2, 2]
        assert [len(each.templates) for each in made.steps] == made_each
        allocated = sum(
            each.numel() * each.itemsize for turn in made.steps for each in turn.templates
        )
        assert allocated >= 4 * (2 * size + 7)


def test_what_torch_makes_is_gone_once_it_is_read(steps: list[Recorder]) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def copied(x: Tensor) -> Tensor:
        assert all(each() is None for each in alive)
        alive.append(weakref.ref(copy := x + 1))
        return copy

    pairs = [(TorchStep("copy", copied, "a"), launch("read", "copy y")) for _ in range(3)]
    plan = Plan(tuple(step for pair in pairs for step in pair))
    made = program.Program(plan, ("a",), {"y": Buffer((3,), torch.float32), "z": None}, CPU, True)
    y, z = made(torch.ones(3))
    assert y is not None and z is None and len(alive) == 3


@pytest.mark.parametrize("copied", [True, False])
def test_what_torch_makes_first_of_given_tensors_leaves_the_launches_bound(
    steps: list[Recorder],
    copied: bool,
) -> None:
    first = TorchStep("a", Tensor.contiguous, "a"), TorchStep("most", torch.amax, "a")
    plan = Plan((*first, launch("one", "a most y nothing")), {"y2": None, "nothing": None})
    results = {"y": Buffer((3,), torch.float32), "y2": Buffer((1,), torch.int32)}
    made = program.Program(plan, ("a",), results, CPU, True)
    for turn in range(4):
        a = torch.arange(6.0).view(3, 2) + turn
        y, y2 = made(a := a.T if copied else a)
        at, most, *rest = steps[0].calls[-1]
        assert y2 is None and y is not None and rest == [y.data_ptr(), None] and most
        assert (at == a.data_ptr()) is not copied
    assert steps[0].bound_calls == 2


def test_a_gradient_that_is_given_is_written_and_not_returned(steps: list[Recorder]) -> None:
    made = program.Program(
        Plan((launch("one", "a dw dx"),), fills={"dw": 0, "dx": 2}),
        ("a", "dw"),
        {"dx": Buffer((2,), torch.float32), "dw": None},
        CPU,
        True,
    )
    for _ in range(4):
        dw = torch.ones(3)
        dx, nothing = made(torch.ones(2), dw)
        assert (
            nothing is None and dx is not None and dx.tolist() == [2, 2] and dw.tolist() == [1] * 3
        )
        assert steps[0].calls[-1][1] == dw.data_ptr()


def test_launches_around_a_step_of_torch_are_bound_too_and_share_scratch(
    steps: list[Recorder],
) -> None:
    """What torch reads has memory of its own, and what it makes anew another address."""
    buffers = {"sums": Buffer((4,), torch.float32), "list": Buffer((5,), torch.int32)}
    seen: list[int] = []

    def total(sums: Tensor) -> Tensor:
        seen.append(sums.data_ptr())
        return sums.zero_()[:1] + 1

    between = TorchStep("sums", total, "sums")
    plan = Plan((launch("one", "a sums list"), between, launch("two", "list sums y")), buffers)
    made = program.Program(plan, ("a",), {"y": Buffer((3,), torch.float32)}, CPU, True)
    for _ in range(4):
        made(torch.ones(2))
        (_, sums, scratch), (again, total_at, _) = steps[0].calls[-1], steps[1].calls[-1]
        assert sums == seen[-1] != total_at and again == scratch
    assert [step.bound_calls for step in steps] == [2, 2]
