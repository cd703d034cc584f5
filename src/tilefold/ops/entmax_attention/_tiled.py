"""Alpha-entmax attention in torch operations on blocks of queries: the CPU and fallback path.

The scores of a block are held for all heads of one sequence, or of several short ones. Backward
computes them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import (
    GENERIC,
    SOFTMAX,
    kind_of,
    probabilities,
    row_gradients,
    row_weights,
)
from tilefold.ops._shared.philox import keep_mask
from tilefold.ops.entmax_attention._problem import (
    AttentionOptions,
    AttentionSaved,
    AttentionTensors,
    SequenceGroup,
    check_values,
    exponents,
    result_like,
    sequence_groups,
    visible_pairs,
)

# Scores of a block: 1 MiB in fp32, so that its few temporaries stay in the cache.
TILE_ELEMENTS = 1 << 18


def forward(
    tensors: AttentionTensors,
    options: AttentionOptions,
    training: bool,
) -> tuple[Tensor, None, Tensor | None, None]:
    """Compute the output, and statistics if backward or the caller reads them.

    Returns:
        One entry for each result of the operator: the output, ``None``, ``[4, B, H, Nq]`` peak,
        root, mass and support of every row (or ``None``), and ``None``.
    """
    check_values(tensors, options)
    q = tensors.q
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = result_like(q).on(q.device).zero_()
    stats = torch.zeros(4, *tensors.stats_shape, dtype=dtype, device=q.device)
    stats[0] = -math.inf
    kind = kind_of(tensors.alpha, options.alpha_value)
    e = exponents(tensors.alpha, options, stats)
    for group in sequence_groups(tensors, TILE_ELEMENTS):
        group_out = group.queries(out)
        group_stats = stats[group.stats_index]
        for block in _blocks(group, tensors, options, dtype):
            rows = slice(block.first, block.last)
            *row_shape, n_keys = block.scores.shape
            p, root, mass, peak = row_weights(
                block.scores.view(-1, n_keys),
                e.expand(*row_shape, 1).reshape(-1, 1),
                kind,
            )
            support = (p > 0).sum(dim=-1)
            for position, statistic in enumerate((peak, root, mass, support)):
                group_stats[position, :, :, rows] = statistic.view(row_shape)
            p = p.view(block.scores.shape)
            if tensors.seed is not None:
                p = p * _dropout_factors(tensors.seed, group, q, block, options).to(dtype)
            products = _by_key_head(p, block.values) @ block.values
            group_out[:, :, rows] = products.reshape(*p.shape[:3], -1)
    return out, None, stats if training or options.support else None, None


def backward(
    dout: Tensor,
    saved: AttentionSaved,
    options: AttentionOptions,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k, v and alpha, with the dtypes and layouts of results.

    Args:
        dout: gradient of the output.
        saved: what the forward pass saved.
        options: checked options.
        needs: whether the gradients of q, k, v and alpha are needed; others are ``None``.
    """
    tensors = saved.tensors
    q = tensors.q
    alpha = tensors.alpha
    need_q, need_k, need_v, need_alpha = needs
    dtype = saved.stats.dtype
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dk = torch.zeros(tensors.k.shape, dtype=dtype, device=q.device)
    dv = torch.zeros(tensors.v.shape, dtype=dtype, device=q.device)
    dalpha = torch.zeros(q.size(1), dtype=dtype, device=q.device)
    kind = kind_of(alpha, options.alpha_value)
    e = exponents(alpha, options, saved.stats)
    for group in sequence_groups(tensors, TILE_ELEMENTS):
        group_stats = saved.stats[group.stats_index]
        group_dout = group.queries(dout)
        group_dq = group.queries(dq)
        group_dk = group.keys(dk)
        group_dv = group.keys(dv)
        for block in _blocks(group, tensors, options, dtype):
            rows = slice(block.first, block.last)
            keys = block.keys
            values = block.values
            peak, root, mass, _ = group_stats[:, :, :, rows, None]
            p = _probabilities(block.scores, peak, root, mass, e, kind)
            block_dout = group_dout[:, :, rows].to(dtype)
            dp = (_by_key_head(block_dout, values) @ values.mT).reshape(p.shape)
            weights = p
            if tensors.seed is not None:
                factors = _dropout_factors(tensors.seed, group, q, block, options).to(dtype)
                dp = dp * factors
                weights = p * factors
            dscores, row_dalpha = row_gradients(p, dp, e, kind, need_alpha)
            dscores *= options.scale
            if need_q:
                block_dq = _by_key_head(dscores, keys) @ keys
                group_dq[:, :, rows] = block_dq.reshape(*p.shape[:3], -1)
            if need_k:
                block_queries = _by_key_head(block.queries, keys)
                group_dk.add_(_by_key_head(dscores, keys).mT @ block_queries)
            if need_v:
                grouped_dout = _by_key_head(block_dout, values)
                group_dv.add_(_by_key_head(weights, values).mT @ grouped_dout)
            if row_dalpha is not None:
                dalpha += row_dalpha.sum(dim=(0, -1))
    return (
        _as_result(dq, q) if need_q else None,
        _as_result(dk, tensors.k) if need_k else None,
        _as_result(dv, tensors.v) if need_v else None,
        _as_result(dalpha, dalpha if alpha is None else alpha) if need_alpha else None,
    )


