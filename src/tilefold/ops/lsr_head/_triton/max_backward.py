"""Max pooling, backward: only winners carry gradient, and every gradient row has one owner. No atomics on gradients.

``g[b, v] = dscores[b, v] * act'(x)`` belongs to the hidden row that won (b, v). The weight's row v sums
``g[b, v] * hidden[winner]`` over b, in rising b. The hidden rows are owned by tiles of BLOCK_R: a first pass counts,
for each tile and vocabulary split, the entries that its rows won; a prefix sum gives each its place in one list; a
second pass writes the list, in rising (split, v); then each tile's gradient is a one-hot matrix of g times the
gathered weight rows, on the tensor cores.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilefold.ops.lsr_head._layout import no_winner
from tilefold.ops.lsr_head._triton.activation import slope_from_score
from tilefold.ops.lsr_head._triton.launch import as_int32, cdiv
from tilefold.ops.lsr_head.configs import max_backward_config

LAST = tl.constexpr(2147483647)
# An entry of a list packs the vocabulary index above the row inside its tile.
ROW_BITS = tl.constexpr(5)
ROW_MASK = tl.constexpr(31)
MAX_VOCAB = 1 << (31 - 5)


@triton.jit
def _start(cu_ptr, b, B, uniform_length, UNIFORM: tl.constexpr):
    if UNIFORM:
        return b * uniform_length
    else:
        return tl.load(cu_ptr + b, mask=b <= B, other=LAST)


@triton.jit
def _sequence_of(cu_ptr, row, B, uniform_length, UNIFORM: tl.constexpr):
    """The first sequence that ends after ``row``."""
    if UNIFORM:
        return row // uniform_length
    else:
        seq = row * 0
        for b0 in range(0, B, 256):
            b = b0 + tl.arange(0, 256)
            end = tl.load(cu_ptr + 1 + b, mask=b < B, other=LAST)
            seq += tl.sum((end <= row).to(tl.int32))
        return seq


@triton.jit
def _won_rows(scores_ptr, winner_ptr, offs, mask, ALWAYS_ACTIVE: tl.constexpr, NO_WINNER: tl.constexpr):
    """Winners, and which entries carry gradient: NaN scores do, so that they are seen."""
    winner = tl.load(winner_ptr + offs, mask=mask, other=NO_WINNER).to(tl.int32)
    active = mask & (winner != NO_WINNER)
    if not ALWAYS_ACTIVE:
        score = tl.load(scores_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        active = active & ~(score <= 0.0)
    return winner, active


@triton.jit(do_not_specialize=["B", "N", "uniform_length"])
def _count_kernel(
    scores_ptr, winner_ptr, cu_ptr, count_ptr, B, V, N, uniform_length, SPLITS, split_v,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, ALWAYS_ACTIVE: tl.constexpr, NO_WINNER: tl.constexpr,
    UNIFORM: tl.constexpr,
):  # fmt: skip
    """Entries of vocabulary split ``s`` that rows of tile ``t`` won."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row0 = tile * BLOCK_R
    row1 = tl.minimum(row0 + BLOCK_R, N)
    b = _sequence_of(cu_ptr, row0, B, uniform_length, UNIFORM)
    start = _start(cu_ptr, b, B, uniform_length, UNIFORM)
    v1 = tl.minimum((split + 1) * split_v, V)
    count = tl.zeros((BLOCK,), tl.int32)
    while (start < row1) & (b < B):
        for v0 in range(split * split_v, v1, BLOCK):
            v = v0 + tl.arange(0, BLOCK)
            winner, active = _won_rows(scores_ptr, winner_ptr, b.to(tl.int64) * V + v, v < v1, ALWAYS_ACTIVE, NO_WINNER)
            row = winner + start  # [BLOCK]
            count += (active & (row >= row0) & (row < row1)).to(tl.int32)
        b += 1
        start = _start(cu_ptr, b, B, uniform_length, UNIFORM)
    tl.store(count_ptr + tile.to(tl.int64) * SPLITS + split, tl.sum(count))


