"""Powers of two that take gradients into the range of fp16, whose products then take them back, in fp32."""

from __future__ import annotations

import torch
from torch import Tensor

# A row of zeros divides by nothing smaller. Times these and their inverses, numbers stay within fp32.
MIN_POWER, MAX_POWER = 2.0**-100, 2.0**100
HEADROOM = 2.0**14  # the largest number becomes less than twice that, below fp16's 65504
EXPONENT = 0x7F800000  # the bits of fp32 that say which power of two


def largest_finite(grad: Tensor, dim: int) -> Tensor:
    """Largest magnitude along ``dim``, which stays, of the numbers that are finite."""
    return grad.nan_to_num(0.0, 0.0, 0.0).abs_().amax(dim, keepdim=True)


def unit_of(largest: Tensor) -> Tensor:
    """The power of two, in fp32, that fp32 numbers up to ``largest`` fit fp16 divided by: exactly, on the device."""
    power = (largest.view(torch.int32) & EXPONENT).view(torch.float32)
    return power.clamp_(MIN_POWER, MAX_POWER).div_(HEADROOM)
