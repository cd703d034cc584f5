"""Sum and mean pooling: activation per token inside the tile; backward computes each tile of logits again.

Forward never stores logits. Backward walks the vocabulary in slabs: one kernel writes the slab's ``dlogits``
``[N, slab]``, two library products turn it into gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilefold.ops._shared._triton.launch import launcher
from tilefold.ops._shared._triton.offsets import narrowed
from tilefold.ops.lsr_head._layout import Plans, batch_size
from tilefold.ops.lsr_head._range import largest_finite, unit_of
from tilefold.ops.lsr_head._triton.activation import activate, slope_from_logit
from tilefold.ops.lsr_head._triton.launch import as_bytes, cdiv
from tilefold.ops.lsr_head._triton.launch_forward import ORDER, Forward
from tilefold.ops.lsr_head._triton.steps import Piece, Plan, Step, remembered, run_plan, second_time
from tilefold.ops.lsr_head.configs import SumConfig, sum_config

CHECK_BLOCK = 256  # sequences whose offsets are looked at a time


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


def _launch_options(
    hidden: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    activation: str,
    mean: bool,
    config: SumConfig,
) -> dict[str, Any]:
    return {
        "D": hidden.size(-1),
        "BLOCK_V": config.block_v,
        "BLOCK_T": config.block_t,
        "BLOCK_K": config.block_k,
        "ACTIVATION": activation,
        "HAS_BIAS": bias is not None,
        "HAS_MASK": mask is not None,
        "UNIFORM": hidden.dim() == 3,
        "MEAN": mean,
        "PRECISION": config.precision,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def sum_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    mean: bool,
    plans: Plans | None = None,
) -> Tensor:
    """``[B, V]`` sum or mean over valid tokens of the activated logits; NaN where ``cu_seqlens`` is broken.

    ``plans`` receive how calls of this signature are repeated.
    """
    batch, vocab = batch_size(hidden, cu_seqlens), weight.size(0)
    scores = torch.empty(batch, vocab, dtype=out_dtype, device=hidden.device)
    if batch == 0:
        return scores
    config = sum_config(compute_dtype, hidden.device)
    tensors: dict[str, Tensor | None] = {
        "hidden": hidden.to(compute_dtype).contiguous(),
        "weight": weight.to(compute_dtype).contiguous(),
        "weight_scale": None,
        "bias": None if bias is None else bias.contiguous(),
        "mask": as_bytes(attention_mask),
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.contiguous(),
        "scores": scores,
        "winners": None,
    }
    dim = hidden.size(-1)
    rows, length = hidden.numel() // dim, hidden.size(1) if cu_seqlens is None else 0
    ok = None if cu_seqlens is None else "ok"
    run = launcher(_sum_forward_kernel, _launch_options(hidden, bias, attention_mask, activation, mean, config))
    arguments = ("weight", "hidden", "bias", "mask", "cu_seqlens", ok, "scores", vocab, rows, length, logit_scale)
    steps = [Step(run, (batch, cdiv(vocab, config.block_v), 1), arguments)]
    if ok is not None:
        checking = launcher(_check_offsets_kernel, {"BLOCK": CHECK_BLOCK})
        steps.insert(0, Step(checking, (1, 1, 1), ("cu_seqlens", "ok", batch, rows)))
    plan = Plan(tuple(steps), () if ok is None else (Piece("ok", (1,), torch.int32),))
    used = run_plan(plan, tensors, hidden.device)
    if plans is not None and ("forward", True) not in plans and second_time(plans, "forward"):
        replay = remembered(plan, used, ORDER, hidden.device, plans, "forward")
        if replay is not None:
            again = Forward(replay, scores, None, (compute_dtype, compute_dtype))
            plans["forward", True] = plans["forward", False] = again
    return scores


def sum_backward(
    dscores: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    activation: str,
    logit_scale: float,
    compute_dtype: torch.dtype,
    mean: bool,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden, weight (each in its parameter's dtype) and bias (fp32); ``None`` where not needed."""
    need_hidden, need_weight, need_bias = needs
    batch, vocab = dscores.shape
    config = sum_config(compute_dtype, hidden.device)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    mask = as_bytes(attention_mask)
    if bias is not None:
        bias = bias.contiguous()
    rows = hidden.to(compute_dtype).contiguous().view(-1, hidden.size(-1))
    compute_weight = weight.to(compute_dtype).contiguous()
    clean_rows = rows if mask is None else rows.masked_fill(mask.view(-1, 1) == 0, 0)  # 0 * NaN would be NaN
    drows = torch.zeros(rows.shape, dtype=torch.float32, device=hidden.device) if need_hidden else None
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=hidden.device) if need_weight else None
    dbias = torch.zeros(vocab, dtype=torch.float32, device=hidden.device) if need_bias else None
    slab = max(config.block_v, config.slab_elements // max(rows.size(0), 1) // config.block_v * config.block_v)
    slab = min(slab, cdiv(vocab, 8) * 8)
    dlogits = torch.zeros(rows.size(0), slab, dtype=compute_dtype, device=hidden.device)
    length = hidden.size(1) if cu_seqlens is None else 0
    unit: Tensor | None = None
    scale: float | Tensor = logit_scale
    if compute_dtype == torch.float16 and batch:
        # dlogits in units that fp16 holds; whatever is made of them is fp32 until it is taken back
        dscores = dscores.float()  # in fp16 those of a mean, not yet divided by the length, would not fit
        unit = _unit_of_dlogits(dscores, mask, cu_seqlens, length, mean)
        dscores, scale = dscores / unit, unit * logit_scale
    run = launcher(_dlogits_kernel, _launch_options(hidden, bias, mask, activation, mean, config))
    for v0 in range(0, vocab, slab):
        v1 = min(v0 + slab, vocab)
        if batch:
            tensors = (dscores, compute_weight, rows, bias, mask, cu_seqlens, dlogits)
            numbers = (v0, v1, vocab, rows.size(0), length, logit_scale, *dscores.stride(), slab)
            run((batch, cdiv(v1 - v0, config.block_v), 1), (*tensors, *numbers))
        part = dlogits[:, : v1 - v0]
        if drows is not None:
            drows += _wide_product(part, compute_weight[v0:v1])
        if dweight is not None:
            dweight[v0:v1] = _wide_product(part.T, clean_rows) * scale
        if dbias is not None:
            dbias[v0:v1] = part.sum(dim=0, dtype=torch.float32)
    if dbias is not None and unit is not None:
        dbias *= unit
    dhidden = None if drows is None else (drows * scale).to(hidden.dtype).view(hidden.shape)
    return dhidden, dweight, dbias


def _unit_of_dlogits(
    dscores: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, length: int, mean: bool
) -> Tensor:
    """What the gradients of all logits, none steeper than 1, are to be divided by in fp16; on the device."""
    largest = largest_finite(dscores, dim=1)  # [B, 1]
    if mean and cu_seqlens is not None:
        largest /= cu_seqlens.diff().clamp(min=1)[:, None]
    elif mean and mask is not None:
        largest /= (mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    elif mean:
        largest /= max(length, 1)
    return unit_of(largest.amax())


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` handed out in fp32."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
