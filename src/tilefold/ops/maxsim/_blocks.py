"""Blocks and tiles of similarities, and how their maxima and gradients are accumulated."""

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
    """Document tokens of a tile: ``L`` tokens of ``n`` documents.

    A document with fewer tokens repeats its last one.

    Attributes:
        rows: ``[n, L]`` rows of unmasked tokens.
        exists: ``[n, L]`` bools, false past the end of a document, or ``None`` if all exist.
        span: the rows, if they are consecutive.
        vectors: ``[n, L, D]`` token vectors in fp32 (fp64), scaled, if they were gathered.
    """

    rows: Tensor
    exists: Tensor | None
    span: slice | None
    vectors: Tensor | None

    def vectors_of(self, documents: SequenceTokens) -> Tensor:
        """Return the token vectors ``[n, L, D]`` in fp32, or fp64 for fp64 tokens, scaled."""
        if self.vectors is not None:
            return self.vectors
        if self.span is None:
            return documents.gather(self.rows)
        vectors = documents.vectors(self.span.start, self.span.stop)
        return vectors.view(*self.rows.shape, vectors.size(1))


class Tile(NamedTuple):
    """Similarities of some documents of a block, or of a part of long documents.

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
            Tensors ``[n, C]`` for ``n`` documents of the tile and ``C`` query tokens.
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
        query_vectors: ``[C, D]`` if all documents share the query tokens, else ``[n, C, D]``.
        is_split: whether the documents are too long for one tile. Each tile is then a part of all
            documents. Otherwise each tile has some of the documents, with all their tokens.
        tiles: computes the tiles, in the order of the parts or of the documents.
    """

    documents: Selection
    query_vectors: Tensor
    is_split: bool
    tiles: Callable[[], Iterator[Tile]]

    def accumulate(self, accumulation: Accumulation) -> tuple[Tensor, ...]:
        """Reduce all tiles over their document tokens, and combine the results.

        Returns:
            Tensors ``[n, C]`` for ``n`` documents of the block and ``C`` query tokens.
        """
        results = [accumulation.reduce(tile) for tile in self.tiles()]
        if self.is_split:  # tiles are parts of the same documents
            return reduce(accumulation.merge, results)
        if len(results) == 1:  # torch.cat would copy it
            return results[0]
        return tuple(torch.cat(tensors) for tensors in zip(*results, strict=True))

    def add_scores(self, maxima: Tensor, scores: Tensor) -> None:
        """Add the maxima ``[n, C]``, summed over the tokens of each query, to ``scores``."""
        raise NotImplementedError

    def save(self, values: Tensor, saved: Tensor) -> None:
        """Write winners or smooth maxima ``[n, C]`` to the matrix that backward reads."""
        raise NotImplementedError

    def gradient_of_maxima(self, grad: Tensor) -> Tensor:
        """Return for each maximum ``[n, C]`` the gradient of the score that it is added to.

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
        """Add the gradient of the block's ``C`` query tokens that comes from one tile.

        Args:
            dsimilarities: ``[n, L, C]`` gradient of the tile's similarities.
            document_vectors: ``[n, L, D]`` document tokens of the tile.
            dqueries: ``[Tq, D]`` gradient of all query tokens, to which this is added.
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

    def save(self, values: Tensor, saved: Tensor) -> None:
        """Write winners or smooth maxima ``[n, C]`` to the saved matrix ``[Nd, Tq]``."""
        saved[cross_index(self.documents, self.query_block.rows)] = values

    def gradient_of_maxima(self, grad: Tensor) -> Tensor:
        """Select the gradients of the maxima ``[n, C]`` from those of the scores ``[Nq, Nd]``."""
        query_of_column = self.query_block.queries.sequence_of_row[self.query_block.rows]
        return grad.T[self.documents][:, query_of_column]

    def add_query_gradient(
        self,
        dsimilarities: Tensor,
        document_vectors: Tensor,
        dqueries: Tensor,
    ) -> None:
        """Add the gradient of the ``C`` query tokens, summed over the tile's document tokens."""
        gradient = dsimilarities.flatten(0, 1).T @ document_vectors.flatten(0, 1)
        dqueries[self.query_block.rows] += gradient


@dataclass(frozen=True, kw_only=True)
class ListedPairsBlock(Block):
    """Aligned, grouped or listed pairs: documents and the query that each is scored with.

    Attributes:
        problem: tensors and options of the call.
        pairs: ``[n]`` positions of the pairs.
        query_rows: ``[n, C]`` rows of the query tokens. A query with fewer tokens repeats its last
            one.
        query_exists: ``[n, C]`` bools, false past the end of a query, or ``None`` if all exist.
        first_query_rows: ``[n]`` first row of each pair's query.
    """

    problem: Problem
    pairs: Tensor
    query_rows: Tensor
    query_exists: Tensor | None
    first_query_rows: Tensor

    def add_scores(self, maxima: Tensor, scores: Tensor) -> None:
        """Add the maxima ``[n, C]`` of each pair, summed over its query tokens, to its score."""
        if self.query_exists is not None:
            maxima = maxima.masked_fill(~self.query_exists, 0)
        scores.view(-1)[self.pairs] += maxima.sum(dim=1)

    def save(self, values: Tensor, saved: Tensor) -> None:
        """Write winners or smooth maxima ``[n, C]`` to the matrix that backward reads.

        Values past the end of a query are not written.
        """
        positions = saved_positions(
            self.problem,
            pairs=self.pairs[:, None],
            query_rows=self.query_rows,
            first_query_rows=self.first_query_rows[:, None],
        )
        if self.query_exists is not None:
            positions = positions[self.query_exists]
            values = values[self.query_exists]
        saved.view(-1)[positions] = values

    def gradient_of_maxima(self, grad: Tensor) -> Tensor:
        """Repeat the gradient of each pair's score ``[n, C]``, with 0 past the end of a query."""
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
        """Add the gradients of the pairs' query tokens, summed over the tile's document tokens."""
        pairs_share_query = self.query_vectors.dim() == 2
        if pairs_share_query:
            # one product also sums over the pairs; all lines of query_rows are equal
            gradient = dsimilarities.flatten(0, 1).T @ document_vectors.flatten(0, 1)
            dqueries[self.query_rows[0]] += gradient
            return
        add_existing_rows(
            dqueries,
            self.query_rows,
            self.query_exists,
            dsimilarities.mT @ document_vectors,
            rows_are_unique=False,
        )


def add_existing_rows(
    out: Tensor,
    rows: Tensor,
    exists: Tensor | None,
    values: Tensor,
    *,
    rows_are_unique: bool,
) -> None:
    """Compute ``out[rows] += values`` for the tokens that are not past the end of a sequence.

    Args:
        out: ``[T, D]``.
        rows: ``[n, L]`` rows of ``out``.
        exists: ``[n, L]`` bools, false past the end of a sequence, or ``None`` if all exist.
        values: ``[n, L, D]``.
        rows_are_unique: whether no existing row occurs twice.
    """
    if exists is None:
        rows = rows.view(-1)
        values = values.flatten(0, 1)
    else:
        rows = rows[exists]
        values = values[exists]
    if rows_are_unique:
        out[rows] += values
    else:
        add_rows(out, values, rows)
