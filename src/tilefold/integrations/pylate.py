"""PyLate's ColBERT scores without similarities, with PyLate's signatures and masks.

PyLate's functions materialise the similarities ``[Nq, Nd, Lq, Ld]`` of all tokens, and these do
not. Pass them to PyLate's losses as ``score_metric=``; :func:`accelerate` makes PyLate's reranker
and evaluators use them. Only :func:`accelerate` imports PyLate.

PyLate multiplies similarities by the masks *before* the maximum. So a masked document token
(padding, or a word of the skiplist) counts with a similarity of 0, which is the maximum if all
others are negative, and a document without an unmasked token scores 0. These functions compute the
same for any mask, and all of them are differentiable.
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
    """Compute MaxSim of every query with every document (ColBERT, arXiv 2004.12832).

    It replaces ``pylate.scores.colbert_scores``.
    ``scores[i, j] = sum_s max_t mask_q[i, s] * mask_d[j, t] * queries[i, s] . documents[j, t]``.

    Args:
        queries_embeddings: the token vectors of the queries, a tensor, array or list
            ``[Nq, Lq, D]``; fp16, bf16, fp32 or fp64.
        documents_embeddings: the token vectors of the documents, ``[Nd, Ld, D]``, of the same dtype
            and device.
        queries_mask: which query tokens count, ``[Nq, Lq]``: nonzero bools or integers. An entry of
            a floating-point mask multiplies the similarities of its token. Such a mask is
            differentiable, and costs a copy of the embeddings.
        documents_mask: which document tokens count, ``[Nd, Ld]``, of the same kinds.
        backend: the implementation, an ``impl`` of :func:`tilefold.ops.maxsim`. PyLate's name
            ``"torch"`` stands for ``"reference"``, and None for ``"auto"``. The environment
            variable ``PYLATE_SCORES_BACKEND`` is not read.

    Returns:
        Scores ``[Nq, Nd]`` in fp32 (fp64 for fp64).

    Raises:
        ValueError, TypeError: if shapes, dtypes, devices or the backend are invalid.
        RuntimeError: if ``backend="triton"`` cannot run here.

    Examples:
        >>> import torch
        >>> queries, documents = torch.randn(2, 4, 16), torch.randn(3, 10, 16)
        >>> colbert_scores(queries, documents).shape
        torch.Size([2, 3])
    """
    queries, query_mask = _vectors_and_mask("queries", queries_embeddings, queries_mask, dims=3)
    documents, document_mask = _vectors_and_mask(
        "documents",
        documents_embeddings,
        documents_mask,
        dims=3,
    )
    return maxsim(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        pairing="all",
        mask_mode="zero",  # masked pairs count with similarity 0, as in PyLate
        impl=_impl_of_backend(backend),
    )


def colbert_scores_pairwise(
    queries_embeddings: object,
    documents_embeddings: object,
    backend: str | None = None,
) -> Tensor:
    """Compute MaxSim ``[B]`` of query ``i`` with document ``i``, without masks.

    It replaces ``pylate.scores.colbert_scores_pairwise``. Zero rows, such as padding, count with
    similarity 0, and an empty document scores 0.

    Args:
        queries_embeddings: the token vectors of the queries, ``[B, Lq, D]`` or a list of unpadded
            tensors ``[Lq_i, D]``.
        documents_embeddings: the token vectors of the documents, ``[B, Ld, D]`` or a list of
            unpadded tensors ``[Ld_i, D]``.
        backend: the implementation, an ``impl`` of :func:`tilefold.ops.maxsim`; ``"torch"`` stands
            for ``"reference"``, and None for ``"auto"``.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`colbert_scores`.

    Examples:
        >>> import torch
        >>> colbert_scores_pairwise(torch.randn(2, 4, 16), torch.randn(2, 10, 16)).shape
        torch.Size([2])
    """
    queries, query_offsets = _packed_or_padded("queries", queries_embeddings)
    documents, document_offsets = _packed_or_padded("documents", documents_embeddings)
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

    It replaces ``pylate.scores.colbert_kd_scores``. Pass it as ``score_metric=`` to
    ``losses.Distillation``.

    Args:
        queries_embeddings: the token vectors of the queries, ``[B, Lq, D]``.
        documents_embeddings: the token vectors of N documents for each query, ``[B, N, Ld, D]``.
        queries_mask: which query tokens count, ``[B, Lq]``: bools or integers; entries of a
            floating mask multiply the similarities.
        documents_mask: which document tokens count, ``[B, N, Ld]``.
        backend: the implementation, an ``impl`` of :func:`tilefold.ops.maxsim`; ``"torch"`` stands
            for ``"reference"``, and None for ``"auto"``.

    Raises:
        ValueError, TypeError, RuntimeError: see :func:`colbert_scores`.

    Examples:
        >>> import torch
        >>> queries, documents = torch.randn(2, 4, 16), torch.randn(2, 5, 10, 16)
        >>> colbert_kd_scores(queries, documents).shape  # 5 documents for each query
        torch.Size([2, 5])
    """
    queries, query_mask = _vectors_and_mask("queries", queries_embeddings, queries_mask, dims=3)
    documents, document_mask = _vectors_and_mask(
        "documents",
        documents_embeddings,
        documents_mask,
        dims=4,
    )
    return maxsim(
        queries,
        documents,
        query_mask=query_mask,
        document_mask=document_mask,
        pairing="grouped",
        mask_mode="zero",  # masked pairs count with similarity 0, as in PyLate
        impl=_impl_of_backend(backend),
    )


