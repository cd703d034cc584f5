"""Ranking losses that ``SpladeLoss`` accepts as its ``loss``.

They have a method ``compute_loss_from_embeddings``. Its ``embeddings`` are those of the columns:
queries ``[B, V]``, relevant documents ``[B, V]``, and one ``[B, V]`` per column of negatives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilefold._internal.arguments import check_number, list_of
from tilefold._internal.sigmoid import sigmoid
from tilefold.distributed.collectives import sum_over_rows
from tilefold.distributed.process_group import resolve_group

__all__ = ["PairwiseSoftmaxLoss", "TermRecallLoss", "WeightedLosses", "WeightedTerms", "check_term"]


class WeightedTerms(nn.Module):
    """Modules with ``compute_loss_from_embeddings``, and their weights.

    Attributes:
        kind: the kind of term, for error messages.
        remedy: terms that would be accepted, for error messages.
    """

    kind = "a loss"
    remedy = "losses that SpladeLoss takes"

    def __init__(self, terms: Iterable[tuple[nn.Module, float]]) -> None:
        """Store the terms of a weighted sum.

        Args:
            terms: pairs of a module with ``compute_loss_from_embeddings`` and its weight.

        Raises:
            TypeError: if a term is not such a pair.
            ValueError: if there is no term.
        """
        super().__init__()
        pairs = list_of("terms", terms)
        if not pairs:
            raise ValueError(
                f"terms must be at least one pair of {self.kind} and its weight, "
                "got an empty list.",
            )
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(
                    f"terms must be pairs of {self.kind} and its weight, got "
                    f"{type(pair).__name__}; pass [(term, weight)].",
                )
            term, weight = pair
            check_term("terms", term, self.remedy)
            check_number("terms: weight", weight)
        self.terms = nn.ModuleList(term for term, _ in pairs)
        self.weights = [float(weight) for _, weight in pairs]

    def weighted_sum(self, *arguments: object) -> Tensor:
        """Call every term with the arguments, and return the weighted sum, a scalar."""
        terms: Iterable[Any] = self.terms
        losses = [
            weight * term.compute_loss_from_embeddings(*arguments)
            for term, weight in zip(terms, self.weights, strict=True)
        ]
        return torch.stack(losses).sum()


def check_term(name: str, term: object, remedy: str) -> None:
    """Raise ``TypeError`` if a module is not a loss or regulariser that ``SpladeLoss`` can call.

    Args:
        name: name of the argument.
        term: the module.
        remedy: what to pass instead, for the error message.
    """
    if not callable(getattr(term, "compute_loss_from_embeddings", None)):
        raise TypeError(
            f"{name} must have compute_loss_from_embeddings, got {type(term).__name__}; "
            f"pass {remedy}.",
        )


class WeightedLosses(WeightedTerms):
    """A weighted sum of losses, as SPLADE-v3 (arXiv 2403.06789) adds KL and MarginMSE.

    Args:
        terms: pairs of a loss with ``compute_loss_from_embeddings``, ours or
            sentence-transformers', and a weight.

    Raises:
        TypeError: if a term has no ``compute_loss_from_embeddings``.
        ValueError: if there is no term.

    Examples:
        >>> import torch
        >>> from tilefold.losses import PairwiseSoftmaxLoss, TermRecallLoss
        >>> loss = WeightedLosses([(PairwiseSoftmaxLoss(), 1.0), (TermRecallLoss(), 0.1)])
        >>> embeddings = list(torch.rand(3, 4, 100))  # queries, relevant documents and negatives
        >>> loss.compute_loss_from_embeddings(embeddings).shape
        torch.Size([])
    """

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        labels: Tensor | None = None,
    ) -> Tensor:
        """Compute ``sum_i weight_i * term_i``, a scalar."""
        return self.weighted_sum(embeddings, labels)


class PairwiseSoftmaxLoss(nn.Module):
    """The pairwise softmax loss of EPIC (MacAvaney et al., arXiv 2004.14245).

    ``mean_b mean_i (1 - P_bi)`` with ``P_bi = softmax(s(q_b, d_b), s(q_b, n_bi))`` of the relevant
    document. The paper has one negative ``n`` per query. Several negatives make one pair each.

    Examples:
        >>> import torch
        >>> embeddings = list(torch.rand(3, 4, 100))  # queries, relevant documents and negatives
        >>> loss = PairwiseSoftmaxLoss().compute_loss_from_embeddings(embeddings)
        >>> 0 < loss < 1
        tensor(True)
    """

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the mean probability of the negatives, a scalar in [0, 1].

        In the softmax of a pair of scores, a negative with score n has the probability
        ``sigmoid(n - s)``, where s is the score of the relevant document. The loss is the mean of
        these probabilities.

        Args:
            embeddings: vectors ``[B, V]`` of the queries, the relevant documents, and each column
                of negatives.
            labels: ignored.
        """
        queries, *documents = _columns_in_fp32(
            embeddings,
            at_least=3,
            description="a query, a relevant document and negatives",
        )
        scores = [(queries * document).sum(dim=1) for document in documents]  # [B] each
        relevant_scores, *negative_scores = scores
        return sigmoid(torch.stack(negative_scores) - relevant_scores).mean()


