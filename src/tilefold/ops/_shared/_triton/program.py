"""Programs: plans that are bound to a device, allocate memory and launch kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import KernelLauncher
from tilefold.ops._shared.internals import has_launch_hooks
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Selector, TorchStep, cdiv, selector

# Bytes of scratch up to which one block holds all of it, since every allocation costs CPU time.
MAX_SCRATCH_BLOCK = 1 << 20
# Bytes at whose multiples the pieces of the block begin: the L2 cache reads as many at a time.
PIECE_ALIGNMENT = 128
SCRATCH_BLOCK = ""  # name of the block among the buffers, which no plan can use


class Program:
    """Runs the steps of a plan on the current stream: ``results = program(*inputs)``.

    A call allocates results and scratch. It reads the address of every tensor once, and kernels
    get addresses. A kernel whose launch was repeated is bound: it is launched without Triton.

    Args:
        plan: steps, scratch buffers and initial values of one pass.
        input_names: names that the plan has for ``inputs``, in their order.
        results: shape, dtype and strides of the results by name; ``None`` for a result that is not
            computed.
        device: device of the buffers.
        aligned: whether all inputs begin at multiples of 16 bytes, without which no launch is
            bound.

    Attributes:
        steps: steps of the plan, with the memory that is allocated before each.
        bound: whether all launches are bound, so that no kernel needs to be compiled any more.
    """

    __slots__ = (
        "_aligned",
        "_empty_addresses",
        "_memory_dtypes",
        "_select_results",
        "bound",
        "steps",
    )

    def __init__(
        self,
        plan: Plan,
        input_names: Sequence[str],
        results: Mapping[str, Buffer | None],
        device: torch.device,
        aligned: bool,
    ) -> None:
        """Lay out the memory of a plan, and replace the names in its steps by positions.

        Args:
            plan: the plan.
            input_names: names of the tensors that a call passes, in their order.
            results: shapes of the results by name; ``None`` for a result that does not exist.
            device: the device.
            aligned: whether all inputs begin at multiples of 16 bytes.
        """
        layout = _layout_memory(plan, input_names, results)
        self.steps, result_positions = _bind_steps(plan, layout, results, device)
        self.bound = False
        self._aligned = aligned
        self._select_results = selector(result_positions)
        n_tensors = 1 + len(layout.buffers) + layout.n_torch_steps  # 1 for the position of None
        self._empty_addresses = [*[None] * n_tensors, *[0] * len(layout.pieces)]
        self._memory_dtypes = [
            None,
            *[buffer.dtype for buffer in layout.buffers.values()],
            *[None] * layout.n_torch_steps,
            *[buffer.dtype for buffer in layout.pieces.values()],
        ]

    def __call__(self, *inputs: Tensor | None) -> Sequence[Tensor | None]:
        """Run all steps, and return the results in the order of their names."""
        may_bind = self._aligned and not has_launch_hooks()
        bound = may_bind and self.bound
        tensors: list[Any] = [*inputs, *[None] * len(self._empty_addresses)]
        addresses: list[Any] = [
            *(None if x is None else x.data_ptr() for x in inputs),
            *self._empty_addresses,
        ]
        dtypes: list[Any] = []  # bound launches need none
        if not bound:
            dtypes = [*(None if x is None else x.dtype for x in inputs), *self._memory_dtypes]
        for step in self.steps:
            if step.templates:
                tensors[step.positions] = map(torch.empty_like, step.templates)
                addresses[step.positions] = map(Tensor.data_ptr, tensors[step.positions])
            if step.piece_offsets:
                block_address = addresses[step.positions.stop - 1]
                addresses[-len(step.piece_offsets) :] = map(
                    block_address.__add__,
                    step.piece_offsets,
                )
            for position, value in step.fills:
                tensors[position].fill_(value)
            if step.function is not None:
                position = step.output_position
                # No local variable holds the output, so that it is freed when the list drops it.
                tensors[position] = step.function(*step.select_arguments(tensors))
                has_output = tensors[position] is not None
                addresses[position] = tensors[position].data_ptr() if has_output else None
                if not bound:
                    dtypes[position] = tensors[position].dtype if has_output else None
            elif step.launcher is not None:
                if may_bind and step.launcher.bound is not None:
                    step.launcher.bound(step.select_arguments(addresses))
                else:
                    step.launcher(
                        may_bind,
                        step.select_arguments(addresses),
                        step.select_arguments(dtypes),
                    )
            for position in step.released:
                tensors[position] = None
        if may_bind and not bound:
            self.bound = all(
                step.launcher is None or step.launcher.bound is not None for step in self.steps
            )
        return self._select_results(tensors)


@dataclass(eq=False, slots=True)
class _ProgramStep:
    """One torch function or kernel launch, and the memory that is allocated before it.

    Positions count in the lists of tensors and of addresses that :class:`_Layout` describes.

    Attributes:
        templates: tensors without storage, whose ``torch.empty_like`` are the new buffers. The
            scratch block is the last of them.
        positions: where the new buffers go.
        fills: positions of buffers that are filled with a number, and the number.
        piece_offsets: bytes from the beginning of the scratch block to its pieces that have
            elements.
        function: torch function of the step, if it is one.
        output_position: where the function's output goes.
        launcher: kernel launch of the step, if it is one.
        select_arguments: selects the step's arguments: tensors for a function, addresses for a
            kernel.
        released: positions of tensors that no later step uses.
    """

    templates: list[Tensor] = field(default_factory=list)
    positions: slice = field(default_factory=lambda: slice(0))
    fills: list[tuple[int, float]] = field(default_factory=list)
    piece_offsets: list[int] = field(default_factory=list)
    function: Callable[..., Tensor | None] | None = None
    output_position: int = 0
    launcher: KernelLauncher | None = None
    select_arguments: Selector = tuple
    released: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class _Layout:
    """The tensors and addresses of a program, in the order of their positions.

    The list of tensors holds the inputs, one ``None`` for names without a tensor, the buffers, and
    the outputs of torch steps. The list of addresses holds the same, and then the pieces of the
    scratch block.

    Attributes:
        input_names: names of the inputs.
        buffers: results and scratch that are allocated, by name. The scratch block is the last.
        allocation_steps: number of the step before which a buffer is allocated, by its name.
        n_torch_steps: number of torch steps. Every one has an output.
        pieces: scratch in the block. Buffers without elements come first, and their address is 0.
        piece_offsets: bytes from the beginning of the block to the pieces that have elements.
        result_names: names of the results that are computed.
    """

    input_names: Sequence[str]
    buffers: dict[str, Buffer]
    allocation_steps: dict[str, int]
    n_torch_steps: int
    pieces: dict[str, Buffer]
    piece_offsets: list[int]
    result_names: set[str]

    @property
    def none_position(self) -> int:
        """Position of ``None``."""
        return len(self.input_names)

    @property
    def first_buffer_position(self) -> int:
        """Position of the first buffer."""
        return self.none_position + 1

    @property
    def first_output_position(self) -> int:
        """Position of the first torch step's output."""
        return self.first_buffer_position + len(self.buffers)

    @property
    def first_piece_position(self) -> int:
        """Position of the block's first piece, in the list of addresses."""
        return self.first_output_position + self.n_torch_steps


