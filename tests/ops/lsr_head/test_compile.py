"""Every LSR head kernel builds for Ampere, Hopper and Blackwell without a GPU: no spills, and wgmma on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tests.ops.cross_compile import check_spills, compile_kernel
from tilefold.ops._shared._triton.releases import lean_places, why_no_warp_roles
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops._shared.plan import Setting
from tilefold.ops.lsr_head import configs, plans
from tilefold.ops.lsr_head._triton import one_token, pack, quantize, sum_pooling
from tilefold.ops.lsr_head._triton.max_backward import count_kernel, dhidden_kernel, dweight_kernel, list_kernel
from tilefold.ops.lsr_head._triton.max_forward import combine_kernel, max_forward_kernel

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


def setting(capability: int, *given_up: str) -> Setting:
    return Setting(divmod(capability, 10), 132, tf32=False, aligned=True, given_up=frozenset(given_up))


def constants_of(table: Any, dtype: torch.dtype, capability: int, **facts: Any) -> dict[str, Any]:
    """Of kernels for the usual dimension, activation and tokens."""
    found = configs.constants_of(table, dtype, setting(capability), **facts)
    others = {"D": DIM, "ACTIVATION": "log1p_relu", "NO_WINNER": 65535, "SCALED": dtype == torch.float16}
    return others | found


def check(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, products: bool = False
) -> None:
    """Compile it; ``products`` run on tensor cores."""
    options = {"num_warps": 4, "num_stages": 3, "maxnreg": None} | constants
    warps, stages, registers = (options.pop(name) for name in ("num_warps", "num_stages", "maxnreg"))
    given = {name: value for name, value in options.items() if name in kernel.arg_names}
    compiled = compile_kernel(kernel, types, given, capability, warps, stages, registers=registers)
    check_spills(compiled, others=OTHER_RELEASES)
    assert compiled.shared <= SHARED_LIMIT[capability], f"too much shared memory: {compiled}"
    assert compiled.registers <= (registers or 255), f"the cap is not kept: {compiled}"
    if capability == 90 and products:
        assert compiled.wgmma > 0, f"the products do not use wgmma: {compiled}"


def check_forward(capability: int, dtype: torch.dtype, uniform: bool, *given_up: str, **options: Any) -> None:
    """Compile the forward kernel of max pooling that runs where others were given up."""
    config = configs.max_forward(dtype, setting(capability, *given_up))
    constants = config | {
        "D": DIM, "ACTIVATION": "log1p_relu", "HAS_BIAS": True, "HAS_POSITIONS": not uniform, "HAS_SCALE": False,
        "UNIFORM": uniform, "QUANTIZED": dtype == FP8, "WITH_WINNERS": False,
    } | options  # fmt: skip
    types, name = common_types(dtype), NAMES[dtype]
    if config["WARP_ROLES"]:
        types["weight_desc"] = hopper_descriptor(dtype, 64, config["BLOCK_K"])
        types["rows_desc"] = hopper_descriptor(dtype, config["BLOCK_T"], config["BLOCK_K"])
        constants |= {"STAGES": constants.pop("num_stages"), "LEAN_PLACES": lean_places()}
        check(hopper.max_forward_hopper_kernel, types, constants, capability, products=True)
        return
    for matrix, block in (("weight_src", config["BLOCK_V"]), ("rows_src", config["BLOCK_T"])):
        types[matrix] = f"tensordesc<{name}[{block},{config['BLOCK_K']}]>" if config["USE_TMA"] else f"*{name}"
    check(max_forward_kernel, types, constants, capability, products=dtype != torch.float32)


def hopper_descriptor(dtype: torch.dtype, rows: int, columns: int) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], hopper.ELEMENTS[dtype])
    return f"tensordesc<{NAMES[dtype]}[{rows}, {columns}],{layout!r}>"


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "ragged"])
@pytest.mark.parametrize("with_winners", [True, False], ids=["winners", "scores_only"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_max_forward_builds_without_spills(capability, dtype, with_winners, uniform):
    check_forward(capability, dtype, uniform, configs.BY_ROLES, WITH_WINNERS=with_winners)


@pytest.mark.skipif(
    why_no_warp_roles() is not None, reason=f"the portable kernel is in its place: {why_no_warp_roles()}"
)
@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "ragged"])
@pytest.mark.parametrize("with_winners", [True, False], ids=["winners", "scores_only"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=NAMES.get)
def test_the_hopper_forward_builds_without_spills(dtype, with_winners, uniform):
    check_forward(90, dtype, uniform, WITH_WINNERS=with_winners)


@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "ragged"])
@pytest.mark.parametrize("capability", [89, 90, 100])
def test_the_quantized_forward_builds_without_spills(capability, uniform):
    check(quantize.quantize_rows_kernel, common_types(FP8), quantize.row_constants(1024) | {"D": DIM}, capability)
    check_forward(capability, FP8, uniform, configs.BY_ROLES)
    if capability == 90 and why_no_warp_roles() is None:
        check_forward(capability, FP8, uniform)


@pytest.mark.parametrize("activation", ["log1p_log1p_relu", "softplus"])
def test_the_other_activations_build_without_spills(activation):
    options = {"ACTIVATION": activation, "HAS_SCALE": True, "WITH_WINNERS": True}
    check_forward(90, torch.bfloat16, False, configs.BY_ROLES, **options)


def backwards() -> Iterator[tuple[int, torch.dtype, int, str]]:
    """Each compute capability, dtype and batch that has constants of its own, small or large."""
    for offsets in ("*i32", "*i64"):
        for capability in CAPABILITIES:
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                found = [constants_of(configs.DWEIGHT, dtype, capability, batch=batch) for batch in (16, 64)]
                yield capability, dtype, 16, offsets
                if found[0] != found[1]:
                    yield capability, dtype, 64, offsets


@pytest.mark.parametrize(("capability", "dtype", "batch", "offsets"), list(backwards()))
def test_max_backward_builds_without_spills(capability, dtype, batch, offsets):
    types = common_types(dtype) | {"cu_ptr": offsets}
    lists = types | ({"grad_ptr": "*fp32"} if dtype == torch.float16 else {})
    scan = constants_of(configs.SCAN, dtype, capability) | {"ALWAYS_ACTIVE": False}
    dhidden = constants_of(configs.DHIDDEN, dtype, capability) | {"BLOCK_R": scan["BLOCK_R"]}
    dweight = constants_of(configs.DWEIGHT, dtype, capability, batch=batch)
    dweight |= {"ALWAYS_ACTIVE": False, "NEED_WEIGHT": True, "NEED_BIAS": True, "ACCUMULATE": False}
    for added_up in (False, True):
        check(dhidden_kernel, lists, dhidden | {"ADDED_UP": added_up}, capability)
    for uniform in (True, False) if offsets == "*i32" else (False,):
        layout = {"UNIFORM": uniform}
        check(count_kernel, types, scan | layout, capability)
        for added_up in (False, True):
            check(list_kernel, types, scan | layout | {"ADDED_UP": added_up}, capability)
        check(dweight_kernel, types, dweight | layout, capability)


@pytest.mark.parametrize("offsets", [None, "*i32", "*i64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sum_pooling_builds_without_spills(capability, dtype, offsets):
    constants = constants_of(configs.SUM, dtype, capability)
    constants |= {"HAS_BIAS": True, "HAS_MASK": offsets is None, "UNIFORM": offsets is None, "MEAN": True}
    types = common_types(dtype) | {"cu_ptr": offsets or "*i32"}
    gradient = constants | {"CLEAN": offsets is None, "NEED_BIAS": True}
    for kernel, given in ((sum_pooling.sum_forward_kernel, constants), (sum_pooling.dlogits_kernel, gradient)):
        check(kernel, types, given, capability, products=dtype != torch.float32)
    needs = {"NEED_HIDDEN": ["drows_ptr", "dhidden_ptr"], "NEED_WEIGHT": ["product_ptr", "dweight_ptr"],
             "NEED_BIAS": ["sum_ptr", "dbias_ptr"]}  # fmt: skip
    for needed in (list(needs), *([name] for name in needs)):
        absent = [pointer for name, pointers in needs.items() if name not in needed for pointer in pointers]
        stored = {name: name in needed for name in needs} | dict.fromkeys(absent)
        stored |= {"D": DIM, "HAS_UNIT": False, "BLOCK": plans.STORE_BLOCK, "BLOCK_B": plans.STORE_BIAS[0],
                   "BLOCK_V": plans.STORE_BIAS[1]}  # fmt: skip
        check(sum_pooling.store_gradients_kernel, types, stored, capability)


@pytest.mark.parametrize("offsets", ["*i32", "*i64"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_packing_builds_without_spills(capability, offsets):
    types = common_types(torch.bfloat16) | {"cu_ptr": offsets}
    check(sum_pooling.check_offsets_kernel, types, {}, capability)
    rows = {"D": DIM, "BLOCK_ROWS": pack.BLOCK_ROWS, "BLOCK_D": pack.BLOCK_D, "GROUP": 16,
            "BLOCK_EMPTY": pack.BLOCK_EMPTY, "WITH_WINNERS": True, "NO_WINNER": 65535}  # fmt: skip
    masked = {"SCAN": pack.SCAN, "HAS_MASK": True, **rows}
    for kernel, constants in (
        (pack.count_kernel, {"SCAN": pack.SCAN}),
        (pack.copy_padded_kernel, masked | {"BLOCK_B": 0, "BLOCK_S": 0}),
        (pack.copy_padded_kernel, masked | {"BLOCK_B": 4, "BLOCK_S": 1024}),
        (pack.copy_padded_kernel, masked | {"BLOCK_B": 256, "BLOCK_S": 16}),
        (pack.copy_packed_kernel, {"SCAN_B": 64, **rows}),
    ):
        check(kernel, types, constants, capability)


ONE_TOKEN_LAYOUTS = {"masked": (False, True, "*i32"), "packed": (True, False, "*i32"), "long": (True, False, "*i64"),
                     "rows": (False, False, "*i32")}  # fmt: skip


@pytest.mark.parametrize("batch", [16, 1024])
@pytest.mark.parametrize("layout", ONE_TOKEN_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_token_builds_without_spills(capability, dtype, layout, batch):
    packed, masked, offsets = ONE_TOKEN_LAYOUTS[layout]
    types = common_types(dtype) | {"cu_ptr": offsets}
    flags: dict[str, Any] = {
        "PACKED": packed,
        "MASKED": masked,
        "LAST": True,
        "HAS_BIAS": True,
        "CLEAR": plans.CLEAR_BLOCK,
    }
    flags |= {"ACTIVATION": "none"} if layout == "rows" else {}  # of few rows, slopes are multiplied
    forward = constants_of(configs.ONE_TOKEN, dtype, capability) | flags
    forward["BLOCK_B"] = min(forward["BLOCK_B"], batch)
    finds = {"FIND": plans.SHORT_FIND_BLOCK if masked else 0, "WITH_WINNERS": masked}
    gradient = constants_of(configs.ONE_TOKEN_GRADIENTS, dtype, capability) | flags
    gradient |= {"NEED_WEIGHT": True, "NEED_BIAS": True}
    stored = {"D": DIM, "BLOCK_B": 4, "BLOCK_D": 256, "NO_WINNER": 65535} | flags
    found = {"LAST": True, "NO_WINNER": 65535, "BLOCK": plans.FIND_BLOCK}
    for kernel, constants in (
        (one_token.find_kernel, found),
        (one_token.forward_kernel, forward | finds),
        (one_token.forward_kernel, forward | {"FIND": 0, "WITH_WINNERS": False}),
        (one_token.weight_gradient_kernel, gradient | {"num_warps": plans.WEIGHT_WARPS}),
        (one_token.split_gradient_kernel, gradient | {"num_warps": plans.HIDDEN_WARPS}),
        (one_token.store_rows_kernel, stored),
    ):
        check(kernel, types, constants, capability)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_combining_splits_builds_without_spills(capability):
    constants = {
        "BLOCK_T": 256, "BLOCK": 1024, "ACTIVATION": "log1p_relu", "HAS_BIAS": True, "HAS_POSITIONS": True,
        "WITH_WINNERS": True, "UNIFORM": False, "QUANTIZED": False,
    }  # fmt: skip
    check(combine_kernel, common_types(torch.bfloat16), constants, capability)
