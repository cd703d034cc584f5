"""Launching a compiled kernel without Triton's Python: for launches whose every argument but addresses is settled.

Triton's own call of a compiled kernel asks for the device, collects metadata for hooks and has the driver look at every
pointer, which takes the host as long as a small kernel takes the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from tilefold.ops._shared._triton.context import enter_context
from tilefold.ops._shared._triton.launch import Grid
from tilefold.ops._shared._triton.releases import launches_by_address

_KNOWN = launches_by_address()


def hooked() -> bool:
    """Whether a profiler wants to hear of every launch, which Triton's own call tells it."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def direct(compiled: Any, grid: Grid, rest: tuple[Any, ...]) -> Callable[[tuple[Tensor | None, ...]], None]:
    """``launch(tensors)`` runs a kernel that ran before on the current device, with arguments that end with ``rest``.

    Tensors must lie where the kernel runs, and be aligned as they were when it was compiled; nobody looks.
    """
    found = c_function(compiled.run)
    if found is None:
        run = compiled[grid]

        def by_triton(tensors: tuple[Tensor | None, ...]) -> None:
            # addresses: the driver, which Triton asks about tensors, does not know all that a graph owns
            run(*[None if tensor is None else tensor.data_ptr() for tensor in tensors], *rest)

        return by_triton
    function, _ = found
    stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    index, (x, y, z) = torch.cuda.current_device(), grid
    handle, packed = compiled.function, compiled.packed_metadata
    cooperative, overlapped = compiled.run.launch_cooperative_grid, compiled.run.launch_pdl

    def launch(tensors: tuple[Tensor | None, ...]) -> None:
        function(
            x, y, z, stream(index), handle, cooperative, overlapped, None, None, packed, None, None, None,
            *[None if tensor is None else tensor.data_ptr() for tensor in tensors], *rest,
        )  # fmt: skip

    return launch


def c_function(launcher: Any, described: int = 0) -> tuple[Callable[..., None], Sequence[Any]] | None:
    """The function that launches a compiled kernel, and what it wants to know of each of its ``described`` descriptors.

    ``None`` where its arguments are not known for sure: they are Triton's own affair.
    """
    if not _KNOWN or type(launcher).__name__ != "CudaLauncher":
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    function: Callable[..., None] = launcher.launch
    if not described:
        return None if hasattr(function, "__code__") else (function, ())  # a Python function takes descriptors apart
    # and holds the one that launches
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "launcher" not in names or "tensordesc_meta" not in names:
        return None
    cells = dict(zip(names, function.__closure__ or (), strict=True))
    facts = cells["tensordesc_meta"].cell_contents
    if len(facts) != described or not all(facts):
        return None
    return cells["launcher"].cell_contents, facts


def descriptor_arguments(address: int, shape: list[int], strides: list[int], facts: Any) -> list[Any]:
    """What stands among a launch's arguments for a descriptor of rows at this address.

    ``facts`` are those of :func:`c_function`. A descriptor says where, not what: it stays good for its address.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg  # noqa: PLC0415 (there on NVIDIA only)

    enter_context(torch.cuda.current_device())
    made: list[Any] = make_tensordesc_arg(_Rows(address, shape, strides), facts)
    return made


class _Rows:
    """What Triton reads of a ``TensorDescriptor``, whose checks the first call passed."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, address: int, shape: list[int], strides: list[int]) -> None:
        self.base, self.shape, self.strides, self.padding = _Base(address), shape, strides, "zero"


class _Base:
    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address
