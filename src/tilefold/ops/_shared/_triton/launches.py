"""Launches that follow one another and read the same tensors: of each the address is asked for once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.tensors import Pieces
from tilefold.ops._shared.internals import LaunchAt

Take = Callable[[Any], tuple[Any, ...]]
Scratches = Mapping[str, "tuple[tuple[int, ...], torch.dtype] | None"]


class Launches:
    """Steps of a plan, and the scratch that they share: ``launches(same, *tensors)`` runs them in turn.

    ``same`` is what :func:`tilefold.ops._shared._triton.launch.aligned` says of the tensors. Once all steps were
    repeated, they take addresses only.

    Args:
        device: of all tensors.
        given: names of the tensors of a call, in their order.
        scratch: shape and dtype by name, or ``None`` for what the steps get ``None`` for. It is allocated in each call,
            and gone when the steps are launched.
        steps: each with the names of its arguments, two or more.
    """

    __slots__ = ("_behind", "_bound", "_plan", "_scratch", "_steps")

    def __init__(
        self,
        device: torch.device,
        given: str,
        scratch: Scratches,
        steps: list[tuple[Step, str]],
    ) -> None:
        self._plan = device, given, scratch, steps
        made = {name: part for name, part in scratch.items() if part is not None}
        names = [*given.split(), *made]
        absent = scratch.keys() - made
        places = {name: place for place, name in enumerate(names)} | dict.fromkeys(absent, len(names))
        self._scratch = Pieces(device, *made.values())
        self._behind = [None] if self._scratch.size else [*[0] * len(made), None]
        self._steps: list[tuple[Step, Take]] = [
            (step, itemgetter(*[places[name] for name in wanted.split()])) for step, wanted in steps
        ]
        self._bound: list[tuple[LaunchAt, Take]] = []

    def __call__(self, same: bool, *tensors: Tensor | None) -> None:
        if not same or not self._bound:
            self._run(same, tensors)
            return
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        if self._scratch.size:
            _held = self._scratch.extend(addresses)  # until all is launched
        addresses += self._behind
        for launch, take in self._bound:
            launch(take(addresses))

    @property
    def scratch_bytes(self) -> int:
        """How much they allocate in a call."""
        return self._scratch.size

    def followed_by(self, others: Launches) -> Launches:
        """These launches, and then the others, which are given the same tensors; the scratch of all is held."""
        device, given, scratch, steps = self._plan
        return Launches(device, given, {**scratch, **others._plan[2]}, [*steps, *others._plan[3]])

    def _run(self, same: bool, tensors: tuple[Tensor | None, ...]) -> None:
        every = (*tensors, *self._scratch(), None)
        for step, take in self._steps:
            step(same, *take(every))
        if same:
            found = [(step.bound_at, take) for step, take in self._steps]
            known = [(launch, take) for launch, take in found if launch is not None]
            self._bound = known if len(known) == len(found) else []
