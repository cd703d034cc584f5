"""A decoder weight to fp8 in one pass: what it costs to read it and to write half of it, or less."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared._triton.launch import launch
from tilefold.ops._shared._triton.tensors import cdiv
from tilefold.ops.lsr_head._triton.quantize import BLOCK_ROWS, _quantize_rows_kernel, row_constants


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """``[N, D]`` to values in fp8 and ``[N]`` fp32 scales, on the current device."""
    count, dim = rows.shape
    values = torch.empty(count, dim, dtype=torch.float8_e4m3fn, device=rows.device)
    scale = torch.empty(count, dtype=torch.float32, device=rows.device)
    if count:
        grid = (cdiv(count, BLOCK_ROWS), 1, 1)
        launch(_quantize_rows_kernel, grid, (rows.contiguous(), values, scale, count), row_constants(dim))
    return values, scale
