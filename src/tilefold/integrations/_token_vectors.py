"""Token vectors as other libraries pass them: tensors, arrays, and lists of sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def as_tokens(name: str, embeddings: object, dims: int) -> Tensor:
    """Convert padded token vectors to one floating tensor ``[..., L, D]``.

    Args:
        name: name of the argument, for error messages.
        embeddings: a tensor or an array, or a list of sequences of one length, which are stacked.
        dims: number of dimensions that the result must have: 2 for one sequence, 3 for a batch, 4
            for groups of documents.

    Raises:
        ValueError: for an empty list, or another number of dimensions.
    """
    if isinstance(embeddings, (list, tuple)):
        if not embeddings:
            raise ValueError(
                f"{name} must hold at least one sequence, got an empty list; skip the call.",
            )
        embeddings = torch.stack([as_tensor(item) for item in embeddings])
    vectors = as_tensor(embeddings)
    if vectors.dim() != dims:
        shape = list(vectors.shape)
        if dims == 3:
            raise ValueError(f"{name} must have shape [B, L, D], got {shape}.")
        if dims == 4:
            raise ValueError(f"{name} must have shape [B, N, L, D], got {shape}.")
        raise ValueError(
            f"{name} must hold sequences of shape [L, D], got one of shape {shape}.",
        )
    return vectors if vectors.is_floating_point() else vectors.float()


def token_vectors(name: str, items: Sequence[object]) -> list[Tensor]:
    """Convert each sequence of a list to a floating tensor ``[L_i, D]``."""
    return [as_tokens(name, as_tensor(item), 2) for item in items]


def pack(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pack token vectors of sequences, one sequence after another.

    Args:
        sequences: at least one tensor ``[L_i, D]``.

    Returns:
        Vectors ``[T, D]``, and the offsets of the sequences, int32 ``[N + 1]``.
    """
    lengths = [vectors.size(0) for vectors in sequences]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = torch.cat(list(sequences)) if len(sequences) > 1 else sequences[0]
    return packed, offsets.to(packed.device)


def as_tensor(item: object) -> Tensor:
    """Convert an array or a nested list to a tensor.

    Arrays share their memory with the tensor. Read-only ones are copied, because torch would warn.
    """
    if isinstance(item, Tensor):
        return item
    if isinstance(item, np.ndarray) and not item.flags.writeable:
        item = item.copy()
    return torch.as_tensor(item)
