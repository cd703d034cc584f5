"""Empty batches, NaN and infinity, subsets of gradients, winners; strides and masks:
``shared/test_inputs.py``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import (
    ACTIVATIONS,
    F16,
    INTERPRETED,
    POOLINGS,
    close,
    leaves_of,
    within_budget,
)
from tests.ops.matching import assert_lsr_head_matches
from tests.ops.samples import assert_same_bits, saved_for_backward
from tests.refusals import refused
from tilefold.ops import lsr_head
from tilefold.testing import assert_within_budget, nan_poisoned_empty
from tilefold.testing.lsr_head import (
    LSRHeadInputs,
    lsr_head_inputs,
    lsr_head_results,
    lsr_head_truth,
    with_one_answer,
)
from tilefold.testing.padding import LAYOUTS

SMALL = (3, 7, 8, 17) if INTERPRETED else (4, 11, 24, 21)


@pytest.mark.parametrize(
    "needs",
    [("weight",), ("bias",), ("hidden",), ("weight", "bias"), ("hidden", "bias"), ()],
    ids=str,
)
@pytest.mark.parametrize("pooling", ["max", "sum", "cls"])
def test_only_gradients_asked_for_are_computed(
    target: Target,
    pooling: str,
    needs: tuple[str, ...],
) -> None:
    inputs = lsr_head_inputs(*SMALL, layout="right", device=target.device)
    results = assert_lsr_head_matches(inputs, needs=needs, pooling=pooling, impl=target.impl)
    assert set(results) == {"scores", *(f"d{name}" for name in needs)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_two_runs_give_the_same_bits_and_write_every_element(
    target: Target,
    pooling: str,
    layout: str,
) -> None:
    shape = SMALL if INTERPRETED else (8, 50, 48, 600)
    for density in ("mixed", "sparse", "dense") if layout == "right" else ("mixed",):
        inputs = lsr_head_inputs(
            *shape,
            layout=layout,
            dtype=F16,
            density=density,
            device=target.device,
        )
        expected = lsr_head_results(inputs, pooling=pooling, impl=target.impl)
        with nan_poisoned_empty():
            assert_same_bits(lsr_head_results(inputs, pooling=pooling, impl=target.impl), expected)


@pytest.mark.parametrize(
    ("shape", "cu_seqlens"),
    [((0, 3, 4), None), ((2, 0, 4), None), ((0, 0, 4), None), ((0, 4), [0]), ((0, 4), [0, 0, 0])],
    ids=["B=0", "S=0", "B=S=0", "T=0 B=0", "T=0 B=2"],
)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_empty_batches(
    target: Target,
    pooling: str,
    shape: tuple[int, ...],
    cu_seqlens: list[int] | None,
) -> None:
    hidden, weight, bias = (
        torch.randn(s, device=target.device, requires_grad=True) for s in (shape, (5, 4), (5,))
    )
    offsets = (
        None
        if cu_seqlens is None
        else torch.tensor(cu_seqlens, dtype=torch.int32, device=target.device)
    )
    batch = shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    with nan_poisoned_empty():
        scores = lsr_head(
            hidden,
            weight,
            bias,
            cu_seqlens=offsets,
            pooling=pooling,
            impl=target.impl,
        )
        scores.sum().backward()
    assert scores.shape == (batch, 5) and not scores.any()
    for leaf in (hidden, weight, bias):
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


@pytest.mark.parametrize("gradient", [math.inf, math.nan])
@pytest.mark.parametrize("activation", ["log1p_relu", "log1p_log1p_relu", "relu"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_infinite_gradient_of_a_score_of_zero_has_no_effect(
    target: Target,
    pooling: str,
    activation: str,
    gradient: float,
) -> None:
    """The square root of a score, for example, has an infinite slope at 0."""
    inputs = lsr_head_inputs(*SMALL, layout="right", device=target.device)
    inputs.bias[3] = -100  # all logits of this entry are negative
    options = {"pooling": pooling, "activation": activation, "impl": target.impl}
    inputs.dscores[:, 3] = 0
    expected = lsr_head_results(inputs, **options)
    inputs.dscores[:, 3] = gradient
    results = lsr_head_results(inputs, **options)
    assert not results["scores"][:, 3].any()
    assert_same_bits(results, expected)


@pytest.mark.parametrize("activation", ["log1p_relu", "none"])
@pytest.mark.parametrize("pooling", ["max", "cls"])
def test_a_bias_of_minus_infinity_switches_an_entry_off(
    target: Target,
    pooling: str,
    activation: str,
) -> None:
    inputs = lsr_head_inputs(*SMALL, layout="right", device=target.device)
    inputs.bias[3] = -math.inf
    inputs.dscores[:, 3] = 0  # what a softmax over the scores sends back
    inputs = with_one_answer(inputs, pooling, activation)
    results = lsr_head_results(inputs, pooling=pooling, activation=activation, impl=target.impl)
    truth = lsr_head_truth(inputs, pooling=pooling, activation=activation)
    assert torch.equal(results["scores"][:, 3].cpu(), truth["scores"][:, 3].float().cpu())
    del truth["scores"]
    within_budget(results, truth)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("pooling", ["max", "sum", "last"])
def test_infinite_logits_have_the_gradient_of_the_reference(
    target: Target,
    pooling: str,
    activation: str,
) -> None:
    inputs = lsr_head_inputs(2, 3, 8, 5, device=target.device, bias=False)
    inputs.hidden.abs_()[0, 2] = 1e30
    inputs.hidden[1] *= -1
    inputs = dataclasses.replace(
        inputs,
        weight=inputs.weight.abs() * 1e30,
        dscores=inputs.dscores.abs(),
    )
    tolerance = 1e-4
    if target.device == "cuda":  # in three TF32 parts, an fp32 product overflows to inf - inf
        inputs, tolerance = inputs.cast(torch.bfloat16), 3e-2
    options = {"pooling": pooling, "activation": activation, "out_dtype": torch.float32}
    actual, truth = (
        lsr_head_results(inputs, impl=impl, **options) for impl in (target.impl, "reference")
    )
    close(actual, truth, rtol=tolerance, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "length",
    [7, 300],
)  # each program looks at its mask itself, or a kernel of its own does
@pytest.mark.parametrize("layout", ["left", "right", "holes"])
@pytest.mark.parametrize("pooling", ["cls", "last"])
def test_the_one_token_is_found_under_every_mask(
    target: Target,
    pooling: str,
    layout: str,
    length: int,
) -> None:
    inputs = lsr_head_inputs(3, length, 8, 17, layout=layout, device=target.device)
    assert inputs.attention_mask is not None
    inputs.attention_mask[1] = 0  # a sequence without a token
    actual = assert_lsr_head_matches(inputs, pooling=pooling, impl=target.impl)
    with torch.no_grad():
        scores = lsr_head(
            inputs.hidden,
            inputs.weight,
            inputs.bias,
            **inputs.layout,
            pooling=pooling,
            impl=target.impl,
        )
    assert torch.equal(scores, actual["scores"])


def saved_winners(inputs: LSRHeadInputs, **options: Any) -> Tensor:
    """The winners that a forward pass keeps for backward."""
    weight = inputs.weight.detach().requires_grad_()
    kept = saved_for_backward(
        lambda: lsr_head(inputs.hidden, weight, inputs.bias, **inputs.layout, **options),
    )
    (winners,) = (t for t in kept if t.dtype in (torch.uint16, torch.int32) and t.dim() == 2)
    return winners


@pytest.mark.parametrize(
    ("length", "packed", "dtype"),
    [
        (300, 0, torch.uint16),
        (65535, 0, torch.uint16),
        (65536, 0, torch.int32),
        (70000, 1, torch.int32),
    ],
)
@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
def test_winners_have_the_smallest_dtype(
    target: Target,
    length: int,
    packed: bool,
    dtype: torch.dtype,
) -> None:
    inputs = lsr_head_inputs(1, length, 8, 3, device=target.device)
    if packed:
        offsets = torch.tensor([0, 0, 65000, length], device=target.device).int()
        dscores = inputs.dscores.expand(3, -1).clone()
        inputs = dataclasses.replace(inputs.packed(), cu_seqlens=offsets, dscores=dscores)
    (inputs.hidden if packed else inputs.hidden[0])[-2:] *= 50  # the last tokens win
    assert saved_winners(inputs, impl=target.impl).dtype == dtype
    assert_lsr_head_matches(inputs, impl=target.impl)


def test_scores_and_winners_are_kept_for_backward_and_nothing_without_one(target: Target) -> None:
    inputs = lsr_head_inputs(*SMALL, layout="right", device=target.device, dtype=F16)
    winners = saved_winners(inputs, impl=target.impl)
    assert winners.dtype == torch.uint16 and winners.shape == (SMALL[0], SMALL[3])
    for pooling in POOLINGS:
        arguments = {**inputs.layout, "pooling": pooling, "impl": target.impl}
        trained = lsr_head(*leaves_of(inputs), **arguments)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                scores = lsr_head(inputs.hidden, inputs.weight, inputs.bias, **arguments)
            assert not scores.requires_grad and (
                target.device == "cuda" or torch.equal(scores, trained)
            )
            assert_within_budget(
                scores,
                lsr_head_truth(inputs, needs=(), pooling=pooling)["scores"],
            )


BROKEN_OFFSETS = [[1, 5, 11], [-1, 5, 11], [0, 7, 5, 11], [0, 5, 9], [0, 5, 12], [0, 30, 11], [0]]
BROKEN_OFFSETS += [
    [0, 2**31 - 1, -2, 11],
    [0, 2**31 - 1],
]  # no difference is negative in 32 bits; a very long sequence
# their lower halves are those of sound offsets
BROKEN_LONG_OFFSETS = [[0, 2**32 + 11], [2**32, 11], [0, 5 - 2**32, 11], [0, 2**32 + 5, 11]]
BROKEN_LONG_OFFSETS += [[-(2**63), 11], [0, 2**63 - 1]]


def offsets_of(values: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(
        values,
        dtype=torch.int64 if values in BROKEN_LONG_OFFSETS else torch.int32,
        device=device,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("offsets", BROKEN_OFFSETS + BROKEN_LONG_OFFSETS, ids=str)
def test_broken_offsets_on_a_gpu_give_nan_or_an_error_where_they_are_read(
    offsets: list[int],
    pooling: str,
) -> None:
    hidden, weight = torch.randn(11, 24, device="cuda"), torch.randn(21, 24, device="cuda")
    arguments = {"cu_seqlens": offsets_of(offsets, "cuda"), "pooling": pooling}
    assert lsr_head(hidden, weight, **arguments, impl="triton").isnan().all()
    refused(
        ValueError,
        r"cu_seqlens must start with 0",
        lsr_head,
        hidden,
        weight,
        **arguments,
        impl="tiled",
    )


@pytest.mark.skipif(not INTERPRETED, reason="torch reads the offsets, and raises")
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    ("rows", "offsets"),
    [(11, offsets) for offsets in BROKEN_OFFSETS + BROKEN_LONG_OFFSETS]
    + [(0, [0, 3]), (0, [1, 0])],
    ids=str,
)
def test_broken_offsets_that_nobody_looked_at_read_no_row_outside_and_give_nan(
    host_reads_no_values: None,
    rows: int,
    offsets: list[int],
    pooling: str,
) -> None:
    cu_seqlens = offsets_of(offsets)
    scores = lsr_head(
        torch.randn(rows, 8),
        torch.randn(5, 8),
        cu_seqlens=cu_seqlens,
        pooling=pooling,
        impl="triton",
    )
    assert scores.shape == (len(offsets) - 1, 5) and scores.isnan().all()
