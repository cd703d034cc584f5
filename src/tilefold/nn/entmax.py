"""Learned alphas for alpha-entmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class EntmaxAlpha(nn.Module):
    """One learned alpha in (1, 2) per head, ``1 + sigmoid(theta)``, so that no optimiser step leaves that range.

    Args:
        heads: number of heads.
        initial: alpha at the start, strictly between 1 and 2.

    Raises:
        ValueError: for no heads, or an ``initial`` outside (1, 2).
    """

    def __init__(self, heads: int, initial: float = 1.5) -> None:
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads must be at least 1, got {heads}.")
        if not 1 < initial < 2:
            raise ValueError(f"initial must lie strictly between 1 and 2, got {initial}; the ends cannot be learned.")
        self.theta = nn.Parameter(torch.full((heads,), math.log((initial - 1) / (2 - initial))))

    def forward(self) -> Tensor:
        """The alphas, ``[heads]`` fp32."""
        return 1 + torch.sigmoid(self.theta.float())

    def extra_repr(self) -> str:
        return f"heads={self.theta.numel()}"
