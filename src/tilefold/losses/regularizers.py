"""Regularisers that ``SpladeLoss`` accepts for queries or documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilefold.distributed.collectives import Group, local_scores
from tilefold.losses.functional import (
    anti_zero,
    check_df_options,
    check_epsilon,
    check_threshold,
    df_weights,
    flops,
    l1,
    l2,
)
from tilefold.losses.ranking import WeightedTerms, check_term


class Regularizer(nn.Module):
    """Base class of regularisers: functions of the scores ``[B, V]`` of queries or documents.

    Args:
        group: ranks that hold other rows of the batch: a process group, ``"world"`` (all ranks,
            where torch.distributed is initialised), or ``None`` for no others. Where several ranks
            hold the same rows (tensor parallelism with gathered scores), pass the data-parallel
            group, or ``None``.
    """

    def __init__(self, group: Group = "world") -> None:
        super().__init__()
        self.group = group

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """Compute the penalty of scores ``[B, V]``, a scalar."""
        raise NotImplementedError

    def forward(self, embeddings: Tensor) -> Tensor:
        return self.compute_loss_from_embeddings(embeddings)


class _Thresholded(Regularizer):
    """Base class of regularisers that ignore rows with few nonzero scores."""

    _penalty: Callable[..., Tensor]

    def __init__(self, threshold: float | None = None, group: Group = "world") -> None:
        super().__init__(group)
        check_threshold(threshold)
        self.threshold = threshold

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        return type(self)._penalty(embeddings, threshold=self.threshold, group=self.group)


class GlobalFlopsLoss(_Thresholded):
    """FLOPS over the batch of all ranks: ``sum_v (mean_b w[b, v])^2``.

    See :func:`tilefold.losses.flops`. Pass it to ``SpladeLoss(...,
    document_regularizer=GlobalFlopsLoss())``. On one process it equals ``FlopsLoss`` of
    sentence-transformers; on W ranks it equals what one process with W times the rows computes, so
    that the weight found on one GPU keeps its meaning. Cost: one all-reduce of ``[V]`` in forward,
    none in backward.

    Args:
        threshold: rows with at most this many nonzero scores count as zero (the l0 mask of arXiv
            2504.14839).
        group: ranks that hold other rows of the batch; see :class:`Regularizer`.

    Examples:
        >>> import torch
        >>> regularizer = GlobalFlopsLoss()
        >>> regularizer.compute_loss_from_embeddings(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
        tensor(5.)
    """

    _penalty = staticmethod(flops)


class L1Loss(_Thresholded):
    """L1 penalty ``mean_b sum_v |w|``.

    See :func:`tilefold.losses.l1`. Arguments are those of :class:`GlobalFlopsLoss`. A mean over
    rows is the same on any number of ranks with equal batches; ``group`` matters where they differ.

    Examples:
        >>> import torch
        >>> L1Loss().compute_loss_from_embeddings(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
        tensor(3.)
    """

    _penalty = staticmethod(l1)


class L2Loss(_Thresholded):
    """Squared L2 penalty ``mean_b sum_v w^2``.

    See :func:`tilefold.losses.l2`. Arguments are those of :class:`GlobalFlopsLoss`.
    """

    _penalty = staticmethod(l2)


class NoPenalty(Regularizer):
    """No penalty, for a side of ``SpladeLoss`` that has nothing to learn or nothing to lose."""

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """Return a zero that depends on no score."""
        return embeddings.new_zeros(())


class AntiZeroLoss(Regularizer):
    """Anti-zero penalty ``1 / ((sum w)^2 + epsilon)``.

    See :func:`tilefold.losses.anti_zero`. Add it to another penalty with :class:`RegularizerSum`.

    Args:
        epsilon: bounds the penalty of a batch of zeros.
        group: ranks that hold other rows of the batch; see :class:`Regularizer`.

    Examples:
        >>> import torch
        >>> AntiZeroLoss().compute_loss_from_embeddings(torch.tensor([[1.0, 0.0], [3.0, 1.0]]))
        tensor(0.0400)
    """

    def __init__(self, epsilon: float = 1e-8, group: Group = "world") -> None:
        super().__init__(group)
        check_epsilon(epsilon)
        self.epsilon = epsilon

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        return anti_zero(embeddings, epsilon=self.epsilon, group=self.group)


class DFFlopsLoss(Regularizer):
    """DF-FLOPS: FLOPS with small weights for rare terms and large weights for frequent terms.

    The regulariser of Porco et al. (arXiv 2505.15070):
    ``sum_v (w_v * mean_b scores[b, v])^2`` with ``w`` of :func:`tilefold.losses.df_weights`.
    Descriptions of the paper put ``w_v`` inside the square or in front of it; here it is inside.

    The paper takes document frequencies from the documents that validation encodes, every 100
    steps: pass those to :meth:`set_document_frequency`. With ``refresh_every`` the module estimates
    them itself, from the training documents of all ranks since the last refresh; until the first
    one every weight is 1, which is FLOPS.

    Args:
        alpha, beta: share of documents at which the weight of a term is 0.5, and the steepness of
            the weights as a function of the share.
        refresh_every: training steps between estimates, or ``None`` for
            :meth:`set_document_frequency` alone.
        threshold: rows with at most this many nonzero scores count as zero.
        group: ranks that hold other rows of the batch.

    Raises:
        ValueError: if ``refresh_every`` is not positive, or ``alpha`` or ``beta`` out of range.

    Examples:
        >>> import torch
        >>> regularizer = DFFlopsLoss()
        >>> regularizer.set_document_frequency(torch.tensor([0.9, 0.0]))
        >>> scores = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
        >>> regularizer.compute_loss_from_embeddings(scores)  # only the frequent term costs
        tensor(4.)
    """

    weights: Tensor | None
    _counts: Tensor | None

    def __init__(
        self,
        alpha: float = 0.1,
        beta: float = 10.0,
        refresh_every: int | None = 100,
        group: Group = "world",
        threshold: float | None = None,
    ) -> None:
        """Check the options. All weights are 1 until document frequencies are known.

        Args:
            alpha: share of documents at which the weight of a term is 0.5, in (0, 1).
            beta: steepness of the weights as a function of the share.
            refresh_every: training steps between estimates of document frequencies; ``None`` for no
                estimates.
            group: ranks that hold other rows of the batch.
            threshold: rows with at most this many nonzero scores contribute nothing to FLOPS. They
                still count for document frequencies.
        """
        super().__init__(group)
        if refresh_every is not None and (not isinstance(refresh_every, int) or refresh_every < 1):
            raise ValueError(
                f"refresh_every must be a positive number of steps or None, got {refresh_every!r}.",
            )
        check_threshold(threshold)
        check_df_options(alpha, beta)
        self.alpha = alpha
        self.beta = beta
        self.refresh_every = refresh_every
        self.threshold = threshold
        self.register_buffer("weights", None, persistent=False)
        self.register_buffer("_counts", None, persistent=False)
        self._steps = 0

    def set_document_frequency(self, document_frequency: Tensor) -> None:
        """Set the weights from document frequencies.

        Args:
            document_frequency: ``[V]`` shares of documents that contain each term, of this rank's
                columns if scores are a DTensor.
        """
        self.weights = df_weights(document_frequency, alpha=self.alpha, beta=self.beta)

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """Compute the weighted FLOPS over the rows of all ranks.

        In training mode the rows are also counted for the next estimate.
        """
        if self.training and self.refresh_every is not None and torch.is_grad_enabled():
            self._count_documents(embeddings, self.refresh_every)
        return flops(embeddings, threshold=self.threshold, weights=self.weights, group=self.group)

    @torch.no_grad()
    def _count_documents(self, embeddings: Tensor, refresh_every: int) -> None:
        """Count the documents of each term, and refresh the weights after some steps.

        Args:
            embeddings: scores ``[B, V]`` of the documents of a training step.
            refresh_every: number of steps.
        """
        local = local_scores(embeddings.detach(), self.group)
        n_documents_of_term = (local.scores > 0).sum(dim=0)
        n_local_documents = n_documents_of_term.new_full((1,), local.scores.size(0))
        # one tensor [V + 1], so that one all-reduce suffices
        counts = torch.cat([n_documents_of_term, n_local_documents])
        self._counts = counts if self._counts is None else self._counts + counts
        self._steps += 1
        if self._steps % refresh_every != 0:
            return
        row_group = local.row_group
        if row_group is not None:  # its other ranks hold other documents
            dist.all_reduce(self._counts, group=row_group)
        n_documents = self._counts[-1].clamp(min=1)  # 0 if all batches were empty
        self.set_document_frequency(self._counts[:-1] / n_documents)
        self._counts = None


class RegularizerSum(WeightedTerms, Regularizer):
    """A weighted sum of regularisers for one side, as naver's trainer adds anti-zero to FLOPS.

    Argument and errors are those of :class:`tilefold.losses.WeightedLosses`.

    Examples:
        >>> import torch
        >>> from tilefold.losses import AntiZeroLoss, GlobalFlopsLoss
        >>> regularizer = RegularizerSum([(GlobalFlopsLoss(), 1.0), (AntiZeroLoss(), 10.0)])
        >>> regularizer.compute_loss_from_embeddings(torch.tensor([[1.0, 0.0], [3.0, 1.0]]))
        tensor(4.6500)
    """

    kind = "a regulariser"
    remedy = "regularisers of tilefold.losses or of sentence-transformers"

    def __init__(self, terms: Iterable[tuple[nn.Module, float]]) -> None:
        super().__init__(terms)
        self.group = None

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """Compute ``sum_i weight_i * term_i``, a scalar."""
        return self.weighted_sum(embeddings)


class PositionSum(Regularizer):
    """Sum of a regulariser over the relevant documents, the first negatives, and so on.

    The documents of a query have positions: the relevant document, then its negatives.
    ``SpladeLoss`` passes one tensor with the relevant documents of a batch, then its first
    negatives, its second negatives and so on. Other regularisers take means over all rows. This one
    computes ``sum_p term(documents of position p)``, as OpenSearch's trainer of inference-free
    models does with FLOPS (arXiv 2411.04403, in its code). It also penalises a term that is
    frequent among the relevant documents only. The sum over n similar positions is n times as large
    as the mean: divide the weight by n.

    Args:
        term: a module with ``compute_loss_from_embeddings``, ours or sentence-transformers', but
            not a DFFlopsLoss, which counts its calls as steps.
        positions: number of documents per query: the relevant one and its negatives.

    Raises:
        TypeError: if the term has no ``compute_loss_from_embeddings``, or is a DFFlopsLoss.
        ValueError: if ``positions`` is not a positive number; in the call, if the number of rows is
            not a multiple of it.

    Examples:
        >>> import torch
        >>> from tilefold.losses import GlobalFlopsLoss
        >>> regularizer = PositionSum(GlobalFlopsLoss(), positions=2)  # relevant, then a negative
        >>> documents = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
        >>> regularizer.compute_loss_from_embeddings(documents)  # 1^2 + 3^2 + 2^2
        tensor(14.)
    """

    def __init__(self, term: nn.Module, positions: int) -> None:
        """Check and store the regulariser and the number of documents per query.

        Args:
            term: a module with ``compute_loss_from_embeddings``.
            positions: number of documents per query: the relevant one and its negatives.
        """
        super().__init__(None)
        check_term("term", term, "a regulariser of tilefold.losses or of sentence-transformers")
        if isinstance(term, DFFlopsLoss):
            raise TypeError(
                "term must not be a DFFlopsLoss, got one: its frequency estimate must be updated "
                "only once per step, not once per position.",
            )
        if isinstance(positions, bool) or not isinstance(positions, int) or positions < 1:
            raise ValueError(f"positions must be a whole number of at least 1, got {positions!r}.")
        self.term: Any = term
        self.positions = positions

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """Apply the regulariser ``term`` to each group of documents, and sum the penalties.

        The relevant documents of B queries are one group, their first negatives another, and so on:
        ``positions`` groups of B rows.

        Args:
            embeddings: scores of documents ``[positions * B, V]``, one group after another.

        Returns:
            A scalar.
        """
        n_groups = self.positions
        if embeddings.size(0) % n_groups:
            raise ValueError(
                f"the number of rows of embeddings must be a multiple of positions="
                f"{n_groups}, got {embeddings.size(0)}.",
            )
        regularizer = self.term
        penalties = [
            regularizer.compute_loss_from_embeddings(group_scores)
            for group_scores in embeddings.chunk(n_groups)
        ]
        return torch.stack(penalties).sum()
