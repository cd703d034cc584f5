"""Programs: the addresses that kernels get, the memory of results and scratch, and bound launches."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="launches need triton")

from tests.ops.base import Buffer, Launch, Plan, TorchStep
from tests.ops.launching import program

CPU = torch.device("cpu")
# entries of a buffer that is too large for the block of little scratch
LARGE_SIZE = (program.MAX_SCRATCH_BLOCK + 4) // 4


class RecordingLauncher:
    """A launcher that launches nothing, records addresses, and is bound after its second call.

    Attributes:
        created: All launchers of a test, in the order of their launches.
        calls: Addresses of every call.
        bound_calls: Number of calls that were bound.
        repeatable: Whether the launcher can be bound.
    """

    created: list[RecordingLauncher]

    def __init__(self, planned: Launch) -> None:
        self.name = planned.kernel
        self.calls: list[list[int | None]] = []
        self.bound_calls = 0
        self.repeatable = True
        RecordingLauncher.created.append(self)

    def __call__(self, repeats: bool, addresses: Any, dtypes: Any) -> None:
        self.calls.append(list(addresses))
        assert [dtype is None for dtype in dtypes] == [address is None for address in addresses]

    @property
    def bound(self) -> Any:
        can_bind = self.repeatable and len(self.calls) >= 2
        return self._launch if can_bind else None

    def _launch(self, addresses: Any) -> None:
        self.bound_calls += 1
        self.calls.append(list(addresses))


class NamedKernel(str):
    """A string that has itself as ``__name__``, as a kernel has its name."""

    __slots__ = ()

    @property
    def __name__(self) -> str:
        return str(self)


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[RecordingLauncher]:
    """Let programs use recording launchers, and return those that they create."""
    RecordingLauncher.created = []
    monkeypatch.setattr(program, "KernelLauncher", RecordingLauncher)
    monkeypatch.setattr(program, "has_launch_hooks", lambda: False)
    return RecordingLauncher.created


def launch(name: str, tensors: str) -> Launch:
    """A launch of a kernel of that name with these tensors, separated by spaces."""
    return Launch(NamedKernel(name), (1, 1, 1), tuple(tensors.split()), (), {})


def program_of(
    plan: Plan,
    inputs: tuple[str, ...] = ("a",),
    *,
    results: Mapping[str, Buffer | None],
    aligned: bool = True,
) -> program.Program:
    """The program of a plan on the CPU."""
    return program.Program(plan, inputs, results, CPU, aligned)


def float_buffer(*shape: int) -> Buffer:
    return Buffer(shape, torch.float32)


def addresses_by_name(launcher: RecordingLauncher, tensors: str) -> dict[str, int | None]:
    """Addresses of the last call by the names of its tensors."""
    return dict(zip(tensors.split(), launcher.calls[-1], strict=True))


def bound_calls(launchers: list[RecordingLauncher]) -> list[int]:
    return [launcher.bound_calls for launcher in launchers]


FIRST_TENSORS = "second a nothing absent z"
SECOND_TENSORS = "y first b second"


def program_with_missing_tensors(rows: int) -> program.Program:
    """A program with an input, a buffer and a result that are missing.

    Args:
        rows: Size of the scratch buffers ``first`` (one number a row) and ``second`` (three).
    """
    buffers = {
        "first": Buffer((rows,), torch.int64),
        "second": float_buffer(3 * rows),
    }
    launches = (launch("one", FIRST_TENSORS), launch("two", SECOND_TENSORS))
    return program_of(
        Plan(launches, buffers, {"y": 7}, skipped_results=frozenset(["nothing"])),
        ("a", "absent", "b"),
        results={"y": float_buffer(4), "z": None, "w": Buffer((2, 2), torch.float16)},
    )


@pytest.mark.parametrize("rows", [pytest.param(5, id="scratch"), pytest.param(0, id="no scratch")])
def test_launches_get_the_addresses_of_their_tensors_when_repeated_too(
    launchers: list[RecordingLauncher],
    rows: int,
) -> None:
    run = program_with_missing_tensors(rows)
    for repetition in range(5):
        a = torch.ones(3 + repetition)
        b = torch.ones(2)
        y, z, w = run(a, None, b)
        assert z is None
        assert y is not None and y.tolist() == [7] * 4
        assert w is not None and w.shape == (2, 2)
        one = addresses_by_name(launchers[0], FIRST_TENSORS)
        two = addresses_by_name(launchers[1], SECOND_TENSORS)
        assert one["a"] == a.data_ptr()
        assert two["b"] == b.data_ptr()
        assert two["y"] == y.data_ptr()
        assert one["nothing"] is one["absent"] is one["z"] is None
        assert one["second"] == two["second"]
    assert bound_calls(launchers) == [3, 3]


def test_scratch_buffers_are_aligned_pieces_of_one_block(
    launchers: list[RecordingLauncher],
) -> None:
    run = program_with_missing_tensors(rows=5)
    for _ in range(5):
        run(torch.ones(3), None, torch.ones(2))
        addresses = addresses_by_name(launchers[1], SECOND_TENSORS)
        first = addresses["first"]
        second = addresses["second"]
        assert first is not None and second is not None
        assert first % 16 == second % 16 == 0
        assert abs(second - first) == program.PIECE_ALIGNMENT


def test_results_have_the_planned_strides_and_those_that_are_not_computed_are_none(
    launchers: list[RecordingLauncher],
) -> None:
    plan = Plan((launch("one", "a y z"),), skipped_results=frozenset(["z"]))
    results = {
        "y": Buffer.like(torch.empty(3, 2, dtype=torch.float16).T),
        "z": float_buffer(4),
    }
    run = program_of(plan, results=results)
    for _ in range(4):
        y, z = run(torch.ones(3))
        assert z is None
        assert y is not None
        assert (y.shape, y.stride(), y.dtype) == ((2, 3), (1, 2), torch.float16)
        assert launchers[0].calls[-1][1:] == [y.data_ptr(), None]
    assert bound_calls(launchers) == [2]


@pytest.mark.parametrize(
    ("aligned", "second_is_repeatable", "expected_bound_calls"),
    [
        pytest.param(True, False, [2, 0], id="a launch cannot be repeated"),
        pytest.param(False, True, [0, 0], id="inputs are not aligned"),
    ],
)
def test_launches_that_cannot_be_bound_go_through_their_launchers(
    launchers: list[RecordingLauncher],
    aligned: bool,
    second_is_repeatable: bool,
    expected_bound_calls: list[int],
) -> None:
    plan = Plan((launch("one", "a y"), launch("two", "y a")))
    run = program_of(plan, results={"y": float_buffer(4)}, aligned=aligned)
    launchers[1].repeatable = second_is_repeatable
    for _ in range(4):
        run(torch.ones(3))
    assert bound_calls(launchers) == expected_bound_calls
    assert [len(launcher.calls) for launcher in launchers] == [4, 4]
    assert not run.bound


@pytest.mark.parametrize(
    ("size", "one_block", "tensors_by_step"),
    [
        pytest.param(LARGE_SIZE, False, [1, 1, 2], id="large: before its step"),
        pytest.param(5, False, [3, 0, 0], id="small: all at once"),
        pytest.param(LARGE_SIZE, True, [3, 0, 0], id="large, in one block: all at once"),
    ],
)
def test_large_scratch_is_released_before_later_results_are_allocated(
    launchers: list[RecordingLauncher],
    size: int,
    one_block: bool,
    tensors_by_step: list[int],
) -> None:
    plan = Plan(
        (launch("one", "a lists"), launch("two", "lists dx"), launch("three", "sums dw")),
        {"lists": float_buffer(size), "sums": float_buffer(size)},
        one_block=one_block,
    )
    run = program_of(plan, results={"dx": float_buffer(3), "dw": float_buffer(4)})
    one, two, three = launchers
    for _ in range(4):
        dx, dw = run(torch.ones(2))
        assert dx is not None and dx.shape == (3,)
        assert dw is not None and dw.shape == (4,)
        lists_address = one.calls[-1][1]
        assert lists_address == two.calls[-1][0]
        assert three.calls[-1][1] == dw.data_ptr()
    assert bound_calls(launchers) == [2, 2, 2]
    assert [len(step.templates) for step in run.steps] == tensors_by_step
    templates = [template for step in run.steps for template in step.templates]
    allocated = sum(template.numel() * template.itemsize for template in templates)
    assert allocated >= 4 * (2 * size + 7)


def test_outputs_of_torch_steps_are_freed_after_their_last_use(
    launchers: list[RecordingLauncher],
) -> None:
    outputs: list[weakref.ref[Tensor]] = []

    def add_one(x: Tensor) -> Tensor:
        assert all(output() is None for output in outputs)
        output = x + 1
        outputs.append(weakref.ref(output))
        return output

    copy = TorchStep(add_one, ("a",), output="copy")
    read = launch("read", "copy y")
    plan = Plan((copy, read, copy, read, copy, read))
    run = program_of(plan, results={"y": float_buffer(3), "z": None})
    y, z = run(torch.ones(3))
    assert y is not None
    assert z is None
    assert len(outputs) == 3


@pytest.mark.parametrize("copied", [True, False])
def test_launches_after_torch_steps_are_bound_and_get_the_addresses_of_their_outputs(
    launchers: list[RecordingLauncher],
    copied: bool,
) -> None:
    plan = Plan(
        (
            TorchStep(Tensor.contiguous, ("a",), output="a"),
            TorchStep(torch.amax, ("a",), output="maximum"),
            launch("one", "a maximum y nothing"),
        ),
        skipped_results=frozenset(["y2", "nothing"]),
    )
    results = {"y": float_buffer(3), "y2": Buffer((1,), torch.int32)}
    run = program_of(plan, results=results)
    for repetition in range(4):
        a = torch.arange(6.0).view(3, 2) + repetition
        if copied:
            a = a.T  # contiguous() copies it
        y, y2 = run(a)
        assert y is not None
        assert y2 is None
        a_address, maximum_address, y_address, nothing_address = launchers[0].calls[-1]
        assert y_address == y.data_ptr()
        assert nothing_address is None
        assert maximum_address
        assert (a_address == a.data_ptr()) is not copied
    assert bound_calls(launchers) == [2]


def test_a_gradient_that_is_an_input_is_written_and_not_returned(
    launchers: list[RecordingLauncher],
) -> None:
    run = program_of(
        Plan((launch("one", "a dw dx"),), fills={"dw": 0, "dx": 2}),
        ("a", "dw"),
        results={"dx": float_buffer(2), "dw": None},
    )
    for _ in range(4):
        dw = torch.ones(3)
        dx, returned_dw = run(torch.ones(2), dw)
        assert returned_dw is None
        assert dx is not None and dx.tolist() == [2, 2]
        assert dw.tolist() == [1] * 3
        assert launchers[0].calls[-1][1] == dw.data_ptr()


def test_launches_around_a_torch_step_share_scratch_but_not_its_argument(
    launchers: list[RecordingLauncher],
) -> None:
    """The argument of a torch step has memory of its own, and its output another address."""
    argument_addresses: list[int] = []

    def total(sums: Tensor) -> Tensor:
        argument_addresses.append(sums.data_ptr())
        return sums.zero_()[:1] + 1

    plan = Plan(
        (
            launch("one", "a sums list"),
            TorchStep(total, ("sums",), output="sums"),
            launch("two", "list sums y"),
        ),
        {"sums": float_buffer(4), "list": Buffer((5,), torch.int32)},
    )
    run = program_of(plan, results={"y": float_buffer(3)})
    for _ in range(4):
        run(torch.ones(2))
        before = addresses_by_name(launchers[0], "a sums list")
        after = addresses_by_name(launchers[1], "list sums y")
        assert before["sums"] == argument_addresses[-1]
        assert after["sums"] != argument_addresses[-1]
        assert before["list"] == after["list"]
    assert bound_calls(launchers) == [2, 2]
