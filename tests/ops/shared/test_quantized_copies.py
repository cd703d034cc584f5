"""Quantized weights and tokens survive pickle, torch.save and copies, which torch's own fp8 tensors do not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilefold.ops import QuantizedTokens, QuantizedWeight, quantize_tokens, quantize_weight


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def parts(value: QuantizedWeight | QuantizedTokens) -> tuple[Tensor, Tensor]:
    return value.values, value.scale if isinstance(value, QuantizedWeight) else value.scales


X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("again", [pickled, saved, copy.deepcopy, copy.copy])
@pytest.mark.parametrize("make", [
    lambda: quantize_weight(X), lambda: quantize_weight(X)[2:5], lambda: quantize_tokens(X, "fp8"),
    lambda: quantize_tokens(X.view(2, 3, 4), "int8"),
], ids=["weight", "rows of a weight", "fp8 tokens", "int8 tokens"])  # fmt: skip
def test_copies_hold_the_same_numbers(
    make: Callable[[], QuantizedWeight | QuantizedTokens], again: Callable[[Any], Any]
) -> None:
    original = make()
    other = again(original)
    assert type(other) is type(original)
    for mine, theirs in zip(parts(other), parts(original), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert (mine.data_ptr() == theirs.data_ptr()) == (again is copy.copy)
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_a_pickled_slice_does_not_carry_the_whole_weight() -> None:
    weight = quantize_weight(torch.randn(1000, 64))
    assert len(pickle.dumps(weight[:2])) < 2000
