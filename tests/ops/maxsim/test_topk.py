"""The best documents of a query."""

from __future__ import annotations

import pytest
import torch

from tests.ops.conftest import Target
from tilefold.ops import maxsim
from tilefold.ops.maxsim import maxsim_topk, quantize_tokens, topk
from tilefold.testing.maxsim import maxsim_inputs


def test_the_best_documents_are_those_of_the_scores(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = maxsim_inputs(3, 11, 4, 7, 16, layout="holes", device=target.device)
    for given in (inputs, inputs.packed()):
        options = given.layout
        del options["pairing"]
        scores = maxsim(given.queries, given.documents, **options, impl=target.impl)
        for block in (65536, 4):
            monkeypatch.setattr(topk, "TOPK_DOCUMENTS", block)
            best, which = maxsim_topk(given.queries, given.documents, 5, **options, impl=target.impl)
            torch.testing.assert_close(best, scores.sort(dim=1, descending=True).values[:, :5])
            torch.testing.assert_close(scores.gather(1, which), best)
    best, which = maxsim_topk(inputs.queries, inputs.documents, 50, impl=target.impl)
    assert best.shape == (3, 11) and which.sort(dim=1).values.tolist() == [list(range(11))] * 3


def test_quantized_documents_are_ranked_block_by_block(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = maxsim_inputs(2, 9, 4, 7, 32, device=target.device)
    documents = quantize_tokens(inputs.documents)
    whole = maxsim_topk(inputs.queries, documents, 3, impl=target.impl)
    monkeypatch.setattr(topk, "TOPK_DOCUMENTS", 4)
    blocks = maxsim_topk(inputs.queries, documents, 3, impl=target.impl)
    for a, b in zip(whole, blocks, strict=True):
        torch.testing.assert_close(a, b)


def test_a_number_of_documents_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="k must be a positive integer, got 0"):
        maxsim_topk(torch.randn(3, 2, 4), torch.randn(2, 5, 4), 0)
