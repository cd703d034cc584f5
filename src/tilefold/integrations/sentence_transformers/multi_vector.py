"""Fused scores of ``MultiVectorEncoder`` models (ColBERT), for losses and evaluators.

Each function has the name, arguments and results of the stock function that it replaces. It does
not write the similarities ``[Nq, Nd, Lq, Ld]``, as the stock function does.

* ``colbert_*`` and ``xtr_*`` replace functions of
  ``sentence_transformers.multi_vector_encoder.scoring``, for the ``similarity_fct=`` of a loss.
* ``maxsim`` and its variants replace functions of ``sentence_transformers.util``. They take lists
  of any lengths. An accelerated model uses them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.integrations.sentence_transformers import _sides
from tilefold.integrations.sentence_transformers._sides import (
    EMPTY_DOCUMENT_SCORE,
    Side,
    SidePart,
    scores_of_sides,
)
from tilefold.ops import xtr_scores as fused_xtr_scores

__all__ = [
    "EMPTY_DOCUMENT_SCORE",
    "XTRKDScores",
    "XTRScores",
    "colbert_kd_scores",
    "colbert_scores",
    "colbert_scores_pairwise",
    "maxsim",
    "maxsim_pairwise",
    "mean_colbert_kd_scores",
    "mean_colbert_scores",
    "mean_colbert_scores_pairwise",
    "mean_maxsim",
    "mean_maxsim_pairwise",
    "xtr_kd_scores",
    "xtr_scores",
    "xtr_scores_pairwise",
]


def maxsim(
    a: object,
    b: object,
    a_mask: object = None,
    b_mask: object = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute MaxSim of every query with every document (ColBERT, arXiv 2004.12832).

    Args:
        a: queries: a list of ``[Lq_i, D]`` tensors or arrays, as ``encode_query`` returns them;
            ``[Nq, Lq, D]`` padded; or one ``[Lq, D]``. Lists are packed, not padded.
        b: documents, likewise, of the same dtype.
        a_mask: ``[Nq, Lq]`` or a list; nonzero entries count. A floating mask multiplies the
            similarities of its tokens. Without one, rows of zeros of a padded tensor are padding.
        b_mask: ``[Nd, Ld]`` or a list; nonzero entries count.
        chunk_elements: numbers of either side that are packed, or moved to ``device``, at a time;
            by default 100 million. Similarities are never written, so nothing else needs to be cut.
        length_normalize: whether to divide by the number of the query's tokens (at least 1).
        device: where to score; by default where the documents are. The scores come back to the
            device of the documents.
        impl: as in :func:`tilefold.ops.maxsim`.

    Returns:
        ``[Nq, Nd]`` fp32. A document without a token scores -1e9 before any division.

    Raises:
        ValueError, TypeError: for shapes, dtypes or options that do not fit.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    return scores_of_sides(
        Side("a", a, a_mask, weighted=True),
        Side("b", b, b_mask),
        pairing="all",
        length_normalize=length_normalize,
        impl=impl,
        chunk_elements=chunk_elements,
        device=device,
    )


def mean_maxsim(
    a: object,
    b: object,
    a_mask: object = None,
    b_mask: object = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    device: str | torch.device | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute :func:`maxsim`, divided by the number of each query's tokens, ``[Nq, Nd]``.

    Args:
        a: token vectors of the queries, a list of ``[Lq_i, D]`` or padded ``[Nq, Lq, D]``.
        b: token vectors of the documents, likewise.
        a_mask: which query tokens count, ``[Nq, Lq]`` or a list; ``None`` for all.
        b_mask: which document tokens count, likewise.
        chunk_elements: numbers of either side that are moved to ``device`` at a time.
        length_normalize: whether scores are divided by the number of query tokens.
        device: device that computes; by default that of the documents.
        impl: implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`maxsim`.
    """
    return maxsim(a, b, a_mask, b_mask, chunk_elements, length_normalize, device, impl=impl)


