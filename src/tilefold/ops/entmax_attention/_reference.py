"""Alpha-entmax attention in plain PyTorch: the specification.

All scores are computed, in fp64, with autograd.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.philox import keep_mask
from tilefold.ops.entmax import entmax
from tilefold.ops.entmax_attention._problem import (
    AttentionOptions,
    AttentionTensors,
    SequenceGroup,
    check_values,
    group_sequences,
    visible_pairs,
)


class OutputAndRows(NamedTuple):
    """Output of an attention, and statistics of its rows.

    Attributes:
        out: output shaped like ``q``.
        tau: ``[B, H, Nq]`` (packed ``[1, H, Tq]``) fp32 thresholds.
        support: int32 support sizes, shaped like ``tau``.
    """

    out: Tensor
    tau: Tensor
    support: Tensor


def attention(tensors: AttentionTensors, options: AttentionOptions) -> Tensor:
    """Compute the output, shaped like ``q``."""
    q, k, v = tensors.q, tensors.k, tensors.v
    out = attention_with_rows(tensors, options).out
    if out.numel() == 0 or k.numel() == 0:
        # Nothing was computed. The zeros must be part of the autograd graph too.
        out = out + q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum()
    return out


def attention_with_rows(tensors: AttentionTensors, options: AttentionOptions) -> OutputAndRows:
    """Compute the output, and thresholds and support sizes of its rows.

    Args:
        tensors: tensors of the call.
        options: checked options.
    """
    check_values(tensors, options)
    q = tensors.q
    out = torch.zeros_like(q)
    n_heads = q.size(1)
    head_group = n_heads // tensors.k.size(1)
    alpha = options.alpha_value if tensors.alpha is None else tensors.alpha.double().view(-1, 1, 1)
    tau = torch.full(tensors.stats_shape, math.nan, dtype=torch.float32, device=q.device)
    support = torch.zeros_like(tau, dtype=torch.int32)
    for sequence in group_sequences(tensors, max_scores=0):  # one sequence at a time
        queries = sequence.queries(q)[0].double()
        keys = sequence.keys(tensors.k)[0].double().repeat_interleave(head_group, dim=0)
        values = sequence.keys(tensors.v)[0].double().repeat_interleave(head_group, dim=0)
        n_queries = queries.size(1)
        n_keys = keys.size(1)
        if n_queries == 0 or n_keys == 0:
            continue
        keep = None if sequence.keep is None else sequence.keep[0]
        if keep is not None:  # a masked NaN must not reach a product
            keys = keys.masked_fill(~keep[:, None], 0)
            values = values.masked_fill(~keep[:, None], 0)
        visible = visible_pairs(n_queries, n_keys, 0, n_queries, options, keep, q.device)
        products = options.scale * (queries @ keys.mT)
        scores = products.masked_fill(~visible, -math.inf)  # [H, Nq, Nk]
        p = entmax(scores, alpha, impl="reference")
        if not isinstance(p, Tensor):
            raise TypeError("entmax returned a pair without being asked for one.")
        rows = sequence.stats_index[1:]
        tau[rows] = _thresholds(scores.detach(), p.detach(), alpha).float()
        support[rows] = (p > 0).sum(dim=-1, dtype=torch.int32)
        if tensors.seed is not None:
            dropout_mask = _dropout_mask(
                tensors.seed,
                sequence,
                n_heads,
                n_queries,
                n_keys,
                options,
            )
            p = p * dropout_mask / (1 - options.dropout_p)
        sequence_out = (p @ values).to(q.dtype)
        positions = torch.arange(
            sequence.query_slice.start,
            sequence.query_slice.stop,
            device=q.device,
        )
        out = out.index_put(
            (positions,),
            sequence_out.transpose(0, 1) if sequence.packed else sequence_out[None],
        )
    return OutputAndRows(out, tau, support)


def _dropout_mask(
    seed: Tensor,
    sequence: SequenceGroup,
    n_heads: int,
    n_queries: int,
    n_keys: int,
    options: AttentionOptions,
) -> Tensor:
    """Return which weights of a sequence dropout keeps.

    Whether a weight is kept depends only on the seed and on the positions of sequence, head, query
    and key, so that all implementations drop the same weights.

    Args:
        seed: ``[1]`` int64 seed.
        sequence: a group of one sequence.
        n_heads: number of query heads ``H``.
        n_queries: number of queries ``Nq`` of the sequence.
        n_keys: number of keys ``Nk`` of the sequence.
        options: checked options, with the probability of dropout.

    Returns:
        ``[H, Nq, Nk]`` bools, true for a weight that is kept.
    """
    device = seed.device
    # A plane is one head of one sequence. Planes are numbered across the batch.
    planes = sequence.first_sequence * n_heads + torch.arange(n_heads, device=device)[:, None, None]
    queries = torch.arange(n_queries, device=device)[:, None]
    keys = torch.arange(n_keys, device=device)
    return keep_mask(seed, queries, keys, planes, options.dropout_p)


def _thresholds(scores: Tensor, p: Tensor, alpha: float | Tensor) -> Tensor:
    """Compute the threshold ``tau`` of every row from its largest score and probability.

    With ``e = alpha - 1``, entmax is ``p = [e s - tau]_+^(1/e)``. The largest score therefore gives
    ``tau = e s_max - p_max^e``. For alpha = 1, ``tau`` is the logarithm of softmax's denominator,
    ``s_max - log p_max``.

    Args:
        scores: ``[H, Nq, Nk]``, minus infinity for pairs that may not attend.
        p: ``[H, Nq, Nk]`` probabilities.
        alpha: alpha of all heads, or ``[H, 1, 1]`` alpha of each head.

    Returns:
        ``[H, Nq]`` thresholds, NaN for a row with nothing to attend to.
    """
    e = torch.as_tensor(alpha, dtype=torch.float64, device=scores.device) - 1
    e = e.reshape(-1, 1)
    peak = scores.amax(dim=-1)
    log_peak = torch.log(p.amax(dim=-1))
    tau = torch.where(e == 0, peak - log_peak, e * peak - torch.exp(e * log_peak))
    return torch.where(peak == -math.inf, math.nan, tau)
