"""Products of rows by the library that is the fastest for many rows, and rows that are padded."""

from __future__ import annotations

import torch
from torch import Tensor

from tilefold.ops._shared.internals import (
    can_use_onednn_linear,
    has_onednn_linear,
    onednn_linear,
)

__all__ = ["align", "is_aligned", "multiply_rows", "pad_rows", "refuse_probe_in_capture"]

# Libraries also choose kernels by whether operands begin at multiples of a number of bytes. This
# number is enough for all of them.
_ALIGNMENT = 64


def multiply_rows(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute one product by the library that is the fastest for many rows.

    Args:
        rows: ``[size, K]``.
        weight: ``[N, K]``.
        bias: ``[N]`` or None.
        out: ``[size, N]``, contiguous; by default a new tensor.

    Returns:
        The product ``[size, N]``; ``out`` if it is not None.
    """
    is_on_cpu = rows.device.type == "cpu"
    if is_on_cpu and can_use_onednn_linear(rows, weight, bias) and has_onednn_linear():
        product = onednn_linear(rows, weight, bias)
        return product if out is None else out.copy_(product)
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor begins at a multiple of 64 bytes."""
    return tensor.data_ptr() % _ALIGNMENT == 0


def align(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor that begins at a multiple of 64 bytes.

    Tensors of their own memory do so. Parts of others may not, and weights that are mapped from a
    file. They are copied.

    Args:
        tensor: any tensor.
    """
    if tensor.is_contiguous() and is_aligned(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def pad_rows(rows: Tensor, size: int) -> Tensor:
    """Return rows ``[n, K]`` with zeros after them, ``[size, K]``, contiguous and aligned."""
    if rows.size(0) == size:
        return align(rows)
    padded = rows.new_zeros(size, rows.size(1))
    padded[: rows.size(0)] = rows
    return padded


def refuse_probe_in_capture(device: torch.device, operation: str) -> None:
    """Raise ``RuntimeError`` during the capture of a CUDA graph.

    A probe reads the results of products, which do not exist during a capture.

    Args:
        device: the device of the probe.
        operation: description of the first operation of its kind, for the error.
    """
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        is_capturing = torch.cuda.is_current_stream_capturing()
    if is_capturing:
        raise RuntimeError(
            "numbers of rows must be compared before a CUDA graph is captured, got the first "
            f"{operation} in a capture; call it once before the capture.",
        )
