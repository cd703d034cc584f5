"""What the launchers share: the number of programs, and TMA descriptors where they can be used."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class TileConfig(Protocol):
    """The part of a launch configuration that says how operands are loaded."""

    @property
    def block_v(self) -> int: ...
    @property
    def block_t(self) -> int: ...
    @property
    def block_k(self) -> int: ...


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)``; Triton's own costs microseconds a call on the host."""
    return -(-a // b)


def as_int32(cu_seqlens: Tensor) -> Tensor:
    """Offsets as the kernels read them."""
    return cu_seqlens.to(torch.int32).contiguous()


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of ``device``; 3 programs where kernels are interpreted."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_use_tma(tensor: Tensor) -> bool:
    """Whether a ``[rows, D]`` tensor can be read through a TMA descriptor: 16-byte aligned base and rows."""
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0 and tensor.stride(1) == 1


def tma_descriptors(weight: Tensor, rows: Tensor, config: TileConfig) -> tuple[TensorDescriptor, TensorDescriptor]:
    """TMA descriptors of vocabulary tiles and of token tiles."""
    return (
        TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [config.block_v, config.block_k]),
        TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [config.block_t, config.block_k]),
    )
