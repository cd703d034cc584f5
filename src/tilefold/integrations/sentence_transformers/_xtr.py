"""XTR scores for ``MultiVectorEncoder`` losses, computed by ``tilefold.ops.xtr_scores``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tilefold.integrations.sentence_transformers._sides import EMPTY_DOCUMENT_SCORE, Side, groups
from tilefold.ops import xtr_scores as fused_scores

_ARGUMENTS = """

    Args:
        queries_embeddings: ``[{q}, Lq, D]``; or a list of ``[Lq_i, D]``.
        documents_embeddings: {documents}.
        queries_mask: ``[{q}, Lq]``, nonzero = keep; a floating-point one weights the similarities of its tokens.
            Without one every token is kept, and rows of zeros of a padded tensor are padding.
        documents_mask: one entry per document token, nonzero = keep; masked tokens are never retrieved.
        top_k: tokens that each query token retrieves from all documents of the batch. Tokens that tie with the last one
            are retrieved too, where the stock function retrieves exactly ``top_k``.
        chunk_elements: ignored, for compatibility; there are no similarities to chunk.
        impl: as in :func:`tilefold.ops.xtr_scores`.

    Returns:
        {shape} fp32 on the device of the documents. A document without an unmasked token scores -1e9.

    Raises:
        ValueError, TypeError: for shapes, dtypes or a ``top_k`` that do not fit.
        RuntimeError: if ``impl="triton"`` cannot run here.
    """
_SHAPES = {
    "all": {"q": "Nq", "documents": "``[B, N, Ld, D]``, N documents for each of B queries", "shape": "``[Nq, B * N]``"},
    "grouped": {"q": "B", "documents": "``[B, N, Ld, D]``", "shape": "``[B, N]``"},
    "aligned": {"q": "B", "documents": "``[B, Ld, D]``, or ``[B, 1, Ld, D]``", "shape": "``[B]``"},
}


class _XTRFunction(Protocol):
    """A function of ``sentence_transformers.multi_vector_encoder.scoring`` with an argument ``impl``."""

    def __call__(
        self,
        queries_embeddings: Any,
        documents_embeddings: Any,
        queries_mask: Any = None,
        documents_mask: Any = None,
        top_k: int = 256,
        chunk_elements: int | None = None,
        *,
        impl: str = "auto",
    ) -> Tensor: ...


def _function(name: str, pairing: str, summary: str) -> _XTRFunction:
    """The function with this name: its pairs and its docstring."""

    def scores(
        queries_embeddings: Any,
        documents_embeddings: Any,
        queries_mask: Any = None,
        documents_mask: Any = None,
        top_k: int = 256,
        chunk_elements: int | None = None,
        *,
        impl: str = "auto",
    ) -> Tensor:
        if pairing == "aligned":
            documents_embeddings = _alone(documents_embeddings, 3)
            documents_mask = None if documents_mask is None else _alone(documents_mask, 2)
        documents = groups(documents_embeddings, documents_mask)
        queries = Side("queries_embeddings", queries_embeddings, queries_mask, weighted=True)
        n_groups, n_ways = documents.rows.shape[:2]
        if pairing != "all" and queries.count != n_groups:
            raise ValueError(
                f"documents_embeddings must hold one group for each of the {queries.count} queries, got "
                f"{list(documents.rows.shape)}."
            )
        if queries.count == 0:
            found = documents.rows.new_zeros((0, n_groups * n_ways), dtype=torch.float32)
        else:
            query = queries.part(slice(0, queries.count), documents.rows.device)
            found = fused_scores(
                query.rows,
                documents.rows.flatten(0, 1),
                top_k=top_k,
                query_mask=query.mask,
                document_mask=None if documents.mask is None else documents.mask.flatten(0, 1),
                cu_seqlens_q=query.cu_seqlens,
                impl=impl,
            )
            found = found.float().masked_fill(documents.counts().flatten() == 0, EMPTY_DOCUMENT_SCORE)
        if pairing == "all":
            return found
        own = found.view(n_groups, n_groups, n_ways).diagonal().mT.contiguous()
        return own if pairing == "grouped" else own.squeeze(1)

    scores.__name__ = scores.__qualname__ = name
    scores.__doc__ = summary + _ARGUMENTS.format(**_SHAPES[pairing])
    return scores


def _alone(values: Any, dims: int) -> Tensor:
    """Documents of one query each, or their mask, as groups of one."""
    found = torch.as_tensor(values)
    return found[:, None] if found.dim() == dims else found


xtr_scores = _function(
    "xtr_scores",
    "all",
    "XTR scores (arXiv 2304.01982) of every query with every document: each query token retrieves ``top_k`` tokens.",
)
xtr_kd_scores = _function(
    "xtr_kd_scores",
    "grouped",
    ":func:`xtr_scores` of each query with its own N documents; tokens are retrieved from the whole batch as there.",
)
xtr_scores_pairwise = _function(
    "xtr_scores_pairwise",
    "aligned",
    ":func:`xtr_scores` of query ``i`` with document ``i``; tokens are retrieved from the whole batch as there.",
)


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
