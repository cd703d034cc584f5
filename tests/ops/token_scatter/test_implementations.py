"""Every implementation of the token scatter within its error budget of the reference, on usual and
hostile inputs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from tests.kernels import release, triton_interpreted
from tests.ops.conftest import Target
from tests.ops.matching import (
    REDUCTIONS,
    TokenScatterInputs,
    assert_token_scatter_matches,
    token_scatter_inputs,
    token_scatter_results,
    token_scatter_truth,
)
from tests.ops.samples import assert_same_bits
from tilefold.ops import token_scatter, token_scatter_sparse
from tilefold.testing import assert_within_budget, nan_poisoned_empty
from tilefold.testing.padding import LAYOUTS

INTERPRETED = triton_interpreted()
ACTIVATIONS = ("relu", "log1p_relu", "log1p_log1p_relu", "softplus", "none")
SHAPE = (5, 18, 12) if INTERPRETED else (5, 300, 70)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = [(1, 1, 1), (2, 16, 5), (1, 33, 4), (3, 5, 1), (2, 7, 40)]
if not INTERPRETED:
    SHAPES += [
        (7, 33, 100),
        (1, 128, 9),
        (3, 129, 517),
        (2, 513, 100),
        (1, 2049, 300),
        (2, 5000, 1000),
    ]
    SHAPES += [(300, 3, 40), (2, 40, 60_000)]
every_reduction = pytest.mark.parametrize("reduce", REDUCTIONS)


@pytest.mark.parametrize(
    ("reduce", "activation", "layout"),
    [
        c
        for i, c in enumerate(itertools.product(REDUCTIONS, ACTIVATIONS, LAYOUTS))
        if not INTERPRETED or i % 4 == 0
    ],
)
def test_scores_and_gradients_for_every_option(
    target: Target,
    reduce: str,
    activation: str,
    layout: str,
) -> None:
    inputs = token_scatter_inputs(*SHAPE, layout=layout, device=target.device)
    assert_token_scatter_matches(
        inputs,
        reduce=reduce,
        activation=activation,
        ignore_ids=[1, 7],
        impl=target.impl,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_reduction
@pytest.mark.parametrize("layout", ["right", "packed"])
def test_scores_and_gradients_for_every_dtype(
    target: Target,
    layout: str,
    reduce: str,
    dtype: torch.dtype,
) -> None:
    inputs = token_scatter_inputs(*SHAPE, layout=layout, dtype=dtype, device=target.device)
    for activation in ("log1p_relu",) if INTERPRETED else ("log1p_relu", "none"):
        options = {"reduce": reduce, "activation": activation, "impl": target.impl}
        results = assert_token_scatter_matches(inputs, kind="gradient_bound", **options)
        assert results["scores"].dtype == results["dweights"].dtype == dtype
        assert torch.equal(
            token_scatter_results(inputs, needs=False, **options)["scores"],
            results["scores"],
        )


@pytest.mark.skipif(INTERPRETED, reason="the kernels have no fp64")
@every_reduction
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp64_is_computed_in_fp64(device: str, reduce: str) -> None:
    inputs = token_scatter_inputs(*SHAPE, layout="holes", dtype=torch.float64, device=device)
    assert_token_scatter_matches(inputs, reduce=reduce, activation="softplus")


@every_reduction
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes(target: Target, shape: tuple[int, int, int], reduce: str) -> None:
    for layout in ("packed",) if INTERPRETED else ("holes", "packed"):
        inputs = token_scatter_inputs(*shape, layout=layout, device=target.device)
        assert_token_scatter_matches(inputs, reduce=reduce, activation="softplus", impl=target.impl)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@every_reduction
def test_out_dtype_is_the_dtype_of_the_scores_and_of_nothing_else(
    target: Target,
    reduce: str,
    out_dtype: torch.dtype,
) -> None:
    inputs = token_scatter_inputs(*SHAPE, dtype=torch.float16, device=target.device)
    results = token_scatter_results(inputs, reduce=reduce, out_dtype=out_dtype, impl=target.impl)
    assert results["scores"].dtype == out_dtype and results["dweights"].dtype == torch.float16
    limit = torch.float16 if out_dtype == torch.float16 else torch.float32
    assert_within_budget(
        results["scores"],
        token_scatter_truth(inputs, reduce=reduce)["scores"],
        limit,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@every_reduction
def test_whole_numbers_with_ties_agree_in_every_bit_with_the_reference(
    target: Target,
    reduce: str,
    layout: str,
) -> None:
    inputs = token_scatter_inputs(*SHAPE, layout=layout, device=target.device)
    inputs = dataclasses.replace(inputs, weights=inputs.weights.round())
    for activation in ("none",) if INTERPRETED else ("relu", "none"):
        results = token_scatter_results(
            inputs,
            reduce=reduce,
            activation=activation,
            impl=target.impl,
        )
        assert_same_bits(
            results,
            token_scatter_results(inputs, reduce=reduce, activation=activation, impl="reference"),
        )


@every_reduction
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES, ids=str)
def test_two_runs_give_the_same_bits_and_write_every_element(
    target: Target,
    dtype: torch.dtype,
    layout: str,
    reduce: str,
) -> None:
    shape = SHAPE if INTERPRETED else (6, 3000, 50)
    inputs = token_scatter_inputs(*shape, layout=layout, dtype=dtype, device=target.device)
    first = token_scatter_results(inputs, reduce=reduce, impl=target.impl)
    with nan_poisoned_empty():
        assert_same_bits(token_scatter_results(inputs, reduce=reduce, impl=target.impl), first)


@pytest.mark.parametrize(
    ("shape", "cu_seqlens"),
    [((0, 3), None), ((2, 0), None), ((0, 0), None), ((0,), [0]), ((0,), [0, 0, 0])],
    ids=["B=0", "S=0", "B=S=0", "T=0 B=0", "T=0 B=2"],
)
@every_reduction
def test_empty_batches_give_empty_or_zero_scores(
    target: Target,
    reduce: str,
    shape: tuple[int, ...],
    cu_seqlens: list[int] | None,
) -> None:
    weights = torch.randn(shape, device=target.device, requires_grad=True)
    ids = torch.zeros(shape, dtype=torch.int64, device=target.device)
    offsets = (
        None
        if cu_seqlens is None
        else torch.tensor(cu_seqlens, dtype=torch.int32, device=target.device)
    )
    scores = token_scatter(weights, ids, 5, cu_seqlens=offsets, reduce=reduce, impl=target.impl)
    assert (
        scores.shape == (shape[0] if cu_seqlens is None else len(cu_seqlens) - 1, 5)
        and not scores.any()
    )
    scores.sum().backward()
    assert weights.grad is not None and weights.grad.shape == shape
    sparse = token_scatter_sparse(weights, ids, 5, cu_seqlens=offsets, top_k=3, reduce=reduce)
    assert sparse.shape == scores.shape and sparse.values().numel() == 0


@pytest.mark.parametrize("activation", ["relu", "log1p_relu", "softplus", "none"])
@every_reduction
def test_nan_makes_its_entry_nan_with_its_gradient_and_no_other_and_infinity_scores_as_in_the_reference(
    target: Target,
    reduce: str,
    activation: str,
) -> None:
    inputs = token_scatter_inputs(*SHAPE, layout="right", device=target.device)
    weights = inputs.weights.clone()
    weights[0, 3] = math.nan
    inputs = dataclasses.replace(inputs, weights=weights)
    for impl in (target.impl, "reference"):
        results = token_scatter_results(inputs, reduce=reduce, activation=activation, impl=impl)
        poisoned = torch.zeros_like(results["scores"], dtype=torch.bool)
        poisoned[0, inputs.input_ids[0, 3]] = True
        assert torch.equal(results["scores"].isnan(), poisoned), impl
        assert results["dweights"].isnan().nonzero().tolist() == [[0, 3]], impl
    weights = torch.tensor([[math.inf, 1.0, -math.inf, -math.inf, math.inf, -math.inf, 2.0, -3.0]])
    ids = torch.tensor([[0, 0, 1, 2, 2, 3, 4, 4]])
    inputs = TokenScatterInputs(weights, ids, 6, None, None, torch.ones(1, 6)).to(target.device)
    results, truth = (
        token_scatter_results(inputs, reduce=reduce, activation=activation, impl=impl)
        for impl in (target.impl, "reference")
    )
    torch.testing.assert_close(results, truth, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("length", [2, 100])
def test_a_large_weight_takes_nothing_from_the_sums_of_other_entries(
    target: Target,
    length: int,
) -> None:
    weights = torch.full((2, length), 1e-38)
    weights[:, 0] = 1.5e10
    weights[1, 1] = -3e-30
    ids = torch.arange(length).repeat(2, 1)
    inputs = TokenScatterInputs(weights, ids, length, None, None, torch.ones(2, length)).to(
        target.device,
    )
    scores = token_scatter_results(inputs, reduce="sum", activation="none", impl=target.impl)[
        "scores"
    ].cpu()
    assert torch.equal(scores, weights)


@every_reduction
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_softplus_and_its_logarithm_hold_for_every_weight_beside_every_other(
    target: Target,
    reduce: str,
    dtype: torch.dtype,
) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no bf16")
    weights = torch.cat(
        [torch.linspace(-86, 86, 173), torch.tensor([1e-3, -1e-3, 1e4, -0.0, 1e30])],
    ).to(dtype)
    ids, expected = torch.arange(weights.numel()), weights.double().requires_grad_()
    truth = torch.nn.functional.softplus(expected, threshold=40)
    (slopes,) = torch.autograd.grad(truth.log().sum(), expected)
    leaf = weights.to(target.device).requires_grad_()
    scores = token_scatter(
        leaf[None],
        ids[None].to(target.device),
        ids.numel(),
        reduce=reduce,
        activation="softplus",
        out_dtype=torch.float32,
        impl=target.impl,
    )
    torch.testing.assert_close(
        scores[0].double().cpu(),
        truth,
        rtol=1e-5,
        atol=0,
    )  # of exp(x), which has |x| roundings
    (actual,) = torch.autograd.grad(scores.log().sum(), leaf)
    torch.testing.assert_close(
        actual.double().cpu(),
        slopes,
        rtol=2e-5 if dtype == torch.float32 else 2**-7,
        atol=0,
    )


@pytest.mark.parametrize("gradient", [math.inf, math.nan])
@pytest.mark.parametrize("activation", ["log1p_relu", "log1p_log1p_relu", "relu"])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_an_infinite_gradient_of_a_score_of_zero_has_no_effect(
    target: Target,
    reduce: str,
    activation: str,
    gradient: float,
) -> None:
    """The square root of a score, for example, has an infinite slope at 0."""
    weights = torch.tensor([[-1.0, 0.5, -2.0]], device=target.device, requires_grad=True)
    ids = torch.tensor([[0, 1, 0]], device=target.device)
    scores = token_scatter(
        weights,
        ids,
        3,
        reduce=reduce,
        activation=activation,
        impl=target.impl,
    )
    assert not scores[0, 0]
    (finite,) = torch.autograd.grad(scores[0, 1], weights, retain_graph=True)
    upstream = torch.tensor([[gradient, 1.0, 0.0]], device=target.device)
    (actual,) = torch.autograd.grad(scores, weights, upstream)
    assert torch.equal(actual, finite)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_sums_keep_their_relative_error_at_every_scale(target: Target, scale: float) -> None:
    inputs = token_scatter_inputs(*SHAPE, layout="right", device=target.device)
    inputs = dataclasses.replace(inputs, weights=inputs.weights * scale)
    assert_token_scatter_matches(inputs, reduce="sum", activation="none", impl=target.impl)


def test_a_sum_of_very_different_sizes_is_exact_to_its_largest_weight(target: Target) -> None:
    weights = torch.tensor([[2.0**40, 1.0, -(2.0**40), 2.0**-8, 1.0]], device=target.device)
    ids = torch.tensor([[0, 0, 0, 1, 1]], device=target.device)
    scores = token_scatter(weights, ids, 2, reduce="sum", activation="none", impl=target.impl)
    assert scores[0, 1].item() == 1.0 + 2.0**-8
    assert abs(scores[0, 0].item() - 1.0) <= 2.0**40 * 2.0**-23


def test_an_expanded_gradient_is_read_right(target: Target) -> None:
    inputs = token_scatter_inputs(*SHAPE, device=target.device)
    ones = torch.ones((), device=target.device).expand_as(inputs.dscores)
    assert_token_scatter_matches(dataclasses.replace(inputs, dscores=ones), impl=target.impl)


@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_positions_beyond_16_bits_are_told_apart(
    target: Target,
    dtype: torch.dtype,
    packed: bool,
) -> None:
    inputs = token_scatter_inputs(1, 70_000, 100, dtype=torch.float32, device=target.device)
    if packed:
        inputs = dataclasses.replace(
            inputs.packed(),
            cu_seqlens=torch.tensor(
                [0, 100, 69_000, 70_000],
                dtype=torch.int32,
                device=target.device,
            ),
            dscores=inputs.dscores.expand(3, -1).clone(),
        )
    inputs = inputs.cast(dtype)
    for reduce in REDUCTIONS:
        assert_token_scatter_matches(inputs, kind="gradient_bound", reduce=reduce, impl=target.impl)


@pytest.mark.skipif(INTERPRETED, reason="too large to interpret")
@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_scores_beyond_two_to_the_31_are_addressed_right() -> None:
    batch, vocab = 9000, 250_002
    ids = torch.randint(0, vocab, (batch, 3), device="cuda")
    weights = torch.rand(batch, 3, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    scores = token_scatter(weights, ids, vocab, impl="triton")
    assert scores.numel() > 2**31
    assert set(scores[-1].float().topk(3).indices.tolist()) == set(ids[-1].tolist())
    scores[-1].sum().backward()
    assert weights.grad[-1].tolist() == [1, 1, 1] and not weights.grad[:-1].any()


BROKEN_OFFSETS = [[1, 5, 11], [-1, 5, 11], [0, 7, 5, 11], [0, 5, 9], [0, 5, 12], [0, 30, 11], [0]]
BLIND = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the tiled path looks")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.usefixtures("host_reads_no_values")
@pytest.mark.parametrize("device", BLIND)
@every_reduction
@pytest.mark.parametrize("offsets", BROKEN_OFFSETS, ids=str)
def test_broken_offsets_that_nobody_looked_at_give_nan(
    offsets: list[int],
    reduce: str,
    device: str,
) -> None:
    weights = torch.randn(11, device=device, requires_grad=True)
    ids = torch.arange(11, device=device)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    with nan_poisoned_empty():
        scores = token_scatter(
            weights,
            ids,
            21,
            cu_seqlens=cu_seqlens,
            reduce=reduce,
            impl="triton",
        )
        scores.sum().backward()
    assert scores.shape == (len(offsets) - 1, 21) and scores.isnan().all()
    assert len(offsets) == 1 or weights.grad.isnan().all()


@pytest.mark.usefixtures("host_reads_no_values")
@pytest.mark.parametrize("device", BLIND)
@every_reduction
@pytest.mark.parametrize("wrong", [-1, 21, 2**40])
def test_an_id_outside_that_nobody_looked_at_makes_its_sequence_nan(
    wrong: int,
    reduce: str,
    device: str,
) -> None:
    ids = torch.randint(0, 21, (3, 40), device=device)
    ids[1, 35] = wrong
    mask, weights = torch.ones_like(ids), torch.randn(3, 40, device=device)
    scores = token_scatter(weights, ids, 21, attention_mask=mask, reduce=reduce, impl="triton")
    assert scores[1].isnan().all() and scores[[0, 2]].isfinite().all()
    mask[1, 35] = 0
    scores = token_scatter(weights, ids, 21, attention_mask=mask, reduce=reduce, impl="triton")
    assert scores.isfinite().all()


@pytest.mark.skipif(not INTERPRETED, reason="a test of the interpreter")
@pytest.mark.skipif(
    (0, 0) < release() <= (3, 5),
    reason="Triton 3.5 and older leave the language replaced themselves",
)
def test_an_interpreted_kernel_leaves_the_language_as_it_was() -> None:
    from triton import language

    before = language.load, language.reduce, language.core.tensor.__add__
    token_scatter(torch.ones(1, 4), torch.arange(4)[None], 8, impl="triton")
    assert (language.load, language.reduce, language.core.tensor.__add__) == before
