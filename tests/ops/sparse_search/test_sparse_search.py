"""Exact sparse search returns the documents with the largest sums, in the documented order."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tilefold.ops.sparse_search import BlockedPostings, api, sparse_topk
from tilefold.ops.sparse_search import postings as postings_module

VOCABULARY = 61


class Problem(NamedTuple):
    """Postings and three queries.

    Attributes:
        postings: Postings of the documents.
        terms: ``[3, T]`` terms of the queries.
        weights: ``[3, T]`` weights of the queries. The last query has none.
        exact: ``[3, N]`` scores in fp64.
    """

    postings: BlockedPostings
    terms: Tensor
    weights: Tensor
    exact: Tensor


def random_problem(
    n_documents: int,
    target: Target,
    step: float = 0.0,
    n_terms: int = 7,
) -> Problem:
    """Random postings and queries.

    Args:
        n_documents: Number of documents.
        target: Where the problem is searched.
        step: Weights are multiples of this number, if it is not 0.
        n_terms: Terms of the longest query.
    """
    generator = torch.Generator().manual_seed(n_documents)
    is_posting = torch.rand(n_documents, VOCABULARY, generator=generator) < 0.1
    weights = -torch.log1p(-torch.rand(n_documents, VOCABULARY, generator=generator))
    query_weights = torch.rand(3, n_terms, generator=generator) + 0.01
    if step:
        weights = (weights / step).ceil() * step
        query_weights = (query_weights / step).ceil() * step
    is_posting &= weights > 0
    term, document = is_posting.t().nonzero(as_tuple=True)
    offsets = torch.nn.functional.pad(is_posting.sum(dim=0).cumsum(0), (1, 0))
    blocked = BlockedPostings.of(
        offsets,
        document.int(),
        weights[document, term],
        n_documents,
        target.device,
    )
    query_terms = torch.stack(
        [torch.randperm(VOCABULARY, generator=generator)[:n_terms] for _ in range(3)],
    ).int()
    query_weights[1, n_terms // 2 :] = 0  # fewer terms
    query_weights[2] = 0  # and none
    dense_queries = torch.zeros(3, VOCABULARY).scatter_(1, query_terms.long(), query_weights)
    dense_documents = torch.where(is_posting, weights, 0)
    return Problem(
        blocked,
        query_terms.to(target.device),
        query_weights.to(target.device),
        dense_queries.double() @ dense_documents.double().t(),
    )


def assert_top_k(result: tuple[Tensor, Tensor], exact: Tensor, k: int) -> None:
    """Check values and documents of a search, whose ties are in the order of documents."""
    values, documents = result
    exact_values, order = exact.sort(dim=1, descending=True, stable=True)
    exact_documents = torch.where(exact_values > 0, order, -1)
    assert torch.equal(values.cpu(), exact_values[:, :k].float())
    assert torch.equal(documents.cpu(), exact_documents[:, :k])


@pytest.mark.parametrize(("n_documents", "k"), [(50, 7), (50, 100), (9000, 1), (20000, 150)])
def test_exact_sums_come_in_the_documented_order(
    n_documents: int,
    k: int,
    target: Target,
) -> None:
    # There are many ties, and no sum is rounded.
    problem = random_problem(n_documents, target, step=0.25)
    postings, terms, weights, exact = problem
    assert_top_k(sparse_topk(postings, terms, weights, k, impl=target.impl), exact, k)
    allowed = torch.arange(n_documents) % 3 == 1
    result = sparse_topk(
        postings,
        terms,
        weights,
        k,
        allowed=allowed.to(target.device),
        impl=target.impl,
    )
    assert_top_k(result, exact * allowed, k)


def test_scores_are_right_to_a_part_in_two_to_the_30_of_the_highest(target: Target) -> None:
    postings, terms, weights, exact = random_problem(300, target, n_terms=40)
    values, documents = sparse_topk(postings, terms, weights, 300, impl=target.impl)
    bounds = (weights.double() * postings.largest.double()[terms.long()]).sum(dim=1).cpu()
    for row, bound in enumerate(bounds):
        hits = documents[row][documents[row] >= 0].cpu()
        # All documents that share a term with the query are hits, whatever their sum.
        assert set(hits.tolist()) == set(exact[row].nonzero()[:, 0].tolist())
        exact_values = exact[row, hits]
        error = (values[row, : len(hits)].cpu().double() - exact_values).abs()
        assert bool((error <= 40 * 2.0**-30 * bound + 2.0**-22 * exact_values).all())


def test_the_order_of_terms_and_the_other_queries_change_no_bit(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    postings, terms, weights, _ = random_problem(9000, target)
    values, documents = sparse_topk(postings, terms, weights, 20, impl=target.impl)
    monkeypatch.setattr(api, "MAX_SCORES", 9000)  # one query at a time
    reordered_values, reordered_documents = sparse_topk(
        postings,
        terms.flip(1),
        weights.flip(1),
        20,
        impl=target.impl,
    )
    assert torch.equal(reordered_values, values)
    assert torch.equal(reordered_documents, documents)


def small_postings(target: Target, scale: float) -> BlockedPostings:
    """Four documents: the first two have term 0, the third has term 1."""
    return BlockedPostings.of(
        torch.tensor([0, 2, 3]),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([3.0, 1.0, 2.0]) * scale,
        4,
        target.device,
    )


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_weights_may_be_large_or_small_and_terms_unknown(target: Target, scale: float) -> None:
    terms = torch.tensor([[0, 1, -1, 2]], dtype=torch.int32, device=target.device)
    weights = torch.ones(1, 4, device=target.device)
    values, documents = sparse_topk(
        small_postings(target, scale),
        terms,
        weights,
        4,
        impl=target.impl,
    )
    expected = torch.tensor([[3.0, 2.0, 1.0, 0.0]]) * scale
    torch.testing.assert_close(values.cpu(), expected, rtol=1e-6, atol=0)
    assert documents.tolist() == [[0, 2, 1, -1]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_queries_and_queries_without_terms_find_nothing(
    target: Target,
    shape: tuple[int, int],
) -> None:
    terms = torch.zeros(shape, dtype=torch.int32, device=target.device)
    postings = small_postings(target, 1.0)
    values, documents = sparse_topk(postings, terms, terms.float(), 4, impl=target.impl)
    assert values.shape == documents.shape == (shape[0], 4)
    assert (documents == -1).all()


def test_postings_are_the_same_if_they_are_built_in_slabs(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = random_problem(20000, target).postings
    monkeypatch.setattr(postings_module, "SLAB", 999)
    in_slabs = random_problem(20000, target).postings
    for field in dataclasses.fields(expected):
        value = getattr(in_slabs, field.name)
        expected_value = getattr(expected, field.name)
        if isinstance(expected_value, Tensor):
            assert torch.equal(value, expected_value)
        else:
            assert value == expected_value
    n_postings = expected.weights.numel()
    assert expected.nbytes == 6 * n_postings + 8 * (3 * VOCABULARY + 1) + 4 * VOCABULARY


@pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter")
def test_wrong_arguments_are_named() -> None:
    postings, terms, weights, _ = random_problem(50, Target("auto", "cpu"))
    with pytest.raises(ValueError, match="k must be a positive integer, got 0"):
        sparse_topk(postings, terms, weights, 0)
    with pytest.raises(TypeError, match="terms must have dtype int32, got int64"):
        sparse_topk(postings, terms.long(), weights, 1)
    with pytest.raises(ValueError, match=r"weights must have shape \[Nq, T\] with Nq=3, T=7"):
        sparse_topk(postings, terms, weights[:2], 1)
    with pytest.raises(ValueError, match=r"allowed must have shape \[N\] with N=50"):
        sparse_topk(postings, terms, weights, 1, allowed=terms[0])
    with pytest.raises(RuntimeError, match="impl='triton' cannot run here"):
        sparse_topk(postings, terms, weights, 1, impl="triton")
