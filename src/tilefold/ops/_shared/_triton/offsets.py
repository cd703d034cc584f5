"""Device functions: offsets and indices in int32, and masks of tiles under a condition."""

from __future__ import annotations

import triton
import triton.language as tl

from tilefold.ops._shared.impl import triton_interpreted

_INTERPRETED = tl.constexpr(triton_interpreted())


@triton.jit
def mask_if(mask, condition):
    """Return ``mask`` if a condition is true, else a mask of zeros.

    The interpreter broadcasts a condition as integers, which its loads and stores refuse as a mask
    from Triton 3.9 on.

    Args:
        mask: booleans of a tile.
        condition: one boolean.
    """
    if _INTERPRETED:
        return (mask & condition) != 0
    else:
        return mask & condition


@triton.jit
def narrowed(value):
    """Convert offsets or indices to int32.

    A value that is negative, or that int32 cannot represent, becomes -1, which every check of
    offsets and indices refuses. Its lower 32 bits could be a valid index.

    Args:
        value: int32 or int64.
    """
    if value.dtype == tl.int64:
        value = tl.where((value >= 0) & (value <= 2147483647), value, -1).to(tl.int32)
    return value
