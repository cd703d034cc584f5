"""Programs: plans that run, on one device, for all calls that have the key of the first."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared.internals import LaunchAt, hooked
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, Take, TorchStep, View, cdiv, taker

MAX_TOGETHER = 1 << 20  # bytes of scratch that are held for a step longer than it is read: each block costs the host
PIECE_ALIGNMENT = 128  # bytes, of scratch in a block: as much as the L2 cache reads at a time
NOTHING = TorchStep("", lambda: None, "")  # of a plan without steps


class _Made(NamedTuple):
    place: int
    like: Tensor  # says what to allocate, and holds nothing
    fill: float | None  # the number that all entries have at first
    scratch: bool


class _Turn(NamedTuple):
    """A step, the memory that none before it names, and what none after it reads; places are among a call's tensors."""

    made: list[_Made]
    views: list[tuple[int, int, torch.dtype]]  # the place of each view of what is made, and that of its source
    step: Any  # a Step, or torch's function
    take: Take
    reads: list[int]  # places of the tensors, of views their source
    makes: int  # the place of what torch returns; -1 for a launch
    ends: list[int]


class _Stretch(NamedTuple):
    """Launches that follow one another, and memory that none before them names, scratch in one block."""

    results: list[Tensor]
    fills: list[tuple[int, float]]  # places among these of the ones that a number fills
    scratch: Tensor | None  # None where it has no byte
    firsts: list[int]  # byte of each piece of scratch
    launches: list[tuple[LaunchAt, Take]]


