"""Exact sparse search: the best documents of sums in fp64, ties in the documented order, the same
bits in any order.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.refusals import refused
from tilefold.ops.sparse_search import BlockedPostings, api, postings, sparse_topk

VOCABULARY = 61
Made = tuple[BlockedPostings, Tensor, Tensor, Tensor]


def made(count: int, target: Target, step: float = 0.0, terms: int = 7) -> Made:
    """Postings of `count` documents, three queries, and the exact scores; weights are multiples of
    `step`, if any.
    """
    generator = torch.Generator().manual_seed(count)
    kept = torch.rand(count, VOCABULARY, generator=generator) < 0.1
    weights = -torch.log1p(-torch.rand(count, VOCABULARY, generator=generator))
    asked = torch.rand(3, terms, generator=generator) + 0.01
    if step:
        weights, asked = (weights / step).ceil() * step, (asked / step).ceil() * step
    kept &= weights > 0
    term, document = kept.t().nonzero(as_tuple=True)
    offsets = torch.nn.functional.pad(kept.sum(dim=0).cumsum(0), (1, 0))
    lists = BlockedPostings.of(
        offsets,
        document.int(),
        weights[document, term],
        count,
        target.device,
    )
    chosen = torch.stack(
        [torch.randperm(VOCABULARY, generator=generator)[:terms] for _ in range(3)],
    ).int()
    asked[1, terms // 2 :], asked[2] = 0, 0  # fewer terms, and none
    dense = torch.zeros(3, VOCABULARY).scatter_(1, chosen.long(), asked).double()
    exact = dense @ torch.where(kept, weights, 0).double().t()
    return lists, chosen.to(target.device), asked.to(target.device), exact


def expected(exact: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, documents = exact.sort(dim=1, descending=True, stable=True)
    return values[:, :k].float(), torch.where(values > 0, documents, -1)[:, :k]


@pytest.mark.parametrize(("count", "k"), [(50, 7), (50, 100), (9000, 1), (20000, 150)])
def test_exact_sums_come_in_the_documented_order(count: int, k: int, target: Target) -> None:
    lists, terms, weights, exact = made(
        count,
        target,
        step=0.25,
    )  # many ties, and no sum is rounded
    values, documents = sparse_topk(lists, terms, weights, k, impl=target.impl)
    best, which = expected(exact, k)
    assert torch.equal(values.cpu(), best) and torch.equal(documents.cpu(), which)
    allowed = torch.arange(count) % 3 == 1
    values, documents = sparse_topk(
        lists,
        terms,
        weights,
        k,
        allowed=allowed.to(target.device),
        impl=target.impl,
    )
    best, which = expected(exact * allowed, k)
    assert torch.equal(values.cpu(), best) and torch.equal(documents.cpu(), which)


def test_scores_are_right_to_a_part_in_two_to_the_30_of_the_highest(target: Target) -> None:
    lists, terms, weights, exact = made(300, target, terms=40)
    values, documents = sparse_topk(lists, terms, weights, 300, impl=target.impl)
    bound = (weights.double() * lists.largest.double()[terms.long()]).sum(dim=1).cpu()
    for row in range(3):
        found = documents[row][documents[row] >= 0].cpu()
        assert set(found.tolist()) == set(
            exact[row].nonzero()[:, 0].tolist(),
        )  # whatever the sum, what shares a term
        error = (values[row, : len(found)].cpu().double() - exact[row, found]).abs()
        assert bool((error <= 40 * 2.0**-30 * bound[row] + 2.0**-22 * exact[row, found]).all())


def test_the_order_of_terms_and_the_queries_beside_do_not_matter(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lists, terms, weights, _ = made(9000, target)
    once = sparse_topk(lists, terms, weights, 20, impl=target.impl)
    monkeypatch.setattr(api, "MAX_SCORES", 9000)  # one query at a time
    again = sparse_topk(lists, terms.flip(1), weights.flip(1), 20, impl=target.impl)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_large_and_small_weights_and_terms_of_another_vocabulary(target: Target) -> None:
    offsets, documents = torch.tensor([0, 2, 3]), torch.tensor([0, 1, 2], dtype=torch.int32)
    for scale in (1e-30, 1.0, 1e30):
        lists = BlockedPostings.of(
            offsets,
            documents,
            torch.tensor([3.0, 1.0, 2.0]) * scale,
            4,
            target.device,
        )
        terms = torch.tensor([[0, 1, -1, 2]], dtype=torch.int32, device=target.device)
        values, found = sparse_topk(
            lists,
            terms,
            torch.ones(1, 4, device=target.device),
            4,
            impl=target.impl,
        )
        torch.testing.assert_close(
            values.cpu(),
            torch.tensor([[3.0, 2.0, 1.0, 0.0]]) * scale,
            rtol=1e-6,
            atol=0,
        )
        assert found.tolist() == [[0, 2, 1, -1]]
    for shape in ((0, 3), (2, 0)):
        nothing = torch.zeros(shape, dtype=torch.int32, device=target.device)
        values, found = sparse_topk(lists, nothing, nothing.float(), 4, impl=target.impl)
        assert values.shape == found.shape == (shape[0], 4) and (found == -1).all()


def test_postings_are_cut_into_blocks_piece_by_piece(
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, *_ = made(20000, target)
    monkeypatch.setattr(postings, "SLAB", 999)
    pieces, *_ = made(20000, target)
    for field in dataclasses.fields(whole):
        a, b = getattr(whole, field.name), getattr(pieces, field.name)
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert whole.nbytes == 6 * whole.weights.numel() + 8 * (3 * VOCABULARY + 1) + 4 * VOCABULARY


@pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter")
def test_what_cannot_be_searched_is_refused() -> None:
    lists, terms, weights, _ = made(50, Target("auto", "cpu"))
    refused(
        ValueError,
        "k must be a positive integer, got 0",
        sparse_topk,
        lists,
        terms,
        weights,
        0,
    )
    refused(
        TypeError,
        "terms must have dtype int32, got int64",
        sparse_topk,
        lists,
        terms.long(),
        weights,
        1,
    )
    refused(
        ValueError,
        r"weights must have shape \[Nq, T\] with Nq=3, T=7",
        sparse_topk,
        lists,
        terms,
        weights[:2],
        1,
    )
    refused(
        ValueError,
        r"allowed must have shape \[N\] with N=50",
        sparse_topk,
        lists,
        terms,
        weights,
        1,
        allowed=terms[0],
    )
    refused(
        RuntimeError,
        "impl='triton' cannot run here",
        sparse_topk,
        lists,
        terms,
        weights,
        1,
        impl="triton",
    )
