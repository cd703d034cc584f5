"""Fused scores for sentence-transformers' ``MultiVectorEncoder`` (ColBERT): losses, evaluators,
similarity.

Each function has the name, arguments and results of the one that it replaces, without the
similarities ``[Nq, Nd, Lq, Ld]`` that the stock one writes. The ``colbert_*`` and ``xtr_*`` ones
are those of ``sentence_transformers.multi_vector_encoder.scoring``, for the ``similarity_fct=`` of
a loss; the ``maxsim`` ones are those of ``sentence_transformers.util``, which take lists of any
lengths, and which an accelerated model uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tilefold.integrations.sentence_transformers import _sides
from tilefold.integrations.sentence_transformers._sides import (
    EMPTY_DOCUMENT_SCORE,
    Side,
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

_SIMILARITY = """

    Args:
        a: queries: a list of ``[Lq_i, D]`` tensors or arrays, as ``encode_query`` returns them; ``[Nq, Lq, D]`` padded;
            or one ``[Lq, D]``. Lists are packed, not padded.
        b: documents, likewise, of the same dtype.
        a_mask, b_mask: ``[Nq, Lq]`` and ``[Nd, Ld]``, or lists; nonzero = keep, and a floating ``a_mask`` weighs the
            similarities of its tokens. Without one, rows of zeros of a padded tensor are padding.
        chunk_elements: numbers of either side that are packed, or moved to ``device``, at a time; by default 100
            million. Similarities are never written, so nothing else needs to be cut.
        length_normalize: whether to divide by the number of the query's tokens (at least 1).
        device: where to score; by default where the documents are, and that is where the scores come back to.
        impl: as in :func:`tilefold.ops.maxsim`.

    Returns:
        {shape} fp32. A document without a token scores -1e9 before any division.
"""
_SIDES = """

    Args:
        queries_embeddings: ``[{q}, Lq, D]``; or a list of ``[Lq_i, D]``.
        documents_embeddings: {documents}.
        queries_mask: ``[{q}, Lq]``, nonzero = keep; a floating one weighs the similarities of its tokens. Without
            one every token is kept, and rows of zeros of a padded tensor are padding.
        documents_mask: one entry per document token, nonzero = keep; others take no part.
"""
_COLBERT = (
    _SIDES
    + """\
        chunk_elements: numbers of either side that are packed or moved at a time, where lists are given. Similarities
            are never written, so nothing else needs to be cut.
        length_normalize: whether to divide by the number of the query's unmasked tokens (at least 1).
        impl: as in :func:`tilefold.ops.maxsim`.

    Returns:
        {shape} fp32 on the device of the documents. A document without an unmasked token scores -1e9 before any
        division, without a gradient.
"""
)
_XTR = (
    _SIDES
    + """\
        top_k: tokens that each query token retrieves from all documents of the batch. Tokens that tie with the last one
            are retrieved too, where the stock function retrieves exactly ``top_k``.
        chunk_elements: ignored, for compatibility; there are no similarities to chunk.
        impl: as in :func:`tilefold.ops.xtr_scores`.

    Returns:
        {shape} fp32 on the device of the documents. A document without an unmasked token scores -1e9.
"""
)
_RAISES = """
    Raises:
        ValueError, TypeError: for shapes, dtypes or options that do not fit.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
_SHAPES = {
    "all": {
        "q": "Nq",
        "documents": "``[B, N, Ld, D]``, N documents for each of B queries",
        "shape": "``[Nq, B * N]``",
    },
    "aligned": {
        "q": "B",
        "documents": "``[B, Ld, D]``, or a list of ``[Ld_i, D]``",
        "shape": "``[B]``",
    },
    "grouped": {"q": "B", "documents": "``[B, N, Ld, D]``", "shape": "``[B, N]``"},
}


Scores: TypeAlias = Callable[..., Tensor]


def _named(function: Scores, name: str, text: str) -> Scores:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = text + _RAISES
    return function


