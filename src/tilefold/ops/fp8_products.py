"""Products of matrices that are rounded to fp8 with a scale for each row."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tilefold.ops._shared.internals import scaled_fp8_products

__all__ = ["SIZE_STEP", "check_fp8_device", "fp8_products"]

# The first compute capability whose tensor cores multiply fp8.
_CAPABILITY = (8, 9)
# Torch's scaled products need sizes that are multiples of this number.
SIZE_STEP = 16


def check_fp8_device(device: torch.device) -> None:
    """Raise an error unless :func:`fp8_products` runs on a device.

    Args:
        device: a GPU, or a CPU, which multiplies the rounded operands in fp32.

    Raises:
        ValueError: if the device is a GPU below compute capability 8.9, or another device.
    """
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise ValueError(
            f"fp8 needs a GPU of compute capability 8.9 or higher, or a CPU, got {device}; leave "
            "fp8 out.",
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise ValueError(
            "fp8 needs a GPU of compute capability 8.9 or higher, got "
            f"{capability[0]}.{capability[1]} ({name}); leave fp8 out.",
        )


@functools.cache
def _check_once(device: torch.device) -> None:
    """Run :func:`check_fp8_device`, which takes as long as a launch, once for each device."""
    check_fp8_device(device)


def fp8_products(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute ``(rows * row_scale) @ (weight * weight_scale).T + bias``, without a gradient.

    Products accumulate in fp32. A GPU multiplies in fp8, and rounds the result to bf16. A CPU
    multiplies the same values in fp32.

    Args:
        rows: ``[N, K]`` in ``torch.float8_e4m3fn``.
        row_scale: fp32 ``[N]``, a factor of each row.
        weight: ``[M, K]`` in ``torch.float8_e4m3fn``. K and M are multiples of 16.
        weight_scale: fp32 ``[M]``.
        bias: ``[M]``, in any float dtype.

    Returns:
        ``[N, M]``: bf16 on a GPU, and fp32 on a CPU, or if there are no rows.

    Raises:
        ValueError: if the device cannot multiply fp8 (a GPU below compute capability 8.9), or a
            size is no multiple of 16.

    Examples:
        >>> import torch
        >>> rows = torch.ones(2, 32).to(torch.float8_e4m3fn)
        >>> weight = torch.ones(16, 32).to(torch.float8_e4m3fn)
        >>> fp8_products(rows, torch.ones(2), weight, torch.full((16,), 0.5))[0, 0]
        tensor(16.)
    """
    if torch.compiler.is_compiling():  # torch.compile ignores the cache of `_check_once`
        check_fp8_device(weight.device)
    else:
        _check_once(weight.device)
    if weight.size(0) % SIZE_STEP or weight.size(1) % SIZE_STEP:
        raise ValueError(
            f"weight must have sizes that are multiples of {SIZE_STEP}, got {list(weight.shape)}; "
            "compute this layer in 16 bits.",
        )
    with torch.no_grad():
        has_rows = rows.size(0) > 0  # torch's product of fp8 needs at least one row
        if rows.device.type == "cpu" or not has_rows:
            products = rows.float() @ weight.float().T
            products = products * row_scale[:, None] * weight_scale
            return products if bias is None else products + bias.float()
        return scaled_fp8_products(
            rows,
            row_scale,
            weight,
            weight_scale,
            None if bias is None else bias.to(torch.bfloat16),
        )
