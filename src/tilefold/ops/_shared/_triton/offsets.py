"""Offsets and indices that come from outside, in int32 or int64, as kernels compute with them: in int32."""

import triton
import triton.language as tl


@triton.jit
def narrowed(value):
    """``value``, int32 or int64, as int32. What int32 does not hold becomes -1, which no check of offsets or indices
    lets pass: cut to its lower half it could be one that fits."""
    if value.dtype == tl.int64:
        value = tl.where((value >= 0) & (value <= 2147483647), value, -1).to(tl.int32)
    return value
