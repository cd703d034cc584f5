"""Gradients of specifications agree with finite differences; activations and their slopes with
formulas in fp64.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.base import (
    ACTIVATIONS,
    activate,
    differentiable_activate,
    gradient_from_logit,
    gradient_from_score,
)
from tests.ops.contracts import listed
from tests.ops.samples import Sample, further_combinations_slow

SAMPLES: list[Sample] = list(listed("finite_differences"))


@pytest.mark.skipif(triton_interpreted(), reason="nothing here depends on the kernels")
@pytest.mark.parametrize(
    "sample",
    further_combinations_slow(SAMPLES),
    ids=lambda sample: str(sample)[:60],
)
def test_gradients_agree_with_finite_differences(sample: Sample) -> None:
    options = {"impl": "reference"} | sample.arguments("cpu")
    assert torch.autograd.gradcheck(
        lambda *leaves: sample.function(*leaves, **options),
        sample.leaves("cpu"),
    )


FP64 = 4 * torch.finfo(torch.float64).eps  # a few roundings of exp and log1p


def test_softplus_is_exact_to_rounding_in_fp64_on_both_sides_of_every_threshold() -> None:
    x = torch.cat(
        [torch.linspace(-60, 60, 2401, dtype=torch.float64), torch.tensor([-800.0, 800.0])],
    )
    exact = [max(v, 0.0) + math.log1p(math.exp(-abs(v))) for v in x.tolist()]
    torch.testing.assert_close(
        activate(x, "softplus"),
        torch.tensor(exact, dtype=torch.float64),
        rtol=FP64,
        atol=0,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes_are_the_derivatives_and_nan_stays_nan(activation: str) -> None:
    x = torch.tensor(
        [-30.0, -1.0, 0.5, 19.0, 25.0, math.inf, math.nan],
        dtype=torch.float64,
        requires_grad=True,
    )
    scores = differentiable_activate(x, activation)
    (slope,) = torch.autograd.grad(scores.sum(), x)
    assert slope.isnan().tolist() == [False] * 6 + [True]
    scores, x = scores.detach(), x.detach()
    grad = torch.ones_like(x)
    torch.testing.assert_close(
        gradient_from_logit(grad, x, activation),
        slope,
        rtol=1e-12,
        atol=0,
        equal_nan=True,
    )
    torch.testing.assert_close(
        gradient_from_score(grad, scores, activation),
        slope,
        rtol=1e-12,
        atol=0,
        equal_nan=True,
    )
