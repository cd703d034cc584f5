"""Launch plans of sum and mean pooling, and torch's products between."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.tensors import cdiv
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, TorchStep, contiguous, in_dtype
from tilefold.ops.lsr_head._plans_one_token import TakenRows, row_gradients
from tilefold.ops.lsr_head._problem import HeadOptions, HeadSaved, HeadTensors, Needs
from tilefold.ops.lsr_head._range import largest_finite, unit_of
from tilefold.ops.lsr_head._triton.sum_pooling import (
    _check_offsets_kernel,
    _dlogits_kernel,
    _store_gradients_kernel,
    _sum_forward_kernel,
)
from tilefold.ops.lsr_head.configs import SumConfig, sum_config

CHECK_BLOCK = 256  # sequences whose offsets are looked at a time
STORE_BLOCK = 2048  # numbers that a program takes to another dtype
STORE_BIAS = 32, 64  # sequences and columns of sums that one adds up


def forward(tensors: HeadTensors, options: HeadOptions, setting: Setting) -> Plan:
    """Scores; NaN where ``cu_seqlens`` is broken."""
    tokens, batch, vocab = tensors.tokens, tensors.tokens.batch, tensors.weight.size(0)
    config, packed = sum_config(setting.capability, options.compute_dtype, setting.tf32), tokens.cu_seqlens is not None
    steps: list[Launch | TorchStep] = [*_operands(tensors, options)]
    if packed:
        numbers, block = (batch, tokens.n_rows), {"BLOCK": CHECK_BLOCK}
        steps.append(Launch(_check_offsets_kernel, (1, 1, 1), "cu_seqlens ok", numbers, block))
    grid = batch, cdiv(vocab, config.block_v), 1
    names = "weight hidden bias attention_mask cu_seqlens ok scores"
    sizes = (vocab, tokens.n_rows, tokens.length, options.logit_scale)
    steps.append(Launch(_sum_forward_kernel, grid, names, sizes, _constants(tensors, options, config)))
    return Plan(tuple(steps), {"ok": Buffer((1,), torch.int32) if packed else None, "winners": None})


def _operands(tensors: HeadTensors | HeadSaved, options: HeadOptions) -> tuple[TorchStep, ...]:
    return (
        *in_dtype(options.compute_dtype, hidden=tensors.hidden, weight=tensors.weight),
        *contiguous(attention_mask=tensors.attention_mask, cu_seqlens=tensors.cu_seqlens, bias=tensors.bias),
    )


def _constants(tensors: HeadTensors | HeadSaved, options: HeadOptions, config: SumConfig) -> dict[str, Any]:
    return {
        "D": tensors.hidden.size(-1), "BLOCK_V": config.block_v, "BLOCK_T": config.block_t, "BLOCK_K": config.block_k,
        "ACTIVATION": options.activation, "HAS_BIAS": tensors.bias is not None,
        "HAS_MASK": tensors.attention_mask is not None, "UNIFORM": tensors.cu_seqlens is None,
        "MEAN": options.pooling == "mean", "PRECISION": config.precision,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


def backward(dscores: Tensor, saved: HeadSaved, options: HeadOptions, needs: Needs, setting: Setting) -> Plan:
    """A slab of the vocabulary at a time: its logits are computed again, and their gradients multiplied by torch."""
    tokens, (vocab, dim), dtype = saved.tokens, saved.weight.shape, options.compute_dtype
    batch, n_rows, given = tokens.batch, tokens.n_rows, (tokens.hidden.dtype, saved.weight.dtype)
    config, scaled = sum_config(setting.capability, dtype, setting.tf32), dtype == torch.float16
    width = max(config.block_v, config.slab_elements // max(n_rows, 1) // config.block_v * config.block_v)
    width = min(width, cdiv(vocab, 8) * 8)
    # products in fp32 are the gradients where nothing is left to be done to them
    stored = [each != torch.float32 or scaled or options.logit_scale != 1.0 for each in given]
    stored = [stored[0] and needs.hidden, (stored[1] or width < vocab) and needs.weight]
    clean = tokens.attention_mask is not None and needs.weight  # a copy of rows without what is masked
    constants = _constants(saved, options, config)
    steps: list[Launch | TorchStep] = [*_operands(saved, options)]
    if n_rows <= config.few_rows and not scaled and given == (dtype, dtype):
        launches, buffers = _few_rows(dscores, saved, options, needs, constants, setting)
        return Plan((*steps, *launches), buffers)
    if scaled:
        # dlogits in units that fp16 holds; whatever is made of them is fp32 until it is taken back
        # in fp16 those of a mean, not yet divided by the length, would not fit
        unit = partial(_unit_of_dlogits, mean=options.pooling == "mean", length=tokens.length)
        steps.append(TorchStep("dscores", _wide, "dscores"))
        steps.append(TorchStep("unit", unit, "dscores attention_mask cu_seqlens"))
        steps.append(TorchStep("dscores", torch.div, "dscores unit"))
    constants |= {"NEED_BIAS": needs.bias}
    strides, names = (vocab, 1) if scaled else dscores.stride(), "weight hidden bias attention_mask cu_seqlens"
    for v0 in range(0, vocab, width):
        v1 = min(v0 + width, vocab)
        numbers = (v0, v1, vocab, n_rows, tokens.length, options.logit_scale, *strides, width)
        grid, flags = (batch, cdiv(v1 - v0, config.block_v), 1), {"CLEAN": clean and v0 == 0}
        dlogits = Launch(_dlogits_kernel, grid, f"dscores {names} dlogits clean sums", numbers, constants | flags)
        steps.append(dlogits)
        if needs.hidden:
            product = partial(_hidden_product, entries=slice(v0, v1))
            steps.append(TorchStep("drows", product, "dlogits weight drows" if v0 else "dlogits weight"))
        if needs.weight:
            product = partial(_weight_product, entries=v1 - v0)
            steps.append(TorchStep("dproduct", product, "dlogits clean" if clean else "dlogits hidden"))
        counts = (n_rows * dim if stored[0] and v1 == vocab else 0, (v1 - v0) * dim if stored[1] else 0)
        counted = (*counts, v1 - v0 if needs.bias else 0)
        if any(counted):
            dhidden = "dhidden" if v1 == vocab else "nothing"
            steps.append(_store(counted, v0, dim, batch, width, options, dhidden))
    if needs.hidden and not stored[0]:
        steps.append(TorchStep("dhidden", partial(torch.reshape, shape=tuple(tokens.hidden.shape)), "drows"))
    if needs.weight and not stored[1]:
        steps.append(TorchStep("dweight", lambda product: product, "dproduct"))
    buffers = dict.fromkeys(("drows", "dproduct", "unit", "nothing")) | {
        "dlogits": Buffer((n_rows, width), dtype), "clean": Buffer((n_rows, dim), dtype) if clean else None,
        "sums": Buffer((batch if needs.bias else 0, width), torch.float32),  # of each sequence's dlogits
    }  # fmt: skip
    return Plan(tuple(steps), buffers)


def _store(
    counts: tuple[int, int, int], first: int, dim: int, batch: int, width: int, options: HeadOptions, dhidden: str
) -> Launch:
    """The launch that stores so many numbers of hidden, weight and bias, of a slab from entry ``first`` on."""
    programs = sum(cdiv(n, block) for n, block in zip(counts, (STORE_BLOCK, STORE_BLOCK, STORE_BIAS[1]), strict=True))
    constants = {
        "D": dim, "NEED_HIDDEN": counts[0] > 0, "NEED_WEIGHT": counts[1] > 0, "NEED_BIAS": counts[2] > 0,
        "HAS_UNIT": options.compute_dtype == torch.float16, "BLOCK": STORE_BLOCK, "BLOCK_B": STORE_BIAS[0],
        "BLOCK_V": STORE_BIAS[1],
    }  # fmt: skip
    names = f"drows {dhidden} dproduct dweight sums dbias unit"
    numbers = (*counts, first, batch, width, options.logit_scale)
    return Launch(_store_gradients_kernel, (programs, 1, 1), names, numbers, constants)


def _few_rows(
    dscores: Tensor,
    saved: HeadSaved,
    options: HeadOptions,
    needs: Needs,
    constants: dict[str, Any],
    setting: Setting,
) -> tuple[list[Launch], dict[str, Buffer | None]]:
    """Gradients of logits, then the kernels of one token per sequence, which each row stands for.

    The library's products of few rows are bound by the weight and its gradient, which they write in fp32 to be stored
    in another dtype later, and by the host. The slopes are multiplied here.
    """
    tokens, (vocab, dim), dtype = saved.tokens, saved.weight.shape, options.compute_dtype
    n_rows, clean = tokens.n_rows, tokens.attention_mask is not None and needs.weight
    numbers = (0, vocab, vocab, n_rows, tokens.length, options.logit_scale, *dscores.stride(), vocab)
    grid = tokens.batch, cdiv(vocab, constants["BLOCK_V"]), 1
    names = "dscores weight hidden bias attention_mask cu_seqlens dlogits clean sums"
    dlogits = Launch(_dlogits_kernel, grid, names, numbers, constants | {"CLEAN": clean, "NEED_BIAS": False})
    flags = {"PACKED": False, "MASKED": False, "LAST": False, "NO_WINNER": -1}
    taken = TakenRows((n_rows, vocab, dim, n_rows, 1), (vocab, 1), flags, options._replace(activation="none"), needs)
    launches, parts = row_gradients(taken, "dlogits", "dlogits", "clean" if clean else "hidden", setting)
    return [dlogits, *launches], {
        "dlogits": Buffer((n_rows, vocab), dtype), "clean": Buffer((n_rows, dim), dtype) if clean else None,
        "sums": None, "parts": parts,
    }  # fmt: skip


def _wide(dscores: Tensor) -> Tensor:
    return dscores.to(torch.float32, memory_format=torch.contiguous_format)


def _unit_of_dlogits(
    dscores: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None, mean: bool, length: int
) -> Tensor:
    """Divisor in fp16 of the gradients of all logits, none steeper than 1; on the device."""
    largest = largest_finite(dscores, dim=1)  # [B, 1]
    if mean and cu_seqlens is not None:
        largest /= cu_seqlens.diff().clamp(min=1)[:, None]
    elif mean and attention_mask is not None:
        largest /= (attention_mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    elif mean:
        largest /= max(length, 1)
    return unit_of(largest.amax())


def _hidden_product(dlogits: Tensor, weight: Tensor, drows: Tensor | None = None, *, entries: slice) -> Tensor:
    """The gradient of rows by these entries of the vocabulary, added to that of the entries before."""
    found = _wide_product(dlogits[:, : entries.stop - entries.start], weight[entries])
    return found if drows is None else drows.add_(found)


def _weight_product(dlogits: Tensor, rows: Tensor, *, entries: int) -> Tensor:
    return _wide_product(dlogits[:, :entries].t(), rows.view(-1, rows.size(-1)))


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` handed out in fp32."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
