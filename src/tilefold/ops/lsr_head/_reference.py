"""The LSR head in plain PyTorch: the specification the other implementations are held to.

It builds the whole ``[B, S, V]`` logits, in at least fp32, on any device, with autograd.
Derivation: ``README.md``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilefold.ops._shared.activation import differentiable_activate
from tilefold.ops.lsr_head._problem import HeadOptions, HeadTensors, check_values


def lsr_head(tensors: HeadTensors, options: HeadOptions) -> Tensor:
    """``[B, V]`` scores."""
    hidden, attention_mask, cu_seqlens, weight, weight_scale, bias = tensors
    pooling, activation = options.pooling, options.activation
    if weight_scale is not None:  # of which the tiled path is the specification
        return torch.ops.tilefold.lsr_head(*tensors, *options, False, "tiled")[0]  # type: ignore[no-any-return]
    with torch.autocast(hidden.device.type, enabled=False):
        if cu_seqlens is not None:
            check_values(tensors, options)
            hidden, valid = _padded(hidden, cu_seqlens)
        elif attention_mask is None:
            valid = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
        else:
            valid = attention_mask != 0
        if hidden.size(1) == 0:  # a token that does not count, since a maximum needs one
            hidden, valid = pad(hidden, (0, 0, 0, 1)), pad(valid, (0, 1))
        compute_dtype = torch.promote_types(hidden.dtype, torch.float32)
        hidden = hidden.to(compute_dtype).masked_fill(
            ~valid[:, :, None],
            0,
        )  # a masked NaN must not reach a product
        logits = options.logit_scale * (hidden @ weight.to(compute_dtype).mT)  # [B, S, V]
        if bias is not None:
            logits = logits + bias.to(compute_dtype)
        if pooling in ("max", "cls", "last"):
            winner = _pooled_position(logits, valid, pooling)
            pooled = differentiable_activate(
                logits.gather(1, winner[:, None, :]).squeeze(1),
                activation,
            )
        else:
            pooled = (
                differentiable_activate(logits, activation)
                .masked_fill(~valid[:, :, None], 0)
                .sum(dim=1)
            )
            if pooling == "mean":
                pooled = pooled / valid.sum(dim=1, keepdim=True).clamp(min=1)
        return pooled.masked_fill(~valid.any(dim=1, keepdim=True), 0).to(options.out_dtype)


def _padded(rows: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Packed rows as ``[B, S, D]``, and ``[B, S]`` which of these are rows."""
    lengths = cu_seqlens.diff()
    longest = int(lengths.max()) if lengths.numel() else 0
    valid = torch.arange(longest, device=rows.device) < lengths[:, None]
    return rows.new_zeros(*valid.shape, rows.size(1)).index_put(
        valid.nonzero(as_tuple=True),
        rows,
    ), valid


def _pooled_position(logits: Tensor, valid: Tensor, pooling: str) -> Tensor:
    """The token that ``"max"``, ``"cls"`` (first valid) or ``"last"`` (last valid) takes, ``[B,
    V]`` int64.
    """
    if pooling == "max":
        return _max_first_winner(logits, valid)
    tokens = torch.arange(valid.size(1), device=valid.device)
    position = (
        valid.byte().argmax(dim=1)
        if pooling == "cls"
        else torch.where(valid, tokens, 0).amax(dim=1)
    )
    return position[:, None].expand(-1, logits.size(2))


def _max_first_winner(logits: Tensor, valid: Tensor) -> Tensor:
    """The largest valid logit, the lowest token among equals, the first NaN if there is one; 0
    where none is valid.
    """
    masked = logits.masked_fill(~valid[:, :, None], float("-inf"))
    best = masked.amax(dim=1, keepdim=True)
    is_best = (masked == best) | (masked.isnan() & best.isnan())
    # a valid token may itself hold -inf: a masked one must still lose to it
    return (is_best & valid[:, :, None]).to(torch.uint8).argmax(dim=1)
