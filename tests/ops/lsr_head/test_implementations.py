"""Every implementation of the LSR head within its error budget of the reference: options, layouts,
shapes, dtypes.

The same tests serve the tiled path on the CPU, the kernels on a GPU, and, started by
shared/test_interpreted.py, the kernels interpreted on the CPU. Interpreting takes about half a
second a case, so that run has fewer of them, and no bf16, whose products the interpreter cannot
compute.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import (
    ACTIVATIONS,
    BF16,
    F16,
    F32,
    F64,
    INTERPRETED,
    POOLINGS,
    leaves_of,
)
from tests.ops.matching import assert_lsr_head_matches
from tilefold.ops import lsr_head
from tilefold.testing import assert_within_budget, budget
from tilefold.testing.lsr_head import (
    DENSITIES,
    LSRHeadInputs,
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
HALVES = [
    ((pooling, "log1p_relu", layout), dtype)
    for dtype in DTYPES[1:]
    for pooling, layout in (("max", "right"), ("max", "packed"), ("sum", "holes"), ("cls", "left"))
]
too_large = pytest.mark.skipif(INTERPRETED, reason="too large to interpret")


@pytest.mark.parametrize(
    ("options", "dtype"),
    [(option, F32) for option in OPTIONS] + HALVES,
    ids=str,
)
def test_scores_and_gradients_for_every_option(
    target: Target,
    options: tuple[str, ...],
    dtype: torch.dtype,
) -> None:
    pooling, activation, layout = options
    inputs = lsr_head_inputs(*SHAPE, layout=layout, dtype=dtype, device=target.device)
    kind = "gradient" if dtype == F32 else "gradient_bound"
    assert_lsr_head_matches(
        inputs,
        pooling=pooling,
        activation=activation,
        impl=target.impl,
        kind=kind,
    )


@too_large  # and the kernels have no fp64
@pytest.mark.parametrize(
    ("pooling", "layout"),
    [("max", "right"), ("sum", "holes"), ("mean", "packed"), ("last", "left")],
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp64_is_computed_in_fp64(device: str, pooling: str, layout: str) -> None:
    assert_lsr_head_matches(
        lsr_head_inputs(*SHAPE, layout=layout, dtype=F64, device=device),
        pooling=pooling,
    )


@too_large
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("activation", ["log1p_relu", "log1p_log1p_relu"])
def test_gradients_are_exact_at_any_density(
    target: Target,
    activation: str,
    density: str,
    dtype: torch.dtype,
) -> None:
    inputs = lsr_head_inputs(
        8,
        64,
        64,
        1000,
        layout="right",
        dtype=dtype,
        density=density,
        device=target.device,
    )
    # a slope saved through a score of 2 multiplies its rounding error by more than the averaged
    # budget has room for
    kind = "gradient_bound" if density == "dense" else "gradient"
    results = assert_lsr_head_matches(inputs, activation=activation, impl=target.impl, kind=kind)
    active = (results["scores"] > 0).float().mean().item()
    low, high = {"mixed": (0.5, 1.0), "dense": (0.8, 1.0), "sparse": (0.0005, 0.06)}[density]
    assert low < active <= high


@too_large
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [10.0, 100.0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_large_scores_are_exact(
    target: Target,
    activation: str,
    scale: float,
    dtype: torch.dtype,
) -> None:
    inputs = lsr_head_inputs(16, 64, 64, 1000, dtype=dtype, device=target.device)
    assert_lsr_head_matches(
        inputs,
        activation=activation,
        logit_scale=scale,
        large_scores=True,
        impl=target.impl,
    )


@pytest.mark.parametrize("activation", ["none"] if INTERPRETED else ACTIVATIONS)
@pytest.mark.parametrize("pooling", ["max", "sum"] if INTERPRETED else POOLINGS)
def test_nan_in_a_valid_token_gives_nan_for_every_activation(
    target: Target,
    pooling: str,
    activation: str,
) -> None:
    inputs = lsr_head_inputs(3, 9, 16, 20, device=target.device)
    token = {"cls": 0, "last": 8}.get(pooling, 4)
    inputs.hidden[1, token, 5] = torch.nan
    for given, impl in itertools.product((inputs, inputs.packed()), (target.impl, "reference")):
        results = lsr_head_results(given, pooling=pooling, activation=activation, impl=impl)
        assert results["scores"].isnan().all(dim=1).tolist() == [False, True, False], impl
        poisoned = results["dhidden"].view(3, 9, 16).isnan()
        assert not poisoned[[0, 2]].any() and poisoned[1].any(), impl
        if (
            pooling != "max"
        ):  # among NaN there is no maximum: some token of the sequence takes the gradient
            assert (
                poisoned[1].all(dim=1).nonzero().tolist()
                == poisoned[1].any(dim=1).nonzero().tolist()
                == [[token]]
            )
        assert results["dbias"].isnan().all() and results["dweight"].isnan().all(), impl


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
def test_large_batches_and_16_bits_in_tiles(
    target: Target,
    layout: str,
    activation: str,
    dtype: torch.dtype,
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
    assert_lsr_head_matches(
        inputs,
        pooling=pooling,
        logit_scale=scale,
        activation="softplus",
        impl=target.impl,
    )


@pytest.mark.parametrize("dtype", [F16] if INTERPRETED else [F16, BF16], ids=str)
@pytest.mark.parametrize("out_dtype", [F16, F32])
@pytest.mark.parametrize("pooling", ["max", "sum", "cls"])
def test_scores_are_of_out_dtype(
    target: Target,
    pooling: str,
    out_dtype: torch.dtype,
    dtype: torch.dtype,
) -> None:
    inputs = lsr_head_inputs(*SHAPE, dtype=dtype, layout="right", device=target.device)
    options = {"pooling": pooling, "out_dtype": out_dtype, "impl": target.impl}
    results = assert_lsr_head_matches(inputs, **options, kind="gradient_bound")
    assert results["scores"].dtype == out_dtype
    assert {results[name].dtype for name in ("dhidden", "dweight", "dbias")} == {dtype}


@pytest.mark.parametrize("layout", ["right", "packed"])
def test_the_weight_gradient_can_be_added_to_a_buffer_in_fp32(target: Target, layout: str) -> None:
    dtype = F32 if target.device == "cpu" else BF16
    inputs = with_one_answer(
        lsr_head_inputs(5, 20, 24, 70, layout=layout, dtype=dtype, device=target.device),
    )
    truth, before = lsr_head_truth(inputs), torch.randn(70, 24, device=target.device)
    main_grad, (hidden, weight, bias) = before.clone(), leaves_of(inputs)
    for _ in range(2):
        scores = lsr_head(
            hidden,
            weight,
            bias,
            **inputs.layout,
            weight_main_grad=main_grad,
            impl=target.impl,
        )
        scores.backward(inputs.dscores)
    assert weight.grad is None
    actual = {"dweight": main_grad - before, "dhidden": hidden.grad, "dbias": bias.grad}
    for name, gradient in actual.items():
        assert_within_budget(gradient, 2 * truth[name], dtype, "gradient_bound", name=name)


# Gradients of fp16 products beyond fp16's own range: what the fp32 result holds is there, large and
# small together.


def fp16_problem(target: Target, layout: str) -> LSRHeadInputs:
    return with_one_answer(
        lsr_head_inputs(5, 19, 24, 21, layout=layout, dtype=F16, device=target.device),
    )


def weight_gradient(target: Target, inputs: LSRHeadInputs, dscores: Tensor) -> Tensor:
    """What backward adds to an fp32 buffer."""
    buffer = torch.zeros(inputs.weight.shape, device=target.device)
    weight = inputs.weight.requires_grad_()
    more = {"out_dtype": F32, "weight_main_grad": buffer, "impl": target.impl}
    lsr_head(inputs.hidden, weight, inputs.bias, **inputs.layout, **more).backward(dscores)
    return buffer


@pytest.mark.parametrize("layout", ("right", "packed"))
def test_gradients_of_any_size_reach_the_fp32_buffer_each_in_its_own_range(
    target: Target,
    layout: str,
) -> None:
    inputs = fp16_problem(target, layout)
    truth = lsr_head_truth(inputs, needs=("weight",))["dweight"]
    allowed = budget(F16, "gradient") * truth.abs().max()
    for size in (1e-12, 1e5):
        buffer = weight_gradient(target, inputs, size * inputs.dscores.float())
        assert_within_budget(buffer / size, truth, F16, kind="gradient", name="dweight")
    sizes = torch.logspace(-12, 9, 21, device=target.device)
    buffer = weight_gradient(target, inputs, sizes * inputs.dscores.float())
    assert ((buffer / sizes[:, None] - truth).abs() <= allowed).all()


def fp32_gradients(
    target: Target,
    inputs: LSRHeadInputs,
    dscores: Tensor,
    pooling: str,
) -> dict[str, Tensor]:
    """Gradients of fp32 token states, weight and bias whose products are taken in fp16."""
    inputs = dataclasses.replace(inputs.cast(F32), dscores=dscores)
    with torch.autocast(target.device, dtype=F16):
        return lsr_head_results(inputs, pooling=pooling, out_dtype=F32, impl=target.impl)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("layout", ("right", "packed"))
def test_gradients_of_any_size_are_kept_under_autocast_and_in_fp16(
    target: Target,
    layout: str,
    pooling: str,
) -> None:
    inputs = with_one_answer(fp16_problem(target, layout), pooling)
    truth = lsr_head_truth(inputs, pooling=pooling)
    for size in (1e-12, 1e5, 1e12):
        actual = fp32_gradients(target, inputs, size * inputs.dscores.float(), pooling)
        for name in ("dhidden", "dweight", "dbias"):
            assert_within_budget(actual[name] / size, truth[name], F16, kind="gradient", name=name)
    for name, result in lsr_head_results(inputs, pooling=pooling, impl=target.impl).items():
        kind = "forward" if name == "scores" else "gradient"
        assert_within_budget(result, truth[name], F16, kind=kind, name=name)


@pytest.mark.parametrize("pooling", ["cls", "last"])
@pytest.mark.parametrize("layout", ("right", "packed"))
def test_with_one_token_every_row_of_gradients_has_its_own_range(
    target: Target,
    layout: str,
    pooling: str,
) -> None:
    inputs = with_one_answer(fp16_problem(target, layout), pooling)
    dscores = inputs.dscores.float()
    for name, sizes in (
        ("dhidden", torch.logspace(-12, 9, 5, device=target.device)[:, None]),
        ("dweight", torch.logspace(-12, 9, 21, device=target.device)),
    ):
        truth = lsr_head_truth(inputs, pooling=pooling, needs=(name[1:],))[name]
        actual = fp32_gradients(target, inputs, sizes * dscores, pooling)[name]
        rows = name == "dhidden" and inputs.cu_seqlens is not None
        each = sizes[:, 0].repeat_interleave(inputs.cu_seqlens.diff()) if rows else sizes
        assert_within_budget(actual / each[:, None], truth, F16, kind="gradient", name=name)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_an_infinite_gradient_does_not_hide_in_the_range(target: Target, pooling: str) -> None:
    inputs = fp16_problem(target, "full")
    inputs.bias[[3, 5]] = 100  # scores above 0, since those of 0 have no gradient
    dscores = inputs.dscores.float()
    dscores[1, 3], dscores[2, 5] = math.inf, math.nan
    actual = fp32_gradients(target, inputs, dscores, pooling)
    expected = lsr_head_truth(inputs, pooling=pooling)
    assert not actual["dhidden"][1].isfinite().all()
    assert actual["dhidden"][2].isnan().any()
    assert not actual["dweight"][[3, 5]].isfinite().any()
    rest = [v for v in range(21) if v not in (3, 5)]
    assert_within_budget(actual["dweight"][rest], expected["dweight"][rest], F16, kind="gradient")
