"""fp32 products run in TF32 where PyTorch's own would, whichever of its switches said so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.base import tf32_allowed
from tilefold.ops import entmax_attention, lsr_head, maxsim
from tilefold.ops._shared.internals import cpu_matmul_precision, matmul_precision
from tilefold.ops._shared.row_groups import grouped_linear

MATMUL = torch.backends.cuda.matmul
NEW = hasattr(MATMUL, "fp32_precision")
new = pytest.mark.skipif(not NEW, reason="torch 2.8 has the old switches only")


def generic(precision: str) -> None:
    torch.backends.fp32_precision = precision  # type: ignore[attr-defined]


def matmul(precision: str) -> None:
    MATMUL.fp32_precision = precision


def legacy(allowed: bool) -> None:
    MATMUL.allow_tf32 = allowed


@pytest.fixture(autouse=True)
def switches_as_they_were() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    if NEW:
        generic("none")
        matmul("none")
    else:
        legacy(False)


SWITCHED: list[tuple[str, bool, list[tuple[Callable[..., None], object]]]] = [
    ("untouched", False, []),
    ("allow_tf32", True, [(legacy, True)]),
    ("allow_tf32 and not", False, [(legacy, True), (legacy, False)]),
    ("high", True, [(torch.set_float32_matmul_precision, "high")]),
    ("medium", True, [(torch.set_float32_matmul_precision, "medium")]),
    (
        "high and highest",
        False,
        [(torch.set_float32_matmul_precision, p) for p in ("high", "highest")],
    ),
]
SWITCHED_NEW: list[tuple[str, bool, list[tuple[Callable[..., None], object]]]] = [
    ("matmul tf32", True, [(matmul, "tf32")]),
    ("matmul ieee", False, [(matmul, "ieee")]),
    ("all tf32", True, [(generic, "tf32")]),
    ("all tf32, matmul ieee", False, [(generic, "tf32"), (matmul, "ieee")]),
    ("all ieee, matmul tf32", True, [(generic, "ieee"), (matmul, "tf32")]),
    ("all tf32, matmul none", True, [(generic, "tf32"), (matmul, "none")]),
    ("old, then new", False, [(legacy, True), (matmul, "ieee")]),
    ("new, then old", False, [(matmul, "tf32"), (legacy, False)]),
]
every_switch = pytest.mark.parametrize(
    ("allowed", "settings"),
    [pytest.param(allowed, settings, id=name) for name, allowed, settings in SWITCHED]
    + [
        pytest.param(allowed, settings, id=name, marks=new)
        for name, allowed, settings in SWITCHED_NEW
    ],
)


@every_switch
def test_every_switch_is_heeded(
    allowed: bool,
    settings: list[tuple[Callable[..., None], object]],
) -> None:
    for switch, value in settings:
        switch(value)
    assert tf32_allowed(torch.float32) is allowed
    assert not any(
        map(
            tf32_allowed,
            (torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int8),
        ),
    )


@every_switch
def test_rows_are_grouped_with_every_switch(
    allowed: bool,
    settings: list[tuple[Callable[..., None], object]],
) -> None:
    for switch, value in settings:
        switch(value)
    rows, weight = torch.randn(3, 16), torch.randn(8, 16)
    assert torch.equal(grouped_linear(rows, weight)[:1], grouped_linear(rows[:1], weight))
    assert (matmul_precision() == "tf32") is allowed


@new
@pytest.mark.parametrize("precision", ["ieee", "bf16"])
def test_the_precision_of_products_on_a_cpu_is_read(precision: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = precision  # type: ignore[attr-defined]
    try:
        assert cpu_matmul_precision() == precision
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"  # type: ignore[attr-defined]


def head(x: Tensor, **options: str) -> Tensor:
    return lsr_head(x, x[0], **options)


def late(x: Tensor, **options: str) -> Tensor:
    return maxsim(x, x, **options)


def attend(x: Tensor, **options: str) -> Any:
    return entmax_attention(x[None], x[None], x[None], **options)


@pytest.mark.gpu
@every_switch
@pytest.mark.parametrize("operator", [head, late, attend], ids=lambda operator: operator.__name__)
def test_products_are_rounded_to_tf32_where_a_switch_allows_it(
    operator: Callable[..., Tensor],
    allowed: bool,
    settings: list[tuple[Callable[..., None], object]],
) -> None:
    x = torch.full(
        (2, 64, 64),
        1 + 2.0**-12,
        device="cuda",
    )  # TF32 makes 1 of it, which no sum averages out
    exact = operator(x.double().cpu(), impl="tiled")
    for _ in range(2):  # calls of these shapes are remembered as they are without a switch
        operator(x, impl="triton")
    for switch, value in settings:
        switch(value)
    for _ in range(3):
        error = float((operator(x, impl="triton").cpu() - exact).abs().max() / exact.abs().max())
        assert (error > 1e-5) is allowed, error


@pytest.mark.gpu
def test_gradients_are_rounded_to_tf32_where_it_is_allowed_when_they_run() -> None:
    x = torch.full(
        (2, 64, 64),
        1 + 2.0**-12,
        device="cuda",
        requires_grad=True,
    )  # TF32 makes 1 of it
    dout = torch.full((1, 2, 64, 64), 1 + 2.0**-12, device="cuda")
    exact = x.detach().double().cpu().requires_grad_()
    (expected,) = torch.autograd.grad(attend(exact, impl="tiled"), exact, dout.double().cpu())
    out = attend(x, impl="triton")
    for allowed in (True, False, True, False):
        legacy(allowed)
        (actual,) = torch.autograd.grad(out, x, dout, retain_graph=True)
        error = float((actual.cpu() - expected).abs().max() / expected.abs().max())
        # the gradient of v is a weighted mean of dout: TF32 takes 2**-12 off it, fp32 less than 64
        # roundings of 2**-24
        assert (error > 2.0**-14) is allowed, error