class TermRecallLoss(nn.Module):
    """The term recall loss of DeepCT (Dai and Callan, arXiv 1910.10687).

    Documents' term weights learn in which queries a term occurs: ``sum_bv m_bv (d_bv - q_bv)^2 /
    sum_bv m_bv``. ``m`` marks the terms of the document (its nonzero weights), and ``q_bv`` is 1 if
    the query has term v, else 0. Over all queries of a document the weight that minimises this is
    the term's recall, the share of relevant queries with that term. Ranks of torch.distributed hold
    other rows: the average of their values is that of all rows.

    Examples:
        >>> import torch
        >>> queries = torch.tensor([[1.0, 0.0, 0.0]])  # the query has the first term
        >>> documents = torch.tensor([[1.0, 0.5, 0.0]])
        >>> TermRecallLoss().compute_loss_from_embeddings([queries, documents])
        tensor(0.1250)
    """

    def compute_loss_from_embeddings(
        self,
        embeddings: list[Tensor],
        labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the mean squared error of the documents' nonzero term weights.

        The target of a weight is 1 if the query contains the term, and 0 otherwise. With
        torch.distributed, the average of the ranks' losses is the mean over all their documents.

        Args:
            embeddings: vectors ``[B, V]`` of the queries, then of their relevant documents.
                Negatives are ignored.
            labels: ignored.

        Returns:
            A scalar, 0 if no document has a nonzero weight.
        """
        queries, documents, *_ = _columns_in_fp32(
            embeddings,
            at_least=2,
            description="a query and a relevant document",
        )
        is_nonzero = (documents != 0).to(documents.dtype)
        targets = (queries.detach() != 0).to(documents.dtype)
        squared_errors = is_nonzero * (documents - targets).square()
        n_weights = is_nonzero.sum()
        n_ranks = 1
        all_ranks = resolve_group("world")
        if all_ranks is not None:
            # DDP averages the gradients of the ranks. Every rank therefore divides by the mean
            # number of nonzero weights of a rank, so that each weight of each rank counts equally.
            n_weights = sum_over_rows(n_weights, all_ranks)
            n_ranks = dist.get_world_size(all_ranks)
        return squared_errors.sum() * n_ranks / n_weights.clamp(min=1)


def _columns_in_fp32(
    embeddings: Sequence[Tensor],
    at_least: int,
    description: str,
) -> list[Tensor]:
    """Check the number of columns of a batch, and return them in fp32, or in fp64 as they are.

    Args:
        embeddings: vectors ``[B, V]`` of each column of texts: queries, relevant documents, and
            negatives.
        at_least: the smallest number of columns that the loss can use.
        description: what these columns are, for the error message.

    Raises:
        ValueError: if there are fewer columns.
    """
    if len(embeddings) < at_least:
        raise ValueError(
            f"embeddings must have at least {at_least} columns ({description}), "
            f"got {len(embeddings)}.",
        )
    return [column.to(torch.promote_types(column.dtype, torch.float32)) for column in embeddings]
