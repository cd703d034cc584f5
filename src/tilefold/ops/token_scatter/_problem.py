"""Tensors and options of a scatter, which tokens count, where they lie in the input, and checks of
their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.checks import check_cu_seqlens
from tilefold.ops._shared.offsets import sequences_of_rows
from tilefold.ops._shared.plan import Buffer


class ScatterTensors(NamedTuple):
    """Tensors to scatter."""

    weights: Tensor  # [B, S], packed [T]
    input_ids: Tensor  # of the same shape, int32 or int64
    attention_mask: Tensor | None  # [B, S], nonzero = valid
    cu_seqlens: Tensor | None  # [B + 1] offsets of a packed batch

    @property
    def batch(self) -> int:
        return batch_size(self.weights, self.cu_seqlens)


class ScatterOptions(NamedTuple):
    """Options of a scatter."""

    vocab_size: int
    reduce: str
    activation: str
    ignore_ids: Sequence[int]  # whose tokens do not count
    out_dtype: torch.dtype  # of the scores


class ScatterSaved(NamedTuple):
    """Tensors saved for the gradient; ``counted`` tells which tokens it goes to (uint8 like
    ``weights``).
    """

    weights: Tensor
    input_ids: Tensor
    counted: Tensor
    cu_seqlens: Tensor | None


def outputs(
    tensors: ScatterTensors,
    options: ScatterOptions,
    training: bool,
) -> tuple[Buffer, Buffer]:
    """Scores ``[B, V]``, and ``counted``, which is empty unless a gradient may be asked for."""
    scores = Buffer((tensors.batch, options.vocab_size), options.out_dtype)
    return scores, Buffer(tensors.weights.shape if training else (0,), torch.uint8)


def batch_size(weights: Tensor, cu_seqlens: Tensor | None) -> int:
    """Number of sequences of padded ``[B, S]`` or packed ``[T]`` weights."""
    return weights.size(0) if cu_seqlens is None else cu_seqlens.numel() - 1


def valid_tokens(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    ignore_ids: Sequence[int],
) -> Tensor:
    """Bool, like ``input_ids``: tokens that are neither masked nor ignored."""
    valid = (
        torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is None
        else attention_mask != 0
    )
    if ignore_ids:
        valid = valid & ~torch.isin(
            input_ids,
            torch.tensor(list(ignore_ids), device=input_ids.device),
        )
    return valid


def sequence_of_tokens(input_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Int64, like ``input_ids``: the sequence that each token belongs to."""
    if cu_seqlens is None:
        return torch.arange(input_ids.size(0), device=input_ids.device)[:, None].expand_as(
            input_ids,
        )
    return sequences_of_rows(cu_seqlens, input_ids.size(0))


def check_values(tensors: ScatterTensors, options: ScatterOptions) -> Tensor:
    """Check offsets and ids on the host, ``ValueError`` for broken ones; return
    :func:`valid_tokens`.
    """
    if tensors.cu_seqlens is not None:
        check_cu_seqlens(
            "cu_seqlens",
            tensors.cu_seqlens,
            tensors.weights.size(0),
            "weights",
            "tokens",
        )
    valid = valid_tokens(tensors.input_ids, tensors.attention_mask, options.ignore_ids)
    input_ids, vocab_size = tensors.input_ids, options.vocab_size
    outside = valid & ((input_ids < 0) | (input_ids >= vocab_size))
    if bool(outside.any()):
        place = outside.nonzero()[0].tolist()
        raise ValueError(
            f"input_ids must lie between 0 and vocab_size - 1 = {vocab_size - 1}, got {int(input_ids[tuple(place)])} "
            f"at {place}; pass the vocab_size of the tokenizer, or mask that token.",
        )
    return valid


class CountedTokens(NamedTuple):
    """The valid tokens of a batch in one row, in rising order."""

    weights: Tensor  # [N], in the dtype of the computation
    entry: Tensor  # [N] int64, sequence * V + id: the place in the flattened scores
    place: Tensor  # [N] int64, the place in the flattened input


def counted_tokens(tensors: ScatterTensors, options: ScatterOptions) -> CountedTokens:
    """Gather the valid tokens; reads values on the host, and checks them."""
    weights, input_ids = tensors.weights, tensors.input_ids
    index = check_values(tensors, options).flatten().nonzero().squeeze(1)
    wide = torch.promote_types(weights.dtype, torch.float32)
    # index_select: several times faster than indexing on the CPU
    sequence = sequence_of_tokens(input_ids, tensors.cu_seqlens).flatten().index_select(0, index)
    entry = sequence * options.vocab_size + input_ids.flatten().index_select(0, index)
    return CountedTokens(weights.flatten().index_select(0, index).to(wide), entry, index)
