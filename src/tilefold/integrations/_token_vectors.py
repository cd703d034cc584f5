"""Token vectors as other libraries pass them: tensors, arrays, and lists of sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

# The shape of token vectors by its number of dimensions: one sequence, a batch of sequences, and
# groups of documents.
_SHAPES = {2: "[L, D]", 3: "[B, L, D]", 4: "[B, N, L, D]"}


def as_tokens(name: str, embeddings: object, dims: int) -> Tensor:
    """Convert token vectors to one floating tensor ``[..., L, D]``.

    Args:
        name: the name of the argument, for error messages.
        embeddings: a tensor or an array, or a list of sequences of equal length, which are stacked.
        dims: the number of dimensions of the result: 2 for one sequence, 3 for a batch, 4 for
            groups of documents.

    Raises:
        ValueError: if a list is empty, or the number of dimensions is wrong.
    """
    if isinstance(embeddings, (list, tuple)):
        if not embeddings:
            raise ValueError(
                f"{name} must hold at least one sequence, got an empty list; skip the call.",
            )
        embeddings = torch.stack([as_tensor(item) for item in embeddings])
    vectors = as_tensor(embeddings)
    if vectors.dim() != dims:
        raise ValueError(
            f"{name} must have shape {_SHAPES[dims]}, got {list(vectors.shape)}.",
        )
    return vectors if vectors.is_floating_point() else vectors.float()


def token_vectors(name: str, items: Sequence[object]) -> list[Tensor]:
    """Convert each sequence of a list to a floating tensor ``[L_i, D]``."""
    return [
        as_tokens(f"{name}[{position}]", as_tensor(item), dims=2)
        for position, item in enumerate(items)
    ]


def pack(sequences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Pack token vectors of sequences, one sequence after another.

    Args:
        sequences: at least one tensor ``[L_i, D]``.

    Returns:
        The vectors ``[T, D]``, and the offsets of the sequences, int32 ``[N + 1]``.
    """
    lengths = [vectors.size(0) for vectors in sequences]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    packed = torch.cat(list(sequences)) if len(sequences) > 1 else sequences[0]
    return packed, offsets.to(packed.device)


def as_tensor(item: object) -> Tensor:
    """Convert an array or a nested list to a tensor.

    The tensor shares the memory of an array. Read-only arrays are copied, because torch would warn.
    """
    if isinstance(item, Tensor):
        return item
    if isinstance(item, np.ndarray) and not item.flags.writeable:
        item = item.copy()
    return torch.as_tensor(item)
