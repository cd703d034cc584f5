"""Ranking losses as modules with ``compute_loss_from_embeddings``, which ``SpladeLoss`` takes as
its ``loss``.

``embeddings`` are those of its columns: queries ``[B, V]``, relevant documents ``[B, V]``, and one
``[B, V]`` per column of negatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilefold._internal.sigmoid import sigmoid
from tilefold.distributed.collectives import sum_over_rows
from tilefold.distributed.process_group import ranks_of

__all__ = ["PairwiseSoftmaxLoss", "TermRecallLoss", "WeightedLosses", "WeightedTerms", "check_term"]


class WeightedTerms(nn.Module):
    """Pairs of a module with ``compute_loss_from_embeddings`` and its weight."""

    kind, remedy = "a loss", "losses that SpladeLoss takes"  # for messages

    def __init__(self, terms: Iterable[tuple[nn.Module, float]]) -> None:
        super().__init__()
        if not (pairs := list(terms)):
            raise ValueError(
                f"terms must be at least one pair of {self.kind} and its weight, got an empty list.",
            )
        for term, _ in pairs:
            check_term("terms", term, self.remedy)
        self.terms, self.weights = (
            nn.ModuleList(term for term, _ in pairs),
            [float(weight) for _, weight in pairs],
        )

    def weighted_sum(self, *arguments: object) -> Tensor:
        """The sum of the terms of these arguments, a scalar."""
        terms: Iterable[Any] = self.terms
        pairs = zip(terms, self.weights, strict=True)
        return torch.stack(
            [weight * term.compute_loss_from_embeddings(*arguments) for term, weight in pairs],
        ).sum()


def check_term(name: str, term: object, remedy: str) -> None:
    """Raise ``TypeError`` for a module that is no term of ``SpladeLoss``."""
    if not callable(getattr(term, "compute_loss_from_embeddings", None)):
        raise TypeError(
            f"{name} must have compute_loss_from_embeddings, got {type(term).__name__}; pass {remedy}.",
        )


class WeightedLosses(WeightedTerms):
    """A weighted sum of losses, as SPLADE-v3 (arXiv 2403.06789) adds KL and MarginMSE.

    Args:
        terms: pairs of a loss with ``compute_loss_from_embeddings``, ours or
            sentence-transformers', and a weight.

    Raises:
        TypeError: if a term has no ``compute_loss_from_embeddings``.
        ValueError: if there is no term.
    """

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        labels: Tensor | None = None,
    ) -> Tensor:
        """``sum_i weight_i * term_i``, a scalar."""
        return self.weighted_sum(embeddings, labels)


class PairwiseSoftmaxLoss(nn.Module):
    """``mean_b mean_i (1 - P_bi)`` with ``P_bi = softmax(s(q_b, d_b), s(q_b, n_bi))`` of the
    relevant document.

    The loss of EPIC (MacAvaney et al., arXiv 2004.14245), which has one negative ``n`` per query;
    with more, each makes a pair of its own.
    """

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        labels: Tensor | None = None,
    ) -> Tensor:
        """The mean probability of the negatives, a scalar in [0, 1]; labels are not read."""
        queries, *documents = _columns(embeddings, 3, "a query, a relevant document and negatives")
        relevant, *negatives = ((queries * document).sum(dim=1) for document in documents)
        return sigmoid(torch.stack(negatives) - relevant).mean()


class TermRecallLoss(nn.Module):
    """``sum_bv m_bv (d_bv - q_bv)^2 / sum_bv m_bv``: documents' term weights learn in which queries
    a term occurs.

    ``m`` marks the terms of the document (its nonzero weights), and ``q_bv`` is 1 if the query has
    term v, else 0. Over all queries of a document the weight that minimises this is the term's
    recall, the share of relevant queries with that term, which is the target of DeepCT (Dai and
    Callan, arXiv 1910.10687). Ranks of torch.distributed hold other rows: the average of their
    values is that of all rows.
    """

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        labels: Tensor | None = None,
    ) -> Tensor:
        """The mean squared error over the terms of the relevant documents, a scalar; labels are not
        read.
        """
        queries, documents, *_ = _columns(embeddings, 2, "a query and a relevant document")
        present = (documents != 0).to(documents.dtype)
        target = (queries.detach() != 0).to(documents.dtype)
        terms, ranks = present.sum(), ranks_of("world")
        if ranks is not None:  # a mean over the terms of all ranks, whose gradients DDP averages
            terms = sum_over_rows(terms, ranks) / dist.get_world_size(ranks)
        return (present * (documents - target).square()).sum() / terms.clamp(min=1)


def _columns(embeddings: Sequence[Tensor], least: int, what: str) -> list[Tensor]:
    """The columns in fp32 (fp64)."""
    if len(embeddings) < least:
        raise ValueError(
            f"embeddings must have at least {least} columns ({what}), got {len(embeddings)}.",
        )
    return [column.to(torch.promote_types(column.dtype, torch.float32)) for column in embeddings]
