"""The dtype to which torch's autocast casts the operands of a product."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast_dtype(*operands: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast casts operands, or ``None`` if it casts nothing.

    Torch's own products cast their operands under autocast. Kernels that are called directly do
    not: they read the memory of an operand in the dtype of another one.

    Args:
        operands: the operands, on one device. Autocast leaves fp64 as it is.
    """
    device_type = operands[0].device.type
    if device_type == "meta":  # torch has no autocast state for it
        return None
    if any(operand.dtype == torch.float64 for operand in operands):
        return None
    if not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
