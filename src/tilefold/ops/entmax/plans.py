"""Launch plans of alpha-entmax and its gradient, and their configurations."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import kernel_kind, tolerance
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.plan import (
    Buffer,
    Constants,
    Launch,
    Plan,
    Setting,
    TorchStep,
    cdiv,
    contiguous,
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
    constants = rows_config(x.size(1))
    constants["TOLERANCE"] = tolerance(x.dtype)
    launch = _launch(_forward_kernel, "x alpha p support", x, alpha, options, constants)
    return Plan((*contiguous(x=x, alpha=alpha), launch))


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
    constants = rows_config(p.size(1), gradient=True)
    constants["NEED_X"] = need_x
    constants["NEED_ALPHA"] = need_alpha
    copies = contiguous(dp=dp, p=p, alpha=alpha)
    if alpha is None or alpha.dtype == torch.float32 or not need_alpha:  # no cast
        tensors = "dp p alpha dx dalpha"
        return Plan((*copies, _launch(_backward_kernel, tensors, p, alpha, options, constants)))
    tensors = "dp p alpha dx wide_dalpha"  # fp32
    launch = _launch(_backward_kernel, tensors, p, alpha, options, constants)
    cast = TorchStep("dalpha", methodcaller("to", alpha.dtype), "wide_dalpha")
    return Plan(
        (*copies, launch, cast),
        {"wide_dalpha": Buffer((p.size(0),), torch.float32)},
    )


def _launch(
    kernel: Any,
    tensors: str,
    x: Tensor,
    alpha: Tensor | None,
    options: EntmaxOptions,
    constants: Constants,
) -> Launch:
    """Describe the launch of a kernel over rows.

    Args:
        kernel: the ``triton.jit`` function.
        tensors: names of its tensors, separated by spaces.
        x: ``[R, n]`` rows.
        alpha: ``[R]`` alpha of each row, or ``None``.
        options: checked options.
        constants: constants that depend on the kernel.
    """
    n_rows, row_length = x.shape
    return Launch(
        kernel,
        grid=(cdiv(n_rows, constants["BLOCK_R"]), 1, 1),
        tensors=tensors,
        numbers=(n_rows, row_length, options.alpha_value),
        constants={
            **constants,
            "KIND": kernel_kind(x.dtype, alpha, options.alpha_value),
            "HAS_ALPHA": alpha is not None,
        },
    )
