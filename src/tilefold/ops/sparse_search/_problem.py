"""Data of an exact sparse search: tensors, options and results."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.plan import Buffer


class SearchTensors(NamedTuple):
    """Queries, and the fields of :class:`~tilefold.ops.sparse_search.BlockedPostings`.

    Attributes:
        weights: ``[Nq, T]`` fp32 weights of the query terms.
        terms: ``[Nq, T]`` int32 query terms.
        offsets: position at which the postings of each block and term begin.
        local_documents: ``[nnz]`` documents of the postings.
        postings: ``[nnz]`` weights of the postings.
        largest: ``[V]`` largest weight of each term.
        allowed: ``[N]`` uint8, nonzero for documents that may be returned, or ``None`` for all.
    """

    weights: Tensor
    terms: Tensor
    offsets: Tensor
    local_documents: Tensor
    postings: Tensor
    largest: Tensor
    allowed: Tensor | None


class DenseSearchTensors(NamedTuple):
    """Queries that have an entry for every term, and the postings.

    Attributes:
        queries: ``[Nq, V]`` fp32 weights of all terms in the queries.
        term_order: ``[V]`` int32 terms, those of most documents first.
        offsets: position at which the postings of each block and term begin.
        local_documents: ``[nnz]`` documents of the postings.
        postings: ``[nnz]`` weights of the postings.
        largest: ``[V]`` largest weight of each term.
        allowed: ``[N]`` uint8, nonzero for documents that may be returned, or ``None`` for all.
    """

    queries: Tensor
    term_order: Tensor
    offsets: Tensor
    local_documents: Tensor
    postings: Tensor
    largest: Tensor
    allowed: Tensor | None


class SearchOptions(NamedTuple):
    """Sizes that no tensor has.

    Attributes:
        k: number of documents to return, at most ``n_documents``.
        n_documents: number of documents.
        n_terms: size of the vocabulary.
    """

    k: int
    n_documents: int
    n_terms: int


class SearchSaved(NamedTuple):
    """Tensors saved for backward: none, since there is no gradient."""


def outputs(
    tensors: SearchTensors,
    options: SearchOptions,
    training: bool,
) -> tuple[Buffer, Buffer]:
    """Describe the results: the bits of the scores, and the documents.

    Args:
        tensors: tensors of the call.
        options: checked options.
        training: not used.
    """
    shape = tensors.terms.size(0), options.k
    return Buffer(shape, torch.int32), Buffer(shape, torch.int64)


def outputs_of_dense(
    tensors: DenseSearchTensors,
    options: SearchOptions,
    training: bool,
) -> tuple[Buffer, Buffer, Buffer]:
    """Describe the results: bits of the scores, documents, and the number of terms of each query.

    Args:
        tensors: tensors of the call.
        options: checked options.
        training: not used.
    """
    n_queries = tensors.queries.size(0)
    shape = n_queries, options.k
    return Buffer(shape, torch.int32), Buffer(shape, torch.int64), Buffer((n_queries,), torch.int32)
