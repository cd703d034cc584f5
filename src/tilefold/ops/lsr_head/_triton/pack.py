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

BLOCK_ROWS = 32  # rows that one program copies
BLOCK_D = 128
SCAN = 1024  # mask entries or sequences that are scanned at a time


@triton.jit(do_not_specialize=["S"])
def _count_kernel(mask_ptr, count_ptr, last_ptr, S, SCAN: tl.constexpr):
    """Valid tokens of sequence b, and the row of the last one (-1 if none)."""
    b = tl.program_id(0).to(tl.int64)
    count = 0
    last = -1
    for s0 in range(0, S, SCAN):
        s = s0 + tl.arange(0, SCAN)
        valid = tl.load(mask_ptr + b * S + s, mask=s < S, other=0) != 0  # [SCAN]
        count += tl.sum(valid.to(tl.int32))
        last = tl.maximum(last, tl.max(tl.where(valid, s, -1)))
    tl.store(count_ptr + b, count)
    tl.store(last_ptr + b, tl.where(last < 0, -1, b * S + last))


@triton.jit(do_not_specialize=["B", "T"])
def _plan_kernel(
    length_ptr,
    cu_ptr,
    last_ptr,
    offset_ptr,
    ok_ptr,
    B,
    T,
    GROUP: tl.constexpr,
    SCAN: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Group-aligned offsets ``[B + 1]``; broken ``cu_seqlens`` make every sequence empty and ``ok`` 0."""
    ok = True
    if PACKED:
        ok = (tl.load(cu_ptr) == 0) & (tl.load(cu_ptr + B) == T)
        for b0 in range(0, B, SCAN):
            b = b0 + tl.arange(0, SCAN)
            start = tl.load(cu_ptr + b, mask=b < B, other=0)
            end = tl.load(cu_ptr + b + 1, mask=b < B, other=0)
            ok = ok & (tl.min(end - start) >= 0) & (tl.min(start) >= 0)
    tl.store(ok_ptr, ok.to(tl.int32) if PACKED else 1)
    tl.store(offset_ptr, 0)
    total = 0
    for b0 in range(0, B, SCAN):
        b = b0 + tl.arange(0, SCAN)
        if PACKED:
            start = tl.load(cu_ptr + b, mask=b < B, other=0)
            end = tl.load(cu_ptr + b + 1, mask=b < B, other=0)
            length = tl.where(ok, end - start, 0)
            tl.store(last_ptr + b, tl.where(length > 0, end - 1, -1), mask=b < B)
        else:
            length = tl.load(length_ptr + b, mask=b < B, other=0)
        aligned = (length + GROUP - 1) // GROUP * GROUP
        tl.store(offset_ptr + 1 + b, total + tl.cumsum(aligned), mask=b < B)
        total += tl.sum(aligned)


@triton.jit(do_not_specialize=["S"])
def _copy_padded_kernel(
    hidden_ptr, mask_ptr, offset_ptr, rows_ptr, position_ptr, S, D,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    s0 = tl.program_id(0) * BLOCK_ROWS
    before = 0
    for start in range(0, s0, SCAN):
        s = start + tl.arange(0, SCAN)
        before += tl.sum((tl.load(mask_ptr + b * S + s, mask=s < s0, other=0) != 0).to(tl.int32))
    s = s0 + tl.arange(0, BLOCK_ROWS)
    valid = tl.load(mask_ptr + b * S + s, mask=s < S, other=0) != 0  # [BLOCK_ROWS]
    row = (tl.load(offset_ptr + b) + before + tl.cumsum(valid.to(tl.int32)) - 1).to(tl.int64)
    tl.store(position_ptr + row, s, mask=valid)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (d < D)[None, :]
        x = tl.load(hidden_ptr + (b * S + s)[:, None] * D + d[None, :], mask=inside)  # [BLOCK_ROWS, BLOCK_D]
        tl.store(rows_ptr + row[:, None] * D + d[None, :], x, mask=inside)


@triton.jit(do_not_specialize=["B", "T"])
def _copy_packed_kernel(
    hidden_ptr, cu_ptr, offset_ptr, ok_ptr, rows_ptr, position_ptr, B, T, D,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    valid = (r < T) & (tl.load(ok_ptr) != 0)
    seq = tl.zeros((BLOCK_ROWS,), tl.int32)
    for b0 in range(0, B, 256):
        b = b0 + tl.arange(0, 256)
        end = tl.load(cu_ptr + 1 + b, mask=b < B, other=2147483647)
        seq += tl.sum((end[None, :] <= r[:, None]).to(tl.int32), axis=1)  # [BLOCK_ROWS]
    place = r - tl.load(cu_ptr + seq, mask=valid, other=0)
    row = (tl.load(offset_ptr + seq, mask=valid, other=0) + place).to(tl.int64)
    tl.store(position_ptr + row, place, mask=valid)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        inside = valid[:, None] & (d < D)[None, :]
        x = tl.load(hidden_ptr + r.to(tl.int64)[:, None] * D + d[None, :], mask=inside)  # [BLOCK_ROWS, BLOCK_D]
        tl.store(rows_ptr + row[:, None] * D + d[None, :], x, mask=inside)


@triton.jit
def _repeat_last_kernel(
    hidden_ptr, last_ptr, length_ptr, cu_ptr, offset_ptr, rows_ptr, position_ptr, D,
    GROUP: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Fill the rows between a sequence's last token and the next multiple of GROUP."""
    b = tl.program_id(0)
    last = tl.load(last_ptr + b).to(tl.int64)
    if PACKED:
        length = tl.load(cu_ptr + b + 1) - tl.load(cu_ptr + b)
    else:
        length = tl.load(length_ptr + b)
    row = tl.load(offset_ptr + b) + length + tl.arange(0, GROUP)
    fill = (row < tl.load(offset_ptr + b + 1)) & (last >= 0)  # [GROUP]
    tl.store(position_ptr + row, tl.zeros((GROUP,), tl.int32), mask=fill)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        x = tl.load(hidden_ptr + last * D + d, mask=(d < D) & (last >= 0), other=0.0)
        tl.store(
            rows_ptr + row.to(tl.int64)[:, None] * D + d[None, :], x[None, :], mask=fill[:, None] & (d < D)[None, :]
        )


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
    if cu_seqlens is None:
        batch, length = hidden.size(0), hidden.size(1)
        if attention_mask is None:
            if length % group == 0:
                return AlignedRows(hidden.view(batch * length, dim), None, None, None, length)
            attention_mask = torch.ones(batch, length, dtype=torch.bool, device=device)
        bound = batch * triton.cdiv(length, group) * group
    else:
        batch, length = cu_seqlens.numel() - 1, 0
        bound = hidden.size(0) + batch * (group - 1)
    rows = torch.empty(max(bound, 1), dim, dtype=hidden.dtype, device=device)
    positions = torch.empty(max(bound, 1), dtype=torch.int32, device=device)
    counts, last = torch.empty(2, max(batch, 1), dtype=torch.int32, device=device)
    offsets = torch.empty(batch + 1, dtype=torch.int32, device=device)
    ok = torch.empty(1, dtype=torch.int32, device=device)
    packed = cu_seqlens is not None
    mask = None if attention_mask is None else (attention_mask != 0).contiguous().view(torch.uint8)
    if mask is not None and batch:
        _count_kernel[(batch,)](mask, counts, last, length, SCAN=SCAN)
    plan_rows = hidden.size(0) if packed else 0
    _plan_kernel[(1,)](counts, cu_seqlens, last, offsets, ok, batch, plan_rows, GROUP=group, SCAN=SCAN, PACKED=packed)
    if batch and hidden.numel():
        if packed:
            _copy_packed_kernel[(triton.cdiv(plan_rows, BLOCK_ROWS),)](
                hidden, cu_seqlens, offsets, ok, rows, positions, batch, plan_rows, dim,
                BLOCK_ROWS=BLOCK_ROWS, BLOCK_D=BLOCK_D,
            )  # fmt: skip
        else:
            _copy_padded_kernel[(triton.cdiv(length, BLOCK_ROWS), batch)](
                hidden, mask, offsets, rows, positions, length, dim,
                BLOCK_ROWS=BLOCK_ROWS, BLOCK_D=BLOCK_D, SCAN=SCAN,
            )  # fmt: skip
        _repeat_last_kernel[(batch,)](
            hidden, last, counts, cu_seqlens, offsets, rows, positions, dim,
            GROUP=group, BLOCK_D=BLOCK_D, PACKED=packed,
        )  # fmt: skip
    return AlignedRows(rows, offsets, positions, ok, 0)
