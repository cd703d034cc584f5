"""The launchers of the kernels that go over rows once: norms and quantization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import Grid, launch
from tilefold.ops.maxsim._triton.norms import inverse_norm_kernel, quantize_kernel

BLOCK_ROWS, BLOCK_COLUMNS = 16, 128


def cdiv(a: int, b: int) -> int:
    """``ceil(a / b)``; Triton's own costs microseconds a call on the host."""
    return -(-a // b)


def rows_grid(rows: Tensor) -> Grid:
    """The grid of a kernel that goes over rows once."""
    return cdiv(rows.size(0), BLOCK_ROWS), 1, 1


def rows_constants(rows: Tensor) -> dict[str, Any]:
    """The constants of a kernel that goes over rows once."""
    return {"D": rows.size(1), "BLOCK_R": BLOCK_ROWS, "BLOCK_D": BLOCK_COLUMNS, "num_warps": 4, "num_stages": 3}


def inverse_norms(rows: Tensor) -> Tensor:
    """``[T]`` fp32, by which rows of norm 1 are made."""
    scale = torch.empty(rows.size(0), dtype=torch.float32, device=rows.device)
    launch(inverse_norm_kernel, rows_grid(rows), (rows, scale, rows.size(0)), rows_constants(rows))
    return scale


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in int8 and their scales ``[T]``."""
    rows = rows.contiguous()
    values = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    scales = torch.empty(rows.size(0), dtype=torch.float32, device=rows.device)
    launch(quantize_kernel, rows_grid(rows), (rows, values, scales, rows.size(0)), rows_constants(rows))
    return values, scales
