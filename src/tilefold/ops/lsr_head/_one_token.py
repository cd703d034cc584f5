"""Poolings of one token per sequence (cls and last) in torch operations: a gather and a plain product."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared.activation import activate, slope_from_score
from tilefold.ops._shared.winners import no_winner, winner_dtype
from tilefold.ops.lsr_head._problem import Gradients, HeadOptions, HeadSaved, HeadTensors, Needs, Tokens
from tilefold.ops.lsr_head._range import largest_finite, unit_of


def forward(tensors: HeadTensors, options: HeadOptions, training: bool) -> tuple[Tensor, Tensor]:
    """Scores ``[B, V]``, and for backward the positions of the tokens, ``[B, 1]`` where a mask hides them."""
    tokens, weight, bias = tensors.tokens, tensors.weight, tensors.bias
    winners = _winners(tokens, options.pooling)
    token, valid = _taken(tokens, winners, options.pooling)
    logits = _product(token.to(options.compute_dtype), weight.to(options.compute_dtype).T)
    if options.logit_scale != 1.0:
        logits *= options.logit_scale
    if bias is not None:
        logits += bias
    scores = activate(logits, options.activation).masked_fill_(~valid[:, None], 0)
    return scores.to(options.out_dtype), winners if training else winners[:0]


def backward(dscores: Tensor, saved: HeadSaved, options: HeadOptions, needs: Needs) -> Gradients:
    """Gradients of hidden, weight and bias, ``None`` where not needed."""
    tokens, weight, scores, winners = saved.tokens, saved.weight, saved.scores, saved.winners
    if scores is None:
        raise ValueError("scores must be a tensor in the backward pass of one token, got None.")
    winners = _winners(tokens, options.pooling) if winners is None else winners  # kernels keep none without a mask
    hidden, dtype = tokens.hidden, options.compute_dtype
    wide = torch.promote_types(dtype, torch.float32)
    token, valid = _taken(tokens, winners, options.pooling)
    grad = dscores.to(wide) * slope_from_score(scores.to(wide), options.activation)
    grad = grad.masked_fill(~valid[:, None], 0)
    dbias = grad.sum(dim=0) if needs.bias else None
    grad = grad * options.logit_scale
    dhidden = dweight = None
    if needs.hidden:
        dtoken = _gradient_product(grad, weight, dtype).to(hidden.dtype)
        drows = hidden.new_zeros(tokens.n_rows, hidden.size(-1))
        drows[_rows(tokens, winners, options.pooling)[0][valid]] = dtoken[valid]
        dhidden = drows.view(hidden.shape)
    if needs.weight:
        dweight = _gradient_product(grad.T, token, dtype).to(weight.dtype)
    return dhidden, dweight, dbias


def _winners(tokens: Tokens, pooling: str) -> Tensor:
    """Positions of the first or last valid tokens ``[B, 1]`` under a mask, ``[0, 1]`` without."""
    hidden, mask, _ = tokens
    dtype = winner_dtype(tokens.length_bound)
    if mask is None:
        return torch.empty(0, 1, dtype=dtype, device=hidden.device)
    if mask.size(1) == 0:
        return torch.full((mask.size(0), 1), no_winner(dtype), dtype=torch.int32, device=hidden.device).to(dtype)
    valid = mask != 0
    places = torch.arange(mask.size(1), device=hidden.device)
    if pooling == "last":
        place = torch.where(valid, places, -1).amax(dim=1, keepdim=True)
    else:
        place = torch.where(valid, places, mask.size(1)).amin(dim=1, keepdim=True)
    return torch.where(valid.any(dim=1, keepdim=True), place, no_winner(dtype)).int().to(dtype)


def _rows(tokens: Tokens, winners: Tensor, pooling: str) -> tuple[Tensor, Tensor]:
    """The row of hidden that each sequence takes, ``[B]`` int64, and whether there is one."""
    hidden, mask, cu_seqlens = tokens
    if cu_seqlens is not None:
        valid = cu_seqlens.diff() > 0
        row = cu_seqlens[1:].long() - 1 if pooling == "last" else cu_seqlens[:-1].long()
    else:
        row = torch.arange(tokens.batch, device=hidden.device) * tokens.length
        if mask is not None or winners.size(0):
            place = winners[:, 0].int()
            valid = place != no_winner(winners.dtype)
            row = row + place
        else:
            valid = torch.full_like(row, tokens.length > 0, dtype=torch.bool)
            row = row + (tokens.length - 1 if pooling == "last" else 0)
    return torch.where(valid, row, 0), valid


def _taken(tokens: Tokens, winners: Tensor, pooling: str) -> tuple[Tensor, Tensor]:
    """The token that each sequence takes, ``[B, D]``, zeros where there is none, and ``[B]`` whether there is one."""
    hidden = tokens.hidden
    row, valid = _rows(tokens, winners, pooling)
    if tokens.n_rows == 0:
        return hidden.new_zeros(tokens.batch, hidden.size(-1)), valid
    return hidden.reshape(-1, hidden.size(-1))[row].masked_fill(~valid[:, None], 0), valid


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` with fp32 (fp64) accumulation that is also handed out in fp32 (fp64)."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def _gradient_product(grad: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """``grad @ other`` by products in ``dtype``; in fp16 every row of ``grad`` has a range of its own."""
    if dtype != torch.float16 or not grad.numel():
        return _product(grad.to(dtype), other.to(dtype))
    unit = unit_of(largest_finite(grad, dim=1))  # [rows, 1]
    return _product((grad / unit).half(), other.half()).mul_(unit)
