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

    Args:
        tensors: tensors of the call.
        options: checked options.
    """
    if tensors.weight_scale is not None:
        return _quantized_scores(tensors, options)
    hidden = tensors.hidden
    with torch.autocast(hidden.device.type, enabled=False):
        hidden, valid = _padded_tokens(tensors, options)
        compute_dtype = torch.promote_types(hidden.dtype, torch.float32)
        # NaN in a masked token must not reach a product.
        hidden = hidden.to(compute_dtype).masked_fill(~valid[:, :, None], 0)
        weight = tensors.weight.to(compute_dtype)
        logits = options.logit_scale * (hidden @ weight.mT)  # [B, S, V]
        if tensors.bias is not None:
            logits = logits + tensors.bias.to(compute_dtype)
        if options.pooling in ("sum", "mean"):
            activated = differentiable_activate(logits, options.activation)
            scores = activated.masked_fill(~valid[:, :, None], 0).sum(dim=1)
            if options.pooling == "mean":
                scores = scores / valid.sum(dim=1, keepdim=True).clamp(min=1)
        else:
            position = _pooled_position(logits, valid, options.pooling)
            pooled_logits = logits.gather(1, position[:, None, :]).squeeze(1)
            scores = differentiable_activate(pooled_logits, options.activation)
        has_token = valid.any(dim=1, keepdim=True)
        return scores.masked_fill(~has_token, 0).to(options.out_dtype)


def _quantized_scores(tensors: HeadTensors, options: HeadOptions) -> Tensor:
    """Compute the scores of a quantised weight, which the tiled implementation specifies."""
    scores: Tensor = torch.ops.tilefold.lsr_head(
        *tensors,
        *options,
        training=False,
        impl="tiled",
    )[0]
    return scores


def _padded_tokens(tensors: HeadTensors, options: HeadOptions) -> tuple[Tensor, Tensor]:
    """Return padded token states, of at least one token per sequence.

    Args:
        tensors: tensors of the call, padded or packed.
        options: the checked options.

    Returns:
        ``[B, S, D]`` token states, and ``[B, S]`` which of them are valid.
    """
    hidden = tensors.hidden
    if tensors.cu_seqlens is not None:
        check_values(tensors, options)
        hidden, valid = _pad_packed(hidden, tensors.cu_seqlens)
    elif tensors.attention_mask is None:
        valid = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    else:
        valid = tensors.attention_mask != 0
    if hidden.size(1) == 0:
        # A maximum over no tokens is an error, so there is one invalid token.
        hidden = pad(hidden, (0, 0, 0, 1))
        valid = pad(valid, (0, 1))
    return hidden, valid


def _pad_packed(rows: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Pad packed rows ``[T, D]`` to the longest sequence.

    Returns:
        ``[B, S, D]`` rows, and ``[B, S]`` which of them are valid.
    """
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    valid = torch.arange(longest, device=rows.device) < lengths[:, None]
    padded = rows.new_zeros(*valid.shape, rows.size(1))
    return padded.index_put(valid.nonzero(as_tuple=True), rows), valid


def _pooled_position(logits: Tensor, valid: Tensor, pooling: str) -> Tensor:
    """Return the position of the token that a pooling selects for each score.

    It is 0 in a sequence without valid tokens.

    Args:
        logits: ``[B, S, V]``.
        valid: ``[B, S]``.
        pooling: ``"max"``, ``"cls"`` (the first valid token) or ``"last"`` (the last one).

    Returns:
        ``[B, V]`` int64 positions.
    """
    if pooling == "max":
        return _first_maximum(logits, valid)
    if pooling == "cls":
        position = valid.byte().argmax(dim=1)  # argmax of zeros and ones is the first one
    else:
        tokens = torch.arange(valid.size(1), device=valid.device)
        position = torch.where(valid, tokens, 0).amax(dim=1)
    return position[:, None].expand(-1, logits.size(2))


def _first_maximum(logits: Tensor, valid: Tensor) -> Tensor:
    """Return the position of the valid token with the largest logit, for each vocabulary entry.

    Among equal logits it is the first token. If there is NaN, it is the first token with NaN. It is
    0 if no token is valid.

    Args:
        logits: ``[B, S, V]``.
        valid: ``[B, S]``.

    Returns:
        ``[B, V]`` int64 positions.
    """
    masked = logits.masked_fill(~valid[:, :, None], float("-inf"))
    maxima = masked.amax(dim=1, keepdim=True)
    is_maximum = (masked == maxima) | (masked.isnan() & maxima.isnan())
    # A valid token may have a logit of -inf itself, and must win over a masked one.
    return (is_maximum & valid[:, :, None]).to(torch.uint8).argmax(dim=1)
