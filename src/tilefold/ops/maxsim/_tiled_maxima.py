"""All pairs without a gradient, in torch operations: maxima alone, without padding or copying documents.

Consecutive documents share a product: their kept rows, as they lie, times the query tokens. What is gathered and padded
is the similarities of each document, which are ``Lq / D`` of its size, by groups of documents of nearly one length; a
place past a document's end repeats its last token, which cannot change a maximum.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops.maxsim import _blocks
from tilefold.ops.maxsim._blocks import Side
from tilefold.ops.maxsim._parts import Part, widest
from tilefold.ops.maxsim._problem import Problem

GROUP_ELEMENTS = 1 << 18  # similarities of a group: 1 MiB in fp32, for the second-level cache


class Group(NamedTuple):
    """Documents of a chunk that are reduced together.

    Attributes:
        items: their places in the chunk, ``[n]`` or a slice.
        rows: places of their tokens among the rows of the chunk, ``[n * length]`` or a slice.
        size: n.
    """

    items: Tensor | slice
    rows: Tensor | slice
    size: int


def scores(problem: Problem, documents: Side, queries: list[Part], out: Tensor) -> None:
    """Add the sums of maxima to ``out`` ``[Nq, Nd]``."""
    if not queries:
        return
    dtype, device = out.dtype, out.device
    offsets = [*documents.offsets.tolist(), int(documents.counts.sum())]
    copied = documents.rows.dtype != dtype or documents.index is not None or documents.scale is not None
    columns = widest(queries)
    budget = max(1, _blocks.TILE_ELEMENTS // columns)
    if copied:
        budget = min(budget, _blocks.row_limit(documents.rows.size(1)))
    masked = documents.counts < documents.sizes if problem.mask_zero and documents.index is not None else None
    for first, last in _chunks(offsets, budget):
        start, stop = offsets[first], offsets[last]
        if start == stop:
            continue  # nothing but documents without a token
        tokens = documents.kept(start, stop) if stop - start <= budget else None
        groups = (
            [] if tokens is None else list(_groups(documents.counts[first:last], offsets[first : last + 1], columns))
        )
        for part in queries:
            if tokens is None:  # one long document
                best = _longest(documents, range(start, stop, budget), stop, part)
            else:
                sims = tokens @ part.tokens().T  # [rows of the chunk, C]
                best = torch.zeros(last - first, part.width, dtype=dtype, device=device)
                for group in groups:
                    found = sims[group.rows] if isinstance(group.rows, slice) else sims.index_select(0, group.rows)
                    best[group.items] = found.view(group.size, -1, part.width).amax(dim=1)
            if masked is not None:
                best = torch.where(masked[first:last, None] & (best < 0), 0, best)
            part.add_sums(best, out, slice(first, last))


def _longest(documents: Side, starts: range, stop: int, part: Part) -> Tensor:
    """``[1, C]`` maxima of one document, some of its tokens after the other."""
    queries = part.tokens().T
    best: Tensor | None = None
    for start in starts:
        value = (documents.kept(start, min(start + starts.step, stop)) @ queries).amax(dim=0, keepdim=True)
        best = value if best is None else torch.maximum(best, value)
    return queries.new_zeros(1, part.width) if best is None else best


def _chunks(offsets: list[int], budget: int) -> Iterator[tuple[int, int]]:
    """First and last (excluded) of up to ``budget`` consecutive documents with as many kept rows, or one document."""
    first = 0
    while first < len(offsets) - 1:
        last = max(first + 1, min(bisect_right(offsets, offsets[first] + budget) - 1, first + budget))
        yield first, last
        first = last


def _groups(counts: Tensor, offsets: list[int], columns: int) -> Iterator[Group]:
    """The documents of a chunk that have a token, by rising length, in groups whose lengths differ by an eighth."""
    ordered, order = counts.sort(stable=True)
    lengths = ordered.tolist()
    if lengths[0] == lengths[-1] > 0:
        yield Group(slice(None), slice(None), len(lengths))
        return
    starts = counts.cumsum(0) - counts
    first = next((i for i, length in enumerate(lengths) if length), len(lengths))
    while first < len(lengths):
        limit = max(1, GROUP_ELEMENTS // (columns * lengths[first]))
        last = bisect_right(
            lengths, lengths[first] + lengths[first] // 8, lo=first, hi=min(first + limit, len(lengths))
        )
        items = order[first:last]
        if last == first + 1:
            item = int(items)
            begin = offsets[item] - offsets[0]
            yield Group(items, slice(begin, begin + lengths[first]), 1)
        else:
            places = torch.arange(lengths[last - 1], device=counts.device)
            rows = starts[items, None] + torch.minimum(places, ordered[first:last, None] - 1)
            yield Group(items, rows.view(-1), last - first)
        first = last
