"""The in-batch contrastive loss of MaxSim scores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from tilefold.ops.maxsim._arguments import check_labels, check_scale, labelled_loss
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
    """Cross entropy of each query's document among all documents of the batch, on :func:`maxsim`
    scores.

    ``loss = mean_q (logsumexp_d(scale * score[q, d]) - scale * score[q, labels[q]])``, in fp32
    (fp64). Neither direction looks at the device or keeps anything of the size of the similarities.

    With a ``group``, ``d`` runs over the documents of all ranks: the loss, and the mean over all
    queries, of one process with everything. Documents travel around the ring of ranks, so that a
    rank holds its own and two ranks' more at most; gradients come home the same way, summed in fp32
    in a fixed order. Every rank must call, and must run backward. Ranks may hold different numbers
    of queries and documents, of different lengths, padded or packed; ranks that do not agree in
    dtype, D or options raise on every rank. Every rank returns the same loss ``L``, and gradients
    of its own embeddings are ``W * dL/d(embeddings)`` for ``W`` ranks, since DDP and FSDP average
    over ranks; without such averaging, divide by ``W``.

    Args:
        queries, documents: as in :func:`maxsim` for ``pairing="all"``; at least as many documents
            as queries, negatives anywhere among them.
        labels: ``[Nq]`` int64 document of each query; by default query q's is document q. With a
            group they are numbers of this rank's documents. On the CPU a label out of range raises;
            on a GPU, where looking costs a synchronisation, the loss and its gradients are NaN (of
            the rank concerned, and the loss of every rank).
        scale: a number that multiplies the scores.
        query_mask, document_mask, cu_seqlens_q, cu_seqlens_d, reduction, mask_mode, temperature,
            normalize, impl: as in :func:`maxsim`; ``temperature`` is that of the smooth maximum,
            not of the loss.
        group: ranks whose documents are negatives too: a process group, ``"world"``, or ``None``
            for this rank's only.

    Returns:
        The loss, a scalar; NaN without a query.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`maxsim`; ``ValueError`` for labels or a scale
            that do not fit. Where one rank's arguments do not fit, it raises its error, and the
            others a ``ValueError`` that quotes it.
    """
    if group is not None:
        from tilefold.ops.maxsim._ring import loss_over_ranks  # needs torch.distributed

        tensors = MaxSimTensors(
            queries,
            documents,
            query_mask,
            document_mask,
            cu_seqlens_q,
            cu_seqlens_d,
            None,
            None,
        )
        asked = (reduction, mask_mode, temperature, normalize)
        loss: Tensor | None = loss_over_ranks(tensors, labels, scale, group, asked, impl)
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
    checked = check_labels(labels, scores.size(0), scores.size(1), scores.device)
    return labelled_loss(scores if scale == 1 else scale * scores, labels, checked, scores.size(1))
