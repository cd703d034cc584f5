"""Exact search over sparse vectors on a device, public function: checks, and dispatch."""

from __future__ import annotations

import importlib
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from tilefold.ops._shared.checks import check_dtype, check_same_device, check_shape, check_tensor
from tilefold.ops._shared.operator import Checked, Operator
from tilefold.ops.sparse_search import _reference
from tilefold.ops.sparse_search._problem import SearchOptions, SearchSaved, SearchTensors, outputs
from tilefold.ops.sparse_search.postings import BlockedPostings

HELD = 1 << 29  # scores of several queries that are held at a time: 2 GB
SEARCH = Operator(
    "sparse_topk",
    SearchTensors,
    SearchOptions,
    SearchSaved,
    results=("values", "documents"),
    outputs=outputs,
    gradients={},
    plans=partial(importlib.import_module, "tilefold.ops.sparse_search.plans"),  # needs Triton
    tiled=SimpleNamespace(
        forward=lambda tensors, options, training: _reference.topk(tensors, options),
    ),
    reference=_reference.topk,
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
    """The ``k`` documents of the highest inner product with each sparse query, exact and the same
    bits in every run.

    With query weights ``q_t`` and document weights ``w_t``, and ``s`` the largest power of two for
    which ``s sum_t q_t max w_t`` is below 2^31::

        score = 1/s sum_t max(1, round(s q_t w_t))                          over the terms that both have

    Sums of integers do not depend on their order, so that additions may happen in any. A term adds
    an error of at most 2^-30 of the highest score that a document could have. Not differentiable.

    Args:
        postings: of the documents, on the device of the queries.
        terms: ``[Nq, T]`` int32. What lies outside of the vocabulary counts nothing. It is fast to
            have the terms of most documents first.
        weights: ``[Nq, T]`` fp32, finite; those of 0 and below count nothing.
        k: how many; all documents where there are fewer.
        allowed: ``[N]`` bool or uint8, nonzero for documents that may be found; ``None`` for all.
        impl: ``"auto"``, ``"reference"``, ``"tiled"`` (the same) or ``"triton"``.

    Returns:
        ``[Nq, min(k, N)]`` fp32 scores, falling, and int64 documents, equal scores by document. Documents that share
        no term are not found: 0 and -1 stand behind the last.

    Raises:
        TypeError, ValueError: for tensors of other dtypes, shapes and devices, and a ``k`` below 1.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a positive integer, got {k!r}.")
    check_tensor("terms", terms)
    if allowed is not None:
        check_shape("allowed", check_tensor("allowed", allowed), "N", N=postings.n_documents)
        check_dtype("allowed", allowed, (torch.bool, torch.uint8), "use allowed != 0.")
        allowed = allowed.contiguous().view(torch.uint8)
    tensors = SearchTensors(
        weights,
        terms,
        postings.offsets,
        postings.places,
        postings.weights,
        postings.largest,
        allowed,
    )
    options = SearchOptions(min(k, postings.n_documents), postings.n_documents, postings.n_terms)
    step = max(1, HELD // max(1, postings.n_documents))
    if terms.dim() == 2 and terms.numel() and options.k and terms.size(0) <= step:
        values, documents = SEARCH(tensors, options, impl, _checked)
        return values.view(torch.float32), documents
    _checked(tensors, *options)
    if not terms.numel() or not options.k:
        shape = terms.size(0), options.k
        return weights.new_zeros(shape), terms.new_full(shape, -1, dtype=torch.int64)
    parts = [
        tensors._replace(weights=weights[low : low + step], terms=terms[low : low + step])
        for low in range(0, terms.size(0), step)
    ]
    values, documents = map(
        torch.cat,
        zip(*(SEARCH(part, options, impl, _checked) for part in parts), strict=True),
    )
    return values.view(torch.float32), documents


def _checked(tensors: SearchTensors, *options: int) -> Checked:
    weights, terms = tensors.weights, tensors.terms
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
    return Checked(SearchOptions(*options))
