"""Linear layers in fp8: the formula, saturation, zero rows, numbers that are not finite."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ops.base import scaled_fp8_products
from tests.refusals import refused
from tilefold.nn.fp8_linear import fp8_linear, fp8_rows, has_fp8_sizes
from tilefold.ops.fp8_products import check_fp8_device

ROUNDING = 2.0**-4  # largest relative error of a number in e4m3 that is not subnormal


def operands(n_rows: int = 7, n_inputs: int = 64, n_outputs: int = 48) -> list[Tensor]:
    """Return hidden states, a weight and a bias, whose rows differ in their magnitudes."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.logspace(-3, 3, n_rows)[:, None]
    hidden = torch.randn(n_rows, n_inputs, generator=generator) * magnitudes
    weight = torch.randn(n_outputs, n_inputs, generator=generator)
    return [hidden, weight, torch.randn(n_outputs, generator=generator)]


def rounded(rows: Tensor) -> Tensor:
    """Return rows as fp8 represents them, from the definition: scale, round, scale back."""
    scale = rows.abs().amax(dim=1, keepdim=True) / 448
    return (rows / scale).to(torch.float8_e4m3fn).double() * scale.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_result_is_the_product_of_rounded_operands(dtype: torch.dtype) -> None:
    hidden, weight, bias = (tensor.to(dtype) for tensor in operands())
    exact = rounded(hidden.float()) @ rounded(weight.float()).T + bias.double()
    result = fp8_linear(hidden, weight, bias)
    assert result.dtype == dtype
    rounding = 2 * torch.finfo(dtype).eps
    allowed = rounding * exact.abs().amax(dim=1, keepdim=True)
    assert ((result.double() - exact).abs() <= allowed).all()


def test_the_error_of_a_product_is_bounded_by_the_rounding_of_its_operands() -> None:
    hidden, weight, bias = operands()
    exact = torch.nn.functional.linear(hidden.double(), weight.double(), bias.double())
    # each factor has a relative error of 1/16, or the absolute error of a subnormal number
    hidden_error = ROUNDING * hidden.abs() + hidden.abs().amax(1, keepdim=True) / 448 * 2**-10
    weight_error = ROUNDING * weight.abs() + weight.abs().amax(1, keepdim=True) / 448 * 2**-10
    allowed = (
        hidden_error @ weight.abs().T
        + hidden.abs() @ weight_error.T
        + hidden_error @ weight_error.T
    )
    error = (fp8_linear(hidden, weight, bias).double() - exact).abs()
    assert (error <= 1.001 * allowed.double()).all()
    assert error.norm() <= 0.05 * exact.norm()


def test_rounded_rows_serve_several_layers_and_keep_leading_dimensions() -> None:
    hidden, weight, bias = operands(n_rows=12)
    expected = fp8_linear(hidden, weight, bias)
    assert torch.equal(fp8_linear(hidden.view(3, 4, 64), weight, bias), expected.view(3, 4, 48))
    assert torch.equal(fp8_linear(fp8_rows(hidden), weight, bias), expected.bfloat16())
    rows = fp8_linear(fp8_rows(hidden), weight, bias, out_dtype=torch.float32)
    assert torch.equal(rows, expected)


def test_the_largest_entry_of_a_row_is_exact_and_nothing_overflows() -> None:
    hidden = torch.zeros(3, 16)
    hidden[0, 3] = 1e30
    hidden[1, 5] = -1e-30
    hidden[2] = 448.0
    weight = torch.eye(16)
    result = fp8_linear(hidden, weight)
    torch.testing.assert_close(result, hidden, rtol=1e-6, atol=0)


def test_zero_rows_give_the_bias_and_empty_batches_no_row() -> None:
    hidden, weight, bias = operands()
    hidden[2] = 0
    weight[5] = 0
    result = fp8_linear(hidden, weight, bias)
    assert torch.equal(result[2], bias)
    assert torch.equal(result[:, 5], bias[5].expand(len(hidden)))
    assert fp8_linear(hidden[:0], weight, bias).shape == (0, 48)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_give_nan_in_their_row_only(number: float) -> None:
    hidden, weight, bias = operands()
    expected = fp8_linear(hidden, weight, bias)
    hidden[3, 9] = number
    result = fp8_linear(hidden, weight, bias)
    assert result[3].isnan().all()
    others = [row for row in range(len(hidden)) if row != 3]
    assert torch.equal(result[others], expected[others])
    weight[4, 1] = number
    assert fp8_linear(hidden, weight, bias)[:, 4].isnan().all()


