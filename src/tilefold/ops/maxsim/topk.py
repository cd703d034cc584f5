"""The best documents of each query by their MaxSim scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.checks import check_tensor
from tilefold.ops.maxsim.api import maxsim
from tilefold.ops.maxsim.quantized import QuantizedTokens

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
