"""The specification of the LSR head: cases computed by hand, and its gradients against finite differences."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from tests.ops.lsr_head.helpers import ACTIVATIONS, POOLINGS
from tilefold.ops import lsr_head


def head(hidden: object, weight: object, bias: object = None, **options: object) -> Tensor:
    """The reference on nested lists, linear unless another activation is named."""
    tensors = [None if x is None else torch.as_tensor(x, dtype=torch.float64) for x in (hidden, weight, bias)]
    options = {"activation": "none"} | options
    for name in ("attention_mask", "cu_seqlens"):
        if name in options and not isinstance(options[name], Tensor):
            options[name] = torch.tensor(options[name], dtype=torch.int32)
    return lsr_head(*tensors, impl="reference", **options)


TOKENS = [[[10.0], [11.0], [12.0], [13.0]]]
BY_HAND = {
    "the largest valid logit": ([[[1.0, 0], [0, 2], [3, 1]]], [[1.0, 0], [0, 1], [1, 1]], None, {}, [3.0, 2.0, 4.0]),
    "a bias once, after the scale": ([[[1.0], [2.0]]], [[3.0]], [10.0], {"logit_scale": 0.5}, [13.0]),
    "products alone without a bias": ([[[1.0], [2.0]]], [[3.0]], None, {"logit_scale": 0.5}, [3.0]),
    "the smallest under a negative scale": ([[[1.0], [-2.0], [5.0]]], [[1.0]], None, {"logit_scale": -1.0}, [2.0]),
    "minus infinity beats what is masked": (
        [[[5.0], [-math.inf]]], [[1.0]], None, {"attention_mask": [[0, 1]]}, [-math.inf],
    ),
    **{name: ([[[1.0]]], [[-2.0], [3.0]], None, {"activation": name}, values)
       for name, values in (
           ("log1p_relu", [0.0, math.log(4)]), ("log1p_log1p_relu", [0.0, math.log1p(math.log(4))]),
           ("relu", [0.0, 3.0]), ("softplus", [math.log1p(math.exp(-2)), math.log1p(math.exp(3))]),
           ("none", [-2.0, 3.0]))},
    "sum of activated tokens": ([[[1.0], [-5.0], [3.0], [9.0]]], [[1.0]], None,
                                {"attention_mask": [[1, 1, 1, 0]], "activation": "relu", "pooling": "sum"}, [4.0]),
    "mean of activated tokens": ([[[1.0], [-5.0], [3.0], [9.0]]], [[1.0]], None,
                                 {"attention_mask": [[1, 1, 1, 0]], "activation": "relu", "pooling": "mean"}, [4 / 3]),
    **{f"{pooling} of {mask}": (TOKENS, [[1.0]], None, {"pooling": pooling, "attention_mask": [mask]}, [token])
       for pooling, mask, token in (
           ("cls", [1, 1, 0, 0], 10.0), ("last", [1, 1, 0, 0], 11.0), ("cls", [0, 0, 1, 1], 12.0),
           ("last", [0, 0, 1, 1], 13.0), ("cls", [0, 1, 0, 1], 11.0), ("last", [1, 0, 1, 0], 12.0))},
    **{f"any nonzero mask value, as {mask}": ([[[1.0], [2.0], [3.0]]], [[1.0]], None,
                                              {"attention_mask": torch.tensor([mask]), "pooling": "sum"}, [3.0])
       for mask in ([0.5, -1.0, 0.0], [True, True, False], [2, 7, 0])},
}  # fmt: skip


@pytest.mark.parametrize("case", BY_HAND)
def test_scores_by_hand(case: str) -> None:
    hidden, weight, bias, options, expected = BY_HAND[case]
    assert head(hidden, weight, bias, **options)[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_ties_go_to_the_lowest_token_which_takes_the_whole_gradient() -> None:
    hidden = torch.tensor([[[1.0], [2.0], [2.0], [2.0]]], requires_grad=True)
    lsr_head(hidden, torch.tensor([[1.0]]), impl="reference", activation="none").sum().backward()
    assert hidden.grad.flatten().tolist() == [0, 1, 0, 0]


def test_a_score_of_exactly_zero_passes_no_gradient_through_relu() -> None:
    hidden = torch.tensor([[[0.0], [-1.0]]], requires_grad=True)
    lsr_head(hidden, torch.tensor([[1.0]]), impl="reference").sum().backward()
    assert not hidden.grad.any()


@pytest.mark.parametrize("poison", [1e30, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_masked_token_never_counts_whatever_it_holds(pooling: str, poison: float) -> None:
    hidden = torch.tensor([[[poison], [1.0], [poison], [2.0], [poison]]], requires_grad=True)
    weight = torch.tensor([[1.0]], requires_grad=True)
    mask = torch.tensor([[0, 1, 0, 1, 0]])
    out = lsr_head(hidden, weight, attention_mask=mask, pooling=pooling, activation="none", impl="reference")
    assert out.item() == {"max": 2, "sum": 3, "mean": 1.5, "cls": 1, "last": 2}[pooling]
    out.sum().backward()
    counted = {"max": [0, 1], "sum": [1, 1], "mean": [0.5, 0.5], "cls": [1, 0], "last": [0, 1]}[pooling]
    assert hidden.grad.flatten().tolist() == [0, counted[0], 0, counted[1], 0]
    assert weight.grad.item() == out.item()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_row_with_no_valid_token_is_zero_with_zero_gradient(pooling: str, activation: str) -> None:
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    weight, bias = torch.randn(5, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    options = {"attention_mask": mask, "pooling": pooling, "activation": activation, "impl": "reference"}
    out = lsr_head(hidden, weight, bias, **options)
    assert not out[1].any()
    out[1].sum().backward()
    assert not hidden.grad.any() and not weight.grad.any() and not bias.grad.any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("pooling", ["max", "sum", "mean"])
def test_nan_in_a_valid_token_gives_nan_out(pooling: str, activation: str) -> None:
    hidden = torch.tensor([[[1.0], [math.nan], [3.0]], [[1.0], [2.0], [3.0]]])
    out = lsr_head(hidden, torch.tensor([[1.0], [-1.0]]), pooling=pooling, activation=activation, impl="reference")
    assert out[0].isnan().all() and out[1].isfinite().all()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_packed_input_equals_padded_input(pooling: str) -> None:
    hidden, weight = torch.randn(4, 6, 3), torch.randn(5, 3)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 1]])
    padded = lsr_head(hidden, weight, attention_mask=mask, pooling=pooling, impl="reference")
    offsets = torch.tensor([0, 6, 6, 9, 10], dtype=torch.int32)
    packed = lsr_head(hidden[mask.bool()], weight, cu_seqlens=offsets, pooling=pooling, impl="reference")
    torch.testing.assert_close(packed, padded, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_winner_is_chosen_before_rounding(dtype: torch.dtype) -> None:
    # 256 * 1 + 1 * x: the two sums differ by 2^-4, which neither dtype can hold at 256
    hidden = torch.tensor([[[16.0, 1.0], [16.0, 1.0625]]], dtype=dtype, requires_grad=True)
    out = lsr_head(hidden, torch.tensor([[128.0, 1.0]], dtype=dtype), activation="none", impl="reference")
    out.sum().backward()
    assert out.dtype == dtype
    assert hidden.grad[0, :, 1].tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("pooling", "activation"), list(itertools.product(POOLINGS, ACTIVATIONS)))
def test_gradients_agree_with_finite_differences(pooling: str, activation: str) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)
        for shape in ((3, 4, 3), (5, 3), (5,))
    )
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 0]])

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        options = {"pooling": pooling, "activation": activation, "logit_scale": -1.5}
        return lsr_head(hidden, weight, bias, attention_mask=mask, impl="reference", **options)

    assert gradcheck(function, (hidden, weight, bias))
