"""Launches of compiled kernels through the CUDA driver.

They take 5 to 26 us of CPU time less than Triton's own call.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from tilefold.ops._shared import internals
from tilefold.ops._shared.fallback import warn_and_record_failure
from tilefold.ops._shared.internals import TMA_MAP_BYTES, Addresses, Grid, LaunchAt, Tma
from tilefold.ops._shared.plan import selector

_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)[^\[,\n]*(?:\[(\d+)\])?")
INVALID_CONTEXT = 201  # error of the driver
POINTER_BYTES = 8
TMA_MAP_ALIGNMENT = 64  # bytes
WARP_SIZE = 32  # threads
# An argument of a kernel: a pointer is (position of its address among those of a launch, None), a
# TMA map is (position of its matrix's address, bytes of the map), and a number is (None, number).
Argument = tuple["int | None", Any]
# ``devices`` of a thread are those whose context has been current in it.
_ENTERED_CONTEXTS = threading.local()


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


def enter_context(index: int) -> None:
    """Make the context of the current device current in this thread, as TMA descriptors need.

    Args:
        index: number of the current device.
    """
    entered = vars(_ENTERED_CONTEXTS).setdefault("devices", set())
    if index not in entered:
        # a launch: nothing waits for it, and a stream that is being captured may hold it
        torch.zeros(1, dtype=torch.uint8, device=torch.device("cuda", index))
        entered.add(index)


def bind(
    compiled: Any,
    grid: Grid,
    values: Sequence[Any],
    tma: Sequence[Tma | None],
) -> LaunchAt | None:
    """Return a function that repeats a launch for tensors at other addresses, aligned alike.

    Args:
        compiled: Triton's compiled kernel.
        grid: number of program instances in three dimensions.
        values: arguments of a launch that succeeded, without constants.
        tma: how each argument is described to TMA. Arguments after the last entry are pointers or
            numbers.

    Returns:
        The function, or ``None`` if only Triton's own call can launch the kernel. A warning says so
        if the reason is a change of Triton.
    """
    try:
        facts = internals.launch_facts(compiled)
        if facts is None:
            return None
        ptx, kinds, descriptions = facts
        arguments = _arguments(kinds, values, tma, descriptions)
        if arguments is None:
            return None
        return driver_launch(compiled, ptx, grid, arguments)
    except Exception as error:  # the next release may have changed what this reads
        warn_and_record_failure(
            "repeating launches past Triton",
            torch.device("cuda", torch.cuda.current_device()),
            f"{type(error).__name__}: {error}",
            "Triton's own call does: the same results, more host time.",
        )
        return None


def _arguments(
    kinds: list[str],
    values: Sequence[Any],
    tma: Sequence[Tma | None],
    descriptions: Sequence[Any],
) -> list[Argument] | None:
    """Return the arguments that were not compiled in.

    A TMA map is followed by the shape and the strides of its matrix.

    Args:
        kinds: Triton's types of all parameters, such as ``*fp32``, ``i32`` or ``constexpr``.
        values: arguments of a launch, without constants.
        tma: how each argument is described to TMA.
        descriptions: Triton's metadata of the TMA descriptors, in order.

    Returns:
        The arguments, or ``None`` if the kernel reads a described matrix by pointers.
    """
    remaining_descriptions = iter(descriptions)
    arguments: list[Argument] = []
    for position, (kind, value, described) in enumerate(zip_longest(kinds, values, tma)):
        if kind == "constexpr":
            continue
        if described is not None:
            tma_map = internals.tma_map(value, next(remaining_descriptions, None))
            if tma_map is None:
                return None
            arguments.append((position, tma_map))
            arguments += [(None, number) for number in (*value.shape, *value.strides)]
        elif kind.startswith("*"):
            arguments.append((position, None))
        else:
            arguments.append((None, value))
    return arguments


@dataclass(eq=False, slots=True)
class _TmaMap:
    """A TMA map in memory that the driver reads.

    Attributes:
        position: position of the matrix's address in the addresses of a launch.
        address: address of the map.
        matrix_address: address of the matrix in the map, 0 at first.
    """

    position: int
    address: int
    matrix_address: int | None = 0


class _ParameterMemory:
    """Memory of a kernel's parameters, in the form that ``cuLaunchKernelEx`` reads.

    Args:
        name: name of the kernel, for errors.
        arguments: the arguments.
        declared: type letter and bytes of each parameter.

    Attributes:
        pointers: addresses of tensors, which a launch writes.
        pointer_positions: positions of these addresses in the addresses of a launch.
        tma_maps: TMA maps, in which a launch replaces the address of the matrix.
        table: addresses of all parameters.

    Raises:
        ValueError: if a parameter is declared with another type or size.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[Argument],
        declared: Sequence[tuple[str, int]],
    ) -> None:
        """Allocate memory for all parameters, and write numbers and TMA maps to it."""
        self.pointer_positions = [
            position for position, value in arguments if value is None and position is not None
        ]
        self.pointers = (ctypes.c_uint64 * len(self.pointer_positions))()
        self.tma_maps: list[_TmaMap] = []
        self.table = (ctypes.c_void_p * len(declared))()
        # one map too many, so that the first can begin at a multiple of its alignment
        self._map_memory = (ctypes.c_char * (TMA_MAP_ALIGNMENT + TMA_MAP_BYTES * len(declared)))()
        self._numbers: list[Any] = []

        next_pointer = ctypes.addressof(self.pointers)
        map_memory = ctypes.addressof(self._map_memory)
        next_map = map_memory + -map_memory % TMA_MAP_ALIGNMENT
        for number, ((position, value), (letter, size)) in enumerate(
            zip(arguments, declared, strict=True),
        ):
            if value is None:
                expected_size = POINTER_BYTES
            elif isinstance(value, bytes):
                expected_size = TMA_MAP_BYTES
            else:
                expected_size = min(size, 8)
            if size != expected_size or (isinstance(value, float) and letter != "f"):
                raise ValueError(
                    f"parameter {number} of {name} is .{letter}{8 * size}, and {value} was given",
                )
            if value is None:
                self.table[number] = next_pointer
                next_pointer += POINTER_BYTES
            elif isinstance(value, bytes):
                ctypes.memmove(next_map, value, TMA_MAP_BYTES)
                self.tma_maps.append(_TmaMap(position or 0, next_map))
                self.table[number] = next_map
                next_map += TMA_MAP_BYTES
            else:
                memory = _number_memory(value, letter, size)
                self._numbers.append(memory)
                self.table[number] = ctypes.addressof(memory)


