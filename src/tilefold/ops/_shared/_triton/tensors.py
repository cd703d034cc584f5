"""Helpers of all launchers for tensors and devices, and the memory that plans write."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.impl import triton_interpreted

PIECE_ALIGNMENT = 128  # bytes, as much as the L2 cache reads at a time


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)``; Triton's own costs microseconds per call on the host."""
    return -(-a // b)


def power_of_two(n: int, least: int = 16) -> int:
    """The first power of two that is no less than ``n``."""
    return max(least, 1 << (n - 1).bit_length())


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of ``device``; 3 where kernels are interpreted."""
    return 3 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability of ``device``; ``(0, 0)`` where kernels are interpreted."""
    compiled = device.type == "cuda" and not triton_interpreted()
    return torch.cuda.get_device_capability(device) if compiled else (0, 0)


def one_byte(mask: Tensor) -> Tensor:
    """A mask, nonzero = keep, contiguous and in one byte per entry, so that kernels are compiled for few dtypes."""
    return (mask if mask.dtype.itemsize == 1 else mask != 0).contiguous()


def without_memory(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, strides: tuple[int, ...] | None = None
) -> Tensor:
    """A tensor that says what to allocate, and holds nothing."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if strides is not None:
        tensor = tensor.as_strided(shape, strides)
    tensor.untyped_storage().resize_(0)
    return tensor


class _Part(NamedTuple):
    first: int  # byte
    size: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class Piece:
    """A part of a buffer that stands for a tensor in launches, which read its address: a view takes torch longer."""

    __slots__ = ("_buffer", "_part", "data_ptr")

    def __init__(self, buffer: Tensor, address: int, part: _Part) -> None:
        self._buffer, self._part = buffer, part
        self.data_ptr: Callable[[], int] = address.__index__  # several launches ask, and a method would take longer

    def tensor(self) -> Tensor:
        first, size, shape, dtype = self._part
        return self._buffer[first : first + size].view(dtype).view(shape)


class Pieces:
    """Scratch of several shapes and dtypes that is allocated at once, as no result may be: it would keep the rest."""

    __slots__ = ("_nothing", "_parts", "firsts", "like", "size")

    def __init__(self, device: torch.device, *parts: tuple[Any, ...]) -> None:
        self._parts: list[_Part] = []
        total = 0
        for shape, dtype, *_ in parts:
            self._parts.append(_Part(total, math.prod(shape) * dtype.itemsize, shape, dtype))
            total += cdiv(self._parts[-1].size, PIECE_ALIGNMENT) * PIECE_ALIGNMENT
        self.like, self.size = without_memory(device, (total,), torch.uint8), total
        self._nothing = None if total else [Piece(self.like, 0, part) for part in self._parts]
        self.firsts = [part.first for part in self._parts]  # of each piece, its first byte

    def __call__(self) -> list[Piece]:
        if self._nothing is not None:
            return self._nothing
        buffer = torch.empty_like(self.like)
        address = buffer.data_ptr()
        return [Piece(buffer, address + part[0], part) for part in self._parts]
