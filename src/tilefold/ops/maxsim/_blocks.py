"""How the tiled path walks a problem: blocks of documents padded to one length, with the queries they meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.ops.maxsim._problem import Problem, wide_dtype

TILE_ELEMENTS = 1 << 21  # similarities of one tile: 8 MiB in fp32, so that it stays in the last-level cache
BLOCK_ROWS = 16384  # document tokens of a block at most (one document at least): they are copied to fp32
BLOCK_COLUMNS = 4096  # query tokens of a tile


@dataclass(frozen=True)
class Side:
    """The kept tokens of all sequences of one side.

    Attributes:
        rows: ``[T, D]``, masked tokens included.
        starts: ``[N]`` int64 first row of each sequence, masked tokens included.
        sizes: ``[N]`` int64 tokens of each sequence, masked ones included.
        offsets, counts: ``[N]`` int64 first place in ``index``, and kept tokens, of each sequence.
        index: ``[kept]`` rows of the kept tokens, or ``None`` where every token is kept.
        scale: ``[T, 1]`` factors of the rows, or ``None``.
    """

    rows: Tensor
    starts: Tensor
    sizes: Tensor
    offsets: Tensor
    counts: Tensor
    index: Tensor | None
    scale: Tensor | None

    def kept_rows(self, which: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """``[n, longest]`` row numbers of the kept tokens of some sequences (0 past the last), and which exist."""
        places = torch.arange(longest, device=which.device)
        exists = places < self.counts[which][:, None]
        place = torch.where(exists, self.offsets[which][:, None] + places, 0)
        if self.index is None or self.index.numel() == 0:
            return place, exists
        return torch.where(exists, self.index[place], 0), exists

    def first_masked(self, which: Tensor, kept: Tensor, exists: Tensor) -> Tensor:
        """``[n]`` position of the first masked token of each sequence, or a huge number where there is none."""
        position = torch.where(exists, kept - self.starts[which][:, None], -1)
        in_place = position == torch.arange(kept.size(1), device=kept.device)
        prefix = in_place.long().cumprod(dim=1).sum(dim=1)
        return torch.where(self.counts[which] < self.sizes[which], prefix, torch.iinfo(torch.int64).max)

    def take(self, rows: Tensor) -> Tensor:
        """Tokens ``[.., D]`` in fp32 (fp64), scaled."""
        flat = rows.reshape(-1)
        taken = self.rows.index_select(0, flat).to(wide_dtype(self.rows.dtype))
        taken = taken if self.scale is None else taken.mul_(self.scale.index_select(0, flat))
        return taken.view(*rows.shape, taken.size(1))


def _side(
    rows: Tensor, mask: Tensor | None, cu: Tensor | None, length: int, normalize: bool, scale: Tensor | None
) -> Side:
    device = rows.device
    if cu is None:
        starts = torch.arange(0, rows.size(0), length, device=device)
        sizes = torch.full_like(starts, length)
    else:
        starts, sizes = cu[:-1].long(), cu.diff().long()
    scale = inverse_norms(rows) if normalize else None if scale is None else scale[:, None]
    if mask is None or bool((kept := mask != 0).all()):
        return Side(rows, starts, sizes, starts, sizes, None, scale)
    before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
    offsets = before[starts]
    return Side(rows, starts, sizes, offsets, before[starts + sizes] - offsets, kept.nonzero().squeeze(1), scale)


def inverse_norms(rows: Tensor) -> Tensor:
    """``[T, 1]`` inverse norms in fp32 (fp64); 0 for a zero row."""
    square = rows.to(wide_dtype(rows.dtype)).square().sum(dim=1, keepdim=True)
    return torch.where(square == 0, square, square.rsqrt())


def sides(problem: Problem) -> tuple[Side, Side]:
    """Queries and documents; reads masks and offsets on the host."""
    p = problem
    return (
        _side(p.queries, p.query_mask, p.cu_queries, p.query_length, p.normalize, p.query_scale),
        _side(p.documents, p.document_mask, p.cu_documents, p.document_length, p.normalize, p.document_scale),
    )


def pairs(problem: Problem) -> tuple[Tensor, Tensor]:
    """Query and document of each pair, for "grouped" and "index"."""
    if problem.index is not None:
        query, document = problem.index.long().unbind(1)
        return query, document
    document = torch.arange(problem.n_documents, device=problem.documents.device)
    return document // max(problem.group, 1), document


@dataclass(frozen=True)
class Block:
    """Some pairs, or some documents for "all", and the tokens of their documents.

    Attributes:
        items: ``[n]`` numbers of the pairs (of the documents).
        rows: ``[n, L]`` row numbers of the documents' kept tokens.
        exists: ``[n, L]``, or ``None`` where every place holds a token.
        tokens: ``[n, L, D]`` in fp32 (fp64), scaled.
        documents: ``[n]``.
    """

    items: Tensor
    rows: Tensor
    exists: Tensor | None
    tokens: Tensor
    documents: Tensor


def blocks(
    side: Side, document_of: Tensor, columns: int, with_masked: bool, elements: int = TILE_ELEMENTS
) -> Iterator[Block]:
    """Blocks of items whose documents have a kept token, by rising length, each block padded to its longest.

    A block times ``columns`` query tokens has ``elements`` similarities at most, one document at least.

    With ``with_masked``, documents that have masked tokens only come too, with one place that holds no token.
    """
    counts = side.counts[document_of]
    if with_masked:
        counts = torch.maximum(counts, side.sizes[document_of].clamp(max=1))
    order = counts.argsort(stable=True)
    lengths = counts[order].tolist()
    budget = min(BLOCK_ROWS, elements // max(columns, 1))
    first = next((i for i, length in enumerate(lengths) if length), len(lengths))
    while first < len(lengths):
        last = first + 1
        while last < len(lengths) and (last + 1 - first) * lengths[last] <= budget:
            last += 1
        items = order[first:last]
        documents = document_of[items]
        longest = lengths[last - 1]
        rows, exists = side.kept_rows(documents, longest)
        whole = lengths[first] == longest and int(side.counts[documents].min()) == longest
        yield Block(items, rows, None if whole else exists, _tokens(side, rows, whole), documents)
        first = last


def _tokens(side: Side, rows: Tensor, whole: bool) -> Tensor:
    start, size = int(rows[0, 0]), rows.numel()
    dtype = wide_dtype(side.rows.dtype)
    contiguous = whole and side.index is None and start + size <= side.rows.size(0)
    if contiguous and bool((rows[:, 0] == start + torch.arange(0, size, rows.size(1), device=rows.device)).all()):
        tokens = side.rows[start : start + size].to(dtype)  # no copy of what is fp32 already
        if side.scale is not None:
            tokens = tokens * side.scale[start : start + size]
        return tokens.view(*rows.shape, -1)
    return side.take(rows)
