"""Masks that a condition for a whole tile has a say in."""

import triton
import triton.language as tl

from tilefold.ops._shared.impl import triton_interpreted

_INTERPRETED = tl.constexpr(triton_interpreted())


@triton.jit
def mask_if(mask, condition):
    """``mask`` where the one ``condition`` holds, else nothing.

    The interpreter spreads a condition as integers, which its loads and stores refuse as a mask from Triton 3.9 on.
    """
    if _INTERPRETED:
        return (mask & condition) != 0
    else:
        return mask & condition