@triton.jit(do_not_specialize=["B", "N", "uniform_length"])
def _list_kernel(
    dscores_ptr, scores_ptr, winner_ptr, cu_ptr, place_ptr, count_ptr, code_ptr, grad_ptr,
    B, V, N, uniform_length, SPLITS, split_v, stride_db, stride_dv,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, ALWAYS_ACTIVE: tl.constexpr,
    NO_WINNER: tl.constexpr, UNIFORM: tl.constexpr,
):  # fmt: skip
    """Write the entries of one (tile, split), in the order in which they were counted."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    slot = tile.to(tl.int64) * SPLITS + split
    count = tl.load(count_ptr + slot)
    if count > 0:
        row0 = tile * BLOCK_R
        row1 = tl.minimum(row0 + BLOCK_R, N)
        b = _sequence_of(cu_ptr, row0, B, uniform_length, UNIFORM)
        start = _start(cu_ptr, b, B, uniform_length, UNIFORM)
        v1 = tl.minimum((split + 1) * split_v, V)
        place = tl.load(place_ptr + slot) - count  # the prefix sum is inclusive
        while (start < row1) & (b < B):
            for v0 in range(split * split_v, v1, BLOCK):
                v = v0 + tl.arange(0, BLOCK)
                offs = b.to(tl.int64) * V + v
                winner, active = _won_rows(scores_ptr, winner_ptr, offs, v < v1, ALWAYS_ACTIVE, NO_WINNER)
                row = winner + start  # [BLOCK]
                mine = active & (row >= row0) & (row < row1)
                score = tl.load(scores_ptr + offs, mask=mine, other=0.0).to(tl.float32)
                offs_d = b.to(tl.int64) * stride_db + v.to(tl.int64) * stride_dv
                grad = tl.load(dscores_ptr + offs_d, mask=mine, other=0.0).to(tl.float32)
                grad *= slope_from_score(score, ACTIVATION)
                taken = tl.cumsum(mine.to(tl.int32))
                at = place + taken - 1
                tl.store(code_ptr + at, (v << ROW_BITS) | (row - row0), mask=mine)
                tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=mine)
                place += tl.max(taken)
            b += 1
            start = _start(cu_ptr, b, B, uniform_length, UNIFORM)


@triton.jit(do_not_specialize=["N", "logit_scale"])
def _dhidden_kernel(
    weight_ptr, place_ptr, code_ptr, grad_ptr, dhidden_ptr, N, SPLITS, logit_scale,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dhidden[tile] = onehot(row) * g @ weight[v]``, over the tile's entries in their order."""
    tile = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = d < D
    first = tl.load(place_ptr + tile.to(tl.int64) * SPLITS - 1, mask=tile > 0, other=0)
    last = tl.load(place_ptr + (tile + 1).to(tl.int64) * SPLITS - 1)
    rows = tl.arange(0, BLOCK_R)
    acc = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    for e0 in range(first, last, BLOCK_E):
        e = e0 + tl.arange(0, BLOCK_E)
        code = tl.load(code_ptr + e, mask=e < last, other=0)  # [BLOCK_E]
        grad = tl.load(grad_ptr + e, mask=e < last, other=0.0)  # [BLOCK_E]
        w = tl.load(
            weight_ptr + (code >> ROW_BITS).to(tl.int64)[:, None] * D + d[None, :],
            mask=(e < last)[:, None] & mask_d[None, :],
            other=0.0,
        )  # [BLOCK_E, BLOCK_D]
        row = code & ROW_MASK
        onehot = tl.where(rows[:, None] == row[None, :], grad[None, :], 0.0).to(w.dtype)  # [BLOCK_R, BLOCK_E]
        acc = tl.dot(onehot, w, acc, input_precision=PRECISION)
    r = tile * BLOCK_R + rows
    tl.store(
        dhidden_ptr + r.to(tl.int64)[:, None] * D + d[None, :],
        (acc * logit_scale).to(dhidden_ptr.dtype.element_ty),
        mask=(r < N)[:, None] & mask_d[None, :],
    )


@triton.jit(do_not_specialize=["B", "N", "uniform_length", "logit_scale"])
def _dweight_kernel(
    dscores_ptr, scores_ptr, winner_ptr, rows_ptr, cu_ptr, dweight_ptr, dbias_ptr,
    B, V, N, uniform_length, logit_scale, stride_db, stride_dv,
    D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, ACTIVATION: tl.constexpr,
    ALWAYS_ACTIVE: tl.constexpr, NO_WINNER: tl.constexpr, UNIFORM: tl.constexpr, NEED_WEIGHT: tl.constexpr,
    NEED_BIAS: tl.constexpr,
):  # fmt: skip
    """``dweight[v] = sum_b g[b, v] * hidden[winner[b, v]]`` and ``dbias[v] = sum_b g[b, v]``."""
    v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_d = d < D
    acc = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
    dbias = tl.zeros((BLOCK_V,), tl.float32)
    start = tl.zeros((), tl.int32)
    for b in range(B):
        offs = tl.cast(b, tl.int64) * V + v  # [BLOCK_V]
        winner, active = _won_rows(scores_ptr, winner_ptr, offs, v < V, ALWAYS_ACTIVE, NO_WINNER)
        score = tl.load(scores_ptr + offs, mask=active, other=0.0).to(tl.float32)
        offs_d = tl.cast(b, tl.int64) * stride_db + v.to(tl.int64) * stride_dv
        grad = tl.load(dscores_ptr + offs_d, mask=active, other=0.0).to(tl.float32)
        grad = tl.where(active, grad * slope_from_score(score, ACTIVATION), 0.0)  # [BLOCK_V]
        if NEED_BIAS:
            dbias += grad
        if NEED_WEIGHT:
            if UNIFORM:
                row = winner + start
                start += uniform_length
            else:
                row = winner + tl.load(cu_ptr + b)
            active = active & (row >= 0) & (row < N)  # a broken cu_seqlens must not read elsewhere
            if tl.max(active.to(tl.int32)) > 0:
                h = tl.load(
                    rows_ptr + row.to(tl.int64)[:, None] * D + d[None, :],
                    mask=active[:, None] & mask_d[None, :],
                    other=0.0,
                )  # [BLOCK_V, BLOCK_D]
                acc += grad[:, None] * h.to(tl.float32)
    if NEED_WEIGHT:
        tl.store(
            dweight_ptr + v.to(tl.int64)[:, None] * D + d[None, :],
            (acc * logit_scale).to(dweight_ptr.dtype.element_ty),
            mask=(v < V)[:, None] & mask_d[None, :],
        )
    if NEED_BIAS and tl.program_id(1) == 0:
        tl.store(dbias_ptr + v, dbias, mask=v < V)


