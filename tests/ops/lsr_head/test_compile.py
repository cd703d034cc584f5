"""Kernels of the LSR head build for Ampere, Hopper and Blackwell without a GPU.

They must not spill, and on Hopper they must use wgmma.
"""

from __future__ import annotations

from collections.abc import Sequence
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
# Bytes that releases of Triton other than 3.6 may spill, once for many rounds of a loop.
OTHER_RELEASES = 16
DIM = 768
PRODUCTS = (
    "max_forward_kernel",
    "max_forward_hopper_kernel",
    "screen_hopper_kernel",
    "refine_kernel",
    "sum_forward_kernel",
    "dlogits_kernel",
)
EVERYTHING = (True, True, True)
Dtypes = dict[str, torch.dtype | None]


def head_tensors(
    layout: str,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    offsets: torch.dtype,
    dim: int = DIM,
) -> _problem.HeadTensors:
    """Operands of a call, without memory.

    Args:
        layout: ``"packed"``, ``"masked"`` or ``"full"``.
        dtype: Data type of the weight. With fp8, all other operands are in bf16.
        shape: Numbers of sequences, of tokens of each, and of vocabulary entries.
        offsets: Data type of ``cu_seqlens``.
        dim: Entries of a row.
    """
    batch, length, vocab = shape
    hidden_dtype = BF16 if dtype == FP8 else dtype
    hidden_shape = (batch * length, dim) if layout == "packed" else (batch, length, dim)
    return _problem.HeadTensors(
        meta(*hidden_shape, dtype=hidden_dtype),
        meta(batch, length, dtype=torch.uint8) if layout == "masked" else None,
        meta(batch + 1, dtype=offsets) if layout == "packed" else None,
        meta(vocab, dim, dtype=dtype),
        meta(vocab, dtype=F32) if dtype == FP8 else None,
        meta(vocab, dtype=hidden_dtype),
    )


def saved_tensors(
    tensors: _problem.HeadTensors,
    results: Sequence[Buffer],
    options: _problem.HeadOptions,
) -> _problem.HeadSaved:
    """What the forward pass saves for the backward pass, without memory."""
    saved = _problem.HeadSaved(
        *tensors[:4],
        tensors.bias,
        *(meta(*result.shape, dtype=result.dtype) for result in results),
    )
    unread = saved._asdict().keys() - _problem.reads(options)
    saved = saved._replace(**dict.fromkeys(unread))
    if saved.winners is not None and saved.winners.numel() == 0:
        saved = saved._replace(winners=None)
    return saved


def check_head(
    capability: int,
    dtype: torch.dtype,
    pooling: str = "max",
    layout: str = "packed",
    shape: tuple[int, int, int] = (16, 512, 30522),
    *,
    offsets: torch.dtype = I32,
    needs: tuple[bool, bool, bool] | None = EVERYTHING,
    activation: str = "log1p_relu",
    scale: float = 1.0,
    failed_kernels: tuple[str, ...] = (configs.BY_ROLES,),
    only: str = "",
    screen: bool = False,
    dim: int = DIM,
) -> set[str]:
    """Compile and check the kernels of a call and of its gradients.

    Args:
        capability: Compute capability of the GPU, such as 90.
        dtype: Data type of the weight.
        pooling: Pooling of the head.
        layout: ``"packed"``, ``"masked"`` or ``"full"``.
        shape: Numbers of sequences, of tokens of each, and of vocabulary entries.
        offsets: Data type of ``cu_seqlens``.
        needs: Whether hidden states, weight and bias need gradients; ``None`` for inference.
        activation: Activation of the head.
        scale: Factor of the logits.
        failed_kernels: Names of kernels that cannot be built.
        only: Part of the names of the kernels to compile.
        screen: Whether int8 products screen the vocabulary.
        dim: Entries of a row.

    Returns:
        Names of the compiled kernels.
    """
    tensors = head_tensors(layout, dtype, shape, offsets, dim)
    hidden_dtype = tensors.hidden.dtype
    options = _problem.HeadOptions(
        pooling,
        activation,
        scale,
        hidden_dtype,
        hidden_dtype,
        F32,
        screen,
    )
    setting = Setting(
        divmod(capability, 10),
        132,
        tf32=False,
        aligned=True,
        failed_kernels=frozenset(failed_kernels),
    )
    training = needs is not None
    scores, winners = _problem.outputs(tensors, options, training)
    plan = plans.forward(tensors, options, training, setting)
    results = {"scores": scores.dtype, "winners": winners.dtype}
    kernels = check_plan(plan, dtypes(tensors._asdict()) | results, capability, only)
    if needs is None:
        return kernels
    saved = saved_tensors(tensors, (scores, winners), options)
    dscores = meta(*scores.shape, dtype=scores.dtype)
    need_hidden, need_weight, need_bias = needs
    gradients: Dtypes = {
        "dhidden": hidden_dtype if need_hidden else None,
        "dweight": hidden_dtype if need_weight else None,
        "dbias": F32 if need_bias else None,
        "dscores": dscores.dtype,
    }
    plan = plans.backward(dscores, saved, options, needs, setting)
    return kernels | check_plan(plan, dtypes(saved._asdict()) | gradients, capability, only)


