"""Gradients of the maximum in torch operations: each row's is a weighted sum of rows of the other
side.

A (pair, query token) without a winner is no entry: nothing is multiplied for it. Entries are taken
some at a time, in an order that depends on nothing but the layout, so that two runs agree in every
bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tilefold.ops._shared.winners import no_winner
from tilefold.ops.maxsim import tiles
from tilefold.ops.maxsim._problem import Problem, saved_place, wide_dtype
from tilefold.ops.maxsim._walk import chunks
from tilefold.ops.maxsim.tiles import Side, pairs


def all_pairs(
    queries: Side,
    documents: Side,
    grad: Tensor,
    saved: Tensor,
    dqueries: Tensor | None,
    ddocuments: Tensor | None,
) -> None:
    """Add the gradients of both sides to ``dqueries`` and ``ddocuments``."""
    n_rows, limit = queries.rows.size(0), tiles.row_limit(queries.rows.size(1))
    width = min(n_rows, limit)
    query_of_row = torch.arange(queries.starts.numel(), device=grad.device).repeat_interleave(
        queries.sizes,
    )
    offsets = [*documents.starts.tolist(), documents.rows.size(0)]
    query_table = None
    slabs = (
        (first, last, start, min(start + limit, offsets[last]))
        for first, last in chunks(offsets, limit, max(1, tiles.SLAB_ENTRIES // max(width, 1)))
        for start in range(offsets[first], offsets[last], limit)  # a long document comes in parts
    )
    for first, last, start, stop in slabs:
        table = _table(documents, start, stop) if dqueries is not None else None
        for q0 in range(0, n_rows, width):
            rows = slice(q0, min(q0 + width, n_rows))
            winner = _positions(saved, (slice(first, last), rows))  # [n, w]
            has = winner != no_winner(saved.dtype)
            target = winner + (documents.starts[first:last, None] - start)
            if last == first + 1:  # perhaps a part of a long document
                has &= (target >= 0) & (target < stop - start)
            weight = grad.T[first:last, query_of_row[rows]]
            if dqueries is not None and table is not None:
                dqueries[rows] += _bags(table, documents, start, target.T, weight.T, has.T)
            if ddocuments is not None:
                if query_table is None or width < n_rows:
                    query_table = _table(queries, rows.start, rows.stop)
                row = torch.arange(rows.stop - rows.start, device=grad.device).expand(has.shape)[
                    has
                ]
                scaled = _scaled(weight[has], queries.scale, row, rows.start)
                add_rows(ddocuments[start:stop], query_table, target[has], row, scaled)


def _table(side: Side, start: int, stop: int) -> Tensor:
    """Rows in fp32 (fp64), not scaled, as they lie: masked ones too, which no entry names."""
    return side.rows[start:stop].to(wide_dtype(side.rows.dtype)).contiguous()


def _scaled(weight: Tensor, scale: Tensor | None, row: Tensor, start: int) -> Tensor:
    return weight if scale is None else weight * scale[start:].view(-1)[row]


def _bags(
    table: Tensor,
    side: Side,
    start: int,
    target: Tensor,
    weight: Tensor,
    has: Tensor,
) -> Tensor:
    """``[w, D]`` sums of ``weight * table[target]`` over the entries of ``[w, n]`` that exist."""
    if bool(has.all()):
        weight = _scaled(weight, side.scale, target, start)
        return embedding_bag(
            target.contiguous(),
            table,
            mode="sum",
            per_sample_weights=weight.contiguous(),
        )
    counts = has.sum(dim=1)
    row = target[has]
    if row.numel() == 0:
        return table.new_zeros(has.size(0), table.size(1))
    weight = _scaled(weight[has], side.scale, row, start)
    return embedding_bag(
        row,
        table,
        counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=weight,
    )


def some_pairs(
    problem: Problem,
    queries: Side,
    documents: Side,
    grad: Tensor,
    saved: Tensor,
    *sums: Tensor | None,
) -> None:
    """Like :func:`all_pairs`, for pairs that are aligned, grouped or listed, to ``sums``."""
    (dqueries, ddocuments), grad = sums, grad.reshape(-1)
    query_of, document_of = pairs(problem)
    ends = queries.counts[query_of].cumsum(0)  # entries up to each pair's last
    count = int(ends[-1]) if ends.numel() else 0
    step = tiles.row_limit(queries.rows.size(1))
    for first in range(0, count, step):
        entry = torch.arange(first, min(first + step, count), device=grad.device)
        pair = torch.searchsorted(ends, entry, right=True)
        query = query_of[pair]
        place = queries.offsets[query] + queries.counts[query] - (ends[pair] - entry)
        row = place if queries.index is None else queries.index[place]
        winner = _positions(saved.view(-1), saved_place(problem, pair, row, queries.starts[query]))
        has = winner != no_winner(saved.dtype)
        target = documents.starts[document_of[pair]] + winner
        weight = grad[pair]
        if not bool(has.all()):
            row, target, weight = row[has], target[has], weight[has]
        if dqueries is not None:
            table, name = _rows_of(documents, target)
            add_rows(dqueries, table, row, name, _scaled(weight, documents.scale, target, 0))
        if ddocuments is not None:
            table, name = _rows_of(queries, row)
            add_rows(ddocuments, table, target, name, _scaled(weight, queries.scale, row, 0))


def _rows_of(side: Side, rows: Tensor) -> tuple[Tensor, Tensor]:
    """A table in fp32 (fp64), not scaled, that holds ``rows``, and where; the side itself where it
    can be.
    """
    dtype = wide_dtype(side.rows.dtype)
    if side.rows.dtype == dtype and side.rows.is_contiguous():
        return side.rows, rows
    return side.rows.index_select(0, rows).to(dtype), torch.arange(rows.numel(), device=rows.device)


def _positions(saved: Tensor, where: Tensor | tuple[slice, slice]) -> Tensor:
    """Saved winners in int64. CUDA has no gather of uint16, so their bits are gathered as int16."""
    if saved.dtype != torch.uint16:
        return saved[where].to(torch.int64)
    return saved.view(torch.int16)[where].to(torch.int64).bitwise_and_(0xFFFF)


def add_rows(
    out: Tensor,
    table: Tensor,
    owner: Tensor,
    row: Tensor | None = None,
    weight: Tensor | None = None,
) -> None:
    """``out[owner] += weight * table[row]`` over all entries, one owner after the other; by default
    all of it.
    """
    if owner.numel() == 0:
        return
    owner, order = owner.sort(stable=True)
    unique, counts = torch.unique_consecutive(owner, return_counts=True)
    rows, weights = (
        (order if row is None else row[order]),
        (None if weight is None else weight[order]),
    )
    out[unique] += embedding_bag(
        rows,
        table,
        counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=weights,
    )
