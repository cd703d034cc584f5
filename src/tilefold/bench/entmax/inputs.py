"""Inputs of entmax's benchmark: rows of normal scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tilefold.bench.dtypes import DTYPES
from tilefold.bench.runnables import Runnable, bind
from tilefold.bench.spec import BenchCase

ALPHA = 1.5
_SHARPNESS = 2.0  # standard deviation of the scores


@dataclass(frozen=True)
class EntmaxBenchInputs:
    """Inputs of one case.

    Attributes:
        x: ``[R, N]`` scores, requires a gradient.
        dp: ``[R, N]``, the gradient that comes back.
    """

    x: Tensor
    dp: Tensor

    def bind(self, rows: Callable[[Tensor], Tensor], label: str) -> Runnable:
        """``rows(x)`` of these inputs."""
        return bind(rows, (self.x,), (self.x,), self.dp, label)


def make_inputs(case: BenchCase, device: torch.device, seed: int = 0) -> EntmaxBenchInputs:
    """Random inputs of ``case``."""
    shape, generator = (case.dims["R"], case.dims["N"]), torch.Generator(device=device).manual_seed(seed)
    x, dp = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    dtype = DTYPES[case.dtype]
    return EntmaxBenchInputs((_SHARPNESS * x).to(dtype).requires_grad_(), dp.to(dtype))
