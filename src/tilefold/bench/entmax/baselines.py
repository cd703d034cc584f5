"""What entmax is compared with: alpha = 1.5 in torch, by a sort, and softmax, which is another function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.bench.entmax.inputs import EntmaxBenchInputs
from tilefold.bench.runnables import Runnable
from tilefold.bench.spec import Implementation


class _SortedEntmax15(torch.autograd.Function):
    """The exact threshold from sorted scores (Peters et al., arXiv 1905.05702), in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        half = x.float() / 2
        half = half - half.amax(dim=-1, keepdim=True)
        sorted_half = half.sort(dim=-1, descending=True).values
        size = torch.arange(1, x.size(-1) + 1, device=x.device)
        mean = sorted_half.cumsum(dim=-1) / size
        spread = (sorted_half**2).cumsum(dim=-1) - size * mean**2
        tau = mean - ((1 - spread) / size).clamp_min(0).sqrt()
        support = (tau <= sorted_half).sum(dim=-1, keepdim=True)
        root = (half - tau.gather(-1, support - 1)).clamp_min(0)
        ctx.save_for_backward(root)
        return (root * root).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dp: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        weighted = root * dp.float()
        dx: Tensor = weighted - root * (weighted.sum(-1, keepdim=True) / root.sum(-1, keepdim=True))
        return dx.to(dp.dtype)


def _sorted(inputs: EntmaxBenchInputs) -> Runnable:
    return inputs.bind(_SortedEntmax15.apply, "torch")


def _softmax(inputs: EntmaxBenchInputs) -> Runnable:
    return inputs.bind(lambda x: torch.softmax(x, dim=-1), "torch")


BASELINES = (Implementation("sort", _sorted, "baseline"), Implementation("softmax", _softmax, "bare"))
