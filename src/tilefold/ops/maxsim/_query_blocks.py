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

# Queries that are summed together differ in length by at most sixteen eighths, a factor of 2.
QUERY_EIGHTHS = 16


def cross_index(rows: Selection, columns: Selection) -> tuple[Selection, Selection]:
    """Return an index of every pair of a row and a column of a matrix."""
    if isinstance(rows, Tensor) and isinstance(columns, Tensor):
        return rows[:, None], columns
    return rows, columns


class QueryPiece(NamedTuple):
    """Consecutive unmasked tokens of one query.

    Attributes:
        query: the query.
        first_token: number of the first token, counted over all queries.
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
        columns: ``[n_queries * longest]`` columns of the block, or ``None`` for all columns.
        padding: ``[n_queries, longest]`` bools, true past the end of a query, or ``None``.
    """

    queries: Selection
    n_queries: int
    columns: Tensor | None
    padding: Tensor | None


class QueryBlock:
    """Consecutive unmasked query tokens, which are the columns of tiles.

    Args:
        queries: the tokens of all queries.
        pieces: the pieces of queries that the block consists of.

    Attributes:
        start: number of the first token.
        stop: number after the last token.
        rows: rows of the tokens.
    """

    def __init__(self, queries: SequenceTokens, pieces: list[QueryPiece]) -> None:
        """Find the rows of a block's tokens, and the columns to be summed for each query.

        Args:
            queries: the tokens of all queries.
            pieces: consecutive pieces of queries, at least one.
        """
        self.queries = queries
        self.start = pieces[0].first_token
        self.stop = pieces[-1].first_token + pieces[-1].n_tokens
        self.rows: Selection = slice(self.start, self.stop)
        if queries.unmasked_rows is not None:
            self.rows = queries.unmasked_rows[self.start : self.stop]
        self._cached_vectors: Tensor | None = None
        self._sum_groups = list(_sum_groups(pieces, queries.counts.device))

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
            ``[stop - start, C]`` fp32, scaled.
        """
        products = int8_products(documents.rows[start:stop], self.queries.rows[self.rows])
        similarities = products.float()
        if documents.scale is not None:
            similarities *= documents.scale[start:stop]
        if self.queries.scale is not None:
            similarities *= self.queries.scale[:, 0][self.rows]
        return similarities

    def add_sums(self, values: Tensor, out: Tensor, documents: Selection) -> None:
        """Add values to ``out``, summed over the tokens of each query.

        Args:
            values: ``[n, C]``: documents, query tokens.
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


def query_blocks(queries: SequenceTokens, limit: int) -> list[QueryBlock]:
    """Divide the unmasked tokens of all queries into blocks of at most ``limit`` tokens.

    A query of at most ``limit`` tokens is not split. The vectors of a single block are computed
    once. Those of several blocks are computed whenever they are needed, to bound memory.
    """
    pieces_of_blocks: list[list[QueryPiece]] = []
    free = 0  # tokens that the last block can still take
    first_token = 0
    for query, count in enumerate(queries.counts.tolist()):
        remaining = count
        while remaining:
            if free < min(remaining, limit):
                pieces_of_blocks.append([])
                free = limit
            size = min(remaining, free)
            pieces_of_blocks[-1].append(QueryPiece(query, first_token, size))
            first_token += size
            remaining -= size
            free -= size
    blocks = [QueryBlock(queries, pieces) for pieces in pieces_of_blocks]
    if len(blocks) == 1:
        blocks[0].cache_vectors()
    return blocks


def _sum_groups(pieces: list[QueryPiece], device: torch.device) -> Iterator[SumGroup]:
    """Group the pieces of a block by similar length, so that few sums compute all queries.

    A group is a matrix of columns, one row for each query. Shorter queries are padded by their last
    column, which is left out of the sum. Queries of one length are a single group without padding.

    Args:
        pieces: the pieces of the block, in the order of their tokens.
        device: device of the groups' tensors.
    """
    by_length = sorted(pieces, key=lambda piece: piece.n_tokens)
    lengths = [piece.n_tokens for piece in by_length]
    if lengths[0] == lengths[-1]:
        first_query = pieces[0].query
        last_query = pieces[-1].query
        queries: Selection = slice(first_query, last_query + 1)
        if last_query - first_query + 1 != len(pieces):  # queries without tokens are between them
            queries = torch.tensor([piece.query for piece in pieces], device=device)
        yield SumGroup(queries, len(pieces), columns=None, padding=None)
        return
    table = torch.tensor(by_length, device=device)  # [pieces, fields of QueryPiece]
    for first, last in similar_lengths(lengths, 0, QUERY_EIGHTHS, sum(lengths)):
        queries, first_tokens, sizes = table[first:last].unbind(dim=1)
        positions = torch.arange(lengths[last - 1], device=device)
        first_columns = first_tokens - pieces[0].first_token
        columns = first_columns[:, None] + torch.minimum(positions, sizes[:, None] - 1)
        padding = None if lengths[first] == lengths[last - 1] else positions >= sizes[:, None]
        yield SumGroup(queries, last - first, columns.view(-1), padding)


def similar_lengths(
    lengths: list[int],
    first: int,
    eighths: int,
    elements: int,
) -> Iterator[tuple[int, int]]:
    """Divide rising lengths into runs of similar ones.

    Args:
        lengths: positive lengths, rising.
        first: the position to begin at.
        eighths: the longest length of a run is at most this number of eighths of the shortest.
        elements: bound of the sum of a run, if it has more than one length. All lengths of a run
            count like its shortest one.

    Yields:
        First and last (excluded) position of each run.
    """
    while first < len(lengths):
        end = min(first + max(1, elements // lengths[first]), len(lengths))
        last = bisect_right(lengths, lengths[first] * eighths // 8, lo=first, hi=end)
        yield first, last
        first = last
