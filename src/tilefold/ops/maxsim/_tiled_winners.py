"""Gradients of the maximum in torch operations.

The gradient of a row is a weighted sum of rows of the other side, over the entries (pair, query
token) in which it takes part. An entry without a winner is left out. Entries are processed in
slabs, in an order that depends on the layout only, so that two runs agree in every bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tilefold.ops._shared.winners import no_winner
from tilefold.ops.maxsim import tiles
from tilefold.ops.maxsim._problem import (
    Problem,
    pair_sequences,
    saved_positions,
    wide_dtype,
)
from tilefold.ops.maxsim._walk import slabs
from tilefold.ops.maxsim.tiles import SequenceTokens, add_rows


def all_pairs_gradients(
    queries: SequenceTokens,
    documents: SequenceTokens,
    grad: Tensor,
    saved: Tensor,
    dqueries: Tensor | None,
    ddocuments: Tensor | None,
) -> None:
    """Add the gradients for all pairs to ``dqueries`` and ``ddocuments``.

    Args:
        queries: all queries.
        documents: all documents.
        grad: ``[Nq, Nd]`` gradient of the scores, in fp32 (fp64).
        saved: ``[Nd, Tq]`` winners.
        dqueries: ``[Tq, D]``, or ``None`` if it is not needed.
        ddocuments: ``[Td, D]``, or ``None`` if it is not needed.
    """
    n_query_rows = queries.rows.size(0)
    limit = tiles.row_limit(queries.rows.size(1))
    width = min(n_query_rows, limit)
    offsets = [*documents.starts.tolist(), documents.rows.size(0)]
    max_documents = max(1, tiles.SLAB_ENTRIES // max(width, 1))
    query_table = None
    for slab in slabs(offsets, limit, max_documents):
        document_table = None
        if dqueries is not None:
            document_table = _unscaled_rows(documents, slab.start, slab.stop)
        for first_row in range(0, n_query_rows, width):
            query_rows = slice(first_row, min(first_row + width, n_query_rows))
            winners = _winner_positions(saved, (slice(slab.first, slab.last), query_rows))
            has_winner = winners != no_winner(saved.dtype)  # [n, width]
            first_rows = documents.starts[slab.first : slab.last, None]
            document_rows = winners + (first_rows - slab.start)
            if slab.is_part:  # other winners of the document are in other slabs
                n_rows = slab.stop - slab.start
                has_winner &= (document_rows >= 0) & (document_rows < n_rows)
            weights = grad.T[slab.first : slab.last, queries.sequence_of_row[query_rows]]
            if dqueries is not None and document_table is not None:
                dqueries[query_rows] += _weighted_sums(
                    document_table,
                    documents,
                    slab.start,
                    document_rows.T,
                    weights.T,
                    has_winner.T,
                )
            if ddocuments is not None:
                if query_table is None or width < n_query_rows:
                    query_table = _unscaled_rows(queries, query_rows.start, query_rows.stop)
                _add_to_winning_rows(
                    ddocuments[slab.start : slab.stop],
                    query_table,
                    queries,
                    query_rows.start,
                    document_rows,
                    weights,
                    has_winner,
                )


def _add_to_winning_rows(
    ddocuments: Tensor,
    query_table: Tensor,
    queries: SequenceTokens,
    first_query_row: int,
    document_rows: Tensor,
    weights: Tensor,
    has_winner: Tensor,
) -> None:
    """Add the gradient of the document tokens that won the maxima of a block of query tokens.

    For document ``i`` and query token ``j``, the winning row ``document_rows[i, j]`` gets
    ``weights[i, j] * query_table[j]``, times the query token's own scale if it has one.

    Args:
        ddocuments: ``[n_rows, D]`` gradient of the documents' rows, to which this is added.
        query_table: ``[width, D]`` rows of ``queries`` from ``first_query_row`` on, not scaled.
        queries: all queries.
        first_query_row: first row of the table.
        document_rows: ``[n, width]`` winners, as rows of ``ddocuments``.
        weights: ``[n, width]`` gradients of the maxima.
        has_winner: ``[n, width]`` bools, false for entries without a winner in ``ddocuments``.
    """
    # An entry is a pair of a document and a query token that has a winner.
    row_numbers = torch.arange(query_table.size(0), device=weights.device)
    entry_rows = row_numbers.expand(has_winner.shape)[has_winner]
    entry_weights = _scaled_weights(weights[has_winner], queries.scale, entry_rows, first_query_row)
    add_rows(ddocuments, query_table, document_rows[has_winner], entry_rows, entry_weights)


def _unscaled_rows(tokens: SequenceTokens, start: int, stop: int) -> Tensor:
    """Return the token vectors of a range of rows in fp32 (fp64), not scaled.

    Masked rows are in the table too, but nothing reads them.
    """
    return tokens.rows[start:stop].to(wide_dtype(tokens.rows.dtype)).contiguous()


def _scaled_weights(weights: Tensor, scale: Tensor | None, rows: Tensor, start: int) -> Tensor:
    """Multiply the weight of every token vector by the scale of that vector.

    The product of weight and scale replaces scaling the vectors, of which there are more numbers.

    Args:
        weights: weights of any shape.
        scale: ``[T, 1]`` scales of all rows, or ``None``.
        rows: rows that are weighed, counted from ``start``, in the shape of ``weights``.
        start: row of ``scale`` that is row 0.
    """
    if scale is None:
        return weights
    return weights * scale[start:].view(-1)[rows]


def _weighted_sums(
    table: Tensor,
    tokens: SequenceTokens,
    start: int,
    rows: Tensor,
    weights: Tensor,
    has_winner: Tensor,
) -> Tensor:
    """Sum the winning document tokens of each query token, weighted: the gradient of the query.

    Query token ``j`` gets the sum of ``weights[j, i] * table[rows[j, i]]`` over the documents ``i``
    in which it has a winner, where the table's rows are scaled.

    Args:
        table: ``[T, D]`` rows of ``tokens`` from ``start`` on, not scaled.
        tokens: the tokens that the table was made from.
        start: first row of the table.
        rows: ``[width, n]`` winners, as rows of the table.
        weights: ``[width, n]`` gradients of the maxima.
        has_winner: ``[width, n]`` bools; other entries are left out.

    Returns:
        ``[width, D]`` sums.
    """
    if bool(has_winner.all()):
        return embedding_bag(
            rows.contiguous(),
            table,
            mode="sum",
            per_sample_weights=_scaled_weights(weights, tokens.scale, rows, start).contiguous(),
        )
    counts = has_winner.sum(dim=1)  # winners of each query token
    rows = rows[has_winner]
    if rows.numel() == 0:
        return table.new_zeros(has_winner.size(0), table.size(1))
    return embedding_bag(
        rows,
        table,
        counts.cumsum(0) - counts,  # where the winners of each query token begin
        mode="sum",
        per_sample_weights=_scaled_weights(weights[has_winner], tokens.scale, rows, start),
    )


def listed_pairs_gradients(
    problem: Problem,
    queries: SequenceTokens,
    documents: SequenceTokens,
    grad: Tensor,
    saved: Tensor,
    dqueries: Tensor | None,
    ddocuments: Tensor | None,
) -> None:
    """Add the gradients for aligned, grouped or listed pairs to ``dqueries`` and ``ddocuments``.

    An entry is an unmasked query token of a pair. Entries are numbered pair by pair, and computed
    some at a time.

    Args:
        problem: the problem.
        queries: all queries.
        documents: all documents.
        grad: gradient of the scores, in their shape, in fp32 (fp64).
        saved: winners, as forward saved them.
        dqueries: ``[Tq, D]``, or ``None`` if it is not needed.
        ddocuments: ``[Td, D]``, or ``None`` if it is not needed.
    """
    grad = grad.reshape(-1)
    query_of_pair, document_of_pair = pair_sequences(problem)
    entry_ends = queries.counts[query_of_pair].cumsum(0)  # entries up to the last one of each pair
    n_entries = int(entry_ends[-1]) if entry_ends.numel() else 0
    step = tiles.row_limit(queries.rows.size(1))
    for first in range(0, n_entries, step):
        entries = torch.arange(first, min(first + step, n_entries), device=grad.device)
        pairs = torch.searchsorted(entry_ends, entries, right=True)
        pair_queries = query_of_pair[pairs]
        # Counted back from the last token of the query, and from the last entry of the pair.
        token_ends = queries.offsets[pair_queries] + queries.counts[pair_queries]
        query_rows = queries.rows_of(token_ends - (entry_ends[pairs] - entries))
        winners = _winner_positions(
            saved.view(-1),
            saved_positions(problem, pairs, query_rows, queries.starts[pair_queries]),
        )
        has_winner = winners != no_winner(saved.dtype)
        document_rows = documents.starts[document_of_pair[pairs]] + winners
        weights = grad[pairs]
        if not bool(has_winner.all()):
            query_rows = query_rows[has_winner]
            document_rows = document_rows[has_winner]
            weights = weights[has_winner]
        if dqueries is not None:
            table, table_rows = _table_of_rows(documents, document_rows)
            document_weights = _scaled_weights(weights, documents.scale, document_rows, 0)
            add_rows(dqueries, table, query_rows, table_rows, document_weights)
        if ddocuments is not None:
            table, table_rows = _table_of_rows(queries, query_rows)
            query_weights = _scaled_weights(weights, queries.scale, query_rows, 0)
            add_rows(ddocuments, table, document_rows, table_rows, query_weights)


def _table_of_rows(tokens: SequenceTokens, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return a table in fp32 (fp64), not scaled, that holds these rows, and their positions in it.

    The table is the token vectors themselves if they need no conversion.
    """
    dtype = wide_dtype(tokens.rows.dtype)
    if tokens.rows.dtype == dtype and tokens.rows.is_contiguous():
        return tokens.rows, rows
    table = tokens.rows.index_select(0, rows).to(dtype)
    return table, torch.arange(rows.numel(), device=rows.device)


def _winner_positions(saved: Tensor, selection: Tensor | tuple[slice, slice]) -> Tensor:
    """Return selected winners in int64.

    CUDA cannot gather uint16, so their bits are gathered as int16.
    """
    if saved.dtype != torch.uint16:
        return saved[selection].to(torch.int64)
    return saved.view(torch.int16)[selection].to(torch.int64).bitwise_and_(0xFFFF)