class ColBERTScores:
    """MaxSim scores of every query with every document of all groups.

    It replaces ``pylate.scores.ColBERTScores``. Pass an instance as ``score_metric=`` to
    ``losses.Contrastive`` or ``losses.CachedContrastive``.
    """

    def __call__(
        self,
        queries_embeddings: object,
        documents_embeddings: object,
        queries_mask: object = None,
        documents_mask: object = None,
        backend: str | None = None,
    ) -> Tensor:
        """Compute the scores of every query with every document.

        Args:
            queries_embeddings: the token vectors of the queries, ``[Nq, Lq, D]``.
            documents_embeddings: the token vectors of B groups of N documents, ``[B, N, Ld, D]``.
            queries_mask: which query tokens count, ``[Nq, Lq]``: bools or integers; entries of a
                floating mask multiply the similarities.
            documents_mask: which document tokens count, ``[B, N, Ld]``.
            backend: the implementation, an ``impl`` of :func:`tilefold.ops.maxsim`; ``"torch"``
                stands
            for ``"reference"``, and None for ``"auto"``.

        Returns:
            The scores ``[Nq, B * N]``. Column ``j * N + n`` is document ``n`` of group ``j``.
        """
        grouped_documents = as_tokens("documents_embeddings", documents_embeddings, dims=4)
        documents = grouped_documents.flatten(0, 1)  # [B * N, Ld, D]
        flat_mask = None
        if documents_mask is not None:
            flat_mask = torch.as_tensor(documents_mask).flatten(0, 1)
        return colbert_scores(queries_embeddings, documents, queries_mask, flat_mask, backend)


_SCORES = ("pylate.scores", "pylate.scores.colbert")
_ALL_SCORES = (*_SCORES, "pylate.scores.similarity_functions")
_MODULES_BY_FUNCTION = {
    "colbert_scores": [*_ALL_SCORES, "pylate.rank.rank"],
    "colbert_scores_pairwise": [*_ALL_SCORES, "pylate.evaluation.colbert_triplet"],
    "colbert_kd_scores": [*_SCORES, "pylate.evaluation.colbert_distillation"],
    "ColBERTScores.__call__": ["pylate.scores.colbert"],
}
_PATCHES = Acceleration("pylate", "pylate>=1.6", _MODULES_BY_FUNCTION)
restore = _PATCHES.restore
is_accelerated = _PATCHES.is_accelerated


def accelerate(*, impl: str = "auto") -> Acceleration:
    """Replace PyLate's scoring functions by those of this module.

    ``rank.rerank``, the triplet and distillation evaluators, and the losses ``Contrastive`` and
    ``CachedContrastive`` without a ``score_metric`` then use them. Functions that were imported
    earlier are not replaced. ``losses.Distillation`` imports its default early, so pass it
    ``score_metric=colbert_kd_scores``.

    Args:
        impl: the implementation for calls without ``backend=``, see :func:`tilefold.ops.maxsim`.

    Returns:
        A handle (:class:`Acceleration`); as a context manager, it undoes the replacement on exit.
        Nothing is replaced with ``TILEFOLD_DISABLE=1`` in the environment.

    Raises:
        ValueError: if ``impl`` is unknown.
        ImportError: if PyLate is not installed.
        RuntimeError: if this release of PyLate lacks one of the functions.
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
        function: a function whose last parameter is ``backend``. Callers may pass this argument by
            position or by name, or leave it out.
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
    """Return the implementation of :func:`maxsim` for the argument ``backend`` of a score function.

    Args:
        backend: None, PyLate's ``"torch"``, or the name of an implementation.

    Raises:
        ValueError: if the backend is unknown.
    """
    if backend is None:
        return "auto"
    name = "reference" if backend == "torch" else backend
    if name not in IMPLS:
        listed = ", ".join(repr(impl) for impl in (*IMPLS, "torch"))
        raise ValueError(
            f"backend must be None or one of {listed}, got {backend!r}; PyLate's other backends "
            "are not supported.",
        )
    return name


def _vectors_and_mask(
    name: str,
    embeddings: object,
    mask: object,
    dims: int,
) -> tuple[Tensor, Tensor | None]:
    """Convert embeddings and their mask to tensors, and multiply embeddings by a floating mask.

    :func:`maxsim` accepts masks of bools and integers only. PyLate multiplies the similarities of a
    token by its entry of the mask, which equals multiplying the embedding of the token by it.

    Args:
        name: ``"queries"`` or ``"documents"``, for error messages.
        embeddings: a tensor, an array or a list, of shape ``[..., L, D]``.
        mask: the mask ``[..., L]`` of bools, integers or floats; None keeps all tokens.
        dims: the number of dimensions that the embeddings must have.

    Returns:
        The embeddings ``[..., L, D]``, and the mask ``[..., L]``. The mask is None if there is
        none, or if it was applied to the embeddings.

    Raises:
        ValueError: if the embeddings or the mask have another shape.
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


def _packed_or_padded(name: str, embeddings: object) -> tuple[Tensor, Tensor | None]:
    """Pack a list of embeddings of different lengths, and convert padded embeddings to a tensor.

    Args:
        name: ``"queries"`` or ``"documents"``, for error messages.
        embeddings: a padded tensor or array ``[B, L, D]``, or a list of B tensors ``[L_i, D]``.

    Returns:
        The packed vectors ``[T, D]`` of a list with their offsets ``[B + 1]``; a padded tensor
        ``[B, L, D]`` with None.

    Raises:
        ValueError: if a list is empty, or a shape is wrong.
    """
    argument = f"{name}_embeddings"
    if not isinstance(embeddings, (list, tuple)):
        return as_tokens(argument, embeddings, dims=3), None
    if not embeddings:
        raise ValueError(
            f"{argument} must hold at least one sequence, got an empty list; skip the call.",
        )
    return pack(token_vectors(argument, embeddings))
