"""Linear layers in which the bits of a row do not depend on the other rows."""

from tilefold.ops._shared.row_groups import grouped_linear, grouping_rows

__all__ = ["grouped_linear", "grouping_rows"]
