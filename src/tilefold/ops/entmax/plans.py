"""Launch plans of alpha-entmax and its gradient, and their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import kernel_formula, tolerance
from tilefold.ops._shared.impl import check_interpreter_dtypes
from tilefold.ops._shared.plan import (
    Constants,
    Plan,
    PlanBuilder,
    Setting,
    cdiv,
    power_of_two,
)
from tilefold.ops._shared.tuning import Between, ConfigRow, lookup
from tilefold.ops.entmax._problem import EntmaxOptions, EntmaxSaved, EntmaxTensors
from tilefold.ops.entmax._triton.rows import _backward_kernel, _forward_kernel

# Configurations by the length n of a row. A RESIDENT row is read once and stays in registers.
CONFIGS = (
    ConfigRow({}, {"BLOCK_R": 1, "BLOCK_N": 4096, "RESIDENT": False, "num_warps": 16}, "H200"),
    ConfigRow(
        {"n": Between(most=4096), "gradient": False},
        {"RESIDENT": True},
        "compiled: 8 values a thread, no spills",
    ),
    ConfigRow(
        {"n": Between(most=2048), "gradient": True},
        {"RESIDENT": True},
        "compiled: twice the sums, two operands",
    ),
)

# Entries that one program computes at least, if rows are shorter than that.
PROGRAM_ENTRIES = 256
# Warps of a program for a resident row: one for each 256 entries, within these bounds.
WARP_ENTRIES = 256
MIN_WARPS = 4
MAX_WARPS = 16


def rows_config(n: int, gradient: bool = False) -> Constants:
    """Return the configuration of a kernel for rows of ``n`` entries.

    A row that fits in registers is one block, whose width is the next power of two. One program
    computes several short rows.

    Args:
        n: number of entries of a row.
        gradient: True for the backward kernel, False for the forward kernel.

    Returns:
        Compile-time constants: rows of a program ``BLOCK_R``, entries of a block ``BLOCK_N``,
        whether a row is one block ``RESIDENT``, and ``num_warps``.
    """
    config = lookup(CONFIGS, n=n, gradient=gradient)
    if not config["RESIDENT"]:
        return config
    width = power_of_two(n)
    return {
        "BLOCK_R": max(1, PROGRAM_ENTRIES // width),
        "BLOCK_N": width,
        "RESIDENT": True,
        "num_warps": max(MIN_WARPS, min(MAX_WARPS, width // WARP_ENTRIES)),
    }


def forward(
    tensors: EntmaxTensors,
    options: EntmaxOptions,
    training: bool,
    setting: Setting,
) -> Plan:
    """Plan the forward pass: one kernel that writes probabilities ``p`` and support sizes.

    Args:
        tensors: ``[R, n]`` scores, and ``[R]`` alphas or ``None``.
        options: checked options.
        training: ignored; what backward reads is always computed.
        setting: facts about the device.
    """
    x, alpha = tensors
    check_interpreter_dtypes(setting, x.dtype)
    if x.numel() == 0:
        return Plan(fills={"support": 0})
    builder = PlanBuilder()
    builder.make_contiguous({"x": x, "alpha": alpha})
    _add_row_launch(
        builder,
        _forward_kernel,
        x,
        alpha,
        options,
        constants={**rows_config(x.size(1)), "TOLERANCE": tolerance(x.dtype)},
        tensors={"out_ptr": "p"},
    )
    return builder.build()


def backward(
    dp: Tensor,
    saved: EntmaxSaved,
    options: EntmaxOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """Plan the backward pass: one kernel that writes the gradients of rows and of alpha.

    The kernel computes the gradient of alpha in fp32. It is then cast to the dtype of alpha.

    Args:
        dp: ``[R, n]`` gradient of the probabilities.
        saved: ``[R, n]`` probabilities, and ``[R]`` alphas or ``None``.
        options: checked options.
        needs: whether the gradients of the rows and of alpha are needed.
        setting: ignored; the configuration depends only on the length of a row.
    """
    p, alpha = saved
    need_x, need_alpha = needs
    if p.numel() == 0:
        return Plan(fills={"dalpha": 0})
    builder = PlanBuilder()
    builder.make_contiguous({"dp": dp, "p": p, "alpha": alpha})
    dalpha_dtype = torch.float32 if alpha is None else alpha.dtype
    must_cast_dalpha = need_alpha and dalpha_dtype != torch.float32
    dalpha_fp32 = "dalpha"
    if must_cast_dalpha:
        dalpha_fp32 = builder.add_buffer("dalpha_fp32", (p.size(0),))
    _add_row_launch(
        builder,
        _backward_kernel,
        p,
        alpha,
        options,
        constants={
            **rows_config(p.size(1), gradient=True),
            "NEED_X": need_x,
            "NEED_ALPHA": need_alpha,
        },
        tensors={"dalpha_ptr": dalpha_fp32},
    )
    if must_cast_dalpha:
        builder.add_torch_step(methodcaller("to", dalpha_dtype), [dalpha_fp32], output="dalpha")
    return builder.build()


def _add_row_launch(
    builder: PlanBuilder,
    kernel: Any,
    x: Tensor,
    alpha: Tensor | None,
    options: EntmaxOptions,
    *,
    constants: Constants,
    tensors: Mapping[str, str],
) -> None:
    """Add the launch of a kernel in which each program computes ``BLOCK_R`` rows.

    Args:
        builder: the plan so far.
        kernel: the ``triton.jit`` function.
        x: layout of the ``[R, n]`` rows.
        alpha: layout of the ``[R]`` alphas, or ``None``.
        options: checked options.
        constants: compile-time constants of this kernel. Those of both kernels are added.
        tensors: kernel parameter -> name of the tensor that it gets, if the names differ.
    """
    n_rows, row_length = x.shape
    builder.add_launch(
        kernel,
        grid=(cdiv(n_rows, constants["BLOCK_R"]),),
        parameters={
            **constants,
            "R": n_rows,
            "n": row_length,
            "alpha_value": options.alpha_value,
            "KIND": kernel_formula(x.dtype, alpha, options.alpha_value),
            "HAS_ALPHA": alpha is not None,
        },
        tensors=tensors,
    )
