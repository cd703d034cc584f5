"""The ordered product builds for Ampere, Hopper and Blackwell without a GPU, and spills nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import release, triton_interpreted
from tests.ops.cross_compile import CAPABILITIES, check, compile_kernel

pytestmark = [
    pytest.mark.skipif(
        triton_interpreted(),
        reason="kernels are interpreted in this run, not compiled",
    ),
    pytest.mark.skipif(release() == (3, 4), reason="its Gluon has no asynchronous copies"),
]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_ordered_product_spills_nothing(capability: int) -> None:
    from tilefold.ops._shared._triton.ordered_product import ordered_product_kernel  # needs Gluon

    compiled = compile_kernel(
        ordered_product_kernel,
        types={
            "rows_ptr": "*fp32",
            "weight_ptr": "*fp32",
            "bias_ptr": "*fp32",
            "out_ptr": "*fp32",
            "M": "i32",
            "N": "i32",
            "K": "i32",
        },
        constants={"HAS_BIAS": True},
        capability=capability,
        num_warps=1,
        num_stages=1,
        divisible=frozenset({"N", "K"}),
    )
    check(compiled, capability)
