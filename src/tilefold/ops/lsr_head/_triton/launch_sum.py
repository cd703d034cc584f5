"""Sum and mean pooling: what is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Step
from tilefold.ops._shared._triton.tensors import Scratch, cdiv
from tilefold.ops.lsr_head._problem import Gradients, HeadOptions, Needs, Saved, Tokens, Vocabulary
from tilefold.ops.lsr_head._range import largest_finite, unit_of
from tilefold.ops.lsr_head._triton.operands import Operands, plan_operands
from tilefold.ops.lsr_head._triton.sum_pooling import (
    _check_offsets_kernel,
    _clear_masked_kernel,
    _dlogits_kernel,
    _sum_forward_kernel,
)
from tilefold.ops.lsr_head.configs import SumConfig, sum_config

CHECK_BLOCK = 256  # sequences whose offsets are looked at a time
CLEAR_BLOCK = 16, 128  # rows and columns


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
class SumBackward:
    """Gradients of sums or means, for all calls that have the key of the first.

    Attributes:
        options: of the head.
        operands: how the tensors of a call become operands.
        needs: which gradients are asked for.
        slabs: first and last entry of each slab of the vocabulary, and the launch that computes its logits again and
            writes their gradients.
        dlogits: gradients of logits of a slab.
        clear, clean: under a mask, the launch that copies rows without what is masked, and the copy.
    """

    options: HeadOptions
    operands: Operands
    needs: Needs
    slabs: tuple[tuple[int, int, Step], ...]
    dlogits: Scratch
    clear: Step | None
    clean: Scratch | None

    def __call__(
        self, dscores: Tensor, saved: Saved, tokens: Tokens, vocabulary: Vocabulary, main_grad: Tensor | None
    ) -> Gradients:
        """Gradients of hidden, weight and bias."""
        same, needs, options = self.operands.same(), self.needs, self.options
        hidden_dtype, weight_dtype = tokens.hidden.dtype, vocabulary.weight.dtype
        tokens, (weight, _, bias) = self.operands.ready(tokens, vocabulary)
        hidden, mask, cu_seqlens = tokens
        unit: Tensor | None = None
        scale: float | Tensor = options.logit_scale
        if options.compute_dtype == torch.float16:
            # dlogits in units that fp16 holds; whatever is made of them is fp32 until it is taken back
            # in fp16 those of a mean, not yet divided by the length, would not fit
            dscores = dscores.to(torch.float32, memory_format=torch.contiguous_format)
            unit = _unit_of_dlogits(dscores, tokens, options.pooling == "mean")
            dscores, scale = dscores / unit, unit * scale
        rows = hidden.view(-1, hidden.size(-1))
        clean = rows
        if needs.weight and self.clear is not None and self.clean is not None:
            clean = self.clean()
            self.clear(same, hidden, mask, clean)
        # the rows of packed input that no sequence holds, with broken offsets, are not written
        dlogits = self.dlogits() if cu_seqlens is None else self.dlogits.zeros()
        drows = dweight = dbias = None
        for v0, v1, launch in self.slabs:
            launch(same, dscores, weight, hidden, bias, mask, cu_seqlens, dlogits)
            part = dlogits if v1 - v0 == dlogits.size(1) else dlogits[:, : v1 - v0]
            whole = len(self.slabs) == 1
            if needs.hidden:
                if drows is None:
                    drows = _wide_product(part, weight if whole else weight[v0:v1])
                else:
                    drows += _wide_product(part, weight[v0:v1])
            if needs.weight:
                if whole:
                    dweight = _scaled(_wide_product(part.T, clean), scale).to(weight_dtype)
                else:
                    dweight = weight.new_empty(weight.shape, dtype=weight_dtype) if dweight is None else dweight
                    dweight[v0:v1] = _scaled(_wide_product(part.T, clean), scale)
            if needs.bias is not None:
                column = part.sum(dim=0, dtype=torch.float32)
                column = (column if unit is None else column.mul_(unit)).to(needs.bias)
                if whole:
                    dbias = column
                else:
                    dbias = weight.new_empty(weight.size(0), dtype=needs.bias) if dbias is None else dbias
                    dbias[v0:v1] = column
        dhidden = None if drows is None else _scaled(drows, scale).to(hidden_dtype).view(hidden.shape)
        return dhidden, dweight, dbias


def plan_sum_backward(
    dscores: Tensor, tokens: Tokens, vocabulary: Vocabulary, options: HeadOptions, needs: Needs, aligned: bool
) -> SumBackward:
    """The launches of such gradients."""
    operands, tokens, vocabulary = plan_operands(tokens, vocabulary, options.compute_dtype, aligned)
    hidden, batch, (vocab, dim), n_rows = tokens.hidden, tokens.batch, vocabulary.weight.shape, tokens.n_rows
    config = sum_config(options.compute_dtype, hidden.device)
    width = max(config.block_v, config.slab_elements // max(n_rows, 1) // config.block_v * config.block_v)
    width = min(width, cdiv(vocab, 8) * 8)
    scaled = options.compute_dtype == torch.float16
    strides = (vocab, 1) if scaled else dscores.stride()
    constants = _constants(tokens, vocabulary, options, config)
    slabs = []
    for v0 in range(0, vocab, width):
        v1 = min(v0 + width, vocab)
        numbers = (v0, v1, vocab, n_rows, tokens.length, options.logit_scale, *strides, width)
        grid = (batch, cdiv(v1 - v0, config.block_v), 1)
        slabs.append((v0, v1, Step(_dlogits_kernel, grid, numbers, constants)))
    clear = clean = None
    if tokens.attention_mask is not None and needs.weight:
        block = {"D": dim, "BLOCK_ROWS": CLEAR_BLOCK[0], "BLOCK_D": CLEAR_BLOCK[1]}
        grid = (cdiv(n_rows, CLEAR_BLOCK[0]), cdiv(dim, CLEAR_BLOCK[1]), 1)
        clear = Step(_clear_masked_kernel, grid, (n_rows,), block)
        clean = Scratch((n_rows, dim), hidden.dtype, hidden.device)
    dlogits = Scratch((n_rows, width), options.compute_dtype, hidden.device)
    return SumBackward(options, operands, needs, tuple(slabs), dlogits, clear, clean)


def _scaled(values: Tensor, scale: float | Tensor) -> Tensor:
    """``values`` times ``scale``, in their memory."""
    return values if isinstance(scale, float) and scale == 1.0 else values.mul_(scale)


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
