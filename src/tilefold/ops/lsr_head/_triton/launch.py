"""What the launchers share: the number of programs, and TMA descriptors where they can be used."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)``; Triton's own costs microseconds a call on the host."""
    return -(-a // b)


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of ``device``; 3 programs where kernels are interpreted."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def as_bytes(mask: Tensor | None) -> Tensor | None:
    """A mask that the kernels can read: contiguous, and no bool."""
    if mask is None:
        return None
    mask = mask.contiguous()
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


@functools.cache
def tma_descriptor(rows: int, columns: int, dtype: torch.dtype) -> Callable[[Tensor], TensorDescriptor]:
    """What makes TMA descriptors of tiles of this size, of tensors of this dtype."""
    block = [rows, columns]
    return lambda tensor: TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)
