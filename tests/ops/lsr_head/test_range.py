"""Gradients of fp16 products beyond fp16's own range: what the fp32 result holds is there, large and small together."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import F16, F32, POOLINGS
from tilefold.ops import lsr_head
from tilefold.testing import assert_within_budget, budget
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs, lsr_head_results, lsr_head_truth, with_one_answer

LAYOUTS = ("right", "packed")


def fp16_problem(target: Target, layout: str) -> LSRHeadInputs:
    inputs = lsr_head_inputs(5, 19, 24, 21, layout=layout, dtype=F16, device=target.device)
    return with_one_answer(inputs)


def weight_gradient(target: Target, inputs: LSRHeadInputs, dscores: Tensor) -> Tensor:
    """What backward adds to an fp32 buffer."""
    buffer = torch.zeros(inputs.weight.shape, device=target.device)
    weight = inputs.weight.requires_grad_()
    more = {"out_dtype": F32, "weight_main_grad": buffer, "impl": target.impl}
    lsr_head(inputs.hidden, weight, inputs.bias, **inputs.layout, **more).backward(dscores)
    return buffer


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_size_reach_the_fp32_buffer_and_every_entry_has_a_range_of_its_own(
    target: Target, layout: str
) -> None:
    inputs = fp16_problem(target, layout)
    truth = lsr_head_truth(inputs, needs=("weight",))["dweight"]
    allowed = budget(F16, "gradient") * truth.abs().max()
    for size in (1e-12, 1e5):
        buffer = weight_gradient(target, inputs, size * inputs.dscores.float())
        assert_within_budget(buffer / size, truth, F16, kind="gradient", name="dweight")
    sizes = torch.logspace(-12, 9, 21, device=target.device)
    buffer = weight_gradient(target, inputs, sizes * inputs.dscores.float())
    assert ((buffer / sizes[:, None] - truth).abs() <= allowed).all()


def fp32_gradients(target: Target, inputs: LSRHeadInputs, dscores: Tensor, pooling: str) -> dict[str, Tensor]:
    """Gradients of fp32 token states, weight and bias whose products are taken in fp16."""
    inputs = dataclasses.replace(inputs.cast(F32), dscores=dscores)
    with torch.autocast(target.device, dtype=F16):
        return lsr_head_results(inputs, pooling=pooling, out_dtype=F32, impl=target.impl)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_any_size_reach_fp32_parameters_under_autocast_and_keep_it_in_fp16(
    target: Target, layout: str, pooling: str
) -> None:
    inputs = with_one_answer(fp16_problem(target, layout), pooling)
    truth = lsr_head_truth(inputs, pooling=pooling)
    for size in (1e-12, 1e5, 1e12):
        found = fp32_gradients(target, inputs, size * inputs.dscores.float(), pooling)
        for name in ("dhidden", "dweight", "dbias"):
            assert_within_budget(found[name] / size, truth[name], F16, kind="gradient", name=name)
    for name, result in lsr_head_results(inputs, pooling=pooling, impl=target.impl).items():
        kind = "forward" if name == "scores" else "gradient"
        assert_within_budget(result, truth[name], F16, kind=kind, name=name)


@pytest.mark.parametrize("pooling", ["cls", "last"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_one_token_every_row_of_both_gradients_has_a_range_of_its_own(
    target: Target, layout: str, pooling: str
) -> None:
    inputs = with_one_answer(fp16_problem(target, layout), pooling)
    dscores = inputs.dscores.float()
    for name, sizes in (
        ("dhidden", torch.logspace(-12, 9, 5, device=target.device)[:, None]),
        ("dweight", torch.logspace(-12, 9, 21, device=target.device)),
    ):
        truth = lsr_head_truth(inputs, pooling=pooling, needs=(name[1:],))[name]
        found = fp32_gradients(target, inputs, sizes * dscores, pooling)[name]
        rows = name == "dhidden" and inputs.cu_seqlens is not None
        each = sizes[:, 0].repeat_interleave(inputs.cu_seqlens.diff()) if rows else sizes
        assert_within_budget(found / each[:, None], truth, F16, kind="gradient", name=name)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_infinite_gradient_does_not_hide_in_the_range(target: Target, pooling: str) -> None:
    inputs = fp16_problem(target, "full")
    dscores = inputs.dscores.float()
    dscores[1, 3], dscores[2, 5] = math.inf, math.nan
    found = fp32_gradients(target, inputs, dscores, pooling)
    expected = lsr_head_truth(inputs, pooling=pooling)
    assert not found["dhidden"][1].isfinite().all()
    assert found["dhidden"][2].isnan().any()
    assert not found["dweight"][[3, 5]].isfinite().any()
    rest = [v for v in range(21) if v not in (3, 5)]
    assert_within_budget(found["dweight"][rest], expected["dweight"][rest], F16, kind="gradient")
