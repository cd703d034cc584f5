"""Blocks and tiles of similarities, and what the tiled path computes from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilefold.ops.maxsim._problem import Problem, saved_positions
from tilefold.ops.maxsim._query_blocks import QueryBlock, Selection, cross_index
from tilefold.ops.maxsim.tiles import SequenceTokens, add_rows


class TileTokens(NamedTuple):
    """Document tokens of a tile.

    Attributes:
        rows: ``[n, L]`` rows. All are unmasked.
        exists: ``[n, L]`` bools, false past the end of a document, or ``None`` if all exist.
        span: the rows, if they are consecutive.
        vectors: ``[n, L, D]`` token vectors in fp32 (fp64), scaled, if they were gathered.
    """

    rows: Tensor
    exists: Tensor | None
    span: slice | None
    vectors: Tensor | None

    def vectors_of(self, documents: SequenceTokens) -> Tensor:
        """Return the token vectors ``[n, L, D]`` in fp32 (fp64), scaled."""
        if self.vectors is not None:
            return self.vectors
        if self.span is None:
            return documents.gather(self.rows)
        vectors = documents.vectors(self.span.start, self.span.stop)
        return vectors.view(*self.rows.shape, vectors.size(1))


class Tile(NamedTuple):
    """Similarities of some documents of a block, or of some tokens of its only document.

    Attributes:
        documents: positions of the ``n`` documents in the block.
        tokens: the document tokens.
        similarities: ``[n, L, C]``; the receiver may change them in place.
    """

    documents: slice
    tokens: TileTokens
    similarities: Tensor


class Accumulation(Protocol):
    """A reduction of similarities over the tokens of each document, one tile after another."""

    def reduce(self, tile: Tile) -> tuple[Tensor, ...]:
        """Reduce a tile over its document tokens.

        Returns:
            Tensors of ``[n, C]``: documents of the tile, query tokens.
        """

    def merge(
        self,
        earlier: tuple[Tensor, ...],
        later: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Combine the results for some tokens of a document with those for later tokens."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Documents that have tokens, and the query tokens that they are scored with.

    Attributes:
        documents: the ``n`` documents.
        query_vectors: ``[C, D]`` if all documents share them, else ``[n, C, D]``.
        is_split: whether the documents are too long for one tile. All tiles are then parts of the
            same documents.
        tiles: makes the tiles, in the order of the documents, or of their tokens.
    """

    documents: Selection
    query_vectors: Tensor
    is_split: bool
    tiles: Callable[[], Iterator[Tile]]

    def accumulate(self, accumulation: Accumulation) -> tuple[Tensor, ...]:
        """Reduce all tiles, and combine the results.

        Returns:
            Tensors of ``[n, C]``: documents of the block, query tokens.
        """
        results = [accumulation.reduce(tile) for tile in self.tiles()]
        if self.is_split:
            return reduce(accumulation.merge, results)
        if len(results) == 1:
            return results[0]
        return tuple(torch.cat(tensors) for tensors in zip(*results, strict=True))

    def add_scores(self, maxima: Tensor, scores: Tensor) -> None:
        """Add the maxima ``[n, C]``, summed over the tokens of each query, to ``scores``."""
        raise NotImplementedError

    def save(self, state: Tensor, saved: Tensor) -> None:
        """Write winners or smooth maxima ``[n, C]`` to the matrix that backward reads."""
        raise NotImplementedError

    def gradient_of_maxima(self, grad: Tensor) -> Tensor:
        """Return the ``[n, C]`` gradient of the maxima: that of the scores that they are part of.

        Args:
            grad: gradient of the scores, in their shape.
        """
        raise NotImplementedError

    def add_query_gradient(
        self,
        dsimilarities: Tensor,
        document_vectors: Tensor,
        dqueries: Tensor,
    ) -> None:
        """Add the gradient of the query tokens from one tile.

        Args:
            dsimilarities: ``[n, L, C]`` gradient of the tile's similarities.
            document_vectors: ``[n, L, D]``.
            dqueries: ``[Tq, D]``, to which the gradient is added.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AllPairsBlock(Block):
    """Documents that are all scored with the same query tokens.

    Attributes:
        query_block: the query tokens.
    """

    query_block: QueryBlock

    def add_scores(self, maxima: Tensor, scores: Tensor) -> None:
        """Add the maxima ``[n, C]``, summed by query, to the scores ``[Nq, Nd]``."""
        self.query_block.add_sums(maxima, scores, self.documents)

    def save(self, state: Tensor, saved: Tensor) -> None:
        """Write winners or smooth maxima ``[n, C]`` to the saved matrix ``[Nd, Tq]``."""
        saved[cross_index(self.documents, self.query_block.rows)] = state

    def gradient_of_maxima(self, grad: Tensor) -> Tensor:
        """Select the gradients ``[n, C]`` of the maxima from ``grad``, ``[Nq, Nd]``."""
        query_of_column = self.query_block.queries.sequence_of_row[self.query_block.rows]
        return grad.T[self.documents][:, query_of_column]

    def add_query_gradient(
        self,
        dsimilarities: Tensor,
        document_vectors: Tensor,
        dqueries: Tensor,
    ) -> None:
        """Add the gradient of the shared query tokens ``[C, D]``, summed over the tile."""
        gradient = dsimilarities.flatten(0, 1).T @ document_vectors.flatten(0, 1)
        dqueries[self.query_block.rows] += gradient


@dataclass(frozen=True, kw_only=True)
class ListedPairsBlock(Block):
    """Aligned, grouped or listed pairs: documents and the query that each is scored with.

    Attributes:
        problem: the problem.
        pairs: ``[n]`` numbers of the pairs.
        query_rows: ``[n, C]`` rows of the query tokens.
        query_exists: ``[n, C]`` bools, false past the end of a query, or ``None`` if all exist.
        first_query_rows: ``[n]`` first row of each pair's query.
    """

    problem: Problem
    pairs: Tensor
    query_rows: Tensor
    query_exists: Tensor | None
    first_query_rows: Tensor

    def add_scores(self, maxima: Tensor, scores: Tensor) -> None:
        """Add the maxima ``[n, C]`` of every pair, summed over its query, to its score."""
        if self.query_exists is not None:
            maxima = maxima.masked_fill(~self.query_exists, 0)
        scores.view(-1)[self.pairs] += maxima.sum(dim=1)

    def save(self, state: Tensor, saved: Tensor) -> None:
        """Write winners or smooth maxima ``[n, C]`` of the query tokens that exist."""
        positions = saved_positions(
            self.problem,
            self.pairs[:, None],
            self.query_rows,
            self.first_query_rows[:, None],
        )
        if self.query_exists is not None:
            positions = positions[self.query_exists]
            state = state[self.query_exists]
        saved.view(-1)[positions] = state

    def gradient_of_maxima(self, grad: Tensor) -> Tensor:
        """Expand the gradients of the pairs' scores to ``[n, C]``, 0 past the end of a query."""
        dmaxima = grad.reshape(-1)[self.pairs][:, None].expand(self.query_rows.shape)
        if self.query_exists is not None:
            dmaxima = dmaxima.masked_fill(~self.query_exists, 0)
        return dmaxima

    def add_query_gradient(
        self,
        dsimilarities: Tensor,
        document_vectors: Tensor,
        dqueries: Tensor,
    ) -> None:
        """Add the gradients of the pairs' query tokens, summed if all pairs share one query."""
        pairs_share_query = self.query_vectors.dim() == 2
        if pairs_share_query:
            gradient = dsimilarities.flatten(0, 1).T @ document_vectors.flatten(0, 1)
            dqueries[self.query_rows[0]] += gradient
            return
        add_existing_rows(
            dqueries,
            self.query_rows,
            self.query_exists,
            dsimilarities.mT @ document_vectors,
            rows_differ=False,
        )


def add_existing_rows(
    out: Tensor,
    rows: Tensor,
    exists: Tensor | None,
    values: Tensor,
    *,
    rows_differ: bool,
) -> None:
    """Compute ``out[rows] += values`` for the tokens that exist.

    Args:
        out: ``[T, D]``.
        rows: ``[n, L]`` rows of ``out``.
        exists: ``[n, L]`` bools, or ``None`` if all tokens exist.
        values: ``[n, L, D]``.
        rows_differ: whether no row occurs twice.
    """
    if exists is None:
        rows = rows.view(-1)
        values = values.flatten(0, 1)
    else:
        rows = rows[exists]
        values = values[exists]
    if rows_differ:
        out[rows] += values
    else:
        add_rows(out, values, rows)