def dtypes(tensors: dict[str, torch.Tensor | None]) -> Dtypes:
    return {name: None if tensor is None else tensor.dtype for name, tensor in tensors.items()}


def check_plan(plan: Plan, tensor_dtypes: Dtypes, capability: int, only: str) -> set[str]:
    """Compile and check every kernel of a plan once.

    Args:
        plan: The plan.
        tensor_dtypes: Data types of operands and results by name.
        capability: Compute capability of the GPU.
        only: Part of the names of the kernels to compile.

    Returns:
        Names of the compiled kernels.
    """
    all_dtypes = dict(tensor_dtypes)
    for name, buffer in plan.buffers.items():
        all_dtypes[name] = buffer.dtype
    all_dtypes |= dict.fromkeys(plan.skipped_results)
    for step in plan.steps:
        if isinstance(step, TorchStep):
            # Gradients of sums are products in fp32. "prefix_sum" holds counts that were added up.
            all_dtypes[step.output] = I64 if step.output == "prefix_sum" else F32
    variants: set[str] = set()
    kernels: set[str] = set()
    for step in plan.steps:
        if not isinstance(step, Launch) or only not in step.kernel.__name__:
            continue
        variant = repr((step.kernel, step.constants))
        if variant not in variants:
            build(step, all_dtypes, capability)
        variants.add(variant)
        kernels.add(step.kernel.__name__)
    return kernels


def build(launch: Launch, tensor_dtypes: Dtypes, capability: int) -> None:
    """Compile the kernel of a launch, and check its registers, spills and instructions."""
    kernel = launch.kernel
    constants = {"num_warps": 4, "num_stages": 3, "maxnreg": None} | launch.constants
    warps = constants.pop("num_warps")
    stages = constants.pop("num_stages")
    registers = constants.pop("maxnreg")
    run_time_arguments = [name for name in kernel.arg_names if name not in constants]
    tensors = launch.tensors
    types: dict[str, Any] = {}
    for argument, name in zip(run_time_arguments, tensors, strict=False):
        dtype = tensor_dtypes.get(name)
        if dtype is None:
            constants[argument] = None
        elif name in launch.tma:
            types[argument] = descriptor_type(launch, argument, dtype)
        else:
            types[argument] = f"*{NAMES[dtype]}"
    number_arguments = run_time_arguments[len(tensors) :]
    for argument, number in zip(number_arguments, launch.numbers, strict=True):
        types[argument] = "fp32" if isinstance(number, float) else "i32"
    compiled = compile_kernel(
        kernel,
        types,
        constants,
        capability,
        warps,
        stages,
        registers=registers,
    )
    operand = tensors[1 if kernel.__name__ == "dlogits_kernel" else 0]
    uses_wgmma = kernel.__name__ in PRODUCTS and tensor_dtypes.get(operand) != F32
    check(compiled, capability, wgmma=uses_wgmma, name=kernel.__name__, others=OTHER_RELEASES)
    assert compiled.registers <= (registers or 255), f"the cap is not kept: {compiled}"


def descriptor_type(launch: Launch, argument: str, dtype: torch.dtype) -> str:
    """Type of the TMA descriptor of a tile of the weight or of rows."""
    constants = launch.constants
    rows = constants["BLOCK_T"] if "rows" in argument else constants.get("BLOCK_V", 64)
    columns = constants["BLOCK_K"]
    element = NAMES[dtype]
    if "STAGES" not in constants:
        return f"tensordesc<{element}[{rows},{columns}]>"
    from triton.experimental.gluon import language as gl

    gluon_dtypes = {
        BF16: gl.bfloat16,
        F16: gl.float16,
        FP8: gl.float8e4nv,
        torch.int8: gl.int8,
    }
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gluon_dtypes[dtype])
    return f"tensordesc<{element}[{rows}, {columns}],{layout!r}>"


