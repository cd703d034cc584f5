"""Alpha-entmax attention in torch operations on blocks of queries: the CPU path, and the fallback
on any device.

A block's scores exist for all heads of one sequence, or of several short ones, at a time and are
gone again; backward makes them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

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
    AttentionSaved,
    AttentionTensors,
    Group,
    Options,
    allowed,
    check_values,
    exponents,
    groups,
    result_like,
)

TILE_ELEMENTS = (
    1 << 18
)  # scores of a block: 1 MiB in fp32, so that its few temporaries stay in the cache


def forward(
    tensors: AttentionTensors,
    options: Options,
    training: bool,
) -> tuple[Tensor, None, Tensor | None, None]:
    """Output, nothing, statistics ``[4, B, H, Nq]`` (peak, root, mass, support) if anyone reads
    them, nothing.
    """
    check_values(tensors, options)
    q, alpha, seed = tensors.q, tensors.alpha, tensors.seed
    wide = torch.promote_types(q.dtype, torch.float32)
    out = result_like(q).on(q.device).zero_()
    stats = torch.zeros(4, *tensors.stats_shape, dtype=wide, device=q.device)
    stats[0] = -math.inf
    kind, e = kind_of(alpha, options.alpha_value), exponents(alpha, options, stats)
    for group in groups(tensors, TILE_ELEMENTS):
        target, places = group.queries(out), stats[group.stats_at]
        for first, last, scores, _, values, _ in _blocks(group, tensors, options, wide):
            *rows, nk = scores.shape
            p, root, mass, peak = row_weights(
                scores.view(-1, nk),
                e.expand(*rows, 1).reshape(-1, 1),
                kind,
            )
            for place, found in enumerate((peak, root, mass, (p > 0).sum(dim=-1))):
                places[place, :, :, first:last] = found.view(rows)
            p = p.view(scores.shape)
            if seed is not None:
                p = p * _dropout(seed, group, q, first, last, p.size(-1), options).to(wide)
            target[:, :, first:last] = (_grouped(p, values) @ values).reshape(*p.shape[:3], -1)
    return out, None, stats if training or options.support else None, None


def backward(
    dout: Tensor,
    saved: AttentionSaved,
    options: Options,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, in their dtypes and laid out as results, and alpha ``[H]``; ``None``
    where not needed.
    """
    tensors, stats = saved.tensors, saved.stats
    q, k, v, alpha = tensors[:4]
    seed, wide = tensors.seed, stats.dtype
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q, k, v))
    dalpha = torch.zeros(q.size(1), dtype=wide, device=q.device)
    kind, e = kind_of(alpha, options.alpha_value), exponents(alpha, options, stats)
    for group in groups(tensors, TILE_ELEMENTS):
        places = stats[group.stats_at]
        grads = group.queries(dout), group.queries(dq), group.keys(dk), group.keys(dv)
        for first, last, scores, queries, values, keys in _blocks(group, tensors, options, wide):
            peak, root, mass, _ = places[:, :, :, first:last, None]
            empty = peak == -math.inf
            d = torch.where(empty, 0.0, torch.where(empty, 0.0, peak) - scores)
            p = torch.where(
                empty,
                0.0,
                probabilities(d, root, e, GENERIC if kind == SOFTMAX else kind) / mass,
            )
            grad = grads[0][:, :, first:last].to(wide)
            dp = (_grouped(grad, values) @ values.mT).reshape(p.shape)
            weights = p
            if seed is not None:
                factor = _dropout(seed, group, q, first, last, p.size(-1), options).to(wide)
                dp, weights = dp * factor, p * factor
            ds, rows = row_gradients(p, dp, e, kind, needs[3])
            ds *= options.scale
            if needs[0]:
                grads[1][:, :, first:last] = (_grouped(ds, keys) @ keys).reshape(*p.shape[:3], -1)
            if needs[1]:
                grads[2].add_(_grouped(ds, keys).mT @ _grouped(queries, keys))
            if needs[2]:
                grads[3].add_(_grouped(weights, values).mT @ _grouped(grad, values))
            if rows is not None:
                dalpha += rows.sum(dim=(0, -1))
    leaves = (q, k, v, dalpha if alpha is None else alpha)
    return tuple(
        _like(leaf, grad) if need else None
        for grad, leaf, need in zip((dq, dk, dv, dalpha), leaves, needs, strict=True)
    )


def _like(leaf: Tensor, grad: Tensor) -> Tensor:
    done = grad.dtype == leaf.dtype and leaf.is_contiguous()
    return grad if done else result_like(leaf).on(leaf.device).copy_(grad)


def _blocks(
    group: Group,
    tensors: AttentionTensors,
    options: Options,
    wide: torch.dtype,
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor, Tensor]]:
    """Blocks of queries: first, last, scores ``[b, H, n, Nk]``, queries, values, keys ``[b, ..,
    D]`` in ``wide``.
    """
    q = tensors.q
    keys, values = group.keys(tensors.k).to(wide), group.keys(tensors.v).to(wide)
    if group.keep is not None:
        hidden = ~group.keep[:, None, :, None]
        keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
    queries = group.queries(q)
    batch, heads, nq, _ = queries.shape
    nk = keys.size(2)
    if nk == 0:
        return
    rows = max(1, TILE_ELEMENTS // (batch * heads * nk))
    for first in range(0, nq, rows):
        last = min(first + rows, nq)
        block = queries[:, :, first:last].to(wide)
        scores = (_grouped(block, keys) @ keys.mT).reshape(
            batch,
            heads,
            last - first,
            nk,
        ) * options.scale
        pairs = allowed(nq, nk, first, last, options, None, q)
        if group.keep is not None:
            pairs = pairs & group.keep[:, None, None]
        yield first, last, scores.masked_fill_(~pairs, -math.inf), block, values, keys


def _grouped(tensor: Tensor, like: Tensor) -> Tensor:
    """``[b, H, n, x]`` as ``[b, Hkv, G n, x]``: the query heads of a group share a product with
    their key head.
    """
    return tensor.reshape(like.size(0), like.size(1), -1, tensor.size(-1))


def _dropout(
    seed: Tensor,
    group: Group,
    q: Tensor,
    first: int,
    last: int,
    nk: int,
    options: Options,
) -> Tensor:
    """Dropout's factors of probabilities, ``[b, H, last - first, Nk]``."""
    heads, device = q.size(1), q.device
    batch = 1 if group.packed else group.q_at.stop - group.q_at.start
    plane = (group.first * heads + torch.arange(batch * heads, device=device)).view(
        batch,
        heads,
        1,
        1,
    )
    i, j = torch.arange(first, last, device=device)[:, None], torch.arange(nk, device=device)
    return keep_mask(seed, i, j, plane, options.dropout_p).double() / (1 - options.dropout_p)
