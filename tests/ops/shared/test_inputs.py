"""Strides, dtypes of masks, ids and offsets, and masked values change no result of an operator."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels import triton_interpreted
from tests.ops.conftest import Target
from tests.ops.contracts import CONTRACTS, cases
from tests.ops.samples import Sample, output_gradient
from tilefold.testing import nan_poisoned_empty

INTERPRETED = triton_interpreted()
STYLES = ("transposed", "sliced", "offset", "expanded")
SAMPLES: dict[str, Sample] = cases("strided")
TOLERANCES = {contract.name: contract.tolerance for contract in CONTRACTS}
WITH_INTEGERS: dict[str, Sample] = {
    name: sample
    for name, sample in (SAMPLES | cases("masked")).items()
    if any(isinstance(value, list) for value in sample.options.values())
}
MASKED_TOLERANCES: dict[str, float] = cases("masked_tolerance")


def results(
    sample: Sample,
    target: Target,
    leaves: list[Tensor],
    arguments: dict[str, Any],
    gradient: Tensor | None = None,
) -> list[Tensor]:
    """Return the output and the gradients of copies of the leaves, by the target's kernels."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    with nan_poisoned_empty():
        return sample.results(leaves, arguments | {"impl": target.impl}, gradient)


def strided(tensor: Tensor, style: str) -> Tensor:
    """Return a view of other strides, with the values of ``tensor`` or of its first row."""
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
    contiguous_leaves = [leaf.contiguous() for leaf in leaves]
    arguments = sample.arguments(target.device)
    strided_arguments = dict(arguments)
    for option, value in arguments.items():
        if option.endswith("mask") or option == "input_ids":
            strided_arguments[option] = strided(value, style)
    output = sample.function(*contiguous_leaves, **arguments, impl="reference")
    gradient = strided(output_gradient(output), style)
    torch.testing.assert_close(
        results(sample, target, leaves, strided_arguments, gradient),
        results(sample, target, contiguous_leaves, arguments, gradient.contiguous()),
        rtol=TOLERANCES[sample.name],
        atol=TOLERANCES[sample.name],
    )


MASK_DTYPES = [torch.bool, torch.int8]
if not INTERPRETED:
    MASK_DTYPES += [torch.uint8, torch.int32, torch.float16]


def other_masks(mask: Tensor) -> list[Tensor]:
    """Return masks that mean the same, in other dtypes and with other numbers than one."""
    masks = []
    for dtype in MASK_DTYPES:
        factor = -3 if dtype.is_signed else 2
        masks.append(strided((mask * factor).to(dtype), "transposed"))
    return masks


def other_integers(integers: Tensor) -> list[Tensor]:
    return [strided(integers.to(dtype), "sliced") for dtype in (torch.int32, torch.int64)]


@pytest.mark.parametrize("name", WITH_INTEGERS)
def test_masks_of_every_dtype_and_integers_of_both_mean_the_same(target: Target, name: str) -> None:
    sample = WITH_INTEGERS[name]
    leaves, arguments = sample.leaves(target.device), sample.arguments(target.device)
    expected = results(sample, target, leaves, arguments)
    tolerance = MASKED_TOLERANCES.get(name, 0.0)
    for option, value in arguments.items():
        if not isinstance(value, Tensor):
            continue
        replacements = other_masks(value) if "mask" in option else other_integers(value)
        for replacement in replacements:
            replaced = results(sample, target, leaves, arguments | {option: replacement})
            torch.testing.assert_close(replaced, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("value", "token_id"), [(math.nan, -5), (math.inf, 2**40)])
@pytest.mark.parametrize("name", [name for name in SAMPLES if "attention_mask" in name])
def test_values_and_ids_of_masked_tokens_change_nothing(
    target: Target,
    name: str,
    value: float,
    token_id: int,
) -> None:
    sample = SAMPLES[name]
    leaves, arguments = sample.leaves(target.device), sample.arguments(target.device)
    expected = results(sample, target, leaves, arguments)
    masked = arguments["attention_mask"] == 0
    if "input_ids" in arguments:
        arguments["input_ids"] = arguments["input_ids"].masked_fill(masked, token_id)
    masked = masked.view(*masked.shape, *[1] * (leaves[0].dim() - 2))
    changed_leaves = [leaves[0].masked_fill(masked, value), *leaves[1:]]
    changed = results(sample, target, changed_leaves, arguments)
    torch.testing.assert_close(changed, expected, rtol=0, atol=0)
    assert not changed[1].masked_select(masked).any()
