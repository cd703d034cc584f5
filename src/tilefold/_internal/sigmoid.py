"""The logistic function with an accurate gradient, even for large inputs."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Compute ``1 / (1 + exp(-x))`` with an accurate gradient for every ``x``.

    ``torch.sigmoid`` computes its gradient from its output ``y``, as ``y * (1 - y)``. If ``y``
    rounds to 1 (for ``x`` above 16.6 in fp32 and 5.5 in bf16), the gradient is exactly 0, and even
    Adam, which divides by the size of the gradient, takes no step. For positive ``x`` this function
    computes ``1 - sigmoid(-x)``. Its gradient is computed from the small ``sigmoid(-x)``, whose
    digits are not rounded away.

    Args:
        x: floating-point tensor of any shape.

    Returns:
        A tensor of the same shape and dtype.
    """
    # Each branch is used for inputs on one side of 0. It clamps inputs on the other side to 0, so
    # that they get no gradient from this branch.
    left_branch = torch.sigmoid(x.clamp(max=0))
    right_branch = 1 - torch.sigmoid(-x.clamp(min=0))
    return torch.where(x > 0, right_branch, left_branch)
