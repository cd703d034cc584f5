"""Every MaxSim kernel builds for Ampere, Hopper and Blackwell without a GPU: no spills, and wgmma on Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tests.ops.cross_compile import Compiled, check_spills, compile_kernel
from tilefold.ops._shared._triton.offsets import int32_kernel
from tilefold.ops._shared._triton.releases import release
from tilefold.ops._shared.impl import triton_interpreted
from tilefold.ops.maxsim import configs
from tilefold.ops.maxsim._triton import norms, smooth
from tilefold.ops.maxsim._triton.backward import ddocuments_kernel, dqueries_kernel, dqueries_row_kernel
from tilefold.ops.maxsim._triton.forward import all_pairs_kernel, combine_kernel, listed_pairs_kernel
from tilefold.ops.maxsim._triton.row_queries import row_query_kernel
from tilefold.ops.maxsim._triton.stream import stream_kernel
from tilefold.ops.maxsim._triton.winner_lists import ddocuments_listed_kernel

pytestmark = pytest.mark.skipif(triton_interpreted(), reason="kernels are interpreted in this run, not compiled")

CAPABILITIES = (80, 90, 100)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SCALES = ["query_scale_ptr", "doc_scale_ptr", "scale_ptr", "dscore_ptr", "score_ptr", "part_ptr", "largest_ptr"]
INT32 = ["cu_q_ptr", "cu_d_ptr", "index_ptr", "row_query_ptr", "list_ptr"]
INT64 = ["order_ptr", "first_ptr"]
SIZES = ["Tq", "Td", "Nq", "Nd", "T", "length_q", "length_d", "tile_rows", "splits", "group", "longest", "stride_q",
         "stride_d", "tiles", "slices", "steps"]  # fmt: skip


def types_of(dtype: torch.dtype, saved: str = "*u16") -> dict[str, str]:
    element = f"*{NAMES[dtype]}"
    types = dict.fromkeys(["query_ptr", "doc_ptr", "doc_src", "dquery_ptr", "ddoc_ptr", "rows_ptr", "out_ptr"], element)
    types |= dict.fromkeys(SCALES, "*fp32") | dict.fromkeys(INT32, "*i32") | dict.fromkeys(INT64, "*i64")
    types |= dict.fromkeys(["query_mask_ptr", "doc_mask_ptr"], "*u8") | dict.fromkeys(SIZES, "i32")
    types |= dict.fromkeys(["temperature", "inverse_temperature", "divisor", "factor"], "fp32")
    return types | {"saved_ptr": saved, "grad_ptr": "*fp32"}


def check(compiled: Compiled, capability: int, tensor_cores: bool, spilled: int = 0) -> None:
    """``spilled``: bytes of a thread that are known to be put away outside the loops."""
    check_spills(compiled, spilled)
    assert compiled.shared <= SHARED_LIMIT[capability], f"too much shared memory: {compiled}"
    if capability == 90 and tensor_cores:
        assert compiled.wgmma > 0, f"the products do not use wgmma: {compiled}"


def forward_constants(
    config: configs.ForwardConfig, dim: int, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> dict[str, Any]:
    return {
        "D": dim, "BLOCK_Q": config.block_q, "BLOCK_T": config.block_t, "BLOCK_K": config.block_k,
        "UNIFORM_Q": True, "UNIFORM_D": True, "HAS_QMASK": False, "HAS_DMASK": False, "MASK_ZERO": False,
        "HAS_QSCALE": changes.get("NORMALIZED", False) or dtype == torch.int8,
        "HAS_SCALE": False, "SMOOTH": False, "WITH_SAVED": False, "NO_WINNER": 65535, "USE_TMA": config.use_tma,
        "PRECISION": config.precision, "INTEGER": dtype == torch.int8, "NORMALIZED": False,
    } | changes  # fmt: skip


VARIANTS = {
    "inference": {},
    "training": {"WITH_SAVED": True},
    "masked": {"WITH_SAVED": True, "HAS_QMASK": True, "HAS_DMASK": True},
    "everything": {"WITH_SAVED": True, "HAS_QMASK": True, "HAS_DMASK": True, "MASK_ZERO": True, "HAS_SCALE": True,
                   "NORMALIZED": True, "UNIFORM_Q": False, "UNIFORM_D": False},
    "smooth": {"WITH_SAVED": True, "SMOOTH": True, "HAS_DMASK": True},
}  # fmt: skip


# every variant with either number of query rows; fp32 shares the code of the others
FORWARD = [(torch.bfloat16, variant, 32 if i % 2 else 4096) for i, variant in enumerate(VARIANTS)]
FORWARD += [(torch.bfloat16, "inference", 32), (torch.float32, "everything", 4096)]


@pytest.mark.parametrize(("dtype", "variant", "rows"), FORWARD, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_forward_builds_without_spills(capability: int, dtype: torch.dtype, variant: str, rows: int) -> None:
    changes = VARIANTS[variant]
    winners_in = None if variant == "inference" else 300 if variant == "masked" else 1024
    config = configs.forward_config(divmod(capability, 10), dtype, 128, rows, False, winners_in)
    types = types_of(dtype, "*fp32" if variant == "smooth" else "*u16")
    if config.use_tma:
        types["doc_src"] = f"tensordesc<{NAMES[dtype]}[{config.block_t},{config.block_k}]>"
    constants = forward_constants(config, 128, **changes)
    direct = constants["UNIFORM_Q"]
    for kernel, own in (
        # packed queries are direct where one tile holds them all
        (all_pairs_kernel, {"LQ": 32 if direct else 0, "DIRECT": direct or rows == 32}),
        (listed_pairs_kernel, {"PAIRING": 2 if variant == "masked" else 1}),
    ):
        compiled = compile_kernel(kernel, types, constants | own, capability, config.num_warps, config.num_stages)
        # 8 bytes, before and after the loop, of one variant on 10.0
        check(compiled, capability, dtype != torch.float32, 8 if (capability, variant) == (100, "everything") else 0)


@pytest.mark.parametrize(("dim", "rows"), [(96, 32), (320, 4096), (768, 32)])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_forward_of_other_dimensions_builds_without_spills(capability: int, dim: int, rows: int) -> None:
    config = configs.forward_config(divmod(capability, 10), torch.bfloat16, dim, rows, tf32=False)
    types = types_of(torch.bfloat16)
    if config.use_tma:
        types["doc_src"] = f"tensordesc<bf16[{config.block_t},{config.block_k}]>"
    constants = forward_constants(config, dim, WITH_SAVED=True) | {"LQ": 32, "DIRECT": True}
    compiled = compile_kernel(all_pairs_kernel, types, constants, capability, config.num_warps, config.num_stages)
    check(compiled, capability, tensor_cores=True)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_forward_of_quantized_documents_builds_without_spills(capability: int, kind: torch.dtype) -> None:
    if kind != torch.int8 and capability < 89:
        pytest.skip("no fp8 there")
    query = torch.int8 if kind == torch.int8 else torch.float16
    for rows in (32, 4096):
        config = configs.forward_config(divmod(capability, 10), query, 128, rows, tf32=False)
        name = "i8" if kind == torch.int8 else "fp8e4nv"
        types = types_of(torch.float16) | {"query_ptr": "*i8" if kind == torch.int8 else "*fp16", "doc_src": f"*{name}"}
        if config.use_tma:
            types["doc_src"] = f"tensordesc<{name}[{config.block_t},{config.block_k}]>"
        constants = forward_constants(config, 128, query, HAS_SCALE=True) | {"LQ": 32, "DIRECT": True}
        compiled = compile_kernel(all_pairs_kernel, types, constants, capability, config.num_warps, config.num_stages)
        check(compiled, capability, tensor_cores=True)


STREAMS = [  # queries, documents, dimension, what is there
    ("bf16", "i8", 128, {}),
    ("bf16", "i8", 128, {"HAS_QMASK": True, "UNIFORM_D": False}),
    ("fp32", "i8", 96, {"HAS_DMASK": True, "MASK_ZERO": True, "UNIFORM_Q": False}),
    ("fp16", "fp8e4nv", 128, {"HAS_DMASK": True}),
]


@pytest.mark.parametrize(("query", "document", "dim", "changes"), STREAMS, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_stream_of_documents_builds_without_spills(
    capability: int, query: str, document: str, dim: int, changes: dict[str, Any]
) -> None:
    if document == "fp8e4nv" and capability < 89:
        pytest.skip("no fp8 there")
    dtype = torch.int8 if document == "i8" else torch.float16  # of the products
    stored = torch.int8 if document == "i8" else torch.float8_e4m3fn
    given = torch.float32 if query == "fp32" else torch.bfloat16
    for rows in (32, 64):
        config = configs.stream_config(divmod(capability, 10), stored, dim, rows, given)
        assert config is not None
        types = types_of(torch.bfloat16) | dict.fromkeys(["doc_src", "doc_ptr"], f"*{document}")
        types["query_ptr"] = f"*{query}"
        if config.use_tma:
            types["doc_src"] = f"tensordesc<{document}[{config.block_t},{config.block_k}]>"
        constants = forward_constants(config, dim, dtype, HAS_SCALE=True, PREFETCH=config.prefetch, **changes)
        constants = {name: value for name, value in constants.items() if name in stream_kernel.arg_names}
        compiled = compile_kernel(
            stream_kernel, types, constants, capability, config.num_warps, config.num_stages,
            registers=config.registers,
        )  # fmt: skip
        masked_with_39 = release() == (3, 9) and "HAS_QMASK" in changes  # puts away 144 bytes, none in the loop
        check(compiled, capability, tensor_cores=True, spilled=144 if masked_with_39 else 0)
        if document == "i8" and release() == (3, 6):  # all programs that are planned run at a time
            threads = 32 * config.num_warps * config.programs
            assert -(-compiled.registers // 8) * 8 * threads <= 65536, compiled
            assert (compiled.shared + 1024) * config.programs <= SHARED_LIMIT[capability], compiled


@pytest.mark.parametrize(
    ("dtype", "pairing"), [*((torch.bfloat16, p) for p in (0, 1, 2)), (torch.float32, 0), (torch.float32, 2)], ids=str
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_backward_builds_without_spills(capability: int, dtype: torch.dtype, pairing: int) -> None:
    config = configs.backward_config(divmod(capability, 10), dtype, tf32=False)
    types = types_of(dtype)
    uniform = pairing != 2
    common: dict[str, Any] = {"D": 128, "PAIRING": pairing, "UNIFORM_Q": uniform, "UNIFORM_D": uniform,
                              "NO_WINNER": 65535, "HAS_SCALE": not uniform}  # fmt: skip
    own = common | {"BLOCK_R": config.block_r, "BLOCK_D": config.block_d}
    compiled = compile_kernel(dqueries_kernel, types, own, capability, config.warps_q, config.stages_q)
    check(compiled, capability, tensor_cores=False)
    own = common | {"BLOCK_T": config.block_t, "BLOCK_E": config.block_e, "BLOCK_D": config.block_dd,
                    "HAS_LARGEST": uniform, "PRECISION": config.precision}  # fmt: skip
    if pairing:
        compiled = compile_kernel(ddocuments_kernel, types, own, capability, config.warps_d, config.stages_d)
    else:
        del own["PAIRING"]
        own["PROJECTS"] = False
        row = {name: own[name] for name in own if name in dqueries_row_kernel.arg_names}
        row |= {"BLOCK_N": config.block_n, "BLOCK_D": config.block_d}
        compiled = compile_kernel(dqueries_row_kernel, types, row, capability, config.warps_few, config.stages_q)
        check(compiled, capability, tensor_cores=False)
        own |= {"BLOCK_T": config.list_t, "BLOCK_E": config.list_e, "BLOCK_S": config.list_s_many, "ALIGNED": True,
                "CAPACITY": 2 * config.list_s_many}  # fmt: skip
        compiled = compile_kernel(
            ddocuments_listed_kernel, types, own, capability, config.list_warps, config.list_stages
        )
    check(compiled, capability, tensor_cores=dtype != torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_smooth_backward_builds_without_spills(capability: int, dtype: torch.dtype) -> None:
    config = configs.backward_config(divmod(capability, 10), dtype, tf32=False)
    types = types_of(dtype, "*fp32")
    for pairing, uniform in ((0, True), (2, False)):
        constants = {
            "D": 128, "PAIRING": pairing, "UNIFORM_Q": uniform, "UNIFORM_D": uniform, "HAS_QMASK": not uniform,
            "HAS_DMASK": not uniform, "HAS_SCALE": not uniform, "BLOCK_Q": config.smooth_r, "BLOCK_T": config.smooth_t,
            "BLOCK_K": config.smooth_k, "BLOCK_D": config.block_dd, "PRECISION": config.precision,
            "HAS_LARGEST": uniform,
        }  # fmt: skip
        for kernel in (smooth.smooth_dqueries_kernel, smooth.smooth_ddocuments_kernel):
            own = {name: value for name, value in constants.items() if name in kernel.arg_names}
            compiled = compile_kernel(
                kernel, types, own, capability, config.smooth_warps, config.smooth_stages,
                registers=config.smooth_registers,
            )  # fmt: skip
            check(compiled, capability, tensor_cores=dtype != torch.float32)


GRADIENTS = [  # kernel, pairing
    ("row", 0), ("rows", 2), ("rows", 0), ("rows", 1), ("documents", 2), ("documents", 1), ("listed", 0),
    ("smooth rows", 2), ("smooth rows", 0), ("smooth rows", 1),
    ("smooth documents", 2), ("smooth documents", 0), ("smooth documents", 1),
]  # fmt: skip
# two of these variants, documents of scaled rows on 9.0 and listed ones on 10.0, put away 16 bytes before their loops


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled and masked"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize("packed", ["qd", "d", "q"])
@pytest.mark.parametrize(("which", "pairing"), GRADIENTS, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_gradients_of_packed_tokens_build_without_spills(
    capability: int, which: str, pairing: int, packed: str, dtype: torch.dtype, scaled: bool
) -> None:
    config = configs.backward_config(divmod(capability, 10), dtype, tf32=False)
    kernel, warps, stages, blocks = gradient_kernel(which, config)
    types = types_of(dtype, "*fp32" if which.startswith("smooth") else "*u16")
    constants = {
        "D": 128, "PAIRING": pairing, "UNIFORM_Q": "q" not in packed, "UNIFORM_D": "d" not in packed,
        "HAS_SCALE": scaled, "HAS_QMASK": scaled, "HAS_DMASK": scaled, "HAS_LARGEST": True, "NO_WINNER": 65535,
        "PRECISION": config.precision, "PROJECTS": scaled and blocks["BLOCK_D"] >= 128,
    } | blocks  # fmt: skip
    own = {key: value for key, value in constants.items() if key in kernel.arg_names}
    registers = config.smooth_registers if which.startswith("smooth") else None
    compiled = compile_kernel(kernel, types, own, capability, warps, stages, registers=registers)
    check(compiled, capability, tensor_cores=False, spilled=16)


def gradient_kernel(which: str, config: configs.BackwardConfig) -> tuple[Any, int, int, dict[str, Any]]:
    """A kernel with its warps, stages and blocks."""
    few = {"BLOCK_N": config.block_n, "BLOCK_D": config.block_d}
    rows = {"BLOCK_R": config.block_r, "BLOCK_D": config.block_d}
    documents = {"BLOCK_T": config.block_t, "BLOCK_E": config.block_e, "BLOCK_D": config.block_dd}
    listed = {"BLOCK_T": config.list_t, "BLOCK_E": config.list_e, "BLOCK_S": config.list_s_many, "ALIGNED": True,
              "CAPACITY": 2 * config.list_s_many, "BLOCK_D": config.block_dd}  # fmt: skip
    smoothed = {"BLOCK_Q": config.smooth_r, "BLOCK_T": config.smooth_t, "BLOCK_K": config.smooth_k,
                "BLOCK_D": config.block_dd}  # fmt: skip
    return {
        "row": (dqueries_row_kernel, config.warps_few, config.stages_q, few),
        "rows": (dqueries_kernel, config.warps_q, config.stages_q, rows),
        "documents": (ddocuments_kernel, config.warps_d, config.stages_d, documents),
        "listed": (ddocuments_listed_kernel, config.list_warps, config.list_stages, listed),
        "smooth rows": (smooth.smooth_dqueries_kernel, config.smooth_warps, config.smooth_stages, smoothed),
        "smooth documents": (smooth.smooth_ddocuments_kernel, config.smooth_warps, config.smooth_stages, smoothed),
    }[which]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_small_kernels_build_without_spills(capability: int) -> None:
    types = types_of(torch.bfloat16) | {"count": "i32", "int64_ptr": "*i64", "int32_ptr": "*i32"}
    rows = {"D": 128, "BLOCK_R": 16, "BLOCK_D": 128}
    for kernel, constants in (
        (norms.quantize_kernel, rows),
        (norms.inverse_norms_kernel, rows),
        (norms.unit_gradient_kernel, rows),
        (combine_kernel, {"BLOCK": 256, "UNIFORM_Q": False}),
        (row_query_kernel, {"BLOCK": 256}),
        (int32_kernel, {"BLOCK": 1024}),
    ):
        check(compile_kernel(kernel, types, constants, capability, 4, 3), capability, tensor_cores=False)
