"""Launches as data: run with tensors the first times, and by their addresses when such a call comes again.

A plan says what is launched in terms of names. What a call's signature fixes is worked out once; a call like it then
looks at addresses, allocates its results and one block of scratch, and launches. A replay holds no tensor of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared._triton.direct import c_function, descriptor_arguments, hooked
from tilefold.ops._shared._triton.launch import Grid, Launcher
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.lsr_head._layout import Plans

ALIGNMENT = 16  # bytes, of every tensor that a remembered kernel reads
UNFIT = 1  # no such address, of what would have to be copied first
MOST_DESCRIPTORS = 64  # of one operand of one launch; blocks of a vocabulary lie at addresses of their own


class Descriptor(NamedTuple):
    """A TMA descriptor of the ``[rows, columns]`` that ``name`` holds, made by ``make(tensor)``."""

    name: str
    rows: int
    columns: int
    make: Callable[[Tensor], Any]


class Step(NamedTuple):
    """One launch: its ``arguments`` are names of tensors, descriptors (which come first), numbers and ``None``."""

    run: Launcher
    grid: Grid
    arguments: tuple[str | Descriptor | int | float | None, ...]


class Piece(NamedTuple):
    """Scratch that lives while the launches are enqueued."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Plan(NamedTuple):
    """Launches in their order, and the scratch that they share."""

    steps: tuple[Step, ...]
    pieces: tuple[Piece, ...]


def run_plan(plan: Plan, tensors: Mapping[str, Tensor | None], device: torch.device) -> dict[str, Tensor | None]:
    """Launch every step with ``tensors`` by their names; returns these and the scratch."""
    used = dict(tensors)
    for piece in plan.pieces:
        used[piece.name] = torch.empty(piece.shape, dtype=piece.dtype, device=device)
    for step in plan.steps:
        step.run(step.grid, resolved(step, used))
    return used


def resolved(step: Step, tensors: Mapping[str, Tensor | None]) -> tuple[Any, ...]:
    """The arguments of a step, with tensors in the places of names."""
    # once for every launch of a call that is not repeated: isinstance would take twice as long
    arguments = [tensors[argument] if type(argument) is str else argument for argument in step.arguments]
    for place, source in enumerate(arguments[:2]):
        if type(source) is Descriptor:
            tensor = tensors[source.name]
            if tensor is None:
                raise LookupError(f"{source.name} must be a tensor where a descriptor reads it, got None.")
            arguments[place] = source.make(tensor.view(source.rows, source.columns))
    return tuple(arguments)


def second_time(plans: Plans, name: object) -> bool:
    """Whether this was asked before: what batches of ever other sizes call once is not worth remembering.

    Nor is what :func:`remembered` found that nobody can repeat.
    """
    asked: bool | None = plans.get(("once", name))
    if asked is None:
        plans["once", name] = True
    return asked is True


def address_of(tensor: Tensor) -> int:
    """Where a contiguous tensor begins."""
    return tensor.data_ptr() if tensor.is_contiguous() else UNFIT


