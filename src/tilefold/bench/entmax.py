"""The benchmark of ``tilefold.ops.entmax``: inputs, implementations, fp64 truth, minimum work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilefold.bench import spec
from tilefold.ops.entmax import chosen_impl, entmax

_ALPHA = 1.5
# standard deviation of the scores
_SHARPNESS = 2.0
# rows that are checked at the beginning, and as many at the end
_N_CHECKED_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class EntmaxInputs(spec.Inputs):
    """Inputs of entmax: scores ``[R, N]``."""

    scores: Tensor

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """The scores."""
        return (self.scores,)

    @property
    def constants(self) -> tuple[Any, ...]:
        """Empty: entmax has no other arguments."""
        return ()


def make_inputs(case: spec.BenchCase, device: torch.device, seed: int = 0) -> EntmaxInputs:
    """Create normally distributed scores, and the gradient of their probabilities.

    Args:
        case: shape and dtype.
        device: the device of the tensors.
        seed: seed of the random numbers.
    """
    normal, _ = spec.random_tensors(device, seed)
    shape = (case.dims["R"], case.dims["N"])
    dtype = spec.DTYPES[case.dtype]
    scores = (_SHARPNESS * normal(*shape)).to(dtype)
    return EntmaxInputs(
        scores=scores.requires_grad_(),
        grad_output=normal(*shape).to(dtype),
    )


def _entmax(scores: Tensor, impl: str) -> Tensor:
    """Return the entmax probabilities of scores ``[R, N]``."""
    # without return_stats, the result is a tensor
    result = entmax(scores, _ALPHA, impl=impl)
    return result if isinstance(result, Tensor) else result[0]


def _first_and_last_rows(matrix: Tensor) -> Tensor:
    """Return the rows of a matrix that are checked."""
    return torch.cat([matrix[:_N_CHECKED_ROWS], matrix[-_N_CHECKED_ROWS:]])


def make_gate(case: spec.BenchCase, inputs: EntmaxInputs) -> spec.Gate:
    """Compute the probabilities and gradients of the first and last rows in fp64.

    Args:
        case: the case, whose dtype determines the error budget.
        inputs: scores, and the gradient of the probabilities.

    Returns:
        The accuracy gate of the case.
    """
    scores = _first_and_last_rows(inputs.scores.detach()).double().requires_grad_()
    probabilities = _entmax(scores, impl="reference")
    (dscores,) = torch.autograd.grad(
        probabilities,
        scores,
        _first_and_last_rows(inputs.grad_output).double(),
    )
    return spec.Gate(
        inputs=inputs,
        dtype=case.dtype,
        outputs={
            "probabilities": spec.CheckedSlice(_first_and_last_rows, probabilities.detach()),
        },
        gradients={"dscores": spec.CheckedSlice(_first_and_last_rows, dscores)},
    )


class _SortedEntmax15(torch.autograd.Function):
    """1.5-entmax with the exact threshold from sorted scores (Peters et al., arXiv 1905.05702).

    It computes in fp32, or in fp64 if the scores are fp64.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return 1.5-entmax ``p = relu(x / 2 - tau)^2`` along the last dimension.

        If the k largest scores are the support, tau follows from their mean and the sum of squared
        deviations. k is correct if exactly k scores are not below its tau.
        """
        half = x.to(torch.promote_types(x.dtype, torch.float32)) / 2
        half = half - half.amax(dim=-1, keepdim=True)
        sorted_half = half.sort(dim=-1, descending=True).values
        k = torch.arange(1, x.size(-1) + 1, device=x.device)
        mean = sorted_half.cumsum(dim=-1) / k
        squared_deviations = (sorted_half**2).cumsum(dim=-1) - k * mean**2
        tau_of_k = mean - ((1 - squared_deviations) / k).clamp_min(0).sqrt()
        support_size = (tau_of_k <= sorted_half).sum(dim=-1, keepdim=True)
        tau = tau_of_k.gather(-1, support_size - 1)
        root = (half - tau).clamp_min(0)
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
    *spec.tilefold_implementations(_entmax, chosen_impl, tiled_on=("cuda",)),
    spec.Implementation("sort", spec.bound(_SortedEntmax15.apply), "baseline"),
    spec.Implementation("softmax", spec.bound(lambda scores: scores.softmax(dim=-1)), "bare"),
)


def work(case: spec.BenchCase, inputs: EntmaxInputs, phase: spec.Phase) -> spec.Work:
    """Return the minimum work of entmax.

    All tensors have the shape and dtype of the scores. Only the operations of forward are counted,
    since both passes are limited by memory bandwidth.

    Args:
        case: ignored; the sizes are those of the tensors.
        inputs: tensors of the case.
        phase: forward, or forward and backward.
    """
    # for each score: subtract the threshold, compare with 0, square
    flops = 3.0 * inputs.scores.numel()
    tensor_bytes = float(inputs.scores.numel() * inputs.scores.element_size())
    # forward reads the scores and writes the probabilities
    n_tensors = 2
    if phase == "forward_backward":
        # backward reads the probabilities and their gradients, and writes those of the scores
        n_tensors += 3
    return spec.Work(flops, n_tensors * tensor_bytes)


def min_bytes(case: spec.BenchCase, impl: str) -> int:
    """Return a lower bound of the memory of an implementation.

    Args:
        case: shape and dtype.
        impl: name of the implementation.

    Returns:
        Bytes of the scores, the probabilities and intermediate results.
    """
    n_scores = case.dims["R"] * case.dims["N"]
    item_bytes = spec.DTYPES[case.dtype].itemsize
    # six fp32 tensors for "sort", and eight fp64 tensors for "reference"
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
    min_bytes=min_bytes,
)
