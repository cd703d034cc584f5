"""The error budgets and inputs themselves: what passes, what cannot, and what the texts say."""

from __future__ import annotations

import math

import pytest
import torch

from tests.ops.matching import assert_lsr_head_matches
from tests.refusals import refused
from tilefold.testing import (
    CONFIDENCE,
    assert_within_budget,
    budget,
    nan_poisoned_empty,
    relative_error,
    rounding_scale,
)
from tilefold.testing.lsr_head import DENSITIES, lsr_head_inputs, lsr_head_results, with_one_answer
from tilefold.testing.padding import LAYOUTS

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def test_relative_error_is_the_ratio_of_norms_and_infinite_for_what_is_not_finite() -> None:
    assert relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
    zeros, good = torch.zeros(3), torch.ones(3)
    assert relative_error(zeros, zeros) == relative_error(torch.zeros(0), torch.zeros(0)) == 0
    assert relative_error(torch.full((3,), 1e-30), zeros) == math.inf
    for bad in (math.nan, math.inf, -math.inf):
        broken = torch.tensor([1.0, bad, 1.0])
        for out, reference in ((broken, good), (good, broken), (broken, broken)):
            assert relative_error(out, reference) == math.inf
    with pytest.raises(
        ValueError,
        match=r"out must have the shape of reference \[1, 3\], got \[3\]",
    ):
        relative_error(good, torch.ones(1, 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_once_is_within_the_forward_budget_and_rounding_twice_is_not_far_over(
    dtype: torch.dtype,
) -> None:
    exact = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert relative_error(exact.to(dtype), exact) <= budget(dtype)
    assert budget(dtype) < budget(dtype, "gradient") < budget(dtype, "gradient_bound")


def test_budgets_have_the_size_that_their_derivation_gives() -> None:
    assert budget(torch.bfloat16) == pytest.approx(2**-8, rel=0.01)
    assert budget(torch.bfloat16, "gradient") == pytest.approx(5e-3, rel=0.05)
    assert budget(torch.float32) == pytest.approx(1e-5, rel=0.05)
    assert budget(torch.bfloat16, "gradient", sensitivity=0.1) == budget(torch.bfloat16, "gradient")
    assert budget(torch.bfloat16, "gradient", sensitivity=6.0) == pytest.approx(
        1.3 * (38 / 6) ** 0.5 * 2**-8,
        rel=0.01,
    )
    assert budget(torch.bfloat16, "gradient_bound", sensitivity=6.0) == pytest.approx(
        8 * 2**-8,
        rel=0.01,
    )
    with pytest.raises(
        ValueError,
        match="kind must be one of 'forward', 'gradient', 'gradient_bound', got 'loss'",
    ):
        budget(torch.float32, "loss")


def in_an_order(terms: torch.Tensor, order: str) -> torch.Tensor:
    """The sum of fp64 ``terms`` over dimension 0 in fp32: one after the other, backwards, by
    halves, or fused.
    """
    if order == "halves":
        terms = terms.float()
        while len(terms) > 1:
            odd, terms = terms[len(terms) // 2 * 2 :], terms[: len(terms) // 2 * 2]
            terms = torch.cat([terms[0::2] + terms[1::2], odd])
        return terms[0]
    total = torch.zeros_like(terms[0], dtype=torch.float32)
    for term in terms.flip(0) if order == "backwards" else terms:
        # a fused multiply-add rounds once: the product of two fp32 numbers is exact in fp64
        total = (total.double() + term).float() if order == "fused" else total + term.float()
    return total


ORDERS = ["forwards", "backwards", "halves", "fused"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("values", ["signed", "positive"])
@pytest.mark.parametrize("dim", [3, 64, 4096])
def test_products_added_up_in_any_order_are_within_the_bound_and_the_budget(
    dim: int,
    values: str,
    order: str,
) -> None:
    generator = torch.Generator().manual_seed(dim)
    a, b = (torch.randn(shape, generator=generator) for shape in ((40, dim), (dim, 30)))
    if values == "positive":
        a, b = a.abs(), b.abs()
    exact = a.double() @ b.double()
    actual = in_an_order((a.double().T[:, :, None] * b.double()[:, None, :]), order)
    bound = CONFIDENCE * rounding_scale(exact, a.double() ** 2 @ b.double() ** 2, dim)
    assert ((actual - exact).abs() <= bound).all()
    assert_within_budget(actual, exact)
    wrong = actual - a[:, :1] * b[:1]  # without one of the terms
    assert relative_error(wrong, exact) > budget(torch.float32)
    assert ((wrong - exact).abs() > bound).float().mean() > 0.5
    assert ((1.01 * actual - exact).abs() > bound).float().mean() > 0.5


def test_a_failure_names_the_tensor_the_error_the_budget_and_the_place() -> None:
    reference = torch.ones(2, 3)
    out = reference.clone()
    out[1, 2] = 1.5
    text = (
        r"dweight: relative error 2\.04e-01 is over the gradient budget 2\.0e-05 of float32; "
        r"furthest at \(1, 2\): "
        r"1\.5 instead of 1, shape \[2, 3\], 0 not finite\."
    )
    refused(
        AssertionError,
        text,
        assert_within_budget,
        out,
        reference,
        kind="gradient",
        name="dweight",
    )
    out[0, 1] = math.nan
    with pytest.raises(
        AssertionError,
        match=r"relative error inf .* furthest at \(0, 1\): nan .* 1 not finite",
    ):
        assert_within_budget(out, reference)


def test_poisoned_allocations_show_what_nobody_wrote_and_end_with_the_block() -> None:
    before = torch.empty, torch.empty_like, torch.Tensor.new_empty
    like = torch.zeros(2)
    with pytest.raises(KeyError), nan_poisoned_empty():
        for tensor in (
            torch.empty(2),
            torch.empty_like(like),
            like.new_empty(3),
            torch.empty((2,), dtype=torch.half),
        ):
            assert tensor.isnan().all()
        assert torch.empty(2, dtype=torch.int32).tolist() == [113, 113]
        assert torch.empty(2, dtype=torch.uint16).tolist() == [113, 113]
        assert torch.empty(2, dtype=torch.bool).dtype == torch.bool
        assert torch.zeros(2).tolist() == [0, 0]
        raise KeyError
    assert before == (torch.empty, torch.empty_like, torch.Tensor.new_empty)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_the_padding_that_they_promise(layout: str) -> None:
    inputs = lsr_head_inputs(6, 12, 8, 5, layout=layout)
    lengths = [len(tokens) for tokens in inputs.sequences()]
    assert max(lengths) == 12
    if layout == "full":
        assert inputs.attention_mask is None and inputs.cu_seqlens is None and lengths == [12] * 6
        return
    if layout == "packed":
        assert inputs.cu_seqlens is not None and inputs.cu_seqlens.dtype == torch.int32
        assert (
            inputs.hidden.shape == (sum(lengths), 8) and lengths[0] == lengths[3] == lengths[5] == 0
        )
        return
    assert inputs.attention_mask is not None
    steps = inputs.attention_mask.diff(dim=1)
    if layout == "right":
        assert (steps <= 0).all() and min(lengths) >= 1
    elif layout == "left":
        assert (steps >= 0).all() and lengths[3] == 0
    else:
        assert (steps > 0).any() and (steps < 0).any() and lengths[3] == 0


@pytest.mark.parametrize("density", DENSITIES)
def test_densities_have_the_share_of_positive_scores_that_they_promise(density: str) -> None:
    inputs = lsr_head_inputs(8, 64, 32, 2000, density=density)
    share = (lsr_head_results(inputs, needs=())["scores"] > 0).float().mean().item()
    low, high = {"mixed": (0.5, 1.0), "dense": (0.999, 1.0), "sparse": (0.0005, 0.06)}[density]
    assert low <= share <= high


def test_entries_without_one_answer_lose_their_gradient_and_the_others_keep_it() -> None:
    inputs = lsr_head_inputs(1, 3, 2, 3, bias=False)
    inputs.hidden[0] = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    inputs.weight[:] = torch.tensor(
        [[1.0, 0.0], [1.0, 0.5], [-1.0, -2.0]],
    )  # a tie, a clear winner, all negative
    kept = with_one_answer(inputs).dscores
    assert kept[0, 0] == 0 and torch.equal(kept[0, 1:], inputs.dscores[0, 1:])
    with_zero = with_one_answer(inputs, "sum", "relu").dscores  # 0 is a kink of column 0 only
    assert with_zero[0, 0] == 0 and torch.equal(with_zero[0, 1:], inputs.dscores[0, 1:])


def test_inputs_repeat_differ_by_seed_match_their_reference_and_refuse_what_does_not_exist() -> (
    None
):
    first, again, other = (lsr_head_inputs(2, 3, 4, 5, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.hidden, again.hidden) and not torch.equal(first.hidden, other.hidden)
    results = assert_lsr_head_matches(lsr_head_inputs(3, 5, 8, 9, layout="holes"), impl="reference")
    assert set(results) == {"scores", "dhidden", "dweight", "dbias"}
    for name, value in (("layout", "middle"), ("density", "half")):
        refused(
            ValueError,
            rf"{name} must be one of .*, got '{value}'",
            lsr_head_inputs,
            1,
            2,
            3,
            4,
            **{name: value},
        )
