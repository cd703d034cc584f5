"""The activations of the LSR head, which commute with its maximum."""

from tilefold.ops._shared.activation import (
    ACTIVATIONS,
    activate,
    activate_in_place,
    slope_from_score,
    slope_in_place,
)

__all__ = ["ACTIVATIONS", "activate", "activate_in_place", "slope_from_score", "slope_in_place"]
