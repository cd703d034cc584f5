"""Fused scoring functions for the losses of sentence-transformers' ``MultiVectorEncoder`` (ColBERT and its kin).

Each has the name, arguments and results of the function in ``sentence_transformers.multi_vector_encoder.scoring`` that
it replaces, and is handed to a loss as ``similarity_fct=``. The similarities ``[Nq, Nd, Lq, Ld]`` that the stock
functions write, and keep for backward, are folded away by :func:`tilefold.ops.maxsim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilefold.ops import maxsim

__all__ = [
    "EMPTY_DOCUMENT_SCORE",
    "colbert_kd_scores",
    "colbert_scores",
    "colbert_scores_pairwise",
    "mean_colbert_kd_scores",
    "mean_colbert_scores",
    "mean_colbert_scores_pairwise",
]

EMPTY_DOCUMENT_SCORE = -1e9  # what sentence-transformers gives a document without a token to score


def colbert_scores(
    queries_embeddings: Tensor | Sequence[Any],
    documents_embeddings: Tensor | Sequence[Any],
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    *,
    impl: str = "auto",
) -> Tensor:
    """MaxSim of every query with every document of the batch (ColBERT, arXiv 2004.12832).

    ``scores[i, j * N + n] = sum_s max_t queries[i, s] . documents[j, n, t]`` over unmasked tokens. For
    ``MultiVectorMultipleNegativesRankingLoss`` and its cached form, in place of ``colbert_scores``.

    Args:
        queries_embeddings: ``[Nq, Lq, D]``; or a list of ``[Lq_i, D]``, which are padded.
        documents_embeddings: ``[B, N, Ld, D]``, N documents for each of B queries.
        queries_mask: ``[Nq, Lq]``, nonzero = keep; without one every token is kept, and rows of zeros are padding.
        documents_mask: ``[B, N, Ld]``, likewise; masked tokens take no part in the maximum.
        chunk_elements: taken so that calls need not change; nothing is large enough to be cut.
        length_normalize: whether to divide by the number of the query's unmasked tokens (at least 1).
        impl: as in :func:`tilefold.ops.maxsim`.

    Returns:
        ``[Nq, B * N]`` fp32 on the device of the documents. A document without an unmasked token scores -1e9 before any
        division, without a gradient.

    Raises:
        ValueError, TypeError: for shapes or dtypes that do not fit.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    queries, documents, query_mask, document_mask = _sides(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, 4
    )
    scores = maxsim(
        queries,
        documents.flatten(0, 1),
        query_mask=query_mask,
        document_mask=document_mask.flatten(0, 1),
        impl=impl,
    )
    empty = ~document_mask.flatten(0, 1).any(dim=-1)
    return _finished(scores, empty, query_mask if length_normalize else None)


def colbert_scores_pairwise(
    queries_embeddings: Tensor | Sequence[Any],
    documents_embeddings: Tensor | Sequence[Any],
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    *,
    impl: str = "auto",
) -> Tensor:
    """MaxSim of query ``i`` with document ``i``, for ``MultiVectorMarginMSELoss`` and the distillation evaluator.

    Args:
        queries_embeddings: ``[B, Lq, D]``; or a list of ``[Lq_i, D]``, which are padded.
        documents_embeddings: ``[B, Ld, D]``, or a list of ``[Ld_i, D]``.
        queries_mask, documents_mask: ``[B, Lq]`` and ``[B, Ld]``; these and the rest as in :func:`colbert_scores`.

    Returns:
        ``[B]`` fp32 on the device of the documents; a document without an unmasked token as in :func:`colbert_scores`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`colbert_scores`.
    """
    queries, documents, query_mask, document_mask = _sides(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, 3
    )
    scores = maxsim(
        queries, documents, query_mask=query_mask, document_mask=document_mask, pairing="aligned", impl=impl
    )
    return _finished(scores, ~document_mask.any(dim=-1), query_mask if length_normalize else None)


def colbert_kd_scores(
    queries_embeddings: Tensor | Sequence[Any],
    documents_embeddings: Tensor | Sequence[Any],
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    *,
    impl: str = "auto",
) -> Tensor:
    """MaxSim of query ``i`` with each of its own N documents, for ``MultiVectorDistillKLDivLoss``.

    Args:
        queries_embeddings: ``[B, Lq, D]``; or a list of ``[Lq_i, D]``, which are padded.
        documents_embeddings: ``[B, N, Ld, D]``.
        queries_mask, documents_mask: ``[B, Lq]`` and ``[B, N, Ld]``; these and the rest as in :func:`colbert_scores`.

    Returns:
        ``[B, N]`` fp32 on the device of the documents; a document without an unmasked token as in
        :func:`colbert_scores`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`colbert_scores`.
    """
    queries, documents, query_mask, document_mask = _sides(
        queries_embeddings, documents_embeddings, queries_mask, documents_mask, 4
    )
    scores = maxsim(
        queries, documents, query_mask=query_mask, document_mask=document_mask, pairing="grouped", impl=impl
    )
    return _finished(scores, ~document_mask.any(dim=-1), query_mask if length_normalize else None)


