"""Reductions over tokens that share an entry, in a fixed order: the same bits in every run, on every device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


@dataclass(frozen=True)
class Segments:
    """Tokens grouped by entry.

    Attributes:
        entry: ``[K]`` int64, the distinct entries, rising.
        order: ``[N]`` int64, the tokens sorted by entry; in rising order within one.
        first: ``[K]`` int64, where each entry's tokens begin in ``order``.
    """

    entry: Tensor
    order: Tensor
    first: Tensor

    def reduce(self, values: Tensor, reduce: str) -> Tensor:
        """``[K]`` sums or maxima of ``values`` ``[N]`` (fp32 or fp64); NaN wins a maximum."""
        if self.order.numel() == 0:
            return values.new_zeros(0)
        if reduce == "sum":
            return embedding_bag(self.order, values[:, None], self.first, mode="sum").squeeze(1)
        lengths = torch.diff(self.first, append=self.first.new_tensor([self.order.numel()]))
        segment = torch.repeat_interleave(lengths)
        best = values.new_full((self.first.numel(),), float("-inf"))
        return best.scatter_reduce_(0, segment, values[self.order], "amax")


def group_by_entry(entry: Tensor) -> Segments:
    """Group tokens by their ``entry`` ``[N]``."""
    sorted_entry, order = entry.sort(stable=True)
    starts = torch.ones_like(sorted_entry, dtype=torch.bool)
    starts[1:] = sorted_entry[1:] != sorted_entry[:-1]
    first = starts.nonzero().squeeze(1)
    return Segments(sorted_entry[first], order, first)
