"""Alpha-entmax attention in plain PyTorch: the specification. Every score exists, in fp64; autograd does the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilefold.ops._shared.philox import kept
from tilefold.ops.entmax import entmax
from tilefold.ops.entmax_attention._problem import AttentionTensors, Options, Sequence, allowed, check_values, sequences


def attention(tensors: AttentionTensors, options: Options) -> Tensor:
    """Output shaped like ``q``."""
    out, q, k, v = with_rows(tensors, options)[0], *tensors[:3]
    if out.numel() == 0 or k.numel() == 0:  # nothing was computed, which is part of the graph too
        out = out + q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
    return out


def with_rows(tensors: AttentionTensors, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """Output shaped like ``q``, fp32 thresholds and int32 support sizes ``[B, H, Nq]`` (packed ``[1, H, Tq]``)."""
    check_values(tensors, options)
    q, k, v, alpha = tensors[:4]
    out = torch.zeros_like(q)
    heads, kv_heads = q.size(1), k.size(1)
    tau = torch.full(tensors.stats_shape, math.nan, dtype=torch.float32, device=q.device)
    support = torch.zeros_like(tau, dtype=torch.int32)
    for sequence in sequences(tensors):
        queries, keys, values = (
            sequence.queries(q).double(),
            sequence.keys(k).double().repeat_interleave(heads // kv_heads, dim=0),
            sequence.keys(v).double().repeat_interleave(heads // kv_heads, dim=0),
        )
        nq, nk = queries.size(1), keys.size(1)
        if nq == 0 or nk == 0:
            continue
        pairs = allowed(nq, nk, 0, nq, options, sequence.keep, q)
        if sequence.keep is not None:  # what a masked token holds must not reach a product
            keys = keys.masked_fill(~sequence.keep[:, None], 0)
            values = values.masked_fill(~sequence.keep[:, None], 0)
        scores = (options.scale * (queries @ keys.mT)).masked_fill(~pairs, -math.inf)  # [H, Nq, Nk]
        per_head = options.alpha_value if alpha is None else alpha.double().view(-1, 1, 1)
        p = entmax(scores, per_head, impl="reference")
        if not isinstance(p, Tensor):
            raise TypeError("entmax returned a pair without being asked for one.")
        tau[sequence.stats_at] = _thresholds(scores.detach(), p.detach(), per_head).float()
        support[sequence.stats_at] = (p > 0).sum(dim=-1, dtype=torch.int32)
        if tensors.seed is not None:
            p = p * _kept(tensors.seed, sequence.index, heads, nq, nk, options.dropout_p) / (1 - options.dropout_p)
        part = (p @ values).to(q.dtype)
        out = out.index_put(_places(sequence, q), part.transpose(0, 1) if sequence.packed else part)
    return out, tau, support


def _places(sequence: Sequence, q: Tensor) -> tuple[Tensor, ...]:
    at = sequence.q_at
    if isinstance(at, slice):
        return (torch.arange(at.start, at.stop, device=q.device),)
    return (torch.tensor(at, device=q.device),)


def _kept(seed: Tensor, index: int, heads: int, nq: int, nk: int, p: float) -> Tensor:
    device = seed.device
    plane = index * heads + torch.arange(heads, device=device)[:, None, None]
    i, j = torch.arange(nq, device=device)[:, None], torch.arange(nk, device=device)
    return kept(seed, i, j, plane, p)


def _thresholds(scores: Tensor, p: Tensor, alpha: float | Tensor) -> Tensor:
    """``tau`` of every row, for alpha = 1 the log of the softmax's denominator; NaN where there is nothing."""
    e = torch.as_tensor(alpha, dtype=torch.float64, device=scores.device) - 1
    e = e.reshape(-1, 1)
    peak, log_peak = scores.amax(dim=-1), torch.log(p.amax(dim=-1))
    tau = torch.where(e == 0, peak - log_peak, e * peak - torch.exp(e * log_peak))
    return torch.where(peak == -math.inf, math.nan, tau)
