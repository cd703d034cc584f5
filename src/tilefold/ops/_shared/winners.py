"""Winners: the tokens that have the largest logits, as positions."""

from __future__ import annotations

import torch
from torch import Tensor

NO_WINNER_UINT16 = 65535  # the largest value marks "no winner" in uint16, as -1 does in int32
BLOCK_WINNER = 16  # tokens of a block: the winner's block is determined first, then the winner


def winner_dtype(length_bound: int) -> torch.dtype:
    """The smallest dtype for positions below ``length_bound`` and the mark "no winner"."""
    return torch.uint16 if length_bound <= NO_WINNER_UINT16 else torch.int32


def no_winner(dtype: torch.dtype) -> int:
    """Value stored where no token can win."""
    return NO_WINNER_UINT16 if dtype == torch.uint16 else -1


def max_over_tokens(values: Tensor, with_winners: bool) -> tuple[Tensor, Tensor]:
    """Compute the maximum over the tokens of each sequence, and a token that has it.

    Long sequences are divided into blocks of tokens. The winner is then searched only in the block
    with the largest maximum.

    Args:
        values: ``[n, L, C]``: sequences, tokens, columns.
        with_winners: whether the winners are needed.

    Returns:
        ``[n, C]`` maxima, NaN where a token has NaN, and ``[n, C]`` int64 positions of winners, or
        an empty tensor without winners.
    """
    length = values.size(1)
    if length <= BLOCK_WINNER:
        if not with_winners:
            return values.amax(dim=1), values.new_empty(0)
        maxima, winners = values.max(dim=1)
        return maxima, winners
    # Blocks of tokens come first: a maximum over all tokens at once takes several times as long,
    # with indices or without.
    n_full_blocks = length // BLOCK_WINNER
    n_blocked = n_full_blocks * BLOCK_WINNER  # tokens of full blocks
    block_maxima = (
        values[:, :n_blocked]
        .reshape(values.size(0), n_full_blocks, BLOCK_WINNER, values.size(2))
        .amax(dim=2)
    )
    if n_blocked < length:
        incomplete_block_maximum = values[:, n_blocked:].amax(dim=1, keepdim=True)
        block_maxima = torch.cat([block_maxima, incomplete_block_maximum], dim=1)
    if not with_winners:
        return block_maxima.amax(dim=1), values.new_empty(0)
    winning_block = block_maxima.max(dim=1).indices  # [n, C]
    offsets = torch.arange(BLOCK_WINNER, device=values.device)[None, :, None]
    tokens = (winning_block[:, None] * BLOCK_WINNER + offsets).clamp_(max=length - 1)  # [n, 16, C]
    maxima, winning_offset = values.gather(1, tokens).max(dim=1)
    # Past the end of an incomplete block its last token was repeated.
    winners = (winning_block * BLOCK_WINNER + winning_offset).clamp_(max=length - 1)
    return maxima, winners
