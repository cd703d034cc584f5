"""Every LSR head kernel builds for Ampere, Hopper and Blackwell without a GPU: no spills, and wgmma on Hopper."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tests.ops.cross_compile import Compiled, check_spills, compile_kernel
from tilefold.ops._shared._triton.releases import lean_places, why_no_warp_roles
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.lsr_head import configs
from tilefold.ops.lsr_head._plans_one_token import CLEAR_BLOCK, FIND_BLOCK, SHORT_FIND_BLOCK
from tilefold.ops.lsr_head._plans_sum import CHECK_BLOCK, STORE_BIAS, STORE_BLOCK
from tilefold.ops.lsr_head._triton import one_token, pack, quantize, sum_pooling
from tilefold.ops.lsr_head._triton.max_backward import _count_kernel, _dhidden_kernel, _dweight_kernel, _list_kernel
from tilefold.ops.lsr_head._triton.max_forward import _combine_kernel, _max_forward_kernel

if why_no_warp_roles() is None:
    from triton.experimental.gluon import language as gl

    from tilefold.ops.lsr_head._triton import max_forward_hopper as hopper

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="kernels are interpreted in this run, not compiled")

CAPABILITIES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
FP8 = torch.float8_e4m3fn
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", FP8: "fp8e4nv"}
DIM = 768
OTHER_RELEASES = 16  # bytes that others than 3.6 may put away, once for many rounds of a loop


def common_types(dtype: torch.dtype) -> dict[str, str]:
    element = f"*{NAMES[torch.bfloat16 if dtype == FP8 else dtype]}"
    types = dict.fromkeys(
        ["weight_ptr", "rows_ptr", "bias_ptr", "out_ptr", "dscores_ptr", "scores_ptr", "dhidden_ptr", "dweight_ptr",
         "hidden_ptr", "grad_ptr", "dlogits_ptr", "clean_ptr"],
        element,
    )  # fmt: skip
    types |= dict.fromkeys(["offset_ptr", "position_ptr", "cu_ptr", "ok_ptr", "count_ptr", "code_ptr", "first_ptr",
                            "length_ptr", "part_winner_ptr"], "*i32")  # fmt: skip
    types |= {"code64_ptr": "*i64", "values_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    types |= dict.fromkeys(["drows_ptr", "product_ptr", "sum_ptr", "unit_ptr"], "*fp32")
    types |= dict.fromkeys(["n_hidden", "n_weight", "n_bias", "stride_sum"], "i32")
    types |= dict.fromkeys(["B", "V", "T", "N", "S", "D", "uniform_length", "length", "splits", "multiple", "SPLITS",
                            "split_v", "stride_db", "stride_dv", "stride_out", "v_start", "v_end"], "i32")  # fmt: skip
    types |= {"winner_ptr": "*u16", "part_ptr": "*fp32", "dbias_ptr": "*fp32", "place_ptr": "*i64", "mask_ptr": "*u8",
              "row_scale_ptr": "*fp32", "weight_scale_ptr": "*fp32", "logit_scale": "fp32"}  # fmt: skip
    return types


def check(compiled: Compiled, capability: int, tensor_cores: bool) -> None:
    check_spills(compiled, others=OTHER_RELEASES)
    assert compiled.shared <= SHARED_LIMIT[capability], f"too much shared memory: {compiled}"
    if capability == 90 and tensor_cores:
        assert compiled.wgmma > 0, f"the products do not use wgmma: {compiled}"


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "ragged"])
@pytest.mark.parametrize("with_winners", [True, False], ids=["winners", "scores_only"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_max_forward_builds_without_spills(capability, dtype, with_winners, uniform):
    config = configs.max_forward_config_for(divmod(capability, 10), dtype, tf32=False)
    if config.warp_roles:
        config = configs.NEXT_BEST[config]  # what runs there where that cannot be built
    check_portable_forward(config, capability, dtype, with_winners=with_winners, uniform=uniform)


def check_portable_forward(config, capability, dtype, *, with_winners, uniform):
    name = NAMES[dtype]
    types = common_types(dtype)
    if config.use_tma:
        types["weight_src"] = f"tensordesc<{name}[{config.block_v},{config.block_k}]>"
        types["rows_src"] = f"tensordesc<{name}[{config.block_t},{config.block_k}]>"
    else:
        types["weight_src"] = types["rows_src"] = f"*{name}"
    constants = {
        "D": DIM, "BLOCK_V": config.block_v, "BLOCK_T": config.block_t, "BLOCK_K": config.block_k,
        "GROUP": config.group, "ACTIVATION": "log1p_relu", "HAS_BIAS": True, "HAS_POSITIONS": not uniform,
        "HAS_SCALE": False, "WITH_WINNERS": with_winners, "UNIFORM": uniform, "USE_TMA": config.use_tma,
        "PRECISION": config.precision, "QUANTIZED": dtype == FP8,
    }  # fmt: skip
    kernel = _max_forward_kernel
    compiled = compile_kernel(kernel, types, constants, capability, config.num_warps, config.num_stages)
    check(compiled, capability, tensor_cores=dtype != torch.float32)


@pytest.mark.skipif(
    why_no_warp_roles() is not None, reason=f"the portable kernel is in its place: {why_no_warp_roles()}"
)
@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "ragged"])
@pytest.mark.parametrize("with_winners", [True, False], ids=["winners", "scores_only"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=NAMES.get)
def test_the_hopper_forward_builds_without_spills(dtype, with_winners, uniform):
    check_hopper_forward(configs.HOPPER_16BIT, dtype, with_winners=with_winners, uniform=uniform)


def check_hopper_forward(config, dtype, *, with_winners, uniform):
    types = common_types(dtype)
    types["weight_desc"] = hopper_descriptor(dtype, 64, config.block_k)
    types["rows_desc"] = hopper_descriptor(dtype, config.block_t, config.block_k)
    constants = {
        "D": DIM, "BLOCK_T": config.block_t, "BLOCK_K": config.block_k, "GROUP": config.group,
        "STAGES": config.num_stages, "ACTIVATION": "log1p_relu", "HAS_BIAS": True, "HAS_POSITIONS": not uniform,
        "HAS_SCALE": False, "WITH_WINNERS": with_winners, "UNIFORM": uniform, "QUANTIZED": dtype == FP8,
        "LEAN_PLACES": lean_places(),
    }  # fmt: skip
    compiled = compile_kernel(hopper.max_forward_hopper_kernel, types, constants, 90, config.num_warps, 3)
    check(compiled, 90, tensor_cores=True)


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "ragged"])
@pytest.mark.parametrize("capability", [89, 90, 100])
def test_the_quantized_forward_builds_without_spills(capability, uniform):
    rounding = {"D": DIM, "BLOCK_ROWS": quantize.BLOCK_ROWS, "BLOCK_D": 1024}
    check(
        compile_kernel(quantize._quantize_rows_kernel, common_types(FP8), rounding, capability, 8, 3),
        capability,
        tensor_cores=False,
    )
    portable = configs.ADA_8BIT if capability == 89 else configs.TMA_8BIT
    check_portable_forward(portable, capability, FP8, with_winners=False, uniform=uniform)
    if capability == 90 and why_no_warp_roles() is None:
        check_hopper_forward(configs.HOPPER_8BIT, FP8, with_winners=False, uniform=uniform)


def hopper_descriptor(dtype: torch.dtype, rows: int, columns: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], hopper.ELEMENTS[dtype])
    return f"tensordesc<{NAMES[dtype]}[{rows}, {columns}],{layout!r}>"


@pytest.mark.parametrize("activation", ["log1p_log1p_relu", "softplus"])
def test_the_other_activations_build_without_spills(activation):
    config = configs.TMA_16BIT
    types = common_types(torch.bfloat16)
    types["weight_src"] = f"tensordesc<bf16[{config.block_v},{config.block_k}]>"
    types["rows_src"] = f"tensordesc<bf16[{config.block_t},{config.block_k}]>"
    constants = {
        "D": DIM, "BLOCK_V": config.block_v, "BLOCK_T": config.block_t, "BLOCK_K": config.block_k,
        "GROUP": config.group, "ACTIVATION": activation, "HAS_BIAS": True, "HAS_POSITIONS": True,
        "HAS_SCALE": True, "WITH_WINNERS": True, "UNIFORM": False, "USE_TMA": True, "PRECISION": "ieee",
        "QUANTIZED": False,
    }  # fmt: skip
    kernel = _max_forward_kernel
    check(compile_kernel(kernel, types, constants, 90, config.num_warps, config.num_stages), 90, tensor_cores=True)


def backwards():
    """Each compute capability, dtype and configuration that is launched there, for small and for large batches."""
    for capability in CAPABILITIES:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            for batch in (16, 64):
                yield capability, dtype, configs.max_backward_config(divmod(capability, 10), dtype, batch)


BACKWARDS = [(*case, offsets) for offsets in ("*i32", "*i64") for case in dict.fromkeys(backwards())]


@pytest.mark.parametrize(("capability", "dtype", "config", "offsets"), BACKWARDS)
def test_max_backward_builds_without_spills(capability, dtype, config, offsets):
    types = common_types(dtype) | {"cu_ptr": offsets}
    lists = types | ({"grad_ptr": "*fp32"} if dtype == torch.float16 else {})
    scaled = {"SCALED": dtype == torch.float16}
    flags = {"ALWAYS_ACTIVE": False, "NO_WINNER": 65535}
    scan = {"BLOCK_R": config.block_r, "BLOCK": config.scan_block, **flags}
    dhidden = {"D": DIM, "BLOCK_R": config.block_r, "BLOCK_D": config.dhidden_block_d, "BLOCK_E": config.block_e,
               "PRECISION": config.precision, **scaled}  # fmt: skip
    dweight = {"D": DIM, "BLOCK_B": config.dweight_block_b, "BLOCK_V": config.dweight_block_v,
               "BLOCK_D": config.dweight_block_d, "BLOCK_E": config.dweight_block_e, "ACTIVATION": "log1p_relu",
               "NEED_WEIGHT": True, "NEED_BIAS": True, "ACCUMULATE": False, "PRECISION": config.precision,
               **scaled, **flags}  # fmt: skip
    for added_up in (False, True):
        check(compile_kernel(_dhidden_kernel, lists, dhidden | {"ADDED_UP": added_up}, capability, config.dhidden_warps,
                             config.dhidden_stages), capability, tensor_cores=False)  # fmt: skip
    for uniform in (True, False) if offsets == "*i32" else (False,):
        layout = {"UNIFORM": uniform}
        for kernel, constants, warps, stages in (
            (_count_kernel, scan, config.scan_warps, 3),
            (_list_kernel, scan | {"ACTIVATION": "log1p_relu", "ADDED_UP": False}, config.scan_warps, 3),
            (_list_kernel, scan | {"ACTIVATION": "log1p_relu", "ADDED_UP": True}, config.scan_warps, 3),
        ):
            compiled = compile_kernel(kernel, types, constants | layout, capability, warps, stages)
            check(compiled, capability, tensor_cores=False)
        compiled = compile_kernel(_dweight_kernel, types, dweight | layout, capability, config.dweight_warps,
                                  config.dweight_stages, registers=config.dweight_registers)  # fmt: skip
        check(compiled, capability, tensor_cores=False)
        assert compiled.registers <= (config.dweight_registers or 255), f"the cap is not kept: {compiled}"


@pytest.mark.parametrize("offsets", [None, "*i32", "*i64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sum_pooling_builds_without_spills(capability, dtype, offsets):
    config = configs.sum_config(divmod(capability, 10), dtype, tf32=False)
    constants = {
        "D": DIM, "BLOCK_V": config.block_v, "BLOCK_T": config.block_t, "BLOCK_K": config.block_k,
        "ACTIVATION": "log1p_relu", "HAS_BIAS": True, "HAS_MASK": offsets is None, "UNIFORM": offsets is None,
        "MEAN": True,
        "PRECISION": config.precision,
    }  # fmt: skip
    types = common_types(dtype) | {"cu_ptr": offsets or "*i32"}
    gradient = constants | {"CLEAN": offsets is None, "NEED_BIAS": True}
    for kernel, given in ((sum_pooling._sum_forward_kernel, constants), (sum_pooling._dlogits_kernel, gradient)):
        compiled = compile_kernel(kernel, types, given, capability, config.num_warps, config.num_stages)
        check(compiled, capability, tensor_cores=dtype != torch.float32)
    needs = {"NEED_HIDDEN": ["drows_ptr", "dhidden_ptr"], "NEED_WEIGHT": ["product_ptr", "dweight_ptr"],
             "NEED_BIAS": ["sum_ptr", "dbias_ptr"]}  # fmt: skip
    for needed in (list(needs), *([name] for name in needs)):
        absent = [pointer for name, pointers in needs.items() if name not in needed for pointer in pointers]
        stored = {name: name in needed for name in needs} | dict.fromkeys(absent)
        stored |= {"D": DIM, "HAS_UNIT": False, "BLOCK": STORE_BLOCK, "BLOCK_B": STORE_BIAS[0],
                   "BLOCK_V": STORE_BIAS[1]}  # fmt: skip
        compiled = compile_kernel(sum_pooling._store_gradients_kernel, types, stored, capability, 4, 3)
        check(compiled, capability, tensor_cores=False)


@pytest.mark.parametrize("offsets", ["*i32", "*i64"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_packing_builds_without_spills(capability, offsets):
    types = common_types(torch.bfloat16) | {"cu_ptr": offsets}
    checking = compile_kernel(sum_pooling._check_offsets_kernel, types, {"BLOCK": CHECK_BLOCK}, capability, 4, 3)
    check(checking, capability, tensor_cores=False)
    rows = {"D": DIM, "BLOCK_ROWS": pack.BLOCK_ROWS, "BLOCK_D": pack.BLOCK_D, "GROUP": configs.HOPPER_16BIT.group,
            "BLOCK_EMPTY": pack.BLOCK_EMPTY, "WITH_WINNERS": True, "NO_WINNER": 65535}  # fmt: skip
    masked = {"SCAN": pack.SCAN, "HAS_MASK": True, **rows}
    for kernel, constants in (
        (pack._count_kernel, {"SCAN": pack.SCAN}),
        (pack._copy_padded_kernel, masked | {"BLOCK_B": 0, "BLOCK_S": 0}),
        (pack._copy_padded_kernel, masked | {"BLOCK_B": 4, "BLOCK_S": 1024}),
        (pack._copy_padded_kernel, masked | {"BLOCK_B": 256, "BLOCK_S": 16}),
        (pack._copy_packed_kernel, {"SCAN_B": 64, **rows}),
    ):
        check(compile_kernel(kernel, types, constants, capability, 4, 3), capability, tensor_cores=False)


ONE_TOKEN_LAYOUTS = {"masked": (False, True, "*i32"), "packed": (True, False, "*i32"), "long": (True, False, "*i64"),
                     "rows": (False, False, "*i32")}  # fmt: skip


@pytest.mark.parametrize("batch", [16, 1024])
@pytest.mark.parametrize("layout", ONE_TOKEN_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_token_builds_without_spills(capability, dtype, layout, batch):
    config = configs.one_token_config(divmod(capability, 10), dtype, tf32=False)
    packed, masked, offsets = ONE_TOKEN_LAYOUTS[layout]
    types = common_types(dtype) | {"cu_ptr": offsets}
    flags = {"PACKED": packed, "MASKED": masked, "LAST": True, "NO_WINNER": 65535}
    activation = {"ACTIVATION": "none" if layout == "rows" else "log1p_relu"}  # of few rows, slopes are multiplied
    tile = {"D": DIM, "BLOCK_B": config.rows(batch), "PRECISION": config.precision} | flags | activation
    forward = tile | {"BLOCK_V": config.block_v, "BLOCK_K": config.block_k, "HAS_BIAS": True}
    finds = {"FIND": SHORT_FIND_BLOCK if masked else 0, "WITH_WINNERS": masked}
    scaled = {"SCALED": dtype == torch.float16}
    gradient = tile | {"BLOCK_B": config.gradient_rows, "BLOCK_V": config.gradient_block_v} | scaled
    gradient |= {"BLOCK_D": config.gradient_block_d}
    stored = {"D": DIM, "BLOCK_B": 4, "BLOCK_D": 256} | flags
    needed = {"NEED_WEIGHT": True, "NEED_BIAS": True}
    for kernel, constants, warps, stages in (
        (one_token._find_kernel, {"LAST": True, "NO_WINNER": 65535, "BLOCK": FIND_BLOCK}, 4, 3),
        (one_token._forward_kernel, forward | finds, config.num_warps, config.num_stages),
        (one_token._forward_kernel, forward | {"FIND": 0, "WITH_WINNERS": False}, config.num_warps, config.num_stages),
        (one_token._weight_gradient_kernel, gradient | needed, config.weight_warps, config.gradient_stages),
        (
            one_token._split_gradient_kernel,
            gradient | {"CLEAR": CLEAR_BLOCK},
            config.hidden_warps,
            config.gradient_stages,
        ),
        (one_token._store_rows_kernel, stored, 4, 3),
    ):
        check(compile_kernel(kernel, types, constants, capability, warps, stages), capability, tensor_cores=False)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_combining_splits_builds_without_spills(capability):
    constants = {
        "BLOCK_T": 256, "BLOCK": 1024, "ACTIVATION": "log1p_relu", "HAS_BIAS": True, "HAS_POSITIONS": True,
        "WITH_WINNERS": True, "UNIFORM": False, "QUANTIZED": False,
    }  # fmt: skip
    compiled = compile_kernel(_combine_kernel, common_types(torch.bfloat16), constants, capability, 4, 3)
    check(compiled, capability, tensor_cores=False)


def test_configurations_say_what_they_are():
    assert dataclasses.asdict(configs.HOPPER_16BIT)["warp_roles"]
    assert dataclasses.asdict(configs.TMA_16BIT)["use_tma"]
    assert not dataclasses.asdict(configs.AMPERE_16BIT)["use_tma"]
