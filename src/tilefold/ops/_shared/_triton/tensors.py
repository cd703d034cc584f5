"""Helpers of all plans for sizes, masks and devices."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tilefold.ops._shared.impl import triton_interpreted


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
