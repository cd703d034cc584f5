"""Launches of a compiled kernel through the CUDA driver: 5 to 26 us of host time less than Triton's own call takes."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)[^\[,\n]*(?:\[(\d+)\])?")
INVALID_CONTEXT = 201
MAX_MAPS = 64  # kept per argument; blocks of a vocabulary lie at addresses of their own

Addresses = tuple["int | None", ...]
Encode = Callable[[int], tuple[int, object]]  # from a matrix's address to that of its 128 bytes, and what owns them


class Map(NamedTuple):
    """A kernel argument that is a TMA descriptor: the parameters are its 128 bytes, then shape and strides."""

    encode: Encode
    numbers: tuple[int, ...]


POINTER = object()  # a kernel argument that is the address of a tensor
Argument = Any  # POINTER, a Map, or a number


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *[(name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


class _Entered(threading.local):
    """The devices whose context has been current in this thread."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_ENTERED = _Entered()


def enter_context(index: int) -> None:
    """Make the context of device ``index``, the current one, that of this thread too: TMA descriptors need one."""
    if index not in _ENTERED.devices:
        # a launch: nothing waits for it, and a stream that is being captured may hold it
        torch.zeros(1, dtype=torch.uint8, device=torch.device("cuda", index))
        _ENTERED.devices.add(index)


class _Memory:
    """The parameters of a launch as the kernel declares them: pointers come first, then numbers; maps lie elsewhere."""

    def __init__(
        self, name: str, declared: list[tuple[str, int]], arguments: Sequence[Argument], places: Sequence[int]
    ) -> None:
        kinds: list[Argument] = []
        for argument in arguments:
            kinds += (argument, *argument.numbers) if isinstance(argument, Map) else (argument,)
        more = [size for _, size in declared[len(kinds) :]]
        if len(kinds) > len(declared) or more not in ([], [8], [8, 8]):  # addresses of scratch, which it does not use
            raise ValueError(f"{name} declares {declared}, and {len(kinds)} parameters were given")
        kinds += [0] * (len(declared) - len(kinds))
        given, fixed, offsets = iter(places), b"", dict[int, int]()
        self.pointers: list[int] = []  # their places among the addresses of a launch
        self.maps: list[tuple[int, int, Encode]] = []  # number in the table, place of the address
        first = 8 * sum(kind is POINTER for kind in kinds)  # byte of the numbers
        for number, (kind, (letter, size)) in enumerate(zip(kinds, declared, strict=True)):
            wanted = 8 if kind is POINTER else 128 if isinstance(kind, Map) else min(size, 8)
            if size != wanted or (isinstance(kind, float) and letter != "f"):
                given_was = "a pointer" if kind is POINTER else "a map" if isinstance(kind, Map) else kind
                raise ValueError(f"parameter {number} of {name} is .{letter}{8 * size}, and {given_was} was given")
            if kind is POINTER:
                offsets[number] = 8 * len(self.pointers)
                self.pointers.append(next(given))
            elif isinstance(kind, Map):
                self.maps.append((number, next(given), kind.encode))
            else:
                offsets[number] = first + len(fixed)
                fixed += _number(kind, letter, size).ljust(8, b"\0")
        self.buffer = ctypes.create_string_buffer(bytes(first) + fixed, max(first + len(fixed), 8))
        self.table = (ctypes.c_void_p * len(declared))()
        for number, offset in offsets.items():
            self.table[number] = ctypes.addressof(self.buffer) + offset


def driver_launch(
    name: str,
    compiled: Any,
    ptx: str,
    grid: tuple[int, int, int],
    block: tuple[int, int],
    arguments: Sequence[Argument],
    places: Sequence[int],
    stream: Callable[[int], int],
) -> Callable[[Addresses], None]:
    """Return a function that repeats a launch with tensors at other addresses, aligned alike, on the current stream.

    ``arguments`` are those of the kernel that were not compiled in, ``places`` those of the address of each POINTER and
    Map among all addresses, ``block`` threads and bytes of dynamic shared memory. ``compiled`` is kept: from Triton 3.8
    on its last reference unloads the kernel. ``ValueError`` if the PTX declares other parameters.
    """
    memory, index = _Memory(name, parameters(ptx), arguments, places), torch.cuda.current_device()
    config = _Config(*grid, block[0], 1, 1, block[1], None, None, 0)
    call, handle = _launch_function(), ctypes.c_void_p(compiled.function)
    config_at, table_at = (ctypes.c_void_p(ctypes.addressof(found)) for found in (config, memory.table))
    buffer, table, pick = memory.buffer, memory.table, _picker(memory.pointers)
    pack = struct.Struct(f"{len(memory.pointers)}Q").pack_into
    maps = [(number, place, dict[int, tuple[int, object]](), encode) for number, place, encode in memory.maps]
    lock = threading.Lock()  # config and parameters are one launch's until the driver has copied them

    def launch(addresses: Addresses, _kept: object = compiled) -> None:
        with lock:
            pack(buffer, 0, *pick(addresses))
            for number, place, known, encode in maps:
                address: Any = addresses[place]
                table[number] = (known.get(address) or _encoded(address, known, encode, index))[0]
            config.stream = stream(index)
            error = call(config_at, handle, table_at, None)
            if error == INVALID_CONTEXT:  # of a thread that has launched nothing yet
                enter_context(index)
                error = call(config_at, handle, table_at, None)
        if error:
            raise RuntimeError(f"{name} could not be launched: CUDA error {error} ({error_text(error)})")

    return launch


def parameters(ptx: str) -> list[tuple[str, int]]:
    """Type letter (``u``, ``s``, ``b``, ``f``) and bytes of each parameter of the kernel in ``ptx``."""
    entry = ptx[ptx.index(".entry") :]
    found = _PARAMETER.findall(entry[: entry.index(")")])
    return [(letter, int(bits) // 8 * int(count or 1)) for letter, bits, count in found]


def error_text(error: int) -> str:
    text = ctypes.c_char_p()
    _library().cuGetErrorString(error, ctypes.byref(text))
    return (text.value or b"unknown").decode()


def _number(value: float, letter: str, size: int) -> bytes:
    if letter == "f":
        return struct.pack("f" if size == 4 else "d", value)
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _picker(places: list[int]) -> Callable[[Addresses], tuple[Any, ...]]:
    if len(places) > 1:
        return itemgetter(*places)
    return (lambda addresses: (addresses[places[0]],)) if places else lambda addresses: ()


def _encoded(address: int, known: dict[int, tuple[int, object]], encode: Encode, index: int) -> tuple[int, object]:
    if len(known) >= MAX_MAPS:
        known.clear()
    enter_context(index)
    found = known[address] = encode(address)
    return found


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _launch_function() -> Callable[..., int]:
    function = _library().cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function
