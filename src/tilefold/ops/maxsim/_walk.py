"""Walk of the tiled path over a problem: tiles of similarities, whatever the layout and the
pairing.

Consecutive documents of all pairs share a product: their kept rows, as they lie, times the query
tokens; what is gathered and padded is the similarities, by groups of documents of nearly one
length. Listed pairs gather their documents' kept tokens. A place past a document's end repeats its
last one. Long sequences are cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.internals import has_int8_products, int8_products
from tilefold.ops.maxsim import tiles
from tilefold.ops.maxsim._problem import Problem
from tilefold.ops.maxsim.tiles import Side, pairs

Index = Tensor | slice
Gathered = tuple[Tensor, Tensor | None, slice | None, Tensor]  # of a Tile, all but the similarities


def crossed(rows: Index, columns: Index) -> tuple[Index, Index]:
    """Index of every pair of a row and a column."""
    return rows[:, None] if isinstance(rows, Tensor) and isinstance(
        columns,
        Tensor,
    ) else rows, columns


class Part:
    """Consecutive query tokens, as ``pieces`` of queries: query, number of its first kept token
    here, tokens.
    """

    def __init__(self, side: Side, pieces: list[tuple[int, int, int]]) -> None:
        self.side, self.start, self.stop = side, pieces[0][1], pieces[-1][1] + pieces[-1][2]
        self.columns = (
            slice(self.start, self.stop)
            if side.index is None
            else side.index[self.start : self.stop]
        )
        self.held: Tensor | None = None
        self._sums = list(_sums(pieces, side.counts.device))

    def tokens(self) -> Tensor:
        """``[C, D]`` in fp32 (fp64), scaled."""
        return self.side.kept(self.start, self.stop) if self.held is None else self.held

    def integers(self, documents: Side, start: int, stop: int) -> Tensor:
        """Similarities ``[stop - start, C]`` to some documents' tokens, products of int8 summed
        exactly.
        """
        product = int8_products(documents.rows[start:stop], self.side.rows[self.columns]).float()
        for side, place in ((documents, (slice(start, stop), None)), (self.side, (self.columns,))):
            if side.scale is not None:
                product *= side.scale[:, 0][place]
        return product

    def add_sums(self, values: Tensor, out: Tensor, items: Index) -> None:
        """Add the sums of ``[n, C]`` values over each query's columns to ``out[query, items]``."""
        for queries, size, members, missing in self._sums:
            if members is not None:
                values_of = values.index_select(1, members).view(values.size(0), size, -1)
                sums = (values_of if missing is None else values_of.masked_fill_(missing, 0)).sum(
                    dim=2,
                )
            else:
                sums = values.reshape(values.size(0), size, -1).sum(dim=2)
            out[crossed(queries, items)] += sums.T


def parts(side: Side, limit: int) -> list[Part]:
    """The kept tokens of all queries in parts of up to ``limit``, which end where queries end if
    they are shorter.
    """
    found: list[list[tuple[int, int, int]]] = []
    free = place = 0
    for query, count in enumerate(side.counts.tolist()):
        left = count
        while left:
            if free < min(left, limit):
                found.append([])
                free = limit
            size = min(left, free)
            found[-1].append((query, place, size))
            place, left, free = place + size, left - size, free - size
    made = [Part(side, pieces) for pieces in found]
    if len(made) == 1:
        made[0].held = made[0].tokens()
    return made


def _sums(
    pieces: list[tuple[int, int, int]],
    device: torch.device,
) -> Iterator[tuple[Index, int, Tensor | None, Tensor | None]]:
    """Queries that are summed together, their number, columns (``None`` for all), and places that
    are padding.
    """
    ordered = sorted(pieces, key=lambda piece: piece[2])
    lengths = [size for _, _, size in ordered]
    if lengths[0] == lengths[-1]:
        first, last = pieces[0][0], pieces[-1][0]
        several = last - first + 1 != len(pieces)  # queries without a token lie between
        queries = (
            torch.tensor([query for query, _, _ in pieces], device=device)
            if several
            else slice(first, last + 1)
        )
        yield queries, len(pieces), None, None
        return
    table = torch.tensor(ordered, device=device)  # [pieces, 3]
    for first, last in _alike(lengths, 0, 16, sum(lengths)):
        which, starts, sizes = table[first:last].unbind(1)
        places = torch.arange(lengths[last - 1], device=device)
        members = (starts - pieces[0][1])[:, None] + torch.minimum(places, sizes[:, None] - 1)
        missing = None if lengths[first] == lengths[last - 1] else places >= sizes[:, None]
        yield which, last - first, members.view(-1), missing


