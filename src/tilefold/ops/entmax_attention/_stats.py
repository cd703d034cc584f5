"""Statistics of the rows of an attention: thresholds, support sizes, residuals, visible keys, live
blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilefold.ops._shared.offsets import sequences_of_rows
from tilefold.ops.entmax_attention._problem import AttentionTensors, Options, exponents

SPARSITY_BLOCK = 64
TILE_ELEMENTS = 1 << 22  # scores that exist at a time
Rows = tuple[Tensor, Tensor, Tensor]  # thresholds, support sizes and residuals


class EntmaxStats(NamedTuple):
    """Statistics of the rows of an attention, ``[B, H, Nq]`` each (packed ``[1, H, Tq]``).

    Attributes:
        tau: fp32 threshold: ``p = [(alpha - 1) s - tau]_+^(1 / (alpha - 1))`` of the scaled scores
            s; for alpha = 1 the log of softmax's denominator; NaN for a row with nothing to attend
            to.
        support: int32 number of keys with a positive probability, before dropout.
        residual: fp32 ``|mass - 1|`` of the root, before the mass was divided out.
        visible: int32 number of keys that the row may see.
        live_blocks: int32 ``[B, H]`` (packed ``[1, H]``), with ``return_stats="blocks"``: blocks of
            64 queries by 64 keys with a positive probability, else ``None``.
        visible_blocks: int32, like it: blocks with a pair that may attend at all; what a mask,
            causality or a window hides is not called sparse.
    """

    tau: Tensor
    support: Tensor
    residual: Tensor
    visible: Tensor
    live_blocks: Tensor | None = None
    visible_blocks: Tensor | None = None

    def nonzero_share(self) -> Tensor:
        """``[H]`` fp32: positive probabilities among those that may be, over all rows; NaN where
        there are none.
        """
        return _ratio(
            self.support.sum(dim=(0, 2)),
            self.visible.expand_as(self.support).sum(dim=(0, 2)),
        )

    def mean_support(self) -> Tensor:
        """``[H]`` fp32: positive probabilities of a row, over the rows that see a key."""
        return _ratio(
            self.support.sum(dim=(0, 2)),
            (self.visible.expand_as(self.support) > 0).sum(dim=(0, 2)),
        )

    def live_share(self) -> Tensor:
        """``[H]`` fp32: live blocks among the visible ones.

        Raises:
            ValueError: if blocks were not counted.
        """
        if self.live_blocks is None or self.visible_blocks is None:
            raise ValueError(
                "live_blocks must have been counted, got None; call with return_stats='blocks'.",
            )
        return _ratio(self.live_blocks.sum(dim=0), self.visible_blocks.sum(dim=0))


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return part.float() / whole.float()  # a quotient of integers would have torch's default dtype


def of_rows(stats: Tensor, alpha: Tensor | None, options: Options) -> Rows:
    """Row statistics from peaks, roots, masses and support sizes."""
    peak, root, mass, support = stats.detach().unbind(0)
    e = exponents(None if alpha is None else alpha.detach(), options, stats).transpose(0, 1)
    closed = alpha is None and options.alpha_value in (1.5, 2.0)
    c = root if closed else torch.exp(e * root)
    tau = e * peak - c if closed else torch.where(e == 0, peak - root, e * peak - c)
    empty = peak == -math.inf
    return (
        torch.where(empty, math.nan, tau).float(),
        support.int(),
        torch.where(empty, 0.0, (mass - 1).abs()).float(),
    )


def described(
    rows: Rows,
    tensors: AttentionTensors,
    options: Options,
    asked: bool | str,
) -> EntmaxStats:
    """The statistics that ``return_stats`` asked for."""
    visible = visible_keys(tensors, options).expand_as(rows[1])
    if asked != "blocks":
        return EntmaxStats(*rows, visible)
    return EntmaxStats(
        *rows,
        visible,
        *count_blocks(tensors, options, rows[0], None, SPARSITY_BLOCK),
    )


def visible_keys(tensors: AttentionTensors, options: Options) -> Tensor:
    """Count the keys each row may attend to: int32 ``[B, 1, Nq]`` (packed ``[1, 1, Tq]``)."""
    q, k, mask, cu_q, cu_k = (
        tensors.q,
        tensors.k,
        tensors.key_padding_mask,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_k,
    )
    nq: Tensor | int
    nk: Tensor | int
    if cu_q is not None and cu_k is not None:
        of_row, i = _places(cu_q, q.size(0))
        nq, nk = cu_q.diff()[of_row], cu_k.diff()[of_row]
    else:
        nq, nk, i = q.size(2), k.size(2), torch.arange(q.size(-2), device=q.device)
    place = i + (nk - nq)
    first, last = torch.zeros_like(place), torch.zeros_like(place) + nk
    if options.causal:
        last = torch.minimum(last, place + 1)
    if options.window >= 0:
        first = torch.maximum(first, place - options.window)
        last = torch.minimum(last, place + options.window + 1)
    last = torch.maximum(first, last)
    if cu_q is not None:
        return (last - first).to(torch.int32).view(1, 1, -1)
    keep = (
        torch.ones(1, k.size(2), dtype=torch.bool, device=q.device) if mask is None else mask != 0
    )
    prefix = pad(keep.cumsum(dim=1), (1, 0))  # [B, Nk + 1]
    seen = prefix[:, last.clamp(0, k.size(2))] - prefix[:, first.clamp(max=k.size(2))]
    return seen.clamp_min(0).to(torch.int32)[:, None].expand(q.size(0), 1, -1)


class _Tokens(NamedTuple):
    """Queries or keys of a table of scores that is cut into blocks: ``[n]`` each but ``vectors``
    ``[.., n, D]``.

    ``place`` is among the keys of its ``sequence``, and ``counted`` ``None`` where all tokens are.
    """

    vectors: Tensor
    sequence: Tensor
    place: Tensor
    block: Tensor
    blocks: int
    counted: Tensor | None


def count_blocks(
    tensors: AttentionTensors,
    options: Options,
    tau: Tensor,
    query_padding_mask: Tensor | None,
    block: int,
) -> tuple[Tensor, Tensor]:
    """Blocks with a positive weight, and blocks with a pair that may attend: int32 ``[B, H]`` each
    (packed ``[1, H]``).

    Scores are made once more, in fp32 and a tile at a time; nothing is read on the host.
    """
    q, heads = tensors.q, tensors.q.size(1)
    counts = torch.zeros(2, tau.size(0), heads, dtype=torch.int32, device=q.device)
    with torch.autocast(q.device.type, enabled=False), torch.no_grad():
        tau = tau.float()
        e = exponents(tensors.alpha, options, tau)
        for b, (queries, keys) in enumerate(_tables(tensors, query_padding_mask, block)):
            counts[:, b] = _count(queries, keys, tau[b], e, options)
    return counts[0], counts[1]


def _count(queries: _Tokens, keys: _Tokens, tau: Tensor, e: Tensor, options: Options) -> Tensor:
    """``[2, H]`` live and visible blocks of a table."""
    heads, n, _ = queries.vectors.shape
    m = keys.vectors.size(1)
    found = torch.zeros(
        heads + 1,
        queries.blocks,
        keys.blocks,
        device=tau.device,
    )  # live ones of each head, visible ones
    # products with ones and zeros count: exact, the same every time, and no key decides a shape
    of_key = _one_hot(keys.block, keys.blocks)
    vectors = keys.vectors.float()
    if keys.counted is not None:
        vectors = vectors.masked_fill(~keys.counted[:, None], 0)
    step = max(1, TILE_ELEMENTS // max(1, heads * m))
    for rows in (slice(first, min(first + step, n)) for first in range(0, n, step)):
        i, j = queries.place[rows, None], keys.place
        pairs = queries.sequence[rows, None] == keys.sequence
        if options.causal:
            pairs &= j <= i
        if options.window >= 0:
            pairs &= (j - i).abs() <= options.window
        pairs = pairs if keys.counted is None else pairs & keys.counted
        pairs = pairs if queries.counted is None else pairs & queries.counted[rows, None]
        block = queries.vectors[:, rows].float().reshape(vectors.size(0), -1, vectors.size(2))
        scores = (block @ vectors.mT).view(heads, rows.stop - rows.start, m) * options.scale
        bar = tau[:, rows, None]
        positive = torch.where(e == 0, torch.exp(scores - bar) > 0, e * scores > bar) & pairs
        of_row = _one_hot(queries.block[rows], queries.blocks).T
        found += of_row @ ((torch.cat([positive, pairs[None]]).float() @ of_key) > 0).float()
    blocks = (found > 0).sum(dim=(1, 2))
    return torch.stack([blocks[:-1], blocks[-1:].expand(heads)])


def _tables(
    tensors: AttentionTensors,
    row_mask: Tensor | None,
    block: int,
) -> Iterator[tuple[_Tokens, _Tokens]]:
    q, k, mask, cu_q, cu_k = (
        tensors.q,
        tensors.k,
        tensors.key_padding_mask,
        tensors.cu_seqlens_q,
        tensors.cu_seqlens_k,
    )
    if cu_q is not None and cu_k is not None:
        (of_q, i), (of_k, j) = _places(cu_q, q.size(0)), _places(cu_k, k.size(0))
        # the most blocks there can be: lengths stay on the device
        sizes = (t.size(0) // block + tensors.batch for t in (q, k))
        q_block, k_block = (
            _first_blocks(cu_q, block)[of_q] + i // block,
            _first_blocks(cu_k, block)[of_k] + j // block,
        )
        rows = None if row_mask is None else row_mask.reshape(-1) != 0
        behind = (cu_k.diff() - cu_q.diff())[of_q]
        yield (
            _Tokens(q.transpose(0, 1), of_q, i + behind, q_block, next(sizes), rows),
            _Tokens(k.transpose(0, 1), of_k, j, k_block, next(sizes), None),
        )
        return
    i, j = (torch.arange(t.size(2), device=q.device) for t in (q, k))
    for b in range(q.size(0)):
        rows, keep = (None if given is None else given[b] != 0 for given in (row_mask, mask))
        yield (
            _Tokens(q[b], i * 0, i + len(j) - len(i), i // block, -(-len(i) // block), rows),
            _Tokens(k[b], j * 0, j, j // block, -(-len(j) // block), keep),
        )


def _one_hot(index: Tensor, size: int) -> Tensor:
    """``[n, size]`` fp32."""
    return (index[:, None] == torch.arange(size, device=index.device)).float()


def _places(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Sequence of every packed token, and its place there."""
    last_sequence = max(offsets.numel() - 2, 0)
    sequence = sequences_of_rows(offsets, total).clamp(max=last_sequence)
    token_numbers = torch.arange(total, device=offsets.device)
    return sequence, token_numbers - offsets.long()[sequence]


def _first_blocks(offsets: Tensor, block: int) -> Tensor:
    """Number of a packed sequence's first block."""
    return pad(((offsets.long().diff() + (block - 1)) // block).cumsum(0), (1, 0))[:-1]
