"""PyLate's ColBERT scores without the similarities ``[Nq, Nd, Lq, Ld]``, with PyLate's signatures
and masks.

Pass the functions to PyLate's losses as ``score_metric=``; :func:`accelerate` makes PyLate's
reranker and evaluators use them. Only :func:`accelerate` imports PyLate.

PyLate multiplies similarities by the masks *before* the maximum. A masked document token (padding,
a word of the skiplist) thus counts as a similarity of 0, and wins where all others are negative; a
document without an unmasked token scores 0. These functions compute the same, for masks of any
pattern, and all of them are differentiable.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from tilefold.integrations._patches import Acceleration
from tilefold.integrations._ragged import as_tokens, pack, token_vectors
from tilefold.ops import maxsim
from tilefold.ops.implementations import IMPLS, check_impl

__all__ = [
    "Acceleration",
    "ColBERTScores",
    "accelerate",
    "colbert_kd_scores",
    "colbert_scores",
    "colbert_scores_pairwise",
    "is_accelerated",
    "restore",
]


def colbert_scores(
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    backend: str | None = None,
) -> Tensor:
    """MaxSim of every query with every document (ColBERT, arXiv 2004.12832), as
    ``pylate.scores.colbert_scores``.

    ``scores[i, j] = sum_s max_t mask_q[i, s] * mask_d[j, t] * queries[i, s] . documents[j, t]``.

    Args:
        queries_embeddings: ``[Nq, Lq, D]`` tensor, array or list; fp16, bf16, fp32 or fp64.
        documents_embeddings: ``[Nd, Ld, D]``, of the same dtype and device.
        queries_mask: ``[Nq, Lq]``. Bools or integers: nonzero = keep. A floating-point mask
            multiplies the similarities and has a gradient if it requires one; it costs a copy of
            the embeddings.
        documents_mask: ``[Nd, Ld]``, likewise.
        backend: ``None``, ``"auto"`` or an ``impl`` of :func:`tilefold.ops.maxsim`; ``"torch"`` is
            ``"reference"``. The environment variable ``PYLATE_SCORES_BACKEND`` is not read.

    Returns:
        ``[Nq, Nd]`` fp32 (fp64 for fp64).

    Raises:
        ValueError, TypeError: for shapes, dtypes, devices or a backend that do not fit.
        RuntimeError: if ``backend="triton"`` cannot run here.
    """
    return _scores(
        "all",
        queries_embeddings,
        documents_embeddings,
        queries_mask,
        documents_mask,
        backend,
    )


def colbert_scores_pairwise(
    queries_embeddings: object,
    documents_embeddings: object,
    backend: str | None = None,
) -> Tensor:
    """MaxSim ``[B]`` of query ``i`` with document ``i``, as
    ``pylate.scores.colbert_scores_pairwise``: no masks.

    Sides are ``[B, L, D]``, or lists of ``[L_i, D]``, which are not padded. Rows of zeros, such as
    padding, take part with a similarity of 0, and a document without a row scores 0; all else is as
    in :func:`colbert_scores`.
    """
    queries, cu_queries = _rows("queries", queries_embeddings)
    documents, cu_documents = _rows("documents", documents_embeddings)
    impl = _impl(backend)
    return maxsim(
        queries,
        documents,
        cu_seqlens_q=cu_queries,
        cu_seqlens_d=cu_documents,
        pairing="aligned",
        impl=impl,
    )


def colbert_kd_scores(
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    backend: str | None = None,
) -> Tensor:
    """MaxSim ``[B, N]`` of each query with its own N documents, as
    ``pylate.scores.colbert_kd_scores``.

    For ``score_metric=`` of ``losses.Distillation``. Queries are ``[B, Lq, D]`` with a mask ``[B,
    Lq]``, documents ``[B, N, Ld, D]`` with a mask ``[B, N, Ld]``; all else is as in
    :func:`colbert_scores`.
    """
    return _scores(
        "grouped",
        queries_embeddings,
        documents_embeddings,
        queries_mask,
        documents_mask,
        backend,
    )


class ColBERTScores:
    """Scores of every query with every document of stacked groups, as
    ``pylate.scores.ColBERTScores``, in one call.

    For ``score_metric=`` of ``losses.Contrastive`` and ``losses.CachedContrastive``.
    """

    def __call__(
        self,
        queries_embeddings: object,
        documents_embeddings: object,
        queries_mask: object = None,
        documents_mask: object = None,
        backend: str | None = None,
    ) -> Tensor:
        """Scores ``[Nq, B * N]``, of document ``n`` of group ``j`` in column ``j * N + n``.

        Documents are ``[B, N, Ld, D]`` with a mask ``[B, N, Ld]``; all else is as in
        :func:`colbert_scores`.
        """
        documents = as_tokens("documents_embeddings", documents_embeddings, 4).flatten(0, 1)
        mask = None if documents_mask is None else torch.as_tensor(documents_mask).flatten(0, 1)
        return colbert_scores(queries_embeddings, documents, queries_mask, mask, backend)


_SCORES = ("pylate.scores", "pylate.scores.colbert")
_BY_NAME = (*_SCORES, "pylate.scores.similarity_functions")
_PLACES = {
    "colbert_scores": [*_BY_NAME, "pylate.rank.rank"],
    "colbert_scores_pairwise": [*_BY_NAME, "pylate.evaluation.colbert_triplet"],
    "colbert_kd_scores": [*_SCORES, "pylate.evaluation.colbert_distillation"],
    "ColBERTScores.__call__": ["pylate.scores.colbert"],
}
_PATCHES = Acceleration("pylate", "pylate>=1.6", _PLACES)
restore, is_accelerated = _PATCHES.restore, _PATCHES.is_accelerated


def accelerate(*, impl: str = "auto") -> Acceleration:
    """Make every module of PyLate that calls PyLate's scores use the functions of this module.

    From then on ``rank.rerank``, the triplet and distillation evaluators, and the losses
    ``Contrastive`` and ``CachedContrastive`` without a ``score_metric`` use them.
    ``losses.Distillation`` imports its default early, so pass it
    ``score_metric=colbert_kd_scores``. Names that your own code imported before stay PyLate's.

    Args:
        impl: implementation of calls without ``backend=``, see :func:`tilefold.ops.maxsim`.

    Returns:
        A handle (:class:`Acceleration`); as a context manager, it undoes the replacement at its end. Nothing is
        replaced with ``TILEFOLD_DISABLE=1`` in the environment.

    Raises:
        ValueError: for an unknown ``impl``; ImportError, RuntimeError: without PyLate, or these
            names in it.
    """
    check_impl(impl)
    functions = colbert_scores, colbert_scores_pairwise, colbert_kd_scores, ColBERTScores.__call__
    return _PATCHES.apply({function.__qualname__: _bound(function, impl) for function in functions})


def _bound(function: Callable[..., Tensor], impl: str) -> Callable[..., Tensor]:
    """``function``, with ``impl`` for calls without ``backend=``."""
    place = list(inspect.signature(function).parameters).index("backend")

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Tensor:
        named = kwargs.pop("backend", None)
        backend = args[place] if len(args) > place else named
        return function(*args[:place], **kwargs, backend=impl if backend is None else backend)

    return call


def _impl(backend: str | None) -> str:
    if backend is None:
        return "auto"
    name = "reference" if backend == "torch" else backend
    if name not in IMPLS:
        listed = ", ".join(repr(impl) for impl in (*IMPLS, "torch"))
        raise ValueError(
            f"backend must be None or one of {listed}, got {backend!r}; PyLate itself has others.",
        )
    return name


def _scores(
    pairing: str,
    queries: object,
    documents: object,
    queries_mask: object,
    documents_mask: object,
    backend: str | None,
) -> Tensor:
    rows, mask = _side("queries", queries, queries_mask, 3)
    others, other_mask = _side(
        "documents",
        documents,
        documents_mask,
        4 if pairing == "grouped" else 3,
    )
    impl = _impl(backend)
    return maxsim(
        rows,
        others,
        query_mask=mask,
        document_mask=other_mask,
        pairing=pairing,
        mask_mode="zero",
        impl=impl,
    )


def _side(name: str, embeddings: object, mask: object, dims: int) -> tuple[Tensor, Tensor | None]:
    """Embeddings, and the mask that :func:`maxsim` takes; floating masks are multiplied into the
    embeddings.
    """
    rows = as_tokens(f"{name}_embeddings", embeddings, dims)
    if mask is None:
        return rows, None
    found, shape = torch.as_tensor(mask), list(rows.shape[:-1])
    if list(found.shape) != shape:
        raise ValueError(
            f"{name}_mask must have shape {shape}, one entry per token, got {list(found.shape)}.",
        )
    return (
        (rows * found.to(rows.dtype)[..., None], None)
        if found.is_floating_point()
        else (rows, found)
    )


def _rows(name: str, embeddings: object) -> tuple[Tensor, Tensor | None]:
    """Padded embeddings, or packed ones with their offsets."""
    if (
        not isinstance(embeddings, (list, tuple)) or not embeddings
    ):  # an empty list is refused there
        return as_tokens(f"{name}_embeddings", embeddings, 3), None
    return pack(token_vectors(f"{name}_embeddings", embeddings))
