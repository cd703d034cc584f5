"""Alpha-entmax attention in plain PyTorch: the specification. Every score exists, in fp64; autograd
does the rest.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops._shared.philox import keep_mask
from tilefold.ops.entmax import entmax
from tilefold.ops.entmax_attention._problem import (
    AttentionTensors,
    Options,
    allowed,
    check_values,
    groups,
)


def attention(tensors: AttentionTensors, options: Options) -> Tensor:
    """Output shaped like ``q``."""
    out, q, k, v = with_rows(tensors, options)[0], *tensors[:3]
    if out.numel() == 0 or k.numel() == 0:  # nothing was computed, which is part of the graph too
        out = out + q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
    return out


def with_rows(tensors: AttentionTensors, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Output shaped like ``q``, fp32 thresholds and int32 support sizes ``[B, H, Nq]`` (packed
    ``[1, H, Tq]``).
    """
    check_values(tensors, options)
    q, k, v, alpha = tensors[:4]
    out = torch.zeros_like(q)
    heads, kv_heads = q.size(1), k.size(1)
    tau = torch.full(tensors.stats_shape, math.nan, dtype=torch.float32, device=q.device)
    support = torch.zeros_like(tau, dtype=torch.int32)
    for group in groups(tensors, elements=0):  # a sequence at a time
        queries, keys, values = (
            group.queries(q)[0].double(),
            group.keys(k)[0].double().repeat_interleave(heads // kv_heads, dim=0),
            group.keys(v)[0].double().repeat_interleave(heads // kv_heads, dim=0),
        )
        nq, nk = queries.size(1), keys.size(1)
        if nq == 0 or nk == 0:
            continue
        keep = None if group.keep is None else group.keep[0]
        pairs = allowed(nq, nk, 0, nq, options, keep, q)
        if keep is not None:  # what a masked token holds must not reach a product
            keys = keys.masked_fill(~keep[:, None], 0)
            values = values.masked_fill(~keep[:, None], 0)
        scores = (options.scale * (queries @ keys.mT)).masked_fill(~pairs, -math.inf)  # [H, Nq, Nk]
        per_head = options.alpha_value if alpha is None else alpha.double().view(-1, 1, 1)
        p = entmax(scores, per_head, impl="reference")
        if not isinstance(p, Tensor):
            raise TypeError("entmax returned a pair without being asked for one.")
        tau[group.stats_at[1:]] = _thresholds(scores.detach(), p.detach(), per_head).float()
        support[group.stats_at[1:]] = (p > 0).sum(dim=-1, dtype=torch.int32)
        if tensors.seed is not None:
            p = (
                p
                * _kept(tensors.seed, group.first, heads, nq, nk, options.dropout_p)
                / (1 - options.dropout_p)
            )
        part = (p @ values).to(q.dtype)
        places = torch.arange(group.q_at.start, group.q_at.stop, device=q.device)
        out = out.index_put((places,), part.transpose(0, 1) if group.packed else part[None])
    return out, tau, support


def _kept(seed: Tensor, index: int, heads: int, nq: int, nk: int, p: float) -> Tensor:
    device = seed.device
    plane = index * heads + torch.arange(heads, device=device)[:, None, None]
    i, j = torch.arange(nq, device=device)[:, None], torch.arange(nk, device=device)
    return keep_mask(seed, i, j, plane, p)


def _thresholds(scores: Tensor, p: Tensor, alpha: float | Tensor) -> Tensor:
    """``tau`` of every row, for alpha = 1 the log of the softmax's denominator; NaN where there is
    nothing.
    """
    e = torch.as_tensor(alpha, dtype=torch.float64, device=scores.device) - 1
    e = e.reshape(-1, 1)
    peak, log_peak = scores.amax(dim=-1), torch.log(p.amax(dim=-1))
    tau = torch.where(e == 0, peak - log_peak, e * peak - torch.exp(e * log_peak))
    return torch.where(peak == -math.inf, math.nan, tau)
