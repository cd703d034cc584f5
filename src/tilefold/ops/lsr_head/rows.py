"""The head for encoding without a synchronisation: a fixed number of places per row, and the count of kept scores."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilefold.ops._shared.fallback import KernelUnavailableError, attempt, give_up, given_up
from tilefold.ops._shared.impl import chosen_impl
from tilefold.ops.lsr_head._quantized import QuantizedWeight
from tilefold.ops.lsr_head._sparse import largest
from tilefold.ops.lsr_head.api import lsr_head

__all__ = ["CapacityRows", "lsr_head_rows"]

KERNEL = "lsr_head's compaction of rows"
BLOCK_SCORES = 1 << 25  # scores of a block of the vocabulary that are held in dense form, for the whole batch
_ALIGNMENT = 1024  # columns, so that blocks of the weight begin at multiples of its tiles


class CapacityRows(NamedTuple):
    """Sparse rows of which the host need not know the sizes."""

    counts: Tensor  # int32 [B], entries that each row has; more than the capacity if some did not fit
    kept: Tensor  # int32 [B], entries that are stored: at most the capacity, or top_k
    columns: Tensor  # int32 [B, capacity] ([B, top_k]), rising; undefined behind kept[b]
    values: Tensor  # as columns
    vocab_size: int


def lsr_head_rows(
    hidden: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None = None,
    *,
    capacity: int,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    pooling: str = "max",
    activation: str = "log1p_relu",
    out_dtype: torch.dtype | None = None,
    top_k: int | None = None,
    min_weight: float = 0.0,
    impl: str = "auto",
) -> CapacityRows | None:
    """:func:`lsr_head_sparse` whose rows have room for ``capacity`` entries each, made without waiting for the GPU.

    A row with more entries is incomplete, which its count says; who reads it must encode it again with more room.
    ``top_k`` chooses among the entries that fit, so it too holds only for rows whose count is at most ``capacity``.

    None where Triton's kernels do not run: :func:`lsr_head_sparse` serves there, which explains the other arguments.
    """
    if capacity < 1 or math.isnan(min_weight) or (top_k is not None and top_k < 1):
        raise ValueError(
            f"capacity and top_k must be at least 1 and min_weight a number, got capacity={capacity}, top_k={top_k}, "
            f"min_weight={min_weight}."
        )
    if chosen_impl("lsr_head", "hidden", hidden, impl) != "triton" or given_up(KERNEL, hidden.device):
        return None
    from tilefold.ops.lsr_head._triton.compact import append_rows  # triton may be missing

    batch = hidden.size(0) if cu_seqlens is None else cu_seqlens.numel() - 1
    vocab, device = weight.size(0), hidden.device
    block = max(_ALIGNMENT, BLOCK_SCORES // max(1, batch) // _ALIGNMENT * _ALIGNMENT)
    counts = torch.zeros(batch, dtype=torch.int32, device=device)
    columns = torch.empty(batch, capacity, dtype=torch.int32, device=device)
    values = torch.empty(batch, capacity, dtype=torch.float32, device=device)
    options: dict[str, Any] = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "pooling": pooling}
    options |= {"activation": activation, "out_dtype": torch.float32, "impl": impl}
    with torch.no_grad():
        for v0 in range(0, vocab, block):
            whole, part = v0 == 0 and block >= vocab, slice(v0, v0 + block)
            some = bias if whole or bias is None else bias[part]
            scores = lsr_head(hidden, weight if whole else weight[part], some, **options)
            failed = attempt(append_rows, scores, v0, min_weight, counts, columns, values)
            if isinstance(failed, KernelUnavailableError):
                give_up(KERNEL, device, str(failed), "lsr_head_sparse runs instead, which waits for the GPU.")
                return None
        kept = counts.clamp(max=capacity)
        if top_k is not None and top_k < capacity:  # NaN comes before all, and what lies behind the last entry last
            free = torch.arange(capacity, device=device) >= kept[:, None]
            values, columns = largest(values.masked_fill(free, -math.inf), columns, top_k)
            kept = kept.clamp(max=top_k)
    dtype = hidden.dtype if out_dtype is None else out_dtype
    return CapacityRows(counts, kept, columns, values.to(dtype), vocab)
