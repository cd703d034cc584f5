"""Which tokens count and where they lie: padded ``[B, S]`` and packed ``[T]`` input, and what is wrong with either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def batch_size(weights: Tensor, cu_seqlens: Tensor | None) -> int:
    """Number of sequences of padded ``[B, S]`` or packed ``[T]`` weights."""
    return weights.size(0) if cu_seqlens is None else cu_seqlens.numel() - 1


def valid_tokens(input_ids: Tensor, attention_mask: Tensor | None, ignore_ids: Sequence[int]) -> Tensor:
    """Bool, like ``input_ids``: tokens that are neither masked nor ignored."""
    valid = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask != 0
    if ignore_ids:
        valid = valid & ~torch.isin(input_ids, torch.tensor(list(ignore_ids), device=input_ids.device))
    return valid


def sequence_of_tokens(input_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Int64, like ``input_ids``: the sequence that each token belongs to."""
    if cu_seqlens is None:
        return torch.arange(input_ids.size(0), device=input_ids.device)[:, None].expand_as(input_ids)
    tokens = torch.arange(input_ids.size(0), device=input_ids.device)
    return torch.searchsorted(cu_seqlens[1:].long().contiguous(), tokens, right=True)


def check_cu_seqlens(cu_seqlens: Tensor, tokens: int) -> None:
    """Check the values of ``cu_seqlens`` on the host.

    Raises:
        ValueError: unless it starts with 0, never falls, and ends at the number of tokens.
    """
    values = cu_seqlens.tolist()
    falls = next((i for i in range(1, len(values)) if values[i] < values[i - 1]), None)
    if values[0] != 0:
        problem = f"cu_seqlens[0] = {values[0]}"
    elif falls is not None:
        problem = f"cu_seqlens[{falls}] = {values[falls]} after {values[falls - 1]}"
    elif values[-1] != tokens:
        problem = f"cu_seqlens[-1] = {values[-1]} with {tokens} tokens in weights"
    else:
        return
    raise ValueError(
        f"cu_seqlens must start with 0, never fall and end at the number of tokens T of weights, got {problem}; "
        "build it as the cumulative sum of the sequence lengths with a 0 in front."
    )


def check_ids(input_ids: Tensor, valid: Tensor, vocab_size: int) -> None:
    """Check the ids of valid tokens on the host.

    Raises:
        ValueError: for one outside of the vocabulary.
    """
    outside = valid & ((input_ids < 0) | (input_ids >= vocab_size))
    if not bool(outside.any()):
        return
    place = outside.nonzero()[0].tolist()
    raise ValueError(
        f"input_ids must lie between 0 and vocab_size - 1 = {vocab_size - 1}, got {int(input_ids[tuple(place)])} at "
        f"{place}; pass the vocab_size of the tokenizer, or mask that token."
    )


@dataclass(frozen=True)
class CountedTokens:
    """The valid tokens of a batch in one row, in rising order.

    Attributes:
        weights: ``[N]``, in the dtype of the computation.
        entry: ``[N]`` int64, ``sequence * V + id``: the place in the flattened scores.
        index: ``[N]`` int64, the place in the flattened input.
    """

    weights: Tensor
    entry: Tensor
    index: Tensor


def counted_tokens(
    weights: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    vocab_size: int,
    ignore_ids: Sequence[int],
) -> CountedTokens:
    """Gather the valid tokens; reads values on the host, and checks them.

    Raises:
        ValueError: for broken ``cu_seqlens``, or ids outside of the vocabulary.
    """
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, weights.size(0))
    valid = valid_tokens(input_ids, attention_mask, ignore_ids)
    check_ids(input_ids, valid, vocab_size)
    index = valid.flatten().nonzero().squeeze(1)
    wide = torch.promote_types(weights.dtype, torch.float32)
    # index_select: several times faster than indexing on the CPU
    sequence = sequence_of_tokens(input_ids, cu_seqlens).flatten().index_select(0, index)
    entry = sequence * vocab_size + input_ids.flatten().index_select(0, index)
    return CountedTokens(weights.flatten().index_select(0, index).to(wide), entry, index)
