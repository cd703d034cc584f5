"""Rows that round sequences up to whole groups never show, and both ways to look for winners find the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import F32, INTERPRETED, close, only_kernels
from tilefold.ops import lsr_head
from tilefold.ops._shared._triton import releases
from tilefold.ops.lsr_head.api import HEAD
from tilefold.testing import nan_poisoned_empty
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs, lsr_head_results, with_one_answer

RAGGED = ("right", "left", "holes", "packed")
OPTIONS = ("max", "relu", 1.0, F32, F32, None)


@pytest.fixture
def kernels(target: Target) -> Target:
    only_kernels(target)
    return target


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
def max_mask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Entries of a mask that every program counts for itself."""
    from tilefold.ops.lsr_head._triton import pack

    monkeypatch.setattr(pack, "MAX_MASK", request.param)
    HEAD.forget()
    yield
    HEAD.forget()


@pytest.fixture
def later_columns_win() -> Iterator[None]:
    """Products that grow by some ulps from one column to the next, as a BLAS may round equal columns apart."""
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
def test_a_repeated_row_that_wins_by_an_ulp_is_the_token_that_it_repeats(
    kernels: Target, layout: str, largest: int
) -> None:
    inputs = lsr_head_inputs(5, 19, 16, 21, layout=layout, device=kernels.device)
    inputs = dataclasses.replace(inputs, hidden=inputs.hidden.clone(), weight=inputs.weight.clone())
    hidden, weight, places = inputs.hidden, inputs.weight, valid_places(inputs)
    weight[::2] = 0
    weight[::2, 0] = 4
    for b, valid in enumerate(places):  # one token of a sequence wins the even half of the vocabulary
        if len(valid):
            sequence(inputs, b)[..., 0] = -sequence(inputs, b)[..., 0].abs() - 1
            sequence(inputs, b)[int(valid[largest]), 0] = 2
    with nan_poisoned_empty():
        tensors = hidden, inputs.attention_mask, inputs.cu_seqlens, weight, None, None
        _, winners = torch.ops.tilefold.lsr_head(*tensors, *OPTIONS, True, "triton")
    for b, valid in enumerate(places):
        if len(valid):
            logits = sequence(inputs, b)[valid] @ weight.T
            assert winners[b].int().tolist() == valid[logits.argmax(dim=0)].tolist()


@pytest.mark.usefixtures("later_columns_win", "max_mask")
@pytest.mark.parametrize("layout", RAGGED)
def test_scratch_never_shows_where_a_repeated_row_wins_by_an_ulp(kernels: Target, layout: str) -> None:
    inputs = with_one_answer(lsr_head_inputs(5, 19, 16, 21, layout=layout, device=kernels.device))
    expected = lsr_head_results(inputs, impl="tiled")
    with nan_poisoned_empty():
        found = lsr_head_results(inputs, impl="triton")
    close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [256, 150, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_constants_find_the_winners_that_registers_find(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, length: int
) -> None:
    if torch.cuda.get_device_capability() != (9, 0) or releases.why_no_warp_roles() is not None:
        pytest.skip("the Hopper kernel does not run here")
    generator = torch.Generator("cuda").manual_seed(length)
    # few different numbers: ties, of which the lowest place wins
    hidden = torch.randint(-2, 3, (9, length, 128), device="cuda", generator=generator).to(dtype).requires_grad_()
    weight = torch.randint(-2, 3, (1000, 128), device="cuda", generator=generator).to(dtype).requires_grad_()
    mask = torch.rand(9, length, device="cuda", generator=generator) > 0.3
    with torch.no_grad():
        hidden[0, 0, 0] = float("nan")
    results = []
    for lean in (False, True):
        monkeypatch.setattr(releases, "lean_places", lambda lean=lean: lean)
        for attention_mask in (None, mask):
            scores = lsr_head(hidden, weight, attention_mask=attention_mask, out_dtype=torch.float32)
            results.append((scores, *torch.autograd.grad(scores.sum(), (hidden, weight))))
    for one, other in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(one, other, strict=True))
