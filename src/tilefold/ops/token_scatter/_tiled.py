"""The token scatter in torch: the CPU path, the fallback on any device, and the way to CSR.

Only valid tokens are read. Tokens with the same entry are reduced in a fixed order, so results have
the same bits in every run and on every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tilefold._internal.csr import csr_tensor
from tilefold.ops._shared.activation import activate, gradient_from_logit_in_place
from tilefold.ops.token_scatter._problem import (
    ScatterOptions,
    ScatterSaved,
    ScatterTensors,
    ValidTokens,
    gather_valid_tokens,
    sequence_of_tokens,
)


class EntryGroups(NamedTuple):
    """Tokens grouped by entry of the scores, that is by sequence and vocabulary id.

    Attributes:
        entries: ``[K]`` int64 distinct entries, ascending.
        order: ``[N]`` int64 tokens sorted by entry, and ascending within an entry.
        first: ``[K]`` int64 positions in ``order`` at which each entry's tokens begin.
    """

    entries: Tensor
    order: Tensor
    first: Tensor

    def reduce(self, values: Tensor, reduce: str) -> Tensor:
        """Return ``[K]`` sums or maxima of ``values`` ``[N]`` (fp32 or fp64).

        A maximum with NaN is NaN.
        """
        if self.order.numel() == 0:
            return values.new_zeros(0)
        if reduce == "sum":
            return embedding_bag(self.order, values[:, None], self.first, mode="sum").squeeze(1)
        maxima = values.new_full((self.first.numel(),), float("-inf"))
        return maxima.scatter_reduce_(0, self.group_numbers(), values[self.order], "amax")

    def group_numbers(self) -> Tensor:
        """Return the number of the group of each token in ``order``, ``[N]`` int64."""
        sizes = torch.diff(self.first, append=self.first.new_tensor([self.order.numel()]))
        return torch.repeat_interleave(sizes)


def group_by_entry(entries: Tensor) -> EntryGroups:
    """Group tokens by their entries, which are positions in the flattened scores.

    Args:
        entries: ``[N]`` int64 entry of each token.
    """
    sorted_entries, order = entries.sort(stable=True)
    is_first = torch.ones_like(sorted_entries, dtype=torch.bool)
    is_first[1:] = sorted_entries[1:] != sorted_entries[:-1]
    first = is_first.nonzero().squeeze(1)
    return EntryGroups(sorted_entries[first], order, first)


def forward(
    tensors: ScatterTensors,
    options: ScatterOptions,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the scores, and for the backward pass, which tokens have a gradient.

    Args:
        tensors: weights and ids of the tokens, with their mask or offsets.
        options: the checked options.
        training: whether backward may follow.

    Returns:
        ``[B, V]`` scores, and uint8 in the shape of ``weights``: 1 for a token that has a gradient.
        The latter is empty without ``training``.
    """
    device = tensors.weights.device
    tokens = gather_valid_tokens(tensors, options)
    values = activate(tokens.weights, options.activation)
    n_scores = tensors.batch * options.vocab_size
    scores = torch.zeros(n_scores, dtype=options.out_dtype, device=device)
    if options.reduce == "sum":
        groups = group_by_entry(tokens.entries)
        scores[groups.entries] = groups.reduce(values, "sum").to(options.out_dtype)
        positions_with_gradient = tokens.positions
    elif training:
        # A maximum passes its gradient to one token. A score of 0 has no gradient, NaN has one.
        winners = _first_maxima(tokens)
        winners = winners[~(values[winners] <= 0)]  # `values > 0` would leave out NaN
        scores[tokens.entries[winners]] = values[winners].to(options.out_dtype)
        positions_with_gradient = tokens.positions[winners]
    else:
        # Values are rounded before the maximum here, and after it above. The scores are the same,
        # because rounding does not change the order of values.
        scores.scatter_reduce_(0, tokens.entries, values.to(options.out_dtype), "amax")
    scores = scores.view(tensors.batch, options.vocab_size)
    if not training:
        return scores, torch.zeros(0, dtype=torch.uint8, device=device)
    has_gradient = torch.zeros(tensors.weights.numel(), dtype=torch.uint8, device=device)
    has_gradient[positions_with_gradient] = 1
    return scores, has_gradient.view(tensors.weights.shape)


