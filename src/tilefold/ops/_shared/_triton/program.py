"""Programs: plans that run, on one device, for all calls that have the key of the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.tensors import Piece, Pieces, without_memory
from tilefold.ops._shared.internals import LaunchAt, hooked
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, TorchStep, View, taker

Take = Callable[[Any], tuple[Any, ...]]
MAX_TOGETHER = 1 << 20  # bytes of scratch that are held for a step longer than it is read: each block costs the host


class _Launched(NamedTuple):
    step: Step
    take: Take  # its tensors from those of a call
    take_addresses: Take


class _Computed(NamedTuple):
    function: Callable[..., Tensor]
    take: Take
    place: int  # of its result


class _Stretch(NamedTuple):
    """Steps that follow one another, and the memory that none before them names; places are among a call's tensors."""

    results: list[Tensor]  # allocated first: what says so of each
    fills: list[tuple[int, float]]  # places among these of the ones that a number fills
    scratch: Pieces  # allocated next
    views: list[tuple[int, int, torch.dtype]]  # the place of each view of a result, and that of the result
    steps: list[_Launched | _Computed]
    ends: list[int]  # places of what no later step reads


class Program:
    """``program(*given)`` runs the steps on the current stream, allocates what they write, and returns the results.

    Once a plan of launches was repeated, each tensor is asked for its address once, and launches get addresses. What
    torch makes of given tensors, as copies, may come before the first launch.
    """

    __slots__ = ("_aligned", "_made", "_others", "_ready", "_results", "_stretches", "bound", "instead")

    def __init__(
        self,
        plan: Plan,
        given: Sequence[str],
        results: Mapping[str, Buffer | None],
        device: torch.device,
        setting: Setting,
    ) -> None:
        by_torch = {step.makes for step in plan.steps if isinstance(step, TorchStep)}
        views = {name: each for name, each in plan.buffers.items() if isinstance(each, View)}
        wanted = {name: each for name, each in results.items() if each and plan.buffers.get(name, each) is not None}
        made = {name: each for name, each in wanted.items() if name not in by_torch}
        reads = [[views[name].of if name in views else name for name in step.tensors.split()] for step in plan.steps]
        copies = _leading(plan, given, results)
        cuts = _cut(plan, reads, made, each_step=any(isinstance(step, TorchStep) for step in plan.steps[copies:]))
        scratch = [name for cut in cuts for name in cut.scratch]
        others = sorted({*plan.buffers, *by_torch, *results} - {*given, *made, *scratch})
        # the tensors, and the addresses, of a call lie in this order
        order = [name for cut in cuts for name in (*cut.results, *cut.scratch)]
        places = {name: place for place, name in enumerate([*given, *others, *order])}
        memory = places | {name: places[view.of] for name, view in views.items()}

        def placed(step: Launch | TorchStep) -> _Launched | _Computed:
            names = step.tensors.split()
            take = taker([places[name] for name in names])
            if isinstance(step, TorchStep):
                return _Computed(step.function, take, places[step.makes])
            return _Launched(_step(step), take, taker([memory[name] for name in names]))

        steps = [placed(step) for step in plan.steps]
        ends = _ends(plan, reads, {*scratch, *by_torch} - results.keys())
        self._stretches = [
            _Stretch(
                [without_memory(device, *made[name]) for name in cut.results],
                [(place, plan.fills[name]) for place, name in enumerate(cut.results) if name in plan.fills],
                Pieces(device, *[tuple(plan.buffers[name] or ()) for name in cut.scratch]),
                [(places[name], places[each.of], each.dtype) for name, each in views.items() if each.of in cut.results],
                steps[cut.first : cut.end],
                [places[name] for names in ends[cut.first : cut.end] for name in names],
            )
            for cut in cuts
        ]
        self._others = [None] * len(others)
        self._results = [places[name] if name in wanted else None for name in results]
        allocated = [name for cut in cuts for name in cut.results]
        order_of = [allocated.index(name) if name in made else len(allocated) for name in results]  # or None behind
        self._made = None if order_of == [*range(len(allocated))] else taker(order_of)
        self._ready = [step for step in steps[:copies] if isinstance(step, _Computed)]
        self.instead = {  # of kernels of the plan that were not given up before it was made
            each.kernel.__name__: each.instead
            for each in plan.steps
            if isinstance(each, Launch) and each.instead is not None and each.instead.kernel not in setting.given_up
        }
        self._aligned = setting.aligned
        self.bound: list[tuple[_Stretch, list[tuple[LaunchAt, Take]]]] = []  # which builds no kernel any more

    def __call__(self, *given: Tensor | None) -> Sequence[Tensor | None]:
        same = self._aligned and not hooked()
        if not same or not self.bound:
            return self._run(same, given)
        tensors: list[Any] = [*given, *self._others]
        for step in self._ready:
            tensors[step.place] = step.function(*step.take(tensors))
        addresses: list[Any] = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        results: list[Tensor] = []
        for stretch, launches in self.bound:
            made = list(map(torch.empty_like, stretch.results))
            for place, value in stretch.fills:
                made[place].fill_(value)
            results += made
            addresses += map(Tensor.data_ptr, made)
            held = torch.empty_like(stretch.scratch.like) if stretch.scratch.size else None
            if stretch.scratch.firsts:
                address = 0 if held is None else held.data_ptr()
                addresses += map(address.__add__, stretch.scratch.firsts)
            for launch, take in launches:
                launch(take(addresses))
            held = None
        return results if self._made is None else self._made((*results, None))

    def _run(self, same: bool, given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        tensors: list[Any] = [*given, *self._others]
        for stretch in self._stretches:
            made = list(map(torch.empty_like, stretch.results))
            for place, value in stretch.fills:
                made[place].fill_(value)
            tensors += made
            tensors += stretch.scratch()
            for place, source, dtype in stretch.views:
                tensors[place] = tensors[source].view(dtype)
            for step in stretch.steps:
                if isinstance(step, _Launched):
                    step.step(same, *step.take(tensors))
                else:
                    read = [x.tensor() if isinstance(x, Piece) else x for x in step.take(tensors)]
                    tensors[step.place] = step.function(*read)
                    del read
            for place in stretch.ends:
                tensors[place] = None
        if same:
            self._bind()
        return [None if place is None else tensors[place] for place in self._results]

    def _bind(self) -> None:
        found = []
        for stretch in self._stretches:
            launched = [step for step in stretch.steps if isinstance(step, _Launched)]
            bound = [(step.step.bound_at, step.take_addresses) for step in launched if step.step.bound_at is not None]
            found.append((stretch, bound))
        if sum(len(bound) for _, bound in found) + len(self._ready) == sum(len(each.steps) for each in self._stretches):
            self.bound = found


class _Cut(NamedTuple):
    """Steps of a stretch, and the names of the memory that is allocated for it."""

    first: int
    end: int
    results: list[str]
    scratch: list[str]


def _leading(plan: Plan, given: Sequence[str], results: Mapping[str, Buffer | None]) -> int:
    """Number of leading torch steps, which read given tensors and what such steps made, and make no result."""
    known = {*given}
    for count, step in enumerate(plan.steps):
        if isinstance(step, Launch) or step.makes in results or not {*step.tensors.split()} <= known:
            return count
        known.add(step.makes)
    return len(plan.steps)


def _cut(plan: Plan, reads: list[list[str]], made: Mapping[str, Buffer], each_step: bool) -> list[_Cut]:
    """Cuts where memory is allocated: ``each_step`` by itself, or where a block of scratch begins."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for place, names in enumerate(reads):
        for name in names:
            first.setdefault(name, place)
            last[name] = place
    blocks: dict[int, list[str]] = {}
    block: list[str] = []
    end, size = -1, 0
    scratch = {name: each for name, each in plan.buffers.items() if isinstance(each, Buffer) and name in first}
    for name in sorted(scratch, key=first.__getitem__):
        if not blocks or (first[name] > end and size > MAX_TOGETHER):
            block, size = blocks.setdefault(first[name], []), 0
        block.append(name)
        end, size = max(end, last[name]), size + math.prod(scratch[name].shape) * scratch[name].dtype.itemsize
    count = max(1, len(plan.steps))
    starts = range(count) if each_step else sorted({0, *list(blocks)[1:]})
    return [
        _Cut(
            start,
            end,
            [name for name in made if start <= first.get(name, 0) < end],
            [name for name in scratch if any(name in blocks.get(place, ()) for place in range(start, end))],
        )
        for start, end in zip(starts, [*starts, count][1:], strict=True)
    ]


def _ends(plan: Plan, reads: list[list[str]], names: set[str]) -> list[list[str]]:
    """By step, the names whose tensor no later one reads."""
    ends: list[list[str]] = [[] for _ in plan.steps]
    read_later = dict.fromkeys(names, False)
    for place in reversed(range(len(plan.steps))):
        step = plan.steps[place]
        touched = {*reads[place]}
        if isinstance(step, TorchStep):
            touched.add(step.makes)
        for name in touched & names:
            if not read_later[name]:
                ends[place].append(name)
            read_later[name] = name in reads[place]
    return ends


def _step(launch: Launch) -> Step:
    names = launch.tensors.split()
    described = [launch.tma.get(name) if names.index(name) == place else None for place, name in enumerate(names)]
    return Step(launch.kernel, launch.grid, launch.numbers, launch.constants, tuple(described) if launch.tma else ())
