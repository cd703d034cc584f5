"""What the launchers share: the number of programs, and TMA descriptors where they can be used."""

from __future__ import annotations

import functools
from typing import Any, Protocol

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
    @property
    def use_tma(self) -> bool: ...


@functools.cache
def sm_count(device: torch.device) -> int:
    """Multiprocessors of ``device``; 3 programs where kernels are interpreted."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def can_use_tma(tensor: Tensor) -> bool:
    """Whether a ``[rows, D]`` tensor can be read through a TMA descriptor: 16-byte aligned base and rows."""
    return tensor.data_ptr() % 16 == 0 and tensor.stride(0) * tensor.element_size() % 16 == 0 and tensor.stride(1) == 1


def make_source(weight: Tensor, rows: Tensor, config: TileConfig) -> tuple[Any, Any, bool]:
    """What the forward kernel reads weight and rows through: descriptors, or the tensors themselves."""
    if config.use_tma and can_use_tma(weight) and can_use_tma(rows):
        return (
            TensorDescriptor(weight, list(weight.shape), list(weight.stride()), [config.block_v, config.block_k]),
            TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [config.block_t, config.block_k]),
            True,
        )
    return weight, rows, False
