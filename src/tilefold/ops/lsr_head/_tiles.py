"""Tiles of logits for the tiled path: packed rows, their division, and running maxima."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.onednn import fast_product
from tilefold.ops._shared.row_groups import grouped_product, is_row_grouping_enabled
from tilefold.ops._shared.winners import max_and_argmax_over_tokens, max_over_tokens
from tilefold.ops.lsr_head._problem import Tokens

# Logits of one tile: 16 MiB in fp32, so that it stays in the last-level cache.
TILE_ELEMENTS = 1 << 22
BLOCK_V = 4096  # vocabulary columns of a tile


class PackedRows(NamedTuple):
    """The valid tokens of a batch, one sequence after another.

    Attributes:
        rows: ``[T, D]`` token states in the accumulators' dtype.
        offsets: ``B + 1`` first rows of the sequences, and T.
        positions: ``[T]`` row of each token in the padded input, flattened to ``[B * S, D]``;
            ``None`` if all its rows are valid, or if the input is packed.
    """

    rows: Tensor
    offsets: list[int]
    positions: Tensor | None

    def lengths(self) -> Tensor:
        """Return ``[B]`` lengths of the sequences, at least 1, in the dtype of the rows."""
        offsets = torch.tensor(self.offsets, device=self.rows.device)
        return offsets.diff().clamp_(min=1).to(self.rows.dtype)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that products accumulate in: fp32, or fp64 for fp64 input."""
    return torch.promote_types(dtype, torch.float32)


