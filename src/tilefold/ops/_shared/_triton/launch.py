"""Launches of kernels: Triton compiles a kernel for each kind of arguments, and gets addresses."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import JITFunction
from triton.errors import TritonError

from tilefold.ops._shared._triton.cache_keys import compute_cache_key
from tilefold.ops._shared._triton.cuda_driver import bind, enter_context
from tilefold.ops._shared._triton.releases import BUILD_OPTIONS, interpreted_rows_count_elements
from tilefold.ops._shared.background import KERNEL_BUILDS
from tilefold.ops._shared.fallback import KernelFallback, KernelUnavailableError
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops._shared.internals import (
    Addresses,
    Grid,
    LaunchAt,
    Tma,
    build_launcher,
    load_driver,
    share_warning_filters,
    specialized,
)
from tilefold.ops._shared.plan import Buffer, Constants, Launch, Plan, TorchStep, Values

MAX_BUILT = 4096  # kinds of arguments that are remembered: constants may be as many as shapes are
DESCRIPTOR_ALIGNMENT = 16  # bytes, of a descriptor's base and rows
# An aligned address, used for tensors that do not exist yet. Nothing reads it.
STAND_IN_ADDRESS = 1 << 20
# An interpreted kernel's descriptor may need rows of 16 elements in place of 16 bytes.
_DESCRIPTOR_ALIGNS_ELEMENTS = triton_interpreted() and interpreted_rows_count_elements()
# Compiled kernels by :attr:`Build.key`, or the reason why one cannot be built, since another
# attempt takes seconds.
BUILT: dict[Values, Any] = {}
DIVISOR = 16  # Triton compiles in that it divides a number
# Kinds of launches whose kernels :func:`start_plan` has started to compile.
_STARTED_KINDS: set[Values] = set()


@dataclass(frozen=True)
class Memory:
    """Stand-in for a tensor: its dtype and address, which is all that Triton reads of one."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """Return the address, as a tensor does."""
        return self.address


def memory_at(dtype: torch.dtype, address: int) -> Any:
    """Return a kernel's argument for the tensor at an address.

    Entries of bool are bytes to kernels. The interpreter needs a real tensor, whose length it does
    not read.
    """
    if dtype == torch.bool:
        dtype = torch.uint8
    if not triton_interpreted():
        return Memory(dtype, address)
    if not address:
        return torch.empty(0, dtype=dtype)
    first_entry = (ctypes.c_uint8 * dtype.itemsize).from_address(address)
    return torch.frombuffer(first_entry, dtype=torch.uint8).view(dtype)


class Build(NamedTuple):
    """A kernel, and arguments of the kind that it is compiled for.

    Attributes:
        kernel: the ``triton.jit`` function.
        grid: number of program instances in three dimensions.
        arguments: stand-ins for tensors or TMA descriptors, then numbers.
        constants: ``constexpr`` parameters and Triton's options, by name.
        fallback: what runs if the kernel cannot be built.
    """

    kernel: Any
    grid: Grid
    arguments: Values
    constants: Constants
    fallback: KernelFallback | None = None

    @property
    def key(self) -> Values:
        """Key of the compiled kernel: equal for launches that Triton compiles one kernel for.

        It holds the kernel, its constants, the current device and the kind of each argument.
        """
        key: list[Any] = [self.kernel, *self.constants.items()]
        if not isinstance(self.kernel, JITFunction):
            return tuple(key)
        key.append(torch.cuda.current_device())
        for argument, is_specialized in zip(
            self.arguments,
            specialized(self.kernel),
            strict=False,
        ):
            if argument is None or isinstance(argument, (bool, float)):
                key.append(type(argument))
            elif isinstance(argument, int):
                is_64_bits = argument.bit_length() > 31
                if is_specialized:
                    # Triton compiles in that a number is 1, or a multiple of the divisor.
                    key.append((is_64_bits, argument == 1, argument % DIVISOR == 0))
                else:
                    key.append(is_64_bits)
            elif hasattr(argument, "base"):  # a TMA descriptor
                padding = getattr(argument, "padding", None)  # Triton 3.5 and newer
                key += (type(argument), argument.base.dtype, tuple(argument.block_shape), padding)
            else:
                key += (argument.dtype, argument.data_ptr() % 16 == 0)
        return tuple(key)

    def __call__(self, key: Values | None = None) -> Any:
        """Compile the kernel and return it, without a launch.

        If a background thread is compiling it, this waits for that thread. Any thread may call
        this, except the one that compiles the kernel.

        Args:
            key: :attr:`key`, if the caller has computed it.

        Raises:
            KernelUnavailableError: if the kernel cannot be built here.
        """
        if key is None:
            key = self.key
        if key not in BUILT:
            KERNEL_BUILDS.wait_for(key)
        return self.compile(key)

    def compile(self, key: Values) -> Any:
        """Compile the kernel in this thread, unless it is compiled already, and return it.

        Triton caches it on disk.

        Args:
            key: :attr:`key`.

        Raises:
            KernelUnavailableError: if the kernel cannot be built here.
        """
        compiled = BUILT.get(key)
        if compiled is None or isinstance(compiled, str):
            compute_cache_key(self.kernel)
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
    """Raise :class:`KernelUnavailableError` for errors of a kernel's compilation or loading.

    The reason is remembered, and the next attempt fails with it at once. Other errors pass.

    Args:
        key: :attr:`Build.key`.
        build: the kernel.
    """
    if isinstance(BUILT.get(key), str):
        raise KernelUnavailableError(build.kernel.__name__, BUILT[key], build.fallback)
    try:
        yield
    except Exception as error:
        if not is_build_failure(error):
            raise
        BUILT[key] = failure_reason(error)
        raise KernelUnavailableError(build.kernel.__name__, BUILT[key], build.fallback) from error


def start_plan(
    plan: Plan,
    tensors: Mapping[str, Tensor | None],
    results: Mapping[str, Buffer | None],
    device: torch.device,
    *,
    runs_now: bool,
) -> bool:
    """Start to compile the kernels of a plan in background threads, if they are new.

    Shapes that vary make many plans of the same kernels, so each kind of launch is looked at once.

    Args:
        plan: the plan.
        tensors: layouts of the inputs on the meta device, by name.
        results: shape and dtype of the results, by name.
        device: the GPU that will run the plan.
        runs_now: whether the plan runs next. The thread that runs it then compiles a single kernel
            itself.

    Returns:
        Whether any of the kernels is new.
    """
    if device.type != "cuda" or triton_interpreted() or _RECORDINGS:
        return False
    dtypes = [None if tensor is None else tensor.dtype for tensor in tensors.values()]
    kinds = {
        (device, *dtypes, *_launch_kind(step)) for step in plan.steps if isinstance(step, Launch)
    }
    n_new = len(kinds - _STARTED_KINDS)
    if n_new == 0:
        return False
    if len(_STARTED_KINDS) >= MAX_BUILT:
        _STARTED_KINDS.clear()
    _STARTED_KINDS.update(kinds)
    if n_new > 1 or not runs_now:
        start_builds(planned_builds(plan, tensors, results), device)
    return True


def _launch_kind(launch: Launch) -> Values:
    """Return what a kernel is compiled for, apart from dtypes: constants and kinds of numbers."""
    numbers = [(number == 1, number % DIVISOR == 0) for number in launch.numbers]
    return launch.kernel, *launch.constants.items(), *numbers


def start_builds(builds: Iterable[Build], device: torch.device) -> None:
    """Start to compile kernels in background threads, the longest first.

    A launch waits for its own kernel only. The error of a kernel that cannot be built is raised by
    its launch.

    Args:
        builds: the kernels. Those that were compiled before, or cannot be, are skipped.
        device: the GPU that will run them.
    """
    share_warning_filters()
    # the threads take builds in this order, and all of them end soonest if the longest begin first
    longest_first = sorted(builds, key=lambda build: -len(build.kernel.src))
    with torch.cuda.device(device):
        for build in longest_first:
            key = build.key
            if key not in BUILT:
                KERNEL_BUILDS.start(key, partial(_build_in_background, build, key, device))


def _build_in_background(build: Build, key: Values, device: torch.device) -> None:
    """Compile a kernel and the C function that launches it, without using the GPU."""
    load_driver()
    with torch.cuda.device(device):
        build_launcher(build.compile(key))


def planned_builds(
    plan: Plan,
    tensors: Mapping[str, Tensor | None],
    results: Mapping[str, Buffer | None],
) -> list[Build]:
    """Return the kernels that a plan launches, before any tensor exists.

    All tensors are taken for aligned. A torch step runs on the meta device. If it cannot, launches
    that depend on its output are left out.

    Args:
        plan: the plan.
        tensors: layouts of the inputs on the meta device, by name.
        results: shape and dtype of the results, by name.
    """
    layouts = dict(tensors)
    for name, buffer in {**results, **plan.buffers}.items():
        if buffer is not None and name not in plan.skipped_results:
            layouts[name] = buffer.on(torch.device("meta"))
    unknown: set[str] = set()  # names of outputs of torch steps that could not run
    builds = []
    for step in plan.steps:
        if not unknown.isdisjoint(step.tensors):
            if isinstance(step, TorchStep):
                unknown.add(step.output)
            continue
        arguments = [layouts.get(name) for name in step.tensors]
        if isinstance(step, Launch):
            addresses = tuple(None if x is None else STAND_IN_ADDRESS for x in arguments)
            dtypes = [None if x is None else x.dtype for x in arguments]
            builds.append(KernelLauncher(step).build_for(addresses, dtypes))
            continue
        try:
            layouts[step.output] = step.function(*arguments)
        except Exception:  # any function of torch, which may read values
            unknown.add(step.output)
    return builds


RecordedBuilds = dict[Hashable, Build]  # by key
_RECORDINGS: list[RecordedBuilds] = []


@contextmanager
def recorded_builds() -> Iterator[RecordedBuilds]:
    """Record the kernels that are launched in any thread, by key, and do not launch them.

    Launches that were bound before are not recorded, and run.
    """
    builds: RecordedBuilds = {}
    _RECORDINGS.append(builds)
    try:
        yield builds
    finally:
        _RECORDINGS.pop()


class KernelLauncher:
    """A planned launch, without its tensors: ``launcher(may_bind, addresses, dtypes)``.

    A call launches the kernel on the current device and stream. The second call with ``may_bind``
    also binds the launch. Shapes that occur once do not pay for that. Triton reads ``TRITON_DEBUG``
    when a kernel is first launched.

    Args:
        planned: kernel, grid, numbers and constants.

    Attributes:
        bound: launches the kernel when called with addresses, without Triton's own call; ``None``
            until the launch is bound.
    """

    __slots__ = ("_n_bindable_runs", "_planned", "_tma", "bound")

    def __init__(self, planned: Launch) -> None:
        """Prepare to launch a kernel; a tensor that occurs twice gets one TMA descriptor."""
        self._planned = planned
        self._n_bindable_runs = 0
        self._tma: list[Tma | None] = []
        if planned.tma:
            for position, name in enumerate(planned.tensors):
                is_first = planned.tensors.index(name) == position
                self._tma.append(planned.tma.get(name) if is_first else None)
        self.bound: LaunchAt | None = None

    def __call__(
        self,
        may_bind: bool,
        addresses: Addresses,
        dtypes: Sequence[torch.dtype | None],
    ) -> None:
        """Launch the kernel, or record it within :func:`recorded_builds`.

        Args:
            may_bind: whether all tensors begin at multiples of 16 bytes, as bound launches assume,
                and no profiler hook is installed.
            addresses: addresses of the tensors, ``None`` for a tensor that does not exist.
            dtypes: dtypes of the tensors.
        """
        build = self.build_for(addresses, dtypes)
        if _RECORDINGS:
            _RECORDINGS[-1].setdefault(build.key, build)
            return
        compiled = self.run_with_triton(build)
        if may_bind and compiled is not None:
            self._n_bindable_runs += 1
            if self._n_bindable_runs == 2:
                self.bound = bind(compiled, self._planned.grid, build.arguments, self._tma)

    def build_for(self, addresses: Addresses, dtypes: Sequence[torch.dtype | None]) -> Build:
        """Return the kernel with its arguments, for tensors at these addresses.

        Args:
            addresses: addresses of the tensors, ``None`` for a tensor that does not exist.
            dtypes: dtypes of the tensors.
        """
        planned = self._planned
        tensors = [
            _tensor_argument(address, dtype, tma)
            for address, dtype, tma in zip_longest(addresses, dtypes, self._tma)
        ]
        return Build(
            planned.kernel,
            planned.grid,
            (*tensors, *planned.numbers),
            planned.constants,
            planned.fallback,
        )

    def run_with_triton(self, build: Build) -> Any:
        """Launch by Triton's own call, and return the compiled kernel (``None`` if interpreted)."""
        kernel, grid, arguments, constants, _ = build
        if not isinstance(kernel, JITFunction):  # interpreted
            return kernel[grid](*arguments, **constants)
        enter_context(torch.cuda.current_device())
        key = build.key
        compiled = build(key)
        addresses = [x.address if isinstance(x, Memory) else x for x in arguments]
        constexpr = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        with named_failure(key, build):  # the launch loads the kernel, which may fail too
            compiled[grid](*addresses, *constexpr)
        return compiled


