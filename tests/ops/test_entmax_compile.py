"""Every kernel of the entmax rooms builds for Ampere, Hopper and Blackwell without a GPU and without spills."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tests.ops.cross_compile import Compiled, compile_kernel
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.entmax._triton import rows
from tilefold.ops.entmax.configs import gradient_config, rows_config
from tilefold.ops.entmax_attention import configs

# the package exports functions of these names
forward = importlib.import_module("tilefold.ops.entmax_attention._triton.forward")
backward = importlib.import_module("tilefold.ops.entmax_attention._triton.backward")

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="kernels are interpreted in this run, not compiled")

CAPABILITIES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def check(compiled: Compiled, capability: int, tensor_cores: bool = False) -> None:
    assert compiled.stack == 0 and compiled.local_memory == 0, f"registers are spilled: {compiled}"
    assert compiled.shared <= SHARED_LIMIT[capability], f"too much shared memory: {compiled}"
    if capability == 90 and tensor_cores:
        assert compiled.wgmma > 0, f"the products do not use wgmma: {compiled}"


# shorter than a tile of warps, one row a program, the longest in registers (backward's and forward's), read again
LENGTHS = {"generic": (16, 200, 2048, 4096, 40_000), "square": (200, 40_000), "linear": (200, 40_000),
           "softmax": (200, 4096, 40_000)}  # fmt: skip


# Dtypes differ in more than width: a float is reduced straight from its load, which is another path of the compiler.
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_row_kernels_build_without_spills(capability: int, kind: str, dtype: str) -> None:
    types = dict.fromkeys(["x_ptr", "out_ptr", "dp_ptr", "p_ptr", "dx_ptr"], f"*{dtype}")
    types |= {"alpha_ptr": "*fp32", "dalpha_ptr": "*fp32", "support_ptr": "*i32", "R": "i32", "n": "i32",
              "alpha": "fp32"}  # fmt: skip
    for n in LENGTHS[kind] if capability == 90 else LENGTHS[kind][-2:]:
        needs = {"NEED_X": True, "NEED_ALPHA": kind == "generic"}
        for kernel, config, own in (
            (rows._forward_kernel, rows_config(n), {}),
            (rows._backward_kernel, gradient_config(n), needs),
        ):
            constants = {"BLOCK_R": config.block_r, "BLOCK_N": config.block_n, "KIND": kind,
                         "HAS_ALPHA": kind == "generic", "RESIDENT": config.resident} | own  # fmt: skip
            check(compile_kernel(kernel, types, constants, capability, config.num_warps, 3), capability)


STRIDES = frozenset(f"s{letter}_{axis}" for letter in "qkvodgw" for axis in "bhn")
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class ArgumentTypes(dict[str, str]):
    """Dtypes by argument name; what is not named is an integer."""

    def __missing__(self, name: str) -> str:
        return "i32"


def attention_types(name: str) -> ArgumentTypes:
    types = ArgumentTypes()
    operands = ("q", "k", "v", "out", "out2", "dout", "dq", "dk", "dv")
    types |= dict.fromkeys([f"{operand}_ptr" for operand in operands], f"*{name}")
    types |= dict.fromkeys(["stats_ptr", "maxima_ptr", "alpha_ptr", "delta_ptr", "dalpha_ptr"], "*fp32")
    integers = ("live", "list", "count", "cu_q", "cu_k", "batch", "start", "key_batch", "key_start")
    types |= dict.fromkeys([f"{integer}_ptr" for integer in integers], "*i32")
    types |= {"mask_ptr": "*u8", "seed_ptr": "*i64", "scale": "fp32", "constant": "fp32", "grown": "fp32"}
    return types


def attention_kernels(config: configs.AttentionConfig) -> dict[str, tuple[Any, ...]]:
    """Kernel, its own constants, warps and stages, by name."""
    block, launch = {"BLOCK": config.block}, (config.num_warps, config.num_stages)
    resident = {"BLOCK_M": config.block, "BLOCK_N": configs.RESIDENT_KEYS, "GRADIENT": True}
    return {
        "resident": (forward.resident_kernel, resident, config.num_warps, 1),
        "roots": (forward.roots_kernel, block, *launch),
        "output": (forward.output_kernel, block | {"GRADIENT": True}, *launch),
        "dq": (backward.dq_kernel, block | {"LISTS": True, "NEED_Q": True, "NEED_ALPHA": False}, *launch),
        "dkv": (
            backward.dkv_kernel,
            block | {"LISTS": True, "NEED_K": True, "NEED_V": True},
            config.num_warps,
            config.dkv_stages,
        ),
    }


@pytest.mark.parametrize("name", ["resident", "roots", "output", "dq", "dkv"])
@pytest.mark.parametrize(("capability", "dim", "kind"), [(80, 64, "square"), (90, 64, "square"), (90, 64, "generic"),
                                                         (90, 128, "square"), (100, 64, "square")])  # fmt: skip
def test_attention_kernels_build_without_spills(capability: int, dim: int, kind: str, name: str) -> None:
    if (capability, name) == (100, "resident"):
        pytest.skip("Triton 3.6 fails to build it, and configs.is_resident never takes it there")
    dtype = torch.bfloat16
    config = configs.config_for(dtype, dim, tf32=False, capability=divmod(capability, 10))
    kernel, own, warps, stages = attention_kernels(config)[name]
    flags = {
        "H": 12, "GROUP": 1, "D": dim, "BLOCK_D": dim, "KIND": kind, "HAS_ALPHA": kind == "generic", "CAUSAL": False,
        "WINDOW": False, "HAS_MASK": True, "PACKED": False, "DROPOUT": False, "PRECISION": config.precision,
    }  # fmt: skip
    compiled = compile_kernel(kernel, attention_types(NAMES[dtype]), flags | own, capability, warps, stages, STRIDES)
    check(compiled, capability, tensor_cores=True)
