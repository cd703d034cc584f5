"""Launch configurations of alpha-entmax attention; nothing is searched at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilefold.ops._shared.impl import triton_interpreted

# Queries of a row tile and keys of a block: the granularity of the map of live blocks, the same in every kernel.
BLOCK = 64
BLOCK_INTERPRETED = 16
RESIDENT_KEYS = 128  # keys of a row tile whose scores stay in registers without spills
RESIDENT_INTERPRETED = 32


@dataclass(frozen=True)
class AttentionConfig:
    """Tiles of the attention kernels.

    Attributes:
        block: queries and keys of a tile.
        num_warps: of every kernel.
        num_stages: of the kernels that walk blocks.
        dkv_stages: of the kernel with the most accumulators.
        precision: ``input_precision`` of fp32 products.
    """

    block: int
    num_warps: int
    num_stages: int
    precision: str
    dkv_stages: int


def block_size() -> int:
    """Queries of a row tile and keys of a block."""
    return BLOCK_INTERPRETED if triton_interpreted() else BLOCK


def resident_keys() -> int:
    """The most keys that one tile of rows may see and have its scores kept on chip."""
    if triton_interpreted():
        return RESIDENT_INTERPRETED
    return RESIDENT_KEYS


def attention_config(dtype: torch.dtype, head_dim: int, device: torch.device, dropout: bool) -> AttentionConfig:
    """The configuration for ``dtype`` and a head dimension on ``device``; random words take registers too."""
    if device.type != "cuda" or triton_interpreted():
        return AttentionConfig(BLOCK_INTERPRETED, 4, 1, "ieee", 1)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    config = config_for(dtype, head_dim, tf32, torch.cuda.get_device_capability(device))
    return replace(config, num_warps=8) if dropout else config


def config_for(dtype: torch.dtype, head_dim: int, tf32: bool, capability: tuple[int, int]) -> AttentionConfig:
    """The configuration for a compute capability; ``tf32`` allows TF32 products of fp32 input."""
    if dtype == torch.float32:
        return AttentionConfig(BLOCK, 8, 1, "tf32" if tf32 else "tf32x3", 1)
    warps = 4 if head_dim <= 64 and capability == (9, 0) else 8
    return AttentionConfig(BLOCK, warps, 2, "ieee", 2 if capability >= (9, 0) else 1)


def span(longest_k: int, window: int) -> int:
    """The most keys that a tile of rows can see."""
    return longest_k if window < 0 else min(longest_k, block_size() + 2 * window)


def is_resident(longest_k: int, window: int, device: torch.device) -> bool:
    """Whether the scores of a tile of rows stay on chip; else live blocks are listed."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0):
        return False  # Triton 3.6 fails to build that kernel there
    return span(longest_k, window) <= resident_keys()


def row_tiles(q: Tensor, batch: int, packed: bool) -> int:
    """Row tiles of a batch, for packed ones the most there can be."""
    block = block_size()
    return q.size(0) // block + batch if packed else batch * -(-q.size(2) // block)


def live_shape(q: Tensor, batch: int, longest_k: int, packed: bool, window: int) -> tuple[int, int, int]:
    """``[H, row tiles, words]`` of the map of live blocks, one bit a block; empty where nothing reads it."""
    if is_resident(longest_k, window, q.device):
        return 0, 0, 0
    blocks = -(-longest_k // block_size())
    return q.size(1), row_tiles(q, batch, packed), -(-blocks // 32)
