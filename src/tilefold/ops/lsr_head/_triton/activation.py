"""The device functions on scores, under the names that this operator's kernels import."""

from tilefold.ops._shared._triton.activation import activate, log1p, nan_max, slope_from_logit, slope_from_score

__all__ = ["activate", "log1p", "nan_max", "slope_from_logit", "slope_from_score"]
