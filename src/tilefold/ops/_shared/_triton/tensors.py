"""What launchers of all rooms ask of tensors and devices, and the memory that plans write."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


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


def contiguous(tensor: Tensor | None) -> Tensor | None:
    """The tensor, if there is one, in contiguous memory."""
    return None if tensor is None else tensor.contiguous()


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A mask that the kernels can read, nonzero = keep: contiguous, and no bool."""
    if mask is None:
        return None
    mask = mask.contiguous()
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def one_byte(mask: Tensor | None) -> Tensor | None:
    """The same in one byte per entry: for kernels that take long to compile, and so are compiled for no other dtype."""
    return as_bytes(mask if mask is None or mask.dtype.itemsize == 1 else mask != 0)


class Scratch:
    """Memory that a plan's launches write, allocated anew in each call: ``scratch()``.

    It keeps a tensor without memory that says what to allocate: ``torch.empty`` takes twice as long on the host. What
    has no element is made once.
    """

    __slots__ = ("_like", "_nothing")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._like = torch.empty(1, dtype=dtype, device=device).expand(shape)
        self._like.untyped_storage().resize_(0)
        self._nothing = None if math.prod(shape) else torch.empty(shape, dtype=dtype, device=device)

    def __call__(self) -> Tensor:
        if self._nothing is not None:
            return self._nothing
        return torch.empty_like(self._like, memory_format=torch.contiguous_format)

    def zeros(self) -> Tensor:
        """The same memory, zeroed."""
        return torch.zeros_like(self._like, memory_format=torch.contiguous_format)
