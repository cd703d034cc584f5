"""Strides, the dtypes of masks, ids and offsets, and values of masked tokens change no result of an
operator.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.ops.samples import LAYOUTS, MASK, OFFSETS, Sample, attention, dout, head, paired, scatter
from tilefold.testing import nan_poisoned_empty
from tilefold.testing.maxsim import PAIRINGS

INTERPRETED = triton_interpreted()
STYLES = ("transposed", "sliced", "offset", "expanded")
SAMPLES = {
    f"lsr_head {pooling} {[*place]}": head(pooling, *shape, **place)
    for pooling, (shape, place) in itertools.product(("max", "sum", "cls", "last"), LAYOUTS)
}
SAMPLES |= {
    f"token_scatter {reduce} {[*place]}": scatter(reduce=reduce, ignore_ids=(0,), **place)
    for reduce, (_, place) in itertools.product(("max", "sum"), LAYOUTS)
}
SAMPLES |= {f"maxsim {pairing}": paired(pairing, "holes", 3, 2, 5, 21, 24) for pairing in PAIRINGS}
TOLERANCE = {"lsr_head": 1e-6, "maxsim": 1e-5, "token_scatter": 0.0}  # sums in another order


def results(
    sample: Sample,
    target: Target,
    leaves: list[Tensor],
    given: dict[str, Any],
    grad: Tensor | None = None,
) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    with nan_poisoned_empty():
        scores = sample.function(*leaves, **given, impl=target.impl)
        return [
            scores.detach(),
            *torch.autograd.grad(scores, leaves, dout(scores) if grad is None else grad),
        ]


def strided(tensor: Tensor, style: str) -> Tensor:
    """A view with the values of ``tensor``, or with its first row alone, and other strides."""
    if style == "expanded":
        return tensor[:1].expand(tensor.shape) if tensor.is_floating_point() else tensor
    if style == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if style == "sliced" or tensor.dim() == 1:
        return torch.stack([tensor, tensor], dim=-1)[..., 0]
    padded = tensor.new_full((tensor.size(0) + 1, *tensor.shape[1:-1], tensor.size(-1) + 3), 7)
    padded[1:, ..., 1:-2] = tensor
    return padded[1:, ..., 1:-2]  # rows apart, base not aligned


@pytest.mark.parametrize("style", STYLES[:2] if INTERPRETED else STYLES)
@pytest.mark.parametrize("name", SAMPLES)
def test_strides_do_not_matter(target: Target, name: str, style: str) -> None:
    sample = SAMPLES[name]
    leaves = [strided(leaf.detach(), style) for leaf in sample.leaves(target.device)]
    given = sample.given(target.device)
    plain = [leaf.contiguous() for leaf in leaves]
    grad = strided(dout(sample.function(*plain, **given, impl="reference")), style)
    expected = results(sample, target, plain, given, grad.contiguous())
    integers = {option for option in given if option.endswith("mask") or option == "input_ids"}
    found = results(
        sample,
        target,
        leaves,
        given | {each: strided(given[each], style) for each in integers},
        grad,
    )
    torch.testing.assert_close(
        found,
        expected,
        rtol=TOLERANCE[sample.name],
        atol=TOLERANCE[sample.name],
    )


KEYS = {
    f"entmax_attention {[*place]}": attention(**place)
    for place in ({"key_padding_mask": MASK}, {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS})
}
OTHERS = (
    (torch.bool, torch.int8)
    if INTERPRETED
    else (torch.bool, torch.uint8, torch.int8, torch.int32, torch.float16)
)


@pytest.mark.parametrize(
    "name",
    [name for name, each in (SAMPLES | KEYS).items() if {"pooling"} != {*each.options}],
)
def test_masks_of_every_dtype_and_integers_of_both_mean_the_same(target: Target, name: str) -> None:
    sample = (SAMPLES | KEYS)[name]
    leaves, given = sample.leaves(target.device), sample.given(target.device)
    expected = results(sample, target, leaves, given)
    for option, value in given.items():
        for kind in (
            ()
            if not isinstance(value, Tensor)
            else OTHERS
            if "mask" in option
            else (torch.int32, torch.int64)
        ):
            other = value * (-3 if kind.is_signed else 2) if "mask" in option else value
            other = strided(other.to(kind), "transposed" if "mask" in option else "sliced")
            found = results(sample, target, leaves, given | {option: other})
            # a mask of another dtype is compiled to sums in another order
            tolerance = 1e-6 if name.startswith("lsr_head sum") else 0.0
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("value", "nowhere"), [(math.nan, -5), (math.inf, 2**40)])
@pytest.mark.parametrize("name", [name for name in SAMPLES if "attention_mask" in name])
def test_what_a_masked_token_holds_reaches_nothing(
    target: Target,
    name: str,
    value: float,
    nowhere: int,
) -> None:
    sample = SAMPLES[name]
    leaves, given = sample.leaves(target.device), sample.given(target.device)
    expected = results(sample, target, leaves, given)
    masked = given["attention_mask"] == 0
    if "input_ids" in given:
        given["input_ids"] = given["input_ids"].masked_fill(masked, nowhere)
    masked = masked.view(*masked.shape, *[1] * (leaves[0].dim() - 2))
    found = results(sample, target, [leaves[0].masked_fill(masked, value), *leaves[1:]], given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not found[1].masked_select(masked).any()
