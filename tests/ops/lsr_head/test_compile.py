"""Every kernel that the LSR head plans builds for Ampere, Hopper and Blackwell without a GPU: no
spills, and wgmma.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tests.kernels import triton_interpreted
from tests.ops.base import Buffer, Launch, Plan, Setting, TorchStep, why_no_warp_roles
from tests.ops.base import head_problem as _problem
from tests.ops.cross_compile import CAPABILITIES, NAMES, check, compile_kernel
from tests.ops.samples import meta
from tilefold.ops.lsr_head import configs, plans

pytestmark = pytest.mark.skipif(
    triton_interpreted(),
    reason="kernels are interpreted in this run, not compiled",
)

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
I32, I64 = torch.int32, torch.int64
OTHER_RELEASES = 16  # bytes that others than 3.6 may put away, once for many rounds of a loop
PRODUCTS = (
    "max_forward_kernel",
    "max_forward_hopper_kernel",
    "screen_hopper_kernel",
    "refine_kernel",
    "sum_forward_kernel",
    "dlogits_kernel",
)
EVERYTHING = (True, True, True)
Names = dict[str, torch.dtype | None]


def check_head(
    capability: int,
    dtype: torch.dtype,
    pooling: str = "max",
    layout: str = "packed",
    shape: tuple[int, int, int] = (16, 512, 30522),
    *,
    offsets: torch.dtype = I32,
    needs: tuple[bool, ...] | None = EVERYTHING,
    activation: str = "log1p_relu",
    scale: float = 1.0,
    given_up: tuple[str, ...] = (configs.BY_ROLES,),
    only: str = "",
    screen: bool = False,
) -> set[str]:
    """Compile the kernels of a call (``only`` that one), with those of the gradients it ``needs``,
    and name them.
    """
    (batch, length, vocab), dim = shape, 768
    given = BF16 if dtype == FP8 else dtype
    hidden = (
        meta(batch * length, dim, dtype=given)
        if layout == "packed"
        else meta(batch, length, dim, dtype=given)
    )
    mask = meta(batch, length, dtype=torch.uint8) if layout == "masked" else None
    cu_seqlens = meta(batch + 1, dtype=offsets) if layout == "packed" else None
    row_scale = meta(vocab, dtype=F32) if dtype == FP8 else None
    tensors = _problem.HeadTensors(
        hidden,
        mask,
        cu_seqlens,
        meta(vocab, dim, dtype=dtype),
        row_scale,
        meta(vocab, dtype=given),
    )
    options = _problem.HeadOptions(pooling, activation, scale, given, given, F32, screen)
    setting = Setting(
        divmod(capability, 10),
        132,
        tf32=False,
        aligned=True,
        given_up=frozenset(given_up),
    )
    results = _problem.outputs(tensors, options, needs is not None)
    made: Names = dict(zip(("scores", "winners"), (each.dtype for each in results), strict=True))
    plan = plans.forward(tensors, options, needs is not None, setting)
    found = check_plan(plan, dtypes(tensors._asdict()) | made, capability, only)
    if needs is not None:
        saved = _problem.HeadSaved(
            *tensors[:4],
            tensors.bias,
            *(meta(*each.shape, dtype=each.dtype) for each in results),
        )
        kept = saved._asdict()
        saved = saved._replace(**dict.fromkeys(kept.keys() - _problem.reads(options)))
        if saved.winners is not None and saved.winners.numel() == 0:
            saved = saved._replace(winners=None)
        wanted: Names = dict(zip(("dhidden", "dweight", "dbias"), (given, given, F32), strict=True))
        wanted = {
            name: each if need else None
            for (name, each), need in zip(wanted.items(), needs, strict=True)
        }
        dscores = meta(*results[0].shape, dtype=results[0].dtype)
        plan = plans.backward(dscores, saved, options, needs, setting)
        found |= check_plan(
            plan,
            dtypes(saved._asdict()) | wanted | {"dscores": dscores.dtype},
            capability,
            only,
        )
    return found


def dtypes(tensors: dict[str, torch.Tensor | None]) -> Names:
    return {name: None if tensor is None else tensor.dtype for name, tensor in tensors.items()}


def check_plan(plan: Plan, names: Names, capability: int, only: str) -> set[str]:
    """Compile its launches, each once; ``names`` are the dtypes of given tensors and results."""
    names = names | {
        name: each.dtype if isinstance(each, Buffer) else None
        for name, each in plan.buffers.items()
    }
    # gradients of sums are products in fp32; places are counts that were added up
    names |= {
        each.makes: I64 if each.makes == "place" else F32
        for each in plan.steps
        if isinstance(each, TorchStep)
    }
    found = set()
    for launch in plan.steps:
        if not isinstance(launch, Launch) or only not in launch.kernel.__name__:
            continue
        kind = repr((launch.kernel, launch.constants))
        if kind not in found:
            build(launch, names, capability)
        found |= {kind, launch.kernel.__name__}
    return found


def build(launch: Launch, names: Names, capability: int) -> None:
    kernel, constants = (
        launch.kernel,
        {"num_warps": 4, "num_stages": 3, "maxnreg": None} | launch.constants,
    )
    warps, stages, registers = (
        constants.pop(name) for name in ("num_warps", "num_stages", "maxnreg")
    )
    run_time = [name for name in kernel.arg_names if name not in constants]
    types: dict[str, Any] = {}
    for argument, name in zip(run_time, launch.tensors.split(), strict=False):
        dtype = names.get(name)
        if dtype is None:
            constants[argument] = None
        elif name in launch.tma:
            types[argument] = described(launch, argument, dtype)
        else:
            types[argument] = f"*{NAMES[dtype]}"
    numbers = zip(run_time[len(launch.tensors.split()) :], launch.numbers, strict=True)
    types |= {
        argument: "fp32" if isinstance(number, float) else "i32" for argument, number in numbers
    }
    compiled = compile_kernel(
        kernel,
        types,
        constants,
        capability,
        warps,
        stages,
        registers=registers,
    )
    operand = names.get(launch.tensors.split()[1 if kernel.__name__ == "dlogits_kernel" else 0])
    products = kernel.__name__ in PRODUCTS and operand != F32
    check(compiled, capability, wgmma=products, name=kernel.__name__, others=OTHER_RELEASES)
    assert compiled.registers <= (registers or 255), f"the cap is not kept: {compiled}"


def described(launch: Launch, argument: str, dtype: torch.dtype) -> str:
    """Type of the TMA descriptor of a tile of the weight or of rows."""
    rows = (
        launch.constants["BLOCK_T"] if "rows" in argument else launch.constants.get("BLOCK_V", 64)
    )
    columns, element = launch.constants["BLOCK_K"], NAMES[dtype]
    if "STAGES" not in launch.constants:
        return f"tensordesc<{element}[{rows},{columns}]>"
    from triton.experimental.gluon import language as gl

    kind = {BF16: gl.bfloat16, F16: gl.float16, FP8: gl.float8e4nv, torch.int8: gl.int8}[dtype]
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kind)
    return f"tensordesc<{element}[{rows}, {columns}],{layout!r}>"


MAX = {
    "packed": {},
    "full": {"layout": "full"},
    "scores of packed": {"needs": None},
    "scores of full": {"needs": None, "layout": "full"},
    "many sequences": {"shape": (64, 512, 30522)},
    "counts added up": {
        "shape": (64, 512, 250002),
        "layout": "full",
        "needs": (True, False, False),
    },
    "long offsets": {"offsets": I64},
    "many with long offsets": {"offsets": I64, "shape": (64, 512, 30522)},
}
HOPPER = pytest.mark.skipif(
    why_no_warp_roles() is not None,
    reason=f"the portable kernel runs: {why_no_warp_roles()}",
)


@pytest.mark.parametrize("case", MAX)
@pytest.mark.parametrize("dtype", [BF16, F32, F16], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_max_pooling_builds_without_spills(capability: int, dtype: torch.dtype, case: str) -> None:
    assert "max_forward_kernel" in check_head(capability, dtype, **MAX[case])


@HOPPER
@pytest.mark.parametrize("needs", [None, (False, False, True)], ids=["scores", "winners"])
@pytest.mark.parametrize("layout", ["packed", "full"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=NAMES.get)
def test_the_screen_builds_without_spills(
    dtype: torch.dtype,
    layout: str,
    needs: tuple[bool, ...] | None,
) -> None:
    found = check_head(
        90,
        dtype,
        layout=layout,
        needs=needs,
        given_up=(),
        screen=True,
        shape=(64, 512, 30522),
    )
    assert {
        "screen_hopper_kernel",
        "refine_kernel",
        "list_kernel",
        "round_kernel",
        "sample_kernel",
    } <= found


@HOPPER
@pytest.mark.parametrize("case", ["packed", "full", "scores of packed", "scores of full"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=NAMES.get)
def test_the_hopper_forward_builds_without_spills(dtype: torch.dtype, case: str) -> None:
    needs = None if "scores" in case else (False, False, True)
    assert "max_forward_hopper_kernel" in check_head(
        90,
        dtype,
        **MAX[case] | {"needs": needs, "given_up": ()},
    )


@pytest.mark.parametrize("layout", ["full", "packed"])
@pytest.mark.parametrize("capability", [89, 90, 100])
def test_the_quantized_forward_builds_without_spills(capability: int, layout: str) -> None:
    assert "quantize_rows_kernel" in check_head(capability, FP8, layout=layout, needs=None)
    if capability == 90 and why_no_warp_roles() is None:
        check_head(capability, FP8, layout=layout, needs=None, given_up=())


@pytest.mark.parametrize("activation", ["log1p_log1p_relu", "softplus"])
def test_the_other_activations_build_without_spills(activation: str) -> None:
    check_head(90, BF16, activation=activation, scale=0.5, needs=(False, False, True))


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((16, 2000, 99), "count"), ((4, 1000, 99), ""), ((200, 16, 99), "")],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_packing_builds_without_spills(
    capability: int,
    shape: tuple[int, int, int],
    kernel: str,
) -> None:
    found = check_head(capability, BF16, layout="masked", shape=shape, needs=(False, False, True))
    assert {"copy_padded_kernel", f"{kernel or 'copy_padded'}_kernel"} <= found


@pytest.mark.parametrize(
    ("layout", "offsets"),
    [("masked", I32), ("packed", I32), ("packed", I64)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_sums_build_without_spills(
    capability: int,
    dtype: torch.dtype,
    layout: str,
    offsets: torch.dtype,
) -> None:
    found = check_head(capability, dtype, "mean", layout, offsets=offsets, scale=0.5)
    assert {"sum_forward_kernel", "dlogits_kernel"} <= found


ONE_TOKEN = {
    "masked": {"layout": "masked", "shape": (1024, 16, 30522)},
    "few masked": {"layout": "masked", "shape": (16, 16, 30522)},
    "under a long mask": {"layout": "masked", "shape": (16, 512, 30522)},
    "packed": {"shape": (1024, 16, 30522)},
    "few packed": {},
    "long offsets": {"shape": (1024, 16, 30522), "offsets": I64},
    "rows": {
        "pooling": "sum",
        "layout": "full",
        "shape": (4, 16, 30522),
        "only": "_gradient",
    },  # few: theirs
}


@pytest.mark.parametrize("case", ONE_TOKEN)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_token_builds_without_spills(capability: int, dtype: torch.dtype, case: str) -> None:
    found = check_head(capability, dtype, **{"pooling": "last"} | ONE_TOKEN[case])
    expected = (
        {"weight_gradient_kernel", "split_gradient_kernel"}
        if case != "rows" or dtype != F16
        else set()
    )
    assert expected <= found  # of few rows in fp16, torch multiplies
