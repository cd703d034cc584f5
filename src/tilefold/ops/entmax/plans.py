"""Launch plans of alpha-entmax and its gradient, for rows of these layouts."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.tensors import cdiv
from tilefold.ops._shared.entmax_root import kernel_kind, tolerance
from tilefold.ops._shared.impl import check_interpreted
from tilefold.ops._shared.plan import Buffer, Launch, Plan, Setting, TorchStep, contiguous
from tilefold.ops.entmax._problem import EntmaxOptions, EntmaxSaved, EntmaxTensors
from tilefold.ops.entmax._triton.rows import _backward_kernel, _forward_kernel
from tilefold.ops.entmax.configs import RowsConfig, rows_config


def forward(tensors: EntmaxTensors, options: EntmaxOptions, training: bool, setting: Setting) -> Plan:
    """Probabilities and support sizes."""
    x, alpha = tensors
    if setting.capability == (0, 0):
        check_interpreted("triton", torch.device("cpu"), x.dtype)
    if x.numel() == 0:
        return Plan(fills={"support": 0})
    config = rows_config(x.size(1))
    constants = _constants(x, alpha, options, config) | {"TOLERANCE": tolerance(x.dtype)}
    rows = _launch(_forward_kernel, "x alpha p support", x, options, config, constants)
    return Plan((*contiguous(x=x, alpha=alpha), rows))


def backward(dp: Tensor, saved: EntmaxSaved, options: EntmaxOptions, needs: tuple[bool, ...], setting: Setting) -> Plan:
    """The gradients of rows, and of alpha, which is computed in fp32."""
    p, alpha = saved
    if p.numel() == 0:
        return Plan(fills={"dalpha": 0})
    config = rows_config(p.size(1), gradient=True)
    constants = _constants(p, alpha, options, config) | {"NEED_X": needs[0], "NEED_ALPHA": needs[1]}
    copies = contiguous(dp=dp, p=p, alpha=alpha)
    if alpha is None or alpha.dtype == torch.float32 or not needs[1]:
        return Plan((*copies, _launch(_backward_kernel, "dp p alpha dx dalpha", p, options, config, constants)))
    rows = _launch(_backward_kernel, "dp p alpha dx wide", p, options, config, constants)
    rounded = TorchStep("dalpha", methodcaller("to", alpha.dtype), "wide")
    return Plan((*copies, rows, rounded), {"wide": Buffer((p.size(0),), torch.float32)})


def _constants(x: Tensor, alpha: Tensor | None, options: EntmaxOptions, config: RowsConfig) -> dict[str, Any]:
    return {
        "BLOCK_R": config.block_r, "BLOCK_N": config.block_n,
        "KIND": kernel_kind(x.dtype, alpha, options.alpha_value), "HAS_ALPHA": alpha is not None,
        "RESIDENT": config.resident, "num_warps": config.num_warps,
    }  # fmt: skip


def _launch(
    kernel: Any, names: str, x: Tensor, options: EntmaxOptions, config: RowsConfig, constants: dict[str, Any]
) -> Launch:
    return Launch(kernel, (cdiv(x.size(0), config.block_r), 1, 1), names, (*x.shape, *options), constants)
