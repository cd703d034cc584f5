"""Programs: plans that run, on one device, for all calls that have the key of the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import add
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared.internals import LaunchAt, hooked
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, Take, TorchStep, View, cdiv, taker

MAX_TOGETHER = 1 << 20  # bytes of scratch that are held for a step longer than it is read: each block costs the host
PIECE_ALIGNMENT = 128  # bytes, of scratch in a block: as much as the L2 cache reads at a time


class _Stretch:
    """Memory, then steps of torch, then launches; places are those of all tensors, or of all addresses."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []  # like what is allocated, but without memory; the last may be a block of scratch
        self.fills: list[tuple[int, float]] = []  # which of those have a number in all entries, by their order
        # addresses of views, and of scratch in the block, are so many bytes behind others
        self.bases: Take = taker([])
        self.offsets: list[int] = []
        self.dtypes: list[torch.dtype] = []  # of all these
        self.torch: list[tuple[Any, Take, list[int]]] = []  # with places of tensors that nothing reads any more
        self.launches: list[tuple[Step, Take]] = []
        self.bound: list[tuple[LaunchAt, Take]] = []
        self.ends: list[int] = []


class Program:
    """``program(*given)`` runs the steps on the current stream, allocates what they write, and returns the results.

    Each tensor is asked for its address once, and launches get addresses. Once all of them were repeated they are
    ``bound``, and no kernel is built any more.
    """

    __slots__ = ("_aligned", "_results", "bound", "instead", "stretches")

    def __init__(
        self,
        plan: Plan,
        given: Sequence[str],
        results: Mapping[str, Buffer | None],
        device: torch.device,
        setting: Setting,
    ) -> None:
        self.instead = {  # of kernels of the plan that were not given up before it was made
            each.kernel.__name__: each.instead
            for each in plan.steps
            if isinstance(each, Launch) and each.instead is not None and each.instead.kernel not in setting.given_up
        }
        self._aligned, self.bound = setting.aligned, False
        self.stretches: list[_Stretch] = []
        views = {name: each for name, each in plan.buffers.items() if isinstance(each, View)}
        reads = [[views[x].of if x in views else x for x in step.tensors.split()] for step in plan.steps]
        wanted = {name: each for name, each in results.items() if each and plan.buffers.get(name, each) is not None}
        read = {name for names in reads for name in names}
        scratch = {name: each for name, each in plan.buffers.items() if isinstance(each, Buffer) and name in read}
        of_torch = [(step, names) for step, names in zip(plan.steps, reads, strict=True) if isinstance(step, TorchStep)]
        by_torch = {step.makes for step, _ in of_torch} - scratch.keys()
        made = {name: each for name, each in (wanted | scratch).items() if name not in by_torch}
        pieces = {name for name in made if name not in wanted and all(name not in names for _, names in of_torch)}
        nothing, zero = len(given), len(given) + 1  # the places of None, and of the address 0
        places = {name: place for place, name in enumerate(given)}  # of tensors, and of the blocks of scratch
        addresses, tensors, known = dict(places), nothing + 1, zero + 1
        ends: dict[int, list[int]] = {}  # by place of a tensor, the list of what ends where it was last read
        for begins, turns in _groups(plan, reads, made, scratch):
            stretch = _Stretch()
            self.stretches.append(stretch)
            own, parts = ([name for name in begins if (name in pieces) == kind] for kind in (False, True))
            sizes = [made[name].on(torch.device("meta")).nbytes for name in parts]
            *firsts, size = accumulate([cdiv(each, PIECE_ALIGNMENT) * PIECE_ALIGNMENT for each in sizes], initial=0)
            buffers = [made[name] for name in own] + ([Buffer((size,), torch.uint8)] if size else [])
            for name, buffer in zip([*own, ""], buffers, strict=False):
                stretch.made.append(without_memory(device, buffer))
                stretch.fills += [(len(stretch.made) - 1, plan.fills[name])] if name in plan.fills else []
                places[name], addresses[name], ends[tensors] = tensors, known, stretch.ends
                tensors, known = tensors + 1, known + 1
            base = addresses[""] if size else zero
            away = [(name, base, first, made[name].dtype) for name, first in zip(parts, firsts, strict=True)]
            away += [(name, addresses[x.of], 0, x.dtype) for name, x in views.items() if x.of in own]
            places |= dict.fromkeys(parts, places[""] if size else nothing)
            addresses |= {name: known + number for number, (name, *_) in enumerate(away)}
            known += len(away)
            stretch.bases, stretch.offsets = taker([each[1] for each in away]), [each[2] for each in away]
            stretch.dtypes = [buffer.dtype for buffer in buffers] + [each[3] for each in away]
            for turn in turns:
                step, ending = plan.steps[turn], stretch.ends
                if isinstance(step, TorchStep):
                    ending = []
                    take = taker([places.get(name, nothing) for name in reads[turn]])
                    stretch.torch.append((step.function, take, ending))
                else:
                    take = taker([addresses.get(name, nothing) for name in step.tensors.split()])
                    stretch.launches.append((Step(step), take))
                ends |= {places[name]: ending for name in reads[turn] if name in places}
                if isinstance(step, TorchStep):
                    places[step.makes], addresses[step.makes], ends[tensors] = tensors, known, ending
                    tensors, known = tensors + 1, known + 1
        kept = [places[name] if name in wanted else nothing for name in results]
        self._results = taker(kept)
        for place, ending in ends.items():
            if place > nothing and place not in kept:
                ending.append(place)

    def __call__(self, *given: Tensor | None) -> Sequence[Tensor | None]:
        repeats = self._aligned and not hooked()
        bound = repeats and self.bound
        tensors: list[Any] = [*given, None]
        addresses: list[Any] = [None if x is None else x.data_ptr() for x in tensors]
        addresses.append(0)
        dtypes: list[Any] = [] if bound else [*(None if x is None else x.dtype for x in tensors), None]
        for stretch in self.stretches:
            made = list(map(torch.empty_like, stretch.made))
            for place, value in stretch.fills:
                made[place].fill_(value)
            tensors += made
            addresses += map(Tensor.data_ptr, made)
            del made
            if stretch.offsets:
                addresses += map(add, stretch.bases(addresses), stretch.offsets)
            dtypes += stretch.dtypes
            for function, take, ends in stretch.torch:
                tensors.append(function(*take(tensors)))
                addresses.append(None if tensors[-1] is None else tensors[-1].data_ptr())
                dtypes.append(None if tensors[-1] is None else tensors[-1].dtype)
                for place in ends:
                    tensors[place] = None
            if bound:
                for launch, take in stretch.bound:
                    launch(take(addresses))
            else:
                for step, take in stretch.launches:
                    step(repeats, take(addresses), take(dtypes))
            for place in stretch.ends:
                tensors[place] = None
        if repeats and not bound and all(step.bound for each in self.stretches for step, _ in each.launches):
            for stretch in self.stretches:
                stretch.bound = [(step.bound, take) for step, take in stretch.launches if step.bound is not None]
            self.bound = True
        return self._results(tensors)


