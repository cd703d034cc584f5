"""In-batch contrastive loss of MaxSim scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tilefold.ops.maxsim._arguments import (
    check_labels,
    check_scale,
    labelled_loss,
    labels_were_checked,
)
from tilefold.ops.maxsim._problem import MaxSimTensors
from tilefold.ops.maxsim.api import maxsim

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def maxsim_contrastive_loss(
    queries: Tensor,
    documents: Tensor,
    labels: Tensor | None = None,
    *,
    scale: float = 1.0,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    reduction: str = "sum",
    mask_mode: str = "exclude",
    temperature: float | None = None,
    normalize: bool = False,
    group: ProcessGroup | str | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compute the cross entropy of each query's document among all documents of the batch.

    With :func:`maxsim` scores, in fp32 (fp64 for fp64 input)::

        loss = mean_q (logsumexp_d(scale * score[q, d]) - scale * score[q, labels[q]])

    Neither forward nor backward waits for the device, or stores anything of the size of the
    similarities.

    With a ``group``, ``d`` runs over the documents of all ranks, and the mean over the queries of
    all ranks. Every rank returns the same loss ``L``, which is that of one process with the whole
    batch. Documents travel around the ring of ranks, so that a rank holds its own and at most those
    of two other ranks. Gradients return the same way, summed in fp32 in a fixed order. The
    gradients of a rank's embeddings are ``W * dL/d(embeddings)`` for ``W`` ranks, because DDP and
    FSDP average over ranks. Without such averaging, divide them by ``W``.

    Every rank must call this function, and must run backward. Ranks may hold different numbers of
    queries and documents, of different lengths, padded or packed. If they do not agree in dtype, D
    or options, every rank raises an error.

    Args:
        queries, documents: as in :func:`maxsim` for ``pairing="all"``. Without labels, there must
            be at least as many documents as queries. Negatives may be anywhere among the documents.
        labels: ``[Nq]`` int64 document of each query, by default document q for query q. With a
            group they are numbers of this rank's documents. A label out of range raises an error on
            the CPU. On a GPU, where a check would synchronise, the loss of every rank and the
            gradients of the rank with the label are NaN.
        scale: a number that multiplies the scores.
        query_mask, document_mask, cu_seqlens_q, cu_seqlens_d, reduction, mask_mode, temperature,
            normalize, impl: as in :func:`maxsim`. ``temperature`` is that of the smooth maximum,
            not of the loss.
        group: ranks whose documents are negatives too: a process group, ``"world"``, or ``None``
            for this rank only.

    Returns:
        The loss, a scalar; NaN without a query.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`maxsim`; ``ValueError`` for labels or a scale
            that do not fit. If the arguments of one rank do not fit, it raises its error, and the
            other ranks raise a ``ValueError`` that quotes it.

    Examples:
        >>> import torch
        >>> queries = torch.randn(4, 6, 16, requires_grad=True)
        >>> documents = torch.randn(4, 10, 16, requires_grad=True)  # document i answers query i
        >>> loss = maxsim_contrastive_loss(queries, documents, scale=1.0, normalize=True)
        >>> loss.backward()
        >>> documents.grad.shape
        torch.Size([4, 10, 16])
    """
    if group is not None:
        from tilefold.ops.maxsim._ring import loss_over_ranks  # needs torch.distributed

        tensors = MaxSimTensors(
            queries=queries,
            documents=documents,
            query_mask=query_mask,
            document_mask=document_mask,
            cu_queries=cu_seqlens_q,
            cu_documents=cu_seqlens_d,
            pairs=None,
            document_scale=None,
        )
        loss: Tensor | None = loss_over_ranks(
            tensors,
            labels,
            scale,
            group,
            reduction,
            mask_mode,
            temperature,
            normalize,
            impl,
        )
        if loss is not None:
            return loss
    check_scale(scale)
    scores = maxsim(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_d=cu_seqlens_d,
        reduction=reduction,
        mask_mode=mask_mode,
        temperature=temperature,
        normalize=normalize,
        impl=impl,
    )
    n_queries, n_documents = scores.shape
    checked_labels = check_labels(labels, n_queries, n_documents, scores.device)
    scaled_scores = scores if scale == 1 else scale * scores
    return labelled_loss(
        scaled_scores,
        checked_labels,
        n_documents,
        were_checked=labels_were_checked(labels),
    )
