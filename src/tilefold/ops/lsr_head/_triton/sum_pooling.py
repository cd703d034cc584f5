"""Sum and mean pooling: the activation is applied per token, inside the tile.

Backward computes each tile of logits again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared._triton.activation import activate, gradient_from_logit
from tilefold.ops._shared._triton.offsets import narrowed
from tilefold.ops.lsr_head._triton.one_token import logits_tile, offsets_are_valid


@triton.jit
def _row_range(cu_ptr, b, N, uniform_length, UNIFORM: tl.constexpr):
    """Return the first row of a sequence and its length, within the ``N`` rows for any offsets.

    Args:
        cu_ptr: offsets ``[B + 1]``, unless UNIFORM.
        b: the sequence.
        N: number of rows.
        uniform_length: length of all sequences, if UNIFORM.
        UNIFORM: whether all sequences have the same length.
    """
    if UNIFORM:
        return b.to(tl.int64) * uniform_length, uniform_length
    else:
        start = tl.minimum(tl.maximum(narrowed(tl.load(cu_ptr + b)), 0), N)
        end = tl.minimum(tl.maximum(narrowed(tl.load(cu_ptr + b + 1)), start), N)
        return start.to(tl.int64), end - start


@triton.jit(do_not_specialize=["B", "N"])
def check_offsets_kernel(cu_ptr, valid_ptr, B, N):
    """Write whether offsets start with 0, never fall and end with N.

    Args:
        cu_ptr: offsets ``[B + 1]``.
        valid_ptr: 1 or 0, one int32; written.
        B: number of sequences.
        N: number of rows.
    """
    tl.store(valid_ptr, offsets_are_valid(cu_ptr, B, N).to(tl.int32))


@triton.jit(do_not_specialize=["uniform_length", "N", "logit_scale"])
def sum_forward_kernel(
    weight_ptr,
    rows_ptr,
    bias_ptr,
    mask_ptr,
    cu_ptr,
    valid_ptr,
    out_ptr,
    V,
    N,
    uniform_length,
    logit_scale,
    D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    UNIFORM: tl.constexpr,
    MEAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the scores of sum or mean pooling.

    A score is the sum, or the mean, over the tokens of a sequence of
    ``act(logit_scale * hidden . weight[v] + bias[v])``. Instance ``(b, j)`` computes block j of the
    columns for sequence b.

    Args:
        weight_ptr: weight ``[V, D]``.
        rows_ptr: token states ``[N, D]``.
        bias_ptr: bias ``[V]``, if HAS_BIAS.
        mask_ptr: mask ``[B, S]``, if HAS_MASK.
        cu_ptr: offsets ``[B + 1]``, unless UNIFORM.
        valid_ptr: whether the offsets are valid; if not, scores are NaN.
        out_ptr: scores ``[B, V]``; written.
        V: number of columns.
        N: number of rows.
        uniform_length: length of all sequences, if UNIFORM.
        logit_scale: factor of the products.
        D: hidden dimension.
        BLOCK_V, BLOCK_T, BLOCK_K: columns, tokens and entries of a tile.
        ACTIVATION: activation of the logits.
        HAS_BIAS: whether there is a bias.
        HAS_MASK: whether there is a mask.
        UNIFORM: whether all sequences have the same length.
        MEAN: whether sums are divided by the number of valid tokens.
        PRECISION: precision of products of fp32.
    """
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
        acc = logits_tile(
            weight_ptr,
            rows_ptr,
            offs_v,
            row,
            valid,
            V,
            D,
            BLOCK_V,
            BLOCK_T,
            BLOCK_K,
            PRECISION,
        )
        x = activate(acc * logit_scale + bias[None, :], ACTIVATION)
        total += tl.sum(tl.where(valid[:, None], x, 0.0), axis=0)
    if MEAN:
        total = total / tl.maximum(count, 1).to(tl.float32)
    if not UNIFORM:  # invalid cu_seqlens must not yield plausible scores
        total = tl.where(tl.load(valid_ptr) != 0, total, float("nan"))
    tl.store(
        out_ptr + b.to(tl.int64) * V + offs_v,
        total.to(out_ptr.dtype.element_ty),
        mask=offs_v < V,
    )


@triton.jit
def _clear(dlogits_ptr, first_row, end_row, offs, mask_v, stride_out, BLOCK_T: tl.constexpr):
    """Write zeros to a range of rows.

    Args:
        dlogits_ptr: the tensor, ``[N, stride_out]``.
        first_row: the first row.
        end_row: the row after the last one.
        offs: the columns.
        mask_v: columns that exist.
        stride_out: distance from row to row.
        BLOCK_T: rows that are written at a time.
    """
    for r0 in range(first_row, end_row, BLOCK_T):
        r = r0 + tl.arange(0, BLOCK_T)
        pointers = dlogits_ptr + r.to(tl.int64)[:, None] * stride_out + offs[None, :]
        tl.store(pointers, 0.0, mask=(r < end_row)[:, None] & mask_v[None, :])


