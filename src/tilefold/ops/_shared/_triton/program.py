"""Programs: plans that run, on one device, for all calls that have the key of the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.tensors import Piece, Pieces, without_memory
from tilefold.ops._shared.internals import LaunchAt, hooked
from tilefold.ops._shared.plan import Buffer, Instead, Launch, Plan, Setting, TorchStep, View, taker

Take = Callable[[Any], tuple[Any, ...]]


class _Launched(NamedTuple):
    """A launch, and what takes its tensors, or their addresses, from those of a call."""

    step: Step
    take: Take
    take_addresses: Take


class _Computed(NamedTuple):
    """A torch step, what takes its tensors from those of a call, and the place of its result."""

    function: Callable[..., Tensor]
    take: Take
    place: int


class Program:
    """``program(*given)`` allocates the results, runs the steps on the current stream and returns the results.

    Once a plan of launches alone was repeated, each tensor is asked for its address once, and launches get addresses.

    Args:
        plan: of the pass.
        given: names of the tensors of a call, in their order.
        results: by name; ``None`` for one that is not wanted.
        device: of all tensors.
        setting: that the plan was made for.
    """

    __slots__ = ("_aligned", "_behind", "_bound", "_fills", "_instead", "_likes", "_others", "_results", "_scratch",
                 "_steps", "_views")  # fmt: skip

    def __init__(
        self,
        plan: Plan,
        given: Sequence[str],
        results: Mapping[str, Buffer | None],
        device: torch.device,
        setting: Setting,
    ) -> None:
        by_torch = {step.makes for step in plan.steps if isinstance(step, TorchStep)}
        scratch = {name: each for name, each in plan.buffers.items() if isinstance(each, Buffer)}
        views = {name: each for name, each in plan.buffers.items() if isinstance(each, View)}
        others = sorted({*plan.buffers, *by_torch} - {*given, *results, *scratch})
        # the tensors, and the addresses, of a call lie in this order
        places = {name: place for place, name in enumerate([*given, *results, *scratch, *others])}
        memory = places | {name: places[view.of] for name, view in views.items()}
        self._scratch = Pieces(device, *scratch.values())
        self._others = [None] * len(others)
        self._behind = self._others if self._scratch.size else [*[0] * len(scratch), *self._others]
        self._views = [(places[name], places[view.of], view.dtype) for name, view in views.items()]
        results = {name: plan.buffers.get(name, buffer) and buffer for name, buffer in results.items()}
        made = [None if name in by_torch else buffer for name, buffer in results.items()]
        self._likes = [
            None if buffer is None else without_memory(buffer.shape, buffer.dtype, device, buffer.strides)
            for buffer in made
        ]
        self._fills = [
            (list(results).index(name), value) for name, value in plan.fills.items() if results[name] is not None
        ]
        self._results = [places[name] for name in results]
        self._steps: list[_Launched | _Computed] = []
        for step in plan.steps:
            names = step.tensors.split()
            take = taker([places[name] for name in names])
            if isinstance(step, TorchStep):
                self._steps.append(_Computed(step.function, take, places[step.makes]))
            else:
                self._steps.append(_Launched(_step(step), take, taker([memory[name] for name in names])))
        launches = [step for step in plan.steps if isinstance(step, Launch)]
        self._instead = {
            each.kernel.__name__: each.instead
            for each in launches
            if each.instead is not None and each.instead.kernel not in setting.given_up
        }
        self._aligned = setting.aligned
        self._bound: list[tuple[LaunchAt, Take]] = []

    def __call__(self, *given: Tensor | None) -> Sequence[Tensor | None]:
        """Results in their order, ``None`` for those that are not wanted."""
        same = self._aligned and not hooked()
        results: list[Any] = [None if like is None else torch.empty_like(like) for like in self._likes]
        for place, value in self._fills:
            results[place].fill_(value)
        if not same or not self._bound:
            return self._run(same, [*given, *results, *self._scratch(), *self._others])
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in (*given, *results)]
        if self._scratch.size:
            _held = self._scratch.extend(addresses)  # until all is launched
        addresses += self._behind
        for launch, take in self._bound:
            launch(take(addresses))
        return results

    def instead_of(self, kernel: str) -> Instead | None:
        """What stands behind a kernel of the plan, unless it was given up before the plan was made."""
        return self._instead.get(kernel)

    def _run(self, same: bool, tensors: list[Any]) -> Sequence[Tensor | None]:
        for place, source, dtype in self._views:
            tensors[place] = tensors[source].view(dtype)
        for step in self._steps:
            if isinstance(step, _Launched):
                step.step(same, *step.take(tensors))
            else:
                given = [x.tensor() if isinstance(x, Piece) else x for x in step.take(tensors)]
                tensors[step.place] = step.function(*given)
        bound = [
            (step.step.bound_at, step.take_addresses)
            for step in self._steps
            if isinstance(step, _Launched) and step.step.bound_at is not None
        ]
        if same and len(bound) == len(self._steps):
            self._bound = bound
        return [tensors[place] for place in self._results]


def _step(launch: Launch) -> Step:
    names = launch.tensors.split()
    described = [launch.tma.get(name) for name in names] if launch.tma else []
    return Step(launch.kernel, launch.grid, launch.numbers, launch.constants, tuple(described))
