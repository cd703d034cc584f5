"""Gradients of the maximum in torch operations.

The gradient of a row is a weighted sum of rows of the other side, over the entries (pair, query
token) in which the row is the query token or the winner. An entry without a winner is left out.
Entries are processed in slabs, in an order that depends on the layout only, so that two runs agree
in every bit.
"""

from __future__ import annotations

from typing import NamedTuple

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
from tilefold.ops.maxsim._walk import split_into_slabs
from tilefold.ops.maxsim.tiles import SequenceTokens, add_rows


class _Table(NamedTuple):
    """Token vectors from which gradients are summed.

    The weights of a sum are multiplied by the scales of the vectors, because scaling the vectors
    would multiply more numbers.

    Attributes:
        vectors: ``[M, D]`` in fp32, or fp64 for fp64 tokens, not scaled.
        scale: ``[M]`` scale of each vector, or ``None``.
    """

    vectors: Tensor
    scale: Tensor | None

    def scaled_weights(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Multiply the weight of a vector by the scale of the vector.

        Args:
            weights: weights of any shape.
            rows: the row of each weight's vector in the table, in the shape of ``weights``.
        """
        return weights if self.scale is None else weights * self.scale[rows]


def _table(tokens: SequenceTokens, start: int, stop: int) -> _Table:
    """Return the rows ``start`` to ``stop`` as a table.

    Masked rows are in the table, too, but no gradient is summed from them.
    """
    vectors = tokens.rows[start:stop].to(wide_dtype(tokens.rows.dtype)).contiguous()
    scale = None if tokens.scale is None else tokens.scale[start:stop, 0]
    return _Table(vectors, scale)


def add_gradients_of_all_pairs(
    queries: SequenceTokens,
    documents: SequenceTokens,
    grad: Tensor,
    saved: Tensor,
    dqueries: Tensor | None,
    ddocuments: Tensor | None,
) -> None:
    """Add the gradients for all pairs to ``dqueries`` and ``ddocuments``.

    The gradient of a score reaches each query token of the query, and the document token that is
    most similar to it, its winner.

    Args:
        queries: the tokens of all queries.
        documents: the tokens of all documents.
        grad: ``[Nq, Nd]`` gradient of the scores, in fp32 (fp64).
        saved: ``[Nd, Tq]`` winners, as positions in their documents.
        dqueries: ``[Tq, D]``, or ``None`` if it is not needed.
        ddocuments: ``[Td, D]``, or ``None`` if it is not needed.
    """
    n_query_rows = queries.rows.size(0)
    max_rows = tiles.row_limit(queries.rows.size(1))
    width = min(n_query_rows, max_rows)  # query tokens that are processed at a time
    offsets = [*documents.starts.tolist(), documents.rows.size(0)]
    max_documents = max(1, tiles.SLAB_ENTRIES // max(width, 1))
    query_table = None
    for slab in split_into_slabs(offsets, max_tokens=max_rows, max_sequences=max_documents):
        slab_documents = slice(slab.first_sequence, slab.end_sequence)
        document_table = None
        if dqueries is not None:
            document_table = _table(documents, slab.start, slab.stop)
        for first_row in range(0, n_query_rows, width):
            query_rows = slice(first_row, min(first_row + width, n_query_rows))
            winners = _winner_positions(saved, (slab_documents, query_rows))
            has_winner = winners != no_winner(saved.dtype)  # [n, width]
            # Winners become rows of the slab, which is several documents or a part of a long one.
            document_rows = winners + (documents.starts[slab_documents, None] - slab.start)
            if slab.part is not None:  # some winners are in other parts of the document
                has_winner &= (document_rows >= 0) & (document_rows < slab.n_tokens)
            # Each maximum has the gradient of the score of its document and query.
            weights = grad.T[slab_documents, queries.sequence_of_row[query_rows]]
            if dqueries is not None and document_table is not None:
                dqueries[query_rows] += _sum_winners(
                    document_table,
                    document_rows.T,
                    weights.T,
                    has_winner.T,
                )
            if ddocuments is not None:
                if query_table is None or width < n_query_rows:
                    query_table = _table(queries, query_rows.start, query_rows.stop)
                _add_to_winners(
                    ddocuments[slab.start : slab.stop],
                    query_table,
                    document_rows,
                    weights,
                    has_winner,
                )


def _add_to_winners(
    ddocuments: Tensor,
    query_table: _Table,
    document_rows: Tensor,
    weights: Tensor,
    has_winner: Tensor,
) -> None:
    """Add the gradient of the document tokens that are the maxima of some query tokens.

    For document ``i`` and query token ``j``, the row ``document_rows[i, j]`` receives the scaled
    vector of the query token times ``weights[i, j]``.

    Args:
        ddocuments: ``[n_rows, D]`` gradient of the documents' rows, to which this is added.
        query_table: ``width`` query tokens.
        document_rows: ``[n, width]`` winners, as rows of ``ddocuments``.
        weights: ``[n, width]`` gradients of the maxima.
        has_winner: ``[n, width]`` bools, false for entries without a winner in ``ddocuments``.
    """
    n_query_tokens = query_table.vectors.size(0)
    query_rows = torch.arange(n_query_tokens, device=weights.device)
    query_rows = query_rows.expand(has_winner.shape)[has_winner]
    add_rows(
        ddocuments,
        query_table.vectors,
        out_rows=document_rows[has_winner],
        table_rows=query_rows,
        weights=query_table.scaled_weights(weights[has_winner], query_rows),
    )


def _sum_winners(
    document_table: _Table,
    document_rows: Tensor,
    weights: Tensor,
    has_winner: Tensor,
) -> Tensor:
    """Sum the most similar document tokens of each query token: the gradient of the query token.

    Query token ``j`` receives the sum of ``weights[j, i]`` times the scaled vector of the row
    ``document_rows[j, i]``, its winner, over the documents ``i`` that have one.

    Args:
        document_table: the tokens of ``n`` documents.
        document_rows: ``[width, n]`` winners, as rows of the table.
        weights: ``[width, n]`` gradients of the maxima.
        has_winner: ``[width, n]`` bools, false for entries that are left out.

    Returns:
        ``[width, D]`` sums for ``width`` query tokens.
    """
    table = document_table.vectors
    if bool(has_winner.all()):  # the usual case, which needs no selection
        return embedding_bag(
            document_rows.contiguous(),
            table,
            mode="sum",
            per_sample_weights=document_table.scaled_weights(weights, document_rows).contiguous(),
        )
    n_winners = has_winner.sum(dim=1)  # of each query token
    document_rows = document_rows[has_winner]
    if document_rows.numel() == 0:
        return table.new_zeros(has_winner.size(0), table.size(1))
    return embedding_bag(
        document_rows,
        table,
        n_winners.cumsum(0) - n_winners,  # the first winner of each query token
        mode="sum",
        per_sample_weights=document_table.scaled_weights(weights[has_winner], document_rows),
    )


def add_gradients_of_listed_pairs(
    problem: Problem,
    queries: SequenceTokens,
    documents: SequenceTokens,
    grad: Tensor,
    saved: Tensor,
    dqueries: Tensor | None,
    ddocuments: Tensor | None,
) -> None:
    """Add the gradients for aligned, grouped or listed pairs to ``dqueries`` and ``ddocuments``.

    An entry is an unmasked query token of a pair. Its winner is the document token that is most
    similar to it. Entries are numbered pair by pair, and a limited number is computed at a time.

    Args:
        problem: tensors and options of the call.
        queries: the tokens of all queries.
        documents: the tokens of all documents.
        grad: gradient of the scores, in their shape, in fp32 (fp64).
        saved: winners, as positions in their documents.
        dqueries: ``[Tq, D]``, or ``None`` if it is not needed.
        ddocuments: ``[Td, D]``, or ``None`` if it is not needed.
    """
    grad = grad.reshape(-1)
    query_of_pair, document_of_pair = pair_sequences(problem)
    entry_ends = queries.counts[query_of_pair].cumsum(0)  # end of the entries of each pair
    n_entries = int(entry_ends[-1]) if entry_ends.numel() else 0
    max_entries = tiles.row_limit(queries.rows.size(1))
    for first in range(0, n_entries, max_entries):
        entries = torch.arange(first, min(first + max_entries, n_entries), device=grad.device)
        pairs = torch.searchsorted(entry_ends, entries, right=True)
        pair_queries = query_of_pair[pairs]
        # an entry is as far from the end of its pair as its token is from the end of the query
        n_entries_to_end = entry_ends[pairs] - entries
        token_ends = queries.offsets[pair_queries] + queries.counts[pair_queries]
        query_rows = queries.rows_of(token_ends - n_entries_to_end)
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
            _add_selected_rows(dqueries, query_rows, documents, document_rows, weights)
        if ddocuments is not None:
            _add_selected_rows(ddocuments, document_rows, queries, query_rows, weights)


def _add_selected_rows(
    out: Tensor,
    out_rows: Tensor,
    tokens: SequenceTokens,
    token_rows: Tensor,
    weights: Tensor,
) -> None:
    """Add weighted token vectors to rows of a gradient: the i-th one to row ``out_rows[i]``.

    Args:
        out: ``[T, D]`` gradient, to which this is added.
        out_rows: ``[n]`` rows of ``out``, which may repeat.
        tokens: the tokens of queries or documents.
        token_rows: ``[n]`` rows of ``tokens`` that are added.
        weights: ``[n]`` weights of the vectors.
    """
    if tokens.scale is not None:  # a vector is its row times its scale
        weights = weights * tokens.scale.view(-1)[token_rows]
    vectors = tokens.rows
    if vectors.dtype != out.dtype or not vectors.is_contiguous():
        # `add_rows` needs contiguous vectors in the dtype of the gradient. Only the vectors that
        # are added are converted, so they are then in the order in which they are added.
        vectors = vectors.index_select(0, token_rows).to(out.dtype)
        token_rows = torch.arange(token_rows.numel(), device=token_rows.device)
    add_rows(out, vectors, out_rows, table_rows=token_rows, weights=weights)


def _winner_positions(saved: Tensor, selection: Tensor | tuple[slice, slice]) -> Tensor:
    """Return the winners of a selection of query tokens and documents, as int64.

    Args:
        saved: winners: positions of the document tokens that are most similar to query tokens.
        selection: the selection, as an index of ``saved``.
    """
    if saved.dtype != torch.uint16:
        return saved[selection].to(torch.int64)
    # CUDA cannot gather uint16, so the same bits are gathered as int16. Positions from 32,768 on
    # become negative, and the mask removes the bits of their sign.
    positions = saved.view(torch.int16)[selection].to(torch.int64)
    return positions.bitwise_and_(0xFFFF)
