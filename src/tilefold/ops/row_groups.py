"""Linear layers and norms in which the bits of a row do not depend on the other rows."""

from tilefold.ops._shared.row_groups import (
    LEAST_GPU_ROWS,
    LinearLayers,
    apply_rowwise,
    filled_row_count,
    grouped_linear,
    grouping_rows,
    normalize_rows,
    padded_row_count,
)

__all__ = [
    "LEAST_GPU_ROWS",
    "LinearLayers",
    "apply_rowwise",
    "filled_row_count",
    "grouped_linear",
    "grouping_rows",
    "normalize_rows",
    "padded_row_count",
]