def _number_memory(value: float, letter: str, size: int) -> Any:
    """Return memory that holds a number in the type of a kernel's parameter.

    Integers take 64 bits, whose first bytes are a narrower integer.

    Args:
        value: the number.
        letter: type of the parameter in PTX: ``"f"`` for floats.
        size: bytes of the parameter.
    """
    if letter != "f":
        return ctypes.c_int64(int(value))
    return ctypes.c_float(value) if size == 4 else ctypes.c_double(value)


def driver_launch(
    compiled: Any,
    ptx: str,
    grid: Grid,
    arguments: Sequence[Argument],
) -> LaunchAt | None:
    """Return a function that launches a kernel for tensors at given addresses, aligned alike.

    It launches on the current stream of the device that is current now. Any thread may call it.

    Args:
        compiled: Triton's compiled kernel. It is referenced by the function, since from Triton 3.8
            on its last reference unloads the kernel.
        ptx: the kernel's PTX.
        grid: number of program instances in three dimensions.
        arguments: arguments that were not compiled in.

    Returns:
        The function, or ``None`` without libcuda, or with a driver before CUDA 12.0.

    Raises:
        ValueError: if the PTX declares other parameters.
    """
    name = compiled.metadata.name
    device_index = torch.cuda.current_device()
    declared = parameters(ptx)
    # Triton may declare up to two pointers to scratch more, which these kernels do not use.
    scratch_sizes = [size for _, size in declared[len(arguments) :]]
    if len(arguments) > len(declared) or scratch_sizes not in (
        [],
        [POINTER_BYTES],
        [POINTER_BYTES, POINTER_BYTES],
    ):
        raise ValueError(f"{name} declares {declared}, and {len(arguments)} parameters were given")
    no_scratch: list[Argument] = [(None, 0)] * len(scratch_sizes)
    memory = _ParameterMemory(name, [*arguments, *no_scratch], declared)
    config = _Config(
        *grid,
        WARP_SIZE * compiled.metadata.num_warps,
        1,
        1,
        compiled.metadata.shared,
        None,
        None,
        0,
    )
    try:
        launch_kernel = driver_function("cuLaunchKernelEx")
        replace_address = driver_function("cuTensorMapReplaceAddress")
    except (OSError, AttributeError):
        return None
    # A launch takes a few microseconds, so that all it needs are local names.
    current_stream = internals.current_stream
    kernel_handle = ctypes.c_void_p(compiled.function)
    config_pointer = ctypes.c_void_p(ctypes.addressof(config))
    table_pointer = ctypes.c_void_p(ctypes.addressof(memory.table))
    tma_maps = memory.tma_maps
    pointers = memory.pointers
    select_pointers = selector(memory.pointer_positions)
    pack_pointers = struct.Struct(f"{len(memory.pointer_positions)}Q").pack_into
    as_pointer = ctypes.c_void_p
    # The config, the parameters and the maps belong to one launch until the driver has copied them.
    lock = threading.Lock()

    def launch(addresses: Addresses, _references: object = (compiled, memory)) -> None:
        """Launch the kernel for tensors at these addresses."""
        with lock:
            error = 0
            pack_pointers(pointers, 0, *select_pointers(addresses))
            for tma_map in tma_maps:
                address = addresses[tma_map.position]
                if address != tma_map.matrix_address:
                    error |= replace_address(as_pointer(tma_map.address), as_pointer(address))
                    tma_map.matrix_address = address
            config.stream = current_stream(device_index)
            error = error or launch_kernel(config_pointer, kernel_handle, table_pointer, None)
            if error == INVALID_CONTEXT:  # of a thread that has launched nothing yet
                enter_context(device_index)
                error = launch_kernel(config_pointer, kernel_handle, table_pointer, None)
        if error:
            raise RuntimeError(
                f"{name} could not be launched: CUDA error {error} ({error_text(error)})",
            )

    return launch


def parameters(ptx: str) -> list[tuple[str, int]]:
    """Return type letter (``u``, ``s``, ``b``, ``f``) and bytes of each parameter of a kernel."""
    entry = ptx[ptx.index(".entry") :]
    declarations = _PARAMETER.findall(entry[: entry.index(")")])
    return [(letter, int(bits) // 8 * int(count or 1)) for letter, bits, count in declarations]


def error_text(error: int) -> str:
    """Return the driver's description of an error."""
    text = ctypes.c_char_p()
    driver_function("cuGetErrorString")(error, ctypes.byref(text))
    return (text.value or b"unknown").decode()


@functools.cache
def driver_function(name: str) -> Any:
    """Return a function of the CUDA driver.

    Raises:
        AttributeError: if the driver has no such function.
        OSError: if there is no driver.
    """
    return getattr(ctypes.CDLL("libcuda.so.1"), name)
