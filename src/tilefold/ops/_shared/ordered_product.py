"""Products of a few fp32 rows on a GPU, whose bits do not depend on the number of rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilefold.ops._shared._triton import releases
from tilefold.ops._shared.calls import ALIGNMENT, call_on_device
from tilefold.ops._shared.fallback import KernelUnavailableError
from tilefold.ops._shared.impl import takes_kernels

if TYPE_CHECKING:
    from tilefold.ops._shared._triton.program import Program

# The kernel reads this number of inputs in a step.
STEP = 64


def can_order_products(dtype: torch.dtype, device: torch.device, n_inputs: int) -> bool:
    """Return whether :func:`ordered_product` supports operands.

    Args:
        dtype: their dtype.
        device: their device.
        n_inputs: their number K of columns.
    """
    is_supported = dtype == torch.float32 and n_inputs > 0 and n_inputs % STEP == 0
    return is_supported and takes_kernels(device)


def ordered_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``rows @ weight.T + bias`` in fp32, adding the terms of a sum in the order of K.

    Args:
        rows: ``[M, K]``, contiguous, with M from 1 to 1,048,560 and fewer than 2^31 elements.
        weight: ``[N, K]``, contiguous, with N > 0.
        bias: ``[N]``, contiguous, or None.

    Returns:
        ``[M, N]``.

    Raises:
        KernelUnavailableError: if the kernel cannot be built.
    """
    operands = (rows, weight, bias)
    is_aligned = all(x is None or x.data_ptr() % ALIGNMENT == 0 for x in operands)
    program = _program_of(
        rows.size(0),
        weight.size(0),
        weight.size(1),
        bias is not None,
        is_aligned,
        rows.device,
    )
    product: Tensor
    (product,) = call_on_device(rows.device, program, *operands)
    return product


@functools.lru_cache(maxsize=4096)
def _program_of(
    n_rows: int,
    n_outputs: int,
    n_inputs: int,
    has_bias: bool,
    is_aligned: bool,
    device: torch.device,
) -> Program:
    """Return the program that multiplies operands of a shape, the same for each call.

    Args:
        n_rows: rows M of the first operand.
        n_outputs: rows N of the weight.
        n_inputs: columns K of both.
        has_bias: whether a bias is added.
        is_aligned: whether all operands begin at multiples of 16 bytes.
        device: the device of the operands.

    Raises:
        KernelUnavailableError: if Triton cannot build the kernel.
    """
    reason = releases.why_no_async_loads()
    if reason is not None:
        raise KernelUnavailableError("ordered_product_kernel", reason)
    from tilefold.ops._shared._triton.ordered_product import make_program  # needs Gluon

    return make_program(n_rows, n_outputs, n_inputs, has_bias, is_aligned, device)
