"""Launching kernels: Triton binds the arguments of a launch once for each kind of arguments, and not again."""

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

from tilefold.ops._shared._triton.cuda_driver import bind, enter_context
from tilefold.ops._shared._triton.releases import BUILD_OPTIONS, interpreted_rows_count_elements
from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops._shared.internals import Grid, LaunchAt, specialized
from tilefold.ops._shared.plan import Constants, Launch, Values

MAX_LAUNCHERS = 1024  # constants may be as many as shapes are
DESCRIPTOR_ALIGNMENT = 16  # bytes, of a descriptor's base and rows
Compiled = tuple[Any, Values]  # a kernel, and the constants to append to its arguments
_COUNT_ELEMENTS = triton_interpreted() and interpreted_rows_count_elements()


class Launcher:
    """``launcher(grid, arguments)``: ``kernel[grid](*arguments, **constants)`` on the current device and stream.

    Constants are every ``constexpr`` parameter, which come last, warps and stages; arguments tensors, descriptors,
    numbers and ``None``. It returns what was compiled, if anything. Triton looks at ``TRITON_DEBUG`` when a kernel is
    first launched.
    """

    def __init__(self, kernel: Any, constants: Constants) -> None:
        self._kernel, self._constants, self.name = kernel, constants, str(getattr(kernel, "__name__", kernel))
        self._specialized: list[bool] = []
        # by what Triton specialises on: the compiled kernel, and the constants in the kernel's order
        self._compiled: dict[Values, Compiled] = {}
        self._unavailable: dict[Values, str] = {}  # why it cannot be built: trying again takes seconds

    def __call__(self, grid: Grid, arguments: Values) -> Compiled | None:
        if _LISTED:
            compiles = isinstance(self._kernel, JITFunction)
            _LISTED[-1].setdefault((self, self._kind(arguments) if compiles else None), (grid, arguments))
            return None
        if not isinstance(self._kernel, JITFunction):  # interpreted
            self._kernel[grid](*arguments, **self._constants)
            return None
        kind = self._kind(arguments)
        enter_context(kind[0])
        known = self._compiled.get(kind)
        if known is not None:
            compiled, tail = known
            compiled[grid](*(addresses(arguments) if graph_owns_memory() else arguments), *tail)
            return known
        if kind in self._unavailable:
            raise KernelUnavailableError(self._kernel.__name__, self._unavailable[kind])
        return self._build(kind, grid, arguments, not graph_owns_memory())

    def build(self, grid: Grid, arguments: Values) -> Compiled:
        """Compile for arguments like these, on any thread, and launch nothing; Triton keeps the result on the disk."""
        kind = self._kind(arguments)
        return self._compiled.get(kind) or self._build(kind, grid, arguments, None)

    def _build(self, kind: Values, grid: Grid, arguments: Values, run: bool | None) -> Compiled:
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
        found = self._compiled[kind] = compiled, tail
        return found

    def _kind(self, arguments: Values) -> Values:
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
Listed = dict[tuple[Launcher, Hashable], tuple[Grid, Values]]
_LISTED: list[Listed] = []


@contextmanager
def listed() -> Iterator[Listed]:
    """List the launches of all threads, one of each kind, and run none but those that were bound before."""
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
    """Whether memory belongs to the graph being captured: the driver knows no such address before it runs."""
    return _allocates_in_stream_order() and torch.cuda.is_current_stream_capturing()


def addresses(arguments: Values) -> list[Any]:
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


_launcher = functools.lru_cache(MAX_LAUNCHERS)(lambda kernel, *constants: Launcher(kernel, dict(constants)))


def launcher(kernel: Any, constants: Constants) -> Launcher:
    """The launcher of ``kernel`` with ``constants``, made once."""
    return _launcher(kernel, *constants.items())


def launch(kernel: Any, grid: Grid, arguments: Values, constants: Constants) -> None:
    """``kernel[grid](*arguments, **constants)``; see :class:`Launcher`."""
    launcher(kernel, constants)(grid, arguments)


class Step:
    """A launch but for its tensors.

    In ``step(same, *tensors)``, ``same`` says that all begin at multiples of 16 bytes, for which kernels are compiled,
    and that nobody listens to launches. What is repeated is bound; shapes that never come back need not pay for that.
    """

    __slots__ = ("_grid", "_launcher", "_numbers", "_runs", "_tma", "bound_at")

    def __init__(self, planned: Launch) -> None:
        self._launcher, self._grid, self._numbers = (
            launcher(planned.kernel, planned.constants),
            planned.grid,
            planned.numbers,
        )
        names = planned.tensors.split() if planned.tma else []
        self._tma = [planned.tma.get(name) if names.index(name) == place else None for place, name in enumerate(names)]
        self.bound_at: LaunchAt | None = None
        self._runs = 0

    def __call__(self, same: bool, *tensors: Tensor | None) -> None:
        if same and self.bound_at is not None:
            self.bound_at(tuple([None if x is None else x.data_ptr() for x in tensors]))
            return
        arguments = (*self._described(tensors), *self._numbers)
        found = self._launcher(self._grid, arguments)
        if same and found is not None:
            self._runs += 1
            if self._runs == 2:
                self.bound_at = bind(found[0], self._grid, (*arguments, *found[1]), self._tma)

    def _described(self, tensors: Sequence[Tensor | None]) -> Sequence[object]:
        """Tensors for Triton; a bound launch reads addresses, of which bool's are those of bytes."""
        return [
            tensor.view(torch.uint8) if tma is None and tensor is not None and tensor.dtype == torch.bool
            else tensor if tma is None or tensor is None else tma.of(tensor)
            for tensor, tma in zip_longest(tensors, self._tma)
        ]  # fmt: skip
