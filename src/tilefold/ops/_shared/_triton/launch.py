"""Launching kernels: Triton builds one for each kind of arguments, and gets addresses for tensors."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import JITFunction
from triton.errors import TritonError

from tilefold.ops._shared._triton.cuda_driver import bind, enter_context
from tilefold.ops._shared._triton.releases import BUILD_OPTIONS, interpreted_rows_count_elements
from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops._shared.internals import Addresses, Grid, LaunchAt, Tma, specialized
from tilefold.ops._shared.plan import Constants, Instead, Launch, Values

MAX_BUILT = 4096  # kinds of arguments that are remembered: constants may be as many as shapes are
DESCRIPTOR_ALIGNMENT = 16  # bytes, of a descriptor's base and rows
_COUNT_ELEMENTS = triton_interpreted() and interpreted_rows_count_elements()
# what was compiled, by kernel and kind; or why it cannot be built: trying again takes seconds
BUILT: dict[Values, Any] = {}


@dataclass(frozen=True)
class Memory:
    """A tensor to Triton, which asks for its dtype and address only."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def memory(dtype: torch.dtype, address: int) -> Any:
    """Stand-in for the tensor there; bool is bytes, and the interpreter wants tensors, whose length
    it ignores.
    """
    dtype = torch.uint8 if dtype == torch.bool else dtype
    if not triton_interpreted():
        return Memory(dtype, address)
    if not address:
        return torch.empty(0, dtype=dtype)
    byte = (ctypes.c_uint8 * dtype.itemsize).from_address(address)
    return torch.frombuffer(byte, dtype=torch.uint8).view(dtype)


class Build(NamedTuple):
    """A kernel, and arguments of the kind that it is built for."""

    kernel: Any
    grid: Grid
    arguments: Values
    constants: Constants
    instead: Instead | None = None

    @property
    def key(self) -> Values:
        """Equal for launches that Triton builds one kernel for; the device comes first of the
        arguments.
        """
        known, arguments = (self.kernel, *self.constants.items()), self.arguments
        if not isinstance(self.kernel, JITFunction):
            return known
        kind: list[Any] = [torch.cuda.current_device()]
        for argument, own in zip(arguments, specialized(self.kernel), strict=False):
            if argument is None or isinstance(argument, (bool, float)):
                kind.append(type(argument))
            elif isinstance(argument, int):
                # 32 or 64 bits wide, and what Triton builds in: that it is 1, or a multiple of 16,
                # and no other value
                wide = argument.bit_length() > 31
                kind.append((wide, argument == 1, argument % 16 == 0) if own else wide)
            elif hasattr(argument, "base"):
                padding = getattr(argument, "padding", None)  # from 3.5 on
                kind += (type(argument), argument.base.dtype, tuple(argument.block_shape), padding)
            else:
                kind += (argument.dtype, argument.data_ptr() % 16 == 0)
        return *known, *kind

    def __call__(self, key: Values | None = None) -> Any:
        """Return the compiled kernel, on any thread; nothing is launched, and Triton keeps it on
        the disk.
        """
        key = self.key if key is None else key
        compiled = BUILT.get(key)
        if compiled is None or isinstance(compiled, str):
            with named_failure(key, self):
                compiled = self.kernel.warmup(
                    *self.arguments,
                    grid=self.grid,
                    **self.constants,
                    **BUILD_OPTIONS,
                )
                if hasattr(compiled, "result"):  # compiled asynchronously
                    compiled = compiled.result()
            if len(BUILT) >= MAX_BUILT:
                BUILT.clear()
            BUILT[key] = compiled
        return compiled


@contextmanager
def named_failure(key: Values, build: Build) -> Iterator[None]:
    """Turn errors that say that a kernel cannot be built or loaded into
    :class:`KernelUnavailableError`.
    """
    if isinstance(BUILT.get(key), str):
        raise KernelUnavailableError(build.kernel.__name__, BUILT[key], build.instead)
    try:
        yield
    except Exception as error:
        if not is_of_the_build(error):
            raise
        BUILT[key] = what_failed(error)
        raise KernelUnavailableError(build.kernel.__name__, BUILT[key], build.instead) from error


Listed = dict[Hashable, Build]  # one launch of each kind
_LISTED: list[Listed] = []


