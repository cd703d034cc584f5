"""The activations of the LSR head, which commute with its maximum."""

from tilefold.ops._shared.activation import ACTIVATIONS, activate, slope_from_logit, slope_from_score

__all__ = ["ACTIVATIONS", "activate", "slope_from_logit", "slope_from_score"]
