"""XTR scores for ``MultiVectorEncoder`` losses, computed by ``tilefold.ops.xtr_scores``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilefold.integrations._ragged import as_tokens
from tilefold.integrations.sentence_transformers._sides import EMPTY_DOCUMENT_SCORE, Side, groups
from tilefold.ops import xtr_scores as fused_scores


def xtr_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """XTR scores (arXiv 2304.01982) of every query with every document: each query token retrieves ``top_k`` tokens.

    Args:
        queries_embeddings: ``[Nq, Lq, D]``; or a list of ``[Lq_i, D]``.
        documents_embeddings: ``[B, N, Ld, D]``, N documents for each of B queries.
        queries_mask: ``[Nq, Lq]``, nonzero = keep; a floating-point one weights the similarities of its tokens. Without
            one every token is kept, and rows of zeros of a padded tensor are padding.
        documents_mask: ``[B, N, Ld]``, nonzero = keep; masked tokens are never retrieved.
        top_k: tokens that each query token retrieves from all documents of the batch. Tokens that tie with the last one
            are retrieved too, where the stock function retrieves exactly ``top_k``.
        chunk_elements: ignored, for compatibility; there are no similarities to chunk.
        impl: as in :func:`tilefold.ops.xtr_scores`.

    Returns:
        ``[Nq, B * N]`` fp32 on the device of the documents. A document without an unmasked token scores -1e9.

    Raises:
        ValueError, TypeError: for shapes, dtypes or a ``top_k`` that do not fit.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    documents = groups(documents_embeddings, documents_mask)
    queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
    if queries.count == 0:
        return documents.rows.new_zeros((0, documents.rows.shape[:2].numel()), dtype=torch.float32)
    query = queries.part(slice(0, queries.count), documents.rows.device)
    scores: Tensor = fused_scores(
        query.rows,
        documents.rows.flatten(0, 1),
        top_k=top_k,
        query_mask=query.mask,
        document_mask=None if documents.mask is None else documents.mask.flatten(0, 1),
        cu_seqlens_q=query.cu_seqlens,
        impl=impl,
    )
    return scores.float().masked_fill(documents.counts().flatten() == 0, EMPTY_DOCUMENT_SCORE)


def xtr_kd_scores(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """:func:`xtr_scores` of each query with its own N documents; tokens are retrieved from the whole batch as there.

    Args:
        queries_embeddings: ``[B, Lq, D]``, and ``documents_embeddings`` ``[B, N, Ld, D]``.
        queries_mask, documents_mask, top_k, chunk_elements, impl: as in :func:`xtr_scores`.

    Returns:
        ``[B, N]`` fp32.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`xtr_scores`.
    """
    documents = as_tokens("documents_embeddings", documents_embeddings, 4)
    scores = xtr_scores(queries_embeddings, documents, queries_mask, documents_mask, top_k, chunk_elements, impl=impl)
    n_groups, n_ways = documents.shape[:2]
    if scores.size(0) != n_groups:
        raise ValueError(
            f"documents_embeddings must hold one group for each of the {scores.size(0)} queries, got "
            f"{list(documents.shape)}."
        )
    return scores.view(n_groups, n_groups, n_ways).diagonal().mT.contiguous()


def xtr_scores_pairwise(
    queries_embeddings: Any,
    documents_embeddings: Any,
    queries_mask: Any = None,
    documents_mask: Any = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """:func:`xtr_scores` of query ``i`` with document ``i``; tokens are retrieved from the whole batch as there.

    Args:
        queries_embeddings: ``[B, Lq, D]``, and ``documents_embeddings`` ``[B, Ld, D]`` (or ``[B, 1, Ld, D]``).
        queries_mask, documents_mask, top_k, chunk_elements, impl: as in :func:`xtr_scores`.

    Returns:
        ``[B]`` fp32.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`xtr_scores`.
    """
    documents = torch.as_tensor(documents_embeddings)
    if documents.dim() == 3:
        documents = documents[:, None]
    mask = None if documents_mask is None else torch.as_tensor(documents_mask)
    if mask is not None and mask.dim() == 2:
        mask = mask[:, None]
    return xtr_kd_scores(queries_embeddings, documents, queries_mask, mask, top_k, chunk_elements, impl=impl).squeeze(1)


class XTRScores:
    """:func:`xtr_scores` with options of its own, for ``similarity_fct=``.

    Args:
        top_k, chunk_elements, impl: as in :func:`xtr_scores`.

    Raises:
        ValueError: for a ``top_k`` below 1, when scores are asked for.
    """

    _scores: Callable[..., Tensor] = staticmethod(xtr_scores)

    def __init__(self, top_k: int = 256, *, chunk_elements: int | None = None, impl: str = "auto") -> None:
        self.top_k, self.chunk_elements, self.impl = top_k, chunk_elements, impl

    def get_config_dict(self) -> dict[str, int | None]:
        """The options that a loss writes into a model card."""
        return {"top_k": self.top_k, "chunk_elements": self.chunk_elements}

    def __call__(
        self, queries_embeddings: Any, documents_embeddings: Any, queries_mask: Any = None, documents_mask: Any = None
    ) -> Tensor:
        """Scores: ``[Nq, B * N]``, of :class:`XTRKDScores` ``[B, N]``."""
        sides = (queries_embeddings, documents_embeddings, queries_mask, documents_mask)
        return self._scores(*sides, self.top_k, self.chunk_elements, impl=self.impl)


class XTRKDScores(XTRScores):
    """:func:`xtr_kd_scores` with options of its own; see :class:`XTRScores`.

    Args:
        top_k, chunk_elements, impl: as in :func:`xtr_scores`.

    Raises:
        ValueError: for a ``top_k`` below 1, when scores are asked for.
    """

    _scores = staticmethod(xtr_kd_scores)
