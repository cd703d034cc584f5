"""Every kernel of the entmax rooms builds for Ampere, Hopper and Blackwell without a GPU and
without spills.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import release, triton_interpreted
from tests.ops.base import AttentionOptions as Options
from tests.ops.base import AttentionSaved, AttentionTensors, Launch, Setting
from tests.ops.cross_compile import (
    CAPABILITIES,
    NAMES,
    SHARED_LIMIT,
    Compiled,
    check,
    check_spills,
    compile_kernel,
)
from tests.ops.launching import entmax_kernels as rows
from tilefold.ops.entmax.plans import rows_config
from tilefold.ops.entmax_attention import configs, plans
from tilefold.ops.entmax_attention.api import live_shape

pytestmark = pytest.mark.skipif(
    triton_interpreted(),
    reason="kernels are interpreted in this run, not compiled",
)

# shorter than a tile of warps, one row a program, the longest in registers (backward's and
# forward's), read again
LENGTHS = {"generic": (16, 200, 2048, 40_000, 4096), "gentle": (200, 4096), "steep": (200, 40_000),
           "entmax15": (200, 40_000), "sparsemax": (200, 40_000),
           "softmax": (200, 4096, 40_000)}  # fmt: skip
ANY_ALPHA = ("generic", "generic16")  # forms that alphas of a tensor take


def form(kind: str, dtype: str) -> str:
    """The form that kernels of 16 bits take of an alpha in a tensor."""
    return "generic16" if kind == "generic" and dtype != "fp32" else kind


# Dtypes differ in more than width: a float is reduced straight from its load, which is another path
# of the compiler.
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_row_kernels_build_without_spills(capability: int, kind: str, dtype: str) -> None:
    types = dict.fromkeys(["x_ptr", "out_ptr", "dp_ptr", "p_ptr", "dx_ptr"], f"*{dtype}")
    types |= {
        "alpha_ptr": "*fp32",
        "dalpha_ptr": "*fp32",
        "support_ptr": "*i32",
        "R": "i32",
        "n": "i32",
        "alpha_value": "fp32",
    }
    for n in LENGTHS[kind] if capability == 90 else LENGTHS[kind][-1:]:
        needs = {"NEED_X": True, "NEED_ALPHA": kind == "generic"}
        for kernel, config, own in (
            (rows._forward_kernel, rows_config(n), {"TOLERANCE": 1e-6}),
            (rows._backward_kernel, rows_config(n, gradient=True), needs),
        ):
            warps = config.pop("num_warps")
            constants = config | {"KIND": form(kind, dtype), "HAS_ALPHA": kind == "generic"} | own
            spilled = 16 if (capability, kind) == (100, "steep") else 0  # outside the loops
            check(
                compile_kernel(kernel, types, constants, capability, warps, 3),
                capability,
                most=spilled,
            )


STRIDES = frozenset(f"s{letter}_{axis}" for letter in "qkvodgw" for axis in "bhn")


class ArgumentTypes(dict[str, str]):
    """Dtypes by argument name; what is not named is an integer."""

    def __missing__(self, name: str) -> str:
        return "i32"


def attention_types(name: str) -> ArgumentTypes:
    types = ArgumentTypes()
    operands = ("q", "k", "v", "out", "out2", "dout", "dq", "dk", "dv")
    types |= dict.fromkeys([f"{operand}_ptr" for operand in operands], f"*{name}")
    types |= dict.fromkeys(
        ["stats_ptr", "maxima_ptr", "alpha_ptr", "delta_ptr", "terms_ptr"],
        "*fp32",
    )
    integers = (
        "live",
        "key_list",
        "key_count",
        "query_list",
        "query_count",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "q_batch",
        "q_start",
        "k_batch",
        "k_start",
    )
    types |= dict.fromkeys([f"{integer}_ptr" for integer in integers], "*i32")
    types |= {
        "key_padding_mask_ptr": "*u8",
        "seed_ptr": "*i64",
        "scale": "fp32",
        "alpha_value": "fp32",
        "keep_scale": "fp32",
    }
    return types


KERNELS = ["resident", "roots", "inference", "output", "dq", "dkv"]
# Bytes of stack that are known, and documented: fp32 through three TF32 products, whose halves of
# the queries stay in registers. On 8.0 the output kernel spills 56 bytes at head dimension 128 in
# 16 bits.
KNOWN_SPILLS: dict[tuple[str | int, ...], int] = {
    ("fp32", 64): 96,
    ("fp32", 128): 48,
    ("fp32", 256): 1024 if release() == (3, 4) else 960,
}
KNOWN_SPILLS |= {("bf16", 64, 80): 8, ("bf16", 128, 80): 56, ("bf16", 256): 48}
END_SPILLS = 24  # of two accumulators on 9.0, where programs share a multiprocessor: put away outside the loops
MASK_SPILLS = {(3, 7): 80, (3, 8): 80, (3, 9): 160}.get(
    release(),
    72,
)  # and with a mask, or a count of the support, in any kernel
# bytes, and the share of a loop, of a form that looks at alpha as it runs
ANY_ALPHA_SPILLS = (392, 1 / 28) if release() == (3, 4) else (MASK_SPILLS, 1 / 40)
# and with the five sums of the gradient of alpha, in three programs
ALPHA_SPILLS, ALPHA_LOOPED = {(3, 4): 144, (3, 7): 136}.get(release(), 128), 1 / 32
MASK_LOOPED = 1 / 32 if release() == (3, 9) else 1 / 40  # of the instructions of a loop
TILE_LOOPED = 1 / 4  # of a loop in fp32 at 256
# 3.4 keeps more addresses of dkv's operands: on 8.0 8 of the 672 instructions of its loop, in fp32
# 1 of 1475
LOOPED = {
    ((3, 4), "bf16", 80, "dkv"): 1 / 64,
    ((3, 4), "fp32", 90, "dkv"): 1e-3,
    ((3, 4), "fp32", 100, "dkv"): 1e-3,
}


ALPHAS = {
    "softmax": 1.0,
    "entmax15": 1.5,
    "sparsemax": 2.0,
    "gentle": 1.25,
    "steep": 1.75,
}  # others: a tensor


def way_config(dtype: torch.dtype, dim: int, capability: int) -> Mapping[str, Any]:
    return configs.lookup_config(dtype, dim, divmod(capability, 10))


def is_built(dtype: torch.dtype, dim: int, capability: int) -> bool:
    """Whether the resident kernel is ever launched: Triton 3.6 fails to build it for 10.0."""
    return bool(way_config(dtype, dim, capability)["max_resident_keys"] > 0)


def launched(
    name: str,
    dtype: torch.dtype,
    dim: int,
    kind: str,
    capability: int,
    keys: int,
    beside: str = "",
    **asked: bool,
) -> Launch:
    """The kernel, or the one ``beside`` it, as a call of so many queries and keys launches it."""
    shape = (keys, 12, dim) if asked.get("packed") else (1, 12, keys, dim)
    q = torch.empty(shape, dtype=dtype, device="meta")
    alpha = torch.empty(12, device="meta") if kind in ANY_ALPHA else None
    mask = torch.empty(1, keys, dtype=torch.uint8, device="meta") if asked.get("mask") else None
    offsets = torch.empty(2, dtype=torch.int32, device="meta") if asked.get("packed") else None
    tensors = AttentionTensors(q, q, q, alpha, mask, offsets, offsets, None)
    scale = 0.125 if dim == 64 else 0.3  # which is exact, or not
    options = Options(
        ALPHAS.get(kind, 0.0),
        bool(asked.get("causal")),
        -1,
        scale,
        0.0,
        keys,
        bool(asked.get("support")),
    )
    setting = Setting(
        divmod(capability, 10), 132, tf32=False, aligned=True, failed_kernels=frozenset()
    )
    if name in ("dq", "dkv"):
        live = torch.empty(
            live_shape(tensors, options, setting.capability),
            dtype=torch.int32,
            device="meta",
        )
        saved = AttentionSaved(
            *tensors,
            q,
            torch.empty(4, *tensors.stats_shape, device="meta"),
            live,
        )
        plan = plans.backward(
            q,
            saved,
            options,
            (True, True, True, bool(asked.get("need_alpha"))),
            setting,
        )
    else:
        short = keys <= way_config(dtype, dim, capability)["max_short_keys"]
        training = name in ("resident", "output") or (name == "roots" and not short)
        plan = plans.forward(tensors, options, training, setting)
    kernel = beside or {"inference": "output"}.get(name, name)
    return next(
        step
        for step in plan.steps
        if isinstance(step, Launch) and step.kernel.__name__ == f"{kernel}_kernel"
    )


def build(
    name: str,
    dtype: torch.dtype,
    dim: int,
    kind: str,
    capability: int,
    keys: int = 4096,
    **asked: bool,
) -> Compiled:
    if name == "resident":
        if not is_built(dtype, dim, capability):
            pytest.skip("that way is never taken there")
        keys = way_config(dtype, dim, capability)["max_resident_keys"] if keys == 4096 else keys
    launch = launched(name, dtype, dim, kind, capability, keys, **asked)
    assert launch.constants["KIND"] == kind
    flags = dict(launch.constants)
    names = ("num_warps", "num_stages", "maxnreg", "ptx_options")
    warps, stages, registers, assembler = (flags.pop(each, None) for each in names)
    types = attention_types(NAMES[dtype])
    return compile_kernel(
        launch.kernel,
        types,
        flags,
        capability,
        warps,
        stages,
        STRIDES,
        registers,
        assembler,
    )


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("capability", "dim", "kind"),
    [
        (80, 64, "entmax15"),
        (90, 64, "entmax15"),
        (90, 64, "gentle"),
        (90, 64, "steep"),
        (90, 64, "generic16"),
        (100, 64, "generic16"),
        (90, 128, "entmax15"),
        (100, 64, "entmax15"),
    ],
)
def test_attention_kernels_build_without_spills(
    capability: int,
    dim: int,
    kind: str,
    name: str,
) -> None:
    compiled = build(name, torch.bfloat16, dim, kind, capability)
    if (capability, kind, dim, name) == (90, "entmax15", 64, "output"):
        check_spills(compiled, END_SPILLS)
    elif kind not in ("softmax", "entmax15", "sparsemax") and capability == 90:
        check_spills(compiled, *ANY_ALPHA_SPILLS, name)
    elif (capability, name) in ((80, "dq"), (80, "output")):
        check_spills(compiled, KNOWN_SPILLS["bf16", dim, capability])
    else:
        check(
            compiled,
            capability,
            wgmma=True,
            looped=LOOPED.get((release(), "bf16", capability, name), 0.0),
        )


OPTIONS: list[dict[str, Any]] = [
    {"mask": True},
    {"causal": True},
    {"packed": True, "causal": True},
    {"keys": 1024},
]
OPTIONS += [{"support": True}, {"need_alpha": True}, {"need_alpha": True, "keys": 1024}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_masks_layouts_the_support_and_the_gradient_of_alpha_spill_next_to_nothing(
    options: dict[str, Any],
) -> None:
    if "need_alpha" in options:
        compiled = build("dq", torch.bfloat16, 64, "generic16", 90, **options)
        check_spills(compiled, ALPHA_SPILLS, ALPHA_LOOPED, "dq", others=ALPHA_SPILLS)
        return
    for name in ("resident", "inference", "output") if "support" in options else KERNELS[1:]:
        compiled = build(name, torch.bfloat16, 64, "entmax15", 90, **options)
        check_spills(compiled, MASK_SPILLS, MASK_LOOPED, name)


@pytest.mark.parametrize("offsets", ["*i32", "*i64"])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_of_packed_batches_build_without_spills(capability: int, offsets: str) -> None:
    for name, of in (("tables", "output"), ("tables", "dq"), ("nan_if_broken", "output")):
        launch = launched(of, torch.bfloat16, 64, "entmax15", capability, 4096, name, packed=True)
        types = attention_types("bf16")
        types |= {"cu_seqlens_q_ptr": offsets, "cu_seqlens_k_ptr": offsets, "size": "i64"}
        types |= dict.fromkeys(["q_batch_ptr", "q_start_ptr", "k_batch_ptr", "k_start_ptr"], "*i32")
        nothing = {} if of == "dq" else {"k_batch_ptr": None, "k_start_ptr": None}
        own = {name: value for name, value in nothing.items() if name in launch.kernel.arg_names}
        flags = {
            name: value for name, value in launch.constants.items() if not name.startswith("num_")
        }
        compiled = compile_kernel(launch.kernel, types, flags | own, capability, 4, 1)
        assert compiled.stack == 0 and compiled.local_memory == 0


def test_256_keys_stay_in_registers_where_nothing_is_hidden() -> None:
    compiled = build(
        "resident",
        torch.bfloat16,
        64,
        "entmax15",
        90,
        256,
    )  # a launch of another way is none of it
    check(compiled, 90, wgmma=True)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_head_dimension_fits_the_chip(capability: int, dtype: torch.dtype, dim: int) -> None:
    # 8.6, 8.9 and 12.0 take 8.0's tiles and instructions, with less memory: the least of them is
    # the limit for 8.0
    limit = SHARED_LIMIT[89 if capability == 80 else capability]
    spilled = KNOWN_SPILLS.get(
        (NAMES[dtype], dim),
        KNOWN_SPILLS.get((NAMES[dtype], dim, capability), 0),
    )
    for name in KERNELS if dim == 256 else ("resident", "dq", "dkv"):  # dq and dkv need most
        if name == "resident" and not is_built(dtype, dim, capability):
            continue
        compiled = build(name, dtype, dim, "entmax15", capability)
        looped = LOOPED.get((release(), NAMES[dtype], capability, name), 0.0)
        assert compiled.shared <= limit, f"{name} needs too much shared memory: {compiled}"
        check_spills(
            compiled,
            spilled,
            TILE_LOOPED if (dtype, dim) == (torch.float32, 256) else looped,
            name,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.bfloat16, "softmax"),
        (torch.bfloat16, "sparsemax"),
        (torch.bfloat16, "generic16"),
        (torch.float32, "generic"),
        (torch.float32, "sparsemax"),
    ],
    ids=str,
)
def test_every_formula_builds_with_the_gradient_of_alpha(dtype: torch.dtype, kind: str) -> None:
    for name in KERNELS if dtype == torch.bfloat16 else ("resident", "roots", "dq"):
        assert build(name, dtype, 64, kind, 90, need_alpha=name == "dq").shared <= SHARED_LIMIT[90]
