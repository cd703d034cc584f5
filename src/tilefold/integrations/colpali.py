"""colpali-engine's late-interaction scores without the similarities ``[Bq, Bd, Lq, Ld]``.

colpali-engine has no masks: padding is a row of zeros, which takes part in the maximum with a
similarity of 0, larger than a negative one. These functions compute the same. Among equal
similarities, such as with rows of zeros, the first row takes the gradient that colpali-engine
splits; the models drop the gradients of padding.

The losses call the functions by name; only :func:`accelerate`, which replaces those names, imports
colpali-engine.
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
    ``scores[i, j] = sum_s max_t query[i, s] . doc[j, t]`` over all rows, rows of zeros included.

    Args:
        query: ``[Bq, Lq, D]``, padded with zeros; fp16, bf16, fp32 or fp64.
        doc: ``[Bd, Ld, D]``, of the same dtype and device (any floating dtype under autocast).
        tau: temperature of the smooth maximum ``tau * logsumexp(. / tau)``, as the losses take with
            ``use_smooth_max=True``; ``None`` for the maximum.
        impl: as in :func:`tilefold.ops.maxsim`.

    Returns:
        ``[Bq, Bd]`` fp32 (fp64 for fp64), differentiable.

    Raises:
        TypeError, ValueError: for arguments that do not fit.
        RuntimeError: if ``impl="triton"`` cannot run here.
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
        query: ``[B, Lq, D]``, padded with zeros.
        doc: ``[B, N, Ld, D]``, of the same dtype and device.
        tau: as in :func:`maxsim_inbatch`.
        impl: as in :func:`maxsim_inbatch`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`maxsim_inbatch`.
    """
    check_shape("query", check_tensor("query", query), "B L D")
    check_shape("doc", check_tensor("doc", doc), "B N L D")
    return maxsim(query, doc, pairing="grouped", temperature=tau, impl=impl)


_LOSSES = "colpali_engine.loss.late_interaction_losses"
_MODULES_BY_NAME = {
    "maxsim_inbatch": [
        "colpali_engine.utils.maxsim",
        "colpali_engine.utils.processing_utils",
        _LOSSES,
    ],
    "maxsim_kd": ["colpali_engine.utils.maxsim", _LOSSES],
    "ColbertModule._inbatch_scores": [_LOSSES],
}
_PATCHES = Acceleration("colpali-engine", "colpali-engine>=0.3.18", _MODULES_BY_NAME)
restore = _PATCHES.restore
is_accelerated = _PATCHES.is_accelerated


def accelerate(*, impl: str = "auto") -> Acceleration:
    """Make colpali-engine's losses and ``score_multi_vector`` use the functions of this module.

    Losses created before or after the call score without the similarities, in-batch smooth maxima
    (``use_smooth_max=True``) included. The smooth maxima of explicit negatives, ``[B, N, Lq, Ld]``,
    stay colpali-engine's own, and so do the similarities of each query with its positive, ``[B, Lq,
    Ld]``. ``COLPALI_SCORES_BACKEND`` is not read.

    Args:
        impl: as in :func:`tilefold.ops.maxsim`.

    Returns:
        A handle (:class:`Acceleration`); as a context manager, it undoes the replacement at its
        end. Nothing is replaced with ``TILEFOLD_DISABLE=1`` in the environment.

    Raises:
        ValueError: for an unknown ``impl``.
        ImportError: without colpali-engine.
        RuntimeError: if a release of colpali-engine lacks one of the functions.
    """

    def inbatch_scores(self: Any, query_embeddings: Tensor, doc_embeddings: Tensor) -> Tensor:
        """Compute in-batch scores of a loss, in place of ``ColbertModule._inbatch_scores``."""
        tau = self.tau if self.use_smooth_max else None
        scores = maxsim_inbatch(query_embeddings, doc_embeddings, tau=tau, impl=impl)
        if self.normalize_scores:
            # colpali-engine counts rows as tokens by their first number: padding is zeros.
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
