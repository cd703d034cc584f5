"""Checks of tensors and shapes in the words of the operators, for functions that hand their
arguments on to them.
"""

from tilefold.ops._shared.checks import FLOAT_DTYPES, check_shape, check_tensor, dtype_name

__all__ = ["FLOAT_DTYPES", "check_shape", "check_tensor", "dtype_name"]
