"""Fused scores for sentence-transformers' ``MultiVectorEncoder`` (ColBERT): losses, evaluators, similarity.

Each function has the name, arguments and results of the one that it replaces. The ``colbert_*`` and ``xtr_*`` ones are
those of ``sentence_transformers.multi_vector_encoder.scoring``, for the ``similarity_fct=`` of a loss; the
``maxsim`` ones are those of ``sentence_transformers.util``, which take lists of any lengths, and which a model uses
after :func:`tilefold.integrations.sentence_transformers.accelerate`. :func:`tilefold.ops.maxsim` and ``xtr_scores``
avoid the similarities ``[Nq, Nd, Lq, Ld]`` that the stock functions write and keep for backward.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from tilefold.integrations.sentence_transformers._sides import (
    EMPTY_DOCUMENT_SCORE,
    Side,
    groups,
    score,
    scores_of_sides,
)
from tilefold.integrations.sentence_transformers._similarity import (
    maxsim,
    maxsim_pairwise,
    mean_maxsim,
    mean_maxsim_pairwise,
)
from tilefold.integrations.sentence_transformers._xtr import (
    XTRKDScores,
    XTRScores,
    xtr_kd_scores,
    xtr_scores,
    xtr_scores_pairwise,
)

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

_ARGUMENTS = """

    Args:
        queries_embeddings: ``[{q}, Lq, D]``; or a list of ``[Lq_i, D]``.
        documents_embeddings: {documents}.
        queries_mask: ``[{q}, Lq]``, nonzero = keep; a floating one weighs the similarities of its tokens. Without
            one every token is kept, and rows of zeros of a padded tensor are padding.
        documents_mask: one entry per document token, nonzero = keep; masked tokens take no part in the maximum.
        chunk_elements: numbers of either side that are packed or moved at a time, where lists are given. Similarities
            are never written, so nothing else needs to be cut.
        length_normalize: whether to divide by the number of the query's unmasked tokens (at least 1).
        impl: as in :func:`tilefold.ops.maxsim`.

    Returns:
        {shape} fp32 on the device of the documents. A document without an unmasked token scores -1e9 before any
        division, without a gradient.

    Raises:
        ValueError, TypeError: for shapes or dtypes that do not fit.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
_SHAPES = {
    "all": {"q": "Nq", "documents": "``[B, N, Ld, D]``, N documents for each of B queries", "shape": "``[Nq, B * N]``"},
    "aligned": {"q": "B", "documents": "``[B, Ld, D]``, or a list of ``[Ld_i, D]``", "shape": "``[B]``"},
    "grouped": {"q": "B", "documents": "``[B, N, Ld, D]``", "shape": "``[B, N]``"},
}


class _ColBERTFunction(Protocol):
    """A function of ``sentence_transformers.multi_vector_encoder.scoring`` with an argument ``impl``."""

    def __call__(
        self,
        queries_embeddings: Any,
        documents_embeddings: Any,
        queries_mask: Any = None,
        documents_mask: Any = None,
        chunk_elements: int | None = None,
        length_normalize: bool = ...,
        *,
        impl: str = "auto",
    ) -> Tensor: ...


def _function(name: str, pairing: str, mean: bool, summary: str) -> _ColBERTFunction:
    """The function with this name: its pairs, its default of ``length_normalize``, its docstring."""

    def scores(
        queries_embeddings: Any,
        documents_embeddings: Any,
        queries_mask: Any = None,
        documents_mask: Any = None,
        chunk_elements: int | None = None,
        length_normalize: bool = mean,
        *,
        impl: str = "auto",
    ) -> Tensor:
        queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
        if pairing == "aligned":
            documents = Side("documents_embeddings", documents_embeddings, documents_mask, weighted=False)
            return scores_of_sides(queries, documents, pairing, length_normalize, impl, chunk_elements)
        grouped = groups(documents_embeddings, documents_mask)
        if pairing == "grouped":
            if queries.count != grouped.rows.size(0):
                raise ValueError(
                    f"documents_embeddings must hold one group for each of the {queries.count} queries, got "
                    f"{list(grouped.rows.shape)}."
                )
            query = queries.part(slice(0, queries.count), grouped.rows.device)
            return score(query, grouped, pairing, length_normalize, impl)
        flat = Side("documents_embeddings", grouped.rows.flatten(0, 1), None, weighted=False)
        flat.mask = None if grouped.mask is None else grouped.mask.flatten(0, 1)
        return scores_of_sides(queries, flat, pairing, length_normalize, impl, chunk_elements)

    scores.__name__ = scores.__qualname__ = name
    scores.__doc__ = summary + _ARGUMENTS.format(**_SHAPES[pairing])
    return scores


colbert_scores = _function(
    "colbert_scores",
    "all",
    False,
    """MaxSim of every query with every document of the batch (ColBERT, arXiv 2004.12832).

    ``scores[i, j * N + n] = sum_s max_t queries[i, s] . documents[j, n, t]`` over unmasked tokens. For
    ``MultiVectorMultipleNegativesRankingLoss`` and its cached form, in place of ``colbert_scores``.""",
)
colbert_scores_pairwise = _function(
    "colbert_scores_pairwise",
    "aligned",
    False,
    "MaxSim of query ``i`` with document ``i``, for ``MultiVectorMarginMSELoss`` and the distillation evaluator.",
)
colbert_kd_scores = _function(
    "colbert_kd_scores",
    "grouped",
    False,
    "MaxSim of query ``i`` with each of its own N documents, for ``MultiVectorDistillKLDivLoss``.",
)
mean_colbert_scores = _function(
    "mean_colbert_scores",
    "all",
    True,
    "``colbert_scores`` divided by each query's unmasked tokens, as a model with ``'meanmaxsim'`` scores.",
)
mean_colbert_scores_pairwise = _function(
    "mean_colbert_scores_pairwise",
    "aligned",
    True,
    "``colbert_scores_pairwise`` divided by each query's unmasked tokens.",
)
mean_colbert_kd_scores = _function(
    "mean_colbert_kd_scores", "grouped", True, "``colbert_kd_scores`` divided by each query's unmasked tokens."
)
