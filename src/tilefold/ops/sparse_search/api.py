"""Exact search over sparse vectors on a device: public function, checks and dispatch."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from tilefold.ops._shared.checks import check_dtype, check_same_device, check_shape, check_tensor
from tilefold.ops._shared.operator import Checked, Operator
from tilefold.ops.sparse_search import _reference
from tilefold.ops.sparse_search._problem import (
    DenseSearchTensors,
    SearchOptions,
    SearchSaved,
    SearchTensors,
    outputs,
    outputs_of_dense,
)
from tilefold.ops.sparse_search.postings import BlockedPostings

MAX_SCORES = 1 << 29  # scores of several queries that are held at a time: 2 GB


def _tiled_forward(
    tensors: SearchTensors,
    options: SearchOptions,
    training: bool,
) -> tuple[Tensor, Tensor]:
    """Search with the reference, which replaces the tiled path.

    Args:
        tensors: tensors of the call.
        options: checked options.
        training: not used.
    """
    return _reference.topk(tensors, options)


SEARCH = Operator(
    "sparse_topk",
    SearchTensors,
    SearchOptions,
    SearchSaved,
    results=("values", "documents"),
    outputs=outputs,
    gradients={},
    plans=partial(importlib.import_module, "tilefold.ops.sparse_search.plans"),  # needs Triton
    tiled=SimpleNamespace(forward=_tiled_forward),
    reference=_reference.topk,
)


def _tiled_forward_of_dense(
    tensors: DenseSearchTensors,
    options: SearchOptions,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Search with the reference, which replaces the tiled path, for dense queries.

    Args:
        tensors: tensors of the call.
        options: checked options.
        training: not used.
    """
    return _reference.topk_of_dense(tensors, options)


def _plans_of_dense() -> SimpleNamespace:
    from tilefold.ops.sparse_search import plans  # needs Triton

    return SimpleNamespace(forward=plans.forward_of_dense)


DENSE_SEARCH = Operator(
    "sparse_topk_of_dense",
    DenseSearchTensors,
    SearchOptions,
    SearchSaved,
    results=("values", "documents", "lengths"),
    outputs=outputs_of_dense,
    gradients={},
    plans=_plans_of_dense,
    tiled=SimpleNamespace(forward=_tiled_forward_of_dense),
    reference=_reference.topk_of_dense,
)


