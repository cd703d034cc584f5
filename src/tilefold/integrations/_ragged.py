"""Converts token vectors from other libraries: tensors, arrays, and lists of sequences of different
lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def as_tokens(name: str, embeddings: object, dims: int) -> Tensor:
    """Padded token vectors ``[.., L, D]`` with ``dims`` dimensions, floating; lists are stacked."""
    if isinstance(embeddings, (list, tuple)):
        if not embeddings:
            raise ValueError(
                f"{name} must hold at least one sequence, got an empty list; skip the call.",
            )
        embeddings = torch.stack([as_tensor(item) for item in embeddings])
    rows = as_tensor(embeddings)
    if rows.dim() != dims:
        expected = {3: "have shape [B, L, D], got", 4: "have shape [B, N, L, D], got"}
        form = expected.get(dims, "hold sequences of shape [L, D], got one of shape")
        raise ValueError(f"{name} must {form} {list(rows.shape)}.")
    return rows if rows.is_floating_point() else rows.float()


def token_vectors(name: str, items: Sequence[object]) -> list[Tensor]:
    """The vectors ``[L, D]`` of each sequence, floating."""
    return [as_tokens(name, as_tensor(item), 2) for item in items]


def pack(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The rows ``[T, D]`` of all sequences, and the int32 offsets ``[N + 1]`` of the first row of
    each.
    """
    lengths = torch.tensor([0, *(item.size(0) for item in rows)])
    packed = torch.cat(list(rows)) if len(rows) > 1 else rows[0]
    return packed, lengths.cumsum(0).to(torch.int32).to(packed.device)


def as_tensor(item: object) -> Tensor:
    """Arrays share memory with the tensor, except read-only ones, which are copied because torch
    would warn.
    """
    if isinstance(item, np.ndarray) and not item.flags.writeable:
        item = item.copy()
    return item if isinstance(item, Tensor) else torch.as_tensor(item)