def _similarity(name: str, pairing: str, mean: bool, summary: str) -> Scores:
    """The function with this name: its pairs, its default of ``length_normalize``, its docstring."""

    def similarity(
        a: object,
        b: object,
        a_mask: object = None,
        b_mask: object = None,
        chunk_elements: int | None = None,
        length_normalize: bool = mean,
        device: str | torch.device | None = None,
        *,
        impl: str = "auto",
    ) -> Tensor:
        queries, documents = Side("a", a, a_mask, weighted=True), Side("b", b, b_mask)
        return scores_of_sides(
            queries,
            documents,
            pairing,
            length_normalize,
            impl,
            chunk_elements,
            device,
        )

    shape = "``[Nq, Nd]``" if pairing == "all" else "``[N]``"
    return _named(similarity, name, summary + _SIMILARITY.format(shape=shape))


def _colbert(name: str, pairing: str, mean: bool, summary: str) -> Scores:
    """Likewise, of ``scoring``."""

    def scores(
        queries_embeddings: object,
        documents_embeddings: object,
        queries_mask: object = None,
        documents_mask: object = None,
        chunk_elements: int | None = None,
        length_normalize: bool = mean,
        *,
        impl: str = "auto",
    ) -> Tensor:
        queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
        if pairing == "aligned":
            documents = Side("documents_embeddings", documents_embeddings, documents_mask)
            return scores_of_sides(
                queries,
                documents,
                pairing,
                length_normalize,
                impl,
                chunk_elements,
            )
        rows, mask = _sides.groups(documents_embeddings, documents_mask)
        if pairing == "grouped":
            _check_groups(queries, rows)
            query = queries.part(slice(0, queries.count), rows.device)
            return _sides.score(
                query,
                _sides.SidePart(rows, mask, None),
                pairing,
                length_normalize,
                impl,
            )
        flat = Side("documents_embeddings", rows.flatten(0, 1), mask.flatten(0, 1))
        return scores_of_sides(queries, flat, pairing, length_normalize, impl, chunk_elements)

    return _named(scores, name, summary + _COLBERT.format(**_SHAPES[pairing]))


def _xtr(name: str, pairing: str, summary: str) -> Scores:
    """Likewise, of XTR."""

    def scores(
        queries_embeddings: object,
        documents_embeddings: object,
        queries_mask: object = None,
        documents_mask: object = None,
        top_k: int = 256,
        chunk_elements: int | None = None,
        *,
        impl: str = "auto",
    ) -> Tensor:
        if pairing == "aligned":  # groups of one
            documents_embeddings, documents_mask = (
                _alone(documents_embeddings, 3),
                _alone(documents_mask, 2),
            )
        rows, mask = _sides.groups(documents_embeddings, documents_mask)
        queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
        n_groups, n_ways = rows.shape[:2]
        if pairing != "all":
            _check_groups(queries, rows)
        if queries.count == 0:
            found = rows.new_zeros((0, n_groups * n_ways), dtype=torch.float32)
        else:
            query = queries.part(slice(0, queries.count), rows.device)
            layout: dict[str, Any] = {"query_mask": query.mask, "cu_seqlens_q": query.cu_seqlens}
            layout["document_mask"] = mask.flatten(0, 1)
            found = fused_xtr_scores(
                query.rows,
                rows.flatten(0, 1),
                top_k=top_k,
                **layout,
                impl=impl,
            )
            found = found.float().masked_fill(mask.sum(dim=-1).flatten() == 0, EMPTY_DOCUMENT_SCORE)
        if pairing == "all":
            return found
        own = found.view(n_groups, n_groups, n_ways).diagonal().mT.contiguous()
        return own if pairing == "grouped" else own.squeeze(1)

    shapes = _SHAPES[pairing]
    if pairing == "aligned":
        shapes = shapes | {"documents": "``[B, Ld, D]``, or ``[B, 1, Ld, D]``"}
    return _named(scores, name, summary + _XTR.format(**shapes))


def _check_groups(queries: Side, rows: Tensor) -> None:
    if queries.count != rows.size(0):
        expected = (
            f"documents_embeddings must hold one group for each of the {queries.count} queries"
        )
        raise ValueError(f"{expected}, got {list(rows.shape)}.")


def _alone(values: object, dims: int) -> Tensor | None:
    """Documents of one query each, or their mask, as groups of one."""
    found = None if values is None else torch.as_tensor(values)
    return found[:, None] if found is not None and found.dim() == dims else found