def test_torch_s_scaled_products_are_those_of_the_reference() -> None:
    hidden, weight, bias = operands(n_rows=32)
    rows, weight_rows = fp8_rows(hidden), fp8_rows(weight)
    try:
        product = scaled_fp8_products(
            rows.values,
            rows.scale,
            weight_rows.values,
            weight_rows.scale,
            bias.bfloat16(),
        )
    except (RuntimeError, ValueError) as error:
        pytest.skip(f"this torch has no scaled products on a CPU: {error}")
    expected = fp8_linear(hidden, weight, bias.bfloat16())
    allowed = 2.0**-7 * expected.abs().amax(dim=1, keepdim=True)
    assert product.dtype == torch.bfloat16
    assert ((product.float() - expected).abs() <= allowed).all()


def test_other_devices_and_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(
        ValueError, "fp8 needs a GPU .* got meta; leave", check_fp8_device, torch.device("meta")
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    refused(ValueError, r"got 8\.0 \(A100\); leave", check_fp8_device, torch.device("cuda"))
    hidden, weight, _ = operands(n_inputs=40)
    refused(ValueError, r"multiples of 16, got \[48, 40\]", fp8_linear, hidden, weight)


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        pytest.param(nn.Linear(32, 48), True, id="multiples of 16"),
        pytest.param(nn.Linear(32, 48).half(), True, id="fp16"),
        pytest.param(nn.Linear(40, 48), False, id="40 inputs"),
        pytest.param(nn.Linear(32, 2), False, id="2 outputs"),
        pytest.param(nn.Linear(32, 48).double(), False, id="fp64"),
        pytest.param(type("Quantized", (nn.Linear,), {})(32, 48), False, id="subclass"),
        pytest.param(nn.Identity(), False, id="no linear layer"),
    ],
)
def test_plain_layers_of_even_sizes_run_in_fp8(layer: nn.Module, expected: bool) -> None:
    assert has_fp8_sizes(layer) is expected


def accumulation_error(n_inputs: int) -> float:
    """Return the error of a product of fp8 numbers on a GPU, as a share of the row's largest.

    Hopper adds 32 products and the sum so far at a time. It first cuts all 33 terms off at 2^-13 of
    the largest. The errors are uniform and have the signs of their terms, which are random, so that
    the standard deviation of their sum grows with the root of their number. No one of 230,400
    normal errors is expected above six of these.

    Args:
        n_inputs: number of products of a sum.
    """
    n_terms = n_inputs * 33 / 32
    return float(6 * 2.0**-13 * (n_terms / 3) ** 0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_a_gpu_the_result_is_that_of_a_cpu(dtype: torch.dtype) -> None:
    hidden, weight, bias = operands(300, 1024, 768)
    hidden = hidden / 4  # results of the largest row are below 65,504, the largest number of fp16
    hidden, weight, bias = hidden.to(dtype), weight.to(dtype), bias.to(dtype)
    expected = fp8_linear(hidden, weight, bias, out_dtype=torch.float32)
    on_gpu: list[Any] = [tensor.cuda() for tensor in (hidden, weight, bias)]
    result = fp8_linear(*on_gpu)
    assert result.dtype == dtype
    largest = expected.abs().amax(dim=1, keepdim=True)
    # the GPU rounds the bias and the result to bf16
    rounding = 2.0**-8 * (expected.abs() + bias.float().abs())
    allowed = rounding + accumulation_error(1024) * largest
    share = (result.float().cpu() - expected).abs() / allowed
    row, column = divmod(int(share.argmax()), share.size(1))
    assert share.max() <= 1, (
        f"entry [{row}, {column}] is {result[row, column]}, and {expected[row, column]} on a CPU, "
        f"{share.max():.2f} times the allowed difference; {int((share > 1).sum())} entries differ"
    )
    assert fp8_linear(on_gpu[0][:0], on_gpu[1]).shape == (0, 768)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gpu_rounds_all_quotients_of_16_bit_numbers_as_a_cpu(dtype: torch.dtype) -> None:
    mantissas = 1 / torch.finfo(dtype).eps
    numbers = torch.arange(mantissas, 2 * mantissas) / mantissas
    entries = torch.cat([numbers * 2.0**-exponent for exponent in range(1, 13)])
    rows = torch.cat([numbers[:, None], entries.expand(len(numbers), -1)], dim=1).to(dtype)
    on_cpu, on_gpu = fp8_rows(rows), fp8_rows(rows.cuda())
    assert torch.equal(on_gpu.scale.cpu(), on_cpu.scale)
    assert torch.equal(on_gpu.values.cpu().view(torch.uint8), on_cpu.values.view(torch.uint8))
