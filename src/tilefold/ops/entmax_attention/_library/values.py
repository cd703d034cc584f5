"""Checks of values, which read a tensor on the host: only where it lies there, or where the host reads it anyway."""

from __future__ import annotations

import itertools

from torch import Tensor


def check_values(
    alpha: Tensor | None, cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor, k: Tensor, longest_k: int
) -> None:
    """Check what can be read without a synchronisation.

    Raises:
        ValueError: for alphas outside [1, 2], or offsets that do not describe the rows.
    """
    if alpha is not None and alpha.device.type == "cpu" and not bool(((alpha >= 1) & (alpha <= 2)).all()):
        bad = alpha[~((alpha >= 1) & (alpha <= 2))][0].item()
        raise ValueError(f"alpha must lie in [1, 2], got {bad}; parametrise it, for instance as 1 + sigmoid(theta).")
    if cu_q is not None and cu_q.device.type == "cpu":
        check_offsets(cu_q, cu_k, q, k, longest_k)


def check_offsets(cu_q: Tensor | None, cu_k: Tensor | None, q: Tensor, k: Tensor, longest_k: int) -> None:
    """Check packed offsets on the host, with a synchronisation if they lie on a GPU.

    Raises:
        ValueError: for offsets that do not describe the rows, or keys that are longer than ``longest_k``.
    """
    for name, offsets, rows in (("cu_seqlens_q", cu_q, q.size(0)), ("cu_seqlens_k", cu_k, k.size(0))):
        if offsets is None:
            continue
        values = offsets.tolist()
        lengths = [after - before for before, after in itertools.pairwise(values)]
        if values[0] != 0 or values[-1] != rows or min(lengths, default=0) < 0:
            raise ValueError(
                f"{name} must start with 0, never fall and end at the number of rows {rows}, got {values}; build it as "
                "the cumulative sum of the sequence lengths with a 0 in front."
            )
        longest = max(lengths, default=0)
        if name == "cu_seqlens_k" and longest > longest_k:
            raise ValueError(f"max_seqlen_k must be at least {longest}, the longest sequence of keys, got {longest_k}.")