def pack_rows(tokens: Tokens) -> PackedRows:
    """Gather the valid tokens of padded or packed input, one sequence after another.

    Rows are copied only if there is padding, or if they are not in fp32 or fp64. Offsets are
    returned as a Python list, so this synchronises with a GPU.
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
    """Packed rows whose logits are computed at once: whole sequences, or a part of a long one.

    Attributes:
        first_sequence: the first sequence.
        end_sequence: the sequence after the last one.
        start_row: the first packed row.
        end_row: the row after the last one.
    """

    first_sequence: int
    end_sequence: int
    start_row: int
    end_row: int


def _divide_into_pieces(offsets: list[int], max_rows: int) -> list[Piece]:
    """Divide a batch into pieces of at most ``max_rows`` rows.

    A piece holds whole consecutive sequences, or a part of one sequence that is longer than
    ``max_rows``. Sequences without rows have no piece of their own.

    Args:
        offsets: ``B + 1`` first packed rows of the sequences, and the number of rows.
        max_rows: maximum number of rows of a piece.
    """
    pieces: list[Piece] = []
    batch = len(offsets) - 1
    first = 0
    while first < batch:
        start_row = offsets[first]
        end = first + 1
        if offsets[end] - start_row > max_rows:  # a long sequence
            bounds = [*range(start_row, offsets[end], max_rows), offsets[end]]
            pieces += [
                Piece(first, end, part_start, part_end)
                for part_start, part_end in itertools.pairwise(bounds)
            ]
        else:
            while end < batch and offsets[end + 1] - start_row <= max_rows:
                end += 1
            if offsets[end] > start_row:
                pieces.append(Piece(first, end, start_row, offsets[end]))
        first = end
    return pieces


class Run(NamedTuple):
    """Scaled logits of adjacent sequences of equal length, or of a part of a long sequence.

    Attributes:
        first_sequence: the first sequence.
        end_sequence: the sequence after the last one.
        start_row: packed row of the first logits.
        n_before: tokens of the long sequence that come before this part, else 0.
        logits: ``[n, L, C]``: sequences, tokens, vocabulary columns.
    """

    first_sequence: int
    end_sequence: int
    start_row: int
    n_before: int
    logits: Tensor


class VocabularyTile(NamedTuple):
    """A block of the vocabulary, and its logits.

    Attributes:
        columns: columns of the block.
        weight: ``[C, D]`` their rows of the weight, in the accumulators' dtype.
        runs: logits of all sequences. Runs are computed one by one, and the logits of the next one
            may overwrite those of the last.
    """

    columns: slice
    weight: Tensor
    runs: Iterator[Run]


def vocabulary_tiles(
    packed: PackedRows,
    weight: Tensor,
    logit_scale: float,
    by_onednn: bool = False,
) -> Iterator[VocabularyTile]:
    """Yield the logits of a batch, one block of the vocabulary at a time.

    Args:
        packed: the valid tokens.
        weight: ``[V, D]``.
        logit_scale: factor of the products.
        by_onednn: whether oneDNN may compute the products on a CPU. It allocates memory for each
            product, which costs more than it saves if the caller writes to every logit.
    """
    pieces = _divide_into_pieces(packed.offsets, max_rows=TILE_ELEMENTS // BLOCK_V)
    max_rows = max((piece.end_row - piece.start_row for piece in pieces), default=0)
    # All products of torch share their memory: new pages for each would take a sixth of their time.
    scratch: Tensor | None = None
    for first_column in range(0, weight.size(0), BLOCK_V):
        tile_weight = weight[first_column : first_column + BLOCK_V].to(packed.rows.dtype)
        width = tile_weight.size(0)
        product: Callable[[Tensor], Tensor] | None = None
        if is_row_grouping_enabled():  # the caller needs equal bits for any batch
            product = functools.partial(grouped_product, weight=tile_weight)
        elif by_onednn:
            product = fast_product(packed.rows, max_rows, tile_weight)
        if product is None:
            if scratch is None:
                scratch = packed.rows.new_empty(max_rows * width)
            product = _product_into(scratch, tile_weight)
        yield VocabularyTile(
            columns=slice(first_column, first_column + width),
            weight=tile_weight,
            runs=_runs(packed, pieces, width, logit_scale, product),
        )


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
    """Yield the logits of one block of the vocabulary, in runs of sequences of equal length.

    A run is a group of consecutive sequences. Because they have equal lengths, their logits can be
    viewed as ``[sequences, tokens, columns]``.

    Args:
        packed: the hidden states of the tokens that are not padding, in rows.
        pieces: division of the rows. Each piece is multiplied at once.
        width: columns of the block.
        logit_scale: factor of the products.
        product: computes the matrix product of rows and the block's weight.
    """
    for piece in pieces:
        logits = product(packed.rows[piece.start_row : piece.end_row])
        if logit_scale != 1.0:
            logits *= logit_scale
        for first, end in _equal_lengths(packed.offsets, piece):
            # If a piece holds a part of a long sequence, the run is this part. It may begin after
            # the sequence's first row. It ends with the piece, because a slice does not go beyond
            # the end of its tensor.
            start_row = max(packed.offsets[first], piece.start_row)
            first_logit = start_row - piece.start_row
            run_logits = logits[first_logit : packed.offsets[end] - piece.start_row]
            yield Run(
                first_sequence=first,
                end_sequence=end,
                start_row=start_row,
                n_before=start_row - packed.offsets[first],
                logits=run_logits.view(end - first, -1, width),
            )


def _equal_lengths(offsets: list[int], piece: Piece) -> Iterator[tuple[int, int]]:
    """Yield the first and the end of each range of adjacent sequences of equal length, not 0.

    The logits of such a range can be viewed as ``[sequences, tokens, columns]``.

    Args:
        offsets: the first row of each sequence, and the end of the last one.
        piece: packed rows that are multiplied at once: the sequences that are divided into ranges.
    """
    first = piece.first_sequence
    while first < piece.end_sequence:
        length = offsets[first + 1] - offsets[first]
        end = first + 1
        while end < piece.end_sequence and offsets[end + 1] - offsets[end] == length:
            end += 1
        if length:
            yield first, end
        first = end


def update_maximum(
    maxima: Tensor,
    winners: Tensor | None,
    logits: Tensor,
    n_before: int,
) -> None:
    """Update maxima over tokens, and the positions of their tokens, by the logits of more tokens.

    Args:
        maxima: ``[n, C]``, updated in place; not yet written if ``n_before`` is 0.
        winners: ``[n, C]`` positions of the tokens with the maxima, updated in place, or ``None``.
        logits: ``[n, L, C]`` logits of the next tokens of the n sequences.
        n_before: number of tokens that ``maxima`` already covers. Ties keep the earlier winner.
    """
    if winners is None:
        new_maxima = max_over_tokens(logits)
        if n_before == 0:
            maxima.copy_(new_maxima)
        else:
            torch.maximum(maxima, new_maxima, out=maxima)
        return
    new_maxima, new_positions = max_and_argmax_over_tokens(logits)
    if n_before == 0:
        maxima.copy_(new_maxima)
        winners.copy_(new_positions)
    else:
        # The first NaN wins.
        is_larger = (new_maxima > maxima) | (new_maxima.isnan() & ~maxima.isnan())
        maxima.copy_(torch.where(is_larger, new_maxima, maxima))
        winners.copy_(torch.where(is_larger, new_positions + n_before, winners))
