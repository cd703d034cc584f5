"""The toy operator, ``scale * (x @ w) ** 2``, with which tests check what all operators share.

Its kernels multiply and add up in one launch, in two that share scratch, or in two with torch
between them. If TF32 is allowed, they round operands to 16 bits. Most operators have no ``reads``,
``variant``, ``KernelFallback`` and ``w_main_grad``, which the toy has so that tests can check them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.ops.base import (
    Buffer,
    Checked,
    KernelFallback,
    Launch,
    Operator,
    Plan,
    Setting,
    TorchStep,
    check_shape,
    chosen_impl,
    contiguous_steps,
)
from tests.ops.contracts import OPERATORS
from tests.ops.contracts.contract import RepeatedCall
from tests.ops.samples import Sample

BLOCK = 32
HALVES = "toy of halves"
TWO_LAUNCHES = KernelFallback(
    "toy's kernel of one launch", "Two launches instead: the same results."
)


class ToyTensors(NamedTuple):
    """Operands: ``x`` ``[R, N]``, with R and N at most 32, and ``w`` ``[N]``."""

    x: Tensor
    w: Tensor


class ToyOptions(NamedTuple):
    """Options; ``way`` is "one launch", "two launches", "torch between" or "no launch"."""

    scale: float
    way: str


class ToySaved(NamedTuple):
    """What is saved for gradients; ``sums`` is ``x @ w``."""

    x: Tensor
    w: Tensor
    sums: Tensor | None


def toy(
    x: Tensor,
    w: Tensor,
    scale: float = 1.0,
    way: str = "one launch",
    impl: str = "auto",
    w_main_grad: Tensor | None = None,
) -> Tensor:
    into = {} if w_main_grad is None else {"w": w_main_grad}
    scores: Tensor = TOY(ToyTensors(x, w), (scale, way), impl, _check, into)[0]
    return scores


def _check(tensors: ToyTensors, scale: float, way: str, *buffers: Tensor) -> Checked:
    for tensor in (tensors.w, *buffers):
        check_shape("w", tensor, "N", N=tensors.x.size(1))
    return Checked(ToyOptions(scale, way))


def reads(options: ToyOptions) -> tuple[str, ...]:
    """Two launches keep no sums."""
    return ("x", "w") if options.way == "two launches" else ("x", "w", "sums")


def choose(tensors: ToyTensors, impl: str) -> tuple[str, str]:
    """Halves are given up by themselves."""
    name = HALVES if tensors.x.dtype == torch.float16 else TOY.name
    return name, chosen_impl(name, "x", tensors.x, impl)


def outputs(tensors: ToyTensors, options: ToyOptions, training: bool) -> tuple[Buffer, Buffer]:
    rows = tensors.x.size(0)
    return Buffer((rows,), tensors.x.dtype), Buffer((rows if training else 0,), torch.float32)


def forward(
    tensors: ToyTensors,
    options: ToyOptions,
    training: bool,
    setting: Setting,
) -> Plan | None:
    if options.way == "no launch":
        return None
    numbers, grid = (*tensors.x.shape, options.scale), (tensors.x.size(0), 1, 1)
    constants = {"TF32": setting.tf32, "TRAINING": training, "BLOCK": BLOCK}
    if options.way == "one launch" and TWO_LAUNCHES.kernel not in setting.failed_kernels:
        steps = [
            Launch(
                dot_kernel, grid, ("x", "w", "y", "sums"), numbers, constants, fallback=TWO_LAUNCHES
            )
        ]
        return Plan((*contiguous_steps(tensors._asdict()), *steps))
    products = Launch(
        products_kernel,
        grid,
        ("x", "w", "parts"),
        numbers,
        {"TF32": setting.tf32, "BLOCK": BLOCK},
    )
    width = tensors.x.size(1)
    between = []
    if options.way == "torch between":
        between, width = (
            [TorchStep(lambda parts: parts.sum(dim=1, keepdim=True), ("parts",), output="parts")],
            1,
        )
    sums = Launch(
        sum_kernel,
        grid,
        ("parts", "y", "sums"),
        (width, options.scale),
        {"TRAINING": training, "BLOCK": BLOCK},
    )
    buffers = {"parts": Buffer(tuple(tensors.x.shape), torch.float32)}
    return Plan((*contiguous_steps(tensors._asdict()), products, *between, sums), buffers)


def backward(
    dy: Tensor,
    saved: ToySaved,
    options: ToyOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    constants: dict[str, Any] = {
        "NEED_X": needs[0],
        "NEED_W": needs[1],
        "ADD_W": "w" in setting.accumulated,
    }
    constants |= {"TF32": setting.tf32, "BLOCK": BLOCK}
    strides = like_x(saved, options).strides or saved.x.stride()
    numbers = (*saved.x.shape, options.scale, dy.stride(0), *strides)
    again = (
        []
        if saved.sums is not None
        else [TorchStep(lambda x, w: (x * w).sum(dim=1).float(), ("x", "w"), output="sums")]
    )
    launch = Launch(
        gradient_kernel,
        (saved.x.size(1), 1, 1),
        ("dy", "x", "w", "sums", "dx", "dw"),
        numbers,
        constants,
    )
    return Plan((*contiguous_steps(saved._asdict()), *again, launch))


def like_x(saved: ToySaved, options: ToyOptions) -> Buffer:
    return Buffer.like(saved.x)


def tiled_forward(tensors: ToyTensors, options: ToyOptions, training: bool) -> tuple[Tensor, None]:
    return reference(tensors, options), None  # its gradient adds up again


def tiled_backward(
    dy: Tensor,
    saved: ToySaved,
    options: ToyOptions,
    needs: tuple[bool, ...],
    into: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    slope = 2 * options.scale * (saved.x @ saved.w) * dy
    dx = torch.empty_like(saved.x).copy_(slope[:, None] * saved.w) if needs[0] else None
    dw = saved.x.T @ slope if needs[1] else None
    if into is not None and dw is not None:
        into += dw
        dw = None
    return dx, dw


def reference(tensors: ToyTensors, options: ToyOptions) -> Tensor:
    return options.scale * (tensors.x @ tensors.w) ** 2


@triton.jit
def rounded(x, TF32: tl.constexpr):
    return x.to(tl.float16).to(tl.float32) if TF32 else x


@triton.jit
def store_score(y_ptr, sums_ptr, row, total, scale, TRAINING: tl.constexpr):
    tl.store(y_ptr + row, scale * total * total)
    if TRAINING:
        tl.store(sums_ptr + row, total)


@triton.jit
def dot_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    sums_ptr,
    R,
    N,
    scale,
    TF32: tl.constexpr,
    TRAINING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, n = tl.program_id(0), tl.arange(0, BLOCK)
    x = rounded(tl.load(x_ptr + row * N + n, mask=n < N, other=0.0), TF32)
    w = rounded(tl.load(w_ptr + n, mask=n < N, other=0.0), TF32)
    store_score(y_ptr, sums_ptr, row, tl.sum(x * w, axis=0), scale, TRAINING)


@triton.jit
def products_kernel(x_ptr, w_ptr, parts_ptr, R, N, scale, TF32: tl.constexpr, BLOCK: tl.constexpr):
    row, n = tl.program_id(0), tl.arange(0, BLOCK)
    x = rounded(tl.load(x_ptr + row * N + n, mask=n < N, other=0.0), TF32)
    w = rounded(tl.load(w_ptr + n, mask=n < N, other=0.0), TF32)
    tl.store(parts_ptr + row * N + n, x * w, mask=n < N)


@triton.jit
def sum_kernel(parts_ptr, y_ptr, sums_ptr, N, scale, TRAINING: tl.constexpr, BLOCK: tl.constexpr):
    row, n = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.sum(tl.load(parts_ptr + row * N + n, mask=n < N, other=0.0), axis=0)
    store_score(y_ptr, sums_ptr, row, total, scale, TRAINING)


@triton.jit
def gradient_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    sums_ptr,
    dx_ptr,
    dw_ptr,
    R,
    N,
    scale,
    stride,
    stride_r,
    stride_n,
    NEED_X: tl.constexpr,
    NEED_W: tl.constexpr,
    ADD_W: tl.constexpr,
    TF32: tl.constexpr,
    BLOCK: tl.constexpr,
):
    n, row = tl.program_id(0), tl.arange(0, BLOCK)
    inside = row < R
    slope = 2 * scale * tl.load(sums_ptr + row, mask=inside, other=0.0)
    slope *= tl.load(dy_ptr + row * stride, mask=inside, other=0.0)
    if NEED_X:
        tl.store(
            dx_ptr + row * stride_r + n * stride_n,
            slope * rounded(tl.load(w_ptr + n), TF32),
            mask=inside,
        )
    if NEED_W:
        x = rounded(tl.load(x_ptr + row * N + n, mask=inside, other=0.0), TF32)
        dw = tl.sum(x * slope, axis=0)
        tl.store(dw_ptr + n, tl.load(dw_ptr + n) + dw if ADD_W else dw)


TOY = Operator(
    "toy",
    ToyTensors,
    ToyOptions,
    ToySaved,
    results=("y", "sums"),
    outputs=outputs,
    gradients={"x": like_x, "w": "w"},
    plans=lambda: SimpleNamespace(forward=forward, backward=backward),
    tiled=SimpleNamespace(forward=tiled_forward, backward=tiled_backward),
    reference=reference,
    reads=reads,
    choose=choose,
)
OPERATORS[TOY.name] = TOY


def repeated(way: str, launches: int) -> RepeatedCall:
    """A call of the toy, which stands for all operators in what their common base does."""
    sample = Sample("toy", toy, ((5, 16), (16,)), {"way": way})
    return RepeatedCall(sample, (launches,), ({}, {"scale": 0.5}, {"scale": 1}))


TOY_CALLS = {
    "the toy": repeated("one launch", 2),
    "the toy, two launches": repeated("two launches", 3),
    "the toy, torch between": repeated("torch between", 3),
}
TOY_IN_INTERPRETER = ("the toy, two launches",)
