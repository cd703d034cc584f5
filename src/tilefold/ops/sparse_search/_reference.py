"""Specification of exact sparse search in plain torch, on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.plan import cdiv
from tilefold.ops.sparse_search._problem import (
    DenseSearchTensors,
    SearchOptions,
    SearchTensors,
)
from tilefold.ops.sparse_search.postings import BLOCK

SUM_BITS = 31  # sums of a query are integers below 2^31
MAX_EXPONENT = 126  # of a factor, so that it and its inverse are normal numbers of fp32


def scores(tensors: SearchTensors, options: SearchOptions) -> Tensor:
    """Compute the scores of all documents: inner products with the sparse vectors of queries.

    Products are summed as integers (fixed point), so that no score depends on the order of the sum.

    Args:
        tensors: the queries and the postings of the documents.
        options: numbers of documents and of terms.

    Returns:
        Scores ``[Nq, N]``, fp32. A document that shares no term with the query has the score 0.
    """
    result = tensors.weights.new_zeros(tensors.terms.size(0), options.n_documents)
    queries = zip(tensors.terms.long(), tensors.weights, strict=True)
    for row, (terms, weights) in enumerate(queries):
        # Padding has the weight 0. Terms outside the vocabulary have no postings.
        has_score = (terms >= 0) & (terms < options.n_terms) & (weights > 0)
        result[row] = _query_scores(terms[has_score], weights[has_score], tensors, options)
    return result


def _query_scores(
    terms: Tensor,
    weights: Tensor,
    tensors: SearchTensors,
    options: SearchOptions,
) -> Tensor:
    """Compute the scores ``[N]`` of one query.

    Products are rounded to integers and summed as such, so that the sums do not depend on the order
    of the additions, and every implementation returns the same bits.

    Args:
        terms: terms of the query, in the vocabulary.
        weights: their weights, positive.
        tensors: the postings.
        options: numbers of documents and of terms.
    """
    matches = _matching_postings(terms, weights, tensors, options)
    products = matches.query_weights * tensors.postings[matches.postings]
    upper_bound = (weights * tensors.largest[terms]).sum()  # no score is higher
    exponent = torch.frexp(upper_bound).exponent  # the bound is below 2^exponent
    # Products are multiplied by 2^shift. It and its inverse must be normal numbers of fp32.
    shift = (SUM_BITS - exponent).clamp(-MAX_EXPONENT, MAX_EXPONENT)
    one = torch.ones((), device=terms.device)
    rounded = (products * torch.ldexp(one, shift) + 0.5).floor()
    # A positive product counts as at least 1, so that the document has a positive score.
    integers = torch.where(products > 0, rounded.clamp(min=1), 0).long()
    sums = torch.zeros(options.n_documents, dtype=torch.int64, device=terms.device)
    sums.index_add_(0, matches.documents, integers)
    return sums.float() * torch.ldexp(one, -shift)


class _Matches(NamedTuple):
    """Postings of all terms of a query.

    Attributes:
        postings: ``[n]`` positions of the postings.
        documents: ``[n]`` their documents.
        query_weights: ``[n]`` weights of their terms in the query.
    """

    postings: Tensor
    documents: Tensor
    query_weights: Tensor


def _matching_postings(
    terms: Tensor,
    weights: Tensor,
    tensors: SearchTensors,
    options: SearchOptions,
) -> _Matches:
    """Return the postings of a query's terms, which are one list for each block and term.

    A posting is a document with its weight for a term. A block is 8,192 consecutive documents.

    Args:
        terms: terms of the query, in the vocabulary.
        weights: their weights.
        tensors: the postings.
        options: numbers of documents and of terms.
    """
    n_terms = options.n_terms
    n_blocks = cdiv(options.n_documents, BLOCK)
    first_keys = torch.arange(n_blocks, device=terms.device)[:, None] * n_terms
    keys = (first_keys + terms).flatten()  # block * n_terms + term, one for each list
    list_starts = tensors.offsets[keys]
    list_lengths = tensors.offsets[keys + 1] - list_starts
    # The lists are concatenated. `n_before` is where a list begins in the result, so adding
    # `list_starts - n_before` to a position in the result gives the position of the posting.
    n_before = list_lengths.cumsum(0) - list_lengths
    positions = torch.arange(int(list_lengths.sum()), device=terms.device)
    postings = positions + torch.repeat_interleave(list_starts - n_before, list_lengths)
    blocks = torch.repeat_interleave(keys // n_terms, list_lengths)
    return _Matches(
        postings=postings,
        documents=blocks * BLOCK + tensors.local_documents[postings].long(),
        query_weights=torch.repeat_interleave(weights.repeat(n_blocks), list_lengths),
    )


def topk(tensors: SearchTensors, options: SearchOptions) -> tuple[Tensor, Tensor]:
    """Return the ``k`` highest positive scores of each query, and their documents.

    Equal scores are in the order of the documents. If fewer documents have a positive score, the
    remaining scores are 0 and the remaining documents -1.

    Args:
        tensors: tensors of the call.
        options: checked options.

    Returns:
        ``[Nq, k]`` int32 with the bits of the fp32 scores, which is how the kernels return them,
        and ``[Nq, k]`` int64 documents.
    """
    best_scores = []
    best_documents = []
    for row in range(tensors.terms.size(0)):  # one query at a time, to bound the memory
        query = tensors._replace(
            weights=tensors.weights[row : row + 1],
            terms=tensors.terms[row : row + 1],
        )
        query_scores = scores(query, options)
        if tensors.allowed is not None:
            query_scores = query_scores * (tensors.allowed != 0)
        sorted_scores, sorted_documents = query_scores.sort(dim=1, descending=True, stable=True)
        best_scores.append(sorted_scores[:, : options.k])
        best_documents.append(sorted_documents[:, : options.k])
    scores_of_all = torch.cat(best_scores)
    documents_of_all = torch.where(scores_of_all > 0, torch.cat(best_documents), -1)
    return scores_of_all.view(torch.int32), documents_of_all


def topk_of_dense(
    tensors: DenseSearchTensors,
    options: SearchOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``k`` highest scores of dense queries, their documents, and the numbers of terms.

    A query with a weight that is negative, infinite or NaN finds nothing, and has -1 terms.

    Args:
        tensors: tensors of the call.
        options: checked options.

    Returns:
        ``[Nq, k]`` int32 bits of the scores, ``[Nq, k]`` int64 documents, and ``[Nq]`` int32
        numbers of terms with a positive weight.
    """
    queries = tensors.queries
    counts = term_counts(queries)
    term_order = tensors.term_order.long()
    weights = torch.where(counts[:, None] >= 0, queries, 0.0).index_select(1, term_order)
    searched = SearchTensors(
        weights=weights,
        terms=tensors.term_order.expand_as(weights),
        offsets=tensors.offsets,
        local_documents=tensors.local_documents,
        postings=tensors.postings,
        largest=tensors.largest,
        allowed=tensors.allowed,
    )
    bits, documents = topk(searched, options)
    return bits, documents, counts


def term_counts(queries: Tensor) -> Tensor:
    """Count the terms of dense queries with a positive weight.

    Args:
        queries: ``[Nq, V]`` fp32.

    Returns:
        ``[Nq]`` int32, -1 for a query with a weight that is negative, infinite or NaN.
    """
    is_valid = ((queries >= 0) & (queries < float("inf"))).all(dim=1)  # False for NaN
    return torch.where(is_valid, (queries > 0).sum(dim=1), -1).int()
