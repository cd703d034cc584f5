"""Where the valid tokens of each sequence lie: one description for padded and packed input.

Every implementation sees ``rows`` ``[T, D]`` (the valid tokens of all sequences, one after another) and ``offsets``
``[B + 1]``. A winner is stored as the position of its token *within its own sequence* (padding counted): the column
of a padded input, the distance to ``cu_seqlens[b]`` of a packed one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Plans = dict[Any, Any]  # what calls of one signature worked out, by the launchers' own keys

# In uint16 the largest value stands for "no valid token"; int32 uses -1.
NO_WINNER_UINT16 = 65535


def winner_dtype(length_bound: int) -> torch.dtype:
    """The smallest dtype that holds a token position below ``length_bound`` and the mark for "none"."""
    return torch.uint16 if length_bound <= NO_WINNER_UINT16 else torch.int32


def no_winner(dtype: torch.dtype) -> int:
    """The stored winner of a sequence without a valid token."""
    return NO_WINNER_UINT16 if dtype == torch.uint16 else -1


def length_bound(hidden: Tensor) -> int:
    """An upper bound of the sequence length that needs no look at the device: S padded, T packed."""
    return hidden.size(1) if hidden.dim() == 3 else hidden.size(0)


def batch_size(hidden: Tensor, cu_seqlens: Tensor | None) -> int:
    """Number of sequences of a padded ``[B, S, D]`` or packed ``[T, D]`` input."""
    return hidden.size(0) if cu_seqlens is None else cu_seqlens.numel() - 1


def sequence_mask(cu_seqlens: Tensor, length: int) -> Tensor:
    """``[B, length]`` bool: which of the first ``length`` places of each packed sequence hold a token."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    return torch.arange(length, device=cu_seqlens.device) < lengths[:, None]


@dataclass(frozen=True)
class PackedRows:
    """The valid tokens of a batch, with the host's knowledge of where sequences begin.

    Attributes:
        rows: ``[T, D]``.
        offsets: ``B + 1`` row numbers.
        index: ``[T]`` int64, the row of the flattened input that each row came from, or ``None`` for the identity.
    """

    rows: Tensor
    offsets: list[int]
    index: Tensor | None

    @property
    def uniform_length(self) -> int | None:
        """The length that all sequences share, or ``None``."""
        lengths = {end - start for start, end in zip(self.offsets[:-1], self.offsets[1:], strict=True)}
        return lengths.pop() if len(lengths) == 1 else None


def pack_rows(hidden: Tensor, attention_mask: Tensor | None, cu_seqlens: Tensor | None) -> PackedRows:
    """Gather the valid tokens (a copy only where there is padding); reads the lengths on the host."""
    if cu_seqlens is not None:
        return PackedRows(hidden, cu_seqlens.tolist(), None)
    batch, length, dim = hidden.shape
    rows = hidden.reshape(batch * length, dim)
    if attention_mask is None or bool((valid := attention_mask != 0).all()):
        return PackedRows(rows, [b * length for b in range(batch + 1)], None)
    index = valid.flatten().nonzero().squeeze(1)
    offsets = [0, *valid.sum(dim=1).cumsum(0).tolist()]
    return PackedRows(rows[index], offsets, index)
