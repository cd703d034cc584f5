"""Launching kernels: Triton binds the arguments of a launch once for each kind of arguments, and not again.

Binding some forty arguments takes Triton longer on the host than many of these kernels take on the device. A
:class:`Step` goes further: what its plan fixes is bound once, and a launch then reads addresses only. Triton looks at
``TRITON_DEBUG`` and instrumentation when a kernel is first launched.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction
from triton.errors import TritonError

from tilefold.ops._shared._triton.context import enter_context
from tilefold.ops._shared._triton.releases import BUILD_OPTIONS, interpreted_rows_count_elements
from tilefold.ops._shared._triton.tensors import Piece
from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops._shared.internals import Bound, Grid, Launch, LaunchAt, Tma, bind, specialized

MAX_LAUNCHERS = 1024  # constants may be as many as shapes are
DESCRIPTOR_ALIGNMENT = 16  # bytes, of a descriptor's base and rows
_COUNT_ELEMENTS = triton_interpreted() and interpreted_rows_count_elements()


class Launcher:
    """A kernel with its constants: every ``constexpr`` parameter, which come last, and its number of warps and stages.

    ``launcher(grid, arguments)`` is ``kernel[grid](*arguments, **constants)`` on the current device and stream;
    ``arguments`` are tensors, descriptors, numbers and ``None``.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel, self._constants, self.name = kernel, constants, str(getattr(kernel, "__name__", kernel))
        self._specialized: list[bool] = []
        # by what Triton specialises on: the compiled kernel, and the constants in the kernel's order
        self._compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        self._unavailable: dict[tuple[Any, ...], str] = {}  # why it cannot be built: trying again takes seconds

    def __call__(self, grid: Grid, arguments: tuple[Any, ...]) -> None:
        if _LISTED:
            compiles = isinstance(self._kernel, JITFunction)
            _LISTED[-1].setdefault((self, self._kind(arguments) if compiles else None), (grid, arguments))
            return
        if not isinstance(self._kernel, JITFunction):  # interpreted
            self._kernel[grid](*arguments, **self._constants)
            return
        kind = self._kind(arguments)
        enter_context(kind[0])
        known = self._compiled.get(kind)
        if known is not None:
            compiled, tail = known
            compiled[grid](*(addresses(arguments) if graph_owns_memory() else arguments), *tail)
            return
        if kind in self._unavailable:
            raise KernelUnavailableError(self._kernel.__name__, self._unavailable[kind])
        self._build(kind, grid, arguments, not graph_owns_memory())

    def build(self, grid: Grid, arguments: tuple[Any, ...]) -> None:
        """Compile for arguments like these, on any thread, and launch nothing; Triton keeps the result on the disk.

        Raises:
            KernelUnavailableError: it cannot be built.
        """
        kind = self._kind(arguments)
        if kind not in self._compiled:
            self._build(kind, grid, arguments, None)

    def _build(self, kind: tuple[Any, ...], grid: Grid, arguments: tuple[Any, ...], run: bool | None) -> None:
        """Compile, and launch: with tensors (``run``), with their addresses (``False``), or not at all (``None``)."""
        try:
            if run:
                compiled = self._kernel[grid](*arguments, **self._constants, **BUILD_OPTIONS)
            else:
                compiled = self._kernel.warmup(*arguments, grid=grid, **self._constants, **BUILD_OPTIONS)
            if hasattr(compiled, "result"):  # compiled asynchronously
                compiled = compiled.result()
            names = self._kernel.arg_names[len(arguments) :]
            tail = tuple(self._constants[name] for name in names)
            if run is False:
                compiled[grid](*addresses(arguments), *tail)
        except Exception as error:
            if not is_of_the_build(error):
                raise
            self._unavailable[kind] = what_failed(error)
            raise KernelUnavailableError(self._kernel.__name__, self._unavailable[kind]) from error
        self._compiled[kind] = compiled, tail

    def compiled(self, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]] | None:
        """The kernel that a call like this one ran, and the constants to append to its arguments."""
        return self._compiled.get(self._kind(arguments)) if isinstance(self._kernel, JITFunction) else None

    def _kind(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self._specialized:
            self._specialized = specialized(self._kernel)
        kind: list[Any] = [torch.cuda.current_device()]  # must come first
        for position, argument in enumerate(arguments):
            if argument is None:
                kind.append(None)
            elif isinstance(argument, Tensor):
                kind.append(argument.dtype)
                kind.append(argument.data_ptr() % 16 == 0)
            elif isinstance(argument, (bool, float)):
                kind.append(type(argument))
            elif isinstance(argument, int):
                # 32 or 64 bits wide, and what Triton builds in: that it is 1, or a multiple of 16, and no other value
                wide = argument.bit_length() > 31
                kind.append((wide, argument == 1, argument % 16 == 0) if self._specialized[position] else wide)
            else:
                kind += (type(argument), argument.base.dtype, tuple(argument.block_shape), argument.padding)
        return tuple(kind)


# by launcher and kind of arguments, which is None for kernels that are interpreted
Listed = dict[tuple[Launcher, Hashable], tuple[Grid, tuple[Any, ...]]]
_LISTED: list[Listed] = []


@contextmanager
def listed() -> Iterator[Listed]:
    """Launches of all threads are listed, one of each kind, and not run: what they would write keeps what it held.

    For calls whose results nobody reads. Launches that were bound before run as ever.
    """
    found: Listed = {}
    _LISTED.append(found)
    try:
        yield found
    finally:
        _LISTED.pop()


def rows_fit_descriptor(matrix: Tensor) -> bool:
    """Whether the rows of a contiguous matrix are as long as a descriptor asks, wherever its first one lies."""
    return matrix.size(-1) * (1 if _COUNT_ELEMENTS else matrix.element_size()) % DESCRIPTOR_ALIGNMENT == 0


@functools.cache
def _allocates_in_stream_order() -> bool:
    return torch.cuda.get_allocator_backend() == "cudaMallocAsync"


def graph_owns_memory() -> bool:
    """Whether what is allocated now belongs to the graph that is being captured, and to no device before it runs.

    Triton asks the driver where every tensor lies, which then answers that it knows no such address.
    """
    return _allocates_in_stream_order() and torch.cuda.is_current_stream_capturing()


def addresses(arguments: tuple[Any, ...]) -> list[Any]:
    """``arguments`` with addresses for tensors, which Triton takes on trust."""
    return [argument.data_ptr() if isinstance(argument, Tensor) else argument for argument in arguments]


def is_of_the_build(error: Exception) -> bool:
    """Whether ``error`` says that a kernel cannot be built or loaded, rather than that a launch went wrong."""
    if isinstance(error, (TritonError, subprocess.SubprocessError, OSError, ImportError, NotImplementedError)):
        return True
    # the compiler's passes raise what the driver and torch raise too, torch as types of its own
    return type(error) is RuntimeError and (
        not str(error).startswith("Triton Error [CUDA]") or "kernel image" in str(error)
    )


def what_failed(error: BaseException) -> str:
    """The last line of the first cause, which names it; what is around it quotes the kernel."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else 'no message'}".rstrip(".")


_LAUNCHERS: dict[tuple[Any, ...], Launcher] = {}


def launcher(kernel: Any, constants: dict[str, Any]) -> Launcher:
    """The launcher of ``kernel`` with ``constants``, made once."""
    key = (kernel, *constants.items())
    found = _LAUNCHERS.get(key)
    if found is None:
        if len(_LAUNCHERS) >= MAX_LAUNCHERS:
            _LAUNCHERS.clear()  # Triton has what it compiled
        found = _LAUNCHERS[key] = Launcher(kernel, constants)
    return found


def launch(kernel: Any, grid: Grid, arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """``kernel[grid](*arguments, **constants)``; see :class:`Launcher`."""
    launcher(kernel, constants)(grid, arguments)


class Step:
    """A launch but for its tensors, which come first among a kernel's arguments; then numbers, then constants.

    ``step(same, *tensors)`` launches on the current device and stream; ``same`` says that all begin at multiples of 16
    bytes, for which kernels are compiled, and that nobody listens to launches. A step belongs to a plan whose key fixes
    shapes, dtypes and device.

    Args:
        kernel: a Triton kernel.
        grid: its programs.
        numbers: the arguments after the tensors.
        constants: ``constexpr`` parameters, warps and stages.
        tma: by argument, how a tensor is described; those after the last one are plain pointers.

    Attributes:
        bound: what launches with tensors for which ``same`` holds, once that is known.
        bound_at: the same with their addresses, where the CUDA driver can launch it.
    """

    __slots__ = ("_constants", "_grid", "_kernel", "_launcher", "_numbers", "_ran", "_tma", "bound", "bound_at")

    def __init__(
        self,
        kernel: Any,
        grid: Grid,
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
        tma: tuple[Tma | None, ...] = (),
    ) -> None:
        self._kernel, self._constants, self._launcher = kernel, constants, launcher(kernel, constants)
        self._grid, self._numbers, self._tma = grid, numbers, tma
        self.bound: Launch | None = None
        self.bound_at: LaunchAt | None = None
        self._ran = False

    def __call__(self, same: bool, *tensors: Tensor | Piece | None) -> None:
        bound = self.bound
        if same and bound is not None:
            bound(tensors)
            return
        arguments = (*self._described(tensors), *self._numbers)
        self._launcher(self._grid, arguments)
        if same and self._ran:  # shapes that never come back need not pay for what is not repeated
            self.bound, self.bound_at = self._bind(arguments) or (None, None)
        self._ran = True

    def _described(self, given: Sequence[object]) -> Sequence[object]:
        """Tensors for Triton; a bound launch reads addresses, of which bool's are those of bytes."""
        tensors = [tensor.tensor() if isinstance(tensor, Piece) else tensor for tensor in given]
        return [
            tensor.view(torch.uint8) if tma is None and tensor is not None and tensor.dtype == torch.bool
            else tensor if tma is None or tensor is None else tma.of(tensor)
            for tensor, tma in zip_longest(tensors, self._tma[: len(tensors)])
        ]  # fmt: skip

    def _bind(self, arguments: tuple[Any, ...]) -> Bound | None:
        if not isinstance(self._kernel, JITFunction):  # interpreted
            run = functools.partial(self._kernel[self._grid], **self._constants)
            return Bound(lambda tensors: run(*self._described(tensors), *self._numbers), None)
        found = self._launcher.compiled(arguments)
        return None if found is None else bind(found[0], self._grid, arguments, (*self._numbers, *found[1]), self._tma)
