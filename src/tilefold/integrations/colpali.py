"""colpali-engine's late-interaction scores without the similarities ``[Bq, Bd, Lq, Ld]``.

colpali-engine has no masks: padding is a zero row, whose similarity of 0 counts in the maximum and
exceeds negative similarities. These functions compute the same. If several rows have the largest
similarity, for example zero rows, the first one gets the gradient, which colpali-engine divides
among them. The models drop the gradients of padding.

Only :func:`accelerate`, which replaces the functions of colpali-engine, imports it.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from tilefold.integrations._patches import Acceleration
from tilefold.ops import maxsim
from tilefold.ops.checks import check_shape, check_tensor
from tilefold.ops.implementations import check_impl

__all__ = ["Acceleration", "accelerate", "is_accelerated", "maxsim_inbatch", "maxsim_kd", "restore"]


def maxsim_inbatch(
    query: Tensor,
    doc: Tensor,
    *,
    tau: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compute MaxSim of every query with every document (ColPali, arXiv 2407.01449).

    It replaces ``colpali_engine.utils.maxsim.maxsim_inbatch``.
    ``scores[i, j] = sum_s max_t query[i, s] . doc[j, t]`` over all rows, including zero rows.

    Args:
        query: the token vectors of the queries, ``[Bq, Lq, D]``, padded with zeros; fp16, bf16,
            fp32 or fp64.
        doc: the token vectors of the documents, ``[Bd, Ld, D]``, on the same device. Their dtype is
            that of the queries, or any floating dtype under autocast.
        tau: the temperature of the smooth maximum ``tau * logsumexp(. / tau)``, as in the losses
            with ``use_smooth_max=True``; None for the maximum.
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Returns:
        Differentiable scores ``[Bq, Bd]`` in fp32 (fp64 for fp64).

    Raises:
        TypeError, ValueError: if arguments are invalid.
        RuntimeError: if ``impl="triton"`` cannot run here.

    Examples:
        >>> import torch
        >>> maxsim_inbatch(torch.randn(2, 4, 16), torch.randn(3, 10, 16)).shape
        torch.Size([2, 3])
    """
    check_shape("query", check_tensor("query", query), "B L D")
    check_shape("doc", check_tensor("doc", doc), "B L D")
    return maxsim(query, doc, temperature=tau, impl=impl)


def maxsim_kd(
    query: Tensor,
    doc: Tensor,
    *,
    tau: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Compute MaxSim ``[B, N]`` of each query with its N documents.

    It replaces ``colpali_engine.utils.maxsim.maxsim_kd``.

    Args:
        query: the token vectors of the queries, ``[B, Lq, D]``, padded with zeros.
        doc: the token vectors of N documents for each query, ``[B, N, Ld, D]``, of the same dtype
            and device.
        tau: the temperature of the smooth maximum ``tau * logsumexp(. / tau)``; None for the
            maximum.
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Raises:
        TypeError, ValueError, RuntimeError: see :func:`maxsim_inbatch`.

    Examples:
        >>> import torch
        >>> maxsim_kd(torch.randn(2, 4, 16), torch.randn(2, 5, 10, 16)).shape
        torch.Size([2, 5])
    """
    check_shape("query", check_tensor("query", query), "B L D")
    check_shape("doc", check_tensor("doc", doc), "B N L D")
    return maxsim(query, doc, pairing="grouped", temperature=tau, impl=impl)


_LOSSES = "colpali_engine.loss.late_interaction_losses"
_MODULES_BY_FUNCTION = {
    "maxsim_inbatch": [
        "colpali_engine.utils.maxsim",
        "colpali_engine.utils.processing_utils",
        _LOSSES,
    ],
    "maxsim_kd": ["colpali_engine.utils.maxsim", _LOSSES],
    "ColbertModule._inbatch_scores": [_LOSSES],
}
_PATCHES = Acceleration("colpali-engine", "colpali-engine>=0.3.18", _MODULES_BY_FUNCTION)
restore = _PATCHES.restore
is_accelerated = _PATCHES.is_accelerated


def accelerate(*, impl: str = "auto") -> Acceleration:
    """Make colpali-engine's losses and ``score_multi_vector`` use the functions of this module.

    Existing losses and new ones then score without materialising the similarity matrix. Replaced
    are in-batch scores, also with smooth maxima (``use_smooth_max=True``), and scores of explicit
    negatives with plain maxima. Two computations remain as they are: smooth maxima of explicit
    negatives, ``[B, N, Lq, Ld]``, and the similarities of each query with its positive document,
    ``[B, Lq, Ld]``. ``COLPALI_SCORES_BACKEND`` is not read.

    Args:
        impl: the implementation of :func:`tilefold.ops.maxsim`.

    Returns:
        A handle (:class:`Acceleration`); as a context manager, it undoes the replacement on exit.
        Nothing is replaced with ``TILEFOLD_DISABLE=1`` in the environment.

    Raises:
        ValueError: if ``impl`` is unknown.
        ImportError: if colpali-engine is not installed.
        RuntimeError: if this release of colpali-engine lacks one of the functions.
    """

    def inbatch_scores(self: Any, query_embeddings: Tensor, doc_embeddings: Tensor) -> Tensor:
        """Compute the in-batch scores of a loss; replaces ``ColbertModule._inbatch_scores``."""
        tau = self.tau if self.use_smooth_max else None
        scores = maxsim_inbatch(query_embeddings, doc_embeddings, tau=tau, impl=impl)
        if self.normalize_scores:
            # colpali-engine treats rows whose first value is 0 as padding.
            n_query_tokens = (query_embeddings[:, :, 0] != 0).sum(dim=1)
            scores = self._apply_normalization(scores, n_query_tokens)
        return scores

    check_impl(impl)
    return _PATCHES.apply(
        {
            "maxsim_inbatch": functools.partial(maxsim_inbatch, impl=impl),
            "maxsim_kd": functools.partial(maxsim_kd, impl=impl),
            "ColbertModule._inbatch_scores": inbatch_scores,
        },
    )