def maxsim_pairwise(
    a: object,
    b: object,
    a_mask: object = None,
    b_mask: object = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    device: str | torch.device | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute MaxSim of query ``i`` with document ``i``, ``[N]`` fp32.

    Args:
        a: token vectors of the queries, a list of ``[Lq_i, D]`` or padded ``[Nq, Lq, D]``.
        b: token vectors of the documents, likewise, one for each query.
        a_mask: which query tokens count, ``[Nq, Lq]`` or a list; ``None`` for all.
        b_mask: which document tokens count, likewise.
        chunk_elements: numbers of either side that are moved to ``device`` at a time.
        length_normalize: whether scores are divided by the number of query tokens.
        device: device that computes; by default that of the documents.
        impl: implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`maxsim`.
    """
    return scores_of_sides(
        Side("a", a, a_mask, weighted=True),
        Side("b", b, b_mask),
        pairing="aligned",
        length_normalize=length_normalize,
        impl=impl,
        chunk_elements=chunk_elements,
        device=device,
    )


def mean_maxsim_pairwise(
    a: object,
    b: object,
    a_mask: object = None,
    b_mask: object = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    device: str | torch.device | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute :func:`maxsim_pairwise`, divided by the number of each query's tokens, ``[N]``.

    Args:
        a: token vectors of the queries, a list of ``[Lq_i, D]`` or padded ``[Nq, Lq, D]``.
        b: token vectors of the documents, likewise, one for each query.
        a_mask: which query tokens count, ``[Nq, Lq]`` or a list; ``None`` for all.
        b_mask: which document tokens count, likewise.
        chunk_elements: numbers of either side that are moved to ``device`` at a time.
        length_normalize: whether scores are divided by the number of query tokens.
        device: device that computes; by default that of the documents.
        impl: implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`maxsim`.
    """
    return maxsim_pairwise(
        a,
        b,
        a_mask,
        b_mask,
        chunk_elements,
        length_normalize,
        device,
        impl=impl,
    )


def colbert_scores(
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute MaxSim of every query with every document of the batch (ColBERT, arXiv 2004.12832).

    ``scores[i, j * N + n] = sum_s max_t queries[i, s] . documents[j, n, t]`` over unmasked tokens.
    For ``MultiVectorMultipleNegativesRankingLoss`` and its cached form, in place of
    ``colbert_scores``.

    Args:
        queries_embeddings: ``[Nq, Lq, D]``; or a list of ``[Lq_i, D]``.
        documents_embeddings: ``[B, N, Ld, D]``, N documents for each of B queries.
        queries_mask: ``[Nq, Lq]``; nonzero entries count. A floating mask multiplies the
            similarities of its tokens. Without one, every token counts, and rows of zeros of a
            padded tensor are padding.
        documents_mask: one entry per document token; nonzero entries count.
        chunk_elements: numbers of either side that are packed or moved at a time, where lists are
            given. Similarities are never written, so nothing else needs to be cut.
        length_normalize: whether to divide by the number of the query's unmasked tokens (at least
            1).
        impl: as in :func:`tilefold.ops.maxsim`.

    Returns:
        ``[Nq, B * N]`` fp32 on the device of the documents. A document without an unmasked token
        scores -1e9 before any division, without a gradient.

    Raises:
        ValueError, TypeError: for shapes, dtypes or options that do not fit.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
    rows, mask = _sides.groups(documents_embeddings, documents_mask)
    documents = Side("documents_embeddings", rows.flatten(0, 1), mask.flatten(0, 1))
    return scores_of_sides(
        queries,
        documents,
        pairing="all",
        length_normalize=length_normalize,
        impl=impl,
        chunk_elements=chunk_elements,
    )


def colbert_scores_pairwise(
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute MaxSim of query ``i`` with document ``i``, ``[B]``.

    For ``MultiVectorMarginMSELoss``.

    Args:
        queries_embeddings: ``[B, Lq, D]``, or a list of ``[Lq_i, D]``.
        documents_embeddings: ``[B, Ld, D]``, or a list of ``[Ld_i, D]``.
        queries_mask: ``[B, Lq]`` or a list; nonzero entries count. A floating mask multiplies the
            similarities of its tokens.
        documents_mask: ``[B, Ld]`` or a list; nonzero entries count.
        chunk_elements: numbers of either side that are packed or moved at a time.
        length_normalize: whether to divide by the number of the query's unmasked tokens.
        impl: implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`colbert_scores`.
    """
    return scores_of_sides(
        Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True),
        Side("documents_embeddings", documents_embeddings, documents_mask),
        pairing="aligned",
        length_normalize=length_normalize,
        impl=impl,
        chunk_elements=chunk_elements,
    )


def colbert_kd_scores(
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    chunk_elements: int | None = None,
    length_normalize: bool = False,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute MaxSim of query ``i`` with each of its N documents, ``[B, N]``.

    For ``MultiVectorDistillKLDivLoss``.

    Args:
        queries_embeddings: ``[B, Lq, D]``, or a list of ``[Lq_i, D]``.
        documents_embeddings: ``[B, N, Ld, D]``, one group of N documents for each query.
        queries_mask: ``[B, Lq]`` or a list; nonzero entries count. A floating mask multiplies the
            similarities of its tokens.
        documents_mask: ``[B, N, Ld]``; nonzero entries count.
        chunk_elements: ignored, for compatibility.
        length_normalize: whether to divide by the number of the query's unmasked tokens.
        impl: implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`colbert_scores`.
    """
    queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
    rows, mask = _sides.groups(documents_embeddings, documents_mask)
    _check_groups(queries, rows)
    return _sides.score(
        queries.part(slice(0, queries.count), rows.device),
        SidePart(rows, mask, None),
        "grouped",
        length_normalize,
        impl,
    )


def mean_colbert_scores(
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute :func:`colbert_scores`, divided by the number of each query's unmasked tokens.

    A model with the similarity ``'meanmaxsim'`` scores like this.

    Args:
        queries_embeddings: ``[Nq, Lq, D]``.
        documents_embeddings: ``[B, N, Ld, D]``.
        queries_mask: ``[Nq, Lq]``; nonzero entries count.
        documents_mask: ``[B, N, Ld]``; nonzero entries count.
        chunk_elements: numbers of either side that are packed or moved at a time.
        length_normalize: False for scores that are not divided.
        impl: implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`colbert_scores`.
    """
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
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute :func:`colbert_scores_pairwise`, divided by each query's number of tokens.

    A model with the similarity ``'meanmaxsim'`` scores like this.

    Args:
        queries_embeddings: ``[B, Lq, D]``.
        documents_embeddings: ``[B, Ld, D]``.
        queries_mask: ``[B, Lq]``; nonzero entries count.
        documents_mask: ``[B, Ld]``; nonzero entries count.
        chunk_elements: numbers of either side that are packed or moved at a time.
        length_normalize: False for scores that are not divided.
        impl: implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`colbert_scores_pairwise`.
    """
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
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    chunk_elements: int | None = None,
    length_normalize: bool = True,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute :func:`colbert_kd_scores`, divided by the number of each query's unmasked tokens.

    A model with the similarity ``'meanmaxsim'`` scores like this.

    Args:
        queries_embeddings: ``[B, Lq, D]``.
        documents_embeddings: ``[B, N, Ld, D]``.
        queries_mask: ``[B, Lq]``; nonzero entries count.
        documents_mask: ``[B, N, Ld]``; nonzero entries count.
        chunk_elements: ignored, for compatibility.
        length_normalize: False for scores that are not divided.
        impl: implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`colbert_kd_scores`.
    """
    return colbert_kd_scores(
        queries_embeddings,
        documents_embeddings,
        queries_mask,
        documents_mask,
        chunk_elements,
        length_normalize,
        impl=impl,
    )


def xtr_scores(
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute XTR scores (arXiv 2304.01982) of every query with every document of the batch.

    Each query token retrieves ``top_k`` document tokens.

    Args:
        queries_embeddings: ``[Nq, Lq, D]``; or a list of ``[Lq_i, D]``.
        documents_embeddings: ``[B, N, Ld, D]``, N documents for each of B queries.
        queries_mask: ``[Nq, Lq]``; nonzero entries count. A floating mask multiplies the
            similarities of its tokens. Without one, every token counts, and rows of zeros of a
            padded tensor are padding.
        documents_mask: one entry per document token; nonzero entries count.
        top_k: tokens that each query token retrieves from all documents of the batch. Tokens that
            tie with the last one are retrieved too, where the stock function retrieves exactly
            ``top_k``.
        chunk_elements: ignored, for compatibility; there are no similarities to chunk.
        impl: as in :func:`tilefold.ops.xtr_scores`.

    Returns:
        ``[Nq, B * N]`` fp32 on the device of the documents. A document without an unmasked token
        scores -1e9.

    Raises:
        ValueError, TypeError: for shapes, dtypes or options that do not fit.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
    rows, mask = _sides.groups(documents_embeddings, documents_mask)
    return _score_xtr(queries, rows, mask, top_k, impl)


def xtr_kd_scores(
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute :func:`xtr_scores` of each query with its N documents only, ``[B, N]``.

    A query token still retrieves tokens of all documents of the batch.

    Args:
        queries_embeddings, queries_mask, documents_mask, top_k, chunk_elements, impl: as in
            :func:`xtr_scores`.
        documents_embeddings: ``[B, N, Ld, D]``, one group of N documents for each query.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`xtr_scores`.
    """
    queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
    rows, mask = _sides.groups(documents_embeddings, documents_mask)
    _check_groups(queries, rows)
    n_groups, n_documents = rows.shape[:2]
    scores = _score_xtr(queries, rows, mask, top_k, impl)
    # Query i needs the scores of group i only: the diagonal of [queries, groups, documents], which
    # ``diagonal`` returns as [documents, queries].
    scores_by_group = scores.view(n_groups, n_groups, n_documents)
    return scores_by_group.diagonal().mT.contiguous()


def xtr_scores_pairwise(
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    top_k: int = 256,
    chunk_elements: int | None = None,
    *,
    impl: str = "auto",
) -> Tensor:
    """Compute :func:`xtr_scores` of query ``i`` with document ``i`` only, ``[B]``.

    A query token still retrieves tokens of all documents of the batch.

    Args:
        queries_embeddings, queries_mask, top_k, chunk_elements, impl: as in :func:`xtr_scores`.
        documents_embeddings: ``[B, Ld, D]`` or ``[B, 1, Ld, D]``.
        documents_mask: ``[B, Ld]`` or ``[B, 1, Ld]``; nonzero entries count.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`xtr_scores`.
    """
    scores = xtr_kd_scores(
        queries_embeddings,
        _groups_of_one(documents_embeddings, 3),
        queries_mask,
        _groups_of_one(documents_mask, 2),
        top_k,
        chunk_elements,
        impl=impl,
    )
    return scores.squeeze(1)


def _score_xtr(
    queries: Side,
    documents: Tensor,
    documents_mask: Tensor,
    top_k: int,
    impl: str,
) -> Tensor:
    """Compute XTR scores of every query with every document.

    Args:
        queries: Nq queries.
        documents: ``[B, N, Ld, D]``.
        documents_mask: bool ``[B, N, Ld]``.
        top_k: tokens that each query token retrieves.
        impl: implementation of :func:`tilefold.ops.xtr_scores`.

    Returns:
        ``[Nq, B * N]`` fp32.
    """
    if queries.count == 0:
        n_documents = documents.size(0) * documents.size(1)
        return documents.new_zeros((0, n_documents), dtype=torch.float32)
    query_part = queries.part(slice(0, queries.count), documents.device)
    scores = fused_xtr_scores(
        query_part.rows,
        documents.flatten(0, 1),
        query_mask=query_part.mask,
        cu_seqlens_q=query_part.cu_seqlens,
        document_mask=documents_mask.flatten(0, 1),
        top_k=top_k,
        impl=impl,
    )
    is_empty = documents_mask.sum(dim=-1).flatten() == 0
    return scores.float().masked_fill(is_empty, EMPTY_DOCUMENT_SCORE)


def _check_groups(queries: Side, documents: Tensor) -> None:
    """Raise ``ValueError`` unless there is one group of documents ``[B, N, Ld, D]`` per query."""
    if queries.count != documents.size(0):
        raise ValueError(
            "documents_embeddings must hold one group for each of the "
            f"{queries.count} queries, got {list(documents.shape)}.",
        )


def _groups_of_one(values: object, dims: int) -> Tensor | None:
    """Return documents, or their mask, as groups of one document for each query.

    Args:
        values: one document, or one mask, for each query; ``None`` without a mask.
        dims: dimensions of values that are no groups yet. Others are returned as they are.
    """
    if values is None:
        return None
    tensor = torch.as_tensor(values)
    return tensor[:, None] if tensor.dim() == dims else tensor


class XTRScores:
    """:func:`xtr_scores` with options, for the ``similarity_fct=`` of a loss.

    Args:
        top_k: as in :func:`xtr_scores`.
        chunk_elements: as in :func:`xtr_scores`.
        impl: as in :func:`xtr_scores`.

    Raises:
        ValueError: for a ``top_k`` below 1, when scores are computed.
    """

    def __init__(
        self,
        top_k: int = 256,
        *,
        chunk_elements: int | None = None,
        impl: str = "auto",
    ) -> None:
        """Store the options.

        Args:
            top_k: tokens that each query token retrieves from all documents of the batch.
            chunk_elements: ignored, for compatibility.
            impl: implementation of :func:`tilefold.ops.xtr_scores`.
        """
        self.top_k = top_k
        self.chunk_elements = chunk_elements
        self.impl = impl

    def get_config_dict(self) -> dict[str, int | None]:
        """Return the options that a loss writes into a model card."""
        return {"top_k": self.top_k, "chunk_elements": self.chunk_elements}

    def __call__(
        self,
        queries_embeddings: object,
        documents_embeddings: object,
        queries_mask: object = None,
        documents_mask: object = None,
    ) -> Tensor:
        """Compute XTR scores of every query with every document, ``[Nq, B * N]``.

        Args:
            queries_embeddings, documents_embeddings, queries_mask, documents_mask: as in
                :func:`xtr_scores`.
        """
        return xtr_scores(
            queries_embeddings,
            documents_embeddings,
            queries_mask,
            documents_mask,
            self.top_k,
            self.chunk_elements,
            impl=self.impl,
        )


class XTRKDScores(XTRScores):
    """:func:`xtr_kd_scores` with options, for the ``similarity_fct=`` of a loss.

    Args:
        top_k, chunk_elements, impl: as in :func:`xtr_scores`.

    Raises:
        ValueError: for a ``top_k`` below 1, when scores are computed.
    """

    def __call__(
        self,
        queries_embeddings: object,
        documents_embeddings: object,
        queries_mask: object = None,
        documents_mask: object = None,
    ) -> Tensor:
        """Compute XTR scores of each query with its N documents, ``[B, N]``.

        Args:
            queries_embeddings, documents_embeddings, queries_mask, documents_mask: as in
                :func:`xtr_kd_scores`.
        """
        return xtr_kd_scores(
            queries_embeddings,
            documents_embeddings,
            queries_mask,
            documents_mask,
            self.top_k,
            self.chunk_elements,
            impl=self.impl,
        )
