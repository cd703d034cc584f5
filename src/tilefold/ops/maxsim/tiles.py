"""Sizes of the tiled path's tiles, and what it may hold beyond inputs, outputs and what backward saves."""

from __future__ import annotations

# Whatever the lengths, the layout and the pairing, a call holds no more (twice that in fp64), and so much per token,
# sequence and pair; besides, gradients of 16-bit inputs are in fp32 before they are rounded, and queries in int8 where
# the documents are. A row of more than two million numbers is not cut.
SCRATCH_BYTES = 96 << 20
BOOKKEEPING_BYTES = 200
TILE_ELEMENTS = 1 << 21  # similarities of one tile: 8 MiB in fp32, so that it stays in the last-level cache
GROUP_ELEMENTS = 1 << 18  # of those that are gathered together: 1 MiB in fp32, for the second-level cache
ROW_ELEMENTS = 1 << 21  # numbers of either side that are copied to fp32 at a time (one row at least)
BLOCK_ROWS = 16384  # document tokens of a tile at most
BLOCK_COLUMNS = 4096  # query tokens of a tile at most
SLAB_ENTRIES = 1 << 19  # (document, query token) winners whose gradients are sorted at a time
# XTR's query tokens of a tile, and its similarities, on the CPU and elsewhere: long rows keep the searches of the
# largest few; and (query token, document) maxima held at a time on the CPU
CPU_TILE = (1024, 1 << 22)
DEVICE_TILE = (4096, 1 << 26)
MAXIMA = 1 << 21
TOPK_DOCUMENTS = 65536  # documents scored at a time for the best of them: [Nq, 65536] scores are held


def row_limit(dim: int) -> int:
    """Rows of ``dim`` numbers that may be copied at a time."""
    return max(1, min(BLOCK_ROWS, ROW_ELEMENTS // max(dim, 1)))


def column_limit(dim: int) -> int:
    """Query tokens of a tile at most."""
    return min(BLOCK_COLUMNS, row_limit(dim))
