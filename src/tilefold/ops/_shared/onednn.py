"""fp32 products on the CPU by oneDNN, which makes a kernel for each number of rows; times:
docs/performance.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tilefold.ops._shared.internals import (
    has_onednn_linear,
    onednn_linear,
    onednn_packed,
    takes_onednn_linear,
)

FEWEST_ROWS = 256


def serves(rows: Tensor, count: int, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether oneDNN computes ``rows @ weight.T + bias`` faster than torch, without a gradient.

    Args:
        rows: ``[.., K]``, or a tensor of the same dtype, device and last dimension.
        count: rows of one product.
        weight: ``[N, K]``.
        bias: ``[N]``, or what else ``torch.nn.functional.linear`` accepts.
    """
    return (
        count >= FEWEST_ROWS
        and takes_onednn_linear(rows, weight, bias)
        and bool(getattr(torch.backends.mkldnn, "enabled", True))
        and has_onednn_linear()
    )


def tile_product(like: Tensor, count: int, weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Function for repeated products of at most ``count`` rows and ``weight.T``, or None where
    torch does as well.
    """
    if _mkl_is_at_home() or not serves(like, count, weight):
        return None
    packed = onednn_packed(weight, count)
    return lambda rows: onednn_linear(rows, packed, None)


@functools.cache
def _mkl_is_at_home() -> bool:
    """Whether this is a CPU of Intel, where MKL into memory that was written before is an eighth
    faster.
    """
    try:
        intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return intel and bool(torch.backends.mkl.is_available())  # type: ignore[no-untyped-call]
