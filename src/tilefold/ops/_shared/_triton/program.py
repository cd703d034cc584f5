"""Programs: plans that run, on one device, for all calls that have the key of the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared.internals import hooked
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Take, TorchStep, cdiv, taker

MAX_TOGETHER = 1 << 20  # bytes of scratch up to which all is allocated at once: each time costs the host
PIECE_ALIGNMENT = 128  # bytes, of scratch in a block: as much as the L2 cache reads at a time


@dataclass(eq=False, slots=True)
class _Turn:
    """Memory, then a step of torch or a launch; places are those of all tensors, or of all addresses."""

    made: list[Tensor] = field(default_factory=list)  # without memory; the last may stand for a block of scratch
    fills: list[tuple[int, float]] = field(default_factory=list)  # which of those have a number in all entries
    offsets: list[int] = field(default_factory=list)  # of scratch in the block
    dtypes: list[torch.dtype] = field(default_factory=list)  # of all these
    function: Callable[..., Tensor | None] | None = None
    launch: Step | None = None
    take: Take = tuple  # what the step gets
    ends: list[int] = field(default_factory=list)  # places of tensors that nothing reads any more


class Program:
    """``program(*given)`` runs the steps on the current stream, allocates what they write, and returns the results.

    Each tensor is asked for its address once, and launches get addresses. Once all of them were repeated they are
    ``bound``, and no kernel is built any more.
    """

    __slots__ = ("_aligned", "_empty", "_results", "bound", "turns")

    def __init__(
        self,
        plan: Plan,
        given: Sequence[str],
        results: Mapping[str, Buffer | None],
        device: torch.device,
        aligned: bool,
    ) -> None:
        self._aligned, self.bound = aligned, False
        reads = [step.tensors.split() for step in plan.steps]
        first = {name: turn for turn in reversed(range(len(reads))) for name in reads[turn]}
        of_torch = [(step, names) for step, names in zip(plan.steps, reads, strict=True) if isinstance(step, TorchStep)]
        wanted = {name: each for name, each in results.items() if each and plan.buffers.get(name, each) is not None}
        scratch = {name: each for name, each in plan.buffers.items() if each and name in first}
        by_torch = {step.makes for step, _ in of_torch} - scratch.keys()
        made = {name: each for name, each in (wanted | scratch).items() if name not in by_torch}
        room = {  # of scratch, in whole pieces
            name: cdiv(each.on(torch.device("meta")).nbytes, PIECE_ALIGNMENT) * PIECE_ALIGNMENT
            for name, each in scratch.items()
        }
        pieces = [name for name in room if name not in wanted and all(name not in names for _, names in of_torch)]
        if sum(room.values()) > MAX_TOGETHER:
            pieces = []
        else:
            first = {}
        *offsets, size = accumulate(map(room.__getitem__, pieces), initial=0)
        self._empty = [] if size else [made[name].dtype for name in pieces]  # of scratch without an element, at 0
        nothing = len(given)  # the place of None
        tensors = known = nothing + 1
        places = {name: place for place, name in enumerate(given)}
        addresses = places | {name: known + place for place, name in enumerate(pieces)}
        known += len(self._empty)
        lasts: dict[int, _Turn] = {}  # by place of a tensor the turn that reads it last
        self.turns = [_Turn() for _ in plan.steps] or [_Turn()]
        for number, turn in enumerate(self.turns):
            begins = [(name, made[name]) for name in made if first.get(name, 0) == number and name not in pieces]
            turn.offsets = offsets if number == 0 and size else []
            for name, buffer in [*begins, ("", Buffer((size,), torch.uint8))] if turn.offsets else begins:
                turn.fills += [(len(turn.made), plan.fills[name])] if name in plan.fills else []
                turn.made.append(buffer.on(device))
                turn.made[-1].untyped_storage().resize_(0)
                places[name], addresses[name], lasts[tensors] = tensors, known, turn
                tensors, known = tensors + 1, known + 1
            turn.dtypes = [each.dtype for each in turn.made]
            if turn.offsets:
                turn.dtypes += [made[name].dtype for name in pieces]
                places |= dict.fromkeys(pieces, places[""])
                addresses |= {name: known + place for place, name in enumerate(pieces)}
                known += len(pieces)
            if not plan.steps:
                break
            step, names = plan.steps[number], reads[number]
            lasts |= {places[name]: turn for name in names if name in places}
            if isinstance(step, Launch):
                turn.launch, turn.take = Step(step), taker([addresses.get(name, nothing) for name in names])
                continue
            turn.function, turn.take = step.function, taker([places.get(name, nothing) for name in names])
            places[step.makes], addresses[step.makes], lasts[tensors] = tensors, known, turn
            tensors, known = tensors + 1, known + 1
        kept = [places[name] if name in wanted else nothing for name in results]
        self._results = taker(kept)
        for place, turn in lasts.items():
            if place > nothing and place not in kept:
                turn.ends.append(place)

    def __call__(self, *given: Tensor | None) -> Sequence[Tensor | None]:
        repeats = self._aligned and not hooked()
        bound = repeats and self.bound
        tensors: list[Any] = [*given, None]
        addresses: list[Any] = [None if x is None else x.data_ptr() for x in tensors]
        addresses += [0] * len(self._empty)
        dtypes: list[Any] = [] if bound else [*(None if x is None else x.dtype for x in tensors), *self._empty]
        for turn in self.turns:
            if turn.made:
                made = list(map(torch.empty_like, turn.made))
                for place, value in turn.fills:
                    made[place].fill_(value)
                tensors += made
                addresses += map(Tensor.data_ptr, made)
                del made
                addresses += map(addresses[-1].__add__, turn.offsets)
                dtypes += turn.dtypes
            if turn.function is not None:
                tensors.append(turn.function(*turn.take(tensors)))
                addresses.append(None if tensors[-1] is None else tensors[-1].data_ptr())
                dtypes.append(None if tensors[-1] is None else tensors[-1].dtype)
            elif turn.launch is not None:
                if repeats and turn.launch.bound is not None:
                    turn.launch.bound(turn.take(addresses))
                else:
                    turn.launch(repeats, turn.take(addresses), turn.take(dtypes))
            for place in turn.ends:
                tensors[place] = None
        if repeats and not bound:
            self.bound = all(turn.launch is None or turn.launch.bound is not None for turn in self.turns)
        return self._results(tensors)