@contextmanager
def listed() -> Iterator[Listed]:
    """List the launches of all threads, one of each kind, and run none but those that were bound
    before.
    """
    found: Listed = {}
    _LISTED.append(found)
    try:
        yield found
    finally:
        _LISTED.pop()


class Step:
    """A launch but for its tensors: ``step(repeats, addresses, dtypes)`` on the current device and
    stream.

    ``repeats`` says that all begin at multiples of 16 bytes, for which kernels are compiled, and
    that nobody listens to launches. The second of those binds ``bound``, which takes addresses
    alone and launches from then on; shapes that never come back need not pay for that. Triton looks
    at ``TRITON_DEBUG`` when a kernel is first launched.
    """

    __slots__ = ("_planned", "_runs", "_tma", "bound")

    def __init__(self, planned: Launch) -> None:
        names = planned.tensors.split() if planned.tma else []
        self._tma = [
            planned.tma.get(name) if names.index(name) == place else None
            for place, name in enumerate(names)
        ]
        self._planned, self._runs = planned, 0
        self.bound: LaunchAt | None = None

    def __call__(
        self,
        repeats: bool,
        addresses: Addresses,
        dtypes: Sequence[torch.dtype | None],
    ) -> None:
        planned = self._planned
        tensors = [_described(*each) for each in zip_longest(addresses, dtypes, self._tma)]
        numbers, constants = planned.numbers, planned.constants
        build = Build(
            planned.kernel,
            planned.grid,
            (*tensors, *numbers),
            constants,
            planned.instead,
        )
        if _LISTED:
            _LISTED[-1].setdefault(build.key, build)
            return
        compiled = self.by_triton(build)
        if repeats and compiled is not None:
            self._runs += 1
            if self._runs == 2:
                self.bound = bind(compiled, planned.grid, build.arguments, self._tma)

    def by_triton(self, build: Build) -> Any:
        """Launch by Triton's own call, and return what was compiled, if anything."""
        kernel, grid, arguments, constants, _ = build
        if not isinstance(kernel, JITFunction):  # interpreted
            return kernel[grid](*arguments, **constants)
        enter_context(torch.cuda.current_device())
        key = build.key
        compiled, last = (
            build(key),
            [constants[name] for name in kernel.arg_names[len(arguments) :]],
        )
        with named_failure(key, build):  # which may be found when it is loaded
            compiled[grid](*[x.address if isinstance(x, Memory) else x for x in arguments], *last)
        return compiled


def _described(address: int | None, dtype: torch.dtype | None, tma: Tma | None) -> Any:
    """Argument of a kernel."""
    if address is None or dtype is None:
        return None
    return (
        memory(dtype, address)
        if tma is None
        else tma.make(memory(dtype, address), [*tma[:2]], [tma.columns, 1])
    )


def launch(kernel: Any, grid: Grid, arguments: Values, constants: Constants) -> None:
    """``kernel[grid](*arguments, **constants)`` of tensors, then numbers."""
    tensors = [x for x in arguments if x is None or isinstance(x, Tensor)]
    step = Step(Launch(kernel, grid, "", arguments[len(tensors) :], constants))
    facts = [(None, None) if x is None else (x.data_ptr(), x.dtype) for x in tensors]
    step(False, *map(tuple, zip(*facts, strict=True)))


def rows_fit_descriptor(matrix: Tensor) -> bool:
    """Whether the rows of a contiguous matrix are as long as a descriptor asks, wherever its first
    one lies.
    """
    return (
        matrix.size(-1) * (1 if _COUNT_ELEMENTS else matrix.element_size()) % DESCRIPTOR_ALIGNMENT
        == 0
    )


def is_of_the_build(error: Exception) -> bool:
    """Whether ``error`` says that a kernel cannot be built, loaded or launched, rather than that it
    went wrong.
    """
    refused = "kernel image", "invalid argument", "too many resources"  # the last two: of a launch
    if isinstance(
        error,
        (TritonError, subprocess.SubprocessError, OSError, ImportError, NotImplementedError),
    ):
        return True
    # the compiler's passes raise what the driver and torch raise too, torch as types of its own
    return type(error) is RuntimeError and (
        not str(error).startswith("Triton Error [CUDA]")
        or any(each in str(error) for each in refused)
    )


def what_failed(error: BaseException) -> str:
    """The last line of the first cause, which names it; what is around it quotes the kernel."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return f"{type(error).__name__}: {lines[-1][:300] if lines else 'no message'}".rstrip(".")