def _first_uses(plan: Plan) -> dict[str, int]:
    """Return the number of the first step that uses a tensor, by the tensor's name."""
    first_uses: dict[str, int] = {}
    for number, step in enumerate(plan.steps):
        for name in step.tensors:
            first_uses.setdefault(name, number)
    return first_uses


def _layout_memory(
    plan: Plan,
    input_names: Sequence[str],
    results: Mapping[str, Buffer | None],
) -> _Layout:
    """Decide which buffers are allocated, before which step, and which share the scratch block.

    Little scratch, and that of a plan with ``one_block``, is allocated at once with all results,
    before the first step. Other scratch is allocated buffer by buffer, and results too, before the
    step that uses it first, so that memory of earlier steps can be used again.
    """
    first_uses = _first_uses(plan)
    torch_steps = [step for step in plan.steps if isinstance(step, TorchStep)]
    computed_results = {
        name: buffer
        for name, buffer in results.items()
        if buffer is not None and name not in plan.skipped_results
    }
    scratch = {name: buffer for name, buffer in plan.buffers.items() if name in first_uses}

    n_bytes = sum(_piece_size(buffer) for buffer in scratch.values())
    at_once = plan.one_block or n_bytes <= MAX_SCRATCH_BLOCK
    pieces: dict[str, Buffer] = {}
    if at_once:
        # A result outlives the call, and torch functions read tensors, not addresses.
        read_by_torch = {name for step in torch_steps for name in step.tensors}
        no_pieces = computed_results.keys() | read_by_torch
        pieces = {name: scratch[name] for name in scratch if name not in no_pieces}
        pieces = dict(sorted(pieces.items(), key=lambda item: _piece_size(item[1])))
    piece_offsets, block_size = _piece_offsets(pieces)

    created_by_torch = {step.output for step in torch_steps} - scratch.keys()
    buffers = {
        name: buffer
        for name, buffer in {**computed_results, **scratch}.items()
        if name not in created_by_torch and name not in pieces
    }
    allocation_steps = {name: 0 if at_once else first_uses.get(name, 0) for name in buffers}
    buffers = {name: buffers[name] for name in sorted(buffers, key=allocation_steps.__getitem__)}
    if block_size:
        buffers[SCRATCH_BLOCK] = Buffer((block_size,), torch.uint8)
        allocation_steps[SCRATCH_BLOCK] = 0
    return _Layout(
        input_names=input_names,
        buffers=buffers,
        allocation_steps=allocation_steps,
        n_torch_steps=len(torch_steps),
        pieces=pieces,
        piece_offsets=piece_offsets,
        result_names=set(computed_results),
    )


