"""Launch plans of alpha-entmax and its gradient, and their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import kernel_kind, tolerance
from tilefold.ops._shared.impl import check_interpreted
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

# Configurations by the length n of a row. RESIDENT rows are in registers and are read once.
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


# Entries of a program for short resident rows, and of a warp.
PROGRAM_ENTRIES = 256
WARP_ENTRIES = 256


def rows_config(n: int, gradient: bool = False) -> Constants:
    """Return the configuration of a kernel for rows of ``n`` entries.

    A row that fits in registers is one block, whose width is the next power of two. Programs for
    short rows compute several of them.

    Args:
        n: entries of a row.
        gradient: whether the kernel is that of the gradient.

    Returns:
        Rows of a program ``BLOCK_R``, entries of a block ``BLOCK_N``, whether a row is one block
        (``RESIDENT``), and ``num_warps``.
    """
    config = lookup(CONFIGS, n=n, gradient=gradient)
    if not config["RESIDENT"]:
        return config
    block = power_of_two(n)
    return {
        "BLOCK_R": max(1, PROGRAM_ENTRIES // block),
        "BLOCK_N": block,
        "RESIDENT": True,
        "num_warps": max(4, min(16, block // WARP_ENTRIES)),
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
        training: unused, since the results that backward reads are always computed.
        setting: the device.
    """
    x, alpha = tensors
    check_interpreted(setting, x.dtype)
    if x.numel() == 0:
        return Plan(fills={"support": 0})
    builder = PlanBuilder()
    builder.make_contiguous({"x": x, "alpha": alpha})
    _add_launch(
        builder,
        _forward_kernel,
        x,
        alpha,
        options,
        {**rows_config(x.size(1)), "TOLERANCE": tolerance(x.dtype)},
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

    The kernel computes the gradient of alpha in fp32. Another dtype takes a cast after it.

    Args:
        dp: ``[R, n]`` gradient of the probabilities.
        saved: ``[R, n]`` probabilities, and ``[R]`` alphas or ``None``.
        options: checked options.
        needs: whether the gradients of the rows and of alpha are needed.
        setting: unused, since the configuration depends only on the length of a row.
    """
    p, alpha = saved
    need_x, need_alpha = needs
    if p.numel() == 0:
        return Plan(fills={"dalpha": 0})
    builder = PlanBuilder()
    builder.make_contiguous({"dp": dp, "p": p, "alpha": alpha})
    # The kernel computes the gradient of alpha in fp32, and torch casts it to another dtype.
    cast_to = None
    dalpha = "dalpha"
    if need_alpha and alpha is not None and alpha.dtype != torch.float32:
        cast_to = alpha.dtype
        dalpha = builder.add_buffer("dalpha_fp32", (p.size(0),))
    _add_launch(
        builder,
        _backward_kernel,
        p,
        alpha,
        options,
        {
            **rows_config(p.size(1), gradient=True),
            "NEED_X": need_x,
            "NEED_ALPHA": need_alpha,
        },
        tensors={"dalpha_ptr": dalpha},
    )
    if cast_to is not None:
        builder.add_torch_step(methodcaller("to", cast_to), [dalpha], output="dalpha")
    return builder.build()


def _add_launch(
    builder: PlanBuilder,
    kernel: Any,
    x: Tensor,
    alpha: Tensor | None,
    options: EntmaxOptions,
    parameters: Constants,
    tensors: Mapping[str, str],
) -> None:
    """Add the launch of a kernel over rows.

    Args:
        builder: the plan so far.
        kernel: the ``triton.jit`` function.
        x: layout of the ``[R, n]`` rows.
        alpha: layout of the ``[R]`` alphas, or ``None``.
        options: checked options.
        parameters: constants that depend on the kernel.
        tensors: names of tensors by the names of the kernel's parameters.
    """
    n_rows, row_length = x.shape
    builder.add_launch(
        kernel,
        grid=(cdiv(n_rows, parameters["BLOCK_R"]),),
        parameters={
            **parameters,
            "R": n_rows,
            "n": row_length,
            "alpha_value": options.alpha_value,
            "KIND": kernel_kind(x.dtype, alpha, options.alpha_value),
            "HAS_ALPHA": alpha is not None,
        },
        tensors=tensors,
    )
