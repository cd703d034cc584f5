"""Every MaxSim kernel builds for Ampere, Hopper and Blackwell without a GPU: no spills, and wgmma
on Hopper.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import release, triton_interpreted
from tests.ops.base import Launch, MaxSimOptions, MaxSimSaved, MaxSimTensors, Setting
from tests.ops.base import maxsim_outputs as outputs
from tests.ops.cross_compile import (
    CAPABILITIES,
    NAMES,
    SHARED_LIMIT,
    Compiled,
    check,
    compile_kernel,
)
from tilefold.ops._shared._triton import releases
from tilefold.ops.maxsim import configs, plans

pytestmark = pytest.mark.skipif(
    triton_interpreted(),
    reason="kernels are interpreted in this run, not compiled",
)

OPERANDS = ["queries_ptr", "documents_ptr", "documents_src", "dquery_ptr", "ddoc_ptr", "rows_ptr"]
FP32 = [
    "query_factors_ptr",
    "document_factors_ptr",
    "scale_ptr",
    "dscores_ptr",
    "scores_ptr",
    "parts_ptr",
    "largest_ptr",
    "grad_ptr",
]
INT32 = [
    "cu_queries_ptr",
    "cu_documents_ptr",
    "pairs_ptr",
    "row_query_ptr",
    "lists_ptr",
    "ends_ptr",
]
FLOATS = ["temperature", "inverse_temperature", "divisor", "factor"]


def planned(
    capability: int,
    dtype: torch.dtype,
    gradient: bool = False,
    *,
    rows: int = 32,
    length: int = 1024,
    dim: int = 128,
    pairing: str = "all",
    packed: str = "",
    masked: str = "",
    zero: bool = False,
    temperature: float = 0.0,
    normalize: bool = False,
    training: bool = False,
    stored: torch.dtype | None = None,
) -> list[Launch]:
    """What a call, or its gradient, launches: of documents of ``length`` tokens and ``rows`` query
    tokens, by 32.
    """

    def side(
        count: int,
        tokens: int,
        name: str,
        kind: torch.dtype,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        shape = (count * tokens,) if name in packed else (count, tokens)
        mask = torch.empty(shape, dtype=torch.uint8, device="meta") if name in masked else None
        offsets = (
            torch.empty(count + 1, dtype=torch.int32, device="meta") if name in packed else None
        )
        return torch.empty(*shape, dim, dtype=kind, device="meta"), mask, offsets

    queries, query_mask, cu_q = (
        side(rows // 32, 32, "q", dtype) if rows % 32 == 0 else side(1, rows, "q", dtype)
    )
    documents, document_mask, cu_d = side(rows // 32 or 1, length, "d", stored or dtype)
    pairs = torch.empty(9, 2, dtype=torch.int32, device="meta") if pairing == "index" else None
    scale = None if stored is None else torch.empty(documents.shape[:-1], device="meta")
    tensors = MaxSimTensors(queries, documents, query_mask, document_mask, cu_q, cu_d, pairs, scale)
    options = MaxSimOptions(pairing, zero, temperature, normalize, False, 32)
    setting = Setting(
        divmod(capability, 10), 132, tf32=False, aligned=True, failed_kernels=frozenset()
    )
    if gradient:
        scores, *kept = (
            torch.empty(x.shape, dtype=x.dtype, device="meta")
            for x in outputs(tensors, options, True)
        )
        plan = plans.backward(
            scores,
            MaxSimSaved(*tensors[:7], *kept),
            options,
            (True, True),
            setting,
        )
    else:
        plan = plans.forward(tensors, options, training, setting)
    return [step for step in plan.steps if isinstance(step, Launch)]


def build(
    launch: Launch,
    capability: int,
    dtype: torch.dtype,
    spilled: int = 0,
    looped: float = 0.0,
    **changes: str,
) -> Compiled:
    """Compile; ``spilled``: bytes of a thread that are known to be put away outside the loops."""
    constants = dict(launch.constants)
    warps, stages, registers = (
        constants.pop(each, None) for each in ("num_warps", "num_stages", "maxnreg")
    )
    smooth = constants.get("SMOOTH") or launch.kernel.__name__.startswith("smooth")
    types = dict.fromkeys(launch.kernel.arg_names, "i32") | dict.fromkeys(
        OPERANDS,
        f"*{NAMES[dtype]}",
    )
    types |= (
        dict.fromkeys(FP32, "*fp32") | dict.fromkeys(INT32, "*i32") | dict.fromkeys(FLOATS, "fp32")
    )
    types |= {
        "query_mask_ptr": "*u8",
        "document_mask_ptr": "*u8",
        "saved_ptr": "*fp32" if smooth else "*u16",
    }
    types |= {
        "order_ptr": "*i64",
        "first_ptr": "*i64",
        "int64_ptr": "*i64",
        "out_ptr": f"*{NAMES[dtype]}",
    } | changes
    if constants.get("USE_TMA"):
        types["documents_src"] = (
            f"tensordesc<{types['documents_ptr'][1:]}[{constants['BLOCK_T']},{constants['BLOCK_K']}]>"
        )
    compiled = compile_kernel(
        launch.kernel,
        types,
        constants,
        capability,
        warps,
        stages,
        registers=registers,
    )
    products = "PRECISION" in constants and dtype != torch.float32
    check(
        compiled,
        capability,
        wgmma=products,
        name=launch.kernel.__name__,
        most=spilled,
        looped=looped,
    )
    return compiled


EVERYTHING: dict[str, Any] = {"masked": "qd", "zero": True, "normalize": True, "packed": "qd"}
FORWARD: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.bfloat16, {"rows": 4096}),
    (torch.bfloat16, {"rows": 32, "training": True}),
    (torch.bfloat16, {"rows": 4096, "training": True, "masked": "qd", "length": 300}),
    (torch.bfloat16, {"rows": 32, "training": True} | EVERYTHING),
    (torch.bfloat16, {"rows": 4096, "training": True, "temperature": 0.5, "masked": "d"}),
    (torch.bfloat16, {"rows": 32}),
    (torch.float32, {"rows": 4096, "training": True} | EVERYTHING),
    (torch.bfloat16, {"rows": 32, "training": True, "dim": 96}),
    (torch.bfloat16, {"rows": 4096, "training": True, "dim": 320}),
    (torch.bfloat16, {"rows": 32, "training": True, "dim": 768}),
]


@pytest.mark.parametrize(("dtype", "asked"), FORWARD, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_forward_builds_without_spills(
    capability: int,
    dtype: torch.dtype,
    asked: dict[str, Any],
) -> None:
    for pairing in ("all", "index" if "masked" in asked else "aligned"):
        for launch in planned(capability, dtype, pairing=pairing, **asked):
            if launch.kernel.__name__ in ("all_pairs_kernel", "listed_pairs_kernel"):
                # 8 bytes, before and after the loop, of one variant on 10.0; in the loop of another
                # on 8.0
                put_away = release() in ((3, 7), (3, 9)) and (capability, asked.get("dim")) == (
                    80,
                    768,
                )
                looped = 1 / 70 if put_away else 0.0
                build(
                    launch,
                    capability,
                    dtype,
                    8 if capability == 100 and "normalize" in asked else 0,
                    looped,
                )


QUANTIZED: list[tuple[torch.dtype, torch.dtype, dict[str, Any]]] = [
    (torch.bfloat16, torch.int8, {}),
    (torch.bfloat16, torch.int8, {"masked": "q", "packed": "d"}),
    (torch.float32, torch.int8, {"dim": 96, "masked": "d", "zero": True, "packed": "q"}),
    (torch.float16, torch.float8_e4m3fn, {"masked": "d"}),
]


@pytest.mark.parametrize(("dtype", "stored", "asked"), QUANTIZED, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_forward_of_quantized_documents_builds_without_spills(
    capability: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    asked: dict[str, Any],
) -> None:
    if stored == torch.float8_e4m3fn and capability < 89:
        pytest.skip("no fp8 there")
    document = f"*{NAMES[stored]}"
    for rows in (32, 64):
        *_, launch = planned(capability, dtype, rows=rows, stored=stored, **asked)
        masked_with_39 = release() == (3, 9) and "q" in asked.get(
            "masked",
            "",
        )  # puts away 144 bytes, none in the loop
        spilled = 144 if masked_with_39 else 0
        types = {
            "documents_src": document,
            "documents_ptr": document,
            "queries_ptr": f"*{NAMES[dtype]}",
        }
        compiled = build(launch, capability, torch.bfloat16, spilled, **types)
        config = configs.stream_config(
            divmod(capability, 10),
            stored,
            asked.get("dim", 128),
            rows,
            dtype,
        )
        if stored == torch.int8 and release() == (3, 6) and config is not None:
            threads = (
                32 * config["num_warps"] * config["PROGRAMS"]
            )  # all programs that are planned run at a time
            assert -(-compiled.registers // 8) * 8 * threads <= 65536, compiled
            assert (compiled.shared + 1024) * config["PROGRAMS"] <= SHARED_LIMIT[capability], (
                compiled
            )
    if not asked or stored == torch.float8_e4m3fn:
        *_, launch = planned(capability, dtype, rows=4096, stored=stored)
        query = document if stored == torch.int8 else f"*{NAMES[dtype]}"
        shared = (
            launch.kernel.__name__ == "shared_pass_kernel"
        )  # puts away 48 bytes before and after its loop
        build(
            launch,
            capability,
            torch.bfloat16,
            48 * shared,
            documents_src=document,
            documents_ptr=document,
            queries_ptr=query,
        )
        assert shared == (capability == 90 and stored == torch.int8)


@pytest.mark.skipif(
    releases.why_no_warp_roles() is not None,
    reason="this release has no warp roles",
)
@pytest.mark.parametrize("masked", ["", "qd"])
@pytest.mark.parametrize(
    ("queries", "n_tokens"),
    [
        pytest.param((1, 32), 64, id="1 x 32, tiles of 32 documents"),
        pytest.param((1, 32), 67, id="1 x 32, tiles of 16 documents"),
        pytest.param((2, 30), 67, id="2 x 30"),
        pytest.param((4, 20), 67, id="4 x 20"),
        pytest.param((16, 32), 67, id="16 x 32"),
        pytest.param((12, 9), 67, id="12 x 9"),
    ],
)
def test_the_pass_by_warps_with_roles_builds_without_spills(
    queries: tuple[int, int],
    n_tokens: int,
    masked: str,
) -> None:
    from triton.experimental.gluon import language as gl

    meta, documents = torch.device("meta"), (1 << 17, n_tokens)
    masks = (
        [torch.empty(shape, dtype=torch.uint8, device=meta) for shape in (queries, documents)]
        if masked
        else [None] * 2
    )
    given = [
        torch.empty(*shape, 128, dtype=kind, device=meta)
        for shape, kind in ((queries, torch.bfloat16), (documents, torch.int8))
    ]
    tensors = MaxSimTensors(
        given[0],
        given[1],
        masks[0],
        masks[1],
        None,
        None,
        None,
        torch.empty(documents, device=meta),
    )
    setting = Setting((9, 0), 132, tf32=False, aligned=True, failed_kernels=frozenset())
    options = MaxSimOptions("all", False, 0.0, False, False, 32)
    *_, launch = plans.forward(tensors, options, False, setting).steps
    assert isinstance(launch, Launch) and launch.kernel.__name__ == "shared_hopper_kernel"
    box = [2, 8, 128]  # tokens, documents and dimensions
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int8)
    types = {"documents_src": f"tensordesc<i8{box},{layout!r}>", "queries_ptr": "*i8"}
    compiled = build(
        launch,
        90,
        torch.int8,
        96 if masked else 24,
        **types,
    )  # put away where a document ends
    assert compiled.wgmma > 0


@pytest.mark.parametrize(
    ("n_queries", "n_tokens", "kernel"),
    [
        pytest.param(1, 127, "shared_hopper_kernel", id="one query and short documents"),
        pytest.param(1, 128, "stream_kernel", id="one query and long documents"),
        pytest.param(2, 1030, "shared_hopper_kernel", id="two queries and long documents"),
    ],
)
@pytest.mark.skipif(
    releases.why_no_warp_roles() is not None,
    reason="this release has no warp roles",
)
def test_one_query_reads_long_documents_as_a_stream(
    n_queries: int,
    n_tokens: int,
    kernel: str,
) -> None:
    documents = (1 << 17, n_tokens)
    with torch.device("meta"):
        tensors = MaxSimTensors(
            torch.empty(n_queries, 32, 128, dtype=torch.bfloat16),
            torch.empty(*documents, 128, dtype=torch.int8),
            None,
            None,
            None,
            None,
            None,
            torch.empty(documents),
        )
    setting = Setting((9, 0), 132, tf32=False, aligned=True, failed_kernels=frozenset())
    options = MaxSimOptions("all", False, 0.0, False, False, 32)
    plan = plans.forward(tensors, options, False, setting)
    kernels = [step.kernel.__name__ for step in plan.steps if isinstance(step, Launch)]
    assert kernel in kernels


GRADIENTS = [
    ("maximum", "all", 32),
    ("maximum", "all", 16384),
    ("maximum", "aligned", 32),
    ("maximum", "index", 32),
    ("smooth", "all", 32),
    ("smooth", "aligned", 32),
    ("smooth", "index", 32),
]


LAYOUTS = [("", False), ("", True), ("qd", True), ("q", False), ("d", False)]


@pytest.mark.parametrize(("packed", "scaled"), LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=NAMES.get)
@pytest.mark.parametrize(("name", "pairing", "rows"), GRADIENTS, ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_gradients_build_without_spills(
    capability: int,
    name: str,
    pairing: str,
    rows: int,
    dtype: torch.dtype,
    packed: str,
    scaled: bool,
) -> None:
    asked: dict[str, Any] = {"masked": "qd", "normalize": True} if scaled else {}
    temperature = 0.5 if name == "smooth" else 0.0
    for launch in planned(
        capability,
        dtype,
        True,
        rows=rows,
        pairing=pairing,
        packed=packed,
        temperature=temperature,
        **asked,
    ):
        own = "ddoc_ptr" if "documents" in launch.kernel.__name__ else "dquery_ptr"
        unit = (
            {own: "*fp32"} if scaled and not launch.constants.get("PROJECTS") else {}
        )  # gradients of unit vectors
        if "d" in packed and not temperature:
            unit["saved_ptr"] = "*i32"  # winners of documents of any length
        # some put away 16 bytes before their loops, documents of scaled rows on 9.0 and listed ones
        # on 10.0, and 40 those of packed pairs of an index, on 9.0 and 10.0
        spilled, looped = (
            40
            if packed and pairing == "index" and capability >= 90
            else 16
            if packed or scaled
            else 0,
            0.0,
        )
        if (capability, dtype, rows, launch.kernel.__name__) == (
            90,
            torch.float32,
            32,
            "ddocuments_listed_kernel",
        ):
            spilled, looped = 16, 1 / 600
        build(launch, capability, dtype, spilled, looped, **unit)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_small_kernels_build_without_spills(capability: int) -> None:
    launches = planned(capability, torch.bfloat16, stored=torch.int8, rows=4096, packed="q")
    launches += planned(capability, torch.bfloat16, normalize=True)
    launches += planned(
        capability,
        torch.bfloat16,
        True,
        normalize=True,
        packed="q",
        pairing="index",
        dim=320,
    )
    names = {launch.kernel.__name__ for launch in launches}
    small = {"quantize_kernel", "inverse_norms_kernel", "unit_gradient_kernel", "combine_kernel"}
    assert small <= names
    for launch in launches:
        if launch.kernel.__name__ in small:  # 8 bytes of gradients of unit vectors on 10.0 with 3.7
            looped = 1 / 100 if (release(), capability) == ((3, 7), 100) else 0.0
            build(launch, capability, torch.bfloat16, looped=looped)
