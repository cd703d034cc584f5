"""The ordered product builds for Ampere, Hopper and Blackwell without a GPU, and spills nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import triton_interpreted
from tests.ops.cross_compile import CAPABILITIES, check, compile_kernel
from tests.ops.launching import ordered_product_kernels

pytestmark = pytest.mark.skipif(
    triton_interpreted(),
    reason="kernels are interpreted in this run, not compiled",
)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_ordered_product_spills_nothing(capability: int) -> None:
    compiled = compile_kernel(
        ordered_product_kernels.ordered_product_kernel,
        types={
            "rows_ptr": "*fp32",
            "weight_ptr": "*fp32",
            "bias_ptr": "*fp32",
            "out_ptr": "*fp32",
            "M": "i32",
            "N": "i32",
            "K": "i32",
        },
        constants={
            "ROWS": ordered_product_kernels.BLOCK_ROWS,
            "COLUMNS": ordered_product_kernels.BLOCK_COLUMNS,
            "HAS_BIAS": True,
        },
        capability=capability,
        num_warps=1,
        num_stages=3,
        divisible=frozenset({"N", "K"}),
    )
    check(compiled, capability)
