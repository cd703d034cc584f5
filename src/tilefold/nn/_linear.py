"""The parameters of a linear layer, owned by a module that computes something else with them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LinearParameters(nn.Module):
    """``weight`` ``[rows, D]`` and ``bias`` ``[rows]`` or ``None``, drawn as ``nn.Linear`` draws them."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, hidden_size: int, rows: int, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.weight.size(1)

    def reset_parameters(self) -> None:
        """Draw fresh parameters as ``nn.Linear`` does: uniform within ``1 / sqrt(D)``."""
        bound = 1 / math.sqrt(max(self.hidden_size, 1))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
