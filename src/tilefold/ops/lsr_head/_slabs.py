"""Torch's share of the gradient of sums: products of a slab of the vocabulary, and the unit of
fp16.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A row of zeros divides by nothing smaller. Times these and their inverses, numbers stay within
# fp32.
MIN_POWER, MAX_POWER = 2.0**-100, 2.0**100
HEADROOM = 2.0**14  # the largest number becomes less than twice that, below fp16's 65504
EXPONENT = 0x7F800000  # the bits of fp32 that say which power of two


def unit_of_dlogits(
    dscores: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    mean: bool,
    length: int,
    scale: float,
) -> Tensor:
    """Power of two by which fp16 divides the gradients of all logits, none steeper than 1; fp32, on
    the device.
    """
    largest = (
        dscores.nan_to_num(0.0, 0.0, 0.0).abs_().amax(1, keepdim=True)
    )  # [B, 1], of what is finite
    if mean and cu_seqlens is not None:
        largest /= cu_seqlens.diff().clamp(min=1)[:, None]
    elif mean and attention_mask is not None:
        largest /= (attention_mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    elif mean:
        largest /= max(length, 1)
    power = (largest.amax().mul_(abs(scale)).view(torch.int32) & EXPONENT).view(torch.float32)
    return power.clamp_(MIN_POWER, MAX_POWER).div_(HEADROOM)


def add_rows(slab: slice, drows: Tensor | None, dlogits: Tensor, weight: Tensor) -> Tensor:
    """The gradient of rows by a slab of the vocabulary, added to that of those before; fp32."""
    found = wide_product(dlogits[:, : slab.stop - slab.start], weight[slab])
    return found if drows is None else drows.add_(found)


def fill(slab: slice, result: Tensor, found: Tensor, unit: Tensor | None) -> Tensor:
    """The gradient of the weight or the bias, a slab of which was found, in this unit."""
    result[slab] = times(found[: slab.stop - slab.start], unit)
    return result


def times(found: Tensor, unit: Tensor | None) -> Tensor:
    """Gradients that were found in this unit."""
    return found if unit is None else found.mul_(unit)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` handed out in fp32."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