def _tensor_argument(address: int | None, dtype: torch.dtype | None, tma: Tma | None) -> Any:
    """Return a kernel's argument for a tensor: a stand-in, a TMA descriptor or ``None``.

    Args:
        address: address of the tensor; ``None`` for no tensor.
        dtype: its dtype.
        tma: shape of the descriptor; ``None`` for a plain pointer.
    """
    if address is None or dtype is None:
        return None
    memory = memory_at(dtype, address)
    if tma is None:
        return memory
    return tma.make(memory, [tma.rows, tma.columns], [tma.columns, 1])


def launch(kernel: Any, grid: Grid, arguments: Values, constants: Constants) -> None:
    """Run ``kernel[grid](*arguments, **constants)`` once, of tensors, then numbers."""
    tensors = [x for x in arguments if x is None or isinstance(x, Tensor)]
    numbers = arguments[len(tensors) :]
    launcher = KernelLauncher(Launch(kernel, grid, (), numbers, constants))
    addresses = tuple(None if x is None else x.data_ptr() for x in tensors)
    dtypes = tuple(None if x is None else x.dtype for x in tensors)
    launcher(False, addresses, dtypes)


def rows_fit_descriptor(matrix: Tensor) -> bool:
    """Return whether the rows of a contiguous matrix are as long as a TMA descriptor needs.

    Its first address is not read.
    """
    row_length = matrix.size(-1)
    if not _DESCRIPTOR_ALIGNS_ELEMENTS:
        row_length *= matrix.element_size()
    return row_length % DESCRIPTOR_ALIGNMENT == 0


def is_build_failure(error: Exception) -> bool:
    """Return whether ``error`` says that a kernel cannot be built, loaded or launched.

    Other errors come from a kernel that ran, such as an illegal access to memory.
    """
    if isinstance(
        error,
        (TritonError, subprocess.SubprocessError, OSError, ImportError, NotImplementedError),
    ):
        return True
    # The compiler's passes and the CUDA driver raise plain RuntimeError, torch its subclasses.
    if type(error) is not RuntimeError:
        return False
    text = str(error)
    if not text.startswith("Triton Error [CUDA]"):
        return True
    refused_to_load = "kernel image" in text
    refused_to_launch = "invalid argument" in text or "too many resources" in text
    return refused_to_load or refused_to_launch


def failure_reason(error: BaseException) -> str:
    """Return the type and the last line of the error that caused ``error``.

    The last line names what failed. The lines before it quote the kernel.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    message = lines[-1][:300] if lines else "no message"
    return f"{type(error).__name__}: {message}".rstrip(".")
