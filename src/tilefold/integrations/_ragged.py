"""Converts token vectors from other libraries: tensors, arrays, and lists of sequences of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def as_tokens(name: str, embeddings: Any, dims: int) -> Tensor:
    """Padded token vectors ``[.., L, D]`` with ``dims`` dimensions, floating; lists are stacked."""
    if isinstance(embeddings, (list, tuple)):
        if not embeddings:
            raise ValueError(f"{name} must hold at least one sequence, got an empty list; skip the call.")
        rows = torch.stack([_tensor(item) for item in embeddings])
    else:
        rows = _tensor(embeddings)
    if rows.dim() != dims:
        expected = "[B, N, L, D]" if dims == 4 else "[B, L, D]"
        raise ValueError(f"{name} must have shape {expected}, got {list(rows.shape)}.")
    return rows if rows.is_floating_point() else rows.float()


def token_vectors(name: str, item: Any) -> Tensor:
    """One sequence's vectors ``[L, D]``, floating."""
    rows = _tensor(item)
    if rows.dim() != 2:
        raise ValueError(f"{name} must hold sequences of shape [L, D], got one of shape {list(rows.shape)}.")
    return rows if rows.is_floating_point() else rows.float()


def pack(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The rows ``[T, D]`` of all sequences, and the int32 offsets ``[N + 1]`` of the first row of each."""
    lengths = torch.tensor([0, *(item.size(0) for item in rows)])
    packed = torch.cat(list(rows)) if len(rows) > 1 else rows[0]
    return packed, lengths.cumsum(0).to(torch.int32).to(packed.device)


def _tensor(item: Any) -> Tensor:
    """Arrays share memory with the tensor, except read-only ones, which are copied because torch would warn."""
    if isinstance(item, Tensor):
        return item
    flags = getattr(item, "flags", None)
    return torch.as_tensor(item.copy() if flags is not None and not flags.writeable else item)
