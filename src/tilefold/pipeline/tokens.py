"""Token vectors of a batch without padding, on their way to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.pipeline.copies import Fetched
from tilefold.pipeline.rows import entries_of


class TokenRows(NamedTuple):
    """Token vectors of some texts, packed, on the CPU.

    Attributes:
        counts: int64 ``[n]``, vectors of each text.
        finite: bool ``[T]``.
        values: ``[T, D]`` as they are stored.
        scales: ``[T]`` of int8 values, else None.
    """

    counts: Tensor
    finite: Tensor
    values: Tensor
    scales: Tensor | None = None

    def part(self, chosen: slice) -> TokenRows:
        """The vectors of some texts."""
        at = entries_of(self.counts, chosen)
        scales = None if self.scales is None else self.scales[at]
        return TokenRows(self.counts[chosen], self.finite[at], self.values[at], scales)


class PendingTokens:
    """Token vectors that count, packed and stored on the device, without the host knowing how many there are.

    Args:
        vectors: ``[B, S, D]``.
        mask: ``[B, S]``, nonzero = counts.
        stored: ``[T, D]`` fp32 -> which are finite ``[T]``, values, and scales if any.
    """

    def __init__(self, vectors: Tensor, mask: Tensor, stored: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        keep = mask.bool()
        self._fetched = Fetched([keep.sum(1), *stored(_packed(vectors, keep).float())])

    def get(self) -> TokenRows:
        """All of them."""
        counts, *others = self._fetched.get()
        total = int(counts.sum())
        return TokenRows(counts, *(part[:total] for part in others))


class PendingVectors:
    """Token vectors that count, packed on the device, of whose numbers the host does not know yet.

    Args:
        vectors: ``[B, S, D]``.
        mask: ``[B, S]``, nonzero = counts.
        to_host: copy them to the CPU.
    """

    def __init__(self, vectors: Tensor, mask: Tensor, to_host: bool) -> None:
        keep = mask.bool()
        self._rows = _packed(vectors, keep)
        self._fetched = Fetched([keep.sum(1), *([self._rows] if to_host else [])])

    def get(self) -> list[Tensor]:
        """``[n, D]`` of each text, parts of one tensor."""
        counts, *rows = self._fetched.get()
        total = int(counts.sum())
        found = (rows or [self._rows])[0]
        # a copy where rows are spare, so that nobody keeps them
        found = found if found.size(0) == total else found[:total].clone()
        return list(torch.split(found, counts.tolist()))


def _packed(vectors: Tensor, keep: Tensor) -> Tensor:
    """``[T, D]`` vectors that count; on a GPU as many rows as there are places, the last of which mean nothing."""
    if vectors.device.type == "cpu":
        return vectors[keep]
    flat = keep.reshape(-1)
    spare = flat.numel()
    at = torch.where(flat, flat.cumsum(0) - 1, spare)
    return vectors.new_zeros(spare + 1, vectors.size(-1)).index_copy_(0, at, vectors.flatten(0, 1))[:spare]
