"""fp8 tensors as bytes, for pickle and copy: torch cannot store fp8, nor read what it stored."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(values: Tensor) -> tuple[Tensor, torch.dtype]:
    """A one-byte tensor as uint8 and its dtype; only what it shows is kept, not all of what it is a slice of."""
    return values.detach().contiguous().clone().view(torch.uint8), values.dtype


def from_bytes(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor of :func:`as_bytes`."""
    return stored.view(dtype)
