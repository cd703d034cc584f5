"""The LSR head in plain PyTorch, which is the specification of the other implementations.

It computes all ``[B, S, V]`` logits, in at least fp32, on any device, with autograd. The derivation
is in ``README.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilefold.ops._shared.activation import differentiable_activate
from tilefold.ops.lsr_head._problem import HeadOptions, HeadTensors, check_values


def lsr_head(tensors: HeadTensors, options: HeadOptions) -> Tensor:
    """Compute the scores ``[B, V]`` from all logits ``[B, S, V]``, differentiably.

    Max and one-token poolings select one token for each score, and activate its logit. Sum and mean
    poolings activate all logits. A sequence without valid tokens scores 0.
    """
    hidden, attention_mask, cu_seqlens, weight, weight_scale, bias = tensors
    pooling = options.pooling
    activation = options.activation
    if weight_scale is not None:  # the tiled path is the specification of quantised weights
        return torch.ops.tilefold.lsr_head(*tensors, *options, False, "tiled")[0]  # type: ignore[no-any-return]
    with torch.autocast(hidden.device.type, enabled=False):
        if cu_seqlens is not None:
            check_values(tensors, options)
            hidden, valid = _padded(hidden, cu_seqlens)
        elif attention_mask is None:
            valid = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        else:
            valid = attention_mask != 0
        if hidden.size(1) == 0:  # an invalid token, since a maximum needs at least one
            hidden = pad(hidden, (0, 0, 0, 1))
            valid = pad(valid, (0, 1))
        compute_dtype = torch.promote_types(hidden.dtype, torch.float32)
        # NaN in a masked token must not reach a product.
        hidden = hidden.to(compute_dtype).masked_fill(~valid[:, :, None], 0)
        logits = options.logit_scale * (hidden @ weight.to(compute_dtype).mT)  # [B, S, V]
        if bias is not None:
            logits = logits + bias.to(compute_dtype)
        if pooling in ("max", "cls", "last"):
            winner = _pooled_position(logits, valid, pooling)
            pooled_logits = logits.gather(1, winner[:, None, :]).squeeze(1)
            pooled = differentiable_activate(pooled_logits, activation)
        else:
            activated = differentiable_activate(logits, activation)
            pooled = activated.masked_fill(~valid[:, :, None], 0).sum(dim=1)
            if pooling == "mean":
                pooled = pooled / valid.sum(dim=1, keepdim=True).clamp(min=1)
        return pooled.masked_fill(~valid.any(dim=1, keepdim=True), 0).to(options.out_dtype)


def _padded(rows: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Pad packed rows.

    Returns:
        ``[B, S, D]`` rows, and their validity ``[B, S]``.
    """
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    valid = torch.arange(longest, device=rows.device) < lengths[:, None]
    padded = rows.new_zeros(*valid.shape, rows.size(1))
    return padded.index_put(valid.nonzero(as_tuple=True), rows), valid


def _pooled_position(logits: Tensor, valid: Tensor, pooling: str) -> Tensor:
    """Return the token that a pooling selects for each score, ``[B, V]`` int64.

    Args:
        logits: ``[B, S, V]``.
        valid: ``[B, S]``.
        pooling: ``"max"``, ``"cls"`` (the first valid token) or ``"last"`` (the last one).
    """
    if pooling == "max":
        return _max_first_winner(logits, valid)
    if pooling == "cls":
        position = valid.byte().argmax(dim=1)
    else:
        tokens = torch.arange(valid.size(1), device=valid.device)
        position = torch.where(valid, tokens, 0).amax(dim=1)
    return position[:, None].expand(-1, logits.size(2))


def _max_first_winner(logits: Tensor, valid: Tensor) -> Tensor:
    """Return the valid token with the largest logit, ``[B, V]`` int64.

    Among equal logits it is the lowest token. If there is NaN, it is the first one with NaN. It is
    0 without a valid token.

    Args:
        logits: ``[B, S, V]``.
        valid: ``[B, S]``.
    """
    masked = logits.masked_fill(~valid[:, :, None], float("-inf"))
    maxima = masked.amax(dim=1, keepdim=True)
    is_maximum = (masked == maxima) | (masked.isnan() & maxima.isnan())
    # A valid token may have a logit of -inf itself, and must win over a masked one.
    return (is_maximum & valid[:, :, None]).to(torch.uint8).argmax(dim=1)
