"""Tiles of logits for the tiled path: packed rows, their division, and running maxima."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.onednn import tile_product
from tilefold.ops._shared.winners import max_over_tokens
from tilefold.ops.lsr_head._problem import Tokens

# Logits of one tile: 16 MiB in fp32, so that it stays in the last-level cache.
TILE_ELEMENTS = 1 << 22
BLOCK_V = 4096  # vocabulary columns of a tile


class PackedRows(NamedTuple):
    """The valid tokens of a batch.

    Attributes:
        rows: ``[T, D]`` token states in the accumulators' dtype.
        offsets: ``B + 1`` offsets of the sequences.
        positions: ``[T]`` rows of the padded input, or ``None`` if all its rows are valid.
    """

    rows: Tensor
    offsets: list[int]
    positions: Tensor | None

    def lengths(self) -> Tensor:
        """Return ``[B]`` lengths of the sequences, at least 1, in the dtype of the rows."""
        offsets = torch.tensor(self.offsets, device=self.rows.device)
        return offsets.diff().clamp_(min=1).to(self.rows.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype that products accumulate in: fp32, or fp64 for fp64 input."""
    return torch.promote_types(dtype, torch.float32)


def pack_rows(tokens: Tokens) -> PackedRows:
    """Gather the valid tokens of padded or packed input, one sequence after another.

    Rows are copied only if there is padding, or if their dtype is not that of the accumulators. The
    offsets are read on the CPU, which waits for a GPU.
    """
    hidden = tokens.hidden
    rows = hidden.reshape(-1, hidden.size(-1))
    positions = None
    if tokens.cu_seqlens is not None:
        offsets = tokens.cu_seqlens.tolist()
    else:
        offsets = [sequence * tokens.length for sequence in range(tokens.batch + 1)]
        valid = None if tokens.attention_mask is None else tokens.attention_mask != 0
        if valid is not None and not bool(valid.all()):
            positions = valid.flatten().nonzero().squeeze(1)
            rows = rows[positions]
            offsets = [0, *valid.sum(dim=1).cumsum(0).tolist()]
    return PackedRows(rows.to(wide_dtype(hidden.dtype)), offsets, positions)


class Piece(NamedTuple):
    """Rows whose logits share a tile: several sequences, or a part of a long one.

    Attributes:
        first: the first sequence.
        last: the sequence after the last one.
        start: the first row.
        end: the row after the last one.
    """

    first: int
    last: int
    start: int
    end: int


def _pieces(offsets: list[int], max_rows: int) -> list[Piece]:
    """Divide a batch into pieces of at most ``max_rows`` rows.

    A piece has consecutive sequences, or a part of a sequence with more than ``max_rows`` rows.
    Sequences without rows have no piece of their own.
    """
    pieces: list[Piece] = []
    batch = len(offsets) - 1
    first = 0
    while first < batch:
        start = offsets[first]
        last = first + 1
        if offsets[last] - start > max_rows:
            bounds = [*range(start, offsets[last], max_rows), offsets[last]]
            pieces += [
                Piece(first, last, part_start, part_end)
                for part_start, part_end in itertools.pairwise(bounds)
            ]
        else:
            while last < batch and offsets[last + 1] - start <= max_rows:
                last += 1
            if offsets[last] > start:
                pieces.append(Piece(first, last, start, offsets[last]))
        first = last
    return pieces


class Run(NamedTuple):
    """Scaled logits of consecutive sequences of one length, or of a part of a long sequence.

    Attributes:
        first: the first sequence.
        last: the sequence after the last one.
        start: packed row of the first logits.
        before: tokens of the long sequence that come before this part, else 0.
        logits: ``[last - first, L, C]``: sequences, tokens, vocabulary columns.
    """

    first: int
    last: int
    start: int
    before: int
    logits: Tensor


