"""A search with dense queries returns what a search with their terms returns, and checks them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.ops.sparse_search.test_sparse_search import VOCABULARY, Problem, random_problem
from tilefold.ops.sparse_search import BlockedPostings, sparse_topk, sparse_topk_of_dense


def dense_queries_of(problem: Problem) -> Tensor:
    """Return the queries of a problem with an entry for every term, ``[3, V]``."""
    queries = torch.zeros(3, VOCABULARY, device=problem.terms.device)
    return queries.scatter_(1, problem.terms.long(), problem.weights)


@pytest.mark.parametrize(("n_documents", "k"), [(50, 7), (50, 100), (9000, 20)])
def test_dense_queries_find_the_same_bits_as_their_terms(
    n_documents: int,
    k: int,
    target: Target,
) -> None:
    problem = random_problem(n_documents, target)
    queries = dense_queries_of(problem)
    allowed = (torch.arange(n_documents) % 3 == 1).to(target.device)
    for mask in (None, allowed):
        expected_scores, expected_documents = sparse_topk(
            problem.postings,
            problem.terms,
            problem.weights,
            k,
            allowed=mask,
            impl=target.impl,
        )
        scores, documents, term_counts = sparse_topk_of_dense(
            problem.postings,
            queries,
            k,
            allowed=mask,
            impl=target.impl,
        )
        assert torch.equal(scores, expected_scores)
        assert torch.equal(documents, expected_documents)
        assert term_counts.tolist() == (queries > 0).sum(dim=1).tolist()


def test_the_first_terms_are_those_of_most_documents(target: Target) -> None:
    postings = random_problem(300, target).postings
    counts = postings.counts[postings.term_order.long()]
    assert (counts.diff() <= 0).all()
    assert postings.term_order.sort().values.tolist() == list(range(VOCABULARY))


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), -1.0])
def test_a_query_with_an_invalid_weight_finds_nothing_and_is_marked(
    weight: float,
    target: Target,
) -> None:
    problem = random_problem(50, target)
    queries = dense_queries_of(problem)
    expected_scores, _, expected_counts = sparse_topk_of_dense(
        problem.postings,
        queries,
        7,
        impl=target.impl,
    )
    queries[1, -1] = weight
    scores, documents, term_counts = sparse_topk_of_dense(
        problem.postings,
        queries,
        7,
        impl=target.impl,
    )
    assert term_counts.tolist() == [expected_counts[0].item(), -1, 0]
    assert documents[1].tolist() == [-1] * 7
    assert scores[1].tolist() == [0.0] * 7
    assert torch.equal(scores[0], expected_scores[0])


def test_queries_in_columns_of_a_larger_tensor_are_searched_like_others(target: Target) -> None:
    problem = random_problem(50, target)
    queries = dense_queries_of(problem)
    expected, _, _ = sparse_topk_of_dense(problem.postings, queries, 7, impl=target.impl)
    strided = queries.t().contiguous().t()
    scores, _, _ = sparse_topk_of_dense(problem.postings, strided, 7, impl=target.impl)
    assert torch.equal(scores, expected)


def test_no_queries_find_nothing(target: Target) -> None:
    postings = random_problem(50, target).postings
    queries = torch.zeros(0, VOCABULARY, device=target.device)
    scores, documents, term_counts = sparse_topk_of_dense(postings, queries, 4, impl=target.impl)
    assert scores.shape == documents.shape == (0, 4)
    assert term_counts.shape == (0,)
    assert documents.dtype == torch.int64
    assert term_counts.dtype == torch.int32


def test_terms_are_counted_without_documents(target: Target) -> None:
    no_rows = torch.zeros(0, dtype=torch.int32)
    postings = BlockedPostings.of(
        torch.zeros(3, dtype=torch.int64),
        no_rows,
        no_rows.float(),
        n_documents=0,
        device=target.device,
    )
    queries = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, -1.0]], device=target.device)
    scores, documents, term_counts = sparse_topk_of_dense(postings, queries, 4, impl=target.impl)
    assert scores.shape == documents.shape == (3, 0)
    assert term_counts.tolist() == [2, 0, -1]
    assert term_counts.dtype == torch.int32


@pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter")
def test_wrong_dense_queries_are_named() -> None:
    problem = random_problem(50, Target("auto", "cpu"))
    queries = dense_queries_of(problem)
    with pytest.raises(ValueError, match="k must be a positive integer, got 0"):
        sparse_topk_of_dense(problem.postings, queries, 0)
    with pytest.raises(TypeError, match="queries must have dtype float32, got float64"):
        sparse_topk_of_dense(problem.postings, queries.double(), 1)
    with pytest.raises(ValueError, match=rf"queries must have shape \[Nq, V\] with V={VOCABULARY}"):
        sparse_topk_of_dense(problem.postings, queries[:, 1:], 1)
    with pytest.raises(ValueError, match=r"allowed must have shape \[N\] with N=50"):
        sparse_topk_of_dense(problem.postings, queries, 1, allowed=problem.terms[0])
