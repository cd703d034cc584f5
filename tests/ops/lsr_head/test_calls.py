"""Calls like an earlier one (others: ``shared/test_launches.py``), and rows that round sequences up
to groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.base import ConfigRow, releases
from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import BF16, F16, F32, INTERPRETED, POOLINGS, close, leaves_of
from tests.ops.samples import assert_same_bits
from tests.refusals import refused
from tilefold.nn import LSRHead
from tilefold.ops import lsr_head, quantize_weight
from tilefold.ops.lsr_head import configs
from tilefold.ops.lsr_head.api import HEAD
from tilefold.testing import nan_poisoned_empty
from tilefold.testing.lsr_head import (
    LSRHeadInputs,
    lsr_head_inputs,
    lsr_head_results,
    with_one_answer,
)

pytestmark = pytest.mark.usefixtures("empty_call_caches")
gpu = pytest.mark.gpu
SHAPE = (3, 21, 16, 40)
DTYPE = F32 if INTERPRETED else BF16


def test_main_grad_is_added_to_and_checked_when_calls_repeat(kernels: Target) -> None:
    inputs = lsr_head_inputs(*SHAPE, layout="holes", dtype=DTYPE, device=kernels.device)
    results, leaves = lsr_head_results(inputs, impl="triton"), leaves_of(inputs)
    main_grad = torch.zeros(SHAPE[3], SHAPE[2], device=kernels.device)
    arguments: dict[str, Any] = {**inputs.layout, "impl": "triton"}
    for round_ in range(1, 5):
        scores = lsr_head(*leaves, **arguments, weight_main_grad=main_grad)
        dhidden, dbias = torch.autograd.grad(scores, [leaves[0], leaves[2]], inputs.dscores)
        assert torch.equal(dhidden, results["dhidden"]) and torch.equal(dbias, results["dbias"])
        if round_ == 1:
            once = main_grad.clone()
    torch.testing.assert_close(main_grad, 4 * once)
    for wrong in (main_grad.T.contiguous().T, main_grad.clone().requires_grad_()):
        with pytest.raises(
            ValueError,
            match="weight_main_grad must be contiguous and must not require a gradient",
        ):
            lsr_head(*leaves, **arguments, weight_main_grad=wrong)
    refused(
        TypeError,
        "weight_main_grad",
        lsr_head,
        *leaves,
        **arguments,
        weight_main_grad=main_grad.half(),
    )
    with pytest.raises(ValueError, match="weight needs no gradient"):
        lsr_head(leaves[0], leaves[1].detach(), leaves[2], **arguments, weight_main_grad=main_grad)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_gradients_in_fp16_of_transposed_ones_are_those_of_contiguous_ones(
    kernels: Target,
    pooling: str,
) -> None:
    inputs = lsr_head_inputs(*SHAPE, layout="holes", dtype=F16, device=kernels.device)
    leaves = leaves_of(inputs)
    for _ in range(3):
        scores = lsr_head(*leaves, **inputs.layout, pooling=pooling, impl="triton")
        expected = torch.autograd.grad(scores, leaves, inputs.dscores, retain_graph=True)
        torch.testing.assert_close(
            torch.autograd.grad(scores, leaves, inputs.dscores.T.contiguous().T),
            expected,
        )


@pytest.mark.parametrize("pooling", POOLINGS)
def test_offsets_are_looked_at_in_every_call(
    kernels: Target,
    pooling: str,
    host_reads_no_values: None,
) -> None:
    inputs = lsr_head_inputs(1, 60, 16, 40, device=kernels.device)
    expected, offsets = [], []

    def scores_of(cu_seqlens: Tensor) -> Tensor:
        return lsr_head(
            inputs.hidden[0],
            inputs.weight,
            cu_seqlens=cu_seqlens,
            pooling=pooling,
            impl="triton",
        )

    for values in (
        [0, 10, 10, 60],
        [0, 1, 59, 60],
        [0, 10, 9, 60],
        [0, 5, 10, 59],
        [1, 5, 10, 60],
        [0, 0, 0, 60],
    ):
        HEAD.calls.clear()
        offsets.append(torch.tensor(values, device=kernels.device))
        expected.append(scores_of(offsets[-1]))
    assert [bool(scores.isnan().all()) for scores in expected] == [
        False,
        False,
        True,
        True,
        True,
        False,
    ]
    for _ in range(3):
        for cu_seqlens, scores in zip(offsets, expected, strict=True):
            assert torch.equal(scores_of(cu_seqlens).nan_to_num(7), scores.nan_to_num(7))
    assert len(HEAD.calls) == 1


@pytest.mark.parametrize("layout", ["full", "packed"])
def test_gradients_do_not_depend_on_who_counts(
    layout: str,
    kernels: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tilefold.ops.lsr_head import plans

    inputs = lsr_head_inputs(2, 21, 16, 100, layout=layout, dtype=DTYPE, device=kernels.device)
    expected = lsr_head_results(inputs, needs=("hidden",), impl="triton")
    HEAD.calls.clear()
    monkeypatch.setattr(plans, "MAX_COUNTS_ADDED_IN_KERNEL", 0)
    assert_same_bits(lsr_head_results(inputs, needs=("hidden",), impl="triton"), expected)


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
    scores = torch.compile(lsr_head, backend="aot_eager", fullgraph=True)(
        *leaves,
        **inputs.layout,
        pooling=pooling,
    )
    grads = torch.autograd.grad(scores, leaves, inputs.dscores)
    assert all(torch.equal(a, b) for a, b in zip((scores, *grads), results.values(), strict=True))


# Rows that round sequences up to whole groups never show, and both ways to look for winners find
# the same.

RAGGED = ("right", "left", "holes", "packed")
OPTIONS = ("max", "relu", 1.0, F32, F32, None, False)


def valid_places(inputs: LSRHeadInputs) -> list[Tensor]:
    """Of each sequence, the places within it that hold a token."""
    if inputs.cu_seqlens is not None:
        return [torch.arange(int(n)) for n in inputs.cu_seqlens.diff()]
    batch, length, _ = inputs.hidden.shape
    mask = inputs.attention_mask
    valid = torch.ones(batch, length) if mask is None else mask.cpu()
    return [row.nonzero().squeeze(1) for row in valid]


def sequence(inputs: LSRHeadInputs, b: int) -> Tensor:
    if inputs.cu_seqlens is None:
        return inputs.hidden[b]
    return inputs.hidden[int(inputs.cu_seqlens[b]) : int(inputs.cu_seqlens[b + 1])]


@pytest.fixture(params=[4096, 0], ids=["counted in place", "counted before"])
def max_mask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of a mask that every program counts for itself."""
    from tests.ops.launching import head_pack as pack

    monkeypatch.setattr(pack, "MAX_MASK", request.param)


