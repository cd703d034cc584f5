"""Every implementation of the LSR head within its error budget of the reference: options, layouts, shapes, dtypes.

The same tests serve the tiled path on the CPU, the kernels on a GPU, and, started by lsr_head/test_interpreted.py,
the kernels interpreted on the CPU. Interpreting takes about half a second a case, so that run has fewer of them, and no
bf16, whose products the interpreter cannot compute.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import ACTIVATIONS, BF16, F16, F32, F64, INTERPRETED, POOLINGS, leaves_of
from tilefold.ops import lsr_head
from tilefold.testing import assert_within_budget
from tilefold.testing.lsr_head import (
    DENSITIES,
    assert_lsr_head_matches,
    lsr_head_inputs,
    lsr_head_results,
    lsr_head_truth,
    with_one_answer,
)
from tilefold.testing.padding import LAYOUTS

DTYPES = (F32, F16) if INTERPRETED else (F32, F16, BF16)
SHAPE = (5, 19, 24, 21) if INTERPRETED else (5, 37, 40, 70)

if INTERPRETED:
    OPTIONS = [("max", a, LAYOUTS[i % 5]) for i, a in enumerate(ACTIVATIONS)]
    OPTIONS += [("max", "log1p_relu", layout) for layout in LAYOUTS[1:]]
    OPTIONS += [("sum", a, LAYOUTS[(i + 1) % 5]) for i, a in enumerate(ACTIVATIONS)]
    OPTIONS += [("mean", "log1p_relu", layout) for layout in LAYOUTS]
    OPTIONS += [("cls", "log1p_relu", "left"), ("last", "none", "packed")]
    SHAPES = [(1, 1, 8, 1), (2, 7, 9, 30), (3, 32, 16, 17), (1, 70, 8, 20), (7, 3, 33, 5)]
else:
    OPTIONS = list(itertools.product(POOLINGS, ACTIVATIONS, LAYOUTS))
    # every pair of sizes occurs, not every combination
    SHAPES = [
        (1, 1, 8, 1), (3, 1, 9, 30), (2, 1, 24, 517), (2, 7, 8, 30), (7, 7, 24, 1), (3, 7, 33, 70), (2, 37, 9, 517),
        (5, 37, 33, 1), (2, 300, 8, 70), (3, 300, 40, 30), (2, 300, 33, 517), (40, 16, 24, 70),
    ]  # fmt: skip
too_large = pytest.mark.skipif(INTERPRETED, reason="too large to interpret")


@pytest.mark.parametrize(("pooling", "activation", "layout"), OPTIONS)
def test_scores_and_gradients_for_every_option(target: Target, pooling: str, activation: str, layout: str) -> None:
    inputs = lsr_head_inputs(*SHAPE, layout=layout, device=target.device)
    assert_lsr_head_matches(inputs, pooling=pooling, activation=activation, impl=target.impl)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("pooling", "layout"), [("max", "right"), ("max", "packed"), ("sum", "holes"), ("cls", "left")]
)
def test_scores_and_gradients_for_every_dtype(target: Target, pooling: str, layout: str, dtype: torch.dtype) -> None:
    inputs = lsr_head_inputs(*SHAPE, layout=layout, dtype=dtype, device=target.device)
    assert_lsr_head_matches(inputs, pooling=pooling, impl=target.impl, kind="gradient_bound")


@too_large  # and the kernels have no fp64
@pytest.mark.parametrize(
    ("pooling", "layout"), [("max", "right"), ("sum", "holes"), ("mean", "packed"), ("last", "left")]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp64_is_computed_in_fp64(device: str, pooling: str, layout: str) -> None:
    inputs = lsr_head_inputs(*SHAPE, layout=layout, dtype=F64, device=device)
    assert_lsr_head_matches(inputs, pooling=pooling)


@too_large
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("activation", ["log1p_relu", "log1p_log1p_relu"])
def test_gradients_are_exact_to_rounding_at_every_density(
    target: Target, activation: str, density: str, dtype: torch.dtype
) -> None:
    inputs = lsr_head_inputs(8, 64, 64, 1000, layout="right", dtype=dtype, density=density, device=target.device)
    # a slope saved through a score of 2 multiplies its rounding error by more than the averaged budget has room for
    kind = "gradient_bound" if density == "dense" else "gradient"
    results = assert_lsr_head_matches(inputs, activation=activation, impl=target.impl, kind=kind)
    active = (results["scores"] > 0).float().mean().item()
    low, high = {"mixed": (0.5, 1.0), "dense": (0.8, 1.0), "sparse": (0.0005, 0.06)}[density]
    assert low < active <= high


@too_large
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [10.0, 100.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_large_scores_are_exact_to_the_rounding_of_the_score(
    target: Target, activation: str, scale: float, dtype: torch.dtype
) -> None:
    inputs = lsr_head_inputs(16, 64, 64, 1000, dtype=dtype, device=target.device)
    assert_lsr_head_matches(inputs, activation=activation, logit_scale=scale, large_scores=True, impl=target.impl)


@pytest.mark.parametrize("activation", ["none"] if INTERPRETED else ACTIVATIONS)
@pytest.mark.parametrize("pooling", ["max", "sum"] if INTERPRETED else POOLINGS)
def test_nan_in_a_valid_token_gives_nan_gradients_whatever_the_activation(
    target: Target, pooling: str, activation: str
) -> None:
    inputs = lsr_head_inputs(3, 9, 16, 20, device=target.device)
    token = {"cls": 0, "last": 8}.get(pooling, 4)
    inputs.hidden[1, token, 5] = torch.nan
    for impl in (target.impl, "reference"):
        found = lsr_head_results(inputs, pooling=pooling, activation=activation, impl=impl)
        assert found["scores"].isnan().all(dim=1).tolist() == [False, True, False], impl
        poisoned = found["dhidden"].isnan()
        assert not poisoned[[0, 2]].any() and poisoned[1].any(), impl
        if pooling != "max":  # among NaN there is no maximum: some token of the sequence takes the gradient
            assert poisoned[1].all(dim=1).nonzero().tolist() == poisoned[1].any(dim=1).nonzero().tolist() == [[token]]
        assert found["dbias"].isnan().all() and found["dweight"].isnan().all(), impl


@pytest.mark.parametrize("pooling", ["max", "mean"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes(target: Target, shape: tuple[int, int, int, int], pooling: str) -> None:
    for layout in ("packed",) if INTERPRETED else ("full", "holes", "packed"):
        inputs = lsr_head_inputs(*shape, layout=layout, device=target.device)
        assert_lsr_head_matches(inputs, pooling=pooling, impl=target.impl)


LARGE = [(1, 3000, 16, 300), (3, 1100, 16, 130), (300, 5, 16, 40), (2, 20, 16, 9000)]
BORDERS = [(5, 300, 64, 300), (3, 256, 64, 128), (9, 33, 64, 129), (2, 700, 64, 257)]


@too_large
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "activation"),
    [(F32, "log1p_relu"), (F16, "log1p_relu"), *((BF16, name) for name in ACTIVATIONS)],
    ids=str,
)
def test_large_batches_and_half_precision_across_tile_borders(
    target: Target, layout: str, activation: str, dtype: torch.dtype
) -> None:
    for shape in LARGE if dtype == F32 else BORDERS:
        inputs = lsr_head_inputs(*shape, layout=layout, dtype=dtype, device=target.device)
        kind = "gradient" if dtype == F32 else "gradient_bound"
        assert_lsr_head_matches(inputs, activation=activation, impl=target.impl, kind=kind)


@pytest.mark.parametrize("pooling", ["max", "sum", "last"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("scale", [-1.5, 0.25])
def test_scale_and_bias(target: Target, scale: float, bias: bool, pooling: str) -> None:
    inputs = lsr_head_inputs(*SHAPE, layout="right", bias=bias, device=target.device)
    assert_lsr_head_matches(inputs, pooling=pooling, logit_scale=scale, activation="softplus", impl=target.impl)


@pytest.mark.parametrize("dtype", [F16] if INTERPRETED else [F16, BF16], ids=str)
@pytest.mark.parametrize("out_dtype", [F16, F32])
@pytest.mark.parametrize("pooling", ["max", "sum", "cls"])
def test_out_dtype_is_the_dtype_of_the_scores_which_in_fp32_are_exact_to_fp32(
    target: Target, pooling: str, out_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    inputs = lsr_head_inputs(*SHAPE, dtype=dtype, layout="right", device=target.device)
    options = {"pooling": pooling, "out_dtype": out_dtype, "impl": target.impl}
    results = assert_lsr_head_matches(inputs, **options, kind="gradient_bound")
    assert results["scores"].dtype == out_dtype
    assert {results[name].dtype for name in ("dhidden", "dweight", "dbias")} == {dtype}


@pytest.mark.parametrize("layout", ["right", "packed"])
def test_the_weight_gradient_can_be_added_to_a_buffer_in_fp32(target: Target, layout: str) -> None:
    dtype = F32 if target.device == "cpu" else BF16
    inputs = with_one_answer(lsr_head_inputs(5, 20, 24, 70, layout=layout, dtype=dtype, device=target.device))
    truth, before = lsr_head_truth(inputs), torch.randn(70, 24, device=target.device)
    main_grad, (hidden, weight, bias) = before.clone(), leaves_of(inputs)
    for _ in range(2):
        scores = lsr_head(hidden, weight, bias, **inputs.layout, weight_main_grad=main_grad, impl=target.impl)
        scores.backward(inputs.dscores)
    assert weight.grad is None
    found = {"dweight": main_grad - before, "dhidden": hidden.grad, "dbias": bias.grad}
    for name, gradient in found.items():
        assert_within_budget(gradient, 2 * truth[name], dtype, "gradient_bound", name=name)
