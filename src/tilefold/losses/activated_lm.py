"""Next-token loss on activated logits, which prepares a causal LM head for SPLADE (CSPLADE, arXiv 2504.10816)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

__all__ = ["ActivatedLmLoss", "activated_lm_loss"]


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
    """``CE(H, y) + activated_weight * CE(log1p(relu(H)), y)`` over positions, with ``H = hidden @ weight.T + bias``.

    Positions are taken `chunk` at a time, forward and (recomputed) backward, so that fp32 logits are at most
    ``[chunk, V]``. The result is that of one pass, up to the order of sums.

    Args:
        hidden: ``[N, D]`` states, already shifted: position i predicts ``labels[i]``.
        weight: ``[V, D]``.
        labels: ``[N]`` int64.
        bias: ``[V]`` or ``None``.
        activated_weight: the factor lambda of the second term, at least 0.
        chunk: positions per step, at least 1.
        ignore_index: label of positions that do not count; without any other, all parts are 0.

    Raises:
        ValueError: for shapes that do not fit together, or an option out of range.
    """
    if hidden.dim() != 2 or labels.shape != hidden.shape[:1] or weight.shape[1:] != hidden.shape[1:]:
        raise ValueError(
            f"hidden [N, D], weight [V, D] and labels [N] must fit together, got {list(hidden.shape)}, "
            f"{list(weight.shape)} and {list(labels.shape)}; flatten batch and positions, and shift the labels."
        )
    if chunk < 1 or activated_weight < 0:
        raise ValueError(
            f"chunk must be at least 1 and activated_weight at least 0, got {chunk} and {activated_weight}."
        )
    sums = hidden.new_zeros(3, dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
    for start in range(0, len(hidden), chunk):
        part = slice(start, start + chunk)
        # hidden, weight and bias are arguments, so that the recomputation gives them gradients
        sums = sums + checkpoint(
            _sums, hidden[part], weight, bias, labels[part], ignore_index, use_reentrant=False, preserve_rng_state=False
        )
    count = (labels != ignore_index).sum().clamp(min=1)
    plain, activated, alive = (sums / count).unbind()
    total = plain + activated_weight * activated
    return ActivatedLmLoss(total, plain.detach(), activated.detach(), alive.detach())


def _sums(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int) -> Tensor:
    """Sums of both losses, and of the positions with a logit above 0; ``[3]``."""
    logits = linear(hidden, weight, bias)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    plain = cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    activated = cross_entropy(logits.relu().log1p(), labels, ignore_index=ignore_index, reduction="sum")
    alive = ((logits > 0).any(dim=1) & (labels != ignore_index)).sum()
    return torch.stack([plain, activated, alive.to(plain.dtype)])
