"""Every kernel of the entmax rooms builds for Ampere, Hopper and Blackwell without a GPU and without spills."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from tests.ops.cross_compile import Compiled, compile_kernel
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.entmax._triton import rows
from tilefold.ops.entmax.configs import gradient_config, rows_config

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="kernels are interpreted in this run, not compiled")

CAPABILITIES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def check(compiled: Compiled, capability: int, tensor_cores: bool = False) -> None:
    assert compiled.stack == 0 and compiled.local_memory == 0, f"registers are spilled: {compiled}"
    assert compiled.shared <= SHARED_LIMIT[capability], f"too much shared memory: {compiled}"
    if capability == 90 and tensor_cores:
        assert compiled.wgmma > 0, f"the products do not use wgmma: {compiled}"


@pytest.mark.parametrize("kind", ["softmax", "square", "linear", "generic"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_row_kernels_build_without_spills(capability: int, kind: str) -> None:
    types = dict.fromkeys(["x_ptr", "out_ptr", "dp_ptr", "p_ptr", "dx_ptr"], "*bf16")
    types |= {"alpha_ptr": "*fp32", "dalpha_ptr": "*fp32", "support_ptr": "*i32", "R": "i32", "n": "i32",
              "alpha": "fp32"}  # fmt: skip
    for n in (16, 128, 4096, 65536) if kind != "softmax" else (8192,):
        config = rows_config(n)
        tile = {"BLOCK_R": config.block_r, "BLOCK_N": config.block_n, "KIND": kind, "HAS_ALPHA": kind == "generic"}
        compiled = compile_kernel(rows._forward_kernel, types, tile | {"RESIDENT": config.resident}, capability,
                                  config.num_warps, 3)  # fmt: skip
        check(compiled, capability)
        config = gradient_config(n)
        tile |= {"BLOCK_R": config.block_r, "BLOCK_N": config.block_n}
        needs = {"NEED_X": True, "NEED_ALPHA": kind == "generic"}
        check(compile_kernel(rows._backward_kernel, types, tile | needs, capability, config.num_warps, 3), capability)
