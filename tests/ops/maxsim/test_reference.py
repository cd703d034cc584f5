"""The specification of MaxSim: cases computed by hand; gradients are in
``shared/test_references.py``.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tilefold.ops import maxsim

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="this part needs no interpreter")

# two queries of two tokens, two documents of three tokens, D = 2
Q = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 1.0], [-1.0, 0.0]]], dtype=torch.float64)
D = torch.tensor(
    [[[1.0, 2.0], [3.0, -1.0], [0.0, 0.0]], [[-1.0, -2.0], [-3.0, -1.0], [-2.0, -2.0]]],
    dtype=torch.float64,
)
# q0: tokens pick x and y; q1: tokens pick x + y and -x
MAXIMA = torch.tensor([[[3.0, 2.0], [-1.0, -1.0]], [[3.0, 0.0], [-3.0, 3.0]]], dtype=torch.float64)


def score(queries: Tensor = Q, documents: Tensor = D, **options: Any) -> Tensor:
    return maxsim(queries, documents, impl="reference", **options)


def test_scores_by_hand_for_every_pairing() -> None:
    all_pairs = MAXIMA.sum(dim=2)
    assert torch.equal(score(), all_pairs)
    assert torch.equal(score(pairing="aligned"), all_pairs.diagonal())
    pairs = torch.tensor([[1, 0], [0, 1], [1, 0]])
    assert torch.equal(score(pairing=pairs), all_pairs[pairs[:, 0], pairs[:, 1]])
    grouped = torch.stack([D, D.flip(0)])  # [B, N, Ld, D]
    expected = torch.stack([all_pairs[0], all_pairs[1].flip(0)])
    assert torch.equal(score(documents=grouped, pairing="grouped"), expected)


def test_the_mean_divides_by_kept_query_tokens() -> None:
    assert torch.equal(score(reduction="mean"), MAXIMA.mean(dim=2))
    mask = torch.tensor([[1, 0], [0, 0]])
    expected = torch.stack([MAXIMA[0, :, 0], torch.zeros(2, dtype=torch.float64)])
    assert torch.equal(score(reduction="mean", query_mask=mask), expected)


def test_masked_document_tokens_are_left_out_or_score_zero() -> None:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    # document 0 keeps (1, 2) and (0, 0), document 1 keeps (-1, -2) and (-3, -1)
    left_out = torch.tensor([[1.0 + 2.0, -1.0 - 1.0], [3.0 + 0.0, -3.0 + 3.0]], dtype=torch.float64)
    assert torch.equal(score(document_mask=mask), left_out)
    with_zero = torch.tensor([[1.0 + 2.0, 0.0 + 0.0], [3.0 + 0.0, 0.0 + 3.0]], dtype=torch.float64)
    assert torch.equal(score(document_mask=mask, mask_mode="zero"), with_zero)


def test_documents_and_queries_without_tokens_score_zero_with_zero_gradient() -> None:
    mask = torch.tensor([[1, 1, 1], [0, 0, 0]])
    for options in ({}, {"mask_mode": "zero"}, {"temperature": 0.5}):
        queries, documents = Q.clone().requires_grad_(), D.clone().requires_grad_()
        scores = score(queries, documents, document_mask=mask, **options)
        if options != {"mask_mode": "zero", "temperature": 0.5}:
            assert torch.equal(scores[:, 1], torch.zeros(2, dtype=torch.float64))
        dq, dd = torch.autograd.grad(scores[:, 1].sum(), (queries, documents))
        assert not dq.any() and not dd.any()
    assert not score(query_mask=torch.zeros(2, 2)).any()


def test_packed_rows_give_the_same_scores() -> None:
    offsets = torch.tensor([0, 3, 6], dtype=torch.int32)
    assert torch.equal(score(documents=D.flatten(0, 1), cu_seqlens_d=offsets), MAXIMA.sum(dim=2))
    ragged = score(
        Q.flatten(0, 1),
        D.flatten(0, 1),
        cu_seqlens_q=torch.tensor([0, 1, 1, 4]),
        cu_seqlens_d=offsets,
    )
    tokens = torch.tensor([[3.0, -1.0], [2.0, -1.0], [3.0, -3.0], [0.0, 3.0]], dtype=torch.float64)
    assert torch.equal(
        ragged,
        torch.stack([tokens[0], torch.zeros(2, dtype=torch.float64), tokens[1:].sum(dim=0)]),
    )


def test_ties_go_to_the_lowest_document_token() -> None:
    documents = torch.tensor([[[1.0, 0.0], [2.0, 5.0], [2.0, -5.0]]], requires_grad=True)
    score(torch.tensor([[[1.0, 0.0]]]), documents).sum().backward()
    assert torch.equal(documents.grad, torch.tensor([[[0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]]))


def test_a_masked_token_that_wins_at_zero_takes_no_gradient() -> None:
    queries = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    documents = torch.tensor([[[-1.0, 4.0], [7.0, 7.0]]], requires_grad=True)
    out = score(queries, documents, document_mask=torch.tensor([[1, 0]]), mask_mode="zero")
    out.sum().backward()
    assert out.item() == 0 and not queries.grad.any() and not documents.grad.any()


def test_nan_is_seen_where_it_is_kept_and_nowhere_else() -> None:
    documents = D.clone()
    documents[0, 1, 0] = math.nan
    assert score(documents=documents).isnan().tolist() == [[True, False], [True, False]]
    mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
    assert not score(documents=documents, document_mask=mask).isnan().any()
    assert not score(documents=documents, document_mask=mask, mask_mode="zero").isnan().any()
    queries = Q.clone()
    queries[1, 1] = math.nan
    assert score(queries).isnan().tolist() == [[False, False], [True, True]]
    assert not score(queries, query_mask=torch.tensor([[1, 1], [1, 0]])).isnan().any()


def test_the_smooth_maximum_is_a_log_sum_exp_and_tends_to_the_maximum() -> None:
    sims = torch.tensor([3.0, 2.0, 0.0], dtype=torch.float64)
    query, document = (
        torch.eye(1, 2, dtype=torch.float64)[None],
        torch.zeros(1, 3, 2, dtype=torch.float64),
    )
    document[0, :, 0] = sims
    for temperature in (0.1, 1.0, 7.0):
        expected = temperature * torch.logsumexp(sims / temperature, dim=0)
        torch.testing.assert_close(score(query, document, temperature=temperature)[0, 0], expected)
    torch.testing.assert_close(score(temperature=1e-3), MAXIMA.sum(dim=2))


def test_normalized_rows_have_norm_one_and_zero_rows_stay_zero() -> None:
    expected = torch.einsum(
        "qid,njd->qnij",
        *(torch.nn.functional.normalize(t, dim=-1) for t in (Q, D)),
    )
    torch.testing.assert_close(score(normalize=True), expected.amax(dim=3).sum(dim=2))
    zero = torch.zeros(1, 2, 3, requires_grad=True)
    out = maxsim(zero, torch.randn(1, 4, 3), normalize=True, impl="reference")
    out.sum().backward()
    assert out.item() == 0 and not zero.grad.any()


def test_the_reference_can_be_differentiated_again() -> None:
    leaves = [side.clone().requires_grad_() for side in (Q, D)]
    assert torch.autograd.gradgradcheck(lambda q, d: score(q, d, temperature=1.0), leaves)
