"""Winning token of a maximum: how it is found, and how it is stored."""

from __future__ import annotations

import torch
from torch import Tensor

# In uint16 the largest value stands for "no winner"; int32 uses -1.
NO_WINNER_UINT16 = 65535
BLOCK_WINNER = 16  # tokens among which the winner is looked for, once their block is known


def winner_dtype(length_bound: int) -> torch.dtype:
    """The smallest dtype that holds a token position below ``length_bound`` and the mark for
    "none".
    """
    return torch.uint16 if length_bound <= NO_WINNER_UINT16 else torch.int32


def no_winner(dtype: torch.dtype) -> int:
    """Value stored where no token can win."""
    return NO_WINNER_UINT16 if dtype == torch.uint16 else -1


def max_over_tokens(values: Tensor, with_winners: bool) -> tuple[Tensor, Tensor]:
    """Maximum over dim 1 of ``[n, L, C]``, and an index that holds it if asked for; NaN if there is
    one.
    """
    length = values.size(1)
    if length <= BLOCK_WINNER:
        best, winner = (
            values.max(dim=1) if with_winners else (values.amax(dim=1), values.new_empty(0))
        )
        return best, winner
    # first blocks of tokens: a maximum over all tokens at once costs several times as much, with
    # indices or without
    whole = length // BLOCK_WINNER
    maxima = (
        values[:, : whole * BLOCK_WINNER]
        .reshape(values.size(0), whole, BLOCK_WINNER, values.size(2))
        .amax(dim=2)
    )
    if whole * BLOCK_WINNER < length:
        maxima = torch.cat(
            [maxima, values[:, whole * BLOCK_WINNER :].amax(dim=1, keepdim=True)],
            dim=1,
        )
    if not with_winners:
        return maxima.amax(dim=1), values.new_empty(0)
    block = maxima.max(dim=1).indices  # [n, C]
    places = torch.arange(BLOCK_WINNER, device=values.device)[None, :, None]
    tokens = (block[:, None] * BLOCK_WINNER + places).clamp_(max=length - 1)  # [n, 16, C]
    best, place = values.gather(1, tokens).max(dim=1)
    return best, (block * BLOCK_WINNER + place).clamp_(max=length - 1)
