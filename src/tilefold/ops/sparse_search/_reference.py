"""Specification of exact sparse search in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops.sparse_search._problem import SearchOptions, SearchTensors
from tilefold.ops.sparse_search.postings import BLOCK

SUM_BITS = 31  # sums of a query are integers below 2^31
MAX_EXPONENT = 126  # of a factor, so that it and its inverse are normal numbers of fp32


def scores(tensors: SearchTensors, options: SearchOptions) -> Tensor:
    """Compute the scores ``[Nq, N]`` in fp32: sums of products in fixed point.

    The score is 0 for a document that shares no term with the query.
    """
    result = tensors.weights.new_zeros(tensors.terms.size(0), options.n_documents)
    queries = zip(tensors.terms.long(), tensors.weights, strict=True)
    for row, (terms, weights) in enumerate(queries):
        is_active = (terms >= 0) & (terms < options.n_terms) & (weights > 0)
        result[row] = _query_scores(terms[is_active], weights[is_active], tensors, options)
    return result


def _query_scores(
    terms: Tensor,
    weights: Tensor,
    tensors: SearchTensors,
    options: SearchOptions,
) -> Tensor:
    """Compute the scores ``[N]`` of one query.

    Args:
        terms: terms of the query, in the vocabulary.
        weights: their weights, positive.
        tensors: the postings.
        options: sizes.
    """
    n_documents = options.n_documents
    n_terms = options.n_terms
    device = terms.device
    one = torch.ones((), device=device)
    bound = (weights * tensors.largest[terms]).sum()  # no score is higher
    exponent = torch.frexp(bound).exponent  # the bound is below 2^exponent
    shift = (SUM_BITS - exponent).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    n_blocks = -(-n_documents // BLOCK)
    first_keys = torch.arange(n_blocks, device=device)[:, None] * n_terms
    keys = (first_keys + terms).flatten()  # (block, term) as one number
    starts = tensors.offsets[keys]
    counts = tensors.offsets[keys + 1] - starts
    first_of_list = counts.cumsum(0) - counts
    n_postings = int(counts.sum())
    postings = torch.repeat_interleave(starts - first_of_list, counts)
    postings = postings + torch.arange(n_postings, device=device)
    blocks = torch.repeat_interleave(keys // n_terms, counts)
    query_weights = torch.repeat_interleave(weights.repeat(n_blocks), counts)
    products = query_weights * tensors.postings[postings]
    rounded = (products * torch.ldexp(one, shift) + 0.5).floor().clamp(min=1)
    integers = torch.where(products > 0, rounded, 0).long()
    sums = torch.zeros(n_documents, dtype=torch.int64, device=device)
    sums.index_add_(0, blocks * BLOCK + tensors.places[postings].long(), integers)
    return sums.float() * torch.ldexp(one, -shift)


def topk(tensors: SearchTensors, options: SearchOptions) -> tuple[Tensor, Tensor]:
    """Return the ``k`` highest positive scores of each query, and their documents.

    Equal scores are in the order of the documents. If fewer documents have a positive score, the
    remaining scores are 0 and the remaining documents -1.

    Returns:
        ``[Nq, k]`` bits of the fp32 scores in int32, and ``[Nq, k]`` int64 documents.
    """
    values = []
    documents = []
    for row in range(tensors.terms.size(0)):  # one query at a time, to bound the memory
        query = tensors._replace(
            weights=tensors.weights[row : row + 1],
            terms=tensors.terms[row : row + 1],
        )
        query_scores = scores(query, options)
        if tensors.allowed is not None:
            query_scores = query_scores * (tensors.allowed != 0)
        ordered, order = query_scores.sort(dim=1, descending=True, stable=True)
        values.append(ordered[:, : options.k])
        documents.append(order[:, : options.k])
    all_values = torch.cat(values)
    all_documents = torch.where(all_values > 0, torch.cat(documents), -1)
    return all_values.view(torch.int32), all_documents