def max_backward(
    dscores: Tensor,
    scores: Tensor,
    winners: Tensor,
    hidden: Tensor,
    weight: Tensor,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    compute_dtype: torch.dtype,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight (each in its parameter's dtype) and bias (fp32); ``None`` where not needed."""
    need_hidden, need_weight, need_bias = needs
    device, dim = hidden.device, hidden.size(-1)
    batch, vocab = scores.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"weight must have at most {MAX_VOCAB} rows for the Triton backward, got {vocab}.")
    config = max_backward_config(compute_dtype, device)
    cu_seqlens = None if cu_seqlens is None else as_int32(cu_seqlens)
    rows = hidden.reshape(-1, dim)
    dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=device) if need_hidden else None
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=device) if need_weight else None
    dbias = torch.empty(vocab, dtype=torch.float32, device=device) if need_bias else None
    if batch == 0 or rows.size(0) == 0:
        return tuple(None if grad is None else grad.zero_() for grad in (dhidden, dweight, dbias))  # type: ignore[return-value]
    sizes = (batch, vocab, rows.size(0), hidden.size(1) if cu_seqlens is None else 0)
    flags = {
        "ALWAYS_ACTIVE": activation in {"softplus", "none"},
        "NO_WINNER": no_winner(winners.dtype),
        "UNIFORM": cu_seqlens is None,
    }
    strides = dscores.stride()
    if dhidden is not None:
        splits = cdiv(vocab, config.split_v)
        tiles = cdiv(rows.size(0), config.block_r)
        counts = torch.empty(tiles, splits, dtype=torch.int32, device=device)
        scan = {"BLOCK_R": config.block_r, "BLOCK": config.scan_block, "num_warps": config.scan_warps, **flags}
        _count_kernel[(tiles, splits)](scores, winners, cu_seqlens, counts, *sizes, splits, config.split_v, **scan)
        places = counts.view(-1).cumsum(0)
        codes = torch.empty(batch * vocab, dtype=torch.int32, device=device)
        grads = torch.empty(batch * vocab, dtype=compute_dtype, device=device)
        _list_kernel[(tiles, splits)](
            dscores, scores, winners, cu_seqlens, places, counts, codes, grads, *sizes, splits, config.split_v,
            *strides, ACTIVATION=activation, **scan,
        )  # fmt: skip
        _dhidden_kernel[(tiles, cdiv(dim, config.dhidden_block_d))](
            weight.to(compute_dtype).contiguous(), places, codes, grads, dhidden, rows.size(0), splits, logit_scale,
            D=dim, BLOCK_R=config.block_r, BLOCK_D=config.dhidden_block_d, BLOCK_E=config.block_e,
            PRECISION=config.precision, num_warps=config.dhidden_warps, num_stages=config.dhidden_stages,
        )  # fmt: skip
    if dweight is not None or dbias is not None:
        blocks_d = cdiv(dim, config.dweight_block_d) if need_weight else 1
        _dweight_kernel[(cdiv(vocab, config.dweight_block_v), blocks_d)](
            dscores, scores, winners, rows.to(compute_dtype).contiguous(), cu_seqlens, dweight, dbias,
            *sizes, logit_scale, *strides,
            D=dim, BLOCK_V=config.dweight_block_v, BLOCK_D=config.dweight_block_d,
            ACTIVATION=activation, NEED_WEIGHT=need_weight, NEED_BIAS=need_bias,
            num_warps=config.dweight_warps, num_stages=config.dweight_stages, **flags,
        )  # fmt: skip
    return dhidden, dweight, dbias
