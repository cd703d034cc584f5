"""Linear layers and norms in which the bits of a row do not depend on the other rows."""

from tilefold.ops._shared.row_groups import (
    LEAST_GPU_ROWS,
    apply_rowwise,
    few_rows_sizes,
    grouped_linear,
    grouping_rows,
    normalize_rows,
)

__all__ = [
    "LEAST_GPU_ROWS",
    "apply_rowwise",
    "few_rows_sizes",
    "grouped_linear",
    "grouping_rows",
    "normalize_rows",
]
