"""Sparsity regularisers as functions of scores, and the next-token loss of CSPLADE."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from tilefold._internal.arguments import check_integer, check_number
from tilefold.distributed.collectives import (
    Group,
    LocalScores,
    local_scores,
    sum_over_columns,
    sum_over_rows,
)
from tilefold.ops.checks import check_dtype, check_shape, check_tensor


def flops(
    scores: Tensor,
    *,
    threshold: float | None = None,
    weights: Tensor | None = None,
    group: Group = None,
) -> Tensor:
    """Compute the FLOPS regulariser, which estimates the multiplications of an inner product.

    It is ``sum_v (w_v * mean_b scores[b, v])^2`` (Paria et al., arXiv 2004.05665). The mean is over
    the rows of all ranks of ``group``. Without weights, and on one process, this is ``FlopsLoss``
    of sentence-transformers.

    A mean over the rows of one rank alone would add ``variance / rows`` to the square. The penalty,
    and the sparsity that it causes, would then depend on the number of ranks.

    Each rank returns the value of the whole batch, in fp32 (fp64 for fp64 scores). DDP and FSDP
    average the gradients over the ranks. This *average* is the gradient of one process with all
    rows. Ranks may have different numbers of rows.

    Args:
        scores: ``[B, V]``, or a DTensor ``Shard(1)`` of a vocabulary-parallel head, whose columns
            stay there.
        threshold: rows with at most this many nonzero scores contribute nothing, but stay in the
            mean (the l0 mask of arXiv 2504.14839).
        weights: ``[V]`` factors of the columns, such as :func:`df_weights`. With a DTensor, those
            of the columns of this rank.
        group: ranks that hold other rows of the batch: a process group, ``"world"``, or ``None``
            for no others.

    Returns:
        A scalar.

    Raises:
        TypeError: if ``scores`` is not a dense floating-point tensor, or ``threshold`` is not a
            number.
        ValueError: if the threshold is negative, or a shape, DTensor placement or group is not
            supported.

    Examples:
        >>> import torch
        >>> flops(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))  # 2^2 + 1^2
        tensor(5.)
    """
    local = local_scores(scores, group)
    column_sums = _zero_short_rows(local, threshold).sum(dim=0)
    mean = _mean_over_rows(column_sums, local)
    if weights is not None:
        if check_tensor("weights", weights).shape != mean.shape:
            raise ValueError(
                f"weights must have shape [V] with V={mean.size(0)}, got {list(weights.shape)}.",
            )
        mean = mean * weights.to(mean)
    return sum_over_columns(mean.square().sum(), local.column_group)


def l1(scores: Tensor, *, threshold: float | None = None, group: Group = None) -> Tensor:
    """Compute ``mean_b sum_v |scores[b, v]|``.

    This is the query penalty of Efficient SPLADE (Lassance and Clinchant, arXiv 2207.03834). It
    returns a scalar, and raises errors as :func:`flops` does.

    Args:
        scores: ``[B, V]``, or a DTensor ``Shard(1)`` of a vocabulary-parallel head.
        threshold: rows with at most this many nonzero scores contribute nothing.
        group: ranks that hold other rows of the batch.

    Examples:
        >>> import torch
        >>> l1(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
        tensor(3.)
    """
    return _mean_row_sum(scores, Tensor.abs, threshold, group)


def l2(scores: Tensor, *, threshold: float | None = None, group: Group = None) -> Tensor:
    """Compute ``mean_b sum_v scores[b, v]^2``.

    This penalty shrinks large weights, and has little effect on small ones. It returns a scalar,
    and raises errors as :func:`flops` does.

    Args:
        scores: ``[B, V]``, or a DTensor ``Shard(1)`` of a vocabulary-parallel head.
        threshold: rows with at most this many nonzero scores contribute nothing.
        group: ranks that hold other rows of the batch.

    Examples:
        >>> import torch
        >>> l2(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
        tensor(7.)
    """
    return _mean_row_sum(scores, Tensor.square, threshold, group)


def _mean_row_sum(
    scores: Tensor,
    term_penalty: Callable[[Tensor], Tensor],
    threshold: float | None,
    group: Group,
) -> Tensor:
    """Compute the mean over rows of the sum over terms of an elementwise penalty.

    Args:
        scores: ``[B, V]``, or a DTensor with sharded columns.
        term_penalty: penalty of each score, such as its absolute value.
        threshold: rows with at most this many nonzero scores contribute nothing.
        group: ranks that hold other rows of the batch.

    Returns:
        A scalar.
    """
    local = local_scores(scores, group)
    local_sum = term_penalty(_zero_short_rows(local, threshold)).sum()
    mean = _mean_over_rows(local_sum.view(1), local).squeeze(0)
    return sum_over_columns(mean, local.column_group)


def anti_zero(scores: Tensor, *, epsilon: float = 1e-8, group: Group = None) -> Tensor:
    """Compute a penalty that keeps regularised scores from all becoming zero.

    It is ``1 / ((sum_bv scores[b, v])^2 + epsilon)``, a term of naver's SPLADE trainer. There it
    has no ``epsilon``, and is infinite for a batch of zeros. Add it to another penalty: see
    :class:`tilefold.losses.RegularizerSum`.

    Args:
        scores: ``[B, V]``, or a DTensor ``Shard(1)`` of a vocabulary-parallel head.
        epsilon: bounds the value by ``1 / epsilon`` for a batch of zeros, where the gradient is 0.
        group: ranks that hold other rows of the batch, as in :func:`flops`.

    Raises:
        ValueError: if ``epsilon`` is negative, and as in :func:`flops`.

    Examples:
        >>> import torch
        >>> anti_zero(torch.tensor([[1.0, 0.0], [3.0, 1.0]]))
        tensor(0.0400)
    """
    check_epsilon(epsilon)
    local = local_scores(scores, group)
    total = sum_over_rows(local.scores.sum(), local.row_group)
    return 1 / (sum_over_columns(total, local.column_group).square() + epsilon)


def df_weights(document_frequency: Tensor, *, alpha: float = 0.1, beta: float = 10.0) -> Tensor:
    """Compute the term weights of DF-FLOPS (Porco et al., arXiv 2505.15070).

    ``w(x) = 1 / (1 + (x^log_alpha(2) - 1)^beta)`` is a logistic curve on [0, 1]. The weight is 0
    for a term that no document contains, 1/2 at the share ``alpha``, and 1 at the share 1.

    Args:
        document_frequency: ``[V]`` shares of documents that contain each term, in [0, 1].
        alpha: the share at which the weight is 1/2, in (0, 1).
        beta: steepness of the curve at this share, positive.

    Raises:
        TypeError: if ``document_frequency`` is not a tensor, or if ``alpha`` or ``beta`` is not a
            number.
        ValueError: if ``alpha`` or ``beta`` is out of range.

    Examples:
        >>> import torch
        >>> df_weights(torch.tensor([0.0, 0.1, 1.0]))
        tensor([0.0000, 0.5000, 1.0000])
    """
    check_df_options(alpha, beta)
    check_tensor("document_frequency", document_frequency)
    compute_dtype = torch.promote_types(document_frequency.dtype, torch.float32)
    share = document_frequency.to(compute_dtype).clamp(0, 1)
    log_alpha_of_2 = math.log(2) / math.log(alpha)  # negative, since alpha is below 1
    # For the shares 0, alpha and 1 the base is infinite, 1 and 0, and so the weight 0, 1/2 and 1.
    base = share.pow(log_alpha_of_2) - 1
    return 1 / (1 + base.clamp(min=0).pow(beta))  # rounding may make the base negative


def check_df_options(alpha: float, beta: float) -> None:
    """Raise an error unless alpha and beta are valid for :func:`df_weights`.

    Raises:
        TypeError: if one is not a number.
        ValueError: if one is out of range.
    """
    check_number("alpha", alpha)
    check_number("beta", beta)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, exclusive, got {alpha!r}.")
    if not 0 < beta < math.inf:
        raise ValueError(f"beta must be positive and finite, got {beta!r}.")


def check_threshold(threshold: object) -> None:
    """Raise an error unless a threshold is None or a number of at least 0.

    Args:
        threshold: number of active terms up to which a regulariser ignores a row.

    Raises:
        TypeError: if it is neither a number nor None.
        ValueError: if it is negative or NaN.
    """
    if threshold is None:
        return
    check_number("threshold", threshold)
    if not threshold >= 0:  # type: ignore[operator]
        raise ValueError(f"threshold must be at least 0 or None, got {threshold!r}.")


def check_epsilon(epsilon: float) -> None:
    """Raise an error unless an epsilon is a number of at least 0.

    Raises:
        TypeError: if it is not a number.
        ValueError: if it is negative or NaN.
    """
    check_number("epsilon", epsilon)
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be a number that is not negative, got {epsilon!r}.")


def _zero_short_rows(local: LocalScores, threshold: float | None) -> Tensor:
    """Return the scores of this rank, with rows of at most `threshold` nonzero scores set to 0.

    Args:
        local: the scores of this rank, and the ranks that hold other columns of the same rows.
        threshold: nonzero scores that a row must exceed; ``None`` returns the scores unchanged.
    """
    check_threshold(threshold)
    if threshold is None:
        return local.scores
    n_nonzero = (local.scores != 0).sum(dim=1)
    if local.column_group is not None:
        dist.all_reduce(n_nonzero, group=local.column_group)
    is_kept = (n_nonzero > threshold).to(local.scores.dtype)
    return local.scores * is_kept[:, None]


def _mean_over_rows(sums: Tensor, local: LocalScores) -> Tensor:
    """Turn sums over this rank's rows into means over the rows of all ranks.

    Args:
        sums: ``[n]`` sums over the rows of this rank, of n quantities.
        local: the scores of this rank, and the ranks that hold other rows of the batch.

    Returns:
        Means ``[n]``.
    """
    n_local_rows = local.scores.size(0)
    if local.row_group is None:  # no other rank holds rows of the batch
        return sums / n_local_rows
    # One all-reduce of the sums and of the number of rows.
    sums_and_count = torch.cat([sums, sums.new_full((1,), n_local_rows)])
    totals = sum_over_rows(sums_and_count, local.row_group)
    n_rows = totals[-1]
    return totals[:-1] / n_rows


class ActivatedLmLoss(NamedTuple):
    """Parts of :func:`activated_lm_loss`.

    Attributes:
        total: ``plain + weight * activated``, the only part with a graph.
        plain: mean cross-entropy of the logits.
        activated: mean cross-entropy of ``log1p(relu(logits))``.
        alive: share of the positions that have a logit above 0; at the others relu has no gradient.
    """

    total: Tensor
    plain: Tensor
    activated: Tensor
    alive: Tensor


def activated_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    activated_weight: float = 1.0,
    chunk: int = 1024,
    ignore_index: int = -100,
) -> ActivatedLmLoss:
    """Compute the next-token loss that prepares a causal LM head for SPLADE.

    It is ``CE(H, y) + activated_weight * CE(log1p(relu(H)), y)``, averaged over positions, with the
    cross-entropy CE, the labels y and ``H = hidden @ weight.T + bias`` (CSPLADE, arXiv 2504.10816).
    Positions are processed `chunk` at a time, so that fp32 logits are at most ``[chunk, V]``.
    Backward computes them again. The result is that of one pass, up to the order of sums.

    Args:
        hidden: ``[N, D]`` states, already shifted: position i predicts ``labels[i]``.
        weight: ``[V, D]``.
        labels: ``[N]`` int64.
        bias: ``[V]`` or ``None``.
        activated_weight: the factor lambda of the second term, at least 0.
        chunk: positions per step, at least 1.
        ignore_index: label of positions that do not count; without any other, all parts are 0.

    Raises:
        TypeError: if an argument is not a tensor, labels are not int64, or an option is not a
            number.
        ValueError: if shapes are inconsistent, or an option is out of range.

    Examples:
        >>> import torch
        >>> hidden = torch.randn(6, 16, requires_grad=True)
        >>> loss = activated_lm_loss(hidden, torch.randn(100, 16), torch.randint(100, (6,)))
        >>> loss.total.backward()
        >>> hidden.grad.shape
        torch.Size([6, 16])
    """
    check_tensor("hidden", hidden)
    check_tensor("weight", weight)
    check_tensor("labels", labels)
    check_dtype("labels", labels, (torch.int64,), "use labels.long().")
    check_number("activated_weight", activated_weight)
    check_integer("chunk", chunk)
    check_integer("ignore_index", ignore_index)
    if (
        hidden.dim() != 2
        or labels.shape != hidden.shape[:1]
        or weight.shape[1:] != hidden.shape[1:]
    ):
        raise ValueError(
            "hidden [N, D], weight [V, D] and labels [N] must fit together, "
            f"got {list(hidden.shape)}, {list(weight.shape)} and {list(labels.shape)}; "
            "flatten batch and positions, and shift the labels.",
        )
    if bias is not None:
        check_shape("bias", check_tensor("bias", bias), "V", V=len(weight))
    if chunk < 1 or not activated_weight >= 0:  # a NaN is refused too
        raise ValueError(
            "chunk must be at least 1 and activated_weight at least 0, "
            f"got {chunk} and {activated_weight}.",
        )
    sum_dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    # The sum of no rows is 0. It makes the result depend on hidden, even without positions.
    sums = hidden.new_zeros(3, dtype=sum_dtype) + hidden[:0].sum()
    for start in range(0, len(hidden), chunk):
        positions = slice(start, start + chunk)
        # hidden, weight and bias are arguments, so that the recomputation gives them gradients
        sums = sums + checkpoint(
            _loss_sums,
            hidden[positions],
            weight,
            bias,
            labels[positions],
            ignore_index,
            use_reentrant=False,
            preserve_rng_state=False,
        )
    count = (labels != ignore_index).sum().clamp(min=1)
    # In the order of _loss_sums. A position is alive if a logit is positive, so that relu has a
    # gradient there.
    plain_loss, activated_loss, alive = (sums / count).unbind()
    return ActivatedLmLoss(
        plain_loss + activated_weight * activated_loss,
        plain_loss.detach(),
        activated_loss.detach(),
        alive.detach(),
    )


def _loss_sums(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    ignore_index: int,
) -> Tensor:
    """Return three sums over N positions: two losses of the next token, and a count.

    Args:
        hidden: states ``[N, D]`` before the LM head.
        weight: weight ``[V, D]`` of the head.
        bias: ``[V]`` or None.
        labels: ids ``[N]`` of the next tokens.
        ignore_index: label of positions that are left out.

    Returns:
        ``[3]``: the sum of the cross-entropies of the logits, the sum of the cross-entropies of
        ``log1p(relu(logits))``, and the number of positions with a logit above 0.
    """
    logits = linear(hidden, weight, bias)
    if logits.dtype != torch.float64:
        logits = logits.float()
    plain = cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    activated = cross_entropy(
        logits.relu().log1p(),
        labels,
        ignore_index=ignore_index,
        reduction="sum",
    )
    has_positive_logit = (logits > 0).any(dim=1)
    n_alive = (has_positive_logit & (labels != ignore_index)).sum()
    return torch.stack([plain, activated, n_alive.to(plain.dtype)])