class Replay:
    """The launches of a plan that ran with these tensors, for others like them: ``replay(addresses)``.

    ``order`` names the tensors whose addresses a call gives; those that were ``None`` stay so.
    """

    def __init__(self, plan: Plan, tensors: Mapping[str, Tensor | None], order: Sequence[str], index: int) -> None:
        self._device = torch.device("cuda", index)
        self._index = index
        self._offsets: list[int] = []
        size = 0
        for piece in plan.pieces:
            self._offsets.append(size)
            count = math.prod(piece.shape) * piece.dtype.itemsize
            size += -(-count // ALIGNMENT) * ALIGNMENT
        self._size = size
        places = {name: place for place, name in enumerate((*order, *(piece.name for piece in plan.pieces)))}
        self._numbers: list[Any] = []
        self._launches = [self._launch(step, tensors, places) for step in plan.steps]
        self._stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

    def __call__(self, *addresses: int | None) -> None:
        """Enqueue the launches on the current stream of the device, which must be the current one."""
        stream = self._stream(self._index)
        if not self._size:
            values = [*addresses, *self._offsets, *self._numbers]  # nobody looks at scratch without an element
            for launch in self._launches:
                launch(stream, values)
            return
        room = torch.empty(self._size, dtype=torch.uint8, device=self._device)  # lives until all is enqueued
        first = room.data_ptr()
        values = [*addresses, *[first + offset for offset in self._offsets], *self._numbers]
        for launch in self._launches:
            launch(stream, values)

    def _launch(
        self, step: Step, tensors: Mapping[str, Tensor | None], places: Mapping[str, int]
    ) -> Callable[[int, list[Any]], None]:
        found = step.run.compiled(resolved(step, tensors))
        if found is None:
            raise LookupError("the kernel must have run with arguments like these, got others.")
        compiled, tail = found
        sources = [argument for argument in step.arguments if isinstance(argument, Descriptor)]
        known = c_function(compiled.run, len(sources))
        if known is None:
            raise NotImplementedError(
                "launches can be repeated by address with the launchers of Triton 3.6, got another."
            )
        function, metadata = known
        pick = itemgetter(*[self._place(a, tensors, places) for a in step.arguments if not isinstance(a, Descriptor)])
        (x, y, z), handle, packed = step.grid, compiled.function, compiled.packed_metadata
        cooperative, overlapped = compiled.run.launch_cooperative_grid, compiled.run.launch_pdl

        def launch(stream: int, values: list[Any]) -> None:
            function(
                x, y, z, stream, handle, cooperative, overlapped, None, None, packed, None, None, None,
                *pick(values), *tail,
            )  # fmt: skip

        if not sources:
            return launch
        weight, rows = (
            _Described(source, places[source.name], facts) for source, facts in zip(sources, metadata, strict=True)
        )

        def launch_described(stream: int, values: list[Any]) -> None:
            function(
                x, y, z, stream, handle, cooperative, overlapped, None, None, packed, None, None, None,
                *weight.arguments(values), *rows.arguments(values), *pick(values), *tail,
            )  # fmt: skip

        return launch_described

    def _place(self, argument: Any, tensors: Mapping[str, Tensor | None], places: Mapping[str, int]) -> int:
        """Where the argument stands among addresses, scratch and numbers."""
        if isinstance(argument, str) and tensors[argument] is not None:
            return places[argument]
        self._numbers.append(None if isinstance(argument, str) else argument)
        return len(places) + len(self._numbers) - 1


class _Described:
    """What stands for a descriptor among the arguments of a launch, by the address it describes."""

    def __init__(self, source: Descriptor, place: int, facts: Any) -> None:
        self._place, self._facts = place, facts
        self._shape, self._strides = [source.rows, source.columns], [source.columns, 1]
        self._known: dict[int, list[Any]] = {}

    def arguments(self, values: list[Any]) -> list[Any]:
        address: int = values[self._place]
        found = self._known.get(address)
        return self._made(address) if found is None else found

    def _made(self, address: int) -> list[Any]:
        made = descriptor_arguments(address, self._shape, self._strides, self._facts)
        if len(self._known) >= MOST_DESCRIPTORS:
            self._known = {}
        self._known[address] = made  # a descriptor says where, not what
        return made


def never(plans: Plans, name: object) -> None:
    """No further call is a :func:`second_time`: looking for a replay again would cost every call more than it saves."""
    plans["once", name] = False


def remembered(
    plan: Plan,
    tensors: Mapping[str, Tensor | None],
    order: Sequence[str],
    device: torch.device,
    plans: Plans,
    name: object,
) -> Replay | None:
    """A replay of launches that just ran with these ``tensors``, or ``None`` where they cannot be repeated by address.

    Kernels are compiled for the alignment of their tensors; under capture nothing ran. With a launcher that is not
    known, ``name`` is not asked for again.
    """
    if not can_remember(device, *tensors.values()):
        return None
    try:
        return Replay(plan, tensors, order, device.index)
    except NotImplementedError:
        never(plans, name)
        return None


def can_remember(device: torch.device, *tensors: Tensor | None) -> bool:
    """Whether kernels that just ran with these tensors may be launched by address from now on."""
    if device.type != "cuda" or triton_interpreted() or torch.cuda.is_current_stream_capturing():
        return False
    return all(tensor is None or tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


def not_here(index: int) -> bool:
    """Whether launches of device ``index`` must go the long way: another one is current, or a profiler listens."""
    return torch._C._cuda_getDevice() != index or hooked()