def _first_maxima(tokens: ValidTokens) -> Tensor:
    """Return, for each entry that occurs, the first token with the largest weight.

    Args:
        tokens: the valid tokens. An entry is a sequence and a vocabulary id.

    Returns:
        ``[K]`` int64 positions among the valid tokens.
    """
    # entry_numbers[i] = k: the entry of token i is the k-th distinct one.
    distinct, entry_numbers = torch.unique(tokens.entries, return_inverse=True)
    largest = tokens.weights.new_full(distinct.shape, float("-inf"))
    largest.scatter_reduce_(0, entry_numbers, tokens.weights, "amax")
    largest = largest[entry_numbers]  # the largest weight of each token's entry
    is_largest = (tokens.weights == largest) | (tokens.weights.isnan() & largest.isnan())
    # Several tokens of an entry may have the largest weight. The first of them is selected.
    candidates = is_largest.nonzero().squeeze(1)
    candidate_numbers = entry_numbers[candidates]
    first = torch.full_like(distinct, tokens.entries.numel())
    first.scatter_reduce_(0, candidate_numbers, candidates, "amin")
    return candidates[first[candidate_numbers] == candidates]


def backward(
    dscores: Tensor,
    saved: ScatterSaved,
    options: ScatterOptions,
    needs: tuple[bool, ...],
) -> tuple[Tensor]:
    """Compute the gradient of the weights.

    If scores are sums, each token that is not padding has a gradient. If they are maxima, only the
    token with the largest weight of each positive score has one. The gradient of a token's weight
    is the gradient of the token's score, times the slope of the activation.

    Args:
        dscores: ``[B, V]`` gradient of the scores.
        saved: tensors of the call, and in ``counted`` which tokens have a gradient: the second
            result of :func:`forward`.
        options: the checked options.
        needs: ignored, since only the weights have a gradient.

    Returns:
        The gradients of all differentiable tensors: only that of the weights, in their shape and
        dtype.
    """
    weights = saved.weights
    dtype = torch.promote_types(weights.dtype, torch.float32)
    positions = saved.counted.flatten().nonzero().squeeze(1)
    sequences = sequence_of_tokens(saved.input_ids, saved.cu_seqlens).flatten()
    ids = saved.input_ids.flatten().index_select(0, positions).long()
    grad = dscores[sequences.index_select(0, positions), ids].to(dtype)
    selected_weights = weights.flatten().index_select(0, positions).to(dtype)
    grad = gradient_from_logit_in_place(grad, selected_weights, options.activation)
    dweights = torch.zeros(weights.numel(), dtype=weights.dtype, device=weights.device)
    dweights[positions] = grad.to(weights.dtype)
    return (dweights.view(weights.shape),)


def to_csr(
    tensors: ScatterTensors,
    options: ScatterOptions,
    top_k: int | None,
    min_weight: float,
) -> Tensor:
    """Return the scores above ``min_weight`` as a CSR tensor ``[B, V]``.

    An entry of the scores is a sequence and a vocabulary id. Only those of tokens are computed.

    Args:
        tensors: weights and ids of the tokens, with their mask or offsets.
        options: the checked options.
        top_k: largest number of entries per row; ``None`` selects all.
        min_weight: scores must exceed it. NaN is always selected.
    """
    batch = tensors.batch
    vocab_size = options.vocab_size
    tokens = gather_valid_tokens(tensors, options)
    groups = group_by_entry(tokens.entries)
    scores = groups.reduce(activate(tokens.weights, options.activation), options.reduce)
    if options.reduce == "max":
        scores = scores.clamp(min=0)  # as in the dense scores, where maxima start at 0; NaN stays
    is_selected = ~(scores <= min_weight)  # true for NaN, too
    scores = scores[is_selected]
    rows = groups.entries[is_selected] // vocab_size
    columns = groups.entries[is_selected] % vocab_size
    if top_k is not None:
        largest = _largest_of_rows(rows, scores, n_rows=batch, top_k=top_k)
        rows = rows[largest]
        columns = columns[largest]
        scores = scores[largest]
    counts = torch.bincount(rows, minlength=batch)
    row_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return csr_tensor(row_starts, columns, scores.to(options.out_dtype), (batch, vocab_size))


def _largest_of_rows(row_of_score: Tensor, scores: Tensor, n_rows: int, top_k: int) -> Tensor:
    """Return the positions of the ``top_k`` largest scores of each row, in ascending order.

    Among equal scores the first are selected. NaN counts as larger than all numbers.

    Args:
        row_of_score: ``[n]`` row of each score.
        scores: ``[n]``.
        n_rows: number of rows.
        top_k: number of scores per row.
    """
    # Two stable sorts order the scores by row, and within a row by descending score.
    by_score = scores.sort(descending=True, stable=True).indices
    by_row_and_score = by_score[row_of_score[by_score].sort(stable=True).indices]
    counts = torch.bincount(row_of_score, minlength=n_rows)
    row_starts = counts.cumsum(0) - counts
    positions = torch.arange(row_of_score.numel(), device=row_of_score.device)
    ranks = positions - row_starts[row_of_score[by_row_and_score]]
    return by_row_and_score[ranks < top_k].sort().values
