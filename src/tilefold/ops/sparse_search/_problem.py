"""The records of exact sparse search."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.plan import Buffer


class SearchTensors(NamedTuple):
    """Queries, and the fields of :class:`~tilefold.ops.sparse_search.BlockedPostings`."""

    weights: Tensor  # [Nq, T]
    terms: Tensor
    offsets: Tensor
    places: Tensor
    postings: Tensor
    largest: Tensor
    allowed: Tensor | None  # [N] uint8


class SearchOptions(NamedTuple):
    """Sizes that no tensor has."""

    k: int  # at most the documents
    n_documents: int
    n_terms: int


class SearchSaved(NamedTuple):
    """Nothing: there is no gradient."""


def outputs(
    tensors: SearchTensors,
    options: SearchOptions,
    training: bool,
) -> tuple[Buffer, Buffer]:
    """Bits of the scores, and documents."""
    shape = tensors.terms.size(0), options.k
    return Buffer(shape, torch.int32), Buffer(shape, torch.int64)
