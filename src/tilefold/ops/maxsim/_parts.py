"""Query tokens that meet the same documents, cut into parts of a tile's width, and the sums over each query's tokens.

Parts end where queries end, as far as queries are shorter than a part. Ragged queries are summed in groups, so that
what is gathered, padded to the longest of its group, is at most twice the maxima themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops.maxsim._blocks import Side


class Group(NamedTuple):
    """Queries of a part that are summed together.

    Attributes:
        queries: their numbers, ``[n]`` or a slice.
        members: ``[n * longest]`` columns of the part, or ``None`` where all columns are theirs, in order.
        missing: ``[n, longest]`` places past a query's end, or ``None``.
        size: n.
    """

    queries: Tensor | slice
    members: Tensor | None
    missing: Tensor | None
    size: int


@dataclass
class Part:
    """Kept query tokens number ``start`` to ``stop`` of the side.

    Attributes:
        columns: ``[C]`` rows of the queries, or the slice that they are.
        groups: how their maxima are summed.
    """

    side: Side
    start: int
    stop: int
    columns: Tensor | slice
    groups: list[Group]
    tokens_kept: Tensor | None = None

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.stop - self.start

    def tokens(self) -> Tensor:
        """``[C, D]`` in fp32 (fp64), scaled."""
        return self.side.kept(self.start, self.stop) if self.tokens_kept is None else self.tokens_kept

    def add_sums(self, values: Tensor, out: Tensor, items: Tensor | slice) -> None:
        """Add the sums of ``[n, C]`` values over each query's columns to ``out[query, items]``."""
        for group in self.groups:
            if group.members is None:
                sums = values.reshape(values.size(0), group.size, -1).sum(dim=2)
            else:
                found = values.index_select(1, group.members).view(values.size(0), group.size, -1)
                sums = (found if group.missing is None else found.masked_fill_(group.missing, 0)).sum(dim=2)
            queries = group.queries
            if isinstance(queries, Tensor) and isinstance(items, Tensor):
                queries = queries[:, None]
            out[queries, items] += sums.T


def parts(side: Side, limit: int) -> list[Part]:
    """The kept tokens of all queries in parts of up to ``limit``."""
    counts = side.counts.tolist()
    found = []
    for pieces in _cut(counts, limit):
        start = pieces[0][1]
        stop = pieces[-1][1] + pieces[-1][2]
        columns = slice(start, stop) if side.index is None else side.index[start:stop]
        found.append(Part(side, start, stop, columns, _groups(pieces, side.counts.device)))
    if len(found) == 1:
        found[0].tokens_kept = found[0].tokens()
    return found


def widest(queries: list[Part]) -> int:
    """Columns of the widest part; 1 without any."""
    return max((part.width for part in queries), default=1)


def _cut(counts: Sequence[int], limit: int) -> list[list[tuple[int, int, int]]]:
    """Parts of pieces: query, number of its first kept token on the side, tokens. Only long queries have several."""
    found: list[list[tuple[int, int, int]]] = []
    free = place = 0
    for query, count in enumerate(counts):
        left = count
        while left:
            if free < min(left, limit):
                found.append([])
                free = limit
            size = min(left, free)
            found[-1].append((query, place, size))
            place, left, free = place + size, left - size, free - size
    return found


def _groups(pieces: list[tuple[int, int, int]], device: torch.device) -> list[Group]:
    """Pieces by rising length, in groups whose lengths differ by an eighth."""
    lengths = [size for _, _, size in pieces]
    if min(lengths) == max(lengths):
        first, last = pieces[0][0], pieces[-1][0]
        several = last - first + 1 != len(pieces)  # queries without a token lie between
        queries = torch.tensor([query for query, _, _ in pieces], device=device) if several else slice(first, last + 1)
        return [Group(queries, None, None, len(pieces))]
    ordered = sorted(pieces, key=lambda piece: piece[2])
    origin = pieces[0][1]
    table = torch.tensor(ordered, device=device)  # [pieces, 3]
    found, first = [], 0
    while first < len(ordered):
        last, total = first + 1, ordered[first][2]
        while last < len(ordered) and (last + 1 - first) * ordered[last][2] <= 2 * (total + ordered[last][2]):
            total += ordered[last][2]
            last += 1
        queries, starts, sizes = table[first:last].unbind(1)
        longest = ordered[last - 1][2]
        places = torch.arange(longest, device=device)
        members = (starts - origin)[:, None] + torch.minimum(places, sizes[:, None] - 1)
        missing = None if ordered[first][2] == longest else places >= sizes[:, None]
        found.append(Group(queries, members.view(-1), missing, last - first))
        first = last
    return found
