"""Sum and mean pooling: activation per token inside the tile; backward computes each tile of logits again.

Forward never stores logits. Backward walks the vocabulary in slabs: one kernel writes the slab's ``dlogits``
``[N, slab]``, two library products turn it into gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import activate, slope_from_logit
from tilefold.ops._shared._triton.offsets import narrowed


@triton.jit
def _row_range(cu_ptr, b, N, uniform_length, UNIFORM: tl.constexpr):
    """First row of sequence ``b`` and its length, both within the ``N`` rows whatever the offsets say."""
    if UNIFORM:
        return b.to(tl.int64) * uniform_length, uniform_length
    else:
        start = tl.minimum(tl.maximum(narrowed(tl.load(cu_ptr + b)), 0), N)
        end = tl.minimum(tl.maximum(narrowed(tl.load(cu_ptr + b + 1)), start), N)
        return start.to(tl.int64), end - start


@triton.jit
def _logits_tile(
    weight_ptr, rows_ptr, offs_v, row, valid, V,
    D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_T, BLOCK_V]`` products of the given rows and vocabulary entries, fp32."""
    acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for k0 in tl.range(0, D, BLOCK_K):
        offs_k = k0 + tl.arange(0, BLOCK_K)
        w = tl.load(
            weight_ptr + offs_v.to(tl.int64)[:, None] * D + offs_k[None, :],
            mask=(offs_v < V)[:, None] & (offs_k < D)[None, :],
            other=0.0,
        )  # [BLOCK_V, BLOCK_K]
        h = tl.load(
            rows_ptr + row[:, None] * D + offs_k[None, :], mask=valid[:, None] & (offs_k < D)[None, :], other=0.0
        )  # [BLOCK_T, BLOCK_K]
        acc = tl.dot(h, w.T, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["B", "N"])
def _check_offsets_kernel(cu_ptr, ok_ptr, B, N, BLOCK: tl.constexpr):
    """Whether ``cu_seqlens`` starts with 0, never falls and ends with N: ``ok`` is 1, else 0."""
    ok = (narrowed(tl.load(cu_ptr)) == 0) & (narrowed(tl.load(cu_ptr + B)) == N)
    for b0 in range(0, B, BLOCK):
        b = b0 + tl.arange(0, BLOCK)
        start = narrowed(tl.load(cu_ptr + b, mask=b < B, other=0))
        end = narrowed(tl.load(cu_ptr + 1 + b, mask=b < B, other=0))
        ok = ok & (tl.min((end >= start).to(tl.int32)) > 0)
    tl.store(ok_ptr, ok.to(tl.int32))


@triton.jit(do_not_specialize=["uniform_length", "N", "logit_scale"])
def _sum_forward_kernel(
    weight_ptr, rows_ptr, bias_ptr, mask_ptr, cu_ptr, ok_ptr, out_ptr, V, N, uniform_length, logit_scale,
    D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, UNIFORM: tl.constexpr, MEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    start, length = _row_range(cu_ptr, b, N, uniform_length, UNIFORM)
    bias = tl.zeros((BLOCK_V,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_V,), tl.float32)
    count = 0
    for t0 in range(0, length, BLOCK_T):
        s = t0 + tl.arange(0, BLOCK_T)
        row = start + s
        valid = (s < length) & (row >= 0) & (row < N)
        if HAS_MASK:
            valid = valid & (tl.load(mask_ptr + row, mask=valid, other=0) != 0)
        count += tl.sum(valid.to(tl.int32))
        acc = _logits_tile(weight_ptr, rows_ptr, offs_v, row, valid, V, D, BLOCK_V, BLOCK_T, BLOCK_K, PRECISION)
        x = activate(acc * logit_scale + bias[None, :], ACTIVATION)
        total += tl.sum(tl.where(valid[:, None], x, 0.0), axis=0)
    if MEAN:
        total = total / tl.maximum(count, 1).to(tl.float32)
    if not UNIFORM:  # a broken cu_seqlens must not give a plausible number
        total = tl.where(tl.load(ok_ptr) != 0, total, float("nan"))
    tl.store(out_ptr + b.to(tl.int64) * V + offs_v, total.to(out_ptr.dtype.element_ty), mask=offs_v < V)


@triton.jit(do_not_specialize=["v_start", "v_end", "uniform_length", "N", "logit_scale"])
def _dlogits_kernel(
    dscores_ptr, weight_ptr, rows_ptr, bias_ptr, mask_ptr, cu_ptr, dlogits_ptr,
    v_start, v_end, V, N, uniform_length, logit_scale, stride_db, stride_dv, stride_out,
    D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, UNIFORM: tl.constexpr, MEAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``dlogits[row, v - v_start] = dscores[b, v] * act'(logit[row, v])``, over the length for a mean."""
    b = tl.program_id(0)
    offs_v = v_start + tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < v_end
    start, length = _row_range(cu_ptr, b, N, uniform_length, UNIFORM)
    bias = tl.zeros((BLOCK_V,), tl.float32)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + offs_v, mask=mask_v, other=0.0).to(tl.float32)
    offs_d = b.to(tl.int64) * stride_db + offs_v.to(tl.int64) * stride_dv
    grad = tl.load(dscores_ptr + offs_d, mask=mask_v, other=0.0).to(tl.float32)  # [BLOCK_V]
    if MEAN:
        count = length
        if HAS_MASK:
            count = 0
            for t0 in range(0, length, 1024):
                s = t0 + tl.arange(0, 1024)
                count += tl.sum((tl.load(mask_ptr + start + s, mask=s < length, other=0) != 0).to(tl.int32))
        grad = grad / tl.maximum(count, 1).to(tl.float32)
    for t0 in range(0, length, BLOCK_T):
        s = t0 + tl.arange(0, BLOCK_T)
        row = start + s
        inside = (s < length) & (row >= 0) & (row < N)
        valid = inside
        if HAS_MASK:
            valid = valid & (tl.load(mask_ptr + row, mask=inside, other=0) != 0)
        acc = _logits_tile(weight_ptr, rows_ptr, offs_v, row, valid, V, D, BLOCK_V, BLOCK_T, BLOCK_K, PRECISION)
        x = acc * logit_scale + bias[None, :]
        dlogits = tl.where(valid[:, None], grad[None, :] * slope_from_logit(x, ACTIVATION), 0.0)
        tl.store(
            dlogits_ptr + row[:, None] * stride_out + (offs_v - v_start)[None, :],
            dlogits.to(dlogits_ptr.dtype.element_ty),
            mask=inside[:, None] & mask_v[None, :],
        )


@triton.jit(do_not_specialize=["N"])
def _clear_masked_kernel(
    rows_ptr, mask_ptr, clean_ptr, N, D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """A copy of rows, those that are masked zero: times a gradient of 0 they could be NaN."""
    r = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    valid = tl.load(mask_ptr + r, mask=r < N, other=0) != 0
    offs = r.to(tl.int64)[:, None] * D + d[None, :]
    inside = (r < N)[:, None] & (d < D)[None, :]
    x = tl.load(rows_ptr + offs, mask=inside & valid[:, None], other=0.0)  # [BLOCK_ROWS, BLOCK_D]
    tl.store(clean_ptr + offs, x, mask=inside)
