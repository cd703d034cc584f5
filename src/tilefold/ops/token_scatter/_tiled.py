"""The token scatter in torch on the valid tokens alone: the CPU path, the fallback on any device,
and straight to CSR.

Tokens that share an entry are reduced in a fixed order: the same bits in every run, on every
device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tilefold._csr import csr_tensor
from tilefold.ops._shared.activation import activate, slope_from_logit
from tilefold.ops.token_scatter._problem import (
    CountedTokens,
    ScatterOptions,
    ScatterSaved,
    ScatterTensors,
    counted_tokens,
    sequence_of_tokens,
)


class Segments(NamedTuple):
    """Tokens grouped by entry."""

    entry: Tensor  # [K] int64, the distinct entries, rising
    order: Tensor  # [N] int64, the tokens sorted by entry; in rising order within one
    first: Tensor  # [K] int64, where each entry's tokens begin in order

    def reduce(self, values: Tensor, reduce: str) -> Tensor:
        """``[K]`` sums or maxima of ``values`` ``[N]`` (fp32 or fp64); NaN wins a maximum."""
        if self.order.numel() == 0:
            return values.new_zeros(0)
        if reduce == "sum":
            return embedding_bag(self.order, values[:, None], self.first, mode="sum").squeeze(1)
        best = values.new_full((self.first.numel(),), float("-inf"))
        return best.scatter_reduce_(0, self.of_each(), values[self.order], "amax")

    def of_each(self) -> Tensor:
        """``[N]`` int64: which entry each token of ``order`` has."""
        return torch.repeat_interleave(
            torch.diff(self.first, append=self.first.new_tensor([self.order.numel()])),
        )


def group_by_entry(entry: Tensor) -> Segments:
    """Group tokens by their ``entry`` ``[N]``."""
    sorted_entry, order = entry.sort(stable=True)
    starts = torch.ones_like(sorted_entry, dtype=torch.bool)
    starts[1:] = sorted_entry[1:] != sorted_entry[:-1]
    first = starts.nonzero().squeeze(1)
    return Segments(sorted_entry[first], order, first)


def forward(
    tensors: ScatterTensors,
    options: ScatterOptions,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """Scores ``[B, V]``, and which tokens the gradient goes to (uint8 like ``weights``; empty
    unless asked for).
    """
    weights, vocab_size, out_dtype = tensors.weights, options.vocab_size, options.out_dtype
    tokens = counted_tokens(tensors, options)
    scores = torch.zeros(tensors.batch * vocab_size, dtype=out_dtype, device=weights.device)
    values = activate(tokens.weights, options.activation)
    takes = tokens.place
    if options.reduce == "sum":
        groups = group_by_entry(tokens.entry)
        scores[groups.entry] = groups.reduce(values, "sum").to(out_dtype)
    elif training:
        winners = _winners(tokens)
        kept = winners[~(values[winners] <= 0)]  # a score of 0 has no gradient
        scores[tokens.entry[kept]] = values[kept].to(out_dtype)
        takes = tokens.place[kept]
    else:
        # rounding does not fall, so the largest rounded value is the rounded largest value
        scores.scatter_reduce_(0, tokens.entry, values.to(out_dtype), "amax")
    counted = torch.zeros(
        weights.numel() if training else 0,
        dtype=torch.uint8,
        device=weights.device,
    )
    if training:
        counted[takes] = 1
        counted = counted.view(weights.shape)
    return scores.view(tensors.batch, vocab_size), counted


def _winners(tokens: CountedTokens) -> Tensor:
    """``[K]`` int64: for each entry that occurs, its token with the largest weight; the lowest
    token among equals.
    """
    count = tokens.entry.numel()
    places = torch.arange(count, device=tokens.entry.device)
    speaker = _speakers(tokens.entry, places)
    best = tokens.weights.new_full((count,), float("-inf"))
    best = best.scatter_reduce_(0, speaker, tokens.weights, "amax")[speaker]
    candidates = places[(tokens.weights == best) | (tokens.weights.isnan() & best.isnan())]
    lowest = places.new_full((count,), count)
    lowest.scatter_reduce_(0, speaker[candidates], candidates, "amin")
    return candidates[lowest[speaker[candidates]] == candidates]


def _speakers(entry: Tensor, places: Tensor) -> Tensor:
    """``[N]`` int64: for each token, one token with the same entry, the same for all of them."""
    if entry.is_cuda:  # equal entries written at once: allowed, but not in deterministic mode
        groups = group_by_entry(entry)
        return torch.empty_like(places).scatter_(0, groups.order, groups.of_each())
    # nothing is read from the table that was not written here, so nobody needs to clear it
    table = torch.empty(
        int(entry.max()) + 1 if entry.numel() else 0,
        dtype=torch.int32,
        device=entry.device,
    )
    table[entry] = places.int()
    return table[entry].long()


def backward(
    dscores: Tensor,
    saved: ScatterSaved,
    options: ScatterOptions,
    needs: tuple[bool, ...],
) -> tuple[Tensor]:
    """The gradient of the weights: each token that counted takes that of its entry, times its
    slope.
    """
    weights, input_ids, counted, cu_seqlens = saved
    wide = torch.promote_types(weights.dtype, torch.float32)
    index = counted.flatten().nonzero().squeeze(1)
    sequence = sequence_of_tokens(input_ids, cu_seqlens).flatten().index_select(0, index)
    grad = dscores[sequence, input_ids.flatten().index_select(0, index).long()].to(wide)
    grad = grad * slope_from_logit(
        weights.flatten().index_select(0, index).to(wide),
        options.activation,
    )
    dweights = torch.zeros(weights.numel(), dtype=weights.dtype, device=weights.device)
    dweights[index] = grad.to(weights.dtype)
    return (dweights.view(weights.shape),)


def to_csr(
    tensors: ScatterTensors,
    options: ScatterOptions,
    top_k: int | None,
    min_weight: float,
) -> Tensor:
    """``[B, V]`` CSR tensor of the scores above ``min_weight``, at most ``top_k`` of each row."""
    tokens, batch, vocab_size = counted_tokens(tensors, options), tensors.batch, options.vocab_size
    groups = group_by_entry(tokens.entry)
    scores = groups.reduce(activate(tokens.weights, options.activation), options.reduce)
    if options.reduce == "max":
        scores = scores.clamp(min=0)  # as against an entry that no token holds; NaN stays
    kept = ~(scores <= min_weight)
    rows, columns = groups.entry[kept] // vocab_size, groups.entry[kept] % vocab_size
    scores = scores[kept]
    if top_k is not None:
        best = _best_of_rows(rows, scores, batch, top_k)
        rows, columns, scores = rows[best], columns[best], scores[best]
    counts = torch.bincount(rows, minlength=batch)
    row_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return csr_tensor(row_starts, columns, scores.to(options.out_dtype), (batch, vocab_size))


def _best_of_rows(rows: Tensor, scores: Tensor, batch: int, top_k: int) -> Tensor:
    """Places of the ``top_k`` largest scores of each row, rising; among equal ones the first, NaN
    before all.
    """
    order = scores.sort(descending=True, stable=True).indices
    order = order[rows[order].sort(stable=True).indices]  # by row, then by score
    counts = torch.bincount(rows, minlength=batch)
    starts = counts.cumsum(0) - counts
    rank = torch.arange(order.numel(), device=rows.device) - starts[rows[order]]
    return order[rank < top_k].sort().values
