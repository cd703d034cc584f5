"""The benchmark of ``tilefold.ops.entmax``: shapes, implementations, ground truth and least work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.bench import spec
from tilefold.ops.entmax import chosen_impl, entmax

ALPHA = 1.5
_SHARPNESS = 2.0  # standard deviation of the scores
_ROWS = 4  # held against the reference at either end


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> spec.Inputs:
    """Normal scores ``[R, N]`` of ``case``."""
    normal, _ = spec.random_tensors(device, seed)
    x, dp = (normal(case.dims["R"], case.dims["N"]) for _ in range(2))
    dtype = spec.DTYPES[case.dtype]
    return spec.Inputs(((_SHARPNESS * x).to(dtype).requires_grad_(),), (), dp.to(dtype))


def _probabilities(x: Tensor, impl: str) -> Tensor:
    p = entmax(x, ALPHA, impl=impl)
    return p if isinstance(p, Tensor) else p[0]


def _ends(rows: Tensor) -> Tensor:
    return torch.cat([rows[:_ROWS], rows[-_ROWS:]])


def make_gate(case: spec.BenchCase, inputs: spec.Inputs) -> spec.Gate:
    """The first and last rows and their gradients in fp64."""
    leaf = _ends(inputs.leaves[0].detach()).double().requires_grad_()
    p = _probabilities(leaf, "reference")
    (dx,) = torch.autograd.grad(p, leaf, _ends(inputs.grad_output).double())
    return spec.Gate(
        inputs,
        case.dtype,
        {"out": spec.Part(_ends, p.detach())},
        {"dx": spec.Part(_ends, dx)},
    )


class _SortedEntmax15(torch.autograd.Function):
    """The exact threshold from sorted scores (Peters et al., arXiv 1905.05702), in fp32 (fp64)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        half = x.to(torch.promote_types(x.dtype, torch.float32)) / 2
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
        weighted = root * dp.to(root.dtype)
        dx: Tensor = weighted - root * (weighted.sum(-1, keepdim=True) / root.sum(-1, keepdim=True))
        return dx.to(dp.dtype)


IMPLEMENTATIONS = (
    *spec.ours(_probabilities, chosen_impl, tiled_on=("cuda",)),
    spec.Implementation("sort", spec.bound(_SortedEntmax15.apply), "baseline"),
    spec.Implementation("softmax", spec.bound(lambda x: x.softmax(dim=-1)), "bare"),
)


def work(case: spec.BenchCase, inputs: spec.Inputs, phase: spec.Phase) -> spec.Work:
    """Least work: scores read and probabilities written once; backward reads those and a gradient,
    and writes one.
    """
    (x,) = inputs.leaves
    operand = float(x.numel() * x.element_size())
    return spec.Work(3.0 * x.numel(), operand * (2 if phase == "forward" else 5))


def _needs(case: spec.BenchCase, impl: str) -> int:
    entries = case.dims["R"] * case.dims["N"]
    return entries * (
        2 * spec.DTYPES[case.dtype].itemsize + {"sort": 24, "reference": 64}.get(impl, 0)
    )


SPEC = spec.BenchSpec(
    "entmax",
    IMPLEMENTATIONS,
    "sort",
    make_inputs,
    make_gate,
    {"R": 4, "N": 32},
    work,
    _needs,
)