def mean_colbert_scores(
    queries_embeddings: Tensor | Sequence[Any],
    documents_embeddings: Tensor | Sequence[Any],
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    *,
    impl: str = "auto",
) -> Tensor:
    """:func:`colbert_scores` divided by each query's unmasked tokens, as a model with ``"meanmaxsim"`` scores."""
    return colbert_scores(
        queries_embeddings,
        documents_embeddings,
        queries_mask,
        documents_mask,
        chunk_elements,
        length_normalize,
        impl=impl,
    )


def mean_colbert_scores_pairwise(
    queries_embeddings: Tensor | Sequence[Any],
    documents_embeddings: Tensor | Sequence[Any],
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    *,
    impl: str = "auto",
) -> Tensor:
    """:func:`colbert_scores_pairwise` divided by each query's unmasked tokens."""
    return colbert_scores_pairwise(
        queries_embeddings,
        documents_embeddings,
        queries_mask,
        documents_mask,
        chunk_elements,
        length_normalize,
        impl=impl,
    )


def mean_colbert_kd_scores(
    queries_embeddings: Tensor | Sequence[Any],
    documents_embeddings: Tensor | Sequence[Any],
    queries_mask: Tensor | None = None,
    documents_mask: Tensor | None = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    *,
    impl: str = "auto",
) -> Tensor:
    """:func:`colbert_kd_scores` divided by each query's unmasked tokens."""
    return colbert_kd_scores(
        queries_embeddings,
        documents_embeddings,
        queries_mask,
        documents_mask,
        chunk_elements,
        length_normalize,
        impl=impl,
    )


def _sides(
    queries_embeddings: Tensor | Sequence[Any],
    documents_embeddings: Tensor | Sequence[Any],
    queries_mask: Tensor | None,
    documents_mask: Tensor | None,
    document_dims: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, documents and their bool masks on the documents' device; zero rows are padding where no mask says."""
    documents, document_mask = _side("documents", documents_embeddings, documents_mask, document_dims)
    queries, query_mask = _side("queries", queries_embeddings, queries_mask, 3)
    device = documents.device
    if document_mask is None:
        document_mask = documents.any(dim=-1)
    if query_mask is None:  # a row of zeros adds nothing to a score, but would have a gradient
        query_mask = queries.any(dim=-1)
    return queries.to(device), documents, query_mask.to(device), document_mask.to(device)


def _side(
    name: str, embeddings: Tensor | Sequence[Any], mask: Tensor | None, dims: int
) -> tuple[Tensor, Tensor | None]:
    if isinstance(embeddings, (list, tuple)):
        if not embeddings:
            raise ValueError(f"{name}_embeddings must hold at least one sequence, got an empty list; skip the call.")
        tokens = [torch.as_tensor(item) for item in embeddings]
        if dims == 3 and mask is None:
            lengths = torch.tensor([item.size(0) for item in tokens])
            mask = torch.arange(int(lengths.max())) < lengths[:, None]
        rows = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True) if dims == 3 else torch.stack(tokens)
    else:
        rows = torch.as_tensor(embeddings)
    if rows.dim() != dims:
        expected = "[B, N, L, D]" if dims == 4 else "[B, L, D]"
        raise ValueError(f"{name}_embeddings must have shape {expected}, got {list(rows.shape)}.")
    if not rows.is_floating_point():
        rows = rows.float()
    if mask is None:
        return rows, None
    mask = torch.as_tensor(mask)
    if mask.shape != rows.shape[:-1]:
        raise ValueError(
            f"{name}_mask must have shape {list(rows.shape[:-1])}, one entry a token, got {list(mask.shape)}."
        )
    return rows, mask != 0


def _finished(scores: Tensor, empty: Tensor, query_mask: Tensor | None) -> Tensor:
    """What sentence-transformers makes of sums: fp32, a mark for empty documents, then the mean over query tokens."""
    scores = scores.float().masked_fill(empty, EMPTY_DOCUMENT_SCORE)
    if query_mask is None:
        return scores
    kept = query_mask.sum(dim=-1).clamp(min=1)
    return scores / (kept[:, None] if scores.dim() == 2 else kept)