# Options of check_head by the name of a case.
MAX_POOLING_CASES: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("case", MAX_POOLING_CASES)
@pytest.mark.parametrize("dtype", [BF16, F32, F16], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_max_pooling_builds_without_spills(capability: int, dtype: torch.dtype, case: str) -> None:
    kernels = check_head(capability, dtype, **MAX_POOLING_CASES[case])
    assert "max_forward_kernel" in kernels


@HOPPER
@pytest.mark.parametrize("needs", [None, (False, False, True)], ids=["scores", "winners"])
@pytest.mark.parametrize("layout", ["packed", "full"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=NAMES.get)
def test_the_screen_builds_without_spills(
    dtype: torch.dtype,
    layout: str,
    needs: tuple[bool, bool, bool] | None,
) -> None:
    kernels = check_head(
        90,
        dtype,
        layout=layout,
        needs=needs,
        failed_kernels=(),
        screen=True,
        shape=(64, 512, 30522),
    )
    assert kernels >= {
        "screen_hopper_kernel",
        "refine_kernel",
        "list_kernel",
        "round_kernel",
        "sample_kernel",
    }


@HOPPER
@pytest.mark.parametrize("dim", [2048, 4096])
def test_the_screen_of_long_rows_builds_without_spills(dim: int) -> None:
    for kernel in ("largest_kernel", "round_kernel", "screen_hopper_kernel"):
        kernels = check_head(
            90,
            BF16,
            needs=None,
            failed_kernels=(),
            screen=True,
            only=kernel,
            dim=dim,
        )
        assert kernels == {kernel}


@HOPPER
@pytest.mark.parametrize("needs", [None, (False, False, True)], ids=["scores", "winners"])
@pytest.mark.parametrize("layout", ["packed", "full"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=NAMES.get)
def test_the_hopper_forward_builds_without_spills(
    dtype: torch.dtype,
    layout: str,
    needs: tuple[bool, bool, bool] | None,
) -> None:
    kernels = check_head(90, dtype, layout=layout, needs=needs, failed_kernels=())
    assert "max_forward_hopper_kernel" in kernels


@pytest.mark.parametrize("layout", ["full", "packed"])
@pytest.mark.parametrize("capability", [89, 90, 100])
def test_the_quantized_forward_builds_without_spills(capability: int, layout: str) -> None:
    assert "quantize_rows_kernel" in check_head(capability, FP8, layout=layout, needs=None)
    if capability == 90 and why_no_warp_roles() is None:
        check_head(capability, FP8, layout=layout, needs=None, failed_kernels=())


@pytest.mark.parametrize(
    "dim",
    [
        pytest.param(768, id="four rows in two parts"),
        pytest.param(3072, id="two parts"),
        pytest.param(16384, id="all registers"),
        pytest.param(20000, id="read twice"),
    ],
)
def test_rounding_to_fp8_builds_without_spills(dim: int) -> None:
    kernel = "quantize_rows_kernel"
    assert check_head(90, FP8, needs=None, only=kernel, dim=dim) == {kernel}


@pytest.mark.parametrize("activation", ["log1p_log1p_relu", "softplus"])
def test_the_other_activations_build_without_spills(activation: str) -> None:
    check_head(90, BF16, activation=activation, scale=0.5, needs=(False, False, True))


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        pytest.param((16, 2000, 99), "count_kernel", id="long masks"),
        pytest.param((4, 1000, 99), "copy_padded_kernel", id="few sequences"),
        pytest.param((200, 16, 99), "copy_padded_kernel", id="many sequences"),
    ],
)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_packing_builds_without_spills(
    capability: int,
    shape: tuple[int, int, int],
    kernel: str,
) -> None:
    needs = (False, False, True)
    kernels = check_head(capability, BF16, layout="masked", shape=shape, needs=needs)
    assert kernels >= {"copy_padded_kernel", kernel}


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
    kernels = check_head(capability, dtype, "mean", layout, offsets=offsets, scale=0.5)
    assert kernels >= {"sum_forward_kernel", "dlogits_kernel"}


# Options of check_head by the name of a case.
ONE_TOKEN_CASES: dict[str, dict[str, Any]] = {
    "masked": {"layout": "masked", "shape": (1024, 16, 30522)},
    "few masked": {"layout": "masked", "shape": (16, 16, 30522)},
    "under a long mask": {"layout": "masked", "shape": (16, 512, 30522)},
    "packed": {"shape": (1024, 16, 30522)},
    "few packed": {},
    "long offsets": {"shape": (1024, 16, 30522), "offsets": I64},
}
GRADIENT_KERNELS = {"weight_gradient_kernel", "split_gradient_kernel"}


@pytest.mark.parametrize("case", ONE_TOKEN_CASES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_pooling_of_one_token_builds_without_spills(
    capability: int,
    dtype: torch.dtype,
    case: str,
) -> None:
    kernels = check_head(capability, dtype, "last", **ONE_TOKEN_CASES[case])
    assert kernels >= GRADIENT_KERNELS


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=NAMES.get)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_gradients_of_few_summed_rows_build_without_spills(
    capability: int,
    dtype: torch.dtype,
) -> None:
    kernels = check_head(
        capability,
        dtype,
        "sum",
        "full",
        shape=(4, 16, 30522),
        only="_gradient",
    )
    if dtype != F16:  # torch multiplies few rows in fp16
        assert kernels >= GRADIENT_KERNELS
