"""Ranking losses by hand, in sums, and as the ``loss`` of ``SpladeLoss``."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tilefold.losses import PairwiseSoftmaxLoss, TermRecallLoss, WeightedLosses

QUERIES = torch.tensor([[1.0, 0.0, 2.0]])
RELEVANT = torch.tensor([[0.5, 1.0, 0.0]])
NEGATIVE = torch.tensor([[0.0, 1.0, 0.25]])


def test_the_loss_of_epic_is_the_probability_of_the_negatives() -> None:
    value = PairwiseSoftmaxLoss().compute_loss_from_embeddings([QUERIES, RELEVANT, NEGATIVE, 2 * NEGATIVE])
    pairs = [math.exp(score) / (math.exp(0.5) + math.exp(score)) for score in (0.5, 1.0)]
    assert value.item() == pytest.approx(sum(pairs) / 2)
    with pytest.raises(ValueError, match=r"at least 3 columns \(a query, a relevant document and negatives\), got 2"):
        PairwiseSoftmaxLoss().compute_loss_from_embeddings([QUERIES, RELEVANT])


def test_the_loss_of_deepct_is_least_at_the_recall_of_a_term() -> None:
    value = TermRecallLoss().compute_loss_from_embeddings([QUERIES, RELEVANT])
    assert value.item() == pytest.approx(((0.5 - 1) ** 2 + (1 - 0) ** 2) / 2)  # the third term is not in the document
    document = torch.full((4, 2), 0.5, requires_grad=True)
    queries = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    shared = document.mean(dim=0, keepdim=True).expand(4, 2)
    TermRecallLoss().compute_loss_from_embeddings([queries, shared]).backward()
    at_recall = torch.tensor([[0.75, 0.25]]).expand(4, 2).clone().requires_grad_()
    TermRecallLoss().compute_loss_from_embeddings([queries, at_recall]).backward()
    assert document.grad.sum(dim=0).abs().min() > 0.1
    assert at_recall.grad.sum(dim=0).abs().max() < 1e-6


class First(nn.Module):
    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        return embeddings[0].sum() if labels is None else labels.sum()


def test_a_weighted_sum_passes_labels_on_and_checks_its_terms() -> None:
    terms = [(First(), 2.0), (PairwiseSoftmaxLoss(), 0.5)]
    value = WeightedLosses(terms).compute_loss_from_embeddings([QUERIES, RELEVANT, NEGATIVE], torch.tensor([4.0]))
    assert value.item() == pytest.approx(8 + 0.5 * 0.5)
    with pytest.raises(ValueError, match=r"at least one pair .* got an empty list"):
        WeightedLosses([])
    with pytest.raises(TypeError, match="compute_loss_from_embeddings, got Linear"):
        WeightedLosses([(nn.Linear(1, 1), 1.0)])