@triton.jit
def _copy_valid(
    rows_ptr,
    mask_ptr,
    clean_ptr,
    start,
    length,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy an instance's part of a sequence, with zeros for masked tokens.

    A NaN of a masked token, multiplied by a gradient of 0, would be NaN.

    Args:
        rows_ptr: token states ``[N, D]``.
        mask_ptr: mask of the rows.
        clean_ptr: the copy ``[N, D]``; written.
        start: first row of the sequence.
        length: length of the sequence.
        D: hidden dimension.
        BLOCK_T, BLOCK_K: rows and entries that are copied at a time.
    """
    for t0 in range(tl.program_id(1) * BLOCK_T, length, tl.num_programs(1) * BLOCK_T):
        s = t0 + tl.arange(0, BLOCK_T)
        row = start + s
        valid = tl.load(mask_ptr + row, mask=s < length, other=0) != 0
        for k0 in range(0, D, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            offs = row[:, None] * D + k[None, :]
            x = tl.load(
                rows_ptr + offs,
                mask=valid[:, None] & (k < D)[None, :],
                other=0.0,
            )  # [BLOCK_T, BLOCK_K]
            tl.store(clean_ptr + offs, x, mask=(s < length)[:, None] & (k < D)[None, :])


@triton.jit(do_not_specialize=["v_start", "v_end", "uniform_length", "N", "logit_scale", "scale"])
def dlogits_kernel(
    dscores_ptr,
    weight_ptr,
    rows_ptr,
    bias_ptr,
    mask_ptr,
    cu_ptr,
    dlogits_ptr,
    clean_ptr,
    sum_ptr,
    v_start,
    v_end,
    V,
    N,
    uniform_length,
    logit_scale,
    scale,
    stride_db,
    stride_dv,
    stride_out,
    D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    UNIFORM: tl.constexpr,
    MEAN: tl.constexpr,
    PRECISION: tl.constexpr,
    CLEAN: tl.constexpr,
    NEED_BIAS: tl.constexpr,
):
    """Compute the gradients of the logits of a vocabulary slab, for sum or mean pooling.

    ``dlogits[row, v - v_start]`` is ``scale * dscores[b, v] * act'(logit[row, v])``, divided by the
    length for a mean. The logits are computed again. Instance ``(b, j)`` handles block j of the
    slab for sequence b.

    Args:
        dscores_ptr: gradient of the scores ``[B, V]``, with strides ``stride_db`` and
            ``stride_dv``.
        weight_ptr: weight ``[V, D]``.
        rows_ptr: token states ``[N, D]``.
        bias_ptr: bias ``[V]``, if HAS_BIAS.
        mask_ptr: mask ``[B, S]``, if HAS_MASK.
        cu_ptr: offsets ``[B + 1]``, unless UNIFORM.
        dlogits_ptr: gradients ``[N, stride_out]``; written.
        clean_ptr: copy of the rows with zeros for masked tokens; written if CLEAN.
        sum_ptr: sums of the gradients over each sequence's rows, ``[B, stride_out]``, in fp32 and
            without ``scale``, for the gradient of the bias; written if NEED_BIAS.
        v_start: first column of the slab.
        v_end: column after the last one.
        V: number of columns.
        N: number of rows.
        uniform_length: length of all sequences, if UNIFORM.
        logit_scale: factor of the products.
        scale: factor of the stored gradients.
        D: hidden dimension.
        BLOCK_V, BLOCK_T, BLOCK_K: columns, tokens and entries of a tile.
        ACTIVATION: activation of the logits.
        HAS_BIAS: whether there is a bias.
        HAS_MASK: whether there is a mask.
        UNIFORM: whether all sequences have the same length.
        MEAN: whether sums are divided by the number of valid tokens.
        PRECISION: precision of products of fp32.
        CLEAN: whether a copy without masked tokens is needed.
        NEED_BIAS: whether the gradient of the bias is needed.
    """
    b = tl.program_id(0)
    offs_v = v_start + tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < v_end
    start, length = _row_range(cu_ptr, b, N, uniform_length, UNIFORM)
    # With invalid offsets, rows that belong to no sequence are before the first or after the last.
    if not UNIFORM:
        _clear(
            dlogits_ptr,
            0,
            tl.where(b == 0, start, 0),
            offs_v - v_start,
            mask_v,
            stride_out,
            BLOCK_T,
        )
        end = tl.where(b == tl.num_programs(0) - 1, start + length, N)
        _clear(dlogits_ptr, end, N, offs_v - v_start, mask_v, stride_out, BLOCK_T)
    if CLEAN:
        _copy_valid(rows_ptr, mask_ptr, clean_ptr, start, length, D, BLOCK_T, BLOCK_K)
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
                mask = tl.load(mask_ptr + start + s, mask=s < length, other=0)
                count += tl.sum((mask != 0).to(tl.int32))
        grad = grad / tl.maximum(count, 1).to(tl.float32)
    total = tl.zeros((BLOCK_V,), tl.float32)
    for t0 in range(0, length, BLOCK_T):
        s = t0 + tl.arange(0, BLOCK_T)
        row = start + s
        inside = s < length
        valid = inside
        if HAS_MASK:
            valid = valid & (tl.load(mask_ptr + row, mask=inside, other=0) != 0)
        acc = logits_tile(
            weight_ptr,
            rows_ptr,
            offs_v,
            row,
            valid,
            V,
            D,
            BLOCK_V,
            BLOCK_T,
            BLOCK_K,
            PRECISION,
        )
        x = acc * logit_scale + bias[None, :]
        dlogits = tl.where(
            valid[:, None],
            gradient_from_logit(grad[None, :], x, ACTIVATION),
            0.0,
        )
        tl.store(
            dlogits_ptr + row[:, None] * stride_out + (offs_v - v_start)[None, :],
            (dlogits * scale).to(dlogits_ptr.dtype.element_ty),
            mask=inside[:, None] & mask_v[None, :],
        )
        if NEED_BIAS:
            total += tl.sum(dlogits, axis=0)
    if NEED_BIAS:
        tl.store(sum_ptr + b.to(tl.int64) * stride_out + (offs_v - v_start), total, mask=mask_v)
