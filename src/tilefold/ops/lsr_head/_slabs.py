"""Torch's part of the gradient of sum pooling: products of vocabulary slabs, and the unit of fp16.

The gradients of logits in fp16 are divided by a unit, a power of two, so that the largest fits.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bounds of the unit. Numbers that are multiplied or divided by them stay within fp32.
MIN_POWER = 2.0**-100
MAX_POWER = 2.0**100
HEADROOM = 2.0**14  # the largest number becomes less than twice this, below fp16's 65504
EXPONENT_BITS = 0x7F800000  # of fp32


def unit_of_dlogits(
    dscores: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    mean: bool,
    length: int,
    scale: float,
) -> Tensor:
    """Return the power of two by which gradients of logits are divided, so that they fit in fp16.

    No activation has a slope above 1. So a gradient of a logit is at most ``scale`` times the
    largest gradient of a score (for means, divided by the sequence's length). Divided by the unit,
    this bound is between ``HEADROOM`` and twice that, which fp16 can represent.

    Args:
        dscores: ``[B, V]`` gradient of the scores. Values that are not finite are ignored.
        attention_mask: ``[B, S]``, nonzero = valid, or ``None``.
        cu_seqlens: ``[B + 1]`` offsets of packed input, or ``None``.
        mean: whether scores are means, not sums, over the tokens.
        length: S.
        scale: factor of the gradients.

    Returns:
        The unit as a fp32 scalar on the device.
    """
    finite_dscores = dscores.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    largest = finite_dscores.abs_().amax(dim=1, keepdim=True)  # [B, 1]
    if mean and cu_seqlens is not None:
        largest /= cu_seqlens.diff().clamp(min=1)[:, None]
    elif mean and attention_mask is not None:
        largest /= (attention_mask != 0).sum(dim=1, keepdim=True).clamp(min=1)
    elif mean:
        largest /= max(length, 1)
    bits = largest.amax().mul_(abs(scale)).view(torch.int32)
    # A fp32 number with only its exponent bits is the largest power of two that is not above it.
    power = (bits & EXPONENT_BITS).view(torch.float32)
    return power.clamp_(MIN_POWER, MAX_POWER).div_(HEADROOM)


def add_dhidden(slab: slice, dhidden: Tensor | None, dlogits: Tensor, weight: Tensor) -> Tensor:
    """Add one vocabulary slab's part of the gradient of the token states, in fp32.

    Args:
        slab: columns of the vocabulary.
        dhidden: ``[T, D]`` sum over the slabs before, or ``None`` for the first slab.
        dlogits: ``[T, C]`` gradient of the slab's logits; the last slab uses fewer columns.
        weight: ``[V, D]``.
    """
    n_columns = slab.stop - slab.start
    product = product_in_fp32(dlogits[:, :n_columns], weight[slab])
    return product if dhidden is None else dhidden.add_(product)


def write_slab(slab: slice, result: Tensor, gradient: Tensor, unit: Tensor | None) -> Tensor:
    """Write one vocabulary slab of the gradient of the weight or the bias, rescaled by ``unit``."""
    n_columns = slab.stop - slab.start
    result[slab] = rescale(gradient[:n_columns], unit)
    return result


def rescale(gradient: Tensor, unit: Tensor | None) -> Tensor:
    """Multiply a gradient by the unit that it was divided by, in place (``None`` is 1)."""
    return gradient if unit is None else gradient.mul_(unit)


def product_in_fp32(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` with a result in fp32."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
