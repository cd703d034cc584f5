"""Blocks of query tokens: the columns of tiles, and their sums by query."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.internals import int8_products
from tilefold.ops.maxsim.tiles import SequenceTokens

Selection = Tensor | slice

# The longest query of a sum is at most this many times as long as the shortest one.
MAX_QUERY_RATIO = 2.0


def cross_index(rows: Selection, columns: Selection) -> tuple[Selection, Selection]:
    """Return an index of the submatrix of some rows and some columns."""
    if isinstance(rows, Tensor) and isinstance(columns, Tensor):
        return rows[:, None], columns
    return rows, columns


class QueryPiece(NamedTuple):
    """Unmasked tokens of one query that are in the same block: all, or a part of a long query.

    Attributes:
        query: the query.
        first_token: the first token, numbered over the unmasked tokens of all queries.
        n_tokens: number of tokens.
    """

    query: int
    first_token: int
    n_tokens: int


class SumGroup(NamedTuple):
    """Queries of a block whose columns are summed together.

    Attributes:
        queries: the queries.
        n_queries: number of queries.
        columns: ``[n_queries * longest]`` columns of the queries, or ``None`` for all columns of
            the block in their order.
        padding: ``[n_queries, longest]`` bools, true past the end of a query, or ``None`` if all
            queries are equally long.
    """

    queries: Selection
    n_queries: int
    columns: Tensor | None
    padding: Tensor | None


class QueryBlock:
    """``C`` consecutive unmasked query tokens, the columns of a block of similarities.

    Args:
        queries: the unmasked tokens of all queries.
        pieces: the queries, or parts of queries, that the block consists of, in order.

    Attributes:
        queries: the unmasked tokens of all queries.
        start: the first token, numbered over the unmasked tokens of all queries.
        stop: the token after the last one.
        rows: rows of the tokens in ``queries.rows``, which also has masked tokens.
    """

    def __init__(self, queries: SequenceTokens, pieces: list[QueryPiece]) -> None:
        """Find the rows of the block's tokens, and the columns to be summed for each query.

        Args:
            queries: the unmasked tokens of all queries.
            pieces: the queries, or parts of queries, that the block consists of; at least one.
        """
        self.queries = queries
        self.start = pieces[0].first_token
        self.stop = pieces[-1].first_token + pieces[-1].n_tokens
        self.rows: Selection = slice(self.start, self.stop)  # without a mask, numbers are rows
        if queries.unmasked_rows is not None:
            self.rows = queries.unmasked_rows[self.start : self.stop]
        self._cached_vectors: Tensor | None = None
        self._sum_groups = list(_group_by_length(pieces, queries.counts.device))

    def cache_vectors(self) -> None:
        """Compute :meth:`vectors` once for all later calls."""
        self._cached_vectors = self.vectors()

    def vectors(self) -> Tensor:
        """Return the token vectors, ``[C, D]`` in fp32 (fp64), scaled."""
        if self._cached_vectors is not None:
            return self._cached_vectors
        return self.queries.vectors(self.start, self.stop)

    def int8_similarities(self, documents: SequenceTokens, start: int, stop: int) -> Tensor:
        """Return the similarities to int8 document tokens, with exact sums of int8 products.

        Args:
            documents: documents without a mask.
            start: first document token.
            stop: end of the document tokens.

        Returns:
            ``[stop - start, C]`` fp32, multiplied by the scales of both sides.
        """
        products = int8_products(documents.rows[start:stop], self.queries.rows[self.rows])
        similarities = products.float()
        if documents.scale is not None:
            similarities *= documents.scale[start:stop]  # [tokens, 1]
        if self.queries.scale is not None:
            similarities *= self.queries.scale[self.rows].view(1, -1)  # [1, C]
        return similarities

    def add_sums(self, values: Tensor, out: Tensor, documents: Selection) -> None:
        """Add the sums of values over the tokens of each query to ``out``.

        Args:
            values: ``[n, C]``, a row for each document and a column for each query token.
            out: ``[Nq, Nd]``.
            documents: the ``n`` documents.
        """
        n_documents = values.size(0)
        for group in self._sum_groups:
            if group.columns is not None:
                values_of_group = values.index_select(1, group.columns)
                by_query = values_of_group.view(n_documents, group.n_queries, -1)
                if group.padding is not None:
                    by_query = by_query.masked_fill_(group.padding, 0)
            else:
                by_query = values.reshape(n_documents, group.n_queries, -1)
            out[cross_index(group.queries, documents)] += by_query.sum(dim=2).T


def divide_queries(queries: SequenceTokens, max_tokens: int) -> list[QueryBlock]:
    """Divide the unmasked tokens of all queries into blocks, the columns of tiles of similarities.

    A query is split only if it has more than ``max_tokens`` tokens. If there is one block, its
    vectors are cached. Otherwise they are computed whenever they are needed, to bound memory.

    Args:
        queries: the unmasked tokens of all queries.
        max_tokens: largest number of tokens of a block.
    """
    pieces_of_blocks: list[list[QueryPiece]] = []
    free = 0  # tokens that the last block can still take
    first_token = 0
    for query, count in enumerate(queries.counts.tolist()):
        remaining = count
        while remaining:
            # Start a new block if the rest of the query does not fit into the last one, such as 5
            # tokens into 3. A query that fits into no block fills one after another.
            if free < min(remaining, max_tokens):
                pieces_of_blocks.append([])
                free = max_tokens
            size = min(remaining, free)
            pieces_of_blocks[-1].append(QueryPiece(query, first_token, size))
            first_token += size
            remaining -= size
            free -= size
    blocks = [QueryBlock(queries, pieces) for pieces in pieces_of_blocks]
    if len(blocks) == 1:
        blocks[0].cache_vectors()
    return blocks


def _group_by_length(pieces: list[QueryPiece], device: torch.device) -> Iterator[SumGroup]:
    """Group the queries of a block by length, so that each group needs a single sum.

    The columns of a group's similarities are viewed as a matrix with one row for each query.
    Shorter queries are padded.

    Args:
        pieces: the queries, or parts of queries, of the block, in the order of their tokens.
        device: device of the groups' tensors.
    """
    by_length = sorted(pieces, key=lambda piece: piece.n_tokens)
    lengths = [piece.n_tokens for piece in by_length]
    if lengths[0] == lengths[-1]:
        yield _group_of_equal_lengths(pieces, device)
        return
    table = torch.tensor(by_length, device=device)  # [pieces, fields of QueryPiece]
    runs = split_by_length(
        lengths,
        start=0,
        max_ratio=MAX_QUERY_RATIO,
        max_elements=sum(lengths),  # no limit
    )
    for start, stop in runs:
        queries, first_tokens, sizes = table[start:stop].unbind(dim=1)
        longest = lengths[stop - 1]
        positions = torch.arange(longest, device=device)
        first_columns = first_tokens - pieces[0].first_token
        # past its end, a query repeats its last column, which the padding excludes from the sum
        columns = first_columns[:, None] + torch.minimum(positions, sizes[:, None] - 1)
        padding = None if lengths[start] == longest else positions >= sizes[:, None]
        yield SumGroup(queries, stop - start, columns.view(-1), padding)


def _group_of_equal_lengths(pieces: list[QueryPiece], device: torch.device) -> SumGroup:
    """Return the group of all pieces of a block, which have equal lengths.

    Args:
        pieces: the pieces of the block, in the order of their tokens.
        device: device of the group's tensors.
    """
    first_query = pieces[0].query
    end_query = pieces[-1].query + 1
    queries: Selection = slice(first_query, end_query)
    if end_query - first_query != len(pieces):  # queries without tokens are between them
        queries = torch.tensor([piece.query for piece in pieces], device=device)
    return SumGroup(queries, len(pieces), columns=None, padding=None)


def split_by_length(
    lengths: list[int],
    *,
    start: int,
    max_ratio: float,
    max_elements: int,
) -> Iterator[tuple[int, int]]:
    """Divide sorted lengths into runs: consecutive lengths that differ little.

    Args:
        lengths: lengths in ascending order, positive from ``start`` on.
        start: position of the first run.
        max_ratio: largest ratio of the longest and the shortest length of a run.
        max_elements: largest product of the number of lengths in a run and the shortest of them. A
            run of one length may exceed it.

    Yields:
        Start and stop of each run.
    """
    while start < len(lengths):
        shortest = lengths[start]
        limit = min(start + max(1, max_elements // shortest), len(lengths))
        stop = bisect_right(lengths, int(shortest * max_ratio), lo=start, hi=limit)
        yield start, stop
        start = stop
