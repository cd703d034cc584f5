"""Calls of the LSR head like an earlier one: contracts of its own; the others are in ``shared/test_launches.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import BF16, F16, F32, INTERPRETED, POOLINGS, leaves_of, only_kernels, same
from tilefold.nn import LSRHead
from tilefold.ops import lsr_head, quantize_weight
from tilefold.ops._shared import operator
from tilefold.ops.lsr_head.api import HEAD
from tilefold.testing import nan_poisoned_empty
from tilefold.testing.lsr_head import lsr_head_inputs, lsr_head_results

gpu = pytest.mark.gpu
SHAPE = (3, 21, 16, 40)
DTYPE = F32 if INTERPRETED else BF16


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    HEAD.forget()
    yield
    HEAD.forget()


@pytest.fixture
def kernels(target: Target) -> Target:
    only_kernels(target)
    return target


@pytest.mark.parametrize("name", ["pooling", "activation", "out_dtype", "impl", "logit_scale"])
def test_options_of_no_hashable_type_are_refused_by_name(name: str, target: Target) -> None:
    inputs = lsr_head_inputs(2, 5, 8, 12, device=target.device)
    with pytest.raises((TypeError, ValueError), match=name):
        lsr_head(inputs.hidden, inputs.weight, **{name: ["max"]})


def test_main_grad_is_added_to_and_checked_when_calls_repeat(kernels: Target) -> None:
    inputs = lsr_head_inputs(*SHAPE, layout="holes", dtype=DTYPE, device=kernels.device)
    results, leaves = lsr_head_results(inputs, impl="triton"), leaves_of(inputs)
    main_grad = torch.zeros(SHAPE[3], SHAPE[2], device=kernels.device)
    given: dict[str, Any] = {**inputs.layout, "impl": "triton"}
    for round_ in range(1, 5):
        scores = lsr_head(*leaves, **given, weight_main_grad=main_grad)
        dhidden, dbias = torch.autograd.grad(scores, [leaves[0], leaves[2]], inputs.dscores)
        assert torch.equal(dhidden, results["dhidden"]) and torch.equal(dbias, results["dbias"])
        if round_ == 1:
            once = main_grad.clone()
    torch.testing.assert_close(main_grad, 4 * once)
    for wrong in (main_grad.T.contiguous().T, main_grad.clone().requires_grad_()):
        with pytest.raises(ValueError, match="weight_main_grad must be contiguous and must not require a gradient"):
            lsr_head(*leaves, **given, weight_main_grad=wrong)
    with pytest.raises(TypeError, match="weight_main_grad"):
        lsr_head(*leaves, **given, weight_main_grad=main_grad.half())
    with pytest.raises(ValueError, match="weight needs no gradient"):
        lsr_head(leaves[0], leaves[1].detach(), leaves[2], **given, weight_main_grad=main_grad)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_gradients_in_fp16_of_transposed_ones_are_those_of_contiguous_ones(kernels: Target, pooling: str) -> None:
    inputs = lsr_head_inputs(*SHAPE, layout="holes", dtype=F16, device=kernels.device)
    leaves = leaves_of(inputs)
    for _ in range(3):
        scores = lsr_head(*leaves, **inputs.layout, pooling=pooling, impl="triton")
        expected = torch.autograd.grad(scores, leaves, inputs.dscores, retain_graph=True)
        found = torch.autograd.grad(scores, leaves, inputs.dscores.T.contiguous().T)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_offsets_of_the_same_shape_are_looked_at_in_every_call(
    kernels: Target, pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operator, "may_look", lambda first: False)  # as on a GPU
    inputs = lsr_head_inputs(1, 60, 16, 40, device=kernels.device)
    expected, offsets = [], []

    def scores_of(cu_seqlens: Tensor) -> Tensor:
        return lsr_head(inputs.hidden[0], inputs.weight, cu_seqlens=cu_seqlens, pooling=pooling, impl="triton")

    for values in ([0, 10, 10, 60], [0, 1, 59, 60], [0, 10, 9, 60], [0, 5, 10, 59], [1, 5, 10, 60], [0, 0, 0, 60]):
        HEAD.forget()
        offsets.append(torch.tensor(values, device=kernels.device))
        expected.append(scores_of(offsets[-1]))
    assert [bool(scores.isnan().all()) for scores in expected] == [False, False, True, True, True, False]
    for _ in range(3):
        for cu_seqlens, scores in zip(offsets, expected, strict=True):
            assert torch.equal(scores_of(cu_seqlens).nan_to_num(7), scores.nan_to_num(7))
    assert len(HEAD.calls) == 1


@pytest.mark.parametrize("layout", ["full", "packed"])
def test_gradients_do_not_depend_on_who_adds_up_the_counts(
    layout: str, kernels: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tilefold.ops.lsr_head import plans

    inputs = lsr_head_inputs(2, 21, 16, 100, layout=layout, dtype=DTYPE, device=kernels.device)
    expected = lsr_head_results(inputs, needs=("hidden",), impl="triton")
    HEAD.forget()
    monkeypatch.setattr(plans, "MAX_ADDED", 0)
    same(lsr_head_results(inputs, needs=("hidden",), impl="triton"), expected)


@gpu
@pytest.mark.parametrize("layout", ["full", "holes", "packed"])
def test_quantized_scores_repeat_their_launches(layout: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):  # tiled there
        pytest.skip("fp8 products need compute capability 8.9")
    inputs = lsr_head_inputs(5, 37, 64, 200, layout=layout, dtype=BF16, device="cuda")
    weight = quantize_weight(inputs.weight)
    first = lsr_head(inputs.hidden, weight, inputs.bias, **inputs.layout)
    for _ in range(3):
        with nan_poisoned_empty():
            scores = lsr_head(inputs.hidden.clone(), weight, inputs.bias, **inputs.layout)
        assert torch.equal(scores, first) and len(HEAD.calls) == 1
    with pytest.raises(ValueError, match="must not require a gradient"):
        lsr_head(inputs.hidden.clone().requires_grad_(), weight, inputs.bias, **inputs.layout)


@gpu
@pytest.mark.parametrize("pooling", POOLINGS)
def test_autocast_the_module_and_the_compiler_give_the_bits_of_a_plain_call(pooling: str) -> None:
    inputs = lsr_head_inputs(5, 37, 64, 200, layout="holes", dtype=BF16, device="cuda")
    results, leaves = lsr_head_results(inputs, pooling=pooling), leaves_of(inputs)
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    for _ in range(4):
        with torch.autocast("cuda", dtype=BF16):
            scores = lsr_head(*wide, **inputs.layout, pooling=pooling)
        grads = torch.autograd.grad(scores, wide, inputs.dscores)
        assert torch.equal(scores, results["scores"]) and {g.dtype for g in grads} == {F32}
        assert torch.equal(grads[1].bfloat16(), results["dweight"])
    head = LSRHead(64, 200, pooling=pooling, device="cuda", dtype=BF16)
    head.load_state_dict({"weight": inputs.weight, "bias": inputs.bias})
    assert torch.equal(head(inputs.hidden, inputs.attention_mask).detach(), results["scores"])
    compiled = torch.compile(lsr_head, backend="aot_eager", fullgraph=True)
    scores = compiled(*leaves, **inputs.layout, pooling=pooling)
    grads = torch.autograd.grad(scores, leaves, inputs.dscores)
    assert all(torch.equal(a, b) for a, b in zip((scores, *grads), results.values(), strict=True))
