"""The LSR head with an fp8 weight: every implementation against the same rounded operands,
multiplied in fp64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.base import head_quantized as _quantized
from tests.ops.base import head_tiled as _tiled
from tests.ops.conftest import Target
from tests.ops.lsr_head.helpers import BF16, F16, F32, F64, INTERPRETED
from tests.refusals import refused
from tilefold.ops import QuantizedWeight, lsr_head, lsr_head_sparse, quantize_weight
from tilefold.testing import relative_error
from tilefold.testing.lsr_head import LSRHeadInputs, lsr_head_inputs, lsr_head_results
from tilefold.testing.padding import LAYOUTS

# Hopper adds fp8 products with 14 bits: over D = 64, well under 2e-3 of the norm of the scores.
# The interpreter cuts off where hardware rounds to the nearest fp8.
FP8_PRODUCTS = 5e-2 if INTERPRETED else 2e-3


def rounded_truth(inputs: LSRHeadInputs, weight: QuantizedWeight, **options: Any) -> Tensor:
    """Scores of the rounded operands in fp64."""
    exact = inputs.cast(F64)
    given = LSRHeadInputs(
        _quantized.fake_quantized(inputs.hidden).double(),
        weight.dequantize(F64),
        exact.bias,
        inputs.attention_mask,
        inputs.cu_seqlens,
        exact.dscores,
    )
    return lsr_head_results(given, needs=(), impl="reference", **options)["scores"]


def needs_fp8_products(target: Target) -> None:
    if (
        target.impl == "triton"
        and target.device == "cuda"
        and torch.cuda.get_device_capability() < (8, 9)
    ):
        pytest.skip("this GPU has no fp8 products")


SHAPES = [*(((5, 17, 32, 20) if INTERPRETED else (5, 37, 64, 150), layout) for layout in LAYOUTS)]
SHAPES += [((3, 20, 40, 33), "full")]  # a dimension that wide loads cannot take


@pytest.mark.parametrize(("shape", "layout"), SHAPES, ids=str)
@pytest.mark.parametrize("activation", ["log1p_relu", "softplus"])
def test_scores_are_of_rounded_operands(
    target: Target,
    shape: tuple[int, ...],
    layout: str,
    activation: str,
) -> None:
    needs_fp8_products(target)
    inputs = lsr_head_inputs(
        *shape,
        layout=layout,
        dtype=F16 if INTERPRETED else BF16,
        device=target.device,
    )
    weight = quantize_weight(inputs.weight)
    options = {"activation": activation, "logit_scale": 0.7}
    arguments = {**inputs.layout, "out_dtype": F32, "impl": target.impl}
    scores = lsr_head(inputs.hidden, weight, inputs.bias, **arguments, **options)
    assert relative_error(scores, rounded_truth(inputs, weight, **options)) <= FP8_PRODUCTS


def test_nan_in_gives_nan_out_and_zeros_give_the_bias(target: Target) -> None:
    if INTERPRETED:
        pytest.skip("the interpreter makes a number of a NaN that it converts to fp8")
    needs_fp8_products(target)
    inputs = lsr_head_inputs(3, 20, 32, 16, dtype=F32, device=target.device)
    inputs.hidden[0, 3, 5] = torch.nan
    inputs.hidden[1] = 0
    plain = inputs.weight.clone()
    plain[7, 2] = torch.nan
    plain[8] = 0
    scores = lsr_head(
        inputs.hidden,
        quantize_weight(plain),
        inputs.bias,
        activation="none",
        impl=target.impl,
    )
    assert scores[0].isnan().all()
    assert scores[:, 7].isnan().all()
    rest = torch.tensor([v for v in range(16) if v != 7], device=target.device)
    torch.testing.assert_close(scores[1, rest], inputs.bias[rest])
    torch.testing.assert_close(scores[1:, 8], inputs.bias[8].expand(2))


def test_masked_tokens_are_not_read_and_sparse_rows_are_the_best_of_the_dense_ones(
    target: Target,
) -> None:
    needs_fp8_products(target)
    inputs = lsr_head_inputs(5, 20, 32, 50, layout="holes", dtype=F32, device=target.device)
    weight, given = quantize_weight(inputs.weight), {**inputs.layout, "impl": target.impl}
    expected = lsr_head(inputs.hidden, weight, inputs.bias, **given)
    poisoned = inputs.hidden.masked_fill(inputs.attention_mask[:, :, None] == 0, torch.nan)
    assert torch.equal(lsr_head(poisoned, weight, inputs.bias, **given), expected)
    assert (expected[2] == 0).all()  # the sequence without a token
    sparse = lsr_head_sparse(inputs.hidden, weight, inputs.bias, top_k=9, **given).to_dense()
    best = expected.topk(9)
    assert torch.equal(sparse, torch.zeros_like(expected).scatter_(1, best.indices, best.values))


def test_the_scores_stay_close_to_those_of_the_plain_weight() -> None:
    inputs = lsr_head_inputs(8, 64, 384, 500, dtype=F32, bias=False)
    plain = lsr_head(inputs.hidden, inputs.weight)
    assert relative_error(lsr_head(inputs.hidden, quantize_weight(inputs.weight)), plain) < 0.02


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize("dim", [33, 1500])
def test_every_entry_is_within_the_stated_rounding(
    dim: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    weight = (torch.randn(dim, 70) * torch.logspace(-3, 3, 70)).T.to(device, dtype)  # strided rows
    quantized = quantize_weight(weight)
    assert quantized.values.dtype == torch.float8_e4m3fn and quantized.shape == (70, dim)
    distance = (quantized.dequantize(F64) - weight.double()).abs()
    assert (
        distance <= weight.double().abs() / 16 + quantized.scale.double()[:, None] * 2**-10
    ).all()


def test_a_weight_larger_than_a_slab_is_quantized_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 16)
    hidden = torch.randn(2, 5, 16)
    full = quantize_weight(weight)
    expected = lsr_head(hidden, full)
    monkeypatch.setattr(_quantized, "SLAB_V", 16)
    monkeypatch.setattr(_tiled, "SLAB_V", 16)
    parts = quantize_weight(weight)
    assert torch.equal(full.values.view(torch.uint8), parts.values.view(torch.uint8))
    assert torch.equal(full.scale, parts.scale)
    torch.testing.assert_close(lsr_head(hidden, full), expected)


WEIGHT = quantize_weight(torch.ones(5, 4))
REFUSED = [
    ({"pooling": "sum"}, ValueError, "pooling must be 'max' with a QuantizedWeight, got 'sum'"),
    (
        {"hidden": torch.zeros(2, 3, 8)},
        ValueError,
        r"weight must have shape \[V, D\] with D=8, got \[5, 4\]",
    ),
    ({"hidden": torch.zeros(2, 3, 4, dtype=F64)}, TypeError, "hidden must be fp16, bf16 or fp32"),
    (
        {"hidden": torch.zeros(2, 3, 4, requires_grad=True)},
        ValueError,
        "must not require a gradient",
    ),
    (
        {"weight_main_grad": torch.zeros(5, 4)},
        ValueError,
        "weight_main_grad must be None with a QuantizedWeight",
    ),
    ({"bias": torch.zeros(6)}, ValueError, "bias must have shape"),
]


@pytest.mark.parametrize(("changed", "error", "message"), REFUSED)
def test_what_a_rounded_weight_cannot_do_is_said(
    changed: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    refused(
        error,
        message,
        lsr_head,
        **{"hidden": torch.zeros(2, 3, 4), "weight": WEIGHT} | changed,
    )


@pytest.mark.parametrize(
    "weight",
    [torch.zeros(4), torch.zeros(4, 4, dtype=torch.int64), [1.0], torch.zeros(5, 0)],
)
def test_what_cannot_be_quantized_is_said(weight: Any) -> None:
    with pytest.raises(
        (TypeError, ValueError),
        match=r"^weight must|^D must be at least 1, got D=0 in shape \[5, 0\]",
    ):
        quantize_weight(weight)
    assert quantize_weight(torch.zeros(0, 5)).shape == (0, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [77, 768, 20000])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
def test_the_kernel_rounds_a_weight_as_torch_does(dtype: torch.dtype, dim: int) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8 products")
    weight = (torch.randn(131, dim) * torch.logspace(-3, 3, 131)[:, None]).to(dtype)
    weight[3] = 0
    weight[5, 7] = torch.nan
    weight[6, 1] = torch.inf
    on_cpu = quantize_weight(weight)
    on_gpu = weight.cuda()
    for _ in range(3):  # the third call repeats the launch of the second
        quantized = quantize_weight(on_gpu)
        finite = quantized.dequantize().isfinite().all(dim=1).cpu()
        assert finite.logical_not().nonzero().flatten().tolist() == [5, 6]
        assert torch.equal(quantized.scale.cpu()[finite], on_cpu.scale[finite])
        assert torch.equal(quantized.values.cpu().float()[finite], on_cpu.values.float()[finite])


@pytest.mark.skipif(not INTERPRETED, reason="the kernel is interpreted")
@pytest.mark.parametrize(
    ("dim", "n_blocks"),
    [
        pytest.param(64, 1, id="a power of two"),
        pytest.param(40, 2, id="two parts"),
        pytest.param(100, 1, id="a part of a power of two"),
        pytest.param(300, 0, id="longer than the registers"),
    ],
)
@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_rows_of_all_lengths_are_rounded(
    dtype: torch.dtype,
    dim: int,
    n_blocks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.ops.launching import head_quantize as quantize  # needs Triton

    monkeypatch.setattr(quantize, "MAX_BLOCK_D", 128)
    monkeypatch.setattr(quantize, "MAX_DIVIDED_D", 64)
    constants = quantize.row_constants(dim)
    assert (constants["REST_D"] > 0) == (n_blocks == 2)
    assert (constants["BLOCK_D"] + constants["REST_D"] < dim) == (n_blocks == 0)
    rows = (torch.randn(35, dim) * torch.logspace(-3, 3, 35)[:, None]).to(dtype)
    rows[3] = 0
    values, scale = quantize.make_program(rows, aligned=True)(rows)
    expected_values, expected_scale = _quantized.quantize_rows(rows)
    assert torch.equal(scale, expected_scale)
    # the interpreter rounds some numbers to fp8 wrongly, by up to half
    assert (values.float() == expected_values.float()).float().mean() > 0.9
    distance = (values.float() - expected_values.float()).abs()
    assert (distance <= expected_values.float().abs() / 2 + 2.0**-9).all()


@pytest.mark.skipif(not INTERPRETED, reason="the kernel is interpreted")
def test_weights_of_one_layout_share_a_program_and_strided_ones_are_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs: dict[Any, Any] = {}
    monkeypatch.setattr(_quantized, "_PROGRAMS", programs)
    monkeypatch.setattr(_quantized, "chosen_quantized_impl", lambda weight: "triton")
    weight = torch.randn(6, 32)
    other = torch.randn(6, 32)
    strided = torch.randn(32, 6).T
    for rows in (weight, other, strided):
        assert torch.equal(quantize_weight(rows).scale, _quantized.quantize_rows(rows)[1])
    assert len(programs) == 1
    assert quantize_weight(weight.half()).scale.shape == (6,)
    assert len(programs) == 2
    assert quantize_weight(weight[:0]).shape == (0, 32)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cannot be traced")
def test_compiled_code_calls_the_kernel_for_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(20, 48)
    torch.library.opcheck(torch.ops.tilefold.quantize_weight, (weight,))
    operators: list[str] = []

    def record(graph: Any, inputs: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(quantize_weight, fullgraph=True, backend=record)
    for needs_kernel in (False, True):
        monkeypatch.setattr(_quantized, "_needs_kernel_when_compiled", lambda _, n=needs_kernel: n)
        torch._dynamo.reset()
        operators.clear()
        result, expected = compiled(weight), quantize_weight(weight)
        assert any("quantize_weight" in name for name in operators) == needs_kernel
        assert torch.equal(result.scale, expected.scale)
        assert torch.equal(result.values.float(), expected.values.float())


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [768, 3072])
def test_compiled_code_rounds_on_a_gpu(dim: int) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8 products")
    weight = torch.randn(300, dim, device="cuda", dtype=BF16)
    torch._dynamo.reset()
    result = torch.compile(quantize_weight, fullgraph=True, dynamic=True)(weight)
    expected = quantize_weight(weight)
    torch.testing.assert_close(result.scale, expected.scale)
    is_equal = result.values.float() == expected.values.float()
    assert is_equal.float().mean() > 0.99
    if dim > _quantized.MAX_FUSED_D:
        assert is_equal.all()
        assert torch.equal(result.scale, expected.scale)