def sparse_topk(
    postings: BlockedPostings,
    terms: Tensor,
    weights: Tensor,
    k: int,
    *,
    allowed: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` documents with the highest inner product with each sparse query.

    The result is exact, and has the same bits in every run. With query weights ``q_t`` and document
    weights ``w_t``, and ``s`` the largest power of two for which ``s sum_t q_t max w_t`` is below
    2^31::

        score = 1/s sum_t max(1, round(s q_t w_t))    over the terms that query and document share

    Sums of integers do not depend on the order of the additions. A term adds an error of at most
    2^-30 of the highest score that a document could have. Not differentiable.

    Args:
        postings: postings of the documents, on the device of the queries.
        terms: ``[Nq, T]`` int32. Terms outside of the vocabulary are ignored. The search is fastest
            if the terms that most documents have come first.
        weights: ``[Nq, T]`` fp32, finite. Terms with a weight of 0 or less are ignored.
        k: number of documents; all documents if there are fewer.
        allowed: ``[N]`` bool or uint8, nonzero for documents that may be returned; ``None`` for
            all.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` (the same) or ``"triton"``.

    Returns:
        ``[Nq, min(k, N)]`` fp32 scores, falling, and int64 documents. Equal scores are in the order
            of the documents. Documents that share no term are not returned: the scores after the
            last one are 0, and the documents -1.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or ``k`` is below 1.
        RuntimeError: if ``impl="triton"`` cannot run here.

    Examples:
        >>> import torch
        >>> from tilefold.ops.sparse_search import BlockedPostings
        >>> offsets = torch.tensor([0, 2, 3])  # term 0 is in two documents, and term 1 in one
        >>> documents = torch.tensor([0, 1, 1], dtype=torch.int32)
        >>> weights = torch.tensor([1.0, 2.0, 4.0])
        >>> postings = BlockedPostings.of(offsets, documents, weights, n_documents=2, device="cpu")
        >>> query_terms = torch.tensor([[0, 1]], dtype=torch.int32)
        >>> sparse_topk(postings, query_terms, torch.tensor([[1.0, 0.5]]), k=2)
        (tensor([[4., 1.]]), tensor([[1, 0]]))
    """
    check_tensor("terms", terms)
    tensors = SearchTensors(
        weights=weights,
        terms=terms,
        offsets=postings.offsets,
        local_documents=postings.local_documents,
        postings=postings.weights,
        largest=postings.largest,
        allowed=_allowed_bytes(allowed, postings),
    )
    options = _options(k, postings)
    batch_size = _queries_per_pass(postings)
    if terms.dim() == 2 and terms.numel() and options.k and terms.size(0) <= batch_size:
        values, documents = SEARCH(tensors, options, impl, _check_arguments)
        return values.view(torch.float32), documents
    _check_arguments(tensors, *options)
    n_queries = terms.size(0)
    if not terms.numel() or not options.k:
        shape = n_queries, options.k
        return weights.new_zeros(shape), terms.new_full(shape, -1, dtype=torch.int64)
    all_values = []
    all_documents = []
    for start in range(0, n_queries, batch_size):
        batch = tensors._replace(
            weights=weights[start : start + batch_size],
            terms=terms[start : start + batch_size],
        )
        values, documents = SEARCH(batch, options, impl, _check_arguments)
        all_values.append(values)
        all_documents.append(documents)
    return torch.cat(all_values).view(torch.float32), torch.cat(all_documents)


def sparse_topk_of_dense(
    postings: BlockedPostings,
    queries: Tensor,
    k: int,
    *,
    allowed: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what :func:`sparse_topk` returns, for few queries with an entry for every term.

    The CPU does not wait for the device, not even for the number of terms. Not differentiable.

    Args:
        postings: postings of the documents, on the device of the queries.
        queries: ``[Nq, V]`` fp32. A search takes 8 bytes per entry on the device, and 4 bytes per
            document and query for the scores.
        k: number of documents; all documents if there are fewer.
        allowed: ``[N]`` bool or uint8, nonzero for documents that may be returned; ``None`` for
            all.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` (the same) or ``"triton"``.

    Returns:
        ``[Nq, min(k, N)]`` fp32 scores and int64 documents as of :func:`sparse_topk`, and ``[Nq]``
        int32 numbers of terms with a positive weight. A query with a weight that is negative,
        infinite or NaN finds nothing, and its number is -1.

    Raises:
        TypeError, ValueError: if a dtype, shape or device is wrong, or ``k`` is below 1.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    check_tensor("queries", queries)
    tensors = DenseSearchTensors(
        queries=queries,
        term_order=postings.term_order,
        offsets=postings.offsets,
        local_documents=postings.local_documents,
        postings=postings.weights,
        largest=postings.largest,
        allowed=_allowed_bytes(allowed, postings),
    )
    options = _options(k, postings)
    if not queries.numel() or not options.k:
        _check_dense_arguments(tensors, *options)
        shape = len(queries), options.k
        no_documents = torch.full(shape, -1, dtype=torch.int64, device=queries.device)
        return queries.new_zeros(shape), no_documents, _reference.term_counts(queries)
    bits, documents, term_counts = DENSE_SEARCH(tensors, options, impl, _check_dense_arguments)
    return bits.view(torch.float32), documents, term_counts


def _allowed_bytes(allowed: Tensor | None, postings: BlockedPostings) -> Tensor | None:
    """Check a mask of documents, and return it as uint8 ``[N]``; ``None`` allows all."""
    if allowed is None:
        return None
    check_shape("allowed", check_tensor("allowed", allowed), "N", N=postings.n_documents)
    check_dtype("allowed", allowed, (torch.bool, torch.uint8), "use allowed != 0.")
    return allowed.contiguous().view(torch.uint8)


def _options(k: int, postings: BlockedPostings) -> SearchOptions:
    """Check the number of documents to return, and return the options of a search."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a positive integer, got {k!r}.")
    return SearchOptions(
        k=min(k, postings.n_documents),
        n_documents=postings.n_documents,
        n_terms=postings.n_terms,
    )


def _queries_per_pass(postings: BlockedPostings) -> int:
    """Return how many queries are searched at a time, so that their scores fit into memory."""
    return max(1, MAX_SCORES // max(1, postings.n_documents))


def _check_arguments(tensors: SearchTensors, k: int, n_documents: int, n_terms: int) -> Checked:
    """Check the tensors of a sparse search, without reading their values.

    Args:
        tensors: terms and weights of the queries, and the postings.
        k: documents per query.
        n_documents: number of documents.
        n_terms: size of the vocabulary.

    Returns:
        The options.
    """
    weights = tensors.weights
    terms = check_tensor("terms", tensors.terms)
    check_shape("terms", terms, "Nq T")
    check_dtype("terms", terms, (torch.int32,), "use terms.int().")
    check_shape(
        "weights",
        check_tensor("weights", weights),
        "Nq T",
        Nq=terms.size(0),
        T=terms.size(1),
    )
    check_dtype("weights", weights, (torch.float32,), "use weights.float().")
    check_same_device(
        "postings",
        tensors.postings,
        {"terms": terms, "weights": weights, "allowed": tensors.allowed},
    )
    return Checked(SearchOptions(k, n_documents, n_terms))


def _check_dense_arguments(
    tensors: DenseSearchTensors,
    k: int,
    n_documents: int,
    n_terms: int,
) -> Checked:
    """Check the tensors of a search with dense queries, without reading their values.

    Args:
        tensors: the queries and the postings.
        k: documents per query.
        n_documents: number of documents.
        n_terms: size of the vocabulary.

    Returns:
        The options.
    """
    queries = check_tensor("queries", tensors.queries)
    check_shape("queries", queries, "Nq V", V=n_terms)
    check_dtype("queries", queries, (torch.float32,), "use queries.float().")
    check_same_device(
        "postings",
        tensors.postings,
        {"queries": queries, "allowed": tensors.allowed},
    )
    return Checked(SearchOptions(k, n_documents, n_terms))
