"""Launching a compiled kernel by addresses: nothing is looked up, bound or checked again.

Triton's own call of a compiled kernel asks for the device and the stream, collects metadata for hooks and has the
driver look at every pointer. Here all of it was settled when the kernel ran first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from tilefold.ops._shared._triton.launch import Grid, Launcher
from tilefold.ops._shared.impl import triton_interpreted

# The releases whose launchers take (grid, stream, function, flags, scratch, metadata, hooks, arguments).
_KNOWN = triton.__version__.split(".")[:2] == ["3", "6"]


def hooked() -> bool:
    """Whether a profiler wants to hear of every launch, which Triton's own call tells it."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def can_remember(*arguments: object) -> bool:
    """Whether a launch that just ran with these ``arguments`` may be repeated by address.

    Kernels are compiled for the alignment of their tensors; under capture nothing ran, and what was allocated is the
    graph's.
    """
    if triton_interpreted() or torch.cuda.is_current_stream_capturing():
        return False
    return all(not isinstance(argument, Tensor) or argument.data_ptr() % 16 == 0 for argument in arguments)


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
        self._expand: Callable[..., list[Any]] | None = None
        self._seen: tuple[int, list[Any]] = (0, [])
        launcher = compiled.run
        function = _c_function(launcher, descriptor is not None)
        self.launch: Callable[..., None]
        if function is None:
            runner = compiled[grid]
            self.launch = lambda *arguments: runner(*arguments, *constants)
            return
        if descriptor is not None:
            self._expand = functools.partial(_expanded, compiled.metadata.tensordesc_meta[0])
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
        if self._expand is None:
            return [TensorDescriptor(rows, shape, [shape[1], 1], self._block)]
        arguments = self._expand(_Described(rows, shape, [shape[1], 1]))
        self._seen = address, arguments
        return arguments


class _Described:
    """What Triton reads of a ``TensorDescriptor``, whose checks the first call passed."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: Tensor, shape: list[int], strides: list[int]) -> None:
        self.base, self.shape, self.strides, self.padding = base, shape, strides, "zero"


def _c_function(launcher: Any, described: bool) -> Callable[..., None] | None:
    """The function of a compiled kernel that launches it, or ``None`` where its arguments are not known for sure."""
    if not _KNOWN or type(launcher).__name__ != "CudaLauncher":
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    function: Callable[..., None] = launcher.launch
    if not described:
        return function
    # with descriptors, the function that takes them apart holds the one that launches
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "launcher" not in names or "tensordesc_meta" not in names:
        return None
    cells = dict(zip(names, function.__closure__ or (), strict=True))
    if not cells["tensordesc_meta"].cell_contents[0]:
        return None
    inner: Callable[..., None] = cells["launcher"].cell_contents
    return inner


def _expanded(metadata: Any, descriptor: _Described) -> list[Any]:
    from triton.backends.nvidia.driver import make_tensordesc_arg  # noqa: PLC0415 (there on NVIDIA only)

    arguments: list[Any] = make_tensordesc_arg(descriptor, metadata)
    return arguments