def _groups(
    plan: Plan, reads: list[list[str]], made: Mapping[str, Buffer], scratch: Mapping[str, Buffer]
) -> list[tuple[list[str], list[int]]]:
    """By stretch, the names of what is made that none before has, scratch in one block, and the steps."""
    first = {name: turn for turn in reversed(range(len(reads))) for name in reads[turn]}
    last = {name: turn for turn, names in enumerate(reads) for name in names}
    found: list[tuple[list[str], list[int]]] = [([] if reads else [*made], [])]
    alive, size, launched = set[str](), 0, False  # scratch that is read later, and bytes of the block
    for turn, step in enumerate(plan.steps):
        begins = [name for name in made if first.get(name, 0) == turn]
        own = [name for name in begins if name in scratch]
        if (launched and isinstance(step, TorchStep)) or (own and not alive and size > MAX_TOGETHER):
            found.append(([], []))
            size = 0
        found[-1][0].extend(begins)
        found[-1][1].append(turn)
        launched = isinstance(step, Launch)
        size += sum(made[name].on(torch.device("meta")).nbytes for name in own)
        alive = {name for name in alive.union(own) if last[name] > turn}
    return found


def without_memory(device: torch.device, buffer: Buffer) -> Tensor:
    """A tensor that says what to allocate, and holds nothing."""
    tensor = buffer.on(device)
    tensor.untyped_storage().resize_(0)
    return tensor