def _as_result(grad: Tensor, tensor: Tensor) -> Tensor:
    """Return a gradient with the dtype and layout of the result for ``tensor``."""
    if grad.dtype == tensor.dtype and tensor.is_contiguous():
        return grad
    return result_like(tensor).on(tensor.device).copy_(grad)


def _probabilities(
    scores: Tensor,
    peak: Tensor,
    root: Tensor,
    mass: Tensor,
    e: Tensor,
    kind: str,
) -> Tensor:
    """Compute the probabilities ``[b, H, n, Nk]`` again, from scores and saved statistics.

    Args:
        scores: ``[b, H, n, Nk]``.
        peak: ``[b, H, n, 1]``.
        root: ``[b, H, n, 1]``.
        mass: ``[b, H, n, 1]``.
        e: ``alpha - 1`` of each head.
        kind: kind of alpha.
    """
    is_empty = peak == -math.inf
    finite_peak = torch.where(is_empty, 0.0, peak)
    d = torch.where(is_empty, 0.0, finite_peak - scores)
    formula = GENERIC if kind == SOFTMAX else kind
    return torch.where(is_empty, 0.0, probabilities(d, root, e, formula) / mass)


class _Block(NamedTuple):
    """Consecutive queries of a group of sequences, with all keys.

    Attributes:
        first: first query.
        last: end of the queries.
        scores: ``[b, H, n, Nk]``, minus infinity for pairs that may not attend.
        queries: ``[b, H, n, D]``.
        keys: ``[b, Hkv, Nk, D]``.
        values: ``[b, Hkv, Nk, D]``.
    """

    first: int
    last: int
    scores: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


def _blocks(
    group: SequenceGroup,
    tensors: AttentionTensors,
    options: AttentionOptions,
    dtype: torch.dtype,
) -> Iterator[_Block]:
    """Divide the queries of a group into blocks, in ``dtype``."""
    keys = group.keys(tensors.k).to(dtype)
    values = group.keys(tensors.v).to(dtype)
    if group.keep is not None:
        masked = ~group.keep[:, None, :, None]
        keys = keys.masked_fill(masked, 0)
        values = values.masked_fill(masked, 0)
    group_queries = group.queries(tensors.q)
    batch, n_heads, n_queries, _ = group_queries.shape
    n_keys = keys.size(2)
    if n_keys == 0:
        return
    block_size = max(1, TILE_ELEMENTS // (batch * n_heads * n_keys))
    for first in range(0, n_queries, block_size):
        last = min(first + block_size, n_queries)
        queries = group_queries[:, :, first:last].to(dtype)
        products = _by_key_head(queries, keys) @ keys.mT
        scores = products.reshape(batch, n_heads, last - first, n_keys) * options.scale
        visible = visible_pairs(n_queries, n_keys, first, last, options, None, keys.device)
        if group.keep is not None:
            visible = visible & group.keep[:, None, None]
        scores = scores.masked_fill_(~visible, -math.inf)
        yield _Block(first, last, scores, queries, keys, values)


def _by_key_head(tensor: Tensor, keys: Tensor) -> Tensor:
    """View ``[b, H, n, x]`` as ``[b, Hkv, G n, x]``.

    The query heads that share a key head then share a product.
    """
    return tensor.reshape(keys.size(0), keys.size(1), -1, tensor.size(-1))


def _dropout_factors(
    seed: Tensor,
    group: SequenceGroup,
    q: Tensor,
    block: _Block,
    options: AttentionOptions,
) -> Tensor:
    """Return the factors by which dropout multiplies the probabilities of a block.

    They are 0 or ``1 / (1 - dropout_p)``, ``[b, H, n, Nk]``.
    """
    device = q.device
    batch, n_heads, _, n_keys = block.scores.shape
    planes = group.first * n_heads + torch.arange(batch * n_heads, device=device)
    queries = torch.arange(block.first, block.last, device=device)[:, None]
    keys = torch.arange(n_keys, device=device)
    keep = keep_mask(seed, queries, keys, planes.view(batch, n_heads, 1, 1), options.dropout_p)
    return keep.double() / (1 - options.dropout_p)
