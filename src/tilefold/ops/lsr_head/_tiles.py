"""Tiles of logits: how the tiled path packs a batch, cuts it and the vocabulary, and folds what it
cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.onednn import tile_product
from tilefold.ops._shared.winners import max_over_tokens
from tilefold.ops.lsr_head._problem import Tokens

TILE_ELEMENTS = (
    1 << 22
)  # logits of one tile: 16 MiB in fp32, so that it stays in the last-level cache
BLOCK_V = 4096  # vocabulary entries of a tile


class PackedRows(NamedTuple):
    """Valid tokens ``rows`` ``[T, D]``, ``B + 1`` offsets, and ``places`` ``[T]`` of padded rows,
    ``None`` for all.
    """

    rows: Tensor
    offsets: list[int]
    places: Tensor | None

    def lengths(self) -> Tensor:
        """``[B]`` sequence lengths, at least 1, in the dtype of the rows."""
        return (
            torch.tensor(self.offsets, device=self.rows.device)
            .diff()
            .clamp_(min=1)
            .to(self.rows.dtype)
        )


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products accumulate in: fp32, or fp64 for fp64 input."""
    return torch.promote_types(dtype, torch.float32)


def pack_rows(tokens: Tokens) -> PackedRows:
    """Gather the valid tokens (a copy only where there is padding) in the wide dtype; reads the
    lengths on the host.
    """
    hidden, attention_mask, cu_seqlens = tokens
    rows, places = hidden.reshape(-1, hidden.size(-1)), None
    offsets = [b * tokens.length for b in range(tokens.batch + 1)]
    if cu_seqlens is not None:
        offsets = cu_seqlens.tolist()
    elif attention_mask is not None and not bool((valid := attention_mask != 0).all()):
        places = valid.flatten().nonzero().squeeze(1)
        rows, offsets = rows[places], [0, *valid.sum(dim=1).cumsum(0).tolist()]
    return PackedRows(rows.to(wide_dtype(hidden.dtype)), offsets, places)


class Piece(NamedTuple):
    """Rows ``start`` to ``end`` whose logits share a tile: the sequences ``first`` to ``last``, or
    a part of one.
    """

    first: int
    last: int
    start: int
    end: int


def _pieces(offsets: list[int], max_rows: int) -> list[Piece]:
    """Cut a batch into pieces of at most ``max_rows`` rows: runs of whole sequences, and parts of
    longer ones.
    """
    pieces, first = [], 0
    batch = len(offsets) - 1
    while first < batch:
        last, start = first + 1, offsets[first]
        if offsets[last] - start > max_rows:
            cuts = [*range(start, offsets[last], max_rows), offsets[last]]
            pieces += [Piece(first, last, *cut) for cut in itertools.pairwise(cuts)]
        else:
            while last < batch and offsets[last + 1] - start <= max_rows:
                last += 1
            if offsets[last] > start:
                pieces.append(Piece(first, last, start, offsets[last]))
        first = last
    return pieces


class Run(NamedTuple):
    """Scaled logits ``tokens`` ``[last - first, L, C]`` of sequences, which are rows from ``start``
    on.

    The sequences have one length, or this is the part of one long sequence that begins at its token
    ``before``.
    """

    first: int
    last: int
    start: int
    before: int
    tokens: Tensor


def vocabulary_tiles(
    packed: PackedRows,
    weight: Tensor,
    logit_scale: float,
    by_onednn: bool = False,
) -> Iterator[tuple[slice, Tensor, Iterator[Run]]]:
    """Yield columns, their rows of the weight in the wide dtype, and runs, each overwritten by the
    next.

    Products ``by_onednn``, where it serves, have memory of their own: no gain where all of them are
    written to.
    """
    pieces = _pieces(packed.offsets, TILE_ELEMENTS // BLOCK_V)
    largest = max((piece.end - piece.start for piece in pieces), default=0)
    scratch: list[
        Tensor
    ] = []  # one for all: fresh pages for each tile would cost a sixth of the products' time
    for v0 in range(0, weight.size(0), BLOCK_V):
        tile_weight = weight[v0 : v0 + BLOCK_V].to(packed.rows.dtype)
        columns = slice(v0, v0 + tile_weight.size(0))
        product = tile_product(packed.rows, largest, tile_weight) if by_onednn else None
        if product is None and not scratch:
            scratch.append(packed.rows.new_empty(largest * tile_weight.size(0)))
        yield (
            columns,
            tile_weight,
            _runs(packed, pieces, tile_weight, logit_scale, product, scratch),
        )


def _runs(
    packed: PackedRows,
    pieces: list[Piece],
    tile_weight: Tensor,
    logit_scale: float,
    product: Callable[[Tensor], Tensor] | None,
    scratch: list[Tensor],
) -> Iterator[Run]:
    offsets, width = packed.offsets, tile_weight.size(0)
    for piece in pieces:
        rows = packed.rows[piece.start : piece.end]
        if product is not None:
            logits = product(rows)
        else:
            logits = scratch[0][: rows.size(0) * width].view(rows.size(0), width)
            torch.mm(rows, tile_weight.T, out=logits)
        if logit_scale != 1.0:
            logits *= logit_scale
        i = piece.first
        while i < piece.last:
            length, j = offsets[i + 1] - offsets[i], i + 1
            while j < piece.last and offsets[j + 1] - offsets[j] == length:
                j += 1
            if length:
                start = max(offsets[i], piece.start)
                tokens = logits[start - piece.start : offsets[j] - piece.start].view(
                    j - i,
                    -1,
                    width,
                )
                yield Run(i, j, start, start - offsets[i], tokens)
            i = j


def keep_maximum(scores: Tensor, winners: Tensor | None, tokens: Tensor, before: int) -> None:
    """Put the maximum over ``tokens`` ``[n, L, C]`` into ``scores`` ``[n, C]``, and where it is
    into ``winners``.

    ``before`` tokens of the one sequence were folded already, and win ties; 0 for the first part,
    or wholes.
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
