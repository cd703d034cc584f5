"""Sequences of a pack by their offsets."""

from __future__ import annotations

import torch
from torch import Tensor


def sequences_of_rows(offsets: Tensor, rows: int, *, int32: bool = False) -> Tensor:
    """Return the index of the sequence of each packed row, without a synchronisation.

    Args:
        offsets: int32 or int64 ``[B + 1]``, ascending from 0, with any stride.
        rows: number of packed rows, T.
        int32: whether the result is int32 instead of int64.

    Returns:
        ``[T]`` on the device of ``offsets``; B for a row after the last offset.
    """
    ends = offsets[1:].contiguous()  # searchsorted copies strided offsets too, with a warning
    row_numbers = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    return torch.searchsorted(ends, row_numbers, right=True, out_int32=int32)
