"""Launching a compiled kernel by addresses: nothing is looked up, bound or checked again.

Triton's own call of a compiled kernel asks for the device and the stream, collects metadata for hooks and has the
driver look at every pointer. Here all of it was settled when the kernel ran first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton.context import enter_context
from tilefold.ops._shared._triton.direct import c_function, descriptor_arguments
from tilefold.ops._shared._triton.launch import Grid, Launcher
from tilefold.ops._shared.impl import triton_interpreted


def can_remember(*arguments: object) -> bool:
    """Whether a launch that just ran with these ``arguments`` may be repeated by address.

    Kernels are compiled for the alignment of their tensors; under capture nothing ran, and what was allocated is the
    graph's. Offsets in int64 are copied first.
    """
    if triton_interpreted() or torch.cuda.is_current_stream_capturing():
        return False
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    return all(tensor.data_ptr() % 16 == 0 and tensor.dtype != torch.int64 for tensor in tensors)


def second_time(plans: dict[Any, Any], name: Any) -> bool:
    """Whether this was asked before: what batches of ever other sizes call once is not worth remembering."""
    if ("once", name) in plans:
        return True
    plans["once", name] = True
    return False


class Direct:
    """A kernel that ran with ``arguments``, on the same grid of the same device.

    ``launch`` takes the arguments anew, addresses in the place of tensors; a descriptor's place takes all that
    :meth:`described` gives.
    """

    def __init__(self, run: Launcher, grid: Grid, arguments: tuple[Any, ...], index: int) -> None:
        found = run.compiled(arguments)
        if found is None:
            raise LookupError("the kernel must have run with arguments like these, got others.")
        compiled, constants = found
        descriptor = next((argument for argument in arguments if hasattr(argument, "block_shape")), None)
        self._block = None if descriptor is None else descriptor.block_shape
        self._facts: Any = None
        self._seen: tuple[int, list[Any]] = (0, [])
        launcher = compiled.run
        known = c_function(launcher, 0 if descriptor is None else 1)
        self.launch: Callable[..., None]
        if known is None:
            runner = compiled[grid]
            self.launch = lambda *arguments: runner(*arguments, *constants)
            return
        function, facts = known
        if descriptor is not None:
            self._facts = facts[0]
        stream = torch._C._cuda_getCurrentRawStream
        x, y, z = grid
        handle, packed = compiled.function, compiled.packed_metadata
        cooperative, overlapped = launcher.launch_cooperative_grid, launcher.launch_pdl

        def launch(*arguments: Any) -> None:
            function(
                x, y, z, stream(index), handle, cooperative, overlapped, None, None, packed, None, None, None,
                *arguments, *constants,
            )  # fmt: skip

        self.launch = launch

    def described(self, rows: Tensor, address: int, shape: list[int]) -> list[Any]:
        """What stands for contiguous ``rows`` of this shape, at this address, in the place of a descriptor."""
        seen, arguments = self._seen
        if seen == address:
            return arguments  # a descriptor says where, not what
        if self._facts is None:
            enter_context(rows.get_device())
            return [TensorDescriptor(rows, shape, [shape[1], 1], self._block)]
        arguments = descriptor_arguments(address, shape, [shape[1], 1], self._facts)
        self._seen = address, arguments
        return arguments
