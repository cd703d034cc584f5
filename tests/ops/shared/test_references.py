"""Gradients of specifications agree with finite differences; activations and their slopes with
formulas in fp64.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from tests.kernels import triton_interpreted
from tests.ops.base import (
    ACTIVATIONS,
    activate,
    differentiable_activate,
    slope_from_logit,
    slope_from_score,
)
from tests.ops.samples import Sample, attend, head, paired, scattered
from tilefold.ops import xtr_scores
from tilefold.testing.maxsim import PAIRINGS
from tilefold.testing.padding import LAYOUTS

F64 = torch.float64
POOLINGS = ("max", "sum", "mean", "cls", "last")
HOLES = [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]]
TOKENS = {"input_ids": [[1, 1, 2, 0, 1, 2], [3, 3, 3, 3, 0, 0], [0, 1, 2, 3, 0, 1]], "vocab_size": 4,
          "attention_mask": [[1] * 6, [0, 1, 0, 1, 1, 0], [0] * 6], "ignore_ids": (0,)}  # fmt: skip
LATE: list[dict[str, Any]] = [
    {"normalize": True},
    {"temperature": 0.4},
    {"mask_mode": "zero", "reduction": "mean"},
]
SAMPLES = [
    *(
        head(
            pooling,
            3,
            4,
            3,
            vocab=5,
            dtype=F64,
            activation=activation,
            logit_scale=-1.5,
            attention_mask=HOLES,
        )
        for pooling, activation in itertools.product(POOLINGS, ACTIVATIONS)
    ),
    *(
        Sample(
            "token_scatter",
            scattered,
            ((3, 6),),
            TOKENS | {"reduce": reduce, "activation": activation},
            F64,
        )
        for reduce, activation in itertools.product(("max", "sum"), ACTIVATIONS)
    ),
    *(
        paired(pairing, layout, 3, 2, 2, 4, 3, dtype=F64, **options)
        for pairing, layout, options in itertools.product(PAIRINGS, LAYOUTS, LATE)
    ),
    *(
        paired(
            "all",
            layout,
            3,
            3,
            2,
            4,
            3,
            dtype=F64,
            function=xtr_scores,
            top_k=4,
            normalize=normalize,
            impl=impl,
        )
        for layout, normalize, impl in itertools.product(
            LAYOUTS,
            (False, True),
            ("reference", "tiled"),
        )
    ),
    *(
        Sample(
            "entmax_attention",
            attend,
            (*[(1, 2, 4, 3)] * 3, (2,)),
            {"causal": True, "impl": impl},
            F64,
        )
        for impl in ("reference", "tiled")
    ),
]


@pytest.mark.skipif(triton_interpreted(), reason="nothing here depends on the kernels")
@pytest.mark.parametrize(
    "sample",
    SAMPLES,
    ids=lambda sample: f"{sample.name} {sample.options}"[:60],
)
def test_gradients_agree_with_finite_differences(sample: Sample) -> None:
    options = {"impl": "reference"} | sample.given("cpu")
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
    torch.testing.assert_close(
        slope_from_logit(x, activation),
        slope,
        rtol=1e-12,
        atol=0,
        equal_nan=True,
    )
    torch.testing.assert_close(
        slope_from_score(scores, activation),
        slope,
        rtol=1e-12,
        atol=0,
        equal_nan=True,
    )
