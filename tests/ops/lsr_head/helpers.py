"""What the tests of the LSR head share: names of its options, and comparisons of results by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.base import head_problem
from tilefold.testing import assert_within_budget
from tilefold.testing.lsr_head import LSRHeadInputs

INTERPRETED = triton_interpreted()
POOLINGS = tuple(head_problem.POOLINGS)
ACTIVATIONS = ("log1p_relu", "log1p_log1p_relu", "relu", "softplus", "none")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], **tolerance: Any) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **{"rtol": 1e-5, "atol": 1e-6} | tolerance)


def within_budget(
    found: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    *,
    dtype: Any = None,
) -> None:
    for name, value in truth.items():
        assert_within_budget(found[name], value, dtype, kind="gradient", name=name)


def leaves_of(inputs: LSRHeadInputs) -> list[Any]:
    """Hidden, weight and bias as leaves of their own."""
    arguments = (inputs.hidden, inputs.weight, inputs.bias)
    return [
        None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in arguments
    ]
