"""The token scatter in plain torch, with the whole ``[B, S, V]`` membership: the specification."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared.activation import differentiable_activate
from tilefold.ops.token_scatter._problem import ScatterOptions, ScatterTensors, check_values


def first_winner(weights: Tensor, holds: Tensor) -> Tensor:
    """``[B, V]`` int64, the first token with the largest weight, or NaN, of those that hold each
    entry; else 0.
    """
    candidates = torch.where(holds, weights[:, :, None], float("-inf"))
    best = candidates.amax(dim=1, keepdim=True)
    return (
        (((candidates == best) | (candidates.isnan() & best.isnan())) & holds)
        .to(torch.uint8)
        .argmax(dim=1)
    )


def token_scatter(tensors: ScatterTensors, options: ScatterOptions) -> Tensor:
    """``[B, V]`` scores; reads values on the host, and checks them."""
    valid, out_dtype = check_values(tensors, options), options.out_dtype
    weights, ids = tensors.weights, tensors.input_ids
    if tensors.cu_seqlens is not None:
        lengths = tensors.cu_seqlens.diff()
        longest = int(lengths.max()) if lengths.numel() else 0
        inside = torch.arange(longest, device=weights.device) < lengths[:, None]
        places = inside.nonzero(as_tuple=True)
        weights, ids, valid = (
            t.new_zeros(inside.shape).index_put(places, t) for t in (weights, ids, valid)
        )
    if valid.size(1) == 0:
        return weights.new_zeros(
            valid.size(0),
            options.vocab_size,
            dtype=out_dtype,
        ) + weights.sum().to(out_dtype)
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32)).masked_fill(~valid, 0)
    entries = torch.arange(options.vocab_size, device=weights.device)
    holds = (ids[:, :, None] == entries) & valid[:, :, None]  # [B, S, V]
    values = differentiable_activate(weights, options.activation)  # [B, S]
    if options.reduce == "sum":
        return torch.where(holds, values[:, :, None], 0).sum(dim=1).to(out_dtype)
    scores = values.gather(1, first_winner(weights.detach(), holds))  # [B, V]
    # an entry that no token holds scores 0, and so does one whose best value is negative
    return torch.where(holds.any(dim=1) & ~(scores <= 0), scores, 0).to(out_dtype)