class Program:
    """``program(*given)`` runs the steps on the current stream, allocates what they write, and returns the results.

    Once a plan of launches was repeated, each tensor is asked for its address once, and launches get addresses. What
    torch makes of given tensors, as copies, may come before the first launch.
    """

    __slots__ = ("_aligned", "_made", "_others", "_ready", "_rest", "_results", "_turns", "bound", "instead")

    def __init__(
        self,
        plan: Plan,
        given: Sequence[str],
        results: Mapping[str, Buffer | None],
        device: torch.device,
        setting: Setting,
    ) -> None:
        steps = plan.steps or (NOTHING,)
        by_torch = {step.makes for step in steps if isinstance(step, TorchStep)}
        views = {name: each for name, each in plan.buffers.items() if isinstance(each, View)}
        reads = [[views[name].of if name in views else name for name in step.tensors.split()] for step in steps]
        first = {name: turn for turn in reversed(range(len(steps))) for name in reads[turn]}
        wanted = {name: each for name, each in results.items() if each and plan.buffers.get(name, each) is not None}
        scratch = {name: each for name, each in plan.buffers.items() if isinstance(each, Buffer) and name in first}
        made = {name: each for name, each in (wanted | scratch).items() if name not in by_torch - scratch.keys()}
        # names that nothing else has stand for None
        others = sorted({*plan.buffers, *by_torch, *results, *first} - {*given, *made})
        places = {name: place for place, name in enumerate([*given, *others, *made])}
        ends = _ends(steps, reads, {*scratch, *by_torch} - results.keys())
        self._turns: list[_Turn] = []
        for turn, step in enumerate(steps):
            begins = [name for name in made if first.get(name, 0) == turn]
            self._turns.append(
                _Turn(
                    [
                        _Made(places[name], without_memory(device, made[name]), plan.fills.get(name), name in scratch)
                        for name in begins
                    ],
                    [(places[name], places[each.of], each.dtype) for name, each in views.items() if each.of in begins],
                    Step(step) if isinstance(step, Launch) else step.function,
                    taker([places[name] for name in step.tensors.split()]),
                    [places[name] for name in reads[turn]],
                    places[step.makes] if isinstance(step, TorchStep) else -1,
                    [places[name] for name in ends[turn]],
                )
            )
        self._others, self._rest = [None] * len(others), [None] * (len(others) + len(made))
        self._results = [places[name] if name in wanted else None for name in results]
        self._ready = self._turns[: _leading(steps, given, results)]
        self.instead = {  # of kernels of the plan that were not given up before it was made
            each.kernel.__name__: each.instead
            for each in plan.steps
            if isinstance(each, Launch) and each.instead is not None and each.instead.kernel not in setting.given_up
        }
        self._aligned = setting.aligned
        self._made: Take | None = None  # selects the results of a bound call from what it allocates and None
        self.bound: list[_Stretch] = []  # which builds no kernel any more

    def __call__(self, *given: Tensor | None) -> Sequence[Tensor | None]:
        same = self._aligned and not hooked()
        if not same or not self.bound:
            return self._run(same, given)
        tensors: list[Any] = [*given, *self._others]
        for turn in self._ready:
            tensors[turn.makes] = turn.step(*turn.take(tensors))
        addresses: list[Any] = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        results: list[Tensor] = []
        for stretch in self.bound:
            made = list(map(torch.empty_like, stretch.results))
            for place, value in stretch.fills:
                made[place].fill_(value)
            results += made
            addresses += map(Tensor.data_ptr, made)
            held = None if stretch.scratch is None else torch.empty_like(stretch.scratch)
            if stretch.firsts:
                address = 0 if held is None else held.data_ptr()
                addresses += map(address.__add__, stretch.firsts)
            for launch, take in stretch.launches:
                launch(take(addresses))
            held = None
        return results if self._made is None else self._made((*results, None))

    def _run(self, same: bool, given: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        tensors: list[Any] = [*given, *self._rest]
        for turn in self._turns:
            for place, like, fill, _ in turn.made:
                tensors[place] = torch.empty_like(like)
                if fill is not None:
                    tensors[place].fill_(fill)
            for place, source, dtype in turn.views:
                tensors[place] = tensors[source].view(dtype)
            if turn.makes < 0:
                turn.step(same, *turn.take(tensors))
            else:
                tensors[turn.makes] = turn.step(*turn.take(tensors))
            for place in turn.ends:
                tensors[place] = None
        if same:
            self._bind(len(given) + len(self._others))
        return [None if place is None else tensors[place] for place in self._results]

    def _bind(self, known: int) -> None:
        """Bind the launches, if all were repeated, for calls that begin with so many tensors."""
        if any(turn.makes >= 0 or turn.step.bound_at is None for turn in self._turns[len(self._ready) :]):
            return
        stretches = self.stretches()
        order = [*range(known)]
        for made, _ in stretches:
            order += [each.place for each in made]
        at = {place: number for number, place in enumerate(order)}
        allocated = [place for place in order[known:] if place in self._results]
        selected = [len(allocated) if place is None else allocated.index(place) for place in self._results]
        self._made = None if selected == [*range(len(allocated))] else taker(selected)
        self.bound = [_stretch(made, turns, at) for made, turns in stretches]

    def stretches(self) -> list[tuple[list[_Made], list[_Turn]]]:
        """Launches that follow one another, with the results and then the scratch that none before them names."""
        found: list[tuple[list[_Made], list[_Turn]]] = []
        alive, size = set[int](), 0  # scratch that is read later, and bytes of the block
        for turn in self._turns:
            begins = [each for each in turn.made if each.scratch]
            if not found or (begins and not alive and size > MAX_TOGETHER):
                found.append(([], []))
                size = 0
            found[-1][0].extend(turn.made)
            found[-1][1].extend([turn] if turn.makes < 0 else [])
            size += sum(each.like.nbytes for each in begins)
            alive = alive.union([each.place for each in begins]).difference(turn.ends)
        return [(sorted(made), turns) for made, turns in found]  # by place


def _stretch(made: list[_Made], turns: list[_Turn], at: Mapping[int, int]) -> _Stretch:
    results, scratch = ([each for each in made if each.scratch is kind] for kind in (False, True))
    *firsts, size = accumulate(
        [cdiv(each.like.nbytes, PIECE_ALIGNMENT) * PIECE_ALIGNMENT for each in scratch], initial=0
    )
    return _Stretch(
        [each.like for each in results],
        [(number, each.fill) for number, each in enumerate(results) if each.fill is not None],
        without_memory(made[0].like.device, Buffer((size,), torch.uint8)) if size else None,
        firsts,
        [(turn.step.bound_at, taker([at[place] for place in turn.reads])) for turn in turns],
    )


def without_memory(device: torch.device, buffer: Buffer) -> Tensor:
    """A tensor that says what to allocate, and holds nothing."""
    tensor = buffer.on(device)
    tensor.untyped_storage().resize_(0)
    return tensor


def _leading(steps: Sequence[Launch | TorchStep], given: Sequence[str], results: Collection[str]) -> int:
    """Number of leading torch steps, which read given tensors and what such steps made, and make no result."""
    known = {*given}
    for count, step in enumerate(steps):
        if isinstance(step, Launch) or step.makes in results or not {*step.tensors.split()} <= known:
            return count
        known.add(step.makes)
    return len(steps)


def _ends(steps: Sequence[Launch | TorchStep], reads: list[list[str]], names: Collection[str]) -> list[list[str]]:
    """By step, those of the names that no later one reads, unless torch makes them anew."""
    ends: list[list[str]] = []
    read_later: set[str] = set()
    for step, read in zip(reversed(steps), reversed(reads), strict=True):
        makes = {step.makes} if isinstance(step, TorchStep) else set[str]()
        ends.insert(0, [name for name in names if name in makes.union(read) - read_later])
        read_later = (read_later - makes).union(read)
    return ends