def _alike(
    lengths: list[int],
    first: int,
    eighths: int,
    elements: int,
) -> Iterator[tuple[int, int]]:
    """First and last (excluded) of rising ``lengths``, the longest at most ``eighths`` of the
    shortest.
    """
    while first < len(lengths):
        end = min(first + max(1, elements // lengths[first]), len(lengths))
        last = bisect_right(lengths, lengths[first] * eighths // 8, lo=first, hi=end)
        yield first, last
        first = last


class Tile(NamedTuple):
    """Similarities of some documents of a meeting, or of some tokens of its only one."""

    similarities: Tensor  # [n, L, C], nobody else's
    rows: Tensor  # [n, L] row numbers, kept tokens all of them
    exists: Tensor | None  # [n, L], or None where every place holds a token of its own
    span: slice | None  # the rows, where they lie one after the other
    tokens: Tensor | None  # [n, L, D] in fp32 (fp64), scaled, where they were gathered


class Pairs(NamedTuple):
    """Listed pairs: their numbers and queries ``[n]``, and rows of their query tokens ``[n, C]``."""

    items: Tensor
    query: Tensor
    rows: Tensor


class Meeting(NamedTuple):
    """Documents that have tokens, and the query tokens that they meet."""

    items: Index  # [n] numbers of the pairs (of the documents, for "all"), or a slice
    documents: Index  # [n], or a slice
    rows: Index  # of the query tokens: [C] or a slice, or [n, C]
    exists: Tensor | None  # [n, C], or None for all
    queries: Tensor  # [C, D] or [n, C, D]
    owner: Part | Pairs  # the part of the queries, for "all"; else the pairs
    cut: bool  # whether the tiles are of one document, which is longer than a tile may be
    tiles: Callable[[], Iterator[Tile]]  # makes them, of documents in the order of items


class Group(NamedTuple):
    """Documents of a chunk whose lengths differ by an eighth."""

    items: Index  # their numbers, or a slice
    place: Tensor  # [n, L] numbers of their kept tokens
    exists: Tensor | None  # [n, L], or None where every place holds a token of its own
    span: slice | None  # the numbers, where they follow each other


def chunks(offsets: Sequence[int], rows: int, limit: int) -> Iterator[tuple[int, int]]:
    """First and last (excluded) of up to ``limit`` consecutive sequences of as many ``rows``, or of
    one sequence.
    """
    first = 0
    while first < len(offsets) - 1:
        last = max(first + 1, min(bisect_right(offsets, offsets[first] + rows) - 1, first + limit))
        yield first, last
        first = last


def groups(documents: Side, first: int, last: int, rows: int) -> Iterator[Group]:
    """The documents of a chunk that have tokens, by rising length, up to ``rows`` together; in one
    if all are alike.
    """
    ordered, order = documents.counts[first:last].sort(stable=True)
    lengths = ordered.tolist()
    if lengths[0] == lengths[-1]:
        start, items = int(documents.offsets[first]), slice(first, last)
        place, _ = documents.places(items, 0, lengths[0], True)
        yield Group(items, place, None, slice(start, start + place.numel()))
        return
    for begin, end in _alike(lengths, bisect_right(lengths, 0), 9, rows):
        which, alone = order[begin:end] + first, end == begin + 1
        place, exists = documents.places(
            which,
            0,
            lengths[end - 1],
            lengths[begin] == lengths[end - 1],
        )
        start = int(place[0, 0]) if alone else 0
        yield Group(which, place, exists, slice(start, start + lengths[begin]) if alone else None)


def walk(problem: Problem, queries: Side, documents: Side) -> Iterator[Meeting]:
    """All meetings of a problem."""
    if problem.pairing == "all":
        return _all_pairs(parts(queries, tiles.column_limit(queries.rows.size(1))), documents)
    return _some_pairs(*pairs(problem), queries, documents)


def _all_pairs(queries: list[Part], documents: Side) -> Iterator[Meeting]:
    if not queries:
        return
    offsets = [*documents.offsets.tolist(), int(documents.counts.sum())]
    columns = max(part.stop - part.start for part in queries)
    budget = max(1, min(documents.rows_at_a_time(), tiles.TILE_ELEMENTS // columns))
    for first, last in chunks(offsets, budget, budget):
        start, stop = offsets[first], offsets[last]
        if stop - start > budget:  # one long document
            which = torch.tensor([first], device=documents.counts.device)
            for part in queries:
                tokens = part.tokens()
                made = partial(
                    _gathered_tiles,
                    documents,
                    which,
                    stop - start,
                    budget,
                    None,
                    tokens,
                )
                yield Meeting(which, which, part.columns, None, tokens, part, True, made)
        elif start < stop:
            integers = _in_integers(queries[0].side, documents)
            wide = None if integers else documents.kept(start, stop)
            found = list(groups(documents, first, last, tiles.GROUP_ELEMENTS // columns))
            several = [group.items for group in found if isinstance(group.items, Tensor)]
            items = torch.cat(several) if len(found) > 1 else found[0].items
            for part in queries:
                vectors = part.tokens()
                product = (
                    part.integers(documents, start, stop) if wide is None else wide @ vectors.T
                )
                made = partial(_shared_tiles, documents, found, product, start)
                yield Meeting(items, items, part.columns, None, vectors, part, False, made)


def _in_integers(queries: Side, documents: Side) -> bool:
    """Whether both sides are of int8, the documents whole, and this CPU is fast at their products."""
    both = queries.rows.dtype == documents.rows.dtype == torch.int8 and documents.index is None
    return both and documents.rows.device.type == "cpu" and has_int8_products()


def _shared_tiles(
    documents: Side,
    found: list[Group],
    product: Tensor,
    start: int,
) -> Iterator[Tile]:
    """Tiles of the groups of a chunk whose kept tokens, from ``start`` on, were multiplied."""
    for _, place, exists, span in found:
        if span is None:
            sims = product.index_select(0, (place - start).view(-1))
        else:
            sims = product[span.start - start : span.stop - start]
        together = span if documents.index is None else None
        yield Tile(sims.view(*place.shape, -1), documents.at(place), exists, together, None)


def _some_pairs(
    query_of: Tensor,
    document_of: Tensor,
    queries: Side,
    documents: Side,
) -> Iterator[Meeting]:
    limit = tiles.column_limit(queries.rows.size(1))
    for items, longest, step in _blocks(documents, document_of, queries.counts[query_of]):
        query, which = query_of[items], document_of[items]
        held = _gathered(documents, which, 0, longest) if step >= longest else None
        shared = query.numel() > 1 and bool((query == query[0]).all())
        shortest, tokens = (int(bound) for bound in queries.counts[query].aminmax())
        for start in range(0, tokens, limit):  # long queries come in several turns
            stop = min(start + limit, tokens)
            place, exists = queries.places(query, start, stop, shortest >= stop)
            rows = queries.at(place)
            vectors = queries.take(rows[0] if shared else rows)
            made = partial(_gathered_tiles, documents, which, longest, step, held, vectors)
            yield Meeting(
                items,
                which,
                rows,
                exists,
                vectors,
                Pairs(items, query, rows),
                held is None,
                made,
            )


def _gathered(side: Side, which: Tensor, start: int, stop: int) -> Gathered:
    place, exists = side.places(which, start, stop, int(side.counts[which].min()) >= stop)
    rows = side.at(place)
    if exists is None and side.index is None:
        begin, size = int(rows[0, 0]), rows.numel()
        ahead = torch.arange(begin, begin + size, rows.size(1), device=rows.device)
        if begin + size <= side.rows.size(0) and bool((rows[:, 0] == ahead).all()):
            tokens = side.kept(begin, begin + size).view(*rows.shape, -1)
            return rows, None, slice(begin, begin + size), tokens
    return rows, exists, None, side.take(rows)


def _gathered_tiles(
    side: Side,
    which: Tensor,
    longest: int,
    step: int,
    held: Gathered | None,
    queries: Tensor,
) -> Iterator[Tile]:
    """Tiles of ``step`` places of each document, or of the tokens that are held."""
    for start in range(0, longest, step):
        rows, exists, span, tokens = held or _gathered(
            side,
            which,
            start,
            min(start + step, longest),
        )
        yield Tile(tokens @ queries.mT, rows, exists, span, tokens)


def _blocks(side: Side, document_of: Tensor, columns: Tensor) -> Iterator[tuple[Tensor, int, int]]:
    """Items whose document and query have a token, in blocks by rising length, each padded to its
    longest.

    The items of a block have queries of nearly one length, by powers of two; ``columns`` are those
    lengths. With the items come the kept tokens of the longest document, and places of each in a
    tile.
    """
    dim, counts = side.rows.size(1), side.counts[document_of]
    limit = tiles.row_limit(dim)
    items = ((counts > 0) & (columns > 0)).nonzero().squeeze(1)
    classes = torch.frexp(columns[items].double()).exponent.long()
    order = (counts[items] + classes * (1 << 48)).argsort(stable=True)
    items = items[order]
    lengths = counts[items].tolist()
    first = 0
    for size in torch.unique_consecutive(classes[order], return_counts=True)[1].tolist():
        end, width = first + size, int(columns[items[first : first + size]].max())
        places = min(limit, tiles.TILE_ELEMENTS // width)  # of a tile
        while first < end:
            count = 1
            while first + count < end and (count + 1) * max(lengths[first + count], width) <= limit:
                if (count + 1) * lengths[first + count] > places:
                    break
                count += 1
            longest = step = lengths[first + count - 1]
            if count == 1:
                step = max(
                    1,
                    min(limit, tiles.TILE_ELEMENTS // min(width, tiles.column_limit(dim))),
                )
            yield items[first : first + count], longest, step
            first += count
