"""Linear layers and norms in which the bits of a row do not depend on the other rows."""

from tilefold.ops._shared.row_groups import (
    LinearLayers,
    filled_row_count,
    grouped_linear,
    grouping_rows,
    padded_row_count,
)
from tilefold.ops._shared.row_probes import LEAST_GPU_ROWS
from tilefold.ops._shared.row_products import align
from tilefold.ops._shared.rowwise import apply_rowwise, normalize_rows

__all__ = [
    "LEAST_GPU_ROWS",
    "LinearLayers",
    "align",
    "apply_rowwise",
    "filled_row_count",
    "grouped_linear",
    "grouping_rows",
    "normalize_rows",
    "padded_row_count",
]