maxsim = _similarity(
    "maxsim",
    "all",
    False,
    "MaxSim of every query with every document (ColBERT, arXiv 2004.12832).",
)
mean_maxsim = _similarity(
    "mean_maxsim",
    "all",
    True,
    "``maxsim`` divided by the number of each query's tokens.",
)
maxsim_pairwise = _similarity(
    "maxsim_pairwise",
    "aligned",
    False,
    "MaxSim of query ``i`` with document ``i``.",
)
mean_maxsim_pairwise = _similarity(
    "mean_maxsim_pairwise",
    "aligned",
    True,
    "``maxsim_pairwise`` divided by the number of each query's tokens.",
)
colbert_scores = _colbert(
    "colbert_scores",
    "all",
    False,
    """MaxSim of every query with every document of the batch (ColBERT, arXiv 2004.12832).

    ``scores[i, j * N + n] = sum_s max_t queries[i, s] . documents[j, n, t]`` over unmasked tokens. For
    ``MultiVectorMultipleNegativesRankingLoss`` and its cached form, in place of ``colbert_scores``.""",
)
_OWN = "MaxSim of query ``i`` with"
colbert_scores_pairwise = _colbert(
    "colbert_scores_pairwise",
    "aligned",
    False,
    f"{_OWN} document ``i``, for ``MultiVectorMarginMSELoss``.",
)
colbert_kd_scores = _colbert(
    "colbert_kd_scores",
    "grouped",
    False,
    f"{_OWN} each of its N documents, for ``MultiVectorDistillKLDivLoss``.",
)
_MEAN = "divided by each query's unmasked tokens, as a model with ``'meanmaxsim'`` scores."
mean_colbert_scores = _colbert("mean_colbert_scores", "all", True, f"``colbert_scores`` {_MEAN}")
mean_colbert_scores_pairwise = _colbert(
    "mean_colbert_scores_pairwise",
    "aligned",
    True,
    f"``colbert_scores_pairwise`` {_MEAN}",
)
mean_colbert_kd_scores = _colbert(
    "mean_colbert_kd_scores",
    "grouped",
    True,
    f"``colbert_kd_scores`` {_MEAN}",
)
xtr_scores = _xtr(
    "xtr_scores",
    "all",
    "XTR scores (arXiv 2304.01982) of every query with every document: each query token retrieves "
    "``top_k`` tokens.",
)
_FROM_ALL = "tokens are retrieved from the whole batch as there."
xtr_kd_scores = _xtr(
    "xtr_kd_scores",
    "grouped",
    f":func:`xtr_scores` of each query with its own N documents; {_FROM_ALL}",
)
xtr_scores_pairwise = _xtr(
    "xtr_scores_pairwise",
    "aligned",
    f":func:`xtr_scores` of query ``i`` with document ``i``; {_FROM_ALL}",
)


class XTRScores:
    """:func:`xtr_scores` with options of its own, for ``similarity_fct=``.

    Args:
        top_k, chunk_elements, impl: as in :func:`xtr_scores`.

    Raises:
        ValueError: for a ``top_k`` below 1, when scores are asked for.
    """

    _scores: Scores = staticmethod(xtr_scores)

    def __init__(
        self,
        top_k: int = 256,
        *,
        chunk_elements: int | None = None,
        impl: str = "auto",
    ) -> None:
        self.top_k, self.chunk_elements, self.impl = top_k, chunk_elements, impl

    def get_config_dict(self) -> dict[str, int | None]:
        """The options that a loss writes into a model card."""
        return {"top_k": self.top_k, "chunk_elements": self.chunk_elements}

    def __call__(
        self,
        queries_embeddings: object,
        documents_embeddings: object,
        queries_mask: object = None,
        documents_mask: object = None,
    ) -> Tensor:
        """Scores: ``[Nq, B * N]``, of :class:`XTRKDScores` ``[B, N]``."""
        sides = (queries_embeddings, documents_embeddings, queries_mask, documents_mask)
        return self._scores(*sides, self.top_k, self.chunk_elements, impl=self.impl)


class XTRKDScores(XTRScores):
    """:func:`xtr_kd_scores` with options of its own.

    Args:
        top_k, chunk_elements, impl: as in :func:`xtr_scores`.

    Raises:
        ValueError: for a ``top_k`` below 1, when scores are asked for.
    """

    _scores = staticmethod(xtr_kd_scores)