def vocabulary_tiles(
    packed: PackedRows,
    weight: Tensor,
    logit_scale: float,
    by_onednn: bool = False,
) -> Iterator[tuple[slice, Tensor, Iterator[Run]]]:
    """Yield the logits of a batch, one block of the vocabulary at a time.

    Args:
        packed: the valid tokens.
        weight: ``[V, D]``.
        logit_scale: factor of the products.
        by_onednn: whether oneDNN may compute the products. They are then newly allocated, which is
            slower if every product is written to.

    Yields:
        Columns of the block, their rows of the weight in the accumulators' dtype, and runs of
        logits. The next run overwrites the logits.
    """
    pieces = _pieces(packed.offsets, TILE_ELEMENTS // BLOCK_V)
    largest = max((piece.end - piece.start for piece in pieces), default=0)
    # All tiles share their memory: new pages for each would take a sixth of the products' time.
    scratch: Tensor | None = None
    for first_column in range(0, weight.size(0), BLOCK_V):
        tile_weight = weight[first_column : first_column + BLOCK_V].to(packed.rows.dtype)
        width = tile_weight.size(0)
        columns = slice(first_column, first_column + width)
        product = tile_product(packed.rows, largest, tile_weight) if by_onednn else None
        if product is None:
            if scratch is None:
                scratch = packed.rows.new_empty(largest * width)
            product = _product_into(scratch, tile_weight)
        yield columns, tile_weight, _runs(packed, pieces, width, logit_scale, product)


def _product_into(scratch: Tensor, tile_weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that computes ``rows @ tile_weight.T`` in the memory of ``scratch``."""
    width = tile_weight.size(0)

    def product(rows: Tensor) -> Tensor:
        logits = scratch[: rows.size(0) * width].view(rows.size(0), width)
        return torch.mm(rows, tile_weight.T, out=logits)

    return product


def _runs(
    packed: PackedRows,
    pieces: list[Piece],
    width: int,
    logit_scale: float,
    product: Callable[[Tensor], Tensor],
) -> Iterator[Run]:
    """Yield the logits of one block of the vocabulary, for all sequences.

    A piece of rows is multiplied at once. Neighbours of one length in it are a single run, whose
    logits can be viewed as ``[sequences, tokens, columns]``.

    Args:
        packed: the valid tokens.
        pieces: division of the tokens.
        width: columns of the block.
        logit_scale: factor of the products.
        product: computes the products of rows and the block's weight.
    """
    offsets = packed.offsets
    for piece in pieces:
        logits = product(packed.rows[piece.start : piece.end])
        if logit_scale != 1.0:
            logits *= logit_scale
        first = piece.first
        while first < piece.last:
            length = offsets[first + 1] - offsets[first]
            last = first + 1
            while last < piece.last and offsets[last + 1] - offsets[last] == length:
                last += 1
            if length:
                start = max(offsets[first], piece.start)
                run_logits = logits[start - piece.start : offsets[last] - piece.start]
                yield Run(
                    first=first,
                    last=last,
                    start=start,
                    before=start - offsets[first],
                    logits=run_logits.view(last - first, -1, width),
                )
            first = last


def update_maximum(scores: Tensor, winners: Tensor | None, logits: Tensor, before: int) -> None:
    """Update the maxima over tokens, and their winners, in place with further logits.

    Args:
        scores: ``[n, C]`` maxima, not yet written if ``before`` is 0.
        winners: ``[n, C]`` tokens that have them, or ``None``.
        logits: ``[n, L, C]`` logits of the tokens.
        before: tokens of a long sequence whose maxima ``scores`` has. They win ties.
    """
    maxima, tokens = max_over_tokens(logits, winners is not None)
    if before == 0:
        scores.copy_(maxima)
        if winners is not None:
            winners.copy_(tokens)
    elif winners is None:
        torch.maximum(scores, maxima, out=scores)
    else:
        is_larger = (maxima > scores) | (maxima.isnan() & ~scores.isnan())
        scores.copy_(torch.where(is_larger, maxima, scores))
        winners.copy_(torch.where(is_larger, tokens + before, winners))
