"""Tiles of logits: how the tiled path cuts a batch and the vocabulary, and folds what it cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.onednn import tile_product
from tilefold.ops._shared.winners import max_over_tokens
from tilefold.ops.lsr_head._problem import PackedRows

TILE_ELEMENTS = 1 << 22  # logits of one tile: 16 MiB in fp32, so that it stays in the last-level cache
BLOCK_V = 4096  # vocabulary entries of a tile


def vocabulary_tiles(
    weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[int, int, Tensor, Tensor | None]]:
    """Yield ``(v0, v1, weight[v0:v1], bias[v0:v1])`` in the compute dtype."""
    for v0 in range(0, weight.size(0), BLOCK_V):
        v1 = min(v0 + BLOCK_V, weight.size(0))
        yield v0, v1, weight[v0:v1].to(dtype), None if bias is None else bias[v0:v1].to(dtype)


class Piece(NamedTuple):
    """Rows ``start`` to ``end`` whose logits share a tile: the sequences ``first`` to ``last``, or a part of one."""

    first: int
    last: int
    start: int
    end: int


def _pieces(offsets: list[int], max_rows: int, max_sequences: int | None = None) -> list[Piece]:
    """Cut a batch into pieces of at most ``max_rows`` rows: runs of whole sequences, and parts of longer ones."""
    pieces, first = [], 0
    batch = len(offsets) - 1
    while first < batch:
        last, start = first + 1, offsets[first]
        if offsets[last] - start > max_rows:
            cuts = [*range(start, offsets[last], max_rows), offsets[last]]
            pieces += [Piece(first, last, *cut) for cut in itertools.pairwise(cuts)]
        else:
            limit = batch if max_sequences is None else min(batch, first + max_sequences)
            while last < limit and offsets[last + 1] - start <= max_rows:
                last += 1
            if offsets[last] > start:
                pieces.append(Piece(first, last, start, offsets[last]))
        first = last
    return pieces


def max_tiles(
    packed: PackedRows, weight: Tensor, logit_scale: float
) -> Iterator[tuple[int, int, int, int, int, Tensor]]:
    """Yield ``(v0, v1, i, j, before, tokens)``: scaled logits ``[j - i, L, v1 - v0]`` of the sequences i to j - 1.

    They have one length, or are the part of one long sequence that begins at its token ``before``. The tile is
    overwritten by the next.
    """
    pieces = _pieces(packed.offsets, TILE_ELEMENTS // BLOCK_V)
    largest = max((piece.end - piece.start for piece in pieces), default=0)
    tile: Tensor | None = None
    for v0, v1, tile_weight, _ in vocabulary_tiles(weight, None, packed.rows.dtype):
        product = tile_product(packed.rows, largest, tile_weight)
        for piece in pieces:
            rows = packed.rows[piece.start : piece.end]
            if product is not None:
                logits = product(rows)
            else:
                if tile is None:  # one for all: fresh pages for each would cost a sixth of the products' time
                    tile = packed.rows.new_empty(largest * min(BLOCK_V, weight.size(0)))
                logits = tile[: rows.size(0) * (v1 - v0)].view(rows.size(0), v1 - v0)
                torch.mm(rows, tile_weight.T, out=logits)
            if logit_scale != 1.0:
                logits *= logit_scale
            for i, j, tokens in _runs_of_one_length(logits, packed.offsets, piece):
                yield v0, v1, i, j, max(0, piece.start - packed.offsets[i]), tokens


def _runs_of_one_length(logits: Tensor, offsets: list[int], piece: Piece) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ``(i, j, tokens)``: rows of ``logits`` that belong to the sequences i to j - 1, ``[j - i, L, BLOCK_V]``."""
    i = piece.first
    while i < piece.last:
        length = offsets[i + 1] - offsets[i]
        j = i + 1
        while j < piece.last and offsets[j + 1] - offsets[j] == length:
            j += 1
        if length:
            rows = logits[max(0, offsets[i] - piece.start) : offsets[j] - piece.start]
            yield i, j, rows.view(j - i, -1, rows.size(1))
        i = j


def sequence_tiles(packed: PackedRows, tile_weight: Tensor, logit_scale: float) -> Iterator[tuple[Piece, Tensor]]:
    """Yield pieces and their scaled logits ``[last - first, L, BLOCK_V]``, of sequences of one length, or of a part.

    Sequences of equal lengths share a product; empty ones are left out. The tile is overwritten by the next.
    """
    width = tile_weight.size(0)
    together = None if packed.uniform_length is not None else 1
    pieces = _pieces(packed.offsets, TILE_ELEMENTS // max(width, 1), together)
    largest = max((piece.end - piece.start for piece in pieces), default=0)
    tile = tile_weight.new_empty(largest, width)
    for piece in pieces:
        logits = tile[: piece.end - piece.start]
        torch.mm(packed.rows[piece.start : piece.end], tile_weight.T, out=logits)
        if logit_scale != 1.0:
            logits *= logit_scale
        yield piece, logits.view(piece.last - piece.first, -1, width)


def keep_maximum(scores: Tensor, winners: Tensor | None, tokens: Tensor, before: int) -> None:
    """Put the maximum over ``tokens`` ``[n, L, C]`` into ``scores`` ``[n, C]``, and where it is into ``winners``.

    Args:
        before: tokens of the one sequence that were folded already, which win ties; 0 for the first part, or wholes.
    """
    best, winner = max_over_tokens(tokens, winners is not None)
    if before == 0:
        scores.copy_(best)
        if winners is not None:
            winners.copy_(winner)
    elif winners is None:
        torch.maximum(scores, best, out=scores)
    else:
        rises = (best > scores) | (best.isnan() & ~scores.isnan())
        scores.copy_(torch.where(rises, best, scores))
        winners.copy_(torch.where(rises, winner + before, winners))