@pytest.fixture
def later_columns_win() -> Iterator[None]:
    """Products that grow by some ulps from one column to the next, as a BLAS may round equal
    columns apart.
    """
    if not INTERPRETED:
        pytest.skip("a fault of interpreted products")
    import numpy
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    honest = InterpreterBuilder.create_dot

    def rising(self: Any, *args: Any) -> Any:
        product = honest(self, *args)
        ulps = 2.0**-20 * numpy.arange(product.data.shape[-1], dtype=product.data.dtype)
        return TensorHandle(product.data + ulps, product.dtype)

    InterpreterBuilder.create_dot = rising
    yield
    InterpreterBuilder.create_dot = honest


@pytest.mark.usefixtures("later_columns_win", "max_mask")
@pytest.mark.parametrize("largest", [0, -1], ids=["the first is largest", "the last is largest"])
@pytest.mark.parametrize("layout", ["full", *RAGGED])
def test_a_repeated_row_that_wins_is_the_token_that_it_repeats(
    kernels: Target,
    layout: str,
    largest: int,
) -> None:
    inputs = lsr_head_inputs(5, 19, 16, 21, layout=layout, device=kernels.device)
    inputs = dataclasses.replace(inputs, hidden=inputs.hidden.clone(), weight=inputs.weight.clone())
    hidden, weight, places = inputs.hidden, inputs.weight, valid_places(inputs)
    weight[::2] = 0
    weight[::2, 0] = 4
    for b, valid in enumerate(
        places,
    ):  # one token of a sequence wins the even half of the vocabulary
        if len(valid):
            sequence(inputs, b)[..., 0] = -sequence(inputs, b)[..., 0].abs() - 1
            sequence(inputs, b)[int(valid[largest]), 0] = 2
    with nan_poisoned_empty():
        tensors = hidden, inputs.attention_mask, inputs.cu_seqlens, weight, None, None
        _, winners = torch.ops.tilefold.lsr_head(*tensors, *OPTIONS, True, "triton")
    for b, valid in enumerate(places):
        if len(valid):
            assert (
                winners[b].int().tolist()
                == valid[(sequence(inputs, b)[valid] @ weight.T).argmax(dim=0)].tolist()
            )


@pytest.mark.usefixtures("later_columns_win", "max_mask")
@pytest.mark.parametrize("layout", RAGGED)
def test_scratch_never_shows_where_a_repeated_row_wins_by_an_ulp(
    kernels: Target,
    layout: str,
) -> None:
    inputs = with_one_answer(lsr_head_inputs(5, 19, 16, 21, layout=layout, device=kernels.device))
    expected = lsr_head_results(inputs, impl="tiled")
    with nan_poisoned_empty():
        results = lsr_head_results(inputs, impl="triton")
    close(results, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [256, 150, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_constants_find_winners_as_registers_do(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    length: int,
) -> None:
    if torch.cuda.get_device_capability() != (9, 0) or releases.why_no_warp_roles() is not None:
        pytest.skip("the Hopper kernel does not run here")
    generator = torch.Generator("cuda").manual_seed(length)
    # few different numbers: ties, of which the lowest place wins
    hidden = (
        torch.randint(-2, 3, (9, length, 128), device="cuda", generator=generator)
        .to(dtype)
        .requires_grad_()
    )
    weight = (
        torch.randint(-2, 3, (1000, 128), device="cuda", generator=generator)
        .to(dtype)
        .requires_grad_()
    )
    mask = torch.rand(9, length, device="cuda", generator=generator) > 0.3
    with torch.no_grad():
        hidden[0, 0, 0] = float("nan")
    results = []
    for lean in (False, True):
        row = ConfigRow({"roles": True}, {"LEAN_WINNERS": lean}, "either")
        monkeypatch.setattr(configs, "MAX_FORWARD", (*configs.MAX_FORWARD, row))
        HEAD.calls.clear()
        for attention_mask in (None, mask):
            scores = lsr_head(
                hidden,
                weight,
                attention_mask=attention_mask,
                out_dtype=torch.float32,
            )
            results.append((scores, *torch.autograd.grad(scores.sum(), (hidden, weight))))
    for one, other in zip(results[:2], results[2:], strict=True):
        assert all(
            torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(one, other, strict=True)
        )
