"""Checks of values, which read a tensor on the host: only where it lies there, or where the host reads it anyway."""

from __future__ import annotations

import itertools

from tilefold.ops._shared.checks import check_cu_seqlens
from tilefold.ops.entmax_attention._problem import AttentionTensors


def check_values(tensors: AttentionTensors, max_seqlen_k: int) -> None:
    """Check what can be read without a synchronisation.

    Raises:
        ValueError: for alphas outside [1, 2], or offsets that do not describe the rows.
    """
    alpha, cu_seqlens_q = tensors.alpha, tensors.cu_seqlens_q
    if alpha is not None and alpha.device.type == "cpu" and not bool(((alpha >= 1) & (alpha <= 2)).all()):
        bad = alpha[~((alpha >= 1) & (alpha <= 2))][0].item()
        raise ValueError(f"alpha must lie in [1, 2], got {bad}; parametrise it, for instance as 1 + sigmoid(theta).")
    if cu_seqlens_q is not None and cu_seqlens_q.device.type == "cpu":
        check_offsets(tensors, max_seqlen_k)


def check_offsets(tensors: AttentionTensors, max_seqlen_k: int) -> None:
    """Check packed offsets on the host, with a synchronisation if they lie on a GPU.

    Raises:
        ValueError: for offsets that do not describe the rows, or keys that are longer than ``max_seqlen_k``.
    """
    cu_q, cu_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if cu_q is None or cu_k is None:
        return
    check_cu_seqlens("cu_seqlens_q", cu_q, tensors.q.size(0), "q")
    check_cu_seqlens("cu_seqlens_k", cu_k, tensors.k.size(0), "k")
    longest = max((after - before for before, after in itertools.pairwise(cu_k.tolist())), default=0)
    if longest > max_seqlen_k:
        raise ValueError(f"max_seqlen_k must be at least {longest}, the longest sequence of keys, got {max_seqlen_k}.")
