"""Checks of values, which read a tensor on the host: only where it lies there, or where the host reads it anyway."""

from __future__ import annotations

import itertools

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
    sides = (("cu_seqlens_q", tensors.cu_seqlens_q, tensors.q), ("cu_seqlens_k", tensors.cu_seqlens_k, tensors.k))
    for name, offsets, of in sides:
        if offsets is None:
            continue
        values, rows = offsets.tolist(), of.size(0)
        lengths = [after - before for before, after in itertools.pairwise(values)]
        if values[0] != 0 or values[-1] != rows or min(lengths, default=0) < 0:
            raise ValueError(
                f"{name} must start with 0, never fall and end at the number of rows {rows}, got {values}; build it as "
                "the cumulative sum of the sequence lengths with a 0 in front."
            )
        longest = max(lengths, default=0)
        if name == "cu_seqlens_k" and longest > max_seqlen_k:
            raise ValueError(
                f"max_seqlen_k must be at least {longest}, the longest sequence of keys, got {max_seqlen_k}."
            )
