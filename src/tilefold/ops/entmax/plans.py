"""Launch plans of alpha-entmax and its gradient, for rows of these layouts, and their
configurations.
"""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared.entmax_root import kernel_kind, tolerance
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.plan import (
    Buffer,
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

# Rows in registers are held whole: several in a program of 256 entries, and 8 to 16 entries a
# thread of 16 warps.
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


def rows_config(n: int, gradient: bool = False) -> dict[str, int]:
    """Tile of rows of ``n`` entries, of the forward kernel or of that of the gradient; resident
    ones are read once.
    """
    config = lookup(CONFIGS, n=n, gradient=gradient)
    if not config["RESIDENT"]:
        return config
    block = power_of_two(n)
    rows, warps = max(1, 256 // block), max(4, min(16, block // 256))
    return {"BLOCK_R": rows, "BLOCK_N": block, "RESIDENT": True, "num_warps": warps}


def forward(
    tensors: EntmaxTensors,
    options: EntmaxOptions,
    training: bool,
    setting: Setting,
) -> Plan:
    """Probabilities and support sizes."""
    x, alpha = tensors
    check_interpreted(setting, x.dtype)
    if x.numel() == 0:
        return Plan(fills={"support": 0})
    constants = rows_config(x.size(1)) | {"TOLERANCE": tolerance(x.dtype)}
    rows = _launch(_forward_kernel, "x alpha p support", x, alpha, options, constants)
    return Plan((*contiguous(x=x, alpha=alpha), rows))


def backward(
    dp: Tensor,
    saved: EntmaxSaved,
    options: EntmaxOptions,
    needs: tuple[bool, ...],
    setting: Setting,
) -> Plan:
    """The gradients of rows, and of alpha, which is computed in fp32."""
    p, alpha = saved
    if p.numel() == 0:
        return Plan(fills={"dalpha": 0})
    constants = rows_config(p.size(1), gradient=True) | {"NEED_X": needs[0], "NEED_ALPHA": needs[1]}
    copies = contiguous(dp=dp, p=p, alpha=alpha)
    if alpha is None or alpha.dtype == torch.float32 or not needs[1]:
        return Plan(
            (
                *copies,
                _launch(_backward_kernel, "dp p alpha dx dalpha", p, alpha, options, constants),
            ),
        )
    rows = _launch(_backward_kernel, "dp p alpha dx wide", p, alpha, options, constants)
    rounded = TorchStep("dalpha", methodcaller("to", alpha.dtype), "wide")
    return Plan((*copies, rows, rounded), {"wide": Buffer((p.size(0),), torch.float32)})


def _launch(
    kernel: Any,
    names: str,
    x: Tensor,
    alpha: Tensor | None,
    options: EntmaxOptions,
    constants: dict[str, Any],
) -> Launch:
    form = {
        "KIND": kernel_kind(x.dtype, alpha, options.alpha_value),
        "HAS_ALPHA": alpha is not None,
    }
    grid = cdiv(x.size(0), constants["BLOCK_R"]), 1, 1
    return Launch(kernel, grid, names, (*x.shape, *options), constants | form)
