"""The LSR head in plain PyTorch: the specification the other implementations are held to.

It builds the whole ``[B, S, V]`` logits, in at least fp32, on any device, with autograd. Derivation: ``README.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared.activation import differentiable_activate


def max_first_winner(logits: Tensor, valid: Tensor) -> Tensor:
    """Index of the largest valid logit along dim 1, the lowest index among equals, the first NaN if there is one.

    Args:
        logits: ``[B, S, V]``.
        valid: ``[B, S]`` bool.

    Returns:
        ``[B, V]`` int64; 0 for a sequence without a valid token.
    """
    masked = logits.masked_fill(~valid[:, :, None], float("-inf"))
    best = masked.amax(dim=1, keepdim=True)
    is_best = (masked == best) | (masked.isnan() & best.isnan())
    # a valid token may itself hold -inf: a masked one must still lose to it
    return (is_best & valid[:, :, None]).to(torch.uint8).argmax(dim=1)


def lsr_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    valid: Tensor,
    pooling: str,
    activation: str,
    logit_scale: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """``[B, V]`` scores of padded ``hidden`` ``[B, S, D]`` under the bool mask ``valid`` ``[B, S]``."""
    compute_dtype = torch.promote_types(hidden.dtype, torch.float32)
    hidden = hidden.to(compute_dtype).masked_fill(~valid[:, :, None], 0)  # a masked NaN must not reach a product
    logits = logit_scale * (hidden @ weight.to(compute_dtype).mT)  # [B, S, V]
    if bias is not None:
        logits = logits + bias.to(compute_dtype)
    if pooling in ("max", "cls", "last"):
        winner = pooled_position(logits, valid, pooling)
        pooled = differentiable_activate(logits.gather(1, winner[:, None, :]).squeeze(1), activation)
    else:
        pooled = differentiable_activate(logits, activation).masked_fill(~valid[:, :, None], 0).sum(dim=1)
        if pooling == "mean":
            pooled = pooled / valid.sum(dim=1, keepdim=True).clamp(min=1)
    return pooled.masked_fill(~valid.any(dim=1, keepdim=True), 0).to(out_dtype)


def pooled_position(logits: Tensor, valid: Tensor, pooling: str) -> Tensor:
    """The token that ``"max"``, ``"cls"`` (first valid) or ``"last"`` (last valid) takes, ``[B, V]`` int64."""
    if pooling == "max":
        return max_first_winner(logits, valid)
    tokens = torch.arange(valid.size(1), device=valid.device)
    position = valid.byte().argmax(dim=1) if pooling == "cls" else torch.where(valid, tokens, 0).amax(dim=1)
    return position[:, None].expand(-1, logits.size(2))
