"""Launch configurations of alpha-entmax attention; nothing is searched at run time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilefold.ops._shared.impl import triton_interpreted

BLOCK_INTERPRETED = 16
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


def tile_sizes(dtype: torch.dtype, head_dim: int) -> tuple[int, int]:
    """Queries of a row tile and keys of a block; the most keys whose scores stay on chip without spills.

    The first is the granularity of the map of live blocks, the same in every kernel and in backward: it depends on
    nothing that may change between the two. Every tile fits the 99 KB of compute capabilities 8.6, 8.9 and 12.0.
    """
    if triton_interpreted():
        return BLOCK_INTERPRETED, RESIDENT_INTERPRETED
    if dtype == torch.float32:  # three TF32 products hold every operand twice
        return (32, 64) if head_dim <= 64 else (16, 32)
    return (64, 128) if head_dim <= 128 else (32, 64)


def block_size(q: Tensor) -> int:
    """Queries of a row tile and keys of a block."""
    return tile_sizes(q.dtype, q.size(-1))[0]


def attention_config(dtype: torch.dtype, head_dim: int, device: torch.device, dropout: bool) -> AttentionConfig:
    """The configuration for ``dtype`` and a head dimension on ``device``; random words take registers too."""
    if device.type != "cuda" or triton_interpreted():
        return AttentionConfig(BLOCK_INTERPRETED, 4, 1, "ieee", 1)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    config = config_for(dtype, head_dim, tf32, torch.cuda.get_device_capability(device))
    return replace(config, num_warps=8) if dropout else config


def config_for(dtype: torch.dtype, head_dim: int, tf32: bool, capability: tuple[int, int]) -> AttentionConfig:
    """The configuration for a compute capability; ``tf32`` allows TF32 products of fp32 input."""
    block, _ = tile_sizes(dtype, head_dim)
    if dtype == torch.float32:
        return AttentionConfig(block, 8 if block > 16 else 4, 1, "tf32" if tf32 else "tf32x3", 1)
    warps = 4 if head_dim <= 64 and capability == (9, 0) else 8
    return AttentionConfig(block, warps, 2, "ieee", 2 if capability in ((9, 0), (10, 0), (10, 3)) else 1)


def span(q: Tensor, longest_k: int, window: int) -> int:
    """The most keys that a tile of rows can see."""
    return longest_k if window < 0 else min(longest_k, block_size(q) + 2 * window)


def is_resident(q: Tensor, longest_k: int, window: int) -> bool:
    """Whether the scores of a tile of rows stay on chip; else live blocks are listed."""
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) >= (10, 0):
        return False  # Triton 3.6 fails to build that kernel there
    return span(q, longest_k, window) <= tile_sizes(q.dtype, q.size(-1))[1]


def row_tiles(q: Tensor, batch: int, packed: bool) -> int:
    """Row tiles of a batch, for packed ones the most there can be."""
    block = block_size(q)
    return q.size(0) // block + batch if packed else batch * -(-q.size(2) // block)


def live_shape(q: Tensor, batch: int, longest_k: int, packed: bool, window: int) -> tuple[int, int, int]:
    """``[H, row tiles, words]`` of the map of live blocks, one bit a block; empty where nothing reads it."""
    if is_resident(q, longest_k, window):
        return 0, 0, 0
    blocks = -(-longest_k // block_size(q))
    return q.size(1), row_tiles(q, batch, packed), -(-blocks // 32)
