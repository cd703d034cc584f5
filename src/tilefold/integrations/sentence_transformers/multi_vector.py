"""Fused scores of ``MultiVectorEncoder`` models (ColBERT), for losses and evaluators.

Each function has the name, the arguments and the results of the function of sentence-transformers
that it replaces. In contrast to that function, it does not materialise the similarities ``[Nq, Nd,
Lq, Ld]``.

* ``colbert_*`` and ``xtr_*`` replace functions of
  ``sentence_transformers.multi_vector_encoder.scoring``, for the ``similarity_fct=`` of a loss.
* ``maxsim`` and its variants replace functions of ``sentence_transformers.util``. They accept lists
  of sequences of different lengths. An accelerated model uses them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.integrations.sentence_transformers._sides import (
    EMPTY_DOCUMENT_SCORE,
    GroupedDocuments,
    Side,
    TokenVectors,
    as_grouped_documents,
    maxsim_scores,
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
        a: the token vectors of the queries: a list of ``[Lq_i, D]`` tensors or arrays, as
            ``encode_query`` returns them, padded ``[Nq, Lq, D]``, or ``[Lq, D]`` of one query.
            Lists are packed, not padded.
        b: the token vectors of the documents, in the same forms and dtype.
        a_mask: which query tokens count, ``[Nq, Lq]`` or a list. A floating mask multiplies the
            similarities of its tokens. Without a mask, zero rows of a padded tensor are padding.
        b_mask: which document tokens count, ``[Nd, Ld]`` or a list.
        chunk_elements: the largest number of elements of queries or documents that are packed or
            moved to ``device`` at once; by default 100 million. The similarities take no memory.
        length_normalize: whether scores are divided by the number of tokens of the query (at least
            1).
        device: the device that computes; by default that of the documents, on which the scores are
            returned in any case.
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Returns:
        fp32 scores ``[Nq, Nd]``. A document without tokens scores -1e9 before any division.

    Raises:
        ValueError, TypeError: if shapes, dtypes or options are invalid.
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
    """Compute MaxSim of every query with every document, divided by the number of query tokens.

    This is :func:`maxsim` with another default of ``length_normalize``; the scores are
    ``[Nq, Nd]``.

    Args:
        a: the token vectors of the queries, a list of ``[Lq_i, D]`` or padded ``[Nq, Lq, D]``.
        b: the token vectors of the documents, a list of ``[Ld_i, D]`` or padded ``[Nd, Ld, D]``.
        a_mask: which query tokens count, ``[Nq, Lq]`` or a list. A floating mask multiplies the
            similarities of its tokens.
        b_mask: which document tokens count, ``[Nd, Ld]`` or a list.
        chunk_elements: the largest number of elements of queries or documents that are packed or
            moved to ``device`` at once.
        length_normalize: whether scores are divided by the number of query tokens. False gives
            :func:`maxsim`, as in sentence-transformers.
        device: the device that computes; by default that of the documents.
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`maxsim`.
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
        a: the token vectors of N queries, a list of ``[Lq_i, D]`` or padded ``[N, Lq, D]``.
        b: the token vectors of N documents, a list of ``[Ld_i, D]`` or padded ``[N, Ld, D]``.
        a_mask: which query tokens count, ``[N, Lq]`` or a list. A floating mask multiplies the
            similarities of its tokens.
        b_mask: which document tokens count, ``[N, Ld]`` or a list.
        chunk_elements: the largest number of elements of queries or documents that are packed or
            moved to ``device`` at once.
        length_normalize: whether scores are divided by the number of query tokens.
        device: the device that computes; by default that of the documents.
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`maxsim`.
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
    """Compute MaxSim of query ``i`` with document ``i``, divided by the number of query tokens.

    This is :func:`maxsim_pairwise` with another default of ``length_normalize``; the scores are
    ``[N]``.

    Args:
        a: the token vectors of N queries, a list of ``[Lq_i, D]`` or padded ``[N, Lq, D]``.
        b: the token vectors of N documents, a list of ``[Ld_i, D]`` or padded ``[N, Ld, D]``.
        a_mask: which query tokens count, ``[N, Lq]`` or a list. A floating mask multiplies the
            similarities of its tokens.
        b_mask: which document tokens count, ``[N, Ld]`` or a list.
        chunk_elements: the largest number of elements of queries or documents that are packed or
            moved to ``device`` at once.
        length_normalize: whether scores are divided by the number of query tokens.
        device: the device that computes; by default that of the documents.
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`maxsim`.
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
    Pass it as ``similarity_fct=`` to ``MultiVectorMultipleNegativesRankingLoss`` or its cached
    form.

    Args:
        queries_embeddings: the token vectors of the queries, ``[Nq, Lq, D]`` or a list of
            ``[Lq_i, D]``.
        documents_embeddings: the token vectors of N documents for each of B queries,
            ``[B, N, Ld, D]``.
        queries_mask: which query tokens count, ``[Nq, Lq]`` or a list. A floating mask multiplies
            the similarities of its tokens. Without a mask, zero rows of a padded tensor are
            padding, and all other tokens count.
        documents_mask: which document tokens count, ``[B, N, Ld]``.
        chunk_elements: the largest number of elements of a list that are packed or moved at once.
            The similarities take no memory.
        length_normalize: whether scores are divided by the number of unmasked tokens of the query
            (at least 1).
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Returns:
        fp32 scores ``[Nq, B * N]`` on the device of the documents. A document without an unmasked
        token scores -1e9 before any division, without a gradient.

    Raises:
        ValueError, TypeError: if shapes, dtypes or options are invalid.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
    groups = as_grouped_documents(documents_embeddings, documents_mask)
    documents = Side(
        "documents_embeddings",
        groups.vectors.flatten(0, 1),
        groups.mask.flatten(0, 1),
    )
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

    Pass it as ``similarity_fct=`` to ``MultiVectorMarginMSELoss``.

    Args:
        queries_embeddings: the token vectors of the queries, ``[B, Lq, D]`` or a list of
            ``[Lq_i, D]``.
        documents_embeddings: the token vectors of the documents, ``[B, Ld, D]`` or a list of
            ``[Ld_i, D]``.
        queries_mask: which query tokens count, ``[B, Lq]`` or a list. A floating mask multiplies
            the similarities of its tokens.
        documents_mask: which document tokens count, ``[B, Ld]`` or a list.
        chunk_elements: the largest number of elements of queries or documents that are packed or
            moved at once.
        length_normalize: whether scores are divided by the number of unmasked tokens of the query.
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`colbert_scores`.
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

    Pass it as ``similarity_fct=`` to ``MultiVectorDistillKLDivLoss``.

    Args:
        queries_embeddings: the token vectors of the queries, ``[B, Lq, D]`` or a list of
            ``[Lq_i, D]``.
        documents_embeddings: the token vectors of N documents for each query, ``[B, N, Ld, D]``.
        queries_mask: which query tokens count, ``[B, Lq]`` or a list. A floating mask multiplies
            the similarities of its tokens.
        documents_mask: which document tokens count, ``[B, N, Ld]``.
        chunk_elements: ignored; for compatibility with sentence-transformers.
        length_normalize: whether scores are divided by the number of unmasked tokens of the query.
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`colbert_scores`.
    """
    queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
    groups = as_grouped_documents(documents_embeddings, documents_mask)
    _check_groups(queries, groups.vectors)
    return maxsim_scores(
        queries.to(groups.vectors.device),
        TokenVectors(groups.vectors, groups.mask, cu_seqlens=None),
        pairing="grouped",
        length_normalize=length_normalize,
        impl=impl,
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
    """Compute MaxSim of every query with every document, divided by the number of query tokens.

    This is :func:`colbert_scores` with another default of ``length_normalize``, the similarity
    ``"meanmaxsim"`` of a model.

    Args:
        queries_embeddings: the token vectors of the queries, ``[Nq, Lq, D]``.
        documents_embeddings: the token vectors of the documents, ``[B, N, Ld, D]``.
        queries_mask: which query tokens count, ``[Nq, Lq]``.
        documents_mask: which document tokens count, ``[B, N, Ld]``.
        chunk_elements: the largest number of elements of a list that are packed or moved at once.
        length_normalize: whether scores are divided by the number of unmasked tokens of the query.
            It can be turned off for compatibility with sentence-transformers.
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`colbert_scores`.
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
    """Compute MaxSim of query ``i`` with document ``i``, divided by the number of query tokens.

    This is :func:`colbert_scores_pairwise` with another default of ``length_normalize``, the
    similarity ``"meanmaxsim"`` of a model.

    Args:
        queries_embeddings: the token vectors of the queries, ``[B, Lq, D]``.
        documents_embeddings: the token vectors of the documents, ``[B, Ld, D]``.
        queries_mask: which query tokens count, ``[B, Lq]``.
        documents_mask: which document tokens count, ``[B, Ld]``.
        chunk_elements: the largest number of elements of queries or documents that are packed or
            moved at once.
        length_normalize: whether scores are divided by the number of unmasked tokens of the query.
            It can be turned off for compatibility with sentence-transformers.
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`colbert_scores_pairwise`.
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
    """Compute MaxSim of each query with its N documents, divided by the number of query tokens.

    This is :func:`colbert_kd_scores` with another default of ``length_normalize``, the similarity
    ``"meanmaxsim"`` of a model.

    Args:
        queries_embeddings: the token vectors of the queries, ``[B, Lq, D]``.
        documents_embeddings: the token vectors of N documents for each query, ``[B, N, Ld, D]``.
        queries_mask: which query tokens count, ``[B, Lq]``.
        documents_mask: which document tokens count, ``[B, N, Ld]``.
        chunk_elements: ignored; for compatibility with sentence-transformers.
        length_normalize: whether scores are divided by the number of unmasked tokens of the query.
            It can be turned off for compatibility with sentence-transformers.
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`colbert_kd_scores`.
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
    """Compute XTR scores (arXiv 2304.01982) for every pair of a query and a document of the batch.

    Each query token retrieves ``top_k`` document tokens.

    Args:
        queries_embeddings: the token vectors of the queries, ``[Nq, Lq, D]`` or a list of
            ``[Lq_i, D]``.
        documents_embeddings: the token vectors of N documents for each of B queries,
            ``[B, N, Ld, D]``.
        queries_mask: which query tokens count, ``[Nq, Lq]`` or a list. A floating mask multiplies
            the similarities of its tokens. Without a mask, zero rows of a padded tensor are
            padding, and all other tokens count.
        documents_mask: which document tokens count, ``[B, N, Ld]``.
        top_k: the number of tokens that each query token retrieves from all documents of the batch.
            Tokens that tie with the last one are also retrieved, whereas sentence-transformers
            retrieves exactly ``top_k``.
        chunk_elements: ignored; for compatibility with sentence-transformers.
        impl: the implementation of :func:`tilefold.ops.xtr_scores`.

    Returns:
        fp32 scores ``[Nq, B * N]`` on the device of the documents. A document without an unmasked
        token scores -1e9.

    Raises:
        ValueError, TypeError: if shapes, dtypes or options are invalid.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
    queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
    groups = as_grouped_documents(documents_embeddings, documents_mask)
    return _score_xtr(queries, groups, top_k, impl)


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
    """Compute the XTR scores of each query with its N documents, ``[B, N]``.

    As in :func:`xtr_scores`, a query token retrieves tokens of all documents of the batch.

    Args:
        queries_embeddings: the token vectors of the queries, ``[B, Lq, D]`` or a list of
            ``[Lq_i, D]``.
        documents_embeddings: the token vectors of N documents for each query, ``[B, N, Ld, D]``.
        queries_mask: which query tokens count, ``[B, Lq]`` or a list.
        documents_mask: which document tokens count, ``[B, N, Ld]``.
        top_k: the number of tokens that each query token retrieves.
        chunk_elements: ignored; for compatibility with sentence-transformers.
        impl: the implementation of :func:`tilefold.ops.xtr_scores`.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`xtr_scores`.
    """
    queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
    groups = as_grouped_documents(documents_embeddings, documents_mask)
    _check_groups(queries, groups.vectors)
    n_groups, n_documents = groups.vectors.shape[:2]
    scores = _score_xtr(queries, groups, top_k, impl)
    # Query i needs the scores of its own documents only, those of group i. They are the diagonal of
    # [queries, groups, documents], which ``diagonal`` returns as [documents, queries].
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
    """Compute the XTR score of query ``i`` with document ``i``, ``[B]``.

    As in :func:`xtr_scores`, a query token retrieves tokens of all documents of the batch.

    Args:
        queries_embeddings: the token vectors of the queries, ``[B, Lq, D]`` or a list of
            ``[Lq_i, D]``.
        documents_embeddings: the token vectors of the documents, ``[B, Ld, D]`` or
            ``[B, 1, Ld, D]``.
        queries_mask: which query tokens count, ``[B, Lq]`` or a list.
        documents_mask: which document tokens count, ``[B, Ld]`` or ``[B, 1, Ld]``.
        top_k: the number of tokens that each query token retrieves.
        chunk_elements: ignored; for compatibility with sentence-transformers.
        impl: the implementation of :func:`tilefold.ops.xtr_scores`.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`xtr_scores`.
    """
    scores = xtr_kd_scores(
        queries_embeddings,
        _as_groups_of_one(documents_embeddings, ndim=4),
        queries_mask,
        _as_groups_of_one(documents_mask, ndim=3),
        top_k,
        chunk_elements,
        impl=impl,
    )
    return scores.squeeze(1)


def _score_xtr(
    queries: Side,
    groups: GroupedDocuments,
    top_k: int,
    impl: str,
) -> Tensor:
    """Compute XTR scores of every query with every document of all groups.

    Args:
        queries: Nq queries.
        groups: N documents for each of B queries.
        top_k: the number of tokens that each query token retrieves.
        impl: the implementation of :func:`tilefold.ops.xtr_scores`.

    Returns:
        fp32 scores ``[Nq, B * N]``.
    """
    documents = groups.vectors.flatten(0, 1)
    document_mask = groups.mask.flatten(0, 1)
    if queries.count == 0:
        return documents.new_zeros((0, len(documents)), dtype=torch.float32)
    query_vectors = queries.to(documents.device)
    scores = fused_xtr_scores(
        query_vectors.vectors,
        documents,
        query_mask=query_vectors.mask,
        cu_seqlens_q=query_vectors.cu_seqlens,
        document_mask=document_mask,
        top_k=top_k,
        impl=impl,
    )
    is_empty = document_mask.sum(dim=-1) == 0
    return scores.float().masked_fill(is_empty, EMPTY_DOCUMENT_SCORE)


def _check_groups(queries: Side, documents: Tensor) -> None:
    """Raise ``ValueError`` if there is not one group of documents ``[B, N, Ld, D]`` per query."""
    if queries.count != documents.size(0):
        raise ValueError(
            "documents_embeddings must hold one group for each of the "
            f"{queries.count} queries, got {list(documents.shape)}.",
        )


def _as_groups_of_one(values: object, ndim: int) -> Tensor | None:
    """Return documents, or their mask, as groups of one document for each query.

    Args:
        values: one document for each query, ``[B, Ld, D]``, or their mask ``[B, Ld]``; None if
            there is no mask. Values that are grouped already, ``[B, 1, ...]``, do not change.
        ndim: the number of dimensions of grouped values.
    """
    if values is None:
        return None
    tensor = torch.as_tensor(values)
    return tensor.unsqueeze(1) if tensor.dim() == ndim - 1 else tensor


class XTRScores:
    """:func:`xtr_scores` with fixed options, for the ``similarity_fct=`` of a loss.

    Args:
        top_k: the number of tokens that each query token retrieves from all documents of the batch.
        chunk_elements: ignored; for compatibility with sentence-transformers.
        impl: the implementation of :func:`tilefold.ops.xtr_scores`.

    Raises:
        ValueError: when scores are computed, if ``top_k`` is below 1.
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
            top_k: the number of tokens that each query token retrieves from all documents of the
                batch.
            chunk_elements: ignored; for compatibility with sentence-transformers.
            impl: the implementation of :func:`tilefold.ops.xtr_scores`.
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
        """Compute the XTR score of every query with every document of the batch.

        Each query token retrieves the ``top_k`` most similar tokens of all documents of the batch.
        Only retrieved tokens count in the scores.

        Args:
            queries_embeddings: the token vectors of the queries, ``[Nq, Lq, D]`` or a list of
                ``[Lq_i, D]``.
            documents_embeddings: the token vectors of B groups of N documents, ``[B, N, Ld, D]``.
            queries_mask: which query tokens count, ``[Nq, Lq]`` or a list.
            documents_mask: which document tokens count, ``[B, N, Ld]``.

        Returns:
            fp32 scores ``[Nq, B * N]``.
        """
        return xtr_scores(
            queries_embeddings,
            documents_embeddings,
            queries_mask,
            documents_mask,
            top_k=self.top_k,
            chunk_elements=self.chunk_elements,
            impl=self.impl,
        )


class XTRKDScores(XTRScores):
    """:func:`xtr_kd_scores` with fixed options, for the ``similarity_fct=`` of a loss.

    Args:
        top_k: the number of tokens that each query token retrieves from all documents of the batch.
        chunk_elements: ignored; for compatibility with sentence-transformers.
        impl: the implementation of :func:`tilefold.ops.xtr_scores`.

    Raises:
        ValueError: when scores are computed, if ``top_k`` is below 1.
    """

    def __call__(
        self,
        queries_embeddings: object,
        documents_embeddings: object,
        queries_mask: object = None,
        documents_mask: object = None,
    ) -> Tensor:
        """Compute the XTR scores ``[B, N]`` of each query with its N documents.

        Args:
            queries_embeddings: the token vectors of the queries, ``[B, Lq, D]`` or a list of
                ``[Lq_i, D]``.
            documents_embeddings: the token vectors of N documents for each query,
                ``[B, N, Ld, D]``.
            queries_mask: which query tokens count, ``[B, Lq]`` or a list.
            documents_mask: which document tokens count, ``[B, N, Ld]``.
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
