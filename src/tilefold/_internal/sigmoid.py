"""The logistic function, with a gradient that stays right where it saturates."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """Compute ``1 / (1 + exp(-x))`` with an accurate gradient for every ``x``.

    ``torch.sigmoid`` computes its gradient from its output ``y``, as ``y * (1 - y)``. Where ``y``
    rounds to 1 (above 16.6 in fp32 and 5.5 in bf16), that is exactly 0, and Adam, which divides by
    the size of a gradient, takes no step at all. For positive ``x`` this function takes the
    complement of ``sigmoid(-x)``, a small number that keeps its digits.

    Args:
        x: any shape, floating point.

    Returns:
        A tensor of the same shape and dtype.
    """
    # Each branch is used on one side of 0. On the other side its input is 0, which has no gradient.
    left_branch = torch.sigmoid(x.clamp(max=0))
    right_branch = 1 - torch.sigmoid(-x.clamp(min=0))
    return torch.where(x > 0, right_branch, left_branch)
