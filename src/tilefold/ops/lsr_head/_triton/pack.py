"""Packs the valid tokens of a batch, each sequence from a multiple of GROUP rows on, without a look from the host.

The rows that round a sequence up to a multiple of GROUP repeat its first valid token, position and all, so the forward
kernel needs no masks: a sequence is whole groups. A product need not give two equal rows the same bits. Where a
repeated row wins by an ulp, the winner is the token that it repeats, which is the lowest of any that tie with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tilefold.ops._shared._triton.launch import launcher
from tilefold.ops._shared._triton.masks import mask_if
from tilefold.ops._shared._triton.offsets import narrowed
from tilefold.ops.lsr_head._triton.launch import cdiv
from tilefold.ops.lsr_head._triton.steps import Piece, Step

BLOCK_ROWS = 32  # rows that one program copies
BLOCK_D = 128
SCAN = 1024  # mask entries or sequences that are scanned at a time


@triton.jit
def _rounded(length, GROUP: tl.constexpr):
    return (length + GROUP - 1) // GROUP * GROUP


@triton.jit
def _valid(mask_ptr, b, s, S, end, HAS_MASK: tl.constexpr):
    """Whether places ``s`` of sequence ``b`` that lie before ``end`` hold a token."""
    if HAS_MASK:
        return tl.load(mask_ptr + b * S + s, mask=s < end, other=0) != 0
    else:
        return s < end


@triton.jit(do_not_specialize=["S"])
def _count_kernel(mask_ptr, count_ptr, first_ptr, S, SCAN: tl.constexpr, HAS_MASK: tl.constexpr):
    """Valid tokens of sequence b, and the place of the first one (S if none)."""
    b = tl.program_id(0).to(tl.int64)
    count = 0
    first = S
    for s0 in range(0, S, SCAN):
        s = s0 + tl.arange(0, SCAN)
        valid = _valid(mask_ptr, b, s, S, S, HAS_MASK)  # [SCAN]
        count += tl.sum(valid.to(tl.int32))
        first = tl.minimum(first, tl.min(tl.where(valid, s, S)))
    tl.store(count_ptr + b, count)
    tl.store(first_ptr + b, first)


@triton.jit(do_not_specialize=["B", "S"])
def _copy_padded_kernel(
    hidden_ptr, mask_ptr, count_ptr, first_ptr, offset_ptr, rows_ptr, position_ptr, B, S,
    D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SCAN: tl.constexpr, GROUP: tl.constexpr,
    HAS_MASK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    s0 = tl.program_id(1) * BLOCK_ROWS
    offset = 0
    for start in range(0, b, SCAN):
        other = start + tl.arange(0, SCAN)
        offset += tl.sum(_rounded(tl.load(count_ptr + other, mask=other < b, other=0), GROUP))
    before = 0
    for start in range(0, s0, SCAN):
        s = start + tl.arange(0, SCAN)
        before += tl.sum(_valid(mask_ptr, b, s, S, s0, HAS_MASK).to(tl.int32))
    s = s0 + tl.arange(0, BLOCK_ROWS)
    valid = _valid(mask_ptr, b, s, S, S, HAS_MASK)  # [BLOCK_ROWS]
    row = (offset + before + tl.cumsum(valid.to(tl.int32)) - 1).to(tl.int64)
    tl.store(position_ptr + row, s, mask=valid)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (d < D)[None, :]
        x = tl.load(hidden_ptr + (b * S + s)[:, None] * D + d[None, :], mask=inside)  # [BLOCK_ROWS, BLOCK_D]
        tl.store(rows_ptr + row[:, None] * D + d[None, :], x, mask=inside)
    if s0 == 0:
        count = tl.load(count_ptr + b)
        first = tl.load(first_ptr + b)
        end = offset + _rounded(count, GROUP)
        tl.store(offset_ptr + b, offset)
        if b == B - 1:
            tl.store(offset_ptr + B, end)
        fill = offset + count + tl.arange(0, GROUP)
        tl.store(position_ptr + fill, first + tl.zeros((GROUP,), tl.int32), mask=fill < end)
        for d0 in range(0, D, BLOCK_D):
            d = d0 + tl.arange(0, BLOCK_D)
            x = tl.load(hidden_ptr + (b * S + first) * D + d, mask=mask_if(d < D, count > 0), other=0.0)
            inside = (fill < end)[:, None] & (d < D)[None, :]
            tl.store(rows_ptr + fill.to(tl.int64)[:, None] * D + d[None, :], x[None, :], mask=inside)


@triton.jit(do_not_specialize=["B", "T"])
def _copy_packed_kernel(
    hidden_ptr, cu_ptr, offset_ptr, ok_ptr, rows_ptr, position_ptr, B, T,
    D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, SCAN_B: tl.constexpr,
):  # fmt: skip
    """Broken ``cu_seqlens`` make every sequence empty and ``ok`` 0."""
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    seq = tl.zeros((BLOCK_ROWS,), tl.int32)
    offset = tl.zeros((BLOCK_ROWS,), tl.int32)
    ok = (narrowed(tl.load(cu_ptr)) == 0) & (narrowed(tl.load(cu_ptr + B)) == T)
    for b0 in range(0, B, SCAN_B):
        b = b0 + tl.arange(0, SCAN_B)
        start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0))
        end = narrowed(tl.load(cu_ptr + 1 + b, mask=b < B, other=0))
        ok = ok & (tl.min((end >= start).to(tl.int32)) > 0)
        passed = (end[None, :] <= r[:, None]) & (b < B)[None, :]  # [BLOCK_ROWS, SCAN_B]
        seq += tl.sum(passed.to(tl.int32), axis=1)
        offset += tl.sum(tl.where(passed, _rounded(end - start, GROUP)[None, :], 0), axis=1)
    valid = mask_if(r < T, ok)
    first = narrowed(tl.load(cu_ptr + seq, mask=valid, other=0))
    count = narrowed(tl.load(cu_ptr + seq + 1, mask=valid, other=0)) - first
    place = r - first
    row = (offset + place).to(tl.int64)
    tl.store(position_ptr + row, place, mask=valid)
    repeats = tl.where(valid & (place == 0), _rounded(count, GROUP) - count, 0)
    again = row + count  # where a first token is repeated from
    for i in range(GROUP - 1):
        tl.store(position_ptr + again + i, place, mask=repeats > i)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (d < D)[None, :]
        x = tl.load(hidden_ptr + r.to(tl.int64)[:, None] * D + d[None, :], mask=inside)  # [BLOCK_ROWS, BLOCK_D]
        tl.store(rows_ptr + row[:, None] * D + d[None, :], x, mask=inside)
        if tl.max(repeats) > 0:
            for i in range(GROUP - 1):
                mask = (repeats > i)[:, None] & (d < D)[None, :]
                tl.store(rows_ptr + (again + i)[:, None] * D + d[None, :], x, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(ok_ptr, ok.to(tl.int32))
        tl.store(offset_ptr, 0)
        total = 0
        for b0 in range(0, B, SCAN_B):
            b = b0 + tl.arange(0, SCAN_B)
            start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0))
            end = narrowed(tl.load(cu_ptr + 1 + b, mask=b < B, other=0))
            length = tl.where(ok, _rounded(end - start, GROUP), 0)
            tl.store(offset_ptr + 1 + b, total + tl.cumsum(length), mask=b < B)
            total += tl.sum(length)


class Alignment(NamedTuple):
    """How rows are made that the forward kernel reads.

    Attributes:
        steps, pieces: launches that write them, and the scratch that they write: ``rows`` ``[total, D]``, of which the
            first ``offsets[B]`` are meant; ``offsets`` ``[B + 1]`` int32, multiples of the group; ``positions``
            ``[total]`` int32, each row's position in its sequence; ``ok`` ``[1]`` int32, 0 for a broken ``cu_seqlens``.
        total: rows, at most.
        uniform_length: length of every sequence where hidden is read in place; else 0.
    """

    steps: tuple[Step, ...]
    pieces: tuple[Piece, ...]
    total: int
    uniform_length: int

    @property
    def in_place(self) -> bool:
        """Whether the rows are those of hidden."""
        return not self.pieces


def alignment(shape: torch.Size, dtype: torch.dtype, has_mask: bool, batch: int | None, group: int) -> Alignment:
    """How the valid tokens of hidden are aligned; no copy for unmasked input whose length is a multiple of ``group``.

    Args:
        shape, dtype: of the contiguous ``"hidden"`` that the steps read.
        has_mask: whether there is a ``"mask"``, contiguous and no bool.
        batch: number of sequences of packed input with ``"cu_seqlens"``; ``None`` for padded input.
        group: rows that sequences are aligned to.
    """
    dim = shape[-1]
    constants = {"D": dim, "BLOCK_ROWS": BLOCK_ROWS, "BLOCK_D": BLOCK_D, "GROUP": group}
    if batch is not None:
        return _packed_alignment(shape[0], dim, dtype, batch, group, constants)
    batch, length = shape[0], shape[1]
    if not has_mask and length % group == 0:
        return Alignment((), (), batch * length, length)
    bound = batch * cdiv(length, group) * group
    scan: dict[str, Any] = {"SCAN": SCAN, "HAS_MASK": has_mask}
    count = Step(launcher(_count_kernel, scan), (batch, 1, 1), ("mask", "count", "first", length))
    copy = Step(
        launcher(_copy_padded_kernel, constants | scan),
        (batch, cdiv(length, BLOCK_ROWS), 1),
        ("hidden", "mask", "count", "first", "offsets", "rows", "positions", batch, length),
    )
    pieces = (
        Piece("rows", (bound, dim), dtype),
        Piece("offsets", (batch + 1,), torch.int32),
        Piece("count", (batch,), torch.int32),
        Piece("first", (batch,), torch.int32),
        Piece("positions", (bound,), torch.int32),
    )
    return Alignment((count, copy), pieces, bound, 0)


def _packed_alignment(
    total: int, dim: int, dtype: torch.dtype, batch: int, group: int, constants: dict[str, Any]
) -> Alignment:
    bound = max(1, total + batch * (group - 1))
    copy = Step(
        launcher(_copy_packed_kernel, constants | {"SCAN_B": 64}),
        (max(1, cdiv(total, BLOCK_ROWS)), 1, 1),
        ("hidden", "cu_seqlens", "offsets", "ok", "rows", "positions", batch, total),
    )
    pieces = (
        Piece("rows", (bound, dim), dtype),
        Piece("offsets", (batch + 1,), torch.int32),
        Piece("ok", (1,), torch.int32),
        Piece("positions", (bound,), torch.int32),
    )
    return Alignment((copy,), pieces, bound, 0)
