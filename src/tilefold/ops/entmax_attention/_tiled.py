"""Alpha-entmax attention in torch operations on blocks of queries: the CPU path, and the fallback on any device.

A block's scores exist for all heads of one sequence at a time and are gone again; backward makes them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import GENERIC, SOFTMAX, alpha_terms, kind_of, probabilities, slopes, solve
from tilefold.ops._shared.philox import kept
from tilefold.ops.entmax_attention._geometry import Options, Sequence, allowed, sequences, stats_shape

TILE_ELEMENTS = 1 << 20  # scores of a block: 4 MiB in fp32


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    options: Options,
    with_gradient: bool,
    longest_k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, nothing, statistics ``[4, B, H, Nq]`` (peak, root, mass, support), nothing."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q)
    stats = torch.zeros(4, *stats_shape(q, cu_q is not None), dtype=wide, device=q.device)
    stats[0] = -math.inf
    kind = kind_of(None if alpha is not None else options.constant)
    for sequence in sequences(q, key_mask, cu_q, cu_k):
        target, places = sequence.queries(out), stats[sequence.all_stats]
        for first, last, scores, _, values, _ in _blocks(sequence, q, k, v, options, wide):
            p, root, mass, peak = _rows(scores, alpha, options, kind)
            places[0, :, first:last], places[1, :, first:last] = peak, root
            places[2, :, first:last], places[3, :, first:last] = mass, (p > 0).sum(dim=-1)
            if seed is not None:
                p = p * _dropout(seed, sequence, q, first, last, p.size(-1), options).to(wide)
            target[:, first:last] = (_grouped(p, values) @ values).reshape(*p.shape[:2], -1)
    return out, q.new_empty(0), stats, q.new_empty(0, dtype=torch.int32)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor | None,
    key_mask: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    seed: Tensor | None,
    out2: Tensor,
    stats: Tensor,
    live: Tensor,
    options: Options,
    needs: tuple[bool, bool, bool, bool],
    longest_k: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v (in their dtypes) and alpha ``[H]``; ``None`` where not needed."""
    wide = stats.dtype
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide, device=t.device) for t in (q, k, v))
    dalpha = torch.zeros(q.size(1), dtype=wide, device=q.device)
    kind = kind_of(None if alpha is not None else options.constant)
    e = _exponents(alpha, options, wide, q.device)
    for sequence in sequences(q, key_mask, cu_q, cu_k):
        places = stats[sequence.all_stats]
        grads = sequence.queries(dout), sequence.queries(dq), sequence.keys(dk), sequence.keys(dv)
        for first, last, scores, queries, values, keys in _blocks(sequence, q, k, v, options, wide):
            peak, root, mass, _ = (places[n, :, first:last, None] for n in range(4))
            empty = peak == -math.inf
            d = torch.where(empty, 0.0, torch.where(empty, 0.0, peak) - scores)
            p = torch.where(empty, 0.0, probabilities(d, root, e, GENERIC if kind == SOFTMAX else kind) / mass)
            u = slopes(p, e, kind)
            grad = grads[0][:, first:last].to(wide)
            dp = (_grouped(grad, values) @ values.mT).reshape(p.shape)
            weights = p
            if seed is not None:
                factor = _dropout(seed, sequence, q, first, last, p.size(-1), options).to(wide)
                dp, weights = dp * factor, p * factor
            total = u.sum(dim=-1, keepdim=True)
            total = torch.where(total == 0, 1.0, total)
            ds = options.scale * u * (dp - (u * dp).sum(dim=-1, keepdim=True) / total)
            if needs[0]:
                grads[1][:, first:last] = (_grouped(ds, keys) @ keys).reshape(*p.shape[:2], -1)
            if needs[1]:
                grads[2].add_(_grouped(ds, keys).mT @ _grouped(queries, keys))
            if needs[2]:
                grads[3].add_(_grouped(weights, values).mT @ _grouped(grad, values))
            if needs[3]:
                a, b = alpha_terms(p, u, e)
                rows = a.sum(dim=-1) * (dp * b).sum(dim=-1) - b.sum(dim=-1) * (dp * a).sum(dim=-1)
                dalpha += (rows / total.squeeze(-1)).sum(dim=-1)
    given = ((dq, q, needs[0]), (dk, k, needs[1]), (dv, v, needs[2]))
    results = tuple(grad.to(leaf.dtype) if needed else None for grad, leaf, needed in given)
    return results[0], results[1], results[2], dalpha if needs[3] else None


