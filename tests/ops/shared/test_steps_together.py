"""Steps that share tensors and scratch: once repeated, they get addresses, of the tensors that they got before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="launchers need triton")

from tilefold.ops._shared._triton.launches import Launches
from tilefold.ops._shared._triton.tensors import Piece

CPU = torch.device("cpu")


class Recorder:
    """A step that launches nothing, and notes the addresses of what it got; bound after its second call."""

    def __init__(self, known: bool = True) -> None:
        self.seen: list[list[int | None]] = []
        self.direct = 0
        self._known = known

    @property
    def bound(self) -> object:
        """As of a step."""
        return None if len(self.seen) < 2 else self

    def __call__(self, same: bool, *given: Tensor | Piece | None) -> None:
        self.seen.append([None if x is None else x.data_ptr() for x in given])

    @property
    def bound_at(self) -> Any:
        """As of a step."""
        return self._launch if self.bound and self._known else None

    def _launch(self, addresses: Any) -> None:
        self.direct += 1
        self.seen.append(list(addresses))


def launches(first: Any, second: Any, scratch: dict[str, Any]) -> Launches:
    return Launches(CPU, "a b c", scratch, [(first, "b x nothing a"), (second, "x y c")])


SCRATCH = {"x": ((3,), torch.float32), "nothing": None, "y": ((5,), torch.int64)}


def test_repeated_steps_get_the_same_places() -> None:
    steps = Recorder(), Recorder()
    together = launches(*steps, SCRATCH)
    a, b = torch.ones(4), torch.ones(2)
    for _ in range(5):
        together(True, a, b, None)
    assert [step.direct for step in steps] == [3, 3]
    for first, second in zip(*(step.seen for step in steps), strict=True):
        assert first[0] == b.data_ptr() and first[2:] == [None, a.data_ptr()]
        assert second[0] == first[1] and second[2] is None
        assert second[1] - second[0] == 128  # the next multiple of a piece's alignment
    assert together.scratch_bytes == 256


def test_tensors_that_do_not_fit_and_unknown_launchers_take_the_steps_themselves() -> None:
    steps = Recorder(), Recorder()
    together = launches(*steps, SCRATCH)
    for same in (False, False, False, True, True, False, True):
        together(same, torch.ones(4), torch.ones(2), None)
    assert [step.direct for step in steps] == [2, 2]
    unknown = Recorder(), Recorder(known=False)
    together = launches(*unknown, SCRATCH)
    for _ in range(4):
        together(True, torch.ones(4), torch.ones(2), None)
    assert [step.direct for step in unknown] == [0, 0]


def test_scratch_without_an_element_has_no_address() -> None:
    steps = Recorder(), Recorder()
    together = launches(*steps, {"x": ((0,), torch.float32), "nothing": None, "y": ((2, 0), torch.int32)})
    a = torch.ones(4)
    for _ in range(3):
        together(True, a, a, a)
    assert steps[1].direct == 1 and all(seen == [0, 0, a.data_ptr()] for seen in steps[1].seen)


def test_steps_that_follow_have_scratch_of_their_own() -> None:
    steps = [Recorder() for _ in range(3)]
    together = launches(*steps[:2], SCRATCH)
    others = Launches(CPU, "a b c", {"z": ((1,), torch.float32)}, [(steps[2], "c z")])  # type: ignore[list-item]
    a = torch.ones(4)
    for _ in range(3):
        together.followed_by(others)(True, a, a, a)
    ends = [*steps[1].seen[-1][:2], steps[2].seen[-1][1]]
    assert ends[0] is not None and [end - ends[0] for end in ends if end is not None] == [0, 128, 256]
