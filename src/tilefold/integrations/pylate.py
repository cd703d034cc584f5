"""PyLate's ColBERT scores without similarities, with PyLate's signatures and masks.

The stock functions write the similarities ``[Nq, Nd, Lq, Ld]`` of all tokens, and these do not.
Pass them to PyLate's losses as ``score_metric=``; :func:`accelerate` makes PyLate's reranker and
evaluators use them. Only :func:`accelerate` imports PyLate.

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
from tilefold.integrations._token_vectors import as_tokens, pack, token_vectors
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
    """Compute MaxSim of every query with every document, as ``pylate.scores.colbert_scores``.

    ``scores[i, j] = sum_s max_t mask_q[i, s] * mask_d[j, t] * queries[i, s] . documents[j, t]``
    (ColBERT, arXiv 2004.12832).

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
    queries, query_mask = _apply_mask("queries", queries_embeddings, queries_mask, 3)
    documents, document_mask = _apply_mask("documents", documents_embeddings, documents_mask, 3)
    return maxsim(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        pairing="all",
        mask_mode="zero",
        impl=_impl_of_backend(backend),
    )


def colbert_scores_pairwise(
    queries_embeddings: object,
    documents_embeddings: object,
    backend: str | None = None,
) -> Tensor:
    """Compute MaxSim ``[B]`` of query ``i`` with document ``i``, without masks.

    It replaces ``pylate.scores.colbert_scores_pairwise``. Rows of zeros, such as padding, take part
    with a similarity of 0, and a document without a row scores 0.

    Args:
        queries_embeddings: ``[B, L, D]``, or a list of ``[L_i, D]``, which are not padded.
        documents_embeddings: likewise.
        backend: as in :func:`colbert_scores`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`colbert_scores`.
    """
    queries, query_offsets = _pack_lists("queries", queries_embeddings)
    documents, document_offsets = _pack_lists("documents", documents_embeddings)
    return maxsim(
        queries,
        documents,
        cu_seqlens_q=query_offsets,
        cu_seqlens_d=document_offsets,
        pairing="aligned",
        impl=_impl_of_backend(backend),
    )


def colbert_kd_scores(
    queries_embeddings: object,
    documents_embeddings: object,
    queries_mask: object = None,
    documents_mask: object = None,
    backend: str | None = None,
) -> Tensor:
    """Compute MaxSim ``[B, N]`` of each query with its N documents.

    It replaces ``pylate.scores.colbert_kd_scores``, for ``score_metric=`` of
    ``losses.Distillation``.

    Args:
        queries_embeddings: ``[B, Lq, D]``.
        documents_embeddings: ``[B, N, Ld, D]``.
        queries_mask: ``[B, Lq]``, as in :func:`colbert_scores`.
        documents_mask: ``[B, N, Ld]``, as in :func:`colbert_scores`.
        backend: as in :func:`colbert_scores`.

    Raises:
        ValueError, TypeError, RuntimeError: as :func:`colbert_scores`.
    """
    queries, query_mask = _apply_mask("queries", queries_embeddings, queries_mask, 3)
    documents, document_mask = _apply_mask("documents", documents_embeddings, documents_mask, 4)
    return maxsim(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        pairing="grouped",
        mask_mode="zero",
        impl=_impl_of_backend(backend),
    )


class ColBERTScores:
    """Scores of every query with every document of stacked groups, in one call.

    It replaces ``pylate.scores.ColBERTScores``, for ``score_metric=`` of ``losses.Contrastive`` and
    ``losses.CachedContrastive``.
    """

    def __call__(
        self,
        queries_embeddings: object,
        documents_embeddings: object,
        queries_mask: object = None,
        documents_mask: object = None,
        backend: str | None = None,
    ) -> Tensor:
        """Compute scores ``[Nq, B * N]``, of document ``n`` of group ``j`` in column ``j * N + n``.

        Args:
            queries_embeddings: ``[Nq, Lq, D]``.
            documents_embeddings: ``[B, N, Ld, D]``.
            queries_mask: ``[Nq, Lq]``, as in :func:`colbert_scores`.
            documents_mask: ``[B, N, Ld]``, as in :func:`colbert_scores`.
            backend: as in :func:`colbert_scores`.
        """
        # One list of documents instead of groups: [B * N, Ld, D].
        grouped_documents = as_tokens("documents_embeddings", documents_embeddings, 4)
        documents = grouped_documents.flatten(0, 1)
        mask = None
        if documents_mask is not None:
            mask = torch.as_tensor(documents_mask).flatten(0, 1)
        return colbert_scores(queries_embeddings, documents, queries_mask, mask, backend)


_SCORES = ("pylate.scores", "pylate.scores.colbert")
_ALL_SCORES = (*_SCORES, "pylate.scores.similarity_functions")
_MODULES_BY_NAME = {
    "colbert_scores": [*_ALL_SCORES, "pylate.rank.rank"],
    "colbert_scores_pairwise": [*_ALL_SCORES, "pylate.evaluation.colbert_triplet"],
    "colbert_kd_scores": [*_SCORES, "pylate.evaluation.colbert_distillation"],
    "ColBERTScores.__call__": ["pylate.scores.colbert"],
}
_PATCHES = Acceleration("pylate", "pylate>=1.6", _MODULES_BY_NAME)
restore = _PATCHES.restore
is_accelerated = _PATCHES.is_accelerated


