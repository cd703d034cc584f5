"""Records of a scatter's tensors and options, checks of values, and the tokens that count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.checks import check_cu_seqlens
from tilefold.ops._shared.offsets import sequences_of_rows
from tilefold.ops._shared.plan import Buffer


class ScatterTensors(NamedTuple):
    """The tensors of a call.

    Attributes:
        weights: padded ``[B, S]`` or packed ``[T]``.
        input_ids: int32 or int64 in the shape of ``weights``.
        attention_mask: ``[B, S]``, nonzero = valid, or ``None``.
        cu_seqlens: ``[B + 1]`` offsets of packed input, or ``None``.
    """

    weights: Tensor
    input_ids: Tensor
    attention_mask: Tensor | None
    cu_seqlens: Tensor | None

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return batch_size(self.weights, self.cu_seqlens)


class ScatterOptions(NamedTuple):
    """Options that passed the checks.

    Attributes:
        vocab_size: V.
        reduce: ``"max"`` or ``"sum"``.
        activation: function applied to the weights.
        ignore_ids: ids whose tokens get no score.
        out_dtype: dtype of the scores.
    """

    vocab_size: int
    reduce: str
    activation: str
    ignore_ids: Sequence[int]
    out_dtype: torch.dtype


class ScatterSaved(NamedTuple):
    """Tensors that are saved for backward.

    ``counted``, uint8 in the shape of ``weights``, is 1 for a token that has a gradient. For sums
    these are the valid tokens, for maxima the tokens whose weights are the maxima.
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
    """Return shapes and dtypes of the results: scores ``[B, V]``, and ``counted``.

    ``counted`` marks the tokens that have a gradient. It is empty without training.

    Args:
        tensors: tensors of the call.
        options: checked options.
        training: whether a backward pass may follow, which reads ``counted``.
    """
    scores = Buffer((tensors.batch, options.vocab_size), options.out_dtype)
    counted = Buffer(tensors.weights.shape if training else (0,), torch.uint8)
    return scores, counted


def batch_size(weights: Tensor, cu_seqlens: Tensor | None) -> int:
    """Return the number of sequences of padded ``[B, S]`` or packed ``[T]`` weights."""
    return weights.size(0) if cu_seqlens is None else cu_seqlens.numel() - 1


def valid_tokens(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    ignore_ids: Sequence[int],
) -> Tensor:
    """Return which tokens are neither masked nor ignored.

    Args:
        input_ids: ids of the tokens, padded ``[B, S]`` or packed ``[T]``.
        attention_mask: mask in that shape, nonzero = keep, or ``None``.
        ignore_ids: ids whose tokens get no score, such as the ids of special tokens.

    Returns:
        Bools in the shape of ``input_ids``.
    """
    if attention_mask is None:
        valid = torch.ones_like(input_ids, dtype=torch.bool)
    else:
        valid = attention_mask != 0
    if ignore_ids:
        ignored = torch.tensor(list(ignore_ids), device=input_ids.device)
        valid = valid & ~torch.isin(input_ids, ignored)
    return valid


def sequence_of_tokens(input_ids: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the sequence of each token, int64 in the shape of ``input_ids``."""
    if cu_seqlens is None:
        sequences = torch.arange(input_ids.size(0), device=input_ids.device)
        return sequences[:, None].expand_as(input_ids)
    return sequences_of_rows(cu_seqlens, input_ids.size(0))


def checked_valid_tokens(tensors: ScatterTensors, options: ScatterOptions) -> Tensor:
    """Check the values of offsets and ids, and return which tokens are neither masked nor ignored.

    Ids of masked and ignored tokens may have any value. Reading the values synchronises with a GPU.

    Args:
        tensors: tensors of the call.
        options: the checked options.

    Returns:
        Bools in the shape of the ids, as returned by :func:`valid_tokens`.

    Raises:
        ValueError: if offsets or ids are invalid.
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
    input_ids = tensors.input_ids
    vocab_size = options.vocab_size
    is_outside = valid & ((input_ids < 0) | (input_ids >= vocab_size))
    if bool(is_outside.any()):
        position = is_outside.nonzero()[0].tolist()
        raise ValueError(
            f"input_ids must lie between 0 and vocab_size - 1 = {vocab_size - 1}, got "
            f"{int(input_ids[tuple(position)])} at {position}; pass the vocab_size of the "
            "tokenizer, or mask that token.",
        )
    return valid


class ValidTokens(NamedTuple):
    """The valid tokens of a batch, in the order of the input.

    Attributes:
        weights: ``[N]`` weights in fp32, or fp64 for fp64 input.
        entries: ``[N]`` int64 entry of the scores to which each token contributes, as a position in
            the flattened ``[B, V]`` scores: sequence * V + id.
        positions: ``[N]`` int64 positions in the flattened input.
    """

    weights: Tensor
    entries: Tensor
    positions: Tensor


def gather_valid_tokens(tensors: ScatterTensors, options: ScatterOptions) -> ValidTokens:
    """Gather the valid tokens of a batch: those that are neither masked nor have an ignored id.

    The weight of a token is added to, or compared with, the score of its id in its sequence. The
    values of ids and offsets are checked first, which synchronises with a GPU.

    Args:
        tensors: weights and ids of the tokens, with a mask or offsets.
        options: the size of the vocabulary, the ids to ignore, and how weights are reduced.

    Raises:
        ValueError: if offsets or ids are invalid.
    """
    weights = tensors.weights
    input_ids = tensors.input_ids
    is_valid = checked_valid_tokens(tensors, options)
    positions = is_valid.flatten().nonzero().squeeze(1)
    dtype = torch.promote_types(weights.dtype, torch.float32)
    sequences = sequence_of_tokens(input_ids, tensors.cu_seqlens).flatten()
    # On the CPU index_select is several times faster than indexing.
    ids = input_ids.flatten().index_select(0, positions)
    rows = sequences.index_select(0, positions)
    return ValidTokens(
        weights=weights.flatten().index_select(0, positions).to(dtype),
        entries=rows * options.vocab_size + ids,  # positions in the flattened [B, V] scores
        positions=positions,
    )
