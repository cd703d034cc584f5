"""Sparsity of an attention: the keys that a row may see, and the blocks of weights that are not all zero."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.ops.entmax_attention._problem import AttentionTensors, Options, allowed

TILE_ELEMENTS = 1 << 22  # scores that exist at a time


def visible_keys(tensors: AttentionTensors, options: Options) -> Tensor:
    """Count the keys each row may attend to: int32 ``[B, 1, Nq]`` (packed ``[1, 1, Tq]``)."""
    q, k, mask, cu_q, cu_k = tensors.q, tensors.k, tensors.key_padding_mask, tensors.cu_seqlens_q, tensors.cu_seqlens_k
    nq: Tensor | int
    nk: Tensor | int
    if cu_q is not None and cu_k is not None:
        of_row, i = _places(cu_q, q.size(0))
        nq, nk = cu_q.diff()[of_row], cu_k.diff()[of_row]
        prefix = None
    else:
        nq, nk = q.size(2), k.size(2)
        i = torch.arange(nq, device=q.device)
        keep = torch.ones(1, nk, dtype=torch.bool, device=q.device) if mask is None else mask != 0
        prefix = torch.nn.functional.pad(keep.cumsum(dim=1), (1, 0))  # [B, Nk + 1]
    place = i + (nk - nq)
    first, last = torch.zeros_like(place), torch.zeros_like(place) + nk
    if options.causal:
        last = torch.minimum(last, place + 1)
    if options.window >= 0:
        first = torch.maximum(first, place - options.window)
        last = torch.minimum(last, place + options.window + 1)
    last = torch.maximum(first, last)
    if prefix is None:
        return (last - first).to(torch.int32).view(1, 1, -1)
    first, last = first.clamp(max=k.size(2)), last.clamp(0, k.size(2))
    seen = (prefix[:, last] - prefix[:, first]).clamp_min(0)
    return seen.to(torch.int32)[:, None].expand(q.size(0), 1, -1)


@dataclass(frozen=True)
class _Plane:
    """One table of rows and keys that is cut into blocks, and which pairs of it count."""

    queries: Tensor  # [H, n, D]
    keys: Tensor  # [Hkv, m, D]
    tau: Tensor  # [H, n]
    q_block: Tensor  # [n] block of a row
    k_block: Tensor  # [m]
    q_blocks: int
    k_blocks: int
    rows: Tensor | None  # [n] rows that count
    keep: Tensor | None  # [m] keys that can be seen
    of_sequence: tuple[Tensor, Tensor] | None  # [n], [m] of a packed batch
    place: tuple[Tensor, Tensor] | None  # place of a row among its keys [n], and of a key [m]

    def pairs(self, first: int, last: int, options: Options) -> Tensor:
        """``[last - first, m]`` bool."""
        n, m = self.queries.size(1), self.keys.size(1)
        if self.place is None or self.of_sequence is None:
            pairs = allowed(n, m, first, last, options, self.keep, self.queries)
        else:
            i, j = self.place[0][first:last, None], self.place[1]
            pairs = self.of_sequence[0][first:last, None] == self.of_sequence[1]
            if options.causal:
                pairs &= j <= i
            if options.window >= 0:
                pairs &= (j - i).abs() <= options.window
        return pairs if self.rows is None else pairs & self.rows[first:last, None]


def count_blocks(
    tensors: AttentionTensors, options: Options, tau: Tensor, query_padding_mask: Tensor | None, block: int
) -> tuple[Tensor, Tensor]:
    """Blocks with a positive weight, and blocks with a pair that may attend: int32 ``[B, H]`` each (packed ``[1, H]``).

    Scores are made once more, in fp32 and a tile at a time; nothing is read on the host.
    """
    q, alpha = tensors.q, tensors.alpha
    heads = q.size(1)
    if alpha is None:
        e = q.new_full((heads,), options.alpha_value - 1, dtype=torch.float32)
    else:
        e = alpha.detach().float() - 1
    e = e.expand(heads).view(-1, 1, 1)
    live: list[Tensor] = []
    seen: list[Tensor] = []
    with torch.autocast(q.device.type, enabled=False), torch.no_grad():
        for plane in _planes(tensors, tau.detach().float(), query_padding_mask, block):
            counts = _count(plane, e, options)
            live.append(counts[0])
            seen.append(counts[1].expand(heads))
    if not live:
        nothing = torch.zeros(0, heads, dtype=torch.int32, device=q.device)
        return nothing, nothing.clone()
    return torch.stack(live).to(torch.int32), torch.stack(seen).to(torch.int32)


def _count(plane: _Plane, e: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """Live blocks ``[H]`` and visible blocks ``[]`` of a plane."""
    heads, n, _ = plane.queries.shape
    m = plane.keys.size(1)
    device = plane.queries.device
    live = torch.zeros(heads, plane.q_blocks, plane.k_blocks, device=device)
    seen = torch.zeros(plane.q_blocks, plane.k_blocks, device=device)
    if n and m:
        # products with ones and zeros count: exact, the same every time, and no key decides a shape
        of_key = _one_hot(plane.k_block, plane.k_blocks)
        keys = plane.keys.float()
        if plane.keep is not None:
            keys = keys.masked_fill(~plane.keep[:, None], 0)
        group = heads // keys.size(0)
        rows = max(1, TILE_ELEMENTS // (heads * m))
        for first in range(0, n, rows):
            last = min(first + rows, n)
            pairs = plane.pairs(first, last, options)
            block = plane.queries[:, first:last].float().reshape(keys.size(0), group * (last - first), -1)
            scores = (block @ keys.mT).view(heads, last - first, m) * options.scale
            margin = torch.where(e == 0, torch.exp(scores - plane.tau[:, first:last, None]), e * scores)
            bar = torch.where(e[..., 0] == 0, 0.0, plane.tau[:, first:last])
            positive = (margin > bar[..., None]) & pairs
            of_row = _one_hot(plane.q_block[first:last], plane.q_blocks).T
            live += of_row @ ((positive.float() @ of_key) > 0).float()
            seen += of_row @ ((pairs.float() @ of_key) > 0).float()
    return (live > 0).sum(dim=(1, 2)), (seen > 0).sum()


def _planes(tensors: AttentionTensors, tau: Tensor, query_padding_mask: Tensor | None, block: int) -> Iterator[_Plane]:
    q, k, mask, cu_q, cu_k = tensors.q, tensors.k, tensors.key_padding_mask, tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if cu_q is not None and cu_k is not None:
        (of_q, i), (of_k, j) = _places(cu_q, q.size(0)), _places(cu_k, k.size(0))
        q_first, k_first = (_first_blocks(cu, block) for cu in (cu_q, cu_k))
        yield _Plane(
            q.transpose(0, 1),
            k.transpose(0, 1),
            tau[0],
            q_first[of_q] + i // block,
            k_first[of_k] + j // block,
            q.size(0) // block + tensors.batch,  # the most there can be: lengths stay on the device
            k.size(0) // block + tensors.batch,
            None if query_padding_mask is None else query_padding_mask.reshape(-1) != 0,
            None,
            (of_q, of_k),
            (i + (cu_k.diff() - cu_q.diff())[of_q], j),
        )
        return
    q_block, k_block = (torch.arange(t.size(2), device=q.device) // block for t in (q, k))
    for b in range(q.size(0)):
        rows, keep = (None if given is None else given[b] != 0 for given in (query_padding_mask, mask))
        sizes = -(-q.size(2) // block), -(-k.size(2) // block)
        yield _Plane(q[b], k[b], tau[b], q_block, k_block, *sizes, rows, keep, None, None)


def _places(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Sequence of every packed token, and its place there."""
    every = torch.arange(total, device=offsets.device)
    of_token = torch.searchsorted(offsets[1:].long(), every, right=True).clamp(max=max(offsets.numel() - 2, 0))
    return of_token, every - offsets.long()[of_token]


def _first_blocks(offsets: Tensor, block: int) -> Tensor:
    """Number of a packed sequence's first block."""
    blocks = (offsets.long().diff() + (block - 1)) // block
    return torch.nn.functional.pad(blocks.cumsum(0), (1, 0))[:-1]


def _one_hot(index: Tensor, size: int) -> Tensor:
    """``[n, size]`` fp32."""
    return (index[:, None] == torch.arange(size, device=index.device)).float()
