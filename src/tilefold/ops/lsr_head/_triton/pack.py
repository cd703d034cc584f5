"""Packs the valid tokens of a batch, each sequence from a multiple of GROUP rows on, without a look from the host.

The rows that round a sequence up to a multiple of GROUP repeat its last valid token. A repeated token can never win
a maximum (equal logits go to the lower row), so the forward kernel needs no masks: a sequence is whole groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilefold.ops.lsr_head._triton.launch import as_int32, cdiv

BLOCK_ROWS = 32  # rows that one program copies
BLOCK_D = 128
SCAN = 1024  # mask entries or sequences that are scanned at a time


@triton.jit
def _rounded(length, GROUP: tl.constexpr):
    return (length + GROUP - 1) // GROUP * GROUP


@triton.jit(do_not_specialize=["S"])
def _count_kernel(mask_ptr, count_ptr, last_ptr, S, SCAN: tl.constexpr):
    """Valid tokens of sequence b, and the place of the last one (-1 if none)."""
    b = tl.program_id(0).to(tl.int64)
    count = 0
    last = -1
    for s0 in range(0, S, SCAN):
        s = s0 + tl.arange(0, SCAN)
        valid = tl.load(mask_ptr + b * S + s, mask=s < S, other=0) != 0  # [SCAN]
        count += tl.sum(valid.to(tl.int32))
        last = tl.maximum(last, tl.max(tl.where(valid, s, -1)))
    tl.store(count_ptr + b, count)
    tl.store(last_ptr + b, last)


@triton.jit(do_not_specialize=["B", "S"])
def _copy_padded_kernel(
    hidden_ptr, mask_ptr, count_ptr, last_ptr, offset_ptr, rows_ptr, position_ptr, B, S,
    D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SCAN: tl.constexpr, GROUP: tl.constexpr,
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
        before += tl.sum((tl.load(mask_ptr + b * S + s, mask=s < s0, other=0) != 0).to(tl.int32))
    s = s0 + tl.arange(0, BLOCK_ROWS)
    valid = tl.load(mask_ptr + b * S + s, mask=s < S, other=0) != 0  # [BLOCK_ROWS]
    row = (offset + before + tl.cumsum(valid.to(tl.int32)) - 1).to(tl.int64)
    tl.store(position_ptr + row, s, mask=valid)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (d < D)[None, :]
        x = tl.load(hidden_ptr + (b * S + s)[:, None] * D + d[None, :], mask=inside)  # [BLOCK_ROWS, BLOCK_D]
        tl.store(rows_ptr + row[:, None] * D + d[None, :], x, mask=inside)
    if s0 == 0:
        count = tl.load(count_ptr + b)
        last = tl.load(last_ptr + b)
        end = offset + _rounded(count, GROUP)
        tl.store(offset_ptr + b, offset)
        if b == B - 1:
            tl.store(offset_ptr + B, end)
        fill = offset + count + tl.arange(0, GROUP)
        tl.store(position_ptr + fill, last + tl.zeros((GROUP,), tl.int32), mask=fill < end)
        for d0 in range(0, D, BLOCK_D):
            d = d0 + tl.arange(0, BLOCK_D)
            x = tl.load(hidden_ptr + (b * S + last) * D + d, mask=(d < D) & (last >= 0), other=0.0)
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
    ok = (tl.load(cu_ptr) == 0) & (tl.load(cu_ptr + B) == T)
    for b0 in range(0, B, SCAN_B):
        b = b0 + tl.arange(0, SCAN_B)
        start = tl.load(cu_ptr + b, mask=b < B, other=0)
        end = tl.load(cu_ptr + 1 + b, mask=b < B, other=0)
        ok = ok & (tl.min(end - start) >= 0)
        passed = (end[None, :] <= r[:, None]) & (b < B)[None, :]  # [BLOCK_ROWS, SCAN_B]
        seq += tl.sum(passed.to(tl.int32), axis=1)
        offset += tl.sum(tl.where(passed, _rounded(end - start, GROUP)[None, :], 0), axis=1)
    valid = (r < T) & ok
    place = r - tl.load(cu_ptr + seq, mask=valid, other=0)
    is_last = valid & (r + 1 == tl.load(cu_ptr + seq + 1, mask=valid, other=0))
    row = (offset + place).to(tl.int64)
    tl.store(position_ptr + row, place, mask=valid)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (d < D)[None, :]
        x = tl.load(hidden_ptr + r.to(tl.int64)[:, None] * D + d[None, :], mask=inside)  # [BLOCK_ROWS, BLOCK_D]
        tl.store(rows_ptr + row[:, None] * D + d[None, :], x, mask=inside)
        if tl.max(is_last.to(tl.int32)) > 0:
            fills = tl.where(is_last, _rounded(place + 1, GROUP) - (place + 1), 0)
            for i in range(1, GROUP):
                again = (fills >= i)[:, None] & (d < D)[None, :]
                tl.store(rows_ptr + (row + i)[:, None] * D + d[None, :], x, mask=again)
    if tl.program_id(0) == 0:
        tl.store(ok_ptr, ok.to(tl.int32))
        tl.store(offset_ptr, 0)
        total = 0
        for b0 in range(0, B, SCAN_B):
            b = b0 + tl.arange(0, SCAN_B)
            start = tl.load(cu_ptr + b, mask=b < B, other=0)
            end = tl.load(cu_ptr + 1 + b, mask=b < B, other=0)
            length = tl.where(ok, _rounded(end - start, GROUP), 0)
            tl.store(offset_ptr + 1 + b, total + tl.cumsum(length), mask=b < B)
            total += tl.sum(length)


@dataclass(frozen=True)
class AlignedRows:
    """Rows the forward kernel reads.

    Attributes:
        rows: ``[T_bound, D]``; only the first ``offsets[B]`` are meant.
        offsets: ``[B + 1]`` int32, multiples of GROUP, or ``None`` for ``b * uniform_length``.
        positions: ``[T_bound]`` int32, each row's position in its sequence, or ``None`` for ``row - offsets[b]``.
        ok: ``[1]`` int32, 0 where ``cu_seqlens`` was broken; ``None`` if there was none.
        uniform_length: length of every sequence where ``offsets`` is ``None``.
    """

    rows: Tensor
    offsets: Tensor | None
    positions: Tensor | None
    ok: Tensor | None
    uniform_length: int


def align_rows(hidden: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None, group: int) -> AlignedRows:
    """Align the valid tokens of ``hidden``; no copy for unmasked input whose length is a multiple of ``group``."""
    hidden = hidden.contiguous()
    device, dim = hidden.device, hidden.size(-1)
    if cu_seqlens is not None:
        return _align_packed(hidden, as_int32(cu_seqlens), group)
    batch, length = hidden.size(0), hidden.size(1)
    if attention_mask is None:
        if length % group == 0:
            return AlignedRows(hidden.view(batch * length, dim), None, None, None, length)
        attention_mask = torch.ones(batch, length, dtype=torch.uint8, device=device)
    mask = attention_mask.view(torch.uint8) if attention_mask.dtype == torch.bool else attention_mask
    mask = mask.contiguous()
    bound = batch * cdiv(length, group) * group
    rows = torch.empty(bound, dim, dtype=hidden.dtype, device=device)
    offsets, count, last, positions = torch.empty(3 * batch + 1 + bound, dtype=torch.int32, device=device).split(
        [batch + 1, batch, batch, bound]
    )
    _count_kernel[(batch,)](mask, count, last, length, SCAN=SCAN)
    _copy_padded_kernel[(batch, cdiv(length, BLOCK_ROWS))](
        hidden, mask, count, last, offsets, rows, positions, batch, length,
        D=dim, BLOCK_ROWS=BLOCK_ROWS, BLOCK_D=BLOCK_D, SCAN=SCAN, GROUP=group,
    )  # fmt: skip
    return AlignedRows(rows, offsets, positions, None, 0)


def _align_packed(hidden: Tensor, cu_seqlens: Tensor, group: int) -> AlignedRows:
    total, dim = hidden.shape
    batch = cu_seqlens.numel() - 1
    bound = max(1, total + batch * (group - 1))
    rows = torch.empty(bound, dim, dtype=hidden.dtype, device=hidden.device)
    offsets, ok, positions = torch.empty(batch + 2 + bound, dtype=torch.int32, device=hidden.device).split(
        [batch + 1, 1, bound]
    )
    _copy_packed_kernel[(max(1, cdiv(total, BLOCK_ROWS)),)](
        hidden, cu_seqlens, offsets, ok, rows, positions, batch, total,
        D=dim, BLOCK_ROWS=BLOCK_ROWS, BLOCK_D=BLOCK_D, GROUP=group, SCAN_B=64,
    )  # fmt: skip
    return AlignedRows(rows, offsets, positions, ok, 0)
