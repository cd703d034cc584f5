"""The activations of the modules: those of the operators, and the composition that EPIC adds."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus

__all__ = ["ACTIVATIONS", "STOCK_ACTIVATIONS", "activate", "fused_activation"]

# name -> (what the operators apply, how many log1p follow it)
_PARTS = {
    "log1p_relu": ("log1p_relu", 0),
    "log1p_log1p_relu": ("log1p_log1p_relu", 0),
    "relu": ("relu", 0),
    "softplus": ("softplus", 0),
    "log1p_softplus": ("softplus", 1),
    "none": ("none", 0),
}
ACTIVATIONS = tuple(_PARTS)
STOCK_ACTIVATIONS = {"relu": "log1p_relu", "log1p_relu": "log1p_log1p_relu"}  # SpladePooling's name -> the operator's
_LINEAR_FROM = 40.0  # beyond it softplus(x) and x differ by less than fp64 can tell


def fused_activation(name: str) -> tuple[str, int]:
    """The operator's activation, and the number of ``log1p`` that are left to apply to its scores."""
    return _PARTS[name]


def activate(x: Tensor, name: str) -> Tensor:
    """Apply an activation elementwise; all are monotone."""
    if "softplus" in name:
        x = softplus(x, threshold=_LINEAR_FROM)
    elif name != "none":
        x = x.relu()
    for _ in range(name.count("log1p")):
        x = x.log1p()
    return x
