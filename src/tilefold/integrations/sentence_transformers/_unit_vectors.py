"""Vectors of length 1, as ``encode(normalize_embeddings=True)`` returns them."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from tilefold._internal.typing import Model
from tilefold.ops.row_groups import normalize_rows

# Name of the attribute that ``accelerate(invariant=True)`` sets on a model.
INVARIANCE = "invariance"


def is_batch_invariant(model: Model) -> bool:
    """Whether ``accelerate(model, invariant=True)`` was called."""
    return getattr(model, INVARIANCE, None) is not None


def unit_vectors(vectors: Tensor, model: Model) -> Tensor:
    """Scale vectors ``[..., D]`` to length 1.

    Args:
        vectors: vectors that the model has computed.
        model: the model. With ``accelerate(invariant=True)``, the bits do not depend on the number
            of vectors.
    """
    if is_batch_invariant(model):
        return normalize_rows(vectors)
    return normalize(vectors, p=2.0, dim=-1)
