"""The token scatter's kernels build for Ampere, Hopper and Blackwell without a GPU, and spill
nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import triton_interpreted
from tests.ops.base import lookup
from tests.ops.cross_compile import CAPABILITIES, check, compile_kernel
from tests.ops.launching import gather_kernel, scatter_kernel
from tilefold.ops.token_scatter.plans import CONFIGS, SCAN

pytestmark = pytest.mark.skipif(
    triton_interpreted(),
    reason="kernels are interpreted in this run, not compiled",
)

SHORT, MEDIUM, LONG = (
    lookup(CONFIGS, length=length, capability=(9, 0)) for length in (128, 512, 513)
)
# (configuration, reduction, packed, dtype of weights and scores, of a table of its own, activation)
VARIANTS = {
    "short-max-padded-bf16": (SHORT, "max", False, "bf16", None, "relu"),
    "medium-max-packed-fp32": (MEDIUM, "max", True, "fp32", None, "log1p_log1p_relu"),
    "long-max-padded-fp32": (LONG, "max", False, "fp32", None, "softplus"),
    "long-max-padded-bf16": (LONG, "max", False, "bf16", None, "log1p_relu"),
    "long-max-packed-bf16": (LONG, "max", True, "bf16", "i32", "relu"),
    "short-sum-packed-fp16": (SHORT, "sum", True, "fp16", None, "relu"),
    "medium-sum-padded-fp32": (MEDIUM, "sum", False, "fp32", None, "none"),
    "long-sum-padded-bf16": (LONG, "sum", False, "bf16", None, "softplus"),
    "long-sum-packed-fp32": (LONG, "sum", True, "fp32", None, "log1p_log1p_relu"),
}
TYPES = dict.fromkeys(["B", "S", "T", "V", "stride_db", "stride_dv"], "i32") | {
    "mask_ptr": "*i64",
    "ids_ptr": "*i64",
    "cu_ptr": "*i32",
    "slot_ptr": "*i64",
    "slot_position_ptr": "*i32",
    "counted_ptr": "*u8",
}
FLOATS = ("weights_ptr", "out_ptr", "dscores_ptr", "dweights_ptr")


def build(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    capability: int,
    num_warps: int,
) -> None:
    compiled = compile_kernel(kernel, types, constants, capability, num_warps, num_stages=3)
    check(compiled, capability)
    assert compiled.shared <= 16 * 1024, f"too much shared memory: {compiled}"


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_scatter_builds_without_spills(capability: int, variant: tuple[Any, ...]) -> None:
    config, reduce, packed, dtype, table, activation = variant
    types = TYPES | dict.fromkeys(FLOATS, f"*{dtype}") | {"table_ptr": f"*{table or dtype}"}
    constants = {
        "SUM": reduce == "sum",
        "ACTIVATION": activation,
        "IGNORE": (0, 1, 2, 3),
        "IGNORED": 4,
        "HAS_MASK": not packed,
        "PACKED": packed,
        "WITH_COUNTED": True,
        "BLOCK": config["BLOCK"],
        "SCAN": SCAN,
    }
    build(scatter_kernel, types, constants, capability, config["num_warps"])


@pytest.mark.parametrize(
    ("config", "packed", "dtype", "activation"),
    [(SHORT, False, "bf16", "relu"), (LONG, True, "fp32", "log1p_log1p_relu")],
    ids=["short-padded-bf16", "long-packed-fp32"],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_gradient_builds_without_spills(
    capability: int,
    config: dict[str, int],
    packed: bool,
    dtype: str,
    activation: str,
) -> None:
    types = TYPES | dict.fromkeys(FLOATS, f"*{dtype}")
    constants = {"ACTIVATION": activation, "PACKED": packed, "BLOCK": config["BLOCK"], "SCAN": SCAN}
    build(gather_kernel, types, constants, capability, config["num_warps"])
