"""The token scatter in plain PyTorch, which is the specification of the other implementations.

It computes ``[B, S, V]``: which token is which vocabulary term.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.activation import differentiable_activate
from tilefold.ops.token_scatter._problem import (
    ScatterOptions,
    ScatterTensors,
    checked_valid_tokens,
)


def first_maximum(weights: Tensor, has_term: Tensor) -> Tensor:
    """Return, for each vocabulary term, the first token with the largest weight.

    A NaN counts as the largest weight.

    Args:
        weights: ``[B, S]``.
        has_term: ``[B, S, V]``, whether the token is this term.

    Returns:
        ``[B, V]`` int64 positions, 0 for a term that no token has.
    """
    candidates = torch.where(has_term, weights[:, :, None], float("-inf"))
    maxima = candidates.amax(dim=1, keepdim=True)
    is_maximum = (candidates == maxima) | (candidates.isnan() & maxima.isnan())
    # argmax of zeros and ones is the first one
    return (is_maximum & has_term).to(torch.uint8).argmax(dim=1)


class _Padded(NamedTuple):
    """Tokens of padded sequences ``[B, S]``: weights, ids, and which of them are valid."""

    weights: Tensor
    input_ids: Tensor
    valid: Tensor


def _pad_packed(tensors: ScatterTensors, valid: Tensor) -> _Padded:
    """Pad packed sequences to the longest one with invalid tokens. Padded ones stay as they are.

    Args:
        tensors: tensors of the call.
        valid: which tokens are valid, in the shape of the ids.
    """
    weights = tensors.weights
    input_ids = tensors.input_ids
    if tensors.cu_seqlens is None:
        return _Padded(weights, input_ids, valid)
    lengths = tensors.cu_seqlens.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    is_token = torch.arange(longest, device=weights.device) < lengths[:, None]
    positions = is_token.nonzero(as_tuple=True)
    return _Padded(
        weights=weights.new_zeros(is_token.shape).index_put(positions, weights),
        input_ids=input_ids.new_zeros(is_token.shape).index_put(positions, input_ids),
        valid=valid.new_zeros(is_token.shape).index_put(positions, valid),
    )


def token_scatter(tensors: ScatterTensors, options: ScatterOptions) -> Tensor:
    """Compute the scores ``[B, V]`` from a comparison of every token with every vocabulary term.

    Packed sequences are padded first. The values of ids and offsets are checked, which synchronises
    with a GPU.

    Args:
        tensors: tensors of the call.
        options: checked options.
    """
    weights, ids, valid = _pad_packed(tensors, checked_valid_tokens(tensors, options))
    out_dtype = options.out_dtype
    if valid.size(1) == 0:
        zeros = weights.new_zeros(valid.size(0), options.vocab_size, dtype=out_dtype)
        return zeros + weights.sum().to(out_dtype)  # so that the weights get a gradient
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32)).masked_fill(~valid, 0)
    terms = torch.arange(options.vocab_size, device=weights.device)
    has_term = (ids[:, :, None] == terms) & valid[:, :, None]  # [B, S, V]
    values = differentiable_activate(weights, options.activation)  # [B, S]
    if options.reduce == "sum":
        return torch.where(has_term, values[:, :, None], 0).sum(dim=1).to(out_dtype)
    scores = values.gather(1, first_maximum(weights.detach(), has_term))  # [B, V]
    # A term scores 0 if no token has it, or if its largest value is negative. NaN stays.
    is_scored = has_term.any(dim=1) & ~(scores <= 0)
    return torch.where(is_scored, scores, 0).to(out_dtype)
