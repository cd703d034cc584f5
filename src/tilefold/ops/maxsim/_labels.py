"""Labels of the contrastive loss: their checks, and the cross entropy at them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tilefold.ops._shared.checks import check_dtype, check_tensor


def check_scale(scale: object) -> None:
    """Raise ``ValueError`` unless ``scale`` is a finite number."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite Python number, got {scale!r}; multiply queries to learn one.")


def check_labels(labels: Tensor | None, n_queries: int, n_documents: int, device: torch.device) -> Tensor:
    """The document of each query, checked as far as the host can see without waiting; see :func:`labelled_loss`."""
    if labels is None:
        if n_documents < n_queries:
            raise ValueError(
                f"documents must be at least as many as queries ({n_queries}) without labels, got {n_documents}."
            )
        return torch.arange(n_queries, device=device)
    check_tensor("labels", labels)
    check_dtype("labels", labels, (torch.int64,), "use labels.long().")
    if labels.shape != (n_queries,):
        raise ValueError(f"labels must have shape [{n_queries}], got {list(labels.shape)}.")
    if labels.device != device:
        raise ValueError(f"labels must be on the device of queries ({device}), got {labels.device}; move it there.")
    if n_queries and not n_documents:
        raise ValueError(f"documents must be at least one with labels, got 0 for {n_queries} queries; skip the batch.")
    if device.type == "cpu" and n_queries and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= n_documents:
            raise ValueError(
                f"labels must be at least 0 and below the number of documents ({n_documents}), got "
                f"{low if low < 0 else high}."
            )
    return labels


def labelled_loss(
    scores: Tensor, labels: Tensor | None, checked: Tensor, n_documents: int, first: int = 0, reduction: str = "mean"
) -> Tensor:
    """Cross entropy of ``scores`` at the ``checked`` labels plus ``first``, NaN with a label out of range.

    Where the host does not look at the ``labels`` (a GPU, a compiled function), one out of range would be an assertion
    in a kernel, after which nothing runs on the device any more, or another rank's document.
    """
    if labels is None or (labels.device.type == "cpu" and not torch.compiler.is_compiling()):
        return cross_entropy(scores, checked + first if first else checked, reduction=reduction)
    within = checked.clamp(0, max(n_documents - 1, 0))
    # a factor, so that gradients are NaN too
    factor = torch.where((within == checked).all(), 1.0, math.nan)
    return cross_entropy(scores, within + first if first else within, reduction=reduction) * factor
