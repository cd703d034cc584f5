"""The benchmark of ``tilefold.ops.entmax``: shapes, implementations, truth, least work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.bench import spec
from tilefold.ops.entmax import chosen_impl, entmax

_ALPHA = 1.5
# standard deviation of the scores
_SHARPNESS = 2.0
# first rows that are checked, and as many last ones
_N_CHECKED_ROWS = 4


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> spec.Inputs:
    """Create normal scores ``[R, N]``, the only leaf."""
    normal, _ = spec.random_tensors(device, seed)
    shape = (case.dims["R"], case.dims["N"])
    dtype = spec.DTYPES[case.dtype]
    scores = (_SHARPNESS * normal(*shape)).to(dtype)
    return spec.Inputs(
        leaves=(scores.requires_grad_(),),
        constants=(),
        grad_output=normal(*shape).to(dtype),
    )


def _probabilities(scores: Tensor, impl: str) -> Tensor:
    """Return entmax of scores ``[R, N]`` without its statistics."""
    result = entmax(scores, _ALPHA, impl=impl)
    return result if isinstance(result, Tensor) else result[0]


def _checked_rows(rows: Tensor) -> Tensor:
    """Return the first and the last rows."""
    return torch.cat([rows[:_N_CHECKED_ROWS], rows[-_N_CHECKED_ROWS:]])


def make_gate(case: spec.BenchCase, inputs: spec.Inputs) -> spec.Gate:
    """Compute the ground truth of the first and last rows, and of their gradients, in fp64.

    Args:
        case: the case, whose dtype determines the tolerance.
        inputs: scores, and the gradient of the probabilities.

    Returns:
        The check that every implementation has to pass. ``out`` are probabilities, and ``dx``
        gradients of the scores.
    """
    (scores,) = inputs.leaves
    checked_scores = _checked_rows(scores.detach()).double().requires_grad_()
    probabilities = _probabilities(checked_scores, "reference")
    (dscores,) = torch.autograd.grad(
        probabilities,
        checked_scores,
        _checked_rows(inputs.grad_output).double(),
    )
    return spec.Gate(
        inputs=inputs,
        dtype=case.dtype,
        outputs={"out": spec.CheckedSlice(_checked_rows, probabilities.detach())},
        gradients={"dx": spec.CheckedSlice(_checked_rows, dscores)},
    )


class _SortedEntmax15(torch.autograd.Function):
    """1.5-entmax with the exact threshold from sorted scores (Peters et al., arXiv 1905.05702).

    It computes in fp32, or in fp64 for fp64 scores.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return ``relu(x / 2 - tau)^2`` along the last dimension.

        If the k largest scores are the support, tau is the smaller root of a quadratic equation in
        their mean and spread. The right k is the number of scores above the tau that it gives.
        """
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
        """Return the gradient of the scores, which is zero outside of the support."""
        (root,) = ctx.saved_tensors
        weighted = root * dp.to(root.dtype)
        mean_gradient = weighted.sum(-1, keepdim=True) / root.sum(-1, keepdim=True)
        dx: Tensor = weighted - root * mean_gradient
        return dx.to(dp.dtype)


IMPLEMENTATIONS = (
    *spec.tilefold_implementations(_probabilities, chosen_impl, tiled_on=("cuda",)),
    spec.Implementation("sort", spec.bound(_SortedEntmax15.apply), "baseline"),
    spec.Implementation("softmax", spec.bound(lambda scores: scores.softmax(dim=-1)), "bare"),
)


def work(case: spec.BenchCase, inputs: spec.Inputs, phase: spec.Phase) -> spec.Work:
    """Return the least work of entmax.

    All tensors have the shape and dtype of the scores. Only operations of forward are counted:
    memory limits the speed of both passes.

    Args:
        case: unused, since the tensors have all sizes.
        inputs: tensors of the case.
        phase: forward, or forward and backward.
    """
    (scores,) = inputs.leaves
    # for each score: subtract the threshold, compare with 0, square
    flops = 3.0 * scores.numel()
    tensor_bytes = float(scores.numel() * scores.element_size())
    # forward reads the scores and writes the probabilities
    n_tensors = 2
    if phase == "forward_backward":
        # backward reads the probabilities and their gradients, and writes those of the scores
        n_tensors += 3
    return spec.Work(flops, n_tensors * tensor_bytes)


def needs_bytes(case: spec.BenchCase, impl: str) -> int:
    """Estimate the memory of an implementation from below.

    Args:
        case: the shape.
        impl: name of the implementation.

    Returns:
        Bytes of the scores and probabilities, and of intermediate results.
    """
    n_scores = case.dims["R"] * case.dims["N"]
    item_bytes = spec.DTYPES[case.dtype].itemsize
    # as much as six tensors of fp32 for the sort, and eight of fp64 for the reference
    intermediate_bytes_per_score = {"sort": 6 * 4, "reference": 8 * 8}
    bytes_per_score = (
        2 * item_bytes  # a score and its probability
        + intermediate_bytes_per_score.get(impl, 0)
    )
    return n_scores * bytes_per_score


SPEC = spec.BenchSpec(
    op="entmax",
    implementations=IMPLEMENTATIONS,
    baseline="sort",
    make_inputs=make_inputs,
    make_gate=make_gate,
    probe_dims={"R": 4, "N": 32},
    work=work,
    needs_bytes=needs_bytes,
)
