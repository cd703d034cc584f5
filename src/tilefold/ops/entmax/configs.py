"""Launch configurations of the row kernels; nothing is searched at run time."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowsConfig:
    """Tile of a program.

    Attributes:
        block_r, block_n: rows, and entries of each that are held at a time.
        resident: whether the whole row is held, so that it is read once.
        num_warps: warps of a program.
    """

    block_r: int
    block_n: int
    resident: bool
    num_warps: int


RESIDENT_ENTRIES = 4096  # longest row in registers: 8 values a thread of 16 warps, so that nothing is spilled


def rows_config(n: int, limit: int = RESIDENT_ENTRIES) -> RowsConfig:
    """The tile of the forward kernel for rows of ``n`` entries."""
    block_n = max(16, 1 << (n - 1).bit_length())
    if block_n > limit:
        return RowsConfig(1, 1024, resident=False, num_warps=8)
    return RowsConfig(max(1, 256 // block_n), block_n, resident=True, num_warps=max(4, min(16, block_n // 256)))


def gradient_config(n: int) -> RowsConfig:
    """The tile of the backward kernel, which holds more for every entry: twice the sums, and two operands."""
    return rows_config(n, limit=2048)


def tolerance(dtype: torch.dtype) -> float:
    """Of the mass of a row; what is left is divided out. 16 bits round the weights themselves by far more."""
    return 1e-6 if dtype == torch.float32 else 1e-5