def _blocks(
    sequence: Sequence, q: Tensor, k: Tensor, v: Tensor, options: Options, wide: torch.dtype
) -> Iterator[tuple[int, int, Tensor, Tensor, Tensor, Tensor]]:
    """Blocks of queries: first, last, scores ``[H, n, Nk]``, queries, values, keys ``[.., D]`` in ``wide``."""
    keys, values = sequence.keys(k).to(wide), sequence.keys(v).to(wide)
    if sequence.keep is not None:
        keys = keys.masked_fill(~sequence.keep[:, None], 0)
        values = values.masked_fill(~sequence.keep[:, None], 0)
    queries = sequence.queries(q)
    heads, nq, nk = queries.size(0), queries.size(1), keys.size(1)
    if nk == 0:
        return
    rows = max(1, TILE_ELEMENTS // (heads * nk))
    for first in range(0, nq, rows):
        last = min(first + rows, nq)
        block = queries[:, first:last].to(wide)
        scores = (_grouped(block, keys) @ keys.mT).reshape(heads, last - first, nk) * options.scale
        pairs = allowed(nq, nk, first, last, options, sequence.keep, q)
        yield first, last, scores.masked_fill_(~pairs, -math.inf), block, values, keys


def _grouped(tensor: Tensor, like: Tensor) -> Tensor:
    """``[H, n, x]`` as ``[Hkv, G n, x]``: the query heads of a group share a product with their key head."""
    return tensor.reshape(like.size(0), -1, tensor.size(-1))


def _exponents(alpha: Tensor | None, options: Options, wide: torch.dtype, device: torch.device) -> Tensor:
    """``alpha - 1`` as ``[H, 1, 1]`` or ``[1, 1, 1]``."""
    if alpha is None:
        return torch.full((1, 1, 1), options.constant - 1, dtype=wide, device=device)
    return alpha.to(wide).view(-1, 1, 1) - 1


def _rows(scores: Tensor, alpha: Tensor | None, options: Options, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Probabilities ``[H, n, Nk]`` with the root, mass and peak of every row ``[H, n]``."""
    heads, n, nk = scores.shape
    e = _exponents(alpha, options, scores.dtype, scores.device).expand(heads, n, 1).reshape(-1, 1)
    flat = scores.reshape(-1, nk)
    peak = flat.amax(dim=-1, keepdim=True)
    proper = peak.isfinite() & (e >= 0) & (e <= 1)
    d = torch.where(proper, peak - flat, 0.0)
    form = GENERIC if kind == SOFTMAX else kind
    if kind == SOFTMAX:
        root = -torch.logsumexp(-d, dim=-1, keepdim=True)
        mass = torch.ones_like(root)
    else:
        e = torch.where(proper, e, 1.0)
        root, mass, _ = solve(d, e, kind)
    p = probabilities(d, root, e, form) / mass
    nothing = peak == -math.inf
    p = torch.where(proper, p, torch.where(nothing, 0.0, math.nan))
    root = torch.where(proper | nothing, root, math.nan)
    shape = (heads, n)
    return p.view(scores.shape), root.view(shape), mass.view(shape), peak.view(shape)


def _dropout(seed: Tensor, sequence: Sequence, q: Tensor, first: int, last: int, nk: int, options: Options) -> Tensor:
    """What dropout multiplies probabilities by, ``[H, last - first, Nk]``."""
    heads, device = q.size(1), q.device
    plane = sequence.index * heads + torch.arange(heads, device=device)[:, None, None]
    i, j = torch.arange(first, last, device=device)[:, None], torch.arange(nk, device=device)
    return kept(seed, i, j, plane, options.dropout_p).double() / (1 - options.dropout_p)
