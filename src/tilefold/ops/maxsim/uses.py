"""What MaxSim scores are for: the best documents of each query, and the in-batch contrastive loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilefold.ops._shared.checks import check_dtype, check_tensor
from tilefold.ops.maxsim._arguments import prepare
from tilefold.ops.maxsim._library import check_values
from tilefold.ops.maxsim.api import kept_tokens, maxsim
from tilefold.ops.maxsim.quantized import QuantizedTokens

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TOPK_DOCUMENTS = 65536  # documents scored at a time: [Nq, 65536] scores are held


def maxsim_topk(
    queries: Tensor,
    documents: Tensor | QuantizedTokens,
    k: int,
    *,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_d: Tensor | None = None,
    reduction: str = "sum",
    mask_mode: str = "exclude",
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The ``k`` documents with the highest :func:`maxsim` score for each query. Not differentiable.

    Padded documents are scored in blocks, so that the scores held are ``[Nq, 65536]`` at most; packed ones at once.

    Args:
        queries, documents: as in :func:`maxsim` for ``pairing="all"``; documents may be quantized.
        k: how many; all documents where there are fewer.
        query_mask, document_mask, cu_seqlens_q, cu_seqlens_d, reduction, mask_mode, impl: as in :func:`maxsim`.

    Returns:
        ``[Nq, min(k, Nd)]`` scores, falling, and the int64 numbers of their documents. The order of documents with
        equal scores is that of ``torch.topk``, which also puts NaN before any number; a document without a kept token
        ranks with its score of 0.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`maxsim`; ``ValueError`` for a ``k`` below 1.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a positive integer, got {k!r}.")
    options: dict[str, Any] = {
        "query_mask": query_mask,
        "cu_seqlens_q": cu_seqlens_q,
        "reduction": reduction,
        "mask_mode": mask_mode,
        "impl": impl,
    }
    rows = documents.values if isinstance(documents, QuantizedTokens) else check_tensor("documents", documents)
    with torch.no_grad():
        if cu_seqlens_d is not None or rows.dim() != 3 or rows.size(0) <= TOPK_DOCUMENTS:
            scores = maxsim(queries, documents, document_mask=document_mask, cu_seqlens_d=cu_seqlens_d, **options)
            found = scores.topk(min(k, scores.size(1)), dim=1)
            return found.values, found.indices
        values: list[Tensor] = []
        places: list[Tensor] = []
        for start in range(0, rows.size(0), TOPK_DOCUMENTS):
            part = slice(start, start + TOPK_DOCUMENTS)
            block = (
                QuantizedTokens(documents.values[part], documents.scales[part])
                if isinstance(documents, QuantizedTokens)
                else documents[part]
            )
            mask = None if document_mask is None else document_mask[part]
            scores = maxsim(queries, block, document_mask=mask, **options)
            found = scores.topk(min(k, scores.size(1)), dim=1)
            values.append(found.values)
            places.append(found.indices + start)
        best, order = torch.cat(values, dim=1).topk(min(k, rows.size(0)), dim=1)
        return best, torch.cat(places, dim=1).gather(1, order)


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
    """Cross entropy of each query's document among all documents of the batch, on :func:`maxsim` scores.

    ``loss = mean_q (logsumexp_d(scale * score[q, d]) - scale * score[q, labels[q]])``, in fp32 (fp64). Neither
    direction looks at the device or keeps anything of the size of the similarities.

    With a ``group`` every rank brings its own queries and documents, and ``d`` runs over the documents of all ranks:
    the loss, and the mean over all queries, of one process with everything. Documents travel around the ring of ranks,
    so that a rank holds its own and two ranks' more at most; gradients come home the same way, summed in fp32 in a
    fixed order. Every rank must call, and must run backward. Ranks may hold different numbers of queries and documents,
    of different lengths, padded or packed; ranks that do not agree in dtype, D or options raise on every rank.

    **Gradients of a group.** Every rank returns the same loss ``L``, and gradients of its own embeddings are
    ``W * dL/d(embeddings)`` for ``W`` ranks: DDP and FSDP average over ranks, which makes ``dL/d(parameters)``. This is
    also what ``gather_across_devices=True`` of sentence-transformers gives ranks of equal size. Without such averaging,
    divide by ``W``.

    Args:
        queries, documents: as in :func:`maxsim` for ``pairing="all"``; at least as many documents as queries, negatives
            anywhere among them.
        labels: ``[Nq]`` int64 document of each query; by default query q's is document q. With a group they are numbers
            of this rank's documents.
        scale: a number that multiplies the scores.
        query_mask, document_mask, cu_seqlens_q, cu_seqlens_d, reduction, mask_mode, temperature, normalize, impl: as in
            :func:`maxsim`; ``temperature`` is that of the smooth maximum, not of the loss.
        group: ranks whose documents are negatives too: a process group, ``"world"``, or ``None`` for this rank's only.

    Returns:
        The loss, a scalar; NaN without a query.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`maxsim`; ``ValueError`` for labels or a scale that do not fit.
            Where one rank's arguments do not fit, it raises its error, and the others a ``ValueError`` that quotes it.
    """
    options: dict[str, Any] = {
        "query_mask": query_mask,
        "document_mask": document_mask,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_d": cu_seqlens_d,
        "reduction": reduction,
        "mask_mode": mask_mode,
        "temperature": temperature,
        "normalize": normalize,
        "impl": impl,
    }
    if group is not None:
        from tilefold.ops.maxsim._ring import ranks_of  # noqa: PLC0415 (needs torch.distributed)

        ranks = ranks_of(group)
        if ranks is not None:
            return _loss_over_ranks(queries, documents, labels, scale, ranks, options)
    _check_scale(scale)
    scores = maxsim(queries, documents, **options)
    return torch.nn.functional.cross_entropy(
        scale * scores, _labels(labels, scores.size(0), scores.size(1), scores.device)
    )


def _loss_over_ranks(
    queries: Tensor,
    documents: Tensor,
    labels: Tensor | None,
    scale: float,
    ranks: ProcessGroup,
    options: dict[str, Any],
) -> Tensor:
    from tilefold.ops.maxsim._ring import mean_over_ranks, meet, ring_scores  # noqa: PLC0415

    request = error = None
    try:  # whatever is wrong here, the other ranks must hear of it
        _check_scale(scale)
        request = prepare(queries, documents, **options)
        if request.scales is not None:
            raise TypeError("documents must be a torch.Tensor, got QuantizedTokens; give documents.dequantize().")
        if not request.empty:
            check_values(request.problem, request.impl)
        labels = _labels(labels, request.shape[0], request.shape[1], request.problem.queries.device)
    except (TypeError, ValueError, RuntimeError) as caught:
        request, error = None, caught
    same = (scale, *(options[name] for name in ("reduction", "mask_mode", "temperature", "normalize")))
    ring = meet(ranks, request, same, error)
    if request is None or labels is None:  # meet has raised
        raise ValueError("arguments must fit on every rank of group.")
    scores = ring_scores(request.problem, ring, request.impl)
    if options["reduction"] == "mean" and request.problem.queries.numel():
        scores = scores / kept_tokens(request.problem)
    before = sum(part.documents for part in ring.parts[: ring.rank])
    total = torch.nn.functional.cross_entropy(scale * scores, labels + before, reduction="sum")
    return mean_over_ranks(total, ring)


def _check_scale(scale: object) -> None:
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite Python number, got {scale!r}; multiply queries to learn one.")


def _labels(labels: Tensor | None, n_queries: int, n_documents: int, device: torch.device) -> Tensor:
    """The document of each query, checked as far as the host can see."""
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
    if device.type == "cpu" and n_queries and not torch.compiler.is_compiling():
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= n_documents:
            raise ValueError(
                f"labels must be at least 0 and below the number of documents ({n_documents}), got "
                f"{low if low < 0 else high}."
            )
    return labels
