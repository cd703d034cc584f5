"""Gradients of fp16 products beyond fp16's own range: what the fp32 result holds is there, large and small together."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tilefold.ops import lsr_head
from tilefold.testing import assert_within_budget, budget
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs, lsr_head_truth, with_one_answer

LAYOUTS = ("right", "packed")


def fp16_problem(target: Target, layout: str) -> LSRHeadInputs:
    inputs = lsr_head_inputs(5, 19, 24, 21, layout=layout, dtype=torch.float16, device=target.device)
    return with_one_answer(inputs)


def weight_gradient(target: Target, inputs: LSRHeadInputs, dscores: Tensor) -> Tensor:
    """What backward adds to an fp32 buffer."""
    buffer = torch.zeros(inputs.weight.shape, device=target.device)
    weight = inputs.weight.requires_grad_()
    more = {"out_dtype": torch.float32, "weight_main_grad": buffer, "impl": target.impl}
    lsr_head(inputs.hidden, weight, inputs.bias, **inputs.layout, **more).backward(dscores)
    return buffer


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1e-12, 1e5], ids=str)
def test_gradients_of_any_size_reach_the_fp32_buffer_of_the_weight(target: Target, layout: str, size: float) -> None:
    inputs = fp16_problem(target, layout)
    truth = lsr_head_truth(inputs, needs=("weight",))["dweight"]
    buffer = weight_gradient(target, inputs, size * inputs.dscores.float())
    assert_within_budget(buffer / size, truth, torch.float16, kind="gradient", name="dweight")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_entry_of_the_vocabulary_has_a_range_of_its_own(target: Target, layout: str) -> None:
    inputs = fp16_problem(target, layout)
    sizes = torch.logspace(-12, 9, 21, device=target.device)
    truth = lsr_head_truth(inputs, needs=("weight",))["dweight"]
    buffer = weight_gradient(target, inputs, sizes * inputs.dscores.float())
    allowed = budget(torch.float16, "gradient") * truth.abs().max()
    assert ((buffer / sizes[:, None] - truth).abs() <= allowed).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1e-12, 1e5], ids=str)
def test_gradients_of_any_size_reach_fp32_token_states_under_autocast(target: Target, layout: str, size: float) -> None:
    inputs = fp16_problem(target, layout)
    truth = lsr_head_truth(inputs, needs=("hidden",))["dhidden"]
    inputs = dataclasses.replace(inputs, hidden=inputs.hidden.float().requires_grad_())
    with torch.autocast(target.device, dtype=torch.float16):
        scores = lsr_head(
            inputs.hidden, inputs.weight.float(), inputs.bias, **inputs.layout,
            out_dtype=torch.float32, impl=target.impl,
        )  # fmt: skip
    (found,) = torch.autograd.grad(scores, inputs.hidden, size * inputs.dscores.float())
    assert_within_budget(found / size, truth, torch.float16, kind="gradient", name="dhidden")
