"""Sum and mean pooling: what is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.tensors import Pieces, Scratch, cdiv
from tilefold.ops.lsr_head._problem import BackwardCall, Gradients, HeadOptions, Needs, Saved, Tokens, Vocabulary
from tilefold.ops.lsr_head._range import largest_finite, unit_of
from tilefold.ops.lsr_head._triton.launch_few_rows import plan_few_rows
from tilefold.ops.lsr_head._triton.launch_one_token import OneTokenBackward
from tilefold.ops.lsr_head._triton.operands import Operands, plan_operands
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


@dataclass(frozen=True, eq=False, slots=True)
class SumForward:
    """Sums or means, for all calls that have the key of the first.

    Attributes:
        options: of the head.
        operands: how the tensors of a call become operands.
        scores: ``[B, V]``.
        check, ok: of packed input, the launch that checks the offsets, and what it says, ``[1]`` int32.
        fold: the launch that adds up activated logits.
    """

    options: HeadOptions
    operands: Operands
    scores: Scratch
    check: Step | None
    ok: Scratch | None
    fold: Step

    def __call__(self, tokens: Tokens, vocabulary: Vocabulary) -> tuple[Tensor, None]:
        """Scores; NaN where ``cu_seqlens`` is broken."""
        same = self.operands.same()
        (hidden, mask, cu_seqlens), (weight, _, bias) = self.operands.ready(tokens, vocabulary)
        scores, ok = self.scores(), None
        if self.check is not None and self.ok is not None:
            ok = self.ok()
            self.check(same, cu_seqlens, ok)
        self.fold(same, weight, hidden, bias, mask, cu_seqlens, ok, scores)
        return scores, None


def plan_sum_forward(tokens: Tokens, vocabulary: Vocabulary, options: HeadOptions, aligned: bool) -> SumForward:
    """The launches of such a call."""
    operands, tokens, vocabulary = plan_operands(tokens, vocabulary, options.compute_dtype, aligned)
    device, batch, vocab = tokens.hidden.device, tokens.batch, vocabulary.weight.size(0)
    config = sum_config(options.compute_dtype, device)
    packed = tokens.cu_seqlens is not None
    check = Step(_check_offsets_kernel, (1, 1, 1), (batch, tokens.n_rows), {"BLOCK": CHECK_BLOCK}) if packed else None
    return SumForward(
        options,
        operands,
        Scratch((batch, vocab), options.out_dtype, device),
        check,
        Scratch((1,), torch.int32, device) if packed else None,
        Step(
            _sum_forward_kernel,
            (batch, cdiv(vocab, config.block_v), 1),
            (vocab, tokens.n_rows, tokens.length, options.logit_scale),
            _constants(tokens, vocabulary, options, config),
        ),
    )


def _constants(tokens: Tokens, vocabulary: Vocabulary, options: HeadOptions, config: SumConfig) -> dict[str, Any]:
    return {
        "D": tokens.hidden.size(-1), "BLOCK_V": config.block_v, "BLOCK_T": config.block_t, "BLOCK_K": config.block_k,
        "ACTIVATION": options.activation, "HAS_BIAS": vocabulary.bias is not None,
        "HAS_MASK": tokens.attention_mask is not None, "UNIFORM": tokens.cu_seqlens is None,
        "MEAN": options.pooling == "mean", "PRECISION": config.precision,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slab:
    """A part of the vocabulary, and what is launched for it.

    Attributes:
        first, last: entries.
        dlogits: computes its logits again, and writes their gradients.
        store: stores what the products made of these; ``None`` where products are gradients.
    """

    first: int
    last: int
    dlogits: Step
    store: Step | None


@dataclass(frozen=True, slots=True)
class SumBackward:
    """Gradients of sums or means, for all calls that have the key of the first.

    Attributes:
        options: of the head.
        operands: how the tensors of a call become operands.
        needs: which gradients are asked for.
        slabs: of the vocabulary; all but the last one have the width of ``dlogits``.
        dlogits: gradients of logits of a slab.
        clean: under a mask, a copy of rows without what is masked.
        sums: scratch of the sums of dlogits of each sequence, ``[B, slab]`` fp32, for the bias.
        dhidden, dweight: gradients that are stored; ``None`` where they are products, or not needed.
        dbias: the bias's gradient.
    """

    options: HeadOptions
    operands: Operands
    needs: Needs
    slabs: tuple[Slab, ...]
    dlogits: Scratch
    clean: Scratch | None
    sums: Pieces
    dhidden: Scratch | None
    dweight: Scratch | None
    dbias: Scratch | None

    def __call__(
        self, dscores: Tensor, saved: Saved, tokens: Tokens, vocabulary: Vocabulary, main_grad: Tensor | None
    ) -> Gradients:
        """Gradients of hidden, weight and bias."""
        same, needs = self.operands.same(), self.needs
        tokens, (weight, _, bias) = self.operands.ready(tokens, vocabulary)
        hidden, mask, cu_seqlens = tokens
        unit: Tensor | None = None
        if self.options.compute_dtype == torch.float16:
            # dlogits in units that fp16 holds; whatever is made of them is fp32 until it is taken back
            # in fp16 those of a mean, not yet divided by the length, would not fit
            dscores = dscores.to(torch.float32, memory_format=torch.contiguous_format)
            unit = _unit_of_dlogits(dscores, tokens, self.options.pooling == "mean")
            dscores = dscores / unit
        dlogits, clean, (sums,) = self.dlogits(), None if self.clean is None else self.clean(), self.sums()
        rows = hidden if clean is None else clean
        rows = rows if cu_seqlens is not None or not needs.weight else rows.view(-1, rows.size(-1))
        dbias = None if self.dbias is None else self.dbias()
        drows = dhidden = dproduct = dweight = None
        for slab in self.slabs:
            slab.dlogits(same, dscores, weight, hidden, bias, mask, cu_seqlens, dlogits, clean, sums)
            part, columns = dlogits, weight
            if slab.last - slab.first != dlogits.size(1):
                part = dlogits[:, : slab.last - slab.first]
            if needs.hidden:
                if len(self.slabs) > 1:
                    columns = weight[slab.first : slab.last]
                found = _wide_product(part, columns)
                drows = found if drows is None else drows.add_(found)
                del found
            if needs.weight:
                dproduct = None  # that of the slab before is stored
                dproduct = _wide_product(part.t(), rows)
                dweight = self.dweight() if dweight is None and self.dweight is not None else dweight
            if slab is self.slabs[-1] and self.dhidden is not None:
                dhidden = self.dhidden()
            if slab.store is not None:
                slab.store(same, drows, dhidden, dproduct, dweight, sums, dbias, unit)
        if drows is not None and dhidden is None:
            dhidden = drows.view(hidden.shape)
        return dhidden, dproduct if self.dweight is None else dweight, dbias


def plan_sum_backward(call: BackwardCall, aligned: bool) -> SumBackward | OneTokenBackward:
    """The launches of such gradients."""
    dscores, _, tokens, vocabulary, options, needs = call
    given = tokens.hidden.dtype, vocabulary.weight.dtype
    operands, tokens, vocabulary = plan_operands(tokens, vocabulary, options.compute_dtype, aligned)
    hidden, batch, (vocab, dim), n_rows = tokens.hidden, tokens.batch, vocabulary.weight.shape, tokens.n_rows
    config, device = sum_config(options.compute_dtype, hidden.device), hidden.device
    width = max(config.block_v, config.slab_elements // max(n_rows, 1) // config.block_v * config.block_v)
    width = min(width, cdiv(vocab, 8) * 8)
    scaled = options.compute_dtype == torch.float16
    # products in fp32 are the gradients where nothing is left to be done to them
    stored = [dtype != torch.float32 or scaled or options.logit_scale != 1.0 for dtype in given]
    stored = [stored[0] and needs.hidden, (stored[1] or width < vocab) and needs.weight]
    clean = tokens.attention_mask is not None and needs.weight
    strides = (vocab, 1) if scaled else dscores.stride()
    constants = _constants(tokens, vocabulary, options, config)
    if n_rows <= config.few_rows and not scaled and given == (options.compute_dtype,) * 2:
        return plan_few_rows(dscores, (tokens, vocabulary), operands, options, needs, config, constants)
    constants |= {"NEED_BIAS": needs.bias is not None}
    slabs = []
    for v0 in range(0, vocab, width):
        v1 = min(v0 + width, vocab)
        numbers = (v0, v1, vocab, n_rows, tokens.length, options.logit_scale, *strides, width)
        grid = (batch, cdiv(v1 - v0, config.block_v), 1)
        step = Step(_dlogits_kernel, grid, numbers, constants | {"CLEAN": clean and v0 == 0})
        counts = (n_rows * dim if stored[0] and v1 == vocab else 0, (v1 - v0) * dim if stored[1] else 0)
        counted = (*counts, 0 if needs.bias is None else v1 - v0)
        slabs.append(Slab(v0, v1, step, _plan_store(counted, v0, dim, batch, width, options)))
    return SumBackward(
        options,
        operands,
        needs,
        tuple(slabs),
        Scratch((n_rows, width), options.compute_dtype, device),
        Scratch((n_rows, dim), hidden.dtype, device) if clean else None,
        Pieces(device, ((batch if needs.bias is not None else 0, width), torch.float32)),
        Scratch(tuple(hidden.shape), given[0], device) if stored[0] else None,
        Scratch((vocab, dim), given[1], device) if stored[1] else None,
        None if needs.bias is None else Scratch((vocab,), needs.bias, device),
    )


def _plan_store(
    counts: tuple[int, int, int], first: int, dim: int, batch: int, width: int, options: HeadOptions
) -> Step | None:
    """The launch that stores so many numbers of hidden, weight and bias, of a slab from entry ``first`` on."""
    if not any(counts):
        return None
    programs = sum(cdiv(n, block) for n, block in zip(counts, (STORE_BLOCK, STORE_BLOCK, STORE_BIAS[1]), strict=True))
    constants = {
        "D": dim, "NEED_HIDDEN": counts[0] > 0, "NEED_WEIGHT": counts[1] > 0, "NEED_BIAS": counts[2] > 0,
        "HAS_UNIT": options.compute_dtype == torch.float16, "BLOCK": STORE_BLOCK, "BLOCK_B": STORE_BIAS[0],
        "BLOCK_V": STORE_BIAS[1],
    }  # fmt: skip
    numbers = (*counts, first, batch, width, options.logit_scale)
    return Step(_store_gradients_kernel, (programs, 1, 1), numbers, constants)


def _unit_of_dlogits(dscores: Tensor, tokens: Tokens, mean: bool) -> Tensor:
    """What the gradients of all logits, none steeper than 1, are to be divided by in fp16; on the device."""
    largest = largest_finite(dscores, dim=1)  # [B, 1]
    if mean and tokens.cu_seqlens is not None:
        largest /= tokens.cu_seqlens.diff().clamp(min=1)[:, None]
    elif mean and tokens.attention_mask is not None:
        largest /= (tokens.attention_mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    elif mean:
        largest /= max(tokens.length, 1)
    return unit_of(largest.amax())


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` handed out in fp32."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
