"""Programs: plans that run, on one device, for all calls that have the key of the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared.internals import hooked
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Take, TorchStep, cdiv, taker

MAX_TOGETHER = (
    1 << 20
)  # bytes of scratch up to which all is allocated at once: each time costs the host
PIECE_ALIGNMENT = 128  # bytes, of scratch in a block: as much as the L2 cache reads at a time


@dataclass(eq=False, slots=True)
class _Turn:
    """Memory, then a step of torch or a launch; places are those of all tensors, or of all
    addresses.
    """

    made: list[Tensor] = field(
        default_factory=list,
    )  # tensors like these, without memory; the last may be a block
    at: slice = field(default_factory=lambda: slice(0))  # their places
    fills: list[tuple[int, float]] = field(
        default_factory=list,
    )  # which of those have a number in all entries
    offsets: list[int] = field(default_factory=list)  # of scratch in the block
    function: Callable[..., Tensor | None] | None = None
    makes: int = 0  # place of what the function makes
    launch: Step | None = None
    take: Take = tuple  # what the step gets
    ends: list[int] = field(default_factory=list)  # places of tensors that nothing reads any more


class Program:
    """``program(*given)`` runs the steps on the current stream, allocates what they write, and
    returns the results.

    Each tensor is asked for its address once, and launches get addresses. Once all of them were
    repeated they are ``bound``, and no kernel is built any more.
    """

    __slots__ = ("_aligned", "_blank", "_dtypes", "_results", "bound", "turns")

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
        of_torch = [
            (step, names)
            for step, names in zip(plan.steps, reads, strict=True)
            if isinstance(step, TorchStep)
        ]
        wanted = {
            name: each
            for name, each in results.items()
            if each and plan.buffers.get(name, each) is not None
        }
        scratch = {name: each for name, each in plan.buffers.items() if each and name in first}
        by_torch = {step.makes for step, _ in of_torch} - scratch.keys()
        pieces = {  # of scratch, with their room in the block
            name: cdiv(each.on(torch.device("meta")).nbytes, PIECE_ALIGNMENT) * PIECE_ALIGNMENT
            for name, each in scratch.items()
        }
        if sum(pieces.values()) > MAX_TOGETHER:
            pieces = {}
        else:
            alone = wanted.keys() | {name for _, names in of_torch for name in names}
            pieces, first = {name: room for name, room in pieces.items() if name not in alone}, {}
        pieces = dict(
            sorted(pieces.items(), key=itemgetter(1)),
        )  # those without an element come first, and lie at 0
        *offsets, size = accumulate(filter(None, pieces.values()), initial=0)
        made = {
            name: each
            for name, each in (wanted | scratch).items()
            if name not in by_torch | pieces.keys()
        }
        made = dict(sorted(made.items(), key=lambda item: first.get(item[0], 0)))
        made |= {"": Buffer((size,), torch.uint8)} if size else {}
        nothing = len(
            given,
        )  # the place of None; then come tensors that are made, those by torch, and pieces
        places = {
            name: place for place, name in enumerate([*given, None, *made]) if name is not None
        }
        makes = nothing + 1 + len(made)
        addresses = places | {
            name: makes + len(of_torch) + place for place, name in enumerate(pieces)
        }
        places |= dict.fromkeys(pieces, places.get("", nothing))
        self._blank: list[int | None] = [None] * (1 + len(made) + len(of_torch)) + [0] * len(pieces)
        self._dtypes = [*(each.dtype for each in made.values()), *[None] * len(of_torch)]
        self._dtypes += [scratch[name].dtype for name in pieces]
        self.turns = [_Turn() for _ in plan.steps] or [_Turn()]
        self.turns[0].offsets = offsets
        for name, buffer in made.items():
            turn, like = self.turns[first.get(name, 0)], buffer.on(device)
            like.untyped_storage().resize_(0)
            turn.made.append(like)
            turn.at = slice(places[name] + 1 - len(turn.made), places[name] + 1)
            turn.fills += [(places[name], plan.fills[name])] if name in plan.fills else []
        lasts: dict[int, _Turn] = {}  # by place of a tensor the turn that reads it last
        for turn, step, names in zip(self.turns, plan.steps, reads, strict=False):
            lasts |= {places[name]: turn for name in names if name in places}
            if isinstance(step, Launch):
                turn.launch, turn.take = (
                    Step(step),
                    taker([addresses.get(name, nothing) for name in names]),
                )
                continue
            turn.function, turn.take = (
                step.function,
                taker([places.get(name, nothing) for name in names]),
            )
            places[step.makes] = addresses[step.makes] = turn.makes = makes
            lasts[makes], makes = turn, makes + 1
        kept = [places[name] if name in wanted else nothing for name in results]
        self._results = taker(kept)
        for place, turn in lasts.items():
            if place > nothing and place not in kept:
                turn.ends.append(place)

    def __call__(self, *given: Tensor | None) -> Sequence[Tensor | None]:
        repeats = self._aligned and not hooked()
        bound = repeats and self.bound
        tensors: list[Any] = [*given, *[None] * len(self._blank)]
        addresses: list[Any] = [*(None if x is None else x.data_ptr() for x in given), *self._blank]
        dtypes: list[Any] = (
            [] if bound else [*(None if x is None else x.dtype for x in given), None, *self._dtypes]
        )
        for turn in self.turns:
            if turn.made:
                tensors[turn.at] = map(torch.empty_like, turn.made)
                addresses[turn.at] = map(Tensor.data_ptr, tensors[turn.at])
            if turn.offsets:
                addresses[-len(turn.offsets) :] = map(
                    addresses[turn.at.stop - 1].__add__,
                    turn.offsets,
                )
            for place, value in turn.fills:
                tensors[place].fill_(value)
            if turn.function is not None:
                place = turn.makes
                tensors[place] = turn.function(*turn.take(tensors))
                addresses[place] = None if tensors[place] is None else tensors[place].data_ptr()
                if not bound:
                    dtypes[place] = None if tensors[place] is None else tensors[place].dtype
            elif turn.launch is not None:
                if repeats and turn.launch.bound is not None:
                    turn.launch.bound(turn.take(addresses))
                else:
                    turn.launch(repeats, turn.take(addresses), turn.take(dtypes))
            for place in turn.ends:
                tensors[place] = None
        if repeats and not bound:
            self.bound = all(
                turn.launch is None or turn.launch.bound is not None for turn in self.turns
            )
        return self._results(tensors)
