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
from tilefold.ops._shared.activation import activate, slope_from_logit
from tilefold.ops.token_scatter._problem import (
    ScatterOptions,
    ScatterSaved,
    ScatterTensors,
    ValidTokens,
    gather_valid_tokens,
    sequence_of_tokens,
)


class EntryGroups(NamedTuple):
    """Tokens grouped by entry.

    Attributes:
        entries: ``[K]`` int64 distinct entries, rising.
        order: ``[N]`` int64 tokens sorted by entry, and rising within an entry.
        first: ``[K]`` int64 positions in ``order`` where the entries' tokens begin.
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
    """Compute the scores, and which tokens have a gradient.

    Args:
        tensors: weights and ids of the tokens, with their mask or offsets.
        options: the checked options.
        training: whether backward may follow.

    Returns:
        ``[B, V]`` scores, and uint8 in the shape of ``weights``: 1 for a token that has a gradient,
        which is each valid token for sums, and the winner of each positive score for maxima. The
        latter is empty without ``training``.
    """
    device = tensors.weights.device
    out_dtype = options.out_dtype
    tokens = gather_valid_tokens(tensors, options)
    scores = torch.zeros(tensors.batch * options.vocab_size, dtype=out_dtype, device=device)
    values = activate(tokens.weights, options.activation)
    counted_positions = tokens.positions
    if options.reduce == "sum":
        groups = group_by_entry(tokens.entries)
        scores[groups.entries] = groups.reduce(values, "sum").to(out_dtype)
    elif training:
        winners = _winners(tokens)
        winners = winners[~(values[winners] <= 0)]  # a score of 0 has no gradient
        scores[tokens.entries[winners]] = values[winners].to(out_dtype)
        counted_positions = tokens.positions[winners]
    else:
        # Rounding is monotone, so the largest rounded value is the rounded largest value.
        scores.scatter_reduce_(0, tokens.entries, values.to(out_dtype), "amax")
    scores = scores.view(tensors.batch, options.vocab_size)
    if not training:
        return scores, torch.zeros(0, dtype=torch.uint8, device=device)
    counted = torch.zeros(tensors.weights.numel(), dtype=torch.uint8, device=device)
    counted[counted_positions] = 1
    return scores, counted.view(tensors.weights.shape)


def _winners(tokens: ValidTokens) -> Tensor:
    """Return the token with the largest weight for each entry that occurs, ``[K]`` int64.

    Among equal weights it is the first token. The maxima, and then the first tokens that have them,
    are reduced into tables with one slot for each token. All tokens of an entry use the slot of
    their representative.
    """
    n_tokens = tokens.entries.numel()
    numbers = torch.arange(n_tokens, device=tokens.entries.device)
    representatives = _representatives(tokens.entries, numbers)
    maxima = tokens.weights.new_full((n_tokens,), float("-inf"))
    maxima.scatter_reduce_(0, representatives, tokens.weights, "amax")
    maxima = maxima[representatives]  # of each token's entry
    is_maximum = (tokens.weights == maxima) | (tokens.weights.isnan() & maxima.isnan())
    candidates = numbers[is_maximum]
    candidate_representatives = representatives[candidates]
    lowest = numbers.new_full((n_tokens,), n_tokens)
    lowest.scatter_reduce_(0, candidate_representatives, candidates, "amin")
    return candidates[lowest[candidate_representatives] == candidates]


def _representatives(entries: Tensor, numbers: Tensor) -> Tensor:
    """Return a number for each token that tokens with the same entry share, and no others.

    The number is that of one of these tokens, or of their group.

    Args:
        entries: ``[N]`` entries of the tokens.
        numbers: ``[N]`` numbers of the tokens, from 0.

    Returns:
        ``[N]`` int64, below N.
    """
    if entries.is_cuda:  # deterministic mode forbids writing equal entries at once
        groups = group_by_entry(entries)
        return torch.empty_like(numbers).scatter_(0, groups.order, groups.group_numbers())
    # Every entry that is read from the table was written before, so it need not be cleared.
    table_size = int(entries.max()) + 1 if entries.numel() else 0
    table = torch.empty(table_size, dtype=torch.int32, device=entries.device)
    table[entries] = numbers.int()
    return table[entries].long()


def backward(
    dscores: Tensor,
    saved: ScatterSaved,
    options: ScatterOptions,
    needs: tuple[bool, ...],
) -> tuple[Tensor]:
    """Compute the gradient of the weights.

    A token that counted gets the gradient of its entry, times the slope of its activation. Other
    tokens get 0.

    Args:
        dscores: ``[B, V]`` gradient of the scores.
        saved: tensors of the call, and which tokens counted.
        options: the checked options.
        needs: unused, since only the weights have a gradient.

    Returns:
        The gradient, in the shape and dtype of the weights.
    """
    weights = saved.weights
    dtype = torch.promote_types(weights.dtype, torch.float32)
    positions = saved.counted.flatten().nonzero().squeeze(1)
    sequences = sequence_of_tokens(saved.input_ids, saved.cu_seqlens).flatten()
    ids = saved.input_ids.flatten().index_select(0, positions).long()
    grad = dscores[sequences.index_select(0, positions), ids].to(dtype)
    counted_weights = weights.flatten().index_select(0, positions).to(dtype)
    grad = grad * slope_from_logit(counted_weights, options.activation)
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

    Args:
        tensors: the tensors.
        options: the checked options.
        top_k: largest number of entries per row; ``None`` selects all.
        min_weight: scores have to be greater. NaN is always selected.
    """
    batch = tensors.batch
    vocab_size = options.vocab_size
    tokens = gather_valid_tokens(tensors, options)
    groups = group_by_entry(tokens.entries)
    scores = groups.reduce(activate(tokens.weights, options.activation), options.reduce)
    if options.reduce == "max":
        scores = scores.clamp(min=0)  # an entry that no token has scores 0; NaN stays
    selected = ~(scores <= min_weight)
    scores = scores[selected]
    rows = groups.entries[selected] // vocab_size
    columns = groups.entries[selected] % vocab_size
    if top_k is not None:
        largest = _largest_of_rows(rows, scores, batch, top_k)
        rows = rows[largest]
        columns = columns[largest]
        scores = scores[largest]
    counts = torch.bincount(rows, minlength=batch)
    row_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return csr_tensor(row_starts, columns, scores.to(options.out_dtype), (batch, vocab_size))


def _largest_of_rows(rows: Tensor, scores: Tensor, batch: int, top_k: int) -> Tensor:
    """Return the positions of the ``top_k`` largest scores of each row, rising.

    Among equal scores the first are selected. NaN counts as larger than all numbers.

    Args:
        rows: ``[n]`` rows of the scores.
        scores: ``[n]``.
        batch: number of rows.
        top_k: number of scores per row.
    """
    by_score = scores.sort(descending=True, stable=True).indices
    by_row_and_score = by_score[rows[by_score].sort(stable=True).indices]
    counts = torch.bincount(rows, minlength=batch)
    row_starts = counts.cumsum(0) - counts
    ranks = torch.arange(rows.numel(), device=rows.device) - row_starts[rows[by_row_and_score]]
    return by_row_and_score[ranks < top_k].sort().values
