"""Walk of the tiled path over a problem: blocks of documents, tiles of their tokens, parts of the query tokens.

Whatever the lengths, a tile has ``TILE_ELEMENTS`` similarities at most, and no more than ``ROW_ELEMENTS`` numbers of
either side are copied at a time: long sequences are cut. Rows that are gathered are kept tokens of the sequences
concerned, and no others: a place past a sequence's end repeats its last kept token, and its similarity is left out.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.ops.maxsim._problem import Problem, wide_dtype

TILE_ELEMENTS = 1 << 21  # similarities of one tile: 8 MiB in fp32, so that it stays in the last-level cache
ROW_ELEMENTS = 1 << 21  # numbers of either side that are copied to fp32 at a time (one row at least)
BLOCK_ROWS = 16384  # document tokens of a tile at most
BLOCK_COLUMNS = 4096  # query tokens of a tile at most


def row_limit(dim: int) -> int:
    """Rows of ``dim`` numbers that may be copied at a time."""
    return max(1, min(BLOCK_ROWS, ROW_ELEMENTS // max(dim, 1)))


def column_limit(dim: int) -> int:
    """Query tokens of a tile at most."""
    return min(BLOCK_COLUMNS, row_limit(dim))


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

    def kept_rows(self, which: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
        """``[n, stop - start]`` row numbers of kept tokens of sequences that have one, the last again past the end.

        And which of them exist, ``None`` for all.
        """
        counts = self.counts[which][:, None]
        places = torch.arange(start, stop, device=which.device)
        whole = int(counts.min()) >= stop
        place = self.offsets[which][:, None] + (places if whole else torch.minimum(places, counts - 1))
        return place if self.index is None else self.index[place], None if whole else places < counts

    def kept(self, start: int, stop: int) -> Tensor:
        """Kept tokens number ``start`` to ``stop`` of the side, ``[.., D]`` in fp32 (fp64), scaled."""
        if self.index is not None:
            return self.take(self.index[start:stop])
        rows = self.rows[start:stop].to(wide_dtype(self.rows.dtype))  # no copy of what is wide already
        return rows if self.scale is None else rows * self.scale[start:stop]

    def first_masked(self) -> Tensor:
        """``[N]`` position of the first masked token of each sequence, or a huge number where there is none."""
        if self.index is None:
            return torch.full_like(self.counts, torch.iinfo(torch.int64).max)
        # kept tokens before the first masked one lie where they would lie if nothing were masked
        shift = (self.starts - self.offsets).repeat_interleave(self.counts)
        in_place = self.index == shift + torch.arange(self.index.numel(), device=shift.device)
        before = torch.nn.functional.pad(in_place.cumsum(0), (1, 0))
        prefix = before[self.offsets + self.counts] - before[self.offsets]
        return torch.where(self.counts < self.sizes, prefix, torch.iinfo(torch.int64).max)

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
    scale = _scales(rows) if normalize else None if scale is None else scale[:, None]
    if mask is None or bool((kept := mask != 0).all()):
        return Side(rows, starts, sizes, starts, sizes, None, scale)
    before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
    offsets = before[starts]
    return Side(rows, starts, sizes, offsets, before[starts + sizes] - offsets, kept.nonzero().squeeze(1), scale)


def _scales(rows: Tensor) -> Tensor:
    parts = [inverse_norms(part) for part in torch.split(rows, row_limit(rows.size(1)))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def inverse_norms(rows: Tensor) -> Tensor:
    """``[T, 1]`` inverse norms in fp32 (fp64); 0 for a zero row, and where the inverse is no number of that dtype."""
    wide = rows.to(wide_dtype(rows.dtype))
    norm = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
    low = torch.finfo(wide.dtype).tiny ** 0.25
    unusual = ~((norm > low) & (norm < 1 / low)).view(-1)  # squares may overflow or vanish
    scale: Tensor = norm.reciprocal_()
    if bool(unusual.any()):
        scale[unusual] = _inverse_norms_of_any_size(wide[unusual])
    return scale


def _inverse_norms_of_any_size(wide: Tensor) -> Tensor:
    # divided by the largest entry first
    largest = torch.linalg.vector_norm(wide, math.inf, dim=1, keepdim=True)
    square = (wide / largest).square_().sum(dim=1, keepdim=True)
    scale = largest.reciprocal() * square.rsqrt()
    return torch.where((largest == 0) | scale.isinf(), 0, scale)


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
class Tile:
    """Tokens of a block's documents that are multiplied at once.

    Attributes:
        rows: ``[n, L]`` row numbers, kept tokens all of them.
        exists: ``[n, L]``, or ``None`` where every place holds a token of its own.
        span: the rows, where they lie one after the other.
        tokens: ``[n, L, D]`` in fp32 (fp64), scaled.
    """

    rows: Tensor
    exists: Tensor | None
    span: slice | None
    tokens: Tensor


class Block:
    """Some pairs, or some documents for "all", whose documents have kept tokens.

    Args:
        side: the documents.
        items: ``[n]`` numbers of the pairs (of the documents).
        documents: ``[n]``.
        longest: kept tokens of the longest of them.
        step: places of each document in a tile.
    """

    def __init__(self, side: Side, items: Tensor, documents: Tensor, longest: int, step: int) -> None:
        self.side, self.items, self.documents = side, items, documents
        self.longest, self.step = longest, step
        self._tiles = [self._tile(0)] if step >= longest else None

    def tiles(self) -> Iterator[Tile]:
        """The tokens of the documents, in one tile unless a document is longer than a tile may be."""
        if self._tiles is not None:
            yield from self._tiles
            return
        for start in range(0, self.longest, self.step):
            yield self._tile(start)

    def _tile(self, start: int) -> Tile:
        rows, exists = self.side.kept_rows(self.documents, start, min(start + self.step, self.longest))
        span = _span(self.side, rows) if exists is None else None
        tokens = self.side.take(rows) if span is None else self.side.kept(span.start, span.stop).view(*rows.shape, -1)
        return Tile(rows, exists, span, tokens)


def blocks(side: Side, document_of: Tensor, columns: int | Tensor, elements: int | None = None) -> Iterator[Block]:
    """Blocks of items whose documents have a kept token, by rising length, each block padded to its longest.

    A tile of a block times the query tokens that it meets has ``elements`` similarities at most.

    Args:
        side: the documents.
        document_of: the document of each item.
        columns: query tokens that all documents meet; or those of each item's own query, where items without any are
            left out, and the items of a block have queries of nearly one length (by powers of two).
        elements: ``TILE_ELEMENTS`` unless given.
    """
    elements = TILE_ELEMENTS if elements is None else elements
    counts = side.counts[document_of]
    own = columns if isinstance(columns, Tensor) else None
    items = (counts > 0 if own is None else (counts > 0) & (own > 0)).nonzero().squeeze(1)
    key = counts[items]
    if own is not None:
        classes = torch.frexp(own[items].double()).exponent.long()
        key = key + classes * (1 << 48)
    order = key.argsort(stable=True)
    items = items[order]
    lengths = counts[items].tolist()
    limit = row_limit(side.rows.size(1))
    for begin, end, width in _classes(len(lengths), columns, None if own is None else classes[order], items):
        own_rows = 0 if own is None else width
        first = begin
        while first < end:
            count = _fitting(lengths, first, end, limit, elements // width, own_rows)
            chosen = items[first : first + count]
            longest = lengths[first + count - 1]
            step = longest if count > 1 else max(1, min(limit, elements // min(width, column_limit(side.rows.size(1)))))
            yield Block(side, chosen, document_of[chosen], longest, step)
            first += count


def _classes(count: int, columns: int | Tensor, classes: Tensor | None, items: Tensor) -> list[tuple[int, int, int]]:
    """First and last (excluded) of the items of each class, and the most query tokens that one of them meets."""
    if not isinstance(columns, Tensor) or classes is None:
        return [(0, count, max(columns, 1) if isinstance(columns, int) else 1)]
    found, start = [], 0
    for size in torch.unique_consecutive(classes, return_counts=True)[1].tolist():
        found.append((start, start + size, int(columns[items[start : start + size]].max())))
        start += size
    return found


def _fitting(lengths: list[int], first: int, end: int, rows: int, places: int, own_rows: int) -> int:
    """Count the items from ``first`` on, by rising length, that fit in a block: one at least."""

    def too_many(n: int) -> bool:
        padded = n * lengths[first + n - 1]
        return padded > rows or padded > places or n * own_rows > rows

    return max(1, bisect_left(range(1, end - first + 1), True, key=too_many))


def own_queries(queries: Side, which: Tensor) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
    """Kept tokens of each item's own query: ``[n, C]`` rows, which exist, and the tokens ``[n, C, D]``.

    ``[C, D]`` where all items have the same query. Long queries come in several turns.
    """
    longest, limit = int(queries.counts[which].max()), column_limit(queries.rows.size(1))
    shared = which.numel() > 1 and bool((which == which[0]).all())
    for start in range(0, longest, limit):
        rows, exists = queries.kept_rows(which, start, min(start + limit, longest))
        yield rows, exists, queries.take(rows[0] if shared else rows)


def _span(side: Side, rows: Tensor) -> slice | None:
    """The rows ``[n, L]`` as a slice, if they are one and nothing is masked."""
    start, size = int(rows[0, 0]), rows.numel()
    if side.index is None and start + size <= side.rows.size(0):
        ahead = torch.arange(start, start + size, rows.size(1), device=rows.device)
        if bool((rows[:, 0] == ahead).all()):
            return slice(start, start + size)
    return None
