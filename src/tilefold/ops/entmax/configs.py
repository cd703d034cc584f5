"""Launch configurations of the row kernels; nothing is searched at run time."""

from __future__ import annotations

from typing import NamedTuple

from tilefold.ops._shared._triton.tensors import power_of_two
from tilefold.ops._shared.tuning import Between, Row, lookup


class RowsConfig(NamedTuple):
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


# Rows in registers are held whole: several in a program of 256 entries, and 8 to 16 entries a thread of 16 warps.
TABLE = (
    Row({}, {"block_r": 1, "block_n": 1024, "resident": False, "num_warps": 8}, "compiled without spills"),
    Row({"n": Between(most=4096), "gradient": False}, {"resident": True}, "compiled: 8 values a thread, no spills"),
    Row({"n": Between(most=2048), "gradient": True}, {"resident": True}, "compiled: twice the sums, two operands"),
)


def rows_config(n: int, gradient: bool = False) -> RowsConfig:
    """The tile for rows of ``n`` entries, of the forward kernel or of that of the gradient."""
    config = RowsConfig(**lookup(TABLE, n=n, gradient=gradient))
    if not config.resident:
        return config
    block = power_of_two(n)
    return RowsConfig(max(1, 256 // block), block, resident=True, num_warps=max(4, min(16, block // 256)))