def accelerate(*, impl: str = "auto") -> Acceleration:
    """Make every module of PyLate that calls PyLate's scores use the functions of this module.

    From then on ``rank.rerank``, the triplet and distillation evaluators, and the losses
    ``Contrastive`` and ``CachedContrastive`` without a ``score_metric`` use them.
    ``losses.Distillation`` imports its default early, so pass it
    ``score_metric=colbert_kd_scores``. Names that your own code imported before stay PyLate's.

    Args:
        impl: implementation of calls without ``backend=``, see :func:`tilefold.ops.maxsim`.

    Returns:
        A handle (:class:`Acceleration`); as a context manager, it undoes the replacement at its
        end. Nothing is replaced with ``TILEFOLD_DISABLE=1`` in the environment.

    Raises:
        ValueError: for an unknown ``impl``.
        ImportError: without PyLate.
        RuntimeError: if a release of PyLate lacks one of the functions.
    """
    check_impl(impl)
    return _PATCHES.apply(
        {
            "colbert_scores": _with_default_backend(colbert_scores, impl),
            "colbert_scores_pairwise": _with_default_backend(colbert_scores_pairwise, impl),
            "colbert_kd_scores": _with_default_backend(colbert_kd_scores, impl),
            "ColBERTScores.__call__": _with_default_backend(ColBERTScores.__call__, impl),
        },
    )


def _with_default_backend(function: Callable[..., Tensor], impl: str) -> Callable[..., Tensor]:
    """Wrap a scoring function so that calls without a backend use a default one.

    Args:
        function: a function whose last parameter is ``backend``. Callers pass it by position or by
            name, or leave it out.
        impl: the default backend, an implementation of :func:`tilefold.ops.maxsim`.

    Returns:
        A function with the same parameters.
    """
    parameter_names = list(inspect.signature(function).parameters)
    backend_position = parameter_names.index("backend")

    @functools.wraps(function)
    def call_with_backend(*args: object, **kwargs: object) -> Tensor:
        backend = kwargs.pop("backend", None)
        if len(args) > backend_position:
            backend = args[backend_position]
        if backend is None:
            backend = impl
        return function(*args[:backend_position], **kwargs, backend=backend)

    return call_with_backend


def _impl_of_backend(backend: str | None) -> str:
    """Return the implementation of :func:`maxsim` for the argument ``backend`` of a score.

    Args:
        backend: ``None``, PyLate's ``"torch"``, or the name of an implementation.

    Raises:
        ValueError: for another backend.
    """
    if backend is None:
        return "auto"
    name = "reference" if backend == "torch" else backend
    if name not in IMPLS:
        listed = ", ".join(repr(impl) for impl in (*IMPLS, "torch"))
        raise ValueError(
            f"backend must be None or one of {listed}, got {backend!r}; PyLate itself has others.",
        )
    return name


def _apply_mask(
    name: str,
    embeddings: object,
    mask: object,
    dims: int,
) -> tuple[Tensor, Tensor | None]:
    """Convert embeddings and their mask to the tensors that :func:`maxsim` takes.

    ``maxsim`` takes no floating mask. PyLate multiplies the similarities of a token by its entry of
    the mask, which equals multiplying the embedding of the token by it.

    Args:
        name: ``"queries"`` or ``"documents"``, for error messages.
        embeddings: a tensor, an array or a list, of shape ``[..., L, D]``.
        mask: ``[..., L]`` of bools, integers or floats; ``None`` keeps all tokens.
        dims: number of dimensions that the embeddings must have.

    Returns:
        Embeddings ``[..., L, D]``, multiplied by a floating mask, and the mask ``[..., L]``. The
        mask is ``None`` if there is none, or it is floating.

    Raises:
        ValueError: for another shape of the embeddings or of the mask.
    """
    vectors = as_tokens(f"{name}_embeddings", embeddings, dims)
    if mask is None:
        return vectors, None
    mask_tensor = torch.as_tensor(mask)
    shape = list(vectors.shape[:-1])
    if list(mask_tensor.shape) != shape:
        raise ValueError(
            f"{name}_mask must have shape {shape}, one entry per token, "
            f"got {list(mask_tensor.shape)}.",
        )
    if mask_tensor.is_floating_point():
        return vectors * mask_tensor.to(vectors.dtype)[..., None], None
    return vectors, mask_tensor


def _pack_lists(name: str, embeddings: object) -> tuple[Tensor, Tensor | None]:
    """Convert padded embeddings to one tensor, or pack a list of embeddings of any lengths.

    Args:
        name: ``"queries"`` or ``"documents"``, for error messages.
        embeddings: a padded tensor or array ``[B, L, D]``, or a list of B items ``[L_i, D]``.

    Returns:
        For a padded tensor, ``[B, L, D]`` and ``None``. For a list, packed vectors ``[T, D]`` and
        their offsets ``[B + 1]``.
    """
    if isinstance(embeddings, (list, tuple)) and embeddings:
        return pack(token_vectors(f"{name}_embeddings", embeddings))
    # An empty list is refused here.
    return as_tokens(f"{name}_embeddings", embeddings, 3), None
