"""Winners: the tokens that have the largest logits, as positions."""

from __future__ import annotations

import torch
from torch import Tensor

NO_WINNER_UINT16 = 65535  # the largest value marks "no winner" in uint16, as -1 does in int32
BLOCK_TOKENS = 16  # tokens of a block, whose maxima are computed first


def winner_dtype(length_bound: int) -> torch.dtype:
    """Return the smallest dtype for positions below ``length_bound`` and the mark "no winner"."""
    return torch.uint16 if length_bound <= NO_WINNER_UINT16 else torch.int32


def no_winner(dtype: torch.dtype) -> int:
    """Return the number that is stored if no token can win."""
    return NO_WINNER_UINT16 if dtype == torch.uint16 else -1


def max_over_tokens(values: Tensor) -> Tensor:
    """Compute the ``[n, C]`` maximum over the tokens of each sequence, NaN if a token has NaN.

    Args:
        values: ``[n, L, C]``: sequences, tokens, columns.
    """
    if values.size(1) <= BLOCK_TOKENS:
        return values.amax(dim=1)
    return _block_maxima(values).amax(dim=1)


def max_and_argmax_over_tokens(values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the maximum over the tokens of each sequence, and the position of its token.

    Args:
        values: ``[n, L, C]``: sequences, tokens, columns.

    Returns:
        ``[n, C]`` maxima, NaN if a token has NaN, and the ``[n, C]`` int64 positions of tokens with
        these values.
    """
    if values.size(1) <= BLOCK_TOKENS:
        maxima, positions = values.max(dim=1)
        return maxima, positions
    # Faster than values.max: the maxima of blocks of tokens, then a search in the best block only.
    return _winners_in_blocks(values, _block_maxima(values))


def _block_maxima(values: Tensor) -> Tensor:
    """Return the maximum of each block of ``BLOCK_TOKENS`` tokens, ``[n, blocks, C]``.

    Maxima of blocks, and then of these, take torch a fraction of the time of one maximum over all
    tokens. The last block may be incomplete.

    Args:
        values: ``[n, L, C]``.
    """
    n_sequences, length, n_columns = values.shape
    n_full_blocks = length // BLOCK_TOKENS
    n_in_full_blocks = n_full_blocks * BLOCK_TOKENS
    full_blocks = values[:, :n_in_full_blocks].reshape(
        n_sequences,
        n_full_blocks,
        BLOCK_TOKENS,
        n_columns,
    )
    block_maxima = full_blocks.amax(dim=2)
    if n_in_full_blocks == length:
        return block_maxima
    last_maximum = values[:, n_in_full_blocks:].amax(dim=1, keepdim=True)
    return torch.cat([block_maxima, last_maximum], dim=1)


def _winners_in_blocks(values: Tensor, block_maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Find the token with the largest value of each column, in the block with the largest maximum.

    Args:
        values: ``[n, L, C]``.
        block_maxima: ``[n, blocks, C]``.

    Returns:
        ``[n, C]`` maxima, and ``[n, C]`` int64 positions of winners.
    """
    last_token = values.size(1) - 1
    winning_block = block_maxima.max(dim=1).indices  # [n, C]
    offsets = torch.arange(BLOCK_TOKENS, device=values.device)[None, :, None]
    # The last token is repeated past the end of an incomplete block.
    tokens = (winning_block[:, None] * BLOCK_TOKENS + offsets).clamp_(max=last_token)
    maxima, winning_offset = values.gather(1, tokens).max(dim=1)  # over [n, BLOCK_TOKENS, C]
    winners = (winning_block * BLOCK_TOKENS + winning_offset).clamp_(max=last_token)
    return maxima, winners
