"""Packed batches: which sequence a tile of rows belongs to, and offsets that describe no rows, all on the device.

The host sees neither lengths nor whether they are right, and a dozen small torch operations per side would take longer
than the attention of a small batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton.masks import mask_if
from tilefold.ops._shared._triton.offsets import narrowed


@triton.jit
def write_table(cu_ptr, batch_ptr, start_ptr, B, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """For every tile its sequence, the number of those that end before it; for every sequence its first tile."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sequence = tl.zeros((BLOCK,), tl.int32)
    before = tl.zeros((), tl.int64)
    for first in range(0, B, BLOCK):
        b = first + tl.arange(0, BLOCK)
        start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0)).to(tl.int64)
        end = narrowed(tl.load(cu_ptr + b + 1, mask=b < B, other=0)).to(tl.int64)
        count = tl.maximum((end - start + (ROWS - 1)) // ROWS, 0)  # offsets may fall: they are not checked
        ends = before + tl.cumsum(count, axis=0)
        over = (ends[None, :] <= tile[:, None]) & (b < B)[None, :]
        sequence += tl.sum(over.to(tl.int32), axis=1)
        before += tl.sum(count, axis=0)
        tl.store(start_ptr + b + 1, tl.minimum(ends, tiles).to(tl.int32), mask=mask_if(b < B, tl.program_id(0) == 0))
    tl.store(batch_ptr + tile, sequence, mask=tile < tiles)
    if tl.program_id(0) == 0:
        tl.store(start_ptr, 0)


@triton.jit(do_not_specialize=["B", "q_tiles", "k_tiles"])
def tables_kernel(
    cu_q_ptr, cu_k_ptr, q_batch_ptr, q_start_ptr, k_batch_ptr, k_start_ptr, B, q_tiles, k_tiles,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tables of the queries, and in a second row of programs those of the keys."""
    if tl.program_id(1) == 0:
        write_table(cu_q_ptr, q_batch_ptr, q_start_ptr, B, q_tiles, ROWS, BLOCK)
    elif KEYS > 0:  # else nothing to write to
        write_table(cu_k_ptr, k_batch_ptr, k_start_ptr, B, k_tiles, KEYS, BLOCK)


@triton.jit
def is_broken(cu_ptr, B, rows, longest, BLOCK: tl.constexpr):
    """Count the ways the offsets fail to begin with 0, to end with the number of rows, and never to fall or to rise by
    more than ``longest``.
    """
    wrong = (narrowed(tl.load(cu_ptr)) != 0).to(tl.int32) + (narrowed(tl.load(cu_ptr + B)) != rows).to(tl.int32)
    for first in range(0, B, BLOCK):
        b = first + tl.arange(0, BLOCK)
        start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0)).to(tl.int64)
        rise = narrowed(tl.load(cu_ptr + b + 1, mask=b < B, other=0)) - start
        wrong += tl.sum(((rise < 0) | (rise > longest)).to(tl.int32), axis=0)
    return wrong


@triton.jit(do_not_specialize=["B", "q_rows", "k_rows", "longest", "size"])
def nan_if_broken_kernel(cu_q_ptr, cu_k_ptr, out_ptr, B, q_rows, k_rows, longest, size, BLOCK: tl.constexpr):
    """NaN in all ``size`` elements of a dense tensor, if the offsets do not describe the rows."""
    if is_broken(cu_q_ptr, B, q_rows, q_rows, BLOCK) + is_broken(cu_k_ptr, B, k_rows, longest, BLOCK) > 0:
        nothing = tl.full((BLOCK,), float("nan"), tl.float32).to(out_ptr.dtype.element_ty)
        for first in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
            offs = first + tl.arange(0, BLOCK)
            tl.store(out_ptr + offs, nothing, mask=offs < size)


TABLE_BLOCK = 64  # tiles of a program, and sequences that it looks at together
CHECK_BLOCK = 512  # offsets that are looked at together, and elements that are written
WRITERS = 128
