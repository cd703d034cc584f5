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

from tilefold.ops.maxsim._blocks import BLOCK_COLUMNS, BLOCK_ROWS, TILE_ELEMENTS, Side
from tilefold.ops.maxsim._problem import Problem, wide_dtype

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


def scores(problem: Problem, queries: Side, documents: Side) -> Tensor:
    """``[Nq, Nd]`` sums of maxima."""
    dtype, device = wide_dtype(problem.queries.dtype), problem.queries.device
    every = torch.arange(queries.rows.size(0), device=device) if queries.index is None else queries.index
    table = queries.take(every)  # [kept, D]
    member = exists = None
    if queries.index is not None or problem.cu_queries is not None:
        place = torch.arange(int(queries.counts.max()) if problem.n_queries else 0, device=device)
        exists = place < queries.counts[:, None]  # [Nq, longest]
        member = torch.where(exists, queries.offsets[:, None] + place, 0)
    out = torch.zeros(problem.n_documents, problem.n_queries, dtype=dtype, device=device)
    offsets = [*documents.offsets.tolist(), int(documents.counts.sum())]
    copied = documents.rows.dtype != dtype or documents.index is not None or documents.scale is not None
    columns = min(max(table.size(0), 1), BLOCK_COLUMNS)
    budget = TILE_ELEMENTS // columns
    for first, last in _chunks(offsets, min(budget, BLOCK_ROWS) if copied else budget):
        tokens = _rows(documents, offsets[first], offsets[last])
        best = torch.zeros(last - first, table.size(0), dtype=dtype, device=device)
        groups = list(_groups(documents.counts[first:last], offsets[first : last + 1], columns))
        for c0 in range(0, table.size(0), BLOCK_COLUMNS):
            part = slice(c0, c0 + BLOCK_COLUMNS)
            sims = tokens @ table[part].T  # [rows of the chunk, C]
            for group in groups:
                found = sims[group.rows] if isinstance(group.rows, slice) else sims.index_select(0, group.rows)
                best[group.items, part] = found.view(group.size, -1, sims.size(1)).amax(dim=1)
        if problem.mask_zero and documents.index is not None:
            masked = (documents.counts < documents.sizes)[first:last, None]
            best = torch.where(masked & (best < 0), 0, best)
        if member is None or exists is None:
            out[first:last] = best.view(last - first, problem.n_queries, -1).sum(dim=2)
        elif table.size(0):
            out[first:last] = torch.where(exists, best[:, member], 0).sum(dim=2)
    return out.T.contiguous()


def _chunks(offsets: list[int], budget: int) -> Iterator[tuple[int, int]]:
    """First and last (excluded) of consecutive documents with ``budget`` kept rows together, or one document."""
    first = 0
    while first < len(offsets) - 1:
        last = max(first + 1, bisect_right(offsets, offsets[first] + budget) - 1)
        yield first, last
        first = last


def _rows(side: Side, start: int, stop: int) -> Tensor:
    """Kept tokens ``start`` to ``stop``, in fp32 (fp64)."""
    if side.index is not None:
        return side.take(side.index[start:stop])
    rows = side.rows[start:stop].to(wide_dtype(side.rows.dtype))  # no copy of what is wide already
    return rows if side.scale is None else rows * side.scale[start:stop]


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
        most = max(1, GROUP_ELEMENTS // (columns * lengths[first]))
        last = bisect_right(lengths, lengths[first] + lengths[first] // 8, lo=first, hi=min(first + most, len(lengths)))
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