def _piece_offsets(pieces: Mapping[str, Buffer]) -> tuple[list[int], int]:
    """Return the offsets of the pieces that have elements, and the size of the block, in bytes."""
    offsets: list[int] = []
    block_size = 0
    for buffer in pieces.values():
        size = _piece_size(buffer)
        if size > 0:
            offsets.append(block_size)
            block_size += size
    return offsets, block_size


def _piece_size(buffer: Buffer) -> int:
    """Return the bytes of a buffer, rounded up to the alignment of pieces."""
    n_bytes = buffer.on(torch.device("meta")).nbytes
    return cdiv(n_bytes, PIECE_ALIGNMENT) * PIECE_ALIGNMENT


def _bind_steps(
    plan: Plan,
    layout: _Layout,
    results: Mapping[str, Buffer | None],
    device: torch.device,
) -> tuple[list[_ProgramStep], list[int]]:
    """Replace the names in a plan's steps by positions.

    Args:
        plan: the plan.
        layout: the layout of its memory.
        results: shapes of the results by name; ``None`` for a result that does not exist.
        device: the device.

    Returns:
        The steps, and the positions of the results in the list of tensors. A plan without steps
        gets one step that allocates the results.
    """
    tensor_positions = {name: position for position, name in enumerate(layout.input_names)}
    for position, name in enumerate(layout.buffers, layout.first_buffer_position):
        tensor_positions[name] = position
    address_positions = dict(tensor_positions)
    for position, name in enumerate(layout.pieces, layout.first_piece_position):
        address_positions[name] = position
        # While a piece is used, its block is.
        tensor_positions[name] = tensor_positions.get(SCRATCH_BLOCK, layout.none_position)

    steps = [_ProgramStep() for _ in plan.steps] or [_ProgramStep()]
    steps[0].piece_offsets = layout.piece_offsets
    _assign_buffers(steps, plan, layout, device)

    last_users: dict[int, _ProgramStep] = {}  # the last step that uses a tensor, by its position
    next_output_position = layout.first_output_position
    for step, planned in zip(steps, plan.steps, strict=False):
        for name in planned.tensors:
            if name in tensor_positions:
                last_users[tensor_positions[name]] = step
        if isinstance(planned, Launch):
            step.launcher = KernelLauncher(planned)
            step.select_arguments = _select(planned.tensors, address_positions, layout)
        else:
            step.function = planned.function
            step.select_arguments = _select(planned.tensors, tensor_positions, layout)
            step.output_position = next_output_position
            # From here on the name is that of the output.
            tensor_positions[planned.output] = next_output_position
            address_positions[planned.output] = next_output_position
            last_users[next_output_position] = step
            next_output_position += 1

    result_positions = [
        tensor_positions[name] if name in layout.result_names else layout.none_position
        for name in results
    ]
    for position, step in last_users.items():
        if position >= layout.first_buffer_position and position not in result_positions:
            step.released.append(position)
    return steps, result_positions


def _select(names: Sequence[str], positions: Mapping[str, int], layout: _Layout) -> Selector:
    """Return a function that selects a step's arguments; ``None`` for names without a position."""
    return selector([positions.get(name, layout.none_position) for name in names])


def _assign_buffers(
    steps: list[_ProgramStep],
    plan: Plan,
    layout: _Layout,
    device: torch.device,
) -> None:
    """Let each step allocate, and fill, the buffers that the layout assigns to it.

    Args:
        steps: the steps, which change.
        plan: the plan, which says which buffers are filled.
        layout: the layout of the memory.
        device: the device.
    """
    for position, (name, buffer) in enumerate(
        layout.buffers.items(),
        layout.first_buffer_position,
    ):
        step = steps[layout.allocation_steps[name]]
        template = buffer.on(device)
        template.untyped_storage().resize_(0)
        step.templates.append(template)
        # Buffers are in the order of their steps, so those of a step have consecutive positions.
        step.positions = slice(position + 1 - len(step.templates), position + 1)
        if name in plan.fills:
            step.fills.append((position, plan.fills[name]))
