"""The operators' checks of tensors and shapes, for functions that pass arguments to them."""

from tilefold.ops._shared.checks import (
    FLOAT_DTYPES,
    check_dtype,
    check_shape,
    check_tensor,
    dtype_name,
)

__all__ = ["FLOAT_DTYPES", "check_dtype", "check_shape", "check_tensor", "dtype_name"]
