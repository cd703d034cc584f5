"""The token scatter in plain PyTorch, which is the specification of the other implementations.

It computes ``[B, S, V]``: which token has which vocabulary entry.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared.activation import differentiable_activate
from tilefold.ops.token_scatter._problem import ScatterOptions, ScatterTensors, check_values


def first_winner(weights: Tensor, has_entry: Tensor) -> Tensor:
    """Return the first token with the largest weight, or with NaN, for each entry.

    Args:
        weights: ``[B, S]``.
        has_entry: ``[B, S, V]``, whether the token has the entry.

    Returns:
        ``[B, V]`` int64 positions, 0 for an entry that no token has.
    """
    candidates = torch.where(has_entry, weights[:, :, None], float("-inf"))
    maxima = candidates.amax(dim=1, keepdim=True)
    is_maximum = (candidates == maxima) | (candidates.isnan() & maxima.isnan())
    return (is_maximum & has_entry).to(torch.uint8).argmax(dim=1)


def token_scatter(tensors: ScatterTensors, options: ScatterOptions) -> Tensor:
    """Compute the scores ``[B, V]`` from a comparison of every token with every vocabulary entry.

    Packed sequences are padded first. The values of ids and offsets are checked, which waits for a
    GPU.
    """
    weights = tensors.weights
    ids = tensors.input_ids
    valid = check_values(tensors, options)
    out_dtype = options.out_dtype
    if tensors.cu_seqlens is not None:
        lengths = tensors.cu_seqlens.diff()
        longest = int(lengths.max()) if lengths.numel() else 0
        is_token = torch.arange(longest, device=weights.device) < lengths[:, None]
        positions = is_token.nonzero(as_tuple=True)
        weights = weights.new_zeros(is_token.shape).index_put(positions, weights)
        ids = ids.new_zeros(is_token.shape).index_put(positions, ids)
        valid = valid.new_zeros(is_token.shape).index_put(positions, valid)
    if valid.size(1) == 0:
        zeros = weights.new_zeros(valid.size(0), options.vocab_size, dtype=out_dtype)
        return zeros + weights.sum().to(out_dtype)  # so that the weights get a gradient
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32)).masked_fill(~valid, 0)
    entries = torch.arange(options.vocab_size, device=weights.device)
    has_entry = (ids[:, :, None] == entries) & valid[:, :, None]  # [B, S, V]
    values = differentiable_activate(weights, options.activation)  # [B, S]
    if options.reduce == "sum":
        return torch.where(has_entry, values[:, :, None], 0).sum(dim=1).to(out_dtype)
    scores = values.gather(1, first_winner(weights.detach(), has_entry))  # [B, V]
    # An entry scores 0 if no token has it, or if its largest value is negative.
    is_scored = has_entry.any(dim=1) & ~(scores <= 0)
    return torch.where(is_scored, scores, 0).to(out_dtype)
