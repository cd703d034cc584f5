"""Launches of a compiled kernel through the CUDA driver: 5 to 26 us of host time less than Triton's
own call takes.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from tilefold.ops._shared import internals
from tilefold.ops._shared.fallback import give_up
from tilefold.ops._shared.internals import TMA_MAP_BYTES, Addresses, Grid, LaunchAt, Tma
from tilefold.ops._shared.plan import selector

_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)[^\[,\n]*(?:\[(\d+)\])?")
INVALID_CONTEXT = 201
TMA_MAP_ALIGNMENT = 64
# of a kernel: the place of its address among all of them, with the bytes of a TMA map of the matrix
# there; or a number
Argument = tuple["int | None", Any]
_ENTERED = (
    threading.local()
)  # its ``devices`` are those whose context has been current in this thread


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *[
            (name, ctypes.c_uint)
            for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")
        ],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


def enter_context(index: int) -> None:
    """Make the context of device ``index``, the current one, that of this thread too: TMA
    descriptors need one.
    """
    entered = vars(_ENTERED).setdefault("devices", set())
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
    """Bind a kernel, for addresses aligned alike; ``None`` where only Triton's call can launch it.

    ``values`` are those of a launch that succeeded, without constants; ``tma`` says by argument how
    a tensor is described; those after the last one are plain pointers.
    """
    try:
        facts = internals.launch_facts(compiled)
        arguments = None if facts is None else _arguments(facts[1], values, tma, facts[2])
        return (
            None
            if facts is None or arguments is None
            else driver_launch(compiled, facts[0], grid, arguments)
        )
    except Exception as error:  # the next release may have changed what this reads
        why, instead = (
            f"{type(error).__name__}: {error}",
            "Triton's own call does: the same results, more host time.",
        )
        give_up(
            "repeating launches past Triton",
            torch.device("cuda", torch.cuda.current_device()),
            why,
            instead,
        )
        return None


def _arguments(
    kinds: list[str],
    values: Sequence[Any],
    tma: Sequence[Tma | None],
    described: Sequence[Any],
) -> list[Argument] | None:
    """Arguments that were not compiled in; ``None`` where the kernel reads a described matrix by
    pointers.
    """
    descriptions, found = iter(described), list[Argument]()
    for place, (kind, value, by) in enumerate(zip_longest(kinds, values, tma)):
        if kind == "constexpr":
            continue
        if by is None:
            found.append((place, None) if kind.startswith("*") else (None, value))
            continue
        like = internals.tma_map(value, next(descriptions, None))
        if like is None:
            return None
        found += [(place, like), *((None, number) for number in (*value.shape, *value.strides))]
    return found


def driver_launch(
    compiled: Any,
    ptx: str,
    grid: Grid,
    arguments: Sequence[Argument],
) -> LaunchAt | None:
    """Return a function that repeats a launch with tensors at other addresses, aligned alike, on
    the current stream.

    ``compiled`` is kept: from Triton 3.8 on its last reference unloads the kernel. ``ValueError``
    if the PTX declares other parameters; ``None`` without libcuda, or with a driver before CUDA
    12.0.
    """
    name, declared, index = compiled.metadata.name, parameters(ptx), torch.cuda.current_device()
    spare = [
        size for _, size in declared[len(arguments) :]
    ]  # addresses of scratch, which it does not use
    if len(arguments) > len(declared) or spare not in ([], [8], [8, 8]):
        raise ValueError(f"{name} declares {declared}, and {len(arguments)} parameters were given")
    arguments = [*arguments, *[(None, 0)] * len(spare)]
    places = [place for place, value in arguments if value is None and place is not None]
    held, table = (
        (ctypes.c_uint64 * len(places))(),
        (ctypes.c_void_p * len(declared))(),
    )  # addresses, and all places
    memory = (ctypes.c_char * (TMA_MAP_ALIGNMENT + TMA_MAP_BYTES * len(declared)))()
    pointer_at, map_at = (
        ctypes.addressof(held),
        ctypes.addressof(memory) + -ctypes.addressof(memory) % TMA_MAP_ALIGNMENT,
    )
    maps: list[
        Any
    ] = []  # the place of each one's matrix, the map's address, and the one that is in it
    kept: list[Any] = [compiled, memory, table]
    for number, ((place, value), (letter, size)) in enumerate(
        zip(arguments, declared, strict=True),
    ):
        wanted = 8 if value is None else TMA_MAP_BYTES if isinstance(value, bytes) else min(size, 8)
        if size != wanted or (isinstance(value, float) and letter != "f"):
            raise ValueError(
                f"parameter {number} of {name} is .{letter}{8 * size}, and {value} was given",
            )
        if value is None:
            table[number], pointer_at = pointer_at, pointer_at + 8
        elif isinstance(value, bytes):
            ctypes.memmove(map_at, value, TMA_MAP_BYTES)
            maps.append([place, map_at, 0])
            table[number], map_at = map_at, map_at + TMA_MAP_BYTES
        else:  # of 64 bits the first bytes are those of a narrower number
            wide = (
                ctypes.c_int64
                if letter != "f"
                else ctypes.c_float
                if size == 4
                else ctypes.c_double
            )
            kept.append(wide(value if letter == "f" else int(value)))
            table[number] = ctypes.addressof(kept[-1])
    config = _Config(
        *grid,
        32 * compiled.metadata.num_warps,
        1,
        1,
        compiled.metadata.shared,
        None,
        None,
        0,
    )
    stream, handle = internals.current_stream, ctypes.c_void_p(compiled.function)
    try:
        call, replace = (
            driver_function("cuLaunchKernelEx"),
            driver_function("cuTensorMapReplaceAddress"),
        )
    except (OSError, AttributeError):
        return None
    config_at, table_at = (ctypes.c_void_p(ctypes.addressof(found)) for found in (config, table))
    pack, pick, pointer = (
        struct.Struct(f"{len(places)}Q").pack_into,
        selector(places),
        ctypes.c_void_p,
    )
    lock = (
        threading.Lock()
    )  # config, parameters and maps are one launch's until the driver has copied them

    def launch(addresses: Addresses, _kept: object = kept) -> None:
        with lock:
            error = 0
            pack(held, 0, *pick(addresses))
            for each in maps:
                if (address := addresses[each[0]]) != each[2]:
                    error |= replace(pointer(each[1]), pointer(address))
                    each[2] = address
            config.stream = stream(index)
            error = error or call(config_at, handle, table_at, None)
            if error == INVALID_CONTEXT:  # of a thread that has launched nothing yet
                enter_context(index)
                error = call(config_at, handle, table_at, None)
        if error:
            raise RuntimeError(
                f"{name} could not be launched: CUDA error {error} ({error_text(error)})",
            )

    return launch


def parameters(ptx: str) -> list[tuple[str, int]]:
    """Type letter (``u``, ``s``, ``b``, ``f``) and bytes of each parameter of the kernel in
    ``ptx``.
    """
    entry = ptx[ptx.index(".entry") :]
    found = _PARAMETER.findall(entry[: entry.index(")")])
    return [(letter, int(bits) // 8 * int(count or 1)) for letter, bits, count in found]


def error_text(error: int) -> str:
    text = ctypes.c_char_p()
    driver_function("cuGetErrorString")(error, ctypes.byref(text))
    return (text.value or b"unknown").decode()


@functools.cache
def driver_function(name: str) -> Any:
    """A function of the CUDA driver; ``OSError`` or ``AttributeError`` where there is none."""
    return getattr(ctypes.CDLL("libcuda.so.1"), name)
