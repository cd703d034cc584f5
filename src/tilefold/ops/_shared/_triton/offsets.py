"""Offsets and indices from outside, int32 or int64, as kernels compute with them, in int32; masks
of a whole tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared.impl import triton_interpreted

_INTERPRETED = tl.constexpr(triton_interpreted())


@triton.jit
def mask_if(mask, condition):
    """``mask`` where the one ``condition`` holds, else nothing.

    The interpreter spreads a condition as integers, which its loads and stores refuse as a mask
    from Triton 3.9 on.
    """
    if _INTERPRETED:
        return (mask & condition) != 0
    else:
        return mask & condition


@triton.jit
def narrowed(value):
    """``value``, int32 or int64, as int32. What int32 does not hold becomes -1, which no check of
    offsets or indices lets pass: cut to its lower half it could be one that fits.
    """
    if value.dtype == tl.int64:
        value = tl.where((value >= 0) & (value <= 2147483647), value, -1).to(tl.int32)
    return value
